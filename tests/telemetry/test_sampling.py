"""What a sampler of the SDK leaves out: decided without it, and in handlers as if it had been asked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from opentelemetry import baggage, context
from opentelemetry.context import Context
from opentelemetry.propagate import inject
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import (
    ALWAYS_OFF,
    ALWAYS_ON,
    Decision,
    ParentBased,
    Sampler,
    SamplingResult,
    TraceIdRatioBased,
)
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    TraceFlags,
    get_current_span,
    get_tracer,
    set_span_in_context,
    use_span,
)

from rsmq import Broker, Message
from rsmq.model.message import MessageOrigin, entry_fields
from rsmq.telemetry.propagation import Propagation, is_sampled
from rsmq.telemetry.sampling import Sampling
from rsmq.telemetry.tracing import PublishSpan
from tests.telemetry.traces import Traces

LOW = (1 << 64) - 1
HALF = ParentBased(TraceIdRatioBased(0.5))


class Recording(Sampler):
    """A sampler of a user's own, which counts."""

    def __init__(self) -> None:
        self.asked = 0

    def should_sample(self, *_: Any, **__: Any) -> SamplingResult:
        self.asked += 1
        return SamplingResult(Decision.RECORD_AND_SAMPLE)

    def get_description(self) -> str:
        return HALF.get_description()


class Counted(RandomIdGenerator):
    """A generator of a user's own, which gives these ids to traces."""

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids

    def generate_trace_id(self) -> int:
        return self.ids.pop(0)

    def is_trace_id_random(self) -> bool:
        return False


def sampling_of(traces: Traces, share: float = 1.0) -> Sampling:
    """What a producer has."""
    return Sampling(share, get_tracer("test", tracer_provider=traces.provider), Propagation())


def message_with(headers: dict[str, str], key: str | None) -> Message:
    """A message as it is read."""
    fields = entry_fields(b"{}", "id-1", key, headers=headers)
    packed = [each if isinstance(each, bytes) else each.encode() for each in fields]
    return Message(MessageOrigin("orders", 0, "billing"), b"1-1", packed)


def test_ratio_is_compared_before_a_span_is_made_and_gives_the_same_traces() -> None:
    """The ids that the generator makes are compared as the SDK does; what is sampled gets a span with that id."""
    bound = TraceIdRatioBased.get_bound_for_rate(0.5)
    ids = [(7 << 64) + low for low in (bound, bound - 1, LOW, 0)]
    traces = Traces(HALF, Counted(list(ids)))
    sampling, written = sampling_of(traces), []
    for _ in ids:
        decision = sampling.decide()
        if isinstance(decision, int):
            with PublishSpan(sampling, Propagation(), "orders", decision) as span:
                written.append(span.inject(None)["traceparent"])
        else:
            written.append(decision["traceparent"])
    assert [int(each.split("-")[1], 16) for each in written] == ids
    assert [each[-2:] for each in written] == ["00", "01", "00", "01"]
    assert [span.context and span.context.trace_id for span in traces.named("publish orders")] == [ids[1], ids[3]]


def test_other_tracers_of_the_provider_keep_their_ids() -> None:
    """An id that was compared for a publish is used by that publish only."""
    traces = Traces(HALF, Counted([1, 2, 3]))
    sampling = sampling_of(traces)
    decision = sampling.decide()
    assert decision == 1
    with get_tracer("test", tracer_provider=traces.provider).start_as_current_span("other") as other:
        assert other.get_span_context().trace_id == 2
    assert isinstance(decision, int)
    with other_parent(), PublishSpan(sampling, Propagation(), "orders", decision):
        pass
    assert traces.named("publish orders")[0].context.trace_id == 99  # type: ignore[union-attr]
    assert isinstance(traces.provider.get_tracer("test").id_generator, Counted)  # type: ignore[attr-defined]
    assert sampling.decide() == 3


def other_parent() -> Any:
    """A block inside of a sampled span of another service."""
    return use_span(NonRecordingSpan(SpanContext(99, 1, True, TraceFlags(TraceFlags.SAMPLED))))


@pytest.mark.parametrize(
    "sampler", [Recording(), ParentBased(ALWAYS_ON), TraceIdRatioBased(0.5), ParentBased(Recording())]
)
def test_other_samplers_are_asked_for_each_publish(sampler: Sampler) -> None:
    """Only the SDK's ParentBased over a rate is known: also a sampler that calls itself so is asked."""
    assert [sampling_of(Traces(sampler)).decide() for _ in range(5)] == [0] * 5


def test_unsampled_parent_is_passed_on_without_a_span() -> None:
    """With its ids, its state and the baggage; a sampled parent gets a child."""
    sampling = sampling_of(Traces(HALF))
    for flags, expected in ((0, "00"), (1, None)):
        parent = NonRecordingSpan(SpanContext(5, 6, True, TraceFlags(flags)))
        token = context.attach(baggage.set_baggage("user", "ada", set_span_in_context(parent, Context())))
        try:
            decision = sampling.decide()
            assert decision == (
                0 if expected is None else {"traceparent": f"00-{5:032x}-{6:016x}-{expected}", "baggage": "user=ada"}
            )
        finally:
            context.detach(token)


