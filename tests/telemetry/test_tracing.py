"""Traces over a real server, seen by an exporter in memory: parents, links and attributes of spans."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, ParentBased
from opentelemetry.trace import SpanKind, StatusCode, get_current_span
from tenacity import wait_none

from rsmq import Broker, ConfigError, Message, Retry, RetryPolicy, Settings
from rsmq.broker.broker import producer_of
from rsmq.producer import Producer
from rsmq.telemetry.tracing import trace
from tests.patience import until
from tests.telemetry.traces import Traces

AGAIN = RetryPolicy(max_attempts=2, wait=wait_none())


def is_child(span: ReadableSpan, parent: ReadableSpan) -> bool:
    """Whether one span is the other's child."""
    assert span.context is not None
    assert parent.context is not None
    same = span.context.trace_id == parent.context.trace_id
    return same and span.parent is not None and span.parent.span_id == parent.context.span_id


async def test_trace_runs_from_publish_to_handler_to_publish(make: Callable[[Traces], Broker], traces: Traces) -> None:
    """publish -> handle -> publish -> handle: each is the child of the one before, with the conventions' attributes."""
    broker = make(traces)

    @broker.handler("orders", group="billing")
    async def bill(order: dict[str, Any]) -> None:
        await broker.publish("invoices", order, headers={"kind": "test"})

    @broker.handler("invoices", group="mail")
    async def mail(invoice: dict[str, Any], message: Message) -> None:
        assert message.headers["kind"] == "test"

    async with broker.running():
        message_id = await broker.publish("orders", {"n": 1}, key="c-1")
        (last,) = await traces.expect("process invoices")
    first, handled, second = (
        traces.named(name)[0] for name in ("publish orders", "process orders", "publish invoices")
    )
    assert first.parent is None
    assert is_child(handled, first)
    assert is_child(second, handled)
    assert is_child(last, second)
    assert (first.kind, handled.kind) == (SpanKind.PRODUCER, SpanKind.CONSUMER)
    assert dict(first.attributes or {}) == {
        "messaging.system": "rsmq", "messaging.operation.type": "send", "messaging.operation.name": "publish",
        "messaging.destination.name": "orders", "messaging.message.id": message_id,
    }  # fmt: skip
    facts = dict(handled.attributes or {})
    assert facts.pop("messaging.destination.partition.id") in ("0", "1")
    assert facts == {
        "messaging.system": "rsmq", "messaging.operation.type": "process", "messaging.operation.name": "process",
        "messaging.destination.name": "orders", "messaging.consumer.group.name": "billing",
        "messaging.message.id": message_id, "rsmq.attempt": 1,
    }  # fmt: skip
    assert handled.status.status_code == StatusCode.UNSET


async def test_span_of_an_output_is_a_child_of_its_handler(make: Callable[[Traces], Broker], traces: Traces) -> None:
    """Async handler, plain function, and the option `output`."""
    broker = make(traces)

    @broker.handler("orders", group="async")
    async def bill(message: Message) -> None:
        await message.publish("invoices", "x")

    @broker.handler("orders", group="plain")
    def plain(message: Message) -> None:
        message.publish_sync("invoices", "x", headers={"kind": "test"})

    @broker.handler("orders", group="returned", output="invoices")
    async def returned(order: dict[str, Any]) -> str:
        return "x"

    @broker.handler("invoices", group="mail")
    async def mail(message: Message) -> None:
        assert "traceparent" in message.headers

    async with broker.running():
        await broker.publish("orders", {})
        outputs = await traces.expect("publish invoices", 3)
        handled = await traces.expect("process orders", 3)
        mailed = await traces.expect("process invoices", 3)
    assert all(sum(is_child(output, parent) for parent in handled) == 1 for output in outputs)
    assert all(sum(is_child(each, parent) for parent in outputs) == 1 for each in mailed)


async def test_each_attempt_has_its_own_span(make: Callable[[Traces], Broker], traces: Traces) -> None:
    """A failed attempt is an error with its type, one that asks for a retry is none; the publish is their parent."""
    broker = make(traces)

    @broker.handler("fails", group="g", retry=AGAIN)
    async def fail(message: Message) -> None:
        if message.attempt == 1:
            raise ValueError("no")

    @broker.handler("asks", group="g", retry=AGAIN)
    async def ask(message: Message) -> None:
        if message.attempt == 1:
            raise Retry("later")

    async with broker.running():
        await broker.publish("fails", {})
        await broker.publish("asks", {})
        failed, well = await traces.expect("process fails", 2)
        asked, _ = await traces.expect("process asks", 2)
    (published,) = traces.named("publish fails")
    assert is_child(failed, published)
    assert is_child(well, published)
    assert (failed.attributes or {})["error.type"] == "ValueError"
    assert (failed.status.status_code, well.status.status_code) == (StatusCode.ERROR, StatusCode.UNSET)
    assert [(span.attributes or {})["rsmq.attempt"] for span in (failed, well)] == [1, 2]
    assert (asked.status.status_code, (asked.attributes or {})["rsmq.outcome"]) == (StatusCode.UNSET, "retry")


