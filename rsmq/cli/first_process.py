"""What a container demands of its first process: it passes signals on, and takes the ends of orphans.

The kernel sends process 1 no signal that it does not handle, and makes it the parent of every process whose own parent
has ended. If it does not wait for them, they stay as zombies until no process can be started any more. Python
cannot do that beside `subprocess`, which waits for its own children. So process 1 goes on as a child of itself.
"""

from __future__ import annotations

import os
import signal
from typing import Final

FORWARDED: Final = (
    signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2
)  # fmt: skip


def be_child_of_init() -> None:
    """Return in a child of this process, which itself stays behind as its init and ends as the child does.

    The child has a session of its own: Ctrl-C in a terminal reaches it once, passed on, and not directly, too.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)  # a signal that comes too early waits
    child = os.fork()
    if not child:
        os.setsid()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        return
    for number in FORWARDED:
        signal.signal(number, lambda number, _frame: os.kill(child, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    while True:
        ended, status = os.wait()
        if ended == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)
