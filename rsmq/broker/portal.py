"""A broker for code without an event loop: it runs in a thread of its own, which starts at first use."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager, ExitStack
from typing import Any

from anyio.from_thread import BlockingPortal, start_blocking_portal

PORTALS: weakref.WeakSet[Portal] = weakref.WeakSet()
LEFT_BEHIND: list[object] = []


class Portal:
    """Holds one connected resource in a background event loop; closed at exit."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        PORTALS.add(self)
        self._stack: ExitStack | None = None
        self._portal: BlockingPortal | None = None
        self._resource: Any = None

    @property
    def is_open(self) -> bool:
        """Whether it is connected."""
        return self._stack is not None

    def open(self, factory: Callable[[], AbstractAsyncContextManager[Any]]) -> Portal:
        """Connect on first use; later calls return at once. Safe from several threads."""
        with self._lock:
            if self._stack is None:
                stack = ExitStack()
                portal = stack.enter_context(start_blocking_portal())
                context: AbstractContextManager[Any] = portal.wrap_async_context_manager(factory())
                try:
                    self._resource = stack.enter_context(context)
                except BaseException:
                    stack.close()
                    raise
                self._portal, self._stack = portal, stack
                atexit.register(self.close)
        return self

    def leave_to_parent(self) -> None:
        """Forget the thread after a fork: it runs only in the parent, and the lock may be held for ever.

        Its objects are kept and never closed here: the child shares the poll set of their event loop with the parent.
        """
        LEFT_BEHIND.append((self._stack, self._portal, self._resource))
        self._lock, self._stack, self._portal, self._resource = threading.Lock(), None, None, None

    def call(self, action: Callable[[Any], Awaitable[Any]]) -> Any:
        """Run a coroutine function of the resource and wait for its result."""
        assert self._portal is not None

        async def act() -> Any:
            return await action(self._resource)

        return self._portal.call(act)

    def close(self) -> None:
        """Disconnect and end the thread."""
        with self._lock:
            stack, self._stack = self._stack, None
            if stack is not None:
                atexit.unregister(self.close)
                stack.close()


def _after_fork() -> None:
    for portal in list(PORTALS):
        portal.leave_to_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
