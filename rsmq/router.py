"""Routers: handlers registered apart from the broker, so that they can live in modules of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Any, TypeVar

from rsmq.errors import ConfigError
from rsmq.handler import Handler, build_handler
from rsmq.keys import check_name
from rsmq.middleware import Middleware
from rsmq.option import Distribution, Execution, Ordering
from rsmq.rate import Rate
from rsmq.retry import RetryPolicy
from rsmq.schedule import Every, Missed, build_every

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
        self.schedules: list[Every] = []
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
        rate: Rate | None = None,
        group_concurrency: int | None = None,
    ) -> Callable[[F], F]:
        """Register a function for the messages of `topic` in `group`; it is returned unchanged.

        The payload is decoded by the annotation of the first parameter (a pydantic model, dataclass, dict, str, bytes);
        a parameter annotated `Message` gets the message. With `batch` both are lists. Defaults: order per key, 5
        attempts with exponential back-off, no time-out, no rate limit, from the earliest message. `concurrency` is how
        many calls run at once in one member, `group_concurrency` in all of them together (default: no limit).
        """

        def register(function: F) -> F:
            handler = build_handler(
                function, self.prefix + topic, group=group, concurrency=concurrency, ordering=ordering,
                distribution=distribution, retry=retry, timeout=timeout, batch=batch, linger=linger, start=start,
                partitions=partitions, execution=execution, rate=rate, group_concurrency=group_concurrency,
            )  # fmt: skip
            self._add(handler)
            return function

        return register

    def every(
        self,
        schedule: str | timedelta,
        topic: str,
        *,
        name: str | None = None,
        key: str | None = None,
        headers: Mapping[str, str] | None = None,
        timezone: str | tzinfo = UTC,
        missed: Missed = "latest",
    ) -> Callable[[F], F]:
        """Publish what the function returns to `topic`, by a cron expression or every `timedelta`, from the workers.

        The function gets the time of the tick, or nothing; what it returns is the payload, None publishes nothing.
        Each tick is published once, however many workers run: its message id is `name@time`. Ticks that came when no
        worker ran are `missed`: the latest of them is published late, or all are skipped. `name` (default: the
        function's) is what the server remembers the last tick by.
        """

        def register(function: F) -> F:
            every = build_every(
                function, schedule, self.prefix + topic, name=name, key=key, headers=headers, timezone=timezone,
                missed=missed,
            )  # fmt: skip
            self._add_schedule(every)
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
        for every in router.schedules:
            self._add_schedule(replace(every, topic=check_name("topic", self.prefix + prefix + every.topic)))
        router._is_included = True

    def _add(self, handler: Handler) -> None:
        self._refuse_late(f"handler {handler.name}")
        if any((other.topic, other.group) == (handler.topic, handler.group) for other in self.handlers):
            raise ConfigError(
                f"group {handler.group!r} of topic {handler.topic!r} has a handler already: a group handles each "
                f"message once, so give {handler.name} a group of its own"
            )
        self.handlers.append(handler)

    def _add_schedule(self, every: Every) -> None:
        self._refuse_late(f"schedule {every.name}")
        if any((other.topic, other.name) == (every.topic, every.name) for other in self.schedules):
            raise ConfigError(f"topic {every.topic!r} has a schedule {every.name!r} already: give it another name=...")
        self.schedules.append(every)

    def _refuse_late(self, what: str) -> None:
        """What comes after `include` would be silently missing."""
        if self._is_included:
            raise ConfigError(f"{what} comes too late, its router is included already: include the router after it")

    def partitions_of(self, topic: str) -> int | None:
        """How many a handler of the topic asks for, if any does: whoever publishes first creates it."""
        asked = (each.partitions for each in self.handlers if each.topic == topic)
        return next((partitions for partitions in asked if partitions is not None), None)

    def __repr__(self) -> str:
        return f"<Router {len(self.handlers)} handlers>"
