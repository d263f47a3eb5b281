"""The handlers' side of a trace: a middleware that puts a span around each call, under or linked to its publishers'."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, Final

from opentelemetry import context
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanKind, Tracer, set_span_in_context

from rsmq.message import Message
from rsmq.middleware import Call, Wrapping, plain_call
from rsmq.telemetry.carriage import Carriage
from rsmq.telemetry.choice import Choice
from rsmq.telemetry.span import attributes, note_error

MOST_LINKS: Final = 128
"""The SDK's own default limit: more links would be dropped anyway."""


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
            told = attributes("process", "process", message.topic) | {"messaging.consumer.group.name": message.group}
            if not is_batch:
                told["messaging.destination.partition.id"] = str(message.partition)
            known = self._known[place] = f"process {message.topic}", told
        return known
