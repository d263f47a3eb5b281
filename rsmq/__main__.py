"""`python -m rsmq` is the command `rsmq`."""

import os
import signal
import sys
from importlib import import_module


def main() -> None:
    """Run the command. While it still loads its modules, Ctrl-C ends it at once and without a traceback."""
    on_interrupt = signal.getsignal(signal.SIGINT)
    if on_interrupt is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if import_module("rsmq.cli.quick").answered(sys.argv[1:], os.environ):
        return
    cli = import_module("rsmq.cli.app")
    if on_interrupt is signal.default_int_handler:
        signal.signal(signal.SIGINT, on_interrupt)
    cli.main()


if __name__ == "__main__":  # a process handler imports this module in its process
    main()
