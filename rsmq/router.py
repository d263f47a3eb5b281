"""Routers: handlers registered apart from the broker, so that they can live in modules of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, TypeVar

from rsmq.errors import ConfigError
from rsmq.handler import Distribution, Execution, Handler, Middleware, Ordering, build_handler
from rsmq.keys import check_name
from rsmq.retry import RetryPolicy

F = TypeVar("F", bound=Callable[..., Any])


class Router:
    """A set of handlers that a broker takes over with `broker.include(router)`.

    `prefix` stands before the name of every topic registered here, such as `shop.`. Middleware of a router surrounds
    its own handlers only, inside that of the broker. Routers include routers. Everything here is local: a wrong name or
    signature fails where it is written.
    """

    def __init__(self, *, prefix: str = "") -> None:
        self.prefix = prefix
        self.handlers: list[Handler] = []
        self._middlewares: list[Middleware] = []
        self._is_included = False

    def handler(
        self,
        topic: str,
        *,
        group: str,
        concurrency: int = 64,
        ordering: Ordering | None = None,
        distribution: Distribution = "hash",
        retry: RetryPolicy | None = None,
        timeout: timedelta | float | None = None,
        batch: int | None = None,
        linger: timedelta | None = None,
        start: str | datetime = "earliest",
        partitions: int | None = None,
        execution: Execution | None = None,
    ) -> Callable[[F], F]:
        """Register a function for the messages of `topic` in `group`; it is returned unchanged.

        The payload is decoded by the annotation of the first parameter (a pydantic model, dataclass, dict, str, bytes);
        a parameter annotated `Message` gets the message. With `batch` both are lists. Defaults: order per key, 5
        attempts with exponential back-off, no time-out, from the earliest message.
        """

        def register(function: F) -> F:
            handler = build_handler(
                function, self.prefix + topic, group=group, concurrency=concurrency, ordering=ordering,
                distribution=distribution, retry=retry, timeout=timeout, batch=batch, linger=linger, start=start,
                partitions=partitions, execution=execution,
            )  # fmt: skip
            self._add(handler)
            return function

        return register

    def middleware(self, function: Middleware) -> Middleware:
        """Register `async def (message, call_next)` around every handler; the first registered is the outermost."""
        self._refuse_late(f"middleware {getattr(function, '__name__', function)}")
        self._middlewares.append(function)
        return function

    def include(self, router: Router, *, prefix: str = "") -> None:
        """Take over the handlers of a router; `prefix` stands before its topics' names. The router is closed by it.

        Raises ConfigError when a group has a handler already: the same router can be included twice only under
        different prefixes.
        """
        if router is self or isinstance(router, type) or not isinstance(router, Router):
            raise ConfigError(f"{router!r} cannot be included here: pass an rsmq.Router")
        if getattr(router, "settings", None) is not None:
            raise ConfigError("a Broker cannot be included: register the handlers on an rsmq.Router and include that")
        for handler in router.handlers:
            topic = check_name("topic", self.prefix + prefix + handler.topic)
            self._add(replace(handler, topic=topic, around=(*router._middlewares, *handler.around)))
        router._is_included = True

    def _add(self, handler: Handler) -> None:
        self._refuse_late(f"handler {handler.name}")
        if any((other.topic, other.group) == (handler.topic, handler.group) for other in self.handlers):
            raise ConfigError(
                f"group {handler.group!r} of topic {handler.topic!r} has a handler already: a group handles each "
                f"message once, so give {handler.name} a group of its own"
            )
        self.handlers.append(handler)

    def _refuse_late(self, what: str) -> None:
        """What comes after `include` would be silently missing."""
        if self._is_included:
            raise ConfigError(f"{what} comes too late, its router is included already: include the router after it")

    def __repr__(self) -> str:
        return f"<Router {len(self.handlers)} handlers>"
