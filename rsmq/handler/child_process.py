"""The process of a handler: it ends with the worker that made it, however that ends, and leaves signals to it.

Ctrl-C in a terminal, `kill` of a process group and a service manager that signals all processes of a service reach the
handler's process, too. It would end in the middle of a message, which counts as a failed attempt. The worker gets the
signal as well: it lets the handler finish, and ends its process.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from rsmq.handler.carried import carrying

LEFT_TO_THE_WORKER: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
PR_SET_PDEATHSIG: Final = 1
LOOK_EVERY: Final = 1.0
"""Seconds between two looks whether the worker is there, where the kernel does not tell."""

_workers = set[int]()


def call_for(worker: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in this process, for a worker. Its error is `Carried`."""
    belong_to(worker)
    return carrying(function, *arguments)


def belong_to(worker: int) -> None:
    """Make this process one of the worker's, at its first call. Main thread only."""
    if worker in _workers:
        return
    _workers.add(worker)
    for number in LEFT_TO_THE_WORKER:
        # not SIG_IGN, which the programs that a handler starts would inherit: SIGTERM would not end them
        signal.signal(number, lambda number, frame: None)
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != worker:
        os._exit(1)
    threading.Thread(target=_end_with, args=(worker,), name="rsmq-worker", daemon=True).start()


def _end_with(worker: int) -> None:
    while os.getppid() == worker:
        time.sleep(LOOK_EVERY)
    os._exit(1)
