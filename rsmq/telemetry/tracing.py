"""Traces from publish to handler to publish, by OpenTelemetry's messaging conventions (extra `otel`).

The context travels in the message's headers (`traceparent`). A broker that is not traced pays nothing: a traced one has
its own producer, and a middleware around its handlers.
"""

from __future__ import annotations

from asyncio import CancelledError
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar

from rsmq.broker import Broker
from rsmq.broker.broker import producer_of
from rsmq.errors import ConfigError
from rsmq.handler.failure import describe
from rsmq.handler.middleware import Call, Payloads, Wrapping
from rsmq.handler.retry import AlreadyHandled, BatchRolledBack, Retry
from rsmq.handler.returned import completed, errors_in
from rsmq.model.keys import Keys
from rsmq.model.message import Message
from rsmq.model.message_ref import MessageRef
from rsmq.model.own_process import own_version
from rsmq.model.settings import Settings
from rsmq.producer import Producer
from rsmq.producer.output import Output
from rsmq.redis.client.connector import Client
from rsmq.redis.topics import Topics

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
        get_tracer,
        set_span_in_context,
    )

    from rsmq.telemetry.propagation import EMPTY, Propagation, is_sampled
    from rsmq.telemetry.sampling import Sampling
except ImportError as error:
    raise ConfigError("traces need the extra `otel`: pip install 'rsmq[otel]'") from error

MOST_LINKS: Final = 128
"""The SDK's own default limit: more links would be dropped anyway."""

Headers = Mapping[str, str]
T = TypeVar("T")

untraced: Final = Producer.publish


def trace(broker: Broker, tracer_provider: TracerProvider | None = None, *, share: float = 1.0) -> None:
    """Trace what this broker publishes and handles, with the global tracer provider or a given one.

    Call it before the broker connects. Handler middlewares registered later run inside of the span. With `share` below
    1 only that share of the publishes begins a trace; the others cost next to nothing, here and in their handlers.
    """
    if producer_of(broker) is not None:
        raise ConfigError("the broker is connected already: call trace(broker) right after creating it")
    if not 0 <= share <= 1:
        raise ConfigError(f"share={share!r} is not possible: use 0 to 1, such as 0.01 for one in a hundred")
    tracer, propagation = get_tracer("rsmq", own_version(), tracer_provider), Propagation()

    def make(client: Client, keys: Keys, settings: Settings, topics: Topics) -> Producer:
        return TracedProducer(client, keys, settings, topics, Sampling(share, tracer, propagation), propagation)

    broker.make_producer = make
    broker.middleware(TracedHandling(tracer, propagation, is_all=share >= 1))


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


def note_failed(span: Span, outcomes: Sequence[Any], failed: int) -> None:
    """Say how many messages of a batch have failed. The call has failed if all have: the first error stands for it."""
    span.set_attribute("rsmq.batch.failed_count", failed)
    if failed == len(outcomes):
        note_error(span, outcomes[0])


