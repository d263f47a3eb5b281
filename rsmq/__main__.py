"""`python -m rsmq` is the command `rsmq`."""

import os
import signal
import sys
from importlib import import_module

SERVE = ("worker", "gateway", "exporter", "dashboard", "server")
"""Commands that a container runs as its first process."""


def main() -> None:
    """Run the command. While it still loads its modules, Ctrl-C ends it at once and without a traceback."""
    if os.getpid() == 1 and sys.argv[1:2] and sys.argv[1] in SERVE:
        import_module("rsmq.cli.first_process").be_child_of_init()
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
