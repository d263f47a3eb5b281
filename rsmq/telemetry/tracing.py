"""Traces from publish to handler to publish, by OpenTelemetry's messaging conventions (extra `otel`).

The context travels in the message's headers (`traceparent`). A broker that is not traced pays nothing: a traced one has
its own producer, and a middleware around its handlers.
"""

from __future__ import annotations

import re
from asyncio import CancelledError
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from datetime import datetime
from random import random
from typing import Any, Final, TypeVar

from rsmq.broker import Broker
from rsmq.errors import ConfigError
from rsmq.handler.failure import describe
from rsmq.handler.middleware import Call, Payloads, Wrapping
from rsmq.handler.retry import AlreadyHandled, BatchRolledBack, Retry
from rsmq.inspector.inspector import installed
from rsmq.model.duration import Duration
from rsmq.model.keys import Keys
from rsmq.model.message import Message
from rsmq.model.message_ref import MessageRef
from rsmq.model.settings import Settings
from rsmq.producer import Producer
from rsmq.producer.output import Output
from rsmq.redis.connector import Client
from rsmq.redis.topics import Topics

try:
    from opentelemetry import baggage, context, propagate
    from opentelemetry.context import Context
    from opentelemetry.trace import (
        Link,
        NonRecordingSpan,
        Span,
        SpanContext,
        SpanKind,
        StatusCode,
        TraceFlags,
        Tracer,
        TracerProvider,
        get_current_span,
        get_tracer,
        set_span_in_context,
    )
except ImportError as error:
    raise ConfigError("traces need the extra `otel`: pip install 'rsmq[otel]'") from error

