"""The publishers' side of a trace: a span around each publish, and its context in the message's headers."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Mapping
from datetime import datetime, timedelta
from random import random
from typing import Any, Final, TypeVar

from opentelemetry.trace import SpanKind, Tracer, set_span_in_context

from rsmq.connect import Client
from rsmq.keys import Keys
from rsmq.producer import Producer
from rsmq.settings import Settings
from rsmq.telemetry.carriage import Carriage
from rsmq.telemetry.choice import Choice, get_current
from rsmq.telemetry.span import attributes, note_error
from rsmq.topic import Topics

Headers = Mapping[str, str]
T = TypeVar("T")

untraced: Final = Producer.publish


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
            f"publish {topic}", kind=SpanKind.PRODUCER, attributes=attributes("send", "publish", topic)
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
