"""The process of a handler: it ends with the worker that made it, however that ends, and leaves signals to it.

Ctrl-C in a terminal, `kill` of a process group and a service manager that signals all processes of a service reach the
handler's process, too. It would end in the middle of a message, which counts as a failed attempt. The worker gets the
signal as well: it lets the handler finish, and ends its process.

It talks to the worker over a socket, which it gets as standard input and moves at once to where no program that the
handler starts finds it. So a handler may print and run programs: its standard output and error are the worker's, and
its standard input is empty.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import pickle
import runpy
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

from rsmq.handler.carried import Carried, carrying

LEFT_TO_THE_WORKER: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
PR_SET_PDEATHSIG: Final = 1
LOOK_EVERY: Final = 1.0
"""Seconds between two looks whether the worker is there, where the kernel does not tell."""
LENGTH: Final = struct.Struct(">Q")
"""What stands before each message on the socket."""
FIRST_FREE: Final = 3
"""The first number of a file that is not a standard stream."""
COMMAND: Final = (
    "import sys; sys.path[:] = sys.argv[1].split(chr(0xa)); import rsmq.handler.child_process as p; p.serve()"
)
"""What the worker has Python run. The argument is its `sys.path`: rsmq itself may be in a folder of the application."""


def serve() -> None:
    """Call functions for the worker until it closes the socket."""
    link = own_link()
    commands = link.makefile("rb")
    try:
        worker, main, arguments = pickle.load(commands)
        belong_to(worker)
        sys.argv[:] = arguments
        program = Program(*main)
        send(link, answer_of(program.begin))
        while commands.peek(1):
            send(link, answer_of(call_next, commands, program))
            flush()
    except (EOFError, ConnectionError):  # the worker has ended
        return


def own_link() -> socket.socket:
    """The socket to the worker, moved away from standard input. No process that this one starts has it."""
    link = socket.socket(fileno=fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, FIRST_FREE))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    if nothing:
        os.close(nothing)

    def leave() -> None:
        if link.fileno() >= 0:
            os.close(link.detach())  # `close` would wait for the file that reads it

    # a fork that outlives this process would keep the socket open, and the worker would wait for an answer
    os.register_at_fork(after_in_child=leave)
    return link


def call_next(commands: Any, program: Program) -> Any:
    """Call what the worker asks for next. The module of the function is imported here, if it is not yet."""
    function, arguments = CallReader(commands, program).load()
    return carrying(function, *arguments)


def answer_of(function: Callable[..., Any], *arguments: Any) -> bytes:
    """Whether a function returns, and what it returns or raises, as the worker reads it."""
    try:
        return pickle.dumps((True, function(*arguments)), pickle.HIGHEST_PROTOCOL)
    except Carried as error:
        return pickle.dumps((False, error), pickle.HIGHEST_PROTOCOL)
    except BaseException as error:  # its module cannot be imported, or its result cannot be sent
        return pickle.dumps((False, Carried(error)), pickle.HIGHEST_PROTOCOL)


def send(link: socket.socket, data: bytes) -> None:
    """Write one message."""
    link.sendall(LENGTH.pack(len(data)) + data)


def flush() -> None:
    """Show what a handler has printed: the worker may end this process at any time."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # a stream that is closed or full is no error of a handler
            stream.flush()


class Program:
    """The main module of the worker's program, imported here under another name, as multiprocessing does: functions
    that are defined there are found, and what stands under its main guard does not run.

    `module`: its name, if the program was started by that (`python -m shop.worker`), so that it may import from its own
    package. A `__main__.py` of a package has no guard, often: it is imported only if something in it is asked for.
    """

    def __init__(self, module: str | None, path: str | None) -> None:
        self._module = module
        self._path = path
        self._is_later = module is not None and module.rpartition(".")[2] == "__main__"

    def begin(self) -> None:
        """Before the first call."""
        if self._is_later:
            sys.modules["__main__"] = ModuleType("__main__")
        else:
            self._load()

    def find(self) -> None:
        """Something in it is asked for."""
        if self._is_later:
            self._load()
            self._is_later = False

    def _load(self) -> None:
        sys.modules.pop("__main__", None)  # while it is missing no broker connects: see `refuse_handler_process`
        program = ModuleType("__mp_main__")
        if self._module not in (None, "__main__"):
            program.__dict__.update(runpy.run_module(str(self._module), run_name="__mp_main__", alter_sys=True))
        elif self._path is not None and os.path.isfile(self._path):
            program.__dict__.update(runpy.run_path(self._path, run_name="__mp_main__"))
        sys.modules["__main__"] = sys.modules["__mp_main__"] = program


class CallReader(pickle.Unpickler):
    """Reads what the worker asks for."""

    def __init__(self, commands: Any, program: Program) -> None:
        super().__init__(commands)
        self._program = program

    def find_class(self, module: str, name: str) -> Any:
        """A function or a class by its name."""
        if module == "__main__":
            self._program.find()
        return super().find_class(module, name)


def belong_to(worker: int) -> None:
    """Make this process one of the worker's. Main thread only."""
    # not SIG_IGN, which the programs that a handler starts would inherit: SIGTERM would not end them
    before = {number: signal.signal(number, lambda number, frame: None) for number in LEFT_TO_THE_WORKER}

    def take_back() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    # a fork is the handler's own: `Pool.terminate` of multiprocessing ends it with SIGTERM, and waits for that
    os.register_at_fork(after_in_child=take_back)
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != worker:
        os._exit(1)
    threading.Thread(target=_end_with, args=(worker,), name="rsmq-worker", daemon=True).start()


def _end_with(worker: int) -> None:
    while os.getppid() == worker:
        time.sleep(LOOK_EVERY)
    os._exit(1)