async def test_span_of_a_handler_that_returns_its_error_is_an_error(
    make: Callable[[Traces], Broker], traces: Traces
) -> None:
    """As if it had raised it: it is the failure of an attempt either way. Before, the span was a success."""
    broker = make(traces)

    @broker.handler("fails", group="g", retry=AGAIN)
    async def fail(payload: str, message: Message) -> Any:
        return ValueError(payload) if message.attempt == 1 else None

    @broker.handler("asks", group="g", retry=AGAIN)
    async def ask(message: Message) -> Any:
        return Retry("later") if message.attempt == 1 else None

    async with broker.running():
        await broker.publish("fails", "no")
        await broker.publish("asks", {})
        failed, well = await traces.expect("process fails", 2)
        asked, _ = await traces.expect("process asks", 2)
    assert (failed.attributes or {})["error.type"] == "ValueError"
    assert failed.status.description == "ValueError: no"
    assert (failed.status.status_code, well.status.status_code) == (StatusCode.ERROR, StatusCode.UNSET)
    assert (asked.status.status_code, (asked.attributes or {})["rsmq.outcome"]) == (StatusCode.UNSET, "retry")


@pytest.mark.parametrize("failing", [1, 2])
async def test_span_of_a_batch_says_how_many_messages_failed(
    make: Callable[[Traces], Broker], traces: Traces, failing: int
) -> None:
    """It is an error if all have."""
    broker = make(traces)

    @broker.handler("orders", group="audit", batch=2, linger="1min", partitions=1, retry=RetryPolicy(max_attempts=1))
    async def audit(orders: list[int]) -> list[Any]:
        return [ValueError("no") if n <= failing else None for n in orders]

    async with broker.running():
        await broker.publish_many("orders", [1, 2], key=lambda _: "k")
        (span,) = await traces.expect("process orders")
    facts = span.attributes or {}
    assert (facts["messaging.batch.message_count"], facts["rsmq.batch.failed_count"]) == (2, failing)
    assert facts.get("error.type") == (None if failing == 1 else "ValueError")
    assert span.status.status_code == (StatusCode.UNSET if failing == 1 else StatusCode.ERROR)


async def test_batch_span_is_linked_to_its_publishers(make: Callable[[Traces], Broker], traces: Traces) -> None:
    """A batch has a trace of its own, linked once to each span that published one of its messages."""
    broker = make(traces)

    @broker.handler("orders", group="audit", batch=100, partitions=1)
    async def audit(orders: list[dict[str, Any]]) -> None: ...

    async with broker:
        await broker.topics.ensure("orders", 1)
        await broker.publish("orders", {})
        await broker.publish_many("orders", [{}, {}, {}])
        async with broker.running():
            spans = await traces.expect("process orders")
    single, many = traces.named("publish orders")
    assert (many.attributes or {})["messaging.batch.message_count"] == 3
    linked = {link.context.span_id for span in spans for link in span.links}
    assert linked == {span.context.span_id for span in (single, many) if span.context is not None}
    assert sum(int((span.attributes or {})["messaging.batch.message_count"]) for span in spans) == 4  # type: ignore[arg-type]
    assert all(span.parent is None for span in spans)


async def test_threads_and_sync_handlers_are_in_the_trace(make: Callable[[Traces], Broker], traces: Traces) -> None:
    """A plain function runs inside of its span, and what it publishes without a loop is the span's child."""
    broker = make(traces)

    @broker.handler("orders", group="billing")
    def bill(order: dict[str, Any]) -> None:
        get_current_span().set_attribute("seen", True)
        broker.publish_sync("invoices", order)

    async with broker.running():
        await broker.publish("orders", {})
        (handled,) = await traces.expect("process orders")
        (published,) = await traces.expect("publish invoices")
    assert (handled.attributes or {})["seen"] is True
    assert is_child(published, handled)
    broker._portal.close()


async def test_unsampled_publish_has_no_handler_span(make: Callable[[Traces], Broker], traces: Traces) -> None:
    """The publisher's decision travels with the message: its handlers make no span, and neither do their publishes."""
    silent, done = Traces(ParentBased(ALWAYS_OFF)), asyncio.Event()
    worker_traces, headers = Traces(ParentBased(ALWAYS_ON)), dict[str, str]()
    worker = make(worker_traces)

    @worker.handler("orders", group="billing")
    async def bill(message: Message) -> None:
        headers.update(message.headers)
        await worker.publish("invoices", {})
        done.set()

    async with worker.running(), make(silent) as publisher:
        await publisher.publish("orders", {})
        async with asyncio.timeout(20):
            await done.wait()
    assert int(headers["traceparent"][-2:], 16) % 2 == 0
    assert worker_traces.named("process orders") == worker_traces.named("publish invoices") == []