TRACEPARENT: Final = re.compile("00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
STANDARD: Final = {"traceparent", "tracestate", "baggage"}
MOST_LINKS: Final = 128
"""The SDK's own default limit: more links would be dropped anyway."""

Headers = Mapping[str, str]
T = TypeVar("T")

get_current: Final = context.get_current
untraced: Final = Producer.publish


def trace(broker: Broker, tracer_provider: TracerProvider | None = None, *, share: float = 1.0) -> None:
    """Trace what this broker publishes and handles, with the global tracer provider or a given one.

    Call it before the broker connects. Handler middlewares registered later run inside of the span. With `share` below
    1 only that share of the publishes begins a trace; the others cost next to nothing, here and in their handlers.
    """
    if broker.producer is not None:
        raise ConfigError("the broker is connected already: call trace(broker) right after creating it")
    if not 0 <= share <= 1:
        raise ConfigError(f"share={share!r} is not possible: use 0 to 1, such as 0.01 for one in a hundred")
    tracer, propagation = get_tracer("rsmq", installed("rsmq"), tracer_provider), Propagation()

    def make(client: Client, keys: Keys, settings: Settings, topics: Topics) -> Producer:
        return TracedProducer(client, keys, settings, topics, Sampling(share), tracer, propagation)

    broker.make_producer = make
    broker.middleware(TracedHandling(Sampling(share), tracer, propagation))


def attributes(kind: str, operation: str, topic: str) -> dict[str, str]:
    """The attributes of every span: the operation and its topic."""
    return {
        "messaging.system": "rsmq",
        "messaging.operation.type": kind,
        "messaging.operation.name": operation,
        "messaging.destination.name": topic,
    }


def note_error(span: Span, error: BaseException) -> None:
    """Record an exception on a span. A handler that asks for a retry is not an error, nor is one that need not run."""
    if isinstance(error, Retry | AlreadyHandled | BatchRolledBack):
        span.set_attribute("rsmq.outcome", "retry")
        return
    span.set_attribute("error.type", type(error).__qualname__)
    if not isinstance(error, CancelledError):
        span.record_exception(error)
        span.set_status(StatusCode.ERROR, describe(error))


class Sampling:
    """Decides which publishes get a span. With share 1, OpenTelemetry's sampler decides, and the context carries it.

    Below 1 this class decides before a span is made: inside a span as that span, else at random. A message that was
    not sampled carries no context, so its handler begins no trace of its own.
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


class Propagation:
    """Writes and reads contexts. Checks at creation whether the configured propagators are standard."""

    def __init__(self) -> None:
        self._is_standard = set(propagate.get_global_textmap().fields) == STANDARD

    def inject(self, headers: dict[str, str], context: Context) -> None:
        """Add a context to headers."""
        here = get_current_span(context).get_span_context()
        if self._is_standard and here.is_valid and not here.trace_state and not baggage.get_all(context):
            headers["traceparent"] = f"00-{here.trace_id:032x}-{here.span_id:016x}-{here.trace_flags:02x}"
        else:
            propagate.inject(headers, context)

    def extract(self, headers: Mapping[str, str]) -> tuple[Context, SpanContext]:
        """The context of a message, and its span."""
        header = headers.get("traceparent")
        match = None if header is None else TRACEPARENT.fullmatch(header)
        if match is None or not self._is_standard or "tracestate" in headers or "baggage" in headers:
            context = propagate.extract(headers, Context())
            return context, get_current_span(context).get_span_context()
        trace_id, span_id, flags = (int(part, 16) for part in match.groups())
        origin = SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(flags))
        return set_span_in_context(NonRecordingSpan(origin), Context()), origin


class TracedHandling(Wrapping):
    """The middleware: a span around every handler call.

    One message: a child of its publisher's span; each attempt is a span of its own. A message that was published
    unsampled gets no span here either. A batch: a span of its own, linked to the span of every message in it.
    """

    def __init__(self, sampling: Sampling, tracer: Tracer, propagation: Propagation) -> None:
        self._sampling, self._tracer, self._propagation = sampling, tracer, propagation
        self._known: dict[tuple[str, str, int], tuple[str, dict[str, str]]] = {}

    def wrap(self, call_next: Call) -> Call:
        """Call inside a span. A message without context gets none, unless everything is traced."""

        def call_all(work: Any) -> Awaitable[Any]:
            return self._one(work, call_next) if isinstance(work, Message) else self._batch(work, call_next, work)

        def call(work: Any) -> Awaitable[Any]:
            if type(work) is Message and work.is_plain:
                return call_next(work)
            return call_all(work)

        if self._sampling.is_all:
            return call_all
        return call

    def wrap_payload(self, call_next: Call, topic: str, group: str) -> Call | None:
        """Plain messages have no context."""
        return None if self._sampling.is_all else call_next

    def wrap_payloads(self, call_next: Call, topic: str, group: str) -> Call | None:
        """A batch is linked to the messages in it that have a context."""

        def call(work: list[Any]) -> Awaitable[Any]:
            return self._batch(work, call_next, work.messages) if isinstance(work, Payloads) else call_next(work)

        return None if self._sampling.is_all else call

    async def _one(self, work: Message, call_next: Call) -> Any:
        parent, origin = self._propagation.extract(work.headers)
        if not origin.is_valid and not self._sampling.is_all:
            return await call_next(work)
        if origin.is_valid and not origin.trace_flags.sampled:
            return await self._within(parent, None, work, call_next)
        span = self._start(work, parent, {"messaging.message.id": work.id, "rsmq.attempt": work.attempt}, ())
        return await self._within(set_span_in_context(span, parent), span, work, call_next)

    async def _batch(self, work: Sequence[Any], call_next: Call, messages: Sequence[Message]) -> Any:
        links = self._links(messages)
        if not links and not self._sampling.is_all:
            return await call_next(work)
        span = self._start(messages[0], Context(), {"messaging.batch.message_count": len(work)}, links)
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

    def _start(self, first: Message, parent: Context, about: Mapping[str, str | int], links: Sequence[Link]) -> Span:
        name, shared = self._shared(first, is_batch="messaging.batch.message_count" in about)
        return self._tracer.start_span(
            name, parent, kind=SpanKind.CONSUMER, attributes={**shared, **about}, links=links
        )  # fmt: skip

    def _links(self, batch: Sequence[Message]) -> list[Link]:
        """To the span that published each message, each span once."""
        found: dict[int, Link] = {}
        for message in batch:
            if not message.is_plain:
                _, origin = self._propagation.extract(message.headers)
                if origin.is_valid and len(found) < MOST_LINKS:
                    found.setdefault(origin.span_id, Link(origin))
        return list(found.values())

    def _shared(self, message: Message, *, is_batch: bool) -> tuple[str, dict[str, str]]:
        """The span's name, and the attributes that all messages of a partition and group share."""
        key = message.topic, message.group, -1 if is_batch else message.partition
        known = self._known.get(key)
        if known is None:
            shared = attributes("process", "process", message.topic) | {"messaging.consumer.group.name": message.group}
            if not is_batch:
                shared["messaging.destination.partition.id"] = str(message.partition)
            known = self._known[key] = f"process {message.topic}", shared
        return known


class TracedProducer(Producer):
    """Publishes inside a span, and adds the span's context to the headers."""

    def __init__(
        self,
        client: Client,
        keys: Keys,
        settings: Settings,
        topics: Topics,
        sampling: Sampling,
        tracer: Tracer,
        propagation: Propagation,
    ) -> None:
        super().__init__(client, keys, settings, topics)
        self._sampling, self._tracer, self._propagation = sampling, tracer, propagation
        self._share = sampling.share

    def publish(
        self,
        topic: str,
        payload: Any,
        *,
        key: str | None = None,
        headers: Headers | None = None,
        delay: Duration | None = None,
        at: datetime | None = None,
        message_id: str | None = None,
        wait_replicas: int = 0,
        **expiry: Any,
    ) -> Coroutine[Any, Any, MessageRef]:
        """As without traces. Arguments are spelled out, nothing is awaited: an unsampled publish must cost nothing."""
        if random() >= self._share and not get_current():
            return untraced(
                self, topic, payload, key=key, headers=headers, delay=delay, at=at, message_id=message_id,
                wait_replicas=wait_replicas, **expiry,
            )  # fmt: skip
        is_chosen = not get_current() or self._sampling.of_publish()  # outside of any span random() has decided
        chosen = self._publish if is_chosen else super().publish
        return chosen(
            topic, payload, key=key, headers=headers, delay=delay, at=at, message_id=message_id,
            wait_replicas=wait_replicas, **expiry,
        )  # fmt: skip

    async def _publish(self, topic: str, payload: Any, *, headers: Headers | None, **options: Any) -> MessageRef:
        with Published(self._tracer, self._propagation, topic) as span:
            identity = await super().publish(topic, payload, headers=span.inject(headers), **options)
            span.note("messaging.message.id", identity)
            return identity

    async def output(self, topic: str, payload: Any, *, headers: Headers | None = None, **options: Any) -> Output:
        """As without traces. The span of the handler is the current one, so it is the parent."""
        if not self._sampling.of_publish():
            return await super().output(topic, payload, headers=headers, **options)
        with Published(self._tracer, self._propagation, topic) as span:
            output = await super().output(topic, payload, headers=span.inject(headers), **options)
            span.note("messaging.message.id", output.message_id)
            return output

    async def publish_many(
        self,
        topic: str,
        items: Iterable[T],
        *,
        headers: Headers | Callable[[T], Headers | None] | None = None,
        **options: Any,
    ) -> list[str]:
        """As without traces: one span, the parent of the spans of all their handlers."""
        if not self._sampling.of_publish():
            return await super().publish_many(topic, items, headers=headers, **options)
        with Published(self._tracer, self._propagation, topic) as span:
            carrier = span.inject(None)

            def extended(item: T) -> Headers:
                own = headers(item) if callable(headers) else headers
                return {**own, **carrier} if own else carrier

            ids = await super().publish_many(topic, items, headers=extended, **options)
            span.note("messaging.batch.message_count", len(ids))
            return ids


class Published:
    """The span of one publish. The current span is its parent."""

    __slots__ = ("_context", "_propagation", "_span")

    def __init__(self, tracer: Tracer, propagation: Propagation, topic: str) -> None:
        self._propagation = propagation
        self._span = tracer.start_span(
            f"publish {topic}", kind=SpanKind.PRODUCER, attributes=attributes("send", "publish", topic)
        )
        self._context = set_span_in_context(self._span)

    def inject(self, headers: Headers | None) -> dict[str, str]:
        """The given headers with the context in them."""
        carrier = dict(headers or {})
        self._propagation.inject(carrier, self._context)
        return carrier

    def note(self, name: str, value: str | int) -> None:
        """Add an attribute that is known only afterwards."""
        self._span.set_attribute(name, value)

    def __enter__(self) -> Published:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None:
            note_error(self._span, error)
        self._span.end()
