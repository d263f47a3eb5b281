"""Threads of a simulated process: greenlets that run one at a time and wait on virtual time."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Callable
from typing import Any, Final

import greenlet

from tests.simulation.world import Entry, World

WORLD: list[World] = []
"""The world that is being played: the package makes threads and events without knowing of it."""


TICK: Final = 1e-6
"""The shortest wait, in seconds: a loop that waits for what is left of a span must not stand still in rounding."""


def deadline_after(seconds: float | None) -> float:
    """When a wait of so long is over."""
    if seconds is None:
        return float("inf")
    return world().now + (max(seconds, TICK) if seconds > 0 else 0.0)


def world() -> World:
    """The world that is being played."""
    return WORLD[0]


class Thread:
    """As `threading.Thread`."""

    _numbers = itertools.count(1)

    def __init__(
        self, group: None = None, target: Callable[..., Any] | None = None, name: str = "", args: Any = (),
        kwargs: Any = None, *, daemon: bool | None = None,
    ) -> None:  # fmt: skip
        self.name, self.daemon, self.ident = name, daemon, next(self._numbers)
        self._target, self._args, self._kwargs = target, args, kwargs or {}
        self._greenlet: greenlet.greenlet | None = None
        self._is_over = False
        self._joining: list[Thread] = []
        self._process: Any = None

    def start(self) -> None:
        """Run it from the process's next turn on."""
        self._process = world().current
        self._greenlet = greenlet.greenlet(self._main)
        self._process.runnable.append(self)

    def _main(self) -> None:
        try:
            self.run()
        finally:
            self._is_over = True
            for thread in self._joining:
                thread.wake()

    def run(self) -> None:
        """What it does."""
        assert self._target is not None
        self._target(*self._args, **self._kwargs)

    def is_alive(self) -> bool:
        """Whether it was started and has not ended."""
        return self._greenlet is not None and not self._is_over

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end."""
        if self._is_over:
            return
        waiting = current()
        self._joining.append(waiting)
        waiting.wait(timeout)

    # -- for the process and for what a thread waits for ------------------------------------------------------------

    def proceed(self) -> None:
        """Let it run until it waits."""
        assert self._greenlet is not None
        self._greenlet.parent = greenlet.getcurrent()
        loop = asyncio._get_running_loop()
        asyncio._set_running_loop(None)
        RUNNING.append(self)
        try:
            self._greenlet.switch()
        finally:
            RUNNING.pop()
            asyncio._set_running_loop(loop)

    def wait(self, seconds: float | None) -> None:
        """Wait until `wake`, or for so long."""
        self.wait_until(deadline_after(seconds))

    def wait_until(self, deadline: float) -> None:
        """Wait until `wake`, or until a moment."""
        timer: Entry | None = None if deadline == float("inf") else world().at(deadline, self.wake)
        assert self._greenlet is not None
        self._greenlet.parent.switch()
        if timer is not None:
            timer.cancel()

    def wake(self) -> None:
        """End its wait."""
        if self not in self._process.runnable:
            self._process.runnable.append(self)


RUNNING: list[Thread] = []


def current() -> Thread:
    """The thread that runs now."""
    assert RUNNING, "the event loop must not wait"
    return RUNNING[-1]


class Event:
    """As `threading.Event`."""

    def __init__(self) -> None:
        self._is_set = False
        self._waiting: list[Thread] = []

    def is_set(self) -> bool:
        """Whether it is set."""
        return self._is_set

    def set(self) -> None:
        """Set it, and wake every waiting thread."""
        self._is_set = True
        for thread in self._waiting:
            thread.wake()

    def clear(self) -> None:
        """Unset it."""
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set."""
        deadline, thread = deadline_after(timeout), current()
        self._waiting.append(thread)
        try:
            while not self._is_set and world().now < deadline:
                thread.wait_until(deadline)
        finally:
            self._waiting.remove(thread)
        return self._is_set