async def test_share_below_1_traces_only_some_publishes(server_url: str, prefix: str, traces: Traces) -> None:
    """With a share, what is not chosen carries nothing and gets no span anywhere; inside of a span that one decides."""
    broker = Broker(Settings(url=server_url, prefix=prefix, preflight="warn", partitions=1))
    trace(broker, traces.provider, share=0)
    seen, batched = asyncio.Queue[dict[str, str]](), asyncio.Queue[int]()

    @broker.handler("orders", group="billing")
    async def bill(message: Message) -> None:
        seen.put_nowait(message.headers)

    @broker.handler("orders", group="audit", batch=10)
    async def audit(orders: list[dict[str, Any]]) -> None:
        batched.put_nowait(len(orders))

    async with broker.running():
        await broker.publish("orders", {})
        await broker.publish("orders", {}, headers={"kind": "plain"})
        await broker.publish_many("orders", [{}])
        headers = [await asyncio.wait_for(seen.get(), 20) for _ in range(3)]
        assert headers == [{}, {"kind": "plain"}, {}]
        assert await asyncio.wait_for(batched.get(), 20)
        assert traces.named("publish orders") == traces.named("process orders") == []
        with traces.provider.get_tracer("test").start_as_current_span("request"):
            await broker.publish("orders", {})
        await traces.expect("process orders", 2)
    (request,), (published,) = traces.named("request"), traces.named("publish orders")
    assert is_child(published, request)
    with pytest.raises(ConfigError, match="0 to 1"):
        trace(broker, share=7)


async def test_untraced_broker_adds_no_headers_or_spans(
    server_url: str, prefix: str, make: Callable[[Traces], Broker], traces: Traces
) -> None:
    """An untraced broker publishes with the plain producer and without headers; tracing a connected one is refused."""
    seen = asyncio.Queue[dict[str, str]]()
    broker = Broker(Settings(url=server_url, prefix=prefix, preflight="warn"))

    @broker.handler("orders", group="billing")
    async def bill(message: Message) -> None:
        seen.put_nowait(message.headers)

    async with broker.running():
        assert type(producer_of(broker)) is Producer
        await broker.publish("orders", {})
        assert await asyncio.wait_for(seen.get(), 20) == {}
        with pytest.raises(ConfigError, match="connected already"):
            trace(broker, traces.provider)


async def test_unsampled_batch_keeps_the_fast_path(
    server_url: str, prefix: str, make: Callable[[Traces], Broker], traces: Traces
) -> None:
    """A batch handler gets payloads of plain messages without a look at each; one with a context is linked as ever."""
    broker, seen = Broker(Settings(url=server_url, prefix=prefix, preflight="warn", partitions=1)), list[int]()
    trace(broker, traces.provider, share=0)

    @broker.handler("orders", group="audit", batch=100)
    async def audit(orders: list[int]) -> None:
        seen.extend(orders)

    async with broker, make(traces) as elsewhere:
        await broker.publish_many("orders", range(5))
        await elsewhere.publish("orders", 5)
        await broker.publish_many("orders", range(6, 9))
        async with broker.running():
            assert broker.worker is not None
            (consumer,) = broker.worker.consumers
            assert consumer.queue.takes_raw
            (batch,) = await traces.expect("process orders")
            await until(lambda: len(seen) >= 9, "all are handled")
        assert sorted(seen) == list(range(9))
        (published,) = traces.named("publish orders")
        assert [link.context.span_id for link in batch.links] == [published.context and published.context.span_id]


async def test_batch_of_plain_messages_has_a_span_and_keeps_the_fast_path(
    server_url: str, prefix: str, make: Callable[[Traces], Broker], traces: Traces
) -> None:
    """A traced broker handles what an untraced one has published: one span for each batch, linked to nothing."""
    broker, seen = make(traces), list[int]()

    @broker.handler("orders", group="audit", batch=100, partitions=1)
    async def audit(orders: list[int]) -> None:
        assert get_current_span().get_span_context().is_valid
        seen.extend(orders)

    async with Broker(Settings(url=server_url, prefix=prefix, preflight="warn")) as elsewhere, broker.running():
        assert broker.worker is not None
        (consumer,) = broker.worker.consumers
        assert consumer.queue.takes_raw
        await elsewhere.publish_many("orders", range(5))
        await until(lambda: len(seen) == 5, "all are handled")
        spans = await traces.expect("process orders")
    facts = dict(spans[0].attributes or {})
    assert facts.pop("messaging.batch.message_count") in range(1, 6)
    assert facts == {
        "messaging.system": "rsmq", "messaging.operation.type": "process", "messaging.operation.name": "process",
        "messaging.destination.name": "orders", "messaging.consumer.group.name": "audit",
    }  # fmt: skip
    assert not any(span.links for span in spans)
