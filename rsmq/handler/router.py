"""Routers: handlers and schedules registered apart from the broker, so that they can live in modules of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar, Unpack

from rsmq.errors import ConfigError
from rsmq.handler.dead_hook import DeadFunction
from rsmq.handler.dead_hook import check_function as check_dead_function
from rsmq.handler.error_hook import ErrorFunction, ErrorHook
from rsmq.handler.fallback import circle_of
from rsmq.handler.handler import Handler, build_handler
from rsmq.handler.middleware import Middleware
from rsmq.handler.options import HandlerOptions
from rsmq.handler.schedule import Schedule, ScheduleOptions, build_schedule
from rsmq.handler.service import Service
from rsmq.model.duration import Duration
from rsmq.model.keys import check_name
from rsmq.model.words import count

F = TypeVar("F", bound=Callable[..., Any])
E = TypeVar("E", bound=ErrorFunction)
D = TypeVar("D", bound=DeadFunction)


class Router:
    """A set of handlers and schedules that a broker takes over with `broker.include(router)`.

    `prefix`, such as `shop.`, is put before the name of every topic registered here. Middleware of a router wraps only
    its own handlers, inside that of the broker. Routers can include routers. Nothing here connects: a wrong name,
    option or signature raises ConfigError where it is written.
    """

    def __init__(self, *, prefix: str = "") -> None:
        self.prefix = prefix
        self.handlers: list[Handler] = []
        self.declared_schedules: list[Schedule] = []
        self.services: list[Service] = []
        self._middlewares: list[Middleware] = []
        self._is_included = False

    def handler(self, topic: str, **options: Unpack[HandlerOptions]) -> Callable[[F], F]:
        """Register a function for the messages of `topic` in `group`; the decorator returns it unchanged.

        The payload is decoded by the annotation of the first parameter (a pydantic model, dataclass, dict, str, bytes);
        a parameter annotated `Message` gets the message. With `batch` both are lists. Raises ConfigError. Options:

        - `group`: required. Every group gets all messages of the topic; a group has one handler.
        - `concurrency`: calls at once in one member (64).
        - `group_concurrency`: calls at once in all members together, or `Concurrency(2, by=...)` for each name (no
          limit).
        - `rate`: messages that may start in a time, such as `Rate(100, per="1s")`; `by`: each key or name. A list of
          several: all of them hold (no limit).
        - `when`: `QuietHours("22:00", "08:00", ...)`, or a function from a message to an aware datetime, before which
          it does not start, or None. It waits, uncounted, and its key with it. Not with `batch` or "shared" (none).
        - `tenant`: a function of the message, such as `lambda message: message.headers["tenant"]`: tenants are served
          in turn, so no backlog of one holds up another. It sees headers, key and data, before the payload is decoded.
          What it returns None for is one tenant more. Not with "shared", nor with order by "partition" (none).
        - `weights`: how many messages a turn is, 1 to 1000: a dict from tenants, or a function of the name (1 each).
        - `breaker`: `Breaker(failures=5, hold="30s")`: after failures in a row nothing starts for a time (none).
        - `permits`: limits by name that the function takes itself, `async with message.permit("twilio")`:
          `{"twilio": [Rate(100, per="1s"), Concurrency(5)]}` (none).
        - `ordering`: "key" (one message of a key at a time), "partition" or "none" ("key"; "none" if shared).
        - `distribution`: "hash" gives each partition an owner, "shared" any message to any member ("hash").
        - `retry`: a `RetryPolicy` (5 attempts, exponential back-off from 1 s to 5 min).
        - `timeout`: a timedelta, text such as `30s`, or seconds; a call that takes longer has failed (no limit).
        - `soft_timeout`: after this time, shorter than `timeout`, an async handler is cancelled once, so that it can
          clean up: what it returns then counts (none).
        - `batch`: most messages of one call; the function gets lists (single messages).
        - `linger`: a timedelta or text such as `50ms`, how long an incomplete batch waits for more messages (0).
        - `by`: "key" gives a call all messages of one key that were stored within `linger` (up to 24h) of the oldest,
          up to `batch` (at most 1000). Retries have the same messages. Not with `tenant` or "shared" (none).
        - `start`: where a new group begins: "earliest", "latest", a stream id or an aware datetime ("earliest").
        - `partitions`: 1 to 1024, for a topic that does not exist yet (RSMQ_PARTITIONS).
        - `pick`: of a topic with bands, "strict", the highest first, or weights such as `{"urgent": 8, "bulk": 1}`.
        - `aging`: what has waited for longer gets every eighth start under strict; None is never ("30s").
        - `reserve`: slots of each process that only this band may take, such as `{"urgent": 2}` (none).
        - `output`: a topic, or a list of topics; what the function returns is published there when the message is
          settled, with its key; None publishes nothing. With `batch` it returns a list, an error for a failed item.
        - `replies`: what the function returns answers `broker.request` (False).
        - `fallback`: a topic, by its full name, for what has failed for good, or `Fallback("sms", payload=to_sms)`: it
          is settled and stored there in one step, and becomes no dead letter (none).
        - `execution`: "inline" in the event loop, "thread" or "process" ("inline" for `async def`, else "thread").
        """

        if callable(topic):
            raise ConfigError("handler takes a topic and a group: write `@broker.handler('orders', group='billing')`")
        full = self._prefixed(topic)

        def register(function: F) -> F:
            self._add(build_handler(function, full, **options))
            return function

        return register

    def every(self, schedule: Duration, topic: str, **options: Unpack[ScheduleOptions]) -> Callable[[F], F]:
        """Publish what the function returns to `topic`, by a cron expression or at an interval, from the workers.

        An interval is a timedelta or text such as `5m` or `1h`.

        The function takes the scheduled time, or nothing; what it returns is the payload, and None publishes nothing.
        Each scheduled time is published once, by any number of workers: its message id is `name@time`. Options:

        - `name`: the server remembers the last published time under it (the function's name).
        - `key`: the ordering key of the messages (none).
        - `headers`: names and values, both text (none).
        - `band`: a band of the topic (`normal`).
        - `timezone`: of the cron expression, as "Europe/Berlin" or a tzinfo (UTC).
        - `expires`, `on_expiry`: as for `publish`, a duration from the scheduled time (never).
        - `missed`: times at which no worker ran: "latest" publishes the newest of them late, "skip" none ("latest").
        """

        full = self._prefixed(topic)

        def register(function: F) -> F:
            self._add_schedule(build_schedule(function, schedule, full, **options))
            return function

        return register

    def middleware(self, function: Middleware) -> Middleware:
        """Register `async def (message, call_next)` around every handler; the first registered is the outermost."""
        if not callable(function):
            raise ConfigError(f"{function!r} is not a middleware: write `async def name(message, call_next)`")
        self._refuse_late(f"middleware {getattr(function, '__name__', function)}")
        self._middlewares.append(function)
        return function

    def on_error(self, function: E) -> E:
        """Call `function(message, error)` for each failed attempt of these handlers, as for Sentry; it may be async.

        Time-outs, payloads that do not fit, `Retry` and `Reject` are among them. It is called before the message is
        parked or buried; what it raises is logged. Handlers that do not fail pay nothing.
        """
        if not callable(function):
            raise ConfigError(f"{function!r} is not a function: write `def report(message, error)`")
        self._refuse_late(f"on_error {getattr(function, '__name__', function)}")
        self._middlewares.append(ErrorHook(function))
        return function

    def on_dead(self, topic: str, *, group: str) -> Callable[[D], D]:
        """Register `async def (message, burial)` for what becomes a dead letter of this group.

        `burial` has `reason`, `error` and `attempts`. What it publishes with `message.publish` is stored in the step
        that makes the dead letter, once: so a fallback topic is one line. It may run again if its process dies. If it
        fails or takes longer than 30 s, that is logged, and the message becomes a dead letter without outputs. Not
        called for entries that are no message. A plain function runs in a thread. Write it after the handler.
        """

        def register(function: D) -> D:
            check_dead_function(function)
            wanted = (self._prefixed(topic), group)
            for at, handler in enumerate(self.handlers):
                if (handler.topic, handler.group) == wanted:
                    self._refuse_late(f"on_dead of {handler.name}")
                    if handler.on_dead is not None:
                        raise ConfigError(f"group {group!r} of topic {wanted[0]!r} has an on_dead already")
                    self.handlers[at] = replace(handler, on_dead=function)
                    return function
            raise ConfigError(
                f"group {group!r} of topic {wanted[0]!r} has no handler here yet: write on_dead after its handler"
            )

        return register

    def include(self, router: Router | Service, *, prefix: str = "") -> None:
        """Take over the handlers and schedules of a router; `prefix` is put before the names of its topics.

        Or let the workers run a service, such as an `rsmq.sql.Outbox`, beside the handlers.

        The router cannot register anything afterwards. Raises ConfigError when a group has a handler already: the same
        router can be included twice only under different prefixes.
        """
        if isinstance(router, Service) and not isinstance(router, type | Router):
            self._add_service(router)
            return
        if router is self or isinstance(router, type) or not isinstance(router, Router):
            raise ConfigError(f"{router!r} cannot be included here: pass an rsmq.Router or an rsmq.sql.Outbox")
        if getattr(router, "settings", None) is not None:
            raise ConfigError("a Broker cannot be included: register the handlers on an rsmq.Router and include that")
        for handler in router.handlers:
            topic = check_name("topic", self.prefix + prefix + handler.topic)
            self._add(replace(handler, topic=topic, around=(*router._middlewares, *handler.around)))
        for schedule in router.declared_schedules:
            self._add_schedule(replace(schedule, topic=check_name("topic", self.prefix + prefix + schedule.topic)))
        for service in router.services:
            self._add_service(service)
        router._is_included = True

    def _add_service(self, service: Service) -> None:
        self._refuse_late(f"service {service!r}")
        if not any(service is other for other in self.services):
            self.services.append(service)

    def _add(self, handler: Handler) -> None:
        self._refuse_late(f"handler {handler.name}")
        if any((other.topic, other.group) == (handler.topic, handler.group) for other in self.handlers):
            raise ConfigError(
                f"group {handler.group!r} of topic {handler.topic!r} has a handler already: a group handles each "
                f"message once, so give {handler.name} a group of its own"
            )
        self._refuse_circle(handler)
        self.handlers.append(handler)
        for service in handler.services:
            self._add_service(service)

    def _refuse_circle(self, handler: Handler) -> None:
        """A message that fails in every topic of a circle of fallbacks would never end."""
        every = [*self.handlers, handler]
        ways = [(each.topic, each.fallback.target) for each in every if each.fallback is not None]
        if handler.fallback is not None and (circle := circle_of(ways, handler.topic)):
            raise ConfigError(
                f"handler {handler.name}: fallbacks lead back to the topic {handler.topic!r} "
                f"({' -> '.join(circle)}): leave the fallback of one of them out"
            )

    def _add_schedule(self, schedule: Schedule) -> None:
        self._refuse_late(f"schedule {schedule.name}")
        if any((other.topic, other.name) == (schedule.topic, schedule.name) for other in self.declared_schedules):
            raise ConfigError(
                f"topic {schedule.topic!r} has a schedule {schedule.name!r} already: give it another name=..."
            )
        self.declared_schedules.append(schedule)

    def _prefixed(self, topic: str) -> str:
        """The full name of a topic that is registered here."""
        return self.prefix + topic if isinstance(topic, str) else check_name("topic", topic)

    def _refuse_late(self, what: str) -> None:
        """The broker copied the router's handlers when it included it: a later one would be silently missing."""
        if self._is_included:
            raise ConfigError(f"{what} comes too late, its router is included already: call include after it")

    def _partitions_of(self, topic: str) -> int | None:
        """The partitions that a handler of the topic asks for; None: the default."""
        asked = (each.partitions for each in self.handlers if each.topic == topic)
        return next((partitions for partitions in asked if partitions is not None), None)

    def __repr__(self) -> str:
        return f"<Router {count(len(self.handlers), 'handler')}>"