class Lock:
    """As `threading.Lock`."""

    def __init__(self) -> None:
        self._is_held = False
        self._waiting: list[Thread] = []

    def acquire(self) -> bool:
        """Wait for it and take it."""
        while self._is_held:
            thread = current()
            self._waiting.append(thread)
            thread.wait(None)
            self._waiting.remove(thread)
        self._is_held = True
        return True

    def release(self) -> None:
        """Give it back."""
        self._is_held = False
        for thread in self._waiting:
            thread.wake()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Timer(Thread):
    """As `threading.Timer`."""

    def __init__(self, interval: float, function: Callable[..., Any]) -> None:
        super().__init__(target=function, name="timer")
        self._interval, self._cancelled = interval, Event()

    def cancel(self) -> None:
        """Let it end without a call."""
        self._cancelled.set()

    def run(self) -> None:
        if not self._cancelled.wait(self._interval):
            super().run()


def get_ident() -> int:
    """As `threading.get_ident`."""
    return RUNNING[-1].ident if RUNNING else 0


class Wakeup:
    """As `rsmq.heartbeat.presence.Wakeup`, for a simulated connection."""

    def __init__(self) -> None:
        self._is_woken = False
        self._thread: Thread | None = None

    def wake(self) -> None:
        """End the wait."""
        self._is_woken = True
        if self._thread is not None:
            self._thread.wake()

    def wait(self, connection: Any, seconds: float) -> bool:
        """Until the connection has something to read (True), `wake` was called, or the time is over."""
        if connection.can_read(timeout=0):
            return True
        sock, deadline = connection._sock, deadline_after(max(seconds, TICK))
        self._thread = current()
        while not (self._is_woken or sock.is_readable or world().now >= deadline):
            sock.reader = self._thread
            self._thread.wait_until(deadline)
        self._thread = sock.reader = None
        self._is_woken = False
        return bool(sock.is_readable)

    def close(self) -> None:
        """Nothing to close."""


class Socket:
    """The socket of a blocking connection."""

    def __init__(self, timeout: float | None) -> None:
        self._timeout, self._buffer, self._is_ended = timeout, bytearray(), False
        self.reader: Thread | None = None
        self.connection: Any = None

    @property
    def is_readable(self) -> bool:
        """Whether `recv` would return at once."""
        return bool(self._buffer) or self._is_ended

    def arrived(self, data: bytes) -> None:
        """Bytes, or b"" for the end of the connection."""
        self._buffer += data
        self._is_ended = self._is_ended or not data
        if self.reader is not None:
            self.reader.wake()

    @property
    def is_at_end(self) -> bool:
        """Whether the server has closed it and everything was read."""
        return self._is_ended and not self._buffer

    def can_read(self, timeout: float | None) -> bool:
        """Wait until `recv` would return, or for so long."""
        deadline = deadline_after(timeout)
        while not self.is_readable and world().now < deadline:
            self.reader = current()
            self.reader.wait_until(deadline)
            self.reader = None
        return self.is_readable

    def wait_readable(self) -> None:
        """Wait until `recv` would return. Raises as a socket does."""
        if not self.can_read(self._timeout):
            raise TimeoutError("timed out") if self._timeout else BlockingIOError

    def recv(self, size: int, flags: int = 0) -> bytes:
        """As a socket's."""
        self.wait_readable()
        data = bytes(self._buffer[:size])
        if not flags & socket.MSG_PEEK:
            del self._buffer[:size]
        return data

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        """As a socket's."""
        data = self.recv(nbytes or len(buffer), flags)
        buffer[: len(data)] = data
        return len(data)

    def sendall(self, data: bytes) -> None:
        """As a socket's."""
        if self._is_ended:
            raise BrokenPipeError("Broken pipe")
        self.connection.send(bytes(data))

    def settimeout(self, timeout: float | None) -> None:
        """As a socket's."""
        self._timeout = timeout

    def gettimeout(self) -> float | None:
        """As a socket's."""
        return self._timeout

    def setblocking(self, flag: bool) -> None:
        """As a socket's."""
        self._timeout = None if flag else 0

    def shutdown(self, _: int) -> None:
        """As a socket's."""

    def close(self) -> None:
        """As a socket's."""
        self._is_ended = True
        self.connection.close()
