"""A resource for code without an event loop: it runs in a thread of its own, which starts at first use.

A portal that is not referenced any more is closed: an application may make a broker in each request and forget it.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import CancelledError, Future, wait
from contextlib import AbstractAsyncContextManager, ExitStack, contextmanager
from typing import Any

from anyio.from_thread import BlockingPortal, start_blocking_portal

from rsmq.errors import BrokerError, ConfigError

log = logging.getLogger("rsmq.broker")

PORTALS: weakref.WeakSet[Portal] = weakref.WeakSet()
LEFT_BEHIND: list[object] = []

_told = set[str]()
"""Where portals were made that were dropped while they were open: each place is logged once."""

Factory = Callable[[], AbstractAsyncContextManager[Any]]
"""Makes the resource. The resource must not hold the owner of the portal, or that one is never dropped."""


class Portal:
    """Holds one connected resource in a background event loop; closed at exit. Safe from several threads."""

    def __init__(self, factory: Factory) -> None:
        self._factory = factory
        self._made_at = _caller()
        PORTALS.add(self)
        self._forget()

    def _forget(self) -> None:
        self._changed = threading.Condition()
        self._stack: ExitStack | None = None
        self._portal: BlockingPortal | None = None
        self._resource: Any = None
        self._thread = 0
        self._users = 0
        self._finite = 0
        self._endless: set[Future[Any]] = set()
        self._finalizer: weakref.finalize[Any, Portal] | None = None

    @property
    def is_open(self) -> bool:
        """Whether it is connected."""
        return self._stack is not None

    def _opened(self) -> BlockingPortal:
        """Connect, unless it is connected. The caller holds the lock."""
        if self._stack is None or self._portal is None:
            if _ended.is_set():
                raise BrokerError(
                    "the process ends, and its brokers are closed: import rsmq before the module whose "
                    "`atexit` function publishes, or publish earlier"
                )
            with ExitStack() as stack:  # an error or Ctrl-C ends the attempt to connect
                self._portal = stack.enter_context(start_blocking_portal(name="rsmq-portal"))
                self._thread = self._portal.call(threading.get_ident)
                stack.callback(self._portal.call, self._portal.stop, True)  # after the resource: what still runs then
                self._resource = stack.enter_context(self._portal.wrap_async_context_manager(self._factory()))
                self._stack = stack.pop_all()
            self._watch_end(self._stack)
        return self._portal

    def _watch_end(self, stack: ExitStack) -> None:
        """Close when no reference to the portal is left. At the end of the process `close_all` comes first."""
        self._finalizer = weakref.finalize(self, _close_dropped, stack, self._made_at)
        self._finalizer.atexit = False

    def _unwatch_end(self) -> None:
        if self._finalizer is not None:
            self._finalizer.detach()
            self._finalizer = None

    def call(
        self,
        action: Callable[[Any], Awaitable[Any]],
        *,
        endless: bool = False,
        interrupt: Callable[[], object] | None = None,
    ) -> Any:
        """Run a coroutine function of the resource and wait for its result; connects at first use.

        `close` waits for calls, and cancels those that are endless. Ctrl-C cancels the call. With `interrupt`, the
        first Ctrl-C calls that and waits for the end.
        """
        self._refuse_own_thread()
        with self._changed:
            portal = self._opened()
            resource = self._resource

            async def act() -> Any:
                return await action(resource)

            future: Future[Any] = portal.start_task_soon(act)
            self._count(future, 1, endless=endless)
        try:
            return future.result()
        except KeyboardInterrupt:
            if interrupt is not None:
                interrupt()
                wait([future])
            raise
        except CancelledError:
            raise BrokerError("another thread closed the broker during this call: it may have had its effect") from None
        finally:
            future.cancel()  # has no effect unless Ctrl-C ended the wait
            with self._changed:
                self._count(future, -1, endless=endless)
                self._changed.notify_all()

    def _count(self, future: Future[Any], change: int, *, endless: bool) -> None:
        if not endless:
            self._finite += change
        elif change > 0:
            self._endless.add(future)
        else:
            self._endless.discard(future)

    def _refuse_own_thread(self) -> None:
        if self._stack is not None and threading.get_ident() == self._thread:
            raise ConfigError(
                "this call would wait for its own event loop: in `async def` code write `await "
                "broker.asynchronous.publish(...)`, or make the handler a plain function"
            )

    @contextmanager
    def wrapped(self, context: AbstractAsyncContextManager[Any]) -> Iterator[None]:
        """Another context in the event loop, for a block inside `enter` and `leave`."""
        portal = self._portal
        assert portal is not None
        with portal.wrap_async_context_manager(context):
            yield

    def run_soon(self, action: Callable[[], object]) -> None:
        """Call a plain function in the event loop; does nothing while it is not connected. Does not wait."""
        with self._changed:
            if self._portal is None or self._stack is None:
                return
            if threading.get_ident() != self._thread:
                self._portal.start_task_soon(action)
                return
        action()

    def enter(self) -> None:
        """Connect, and stay connected until as many `leave` as `enter` were called."""
        self._refuse_own_thread()
        with self._changed:
            self._opened()
            self._users += 1

    def leave(self) -> None:
        """Disconnect after the last user."""
        with self._changed:
            self._users = max(0, self._users - 1)  # 0 in a child that was forked inside the block
            is_last = self._users == 0
        if is_last:
            self.close()

    def leave_to_parent(self) -> None:
        """Forget the thread after a fork: it runs only in the parent, and the lock may be held for ever.

        Its objects are kept and never closed here: the child shares the poll set of their event loop with the parent.
        """
        LEFT_BEHIND.append((self._stack, self._portal, self._resource, self._endless))
        self._unwatch_end()
        self._forget()

    def close(self) -> None:
        """Disconnect and end the thread. Waits for the calls of other threads."""
        with self._changed:
            self._changed.wait_for(lambda: not self._finite)
            stack = self._stack
            self._stack = None
            self._portal = None
            self._resource = None
            endless, self._endless = self._endless, set()
        if stack is not None:
            self._unwatch_end()
            for future in endless:
                future.cancel()
            stack.close()  # without the lock: a handler in a thread may need it before it ends


def close_all() -> None:
    """Close every portal, at the end of the process.

    It is registered when this module is imported. So it comes after the `atexit` functions of an application, which may
    still publish what they have buffered. A portal that opened later would wait for a thread that the interpreter does
    not start any more.
    """
    for portal in list(PORTALS):
        portal.close()
    _ended.set()


_ended = threading.Event()
atexit.register(close_all)


def _close_dropped(stack: ExitStack, made_at: str) -> None:
    """Close the connection of a portal to which no reference is left.

    The garbage collector calls this in any thread, perhaps in that of the portal, which must not wait for itself.
    """
    if made_at not in _told:
        _told.add(made_at)
        log.warning(
            "a broker made at %s was dropped while it was connected, and is closed now: a process needs one broker, "
            "made once and kept; close any other with `with` or close()", made_at,
        )  # fmt: skip
    threading.Thread(target=stack.close, name="rsmq-close", daemon=True).start()


def _caller() -> str:
    """The first line outside of this package that led here."""
    frame = sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__", "")).partition(".")[0] == "rsmq":
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _after_fork() -> None:
    for portal in list(PORTALS):
        portal.leave_to_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