def test_always_off_and_share_leave_out_everything() -> None:
    """A sampler that is off sends its decision along; a share of 0 sends nothing, and asks no generator."""
    decision = sampling_of(Traces(ParentBased(ALWAYS_OFF))).decide()
    assert isinstance(decision, dict)
    assert decision["traceparent"].endswith("-02")
    assert sampling_of(Traces(HALF, Counted([])), share=0.0).decide() == {}


@pytest.mark.parametrize(
    ("headers", "sampled", "trace_id"),
    [
        ({"traceparent": f"00-{5:032x}-{6:016x}-01"}, True, 5),
        ({"traceparent": f"00-{5:032x}-{6:016x}-02"}, False, 5),
        ({"kind": "x", "traceparent": f"00-{5:032x}-{6:016x}-03"}, True, 5),
        ({"traceparent": f"00-{5:032x}-{6:016x}-01", "tracestate": "a=b"}, True, 5),
        ({"traceparent": f"00-{5:032x}-{0:016x}-01"}, None, 0),
        ({"traceparent": f"00-{0:032x}-{6:016x}-01"}, None, 0),
        ({"traceparent": f"00-{5:032x}-+{6:015x}-01"}, None, 0),
        ({"kind": "x"}, None, 0),
    ],
)
@pytest.mark.parametrize("key", ["k", None])
def test_context_of_a_message(headers: dict[str, str], sampled: bool | None, trace_id: int, key: str | None) -> None:
    """Read as the SDK reads it, whatever else is among the headers."""
    scope, span = Propagation().extract(message_with(headers, key))
    assert is_sampled(span) is sampled
    assert span.get_span_context().trace_id == trace_id
    assert get_current_span(scope).get_span_context() == span.get_span_context()
    back = dict[str, str]()
    inject(back, scope)
    assert back == ({name: text for name, text in headers.items() if name != "kind"} if sampled is not None else {})


def test_fields_of_other_producers_are_headers_too() -> None:
    """An entry may have its baggage in a field beside the headers."""
    headers = b'{"traceparent":"00-%032x-%016x-00"}' % (5, 6)
    entry = [b"data", b"{}", b"baggage", b"user=ada", b"h", headers]
    message = Message(MessageOrigin("orders", 0, "billing"), b"1-1", entry)
    scope, span = Propagation().extract(message)
    assert is_sampled(span) is False
    assert baggage.get_all(scope) == {"user": "ada"}


async def test_handler_of_an_unsampled_message_is_in_its_trace(make: Callable[[Traces], Broker]) -> None:
    """Its log lines can name the trace, its own spans are not sampled, and the decision travels on. No span is made."""
    traces, seen = Traces(ParentBased(TraceIdRatioBased(0.0))), asyncio.Queue[tuple[Message, SpanContext]]()
    broker, tracer = make(traces), traces.provider.get_tracer("handler")

    @broker.handler("orders", group="billing")
    async def bill(message: Message) -> None:
        seen.put_nowait((message, get_current_span().get_span_context()))
        with tracer.start_as_current_span("work"):
            await asyncio.sleep(0)
            await broker.publish("invoices", {}, headers={"kind": "test"})
            await message.publish("invoices", {})
            await broker.publish_many("invoices", [{}], headers={"kind": "many"})

    @broker.handler("invoices", group="mail")
    async def mail(message: Message) -> None:
        seen.put_nowait((message, get_current_span().get_span_context()))

    async with broker.running():
        await broker.publish("orders", {}, key="ada")
        found = [await asyncio.wait_for(seen.get(), 20) for _ in range(4)]
    assert len({here.trace_id for _, here in found}) == 1
    assert all(here.is_remote and here.is_valid and not here.trace_flags.sampled for _, here in found)
    assert all(f"{here.trace_id:032x}-{here.span_id:016x}" in each.headers["traceparent"] for each, here in found)
    assert sorted(each.headers.get("kind", "") for each, _ in found) == ["", "", "many", "test"]
    assert not any(traces.named(name) for name in ("work", "publish orders", "process orders", "publish invoices"))


async def test_batch_is_linked_to_sampled_publishes_only(make: Callable[[Traces], Broker], traces: Traces) -> None:
    """128 links are the most: what leads to a span that was left out would take their places."""
    silent = Traces(ParentBased(ALWAYS_OFF))
    broker = make(traces)

    @broker.handler("orders", group="audit", batch=500, partitions=1)
    async def audit(orders: list[dict[str, Any]]) -> None: ...

    async with broker, make(silent) as elsewhere:
        await broker.topics.ensure("orders", 1)
        await asyncio.gather(*(elsewhere.publish("orders", {}) for _ in range(150)))
        await broker.publish("orders", {})
        async with broker.running():
            spans = await traces.expect("process orders")
    (published,) = traces.named("publish orders")
    linked = [link.context.span_id for span in spans for link in span.links]
    assert linked == [published.context and published.context.span_id]