class TracedHandling(Wrapping):
    """The middleware: a span around every handler call.

    One message: a child of its publisher's span; each attempt is a span of its own. A message that was published
    unsampled gets no span here either. A batch: a span of its own, linked to the span of every message in it.
    """

    def __init__(self, tracer: Tracer, propagation: Propagation, *, is_all: bool) -> None:
        self._tracer = tracer
        self._propagation = propagation
        self._is_all = is_all
        self._known: dict[tuple[str, str, int], tuple[str, dict[str, str]]] = {}

    def wrap(self, call_next: Call) -> Call:
        """Call inside a span. A message without context gets none, unless everything is traced."""

        def call_all(work: Any) -> Awaitable[Any]:
            if isinstance(work, Message):
                return self._one(work, call_next)
            return self._batch(work, call_next, work, work[0].topic, work[0].group)

        def call(work: Any) -> Awaitable[Any]:
            if type(work) is Message and work.is_plain:
                return call_next(work)
            return call_all(work)

        if self._is_all:
            return call_all
        return call

    def wrap_payload(self, call_next: Call, topic: str, group: str) -> Call | None:
        """Plain messages have no context."""
        return None if self._is_all else call_next

    def wrap_payloads(self, call_next: Call, topic: str, group: str) -> Call | None:
        """A batch is linked to the messages in it that have a context."""

        def call(work: list[Any]) -> Awaitable[Any]:
            if isinstance(work, Payloads):
                return self._batch(work, call_next, work.messages, topic, group)
            return self._batch(work, call_next, (), topic, group) if self._is_all else call_next(work)

        return call

    def _one(self, work: Message, call_next: Call) -> Awaitable[Any]:
        scope, origin = self._propagation.extract(work)
        is_chosen = is_sampled(origin)
        if is_chosen is None and not self._is_all:
            return call_next(work)
        if is_chosen is False:
            return self._within(scope, None, work, call_next)
        of = work.topic, work.group, work.partition
        span = self._start(of, scope, {"messaging.message.id": work.id, "rsmq.attempt": work.attempt}, ())
        return self._within(set_span_in_context(span, scope), span, work, call_next)

    async def _batch(
        self, work: Sequence[Any], call_next: Call, messages: Sequence[Message], topic: str, group: str
    ) -> Any:
        links = self._links(messages)
        if not links and not self._is_all:
            return await call_next(work)
        span = self._start((topic, group, -1), EMPTY, {"messaging.batch.message_count": len(work)}, links)
        return await self._within(set_span_in_context(span, EMPTY), span, work, call_next)

    async def _within(self, scope: Context, span: Span | None, work: Any, call_next: Call) -> Any:
        token = context.attach(scope)
        try:
            result = await call_next(work)
            if result is not None:
                result = await completed(result)  # an error that is returned fails the call, too
                if span is not None and (failed := errors_in(result)):
                    note_failed(span, result, failed)
            return result
        except BaseException as error:
            if span is not None:
                note_error(span, error)
            raise
        finally:
            context.detach(token)
            if span is not None:
                span.end()

    def _start(
        self, of: tuple[str, str, int], parent: Context, about: Mapping[str, str | int], links: Sequence[Link]
    ) -> Span:
        name, shared = self._shared(of)
        return self._tracer.start_span(
            name, parent, kind=SpanKind.CONSUMER, attributes={**shared, **about}, links=links
        )  # fmt: skip

    def _links(self, batch: Sequence[Message]) -> list[Link]:
        """To the sampled span that published each message, each span once: others are found nowhere."""
        found: dict[int, Link] = {}
        for message in batch:
            if not message.is_plain and len(found) < MOST_LINKS:
                span = self._propagation.publisher(message)
                if is_sampled(span):
                    origin = span.get_span_context()
                    found.setdefault(origin.span_id, Link(origin))
        return list(found.values())

    def _shared(self, of: tuple[str, str, int]) -> tuple[str, dict[str, str]]:
        """The span's name, and the attributes that all messages of a topic, group and partition share (-1: a batch)."""
        known = self._known.get(of)
        if known is None:
            topic, group, partition = of
            shared = attributes("process", "process", topic) | {"messaging.consumer.group.name": group}
            if partition >= 0:
                shared["messaging.destination.partition.id"] = str(partition)
            known = self._known[of] = f"process {topic}", shared
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
        propagation: Propagation,
    ) -> None:
        super().__init__(client, keys, settings, topics)
        self._sampling, self._propagation = sampling, propagation

    def publish(
        self, topic: str, payload: Any, *, headers: Headers | None = None, **options: Any
    ) -> Coroutine[Any, Any, MessageRef]:
        """As without traces. Nothing is awaited: an unsampled publish must cost little."""
        decision = self._sampling.decide()
        if isinstance(decision, int):
            return self._publish(decision, topic, payload, headers=headers, **options)
        if decision:
            headers = with_context(headers, decision)
        return untraced(self, topic, payload, headers=headers, **options)

    async def _publish(
        self, trace_id: int, topic: str, payload: Any, *, headers: Headers | None, **options: Any
    ) -> MessageRef:
        with PublishSpan(self._sampling, self._propagation, topic, trace_id) as span:
            identity = await super().publish(topic, payload, headers=span.inject(headers), **options)
            span.note("messaging.message.id", identity)
            return identity

    async def output(self, topic: str, payload: Any, *, headers: Headers | None = None, **options: Any) -> Output:
        """As without traces. The span of the handler is the current one, so it is the parent."""
        decision = self._sampling.decide()
        if not isinstance(decision, int):
            return await super().output(topic, payload, headers=with_context(headers, decision), **options)
        with PublishSpan(self._sampling, self._propagation, topic, decision) as span:
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

        def extended(carrier: Headers) -> Headers | Callable[[T], Headers | None] | None:
            if callable(headers):
                return lambda item: with_context(headers(item), carrier)
            return with_context(headers, carrier)

        decision = self._sampling.decide()
        if not isinstance(decision, int):
            return await super().publish_many(topic, items, headers=extended(decision), **options)
        with PublishSpan(self._sampling, self._propagation, topic, decision) as span:
            ids = await super().publish_many(topic, items, headers=extended(span.inject(None)), **options)
            span.note("messaging.batch.message_count", len(ids))
            return ids


def with_context(headers: Headers | None, carrier: Headers) -> Headers | None:
    """Headers and the context of a publish."""
    if not carrier:
        return headers
    return {**headers, **carrier} if headers else carrier


class PublishSpan:
    """The span of one publish."""

    __slots__ = ("_context", "_propagation", "_span")

    def __init__(self, sampling: Sampling, propagation: Propagation, topic: str, trace_id: int) -> None:
        self._propagation = propagation
        self._span = sampling.start(trace_id, f"publish {topic}", attributes("send", "publish", topic))
        self._context = set_span_in_context(self._span)

    def inject(self, headers: Headers | None) -> dict[str, str]:
        """The given headers with the context in them."""
        carrier = dict(headers or {})
        self._propagation.inject(carrier, self._context)
        return carrier

    def note(self, name: str, value: str | int) -> None:
        """Add an attribute that is known only afterwards."""
        self._span.set_attribute(name, value)

    def __enter__(self) -> PublishSpan:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None:
            note_error(self._span, error)
        self._span.end()
