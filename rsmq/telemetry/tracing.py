"""Traces from publish to handler to publish, by OpenTelemetry's messaging conventions (extra `otel`).

The context travels in the message's headers (`traceparent`). Nothing here exists for a broker that is not traced: the
publisher is a subclass, the handlers' side a middleware.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from random import random
from typing import Any, Final, TypeVar

from rsmq.broker import Broker
from rsmq.connect import Client
from rsmq.errors import ConfigError
from rsmq.inspector import installed
from rsmq.keys import Keys
from rsmq.message import Message
from rsmq.middleware import Call, Wrapping, plain_call
from rsmq.producer import Producer
from rsmq.retry import Retry, describe
from rsmq.settings import Settings
from rsmq.topic import Topics

try:
    from opentelemetry import context
    from opentelemetry.context import Context
    from opentelemetry.trace import (
        Link,
        Span,
        SpanKind,
        StatusCode,
        Tracer,
        TracerProvider,
        get_current_span,
        get_tracer,
        set_span_in_context,
    )  # fmt: skip

    from rsmq.telemetry.carriage import Carriage
except ImportError as error:
    raise ConfigError("traces need the extra `otel`: pip install 'rsmq[otel]'") from error

SYSTEM: Final = "rsmq"
MOST_LINKS: Final = 128
"""The SDK's own default limit: more links would be dropped anyway."""

Headers = Mapping[str, str]
T = TypeVar("T")


def trace(broker: Broker, tracer_provider: TracerProvider | None = None, *, share: float = 1.0) -> None:
    """Trace what this broker publishes and handles, with the global tracer provider or a given one.

    Call it before the broker connects. Handler middlewares registered later run inside of the span. With `share` below
    1 only that share of the publishes begins a trace; the others cost next to nothing, here and in their handlers.
    """
    if broker.producer is not None:
        raise ConfigError("the broker is connected already: call trace(broker) where it is made")
    if not 0 <= share <= 1:
        raise ConfigError(f"share={share!r} is not possible: use 0 to 1, such as 0.01 for one in a hundred")
    tracer, carriage = get_tracer("rsmq", installed("rsmq"), tracer_provider), Carriage()

    def make(client: Client, keys: Keys, settings: Settings, topics: Topics) -> Producer:
        return TracedProducer(client, keys, settings, topics, Choice(share), tracer, carriage)

    broker.make_producer = make
    broker.middleware(TracedHandling(Choice(share), tracer, carriage))


class Choice:
    """What is traced at all. Of everything (share 1) OpenTelemetry's sampler decides, and tells the handlers.

    Below that we decide before a span is made: inside of a span as that one, else by chance. What is not chosen carries
    no context, so handlers begin no trace of their own.
    """

    __slots__ = ("is_all", "share")

    def __init__(self, share: float) -> None:
        self.share, self.is_all = share, share >= 1

    def of_publish(self) -> bool:
        """Whether a publish gets a span."""
        if self.is_all:
            return True
        if not get_current():
            return random() < self.share
        here = get_current_span().get_span_context()
        return here.trace_flags.sampled if here.is_valid else random() < self.share


untraced: Final = Producer.publish
get_current: Final = context.get_current


class TracedProducer(Producer):
    """Publishes inside of a span, and puts the span's context into the headers."""

    def __init__(
        self,
        client: Client,
        keys: Keys,
        settings: Settings,
        topics: Topics,
        choice: Choice,
        tracer: Tracer,
        carriage: Carriage,
    ) -> None:
        super().__init__(client, keys, settings, topics)
        self._choice, self._tracer, self._carriage = choice, tracer, carriage
        self._share = choice.share

    def publish(
        self,
        topic: str,
        payload: Any,
        *,
        key: str | None = None,
        headers: Headers | None = None,
        delay: timedelta | None = None,
        at: datetime | None = None,
        message_id: str | None = None,
        wait_replicas: int = 0,
    ) -> Coroutine[Any, Any, str]:
        """As without traces. All is written out, and nothing awaited: what is not chosen must cost nothing."""
        if random() >= self._share and not get_current():
            return untraced(
                self, topic, payload, key=key, headers=headers, delay=delay, at=at, message_id=message_id,
                wait_replicas=wait_replicas,
            )  # fmt: skip
        is_chosen = not get_current() or self._choice.of_publish()  # outside of any span the die is cast
        chosen = self._publish if is_chosen else super().publish
        return chosen(
            topic, payload, key=key, headers=headers, delay=delay, at=at, message_id=message_id,
            wait_replicas=wait_replicas,
        )  # fmt: skip

    async def _publish(self, topic: str, payload: Any, *, headers: Headers | None, **options: Any) -> str:
        with Published(self._tracer, self._carriage, topic) as span:
            identity = await super().publish(topic, payload, headers=span.inject(headers), **options)
            span.note("messaging.message.id", identity)
            return identity

    async def publish_many(
        self,
        topic: str,
        items: Iterable[T],
        *,
        headers: Headers | Callable[[T], Headers | None] | None = None,
        **options: Any,
    ) -> list[str]:
        """As without traces: one span, which is the parent of what becomes of all of them."""
        if not self._choice.of_publish():
            return await super().publish_many(topic, items, headers=headers, **options)
        with Published(self._tracer, self._carriage, topic) as span:
            carrier = span.inject(None)

            def extended(item: T) -> Headers:
                given = headers(item) if callable(headers) else headers
                return {**given, **carrier} if given else carrier

            ids = await super().publish_many(topic, items, headers=extended, **options)
            span.note("messaging.batch.message_count", len(ids))
            return ids


class Published:
    """The span of one publish. The current span is its parent."""

    __slots__ = ("_carriage", "_context", "_span")

    def __init__(self, tracer: Tracer, carriage: Carriage, topic: str) -> None:
        self._carriage = carriage
        self._span = tracer.start_span(
            f"publish {topic}",
            kind=SpanKind.PRODUCER,
            attributes={
                "messaging.system": SYSTEM,
                "messaging.operation.type": "send",
                "messaging.operation.name": "publish",
                "messaging.destination.name": topic,
            },
        )
        self._context = set_span_in_context(self._span)

    def inject(self, headers: Headers | None) -> dict[str, str]:
        """The given headers with the context in them."""
        carrier = dict(headers or {})
        self._carriage.inject(carrier, self._context)
        return carrier

    def note(self, name: str, value: str | int) -> None:
        """What is known only afterwards."""
        self._span.set_attribute(name, value)

    def __enter__(self) -> Published:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None:
            note_error(self._span, error)
        self._span.end()


class TracedHandling(Wrapping):
    """The middleware: a span around every handler call.

    One message: a child of its publisher's span, so that a trace runs through; each attempt is a span of its own. What
    was published unsampled is not sampled here either, and costs no span. A batch: a span of its own, linked to the
    span of every message in it.
    """

    def __init__(self, choice: Choice, tracer: Tracer, carriage: Carriage) -> None:
        self._choice, self._tracer, self._carriage = choice, tracer, carriage
        self._known: dict[tuple[str, str, int], tuple[str, dict[str, str]]] = {}

    def wrap(self, call_next: Call) -> Call:
        """Handle inside of a span. What carries no context is left to the next call, unless all is traced."""

        def call_all(work: Any) -> Awaitable[Any]:
            return self._one(work, call_next) if isinstance(work, Message) else self._batch(work, call_next)

        def call(work: Any) -> Awaitable[Any]:
            if type(work) is Message and work.is_plain:
                return call_next(work)
            return call_all(work)

        if self._choice.is_all:
            return call_all
        call.plain = plain_call(call_next)  # type: ignore[attr-defined]
        return call

    async def _one(self, work: Message, call_next: Call) -> Any:
        parent, origin = self._carriage.extract(work.headers)
        if not origin.is_valid and not self._choice.is_all:
            return await call_next(work)
        if origin.is_valid and not origin.trace_flags.sampled:
            return await self._within(parent, None, work, call_next)
        span = self._start(work, parent, {"messaging.message.id": work.id, "rsmq.attempt": work.attempt}, ())
        return await self._within(set_span_in_context(span, parent), span, work, call_next)

    async def _batch(self, work: Sequence[Message], call_next: Call) -> Any:
        links = self._links(work)
        if not links and not self._choice.is_all:
            return await call_next(work)
        facts = {"messaging.batch.message_count": len(work)}
        span = self._start(work[0], Context(), facts, links)
        return await self._within(set_span_in_context(span, Context()), span, work, call_next)

    async def _within(self, scope: Context, span: Span | None, work: Any, call_next: Call) -> Any:
        token = context.attach(scope)
        try:
            return await call_next(work)
        except BaseException as error:
            if span is not None:
                note_error(span, error)
            raise
        finally:
            context.detach(token)
            if span is not None:
                span.end()

    def _start(self, first: Message, parent: Context, facts: Mapping[str, str | int], links: Sequence[Link]) -> Span:
        name, place = self._place(first, is_batch="messaging.batch.message_count" in facts)
        return self._tracer.start_span(
            name, parent, kind=SpanKind.CONSUMER, attributes={**place, **facts}, links=links
        )  # fmt: skip

    def _links(self, batch: Sequence[Message]) -> list[Link]:
        """To the span that published each message, each span once."""
        found: dict[int, Link] = {}
        for message in batch:
            if not message.is_plain:
                _, origin = self._carriage.extract(message.headers)
                if origin.is_valid and len(found) < MOST_LINKS:
                    found.setdefault(origin.span_id, Link(origin))
        return list(found.values())

    def _place(self, message: Message, *, is_batch: bool) -> tuple[str, dict[str, str]]:
        """The span's name and what is the same for all messages of a partition and group."""
        place = message.topic, message.group, -1 if is_batch else message.partition
        known = self._known.get(place)
        if known is None:
            attributes = {
                "messaging.system": SYSTEM,
                "messaging.operation.type": "process",
                "messaging.operation.name": "process",
                "messaging.destination.name": message.topic,
                "messaging.consumer.group.name": message.group,
            }
            if not is_batch:
                attributes["messaging.destination.partition.id"] = str(message.partition)
            known = self._known[place] = f"process {message.topic}", attributes
        return known


def note_error(span: Span, error: BaseException) -> None:
    """A call that raised. That a handler asks for a retry is no error of anybody."""
    if isinstance(error, Retry):
        span.set_attribute("rsmq.outcome", "retry")
        return
    span.set_attribute("error.type", type(error).__qualname__)
    if isinstance(error, Exception):
        span.record_exception(error)
        span.set_status(StatusCode.ERROR, describe(error))
