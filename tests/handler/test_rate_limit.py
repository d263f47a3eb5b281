"""Rate limits: exact, in order, without loss; a rate-limited worker stops at once."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsmq import Broker, ConfigError, Message, Rate, Settings
from rsmq.consumer.waiting import limits
from rsmq.consumer.waiting.key_windows import FEWEST_KEYS, KeyWindows
from rsmq.consumer.waiting.limits import KeyRate, RateLimit
from rsmq.consumer.waiting.queue import Queue
from rsmq.handler.handler import build_handler
from rsmq.handler.rate_limit import Window, share_of
from rsmq.inspector import Inspector
from rsmq.model.clock import ServerClock, monotonic
from tests.consumer.test_queue import make_lane, make_message
from tests.contract.witness import Witness, settled
from tests.patience import until

HOUR = timedelta(hours=1)


@given(
    st.integers(1, 8),
    st.floats(0.1, 10),
    st.lists(st.floats(0, 3, allow_subnormal=False), max_size=60),
)
def test_window_never_exceeds_the_limit(limit: int, seconds: float, steps: list[float]) -> None:
    """At any polling times no time window has more starts than the limit."""
    window, now, starts = Window(), 0.0, list[float]()
    for step in steps:
        now += step
        for _ in range(window.room(now, limit, seconds)):
            window.note(now)
            starts.append(now)
    for at in starts:
        assert sum(1 for each in starts if at <= each < at + seconds * (1 - 1e-9)) <= limit


@given(st.integers(1, 8), st.floats(0.1, 10), st.lists(st.floats(0, 1), min_size=1, max_size=40))
def test_window_wait_is_exact(limit: int, seconds: float, steps: list[float]) -> None:
    """After the wait there is room; a little earlier there is none."""
    window, now = Window(), 0.0
    for step in steps:
        now += step
        if window.room(now, limit, seconds):
            window.note(now)
    wait = window.wait(now, limit, seconds)
    if wait > 1e-6:
        assert window.room(now + wait * 0.99, limit, seconds) == 0
    assert window.room(now + wait * 1.000001 + 1e-9, limit, seconds) > 0


@given(st.integers(1, 1000), st.integers(1, 50), st.floats(0.001, 3600))
def test_shares_of_a_rate_never_exceed_it(limit: int, members: int, seconds: float) -> None:
    """All members together start at most the rate per second."""
    rate = Rate(limit, per=timedelta(seconds=seconds))
    mine, span = share_of(rate, members)
    assert mine >= 1
    assert members * mine / span <= limit / rate.per.total_seconds() * (1 + 1e-9)
    assert share_of(Rate(limit, per=rate.per, over="member"), members) == (limit, rate.per.total_seconds())


class Clock:
    """A clock that the test moves, and timers that it fires."""

    def __init__(self) -> None:
        self.now, self.opened = 0.0, 0


async def test_rate_limit_holds_messages_back_until_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the limit it yields nothing, and keeps the waiting messages in order."""
    clock, queue = Clock(), Queue(is_ordered=False)
    monkeypatch.setattr(limits, "monotonic", lambda: clock.now)
    queue.rate_limit = RateLimit(
        Rate(2, per=timedelta(seconds=10)), lambda: 1, lambda: setattr(clock, "opened", clock.opened + 1)
    )
    queue.ready.extend(["a", "b", "c", "d", "e"])
    taken: list[Any] = []
    while (message := queue.take()) is not None:
        taken.append(message)
    assert (taken, queue.startable(), queue.can_take(), len(queue.ready)) == (["a", "b"], 0, False, 3)
    clock.now = 9.9
    assert not queue.can_take()
    clock.now = 10.0
    assert queue.startable() == 2
    taken = [queue.take(), queue.take()]
    assert taken == ["c", "d"]
    assert [*queue.ready] == ["e"], "what is withdrawn is all of it"
    queue.ready.clear()
    clock.now = 30.0
    assert (queue.startable(), queue.take()) == (0, None)


def limited(url: str, prefix: str, witness: Witness, rate: Rate | None, **settings: Any) -> Broker:
    """A broker whose handler records (key, n)."""
    broker = Broker(Settings(url=url, prefix=prefix, preflight="warn", **settings))

    @broker.handler("t", group="g", rate=rate)
    async def handle(order: dict[str, Any]) -> None:
        witness.note((order["key"], order["n"]))

    return broker


@pytest.fixture
def make(server_url: str, prefix: str) -> Callable[..., Broker]:
    """Makes members of one group."""
    return lambda witness, rate, **settings: limited(server_url, prefix, witness, rate, **settings)


async def publish(broker: Broker, keys: int, each: int) -> set[tuple[str, int]]:
    """So many messages of so many keys."""
    items = [{"key": f"k{key}", "n": n} for n in range(each) for key in range(keys)]
    await broker.publish_many("t", items, key=lambda item: str(item["key"]))
    return {(str(item["key"]), int(str(item["n"]))) for item in items}


async def test_rate_limited_handler_keeps_order_and_loses_nothing(make: Callable[..., Broker]) -> None:
    """Each message once, in order per key, and not faster than the rate."""
    witness, broker = Witness(), None
    broker = make(witness, Rate(20, per=timedelta(milliseconds=250)))
    async with broker:
        expected = await publish(broker, keys=5, each=12)
        began = time.monotonic()
        async with broker.running():
            await witness.sees(expected)
            await settled(broker, "t")
    assert time.monotonic() - began >= 2 * 0.25, "60 messages at 20 in a quarter of a second"
    by_key = defaultdict(list)
    for key, n in witness.seen:
        by_key[key].append(n)
    assert all(numbers == sorted(numbers) for numbers in by_key.values())


async def test_rate_limited_worker_stops_at_once(make: Callable[..., Broker]) -> None:
    """A stop hands held-back messages back without waiting for their turn; another worker handles them."""
    first, second = Witness(), Witness()
    slow = make(first, Rate(3, per=HOUR), stop_grace=HOUR)  # a stop that waited for its turn would not end
    async with slow:
        expected = await publish(slow, keys=4, each=5)
        async with slow.running():
            await until(lambda: len(first.seen) == 3, "the limit is reached")
        async with make(second, None).running():
            await second.sees(expected - set(first.seen))
            await settled(slow, "t")
    assert len(first.seen) + len(second.seen) == len(expected)


async def test_rate_is_shared_by_the_members(make: Callable[..., Broker]) -> None:
    """Two members of a group start half of the rate each."""
    one, other = Witness(), Witness()
    brokers = make(one, Rate(8, per=HOUR)), make(other, Rate(8, per=HOUR))
    async with brokers[0].running(), brokers[1].running():
        found = [consumer for broker in brokers if broker.worker is not None for consumer in broker.worker.consumers]
        await until(lambda: all(len(each.membership.live) == 2 for each in found), "they see each other")
        await until(lambda: all(len(each.lanes) == 4 for each in found), "each has half the partitions")
        await publish(brokers[0], keys=40, each=2)
        await until(lambda: len(one.seen) == len(other.seen) == 4, "each handles its share")
        queues = [each.queue for each in found]
        await until(lambda: all(queue.rate_limit and queue.ready for queue in queues), "the rest waits")
        assert not any(queue.startable() for queue in queues)
        assert len(one.seen) == len(other.seen) == 4


async def test_rate_by_key_holds_for_each_key_and_through_a_handover(make: Callable[..., Broker]) -> None:
    """No key starts more, also where its partition changes its owner. Keys do not hold up each other, and the worker
    counts what waits. Without the limit the rest is handled, in order."""
    witnesses = Witness(), Witness(), Witness()
    one, other = (make(witness, Rate(2, per=HOUR, by="key")) for witness in witnesses[:2])

    def handled() -> list[tuple[str, int]]:
        return [each for witness in witnesses for each in witness.seen]

    async with one, one.running():
        expected = await publish(one, keys=20, each=5)
        await witnesses[0].sees((key, n) for key, n in expected if n < 2)
        (consumer,) = one.worker.consumers if one.worker is not None else ()
        await until(lambda: consumer.queue.limited == 60, "the rest is counted as limited")
        assert consumer.queue.in_flight == 0, "what is limited does not fill the prefetch"
        inspector = Inspector(one.client, one.keys, one.settings)

        async def shown() -> bool:
            return [member.work.waiting_for_rate for member in (await inspector.snapshot()).members] == [60]

        await until(shown, "rsmq top shows it")
        async with other.running():
            (second,) = other.worker.consumers if other.worker is not None else ()
            await until(lambda: len(second.lanes) == 4, "half of the partitions are handed over")
            await until(lambda: consumer.queue.limited + second.queue.limited == 60, "the new owner holds them back")
            await other.publish("t", {"key": "new", "n": 0}, key="new")
            await until(lambda: ("new", 0) in handled(), "another key is handled")
        assert len(handled()) == 41
    async with make(witnesses[2], None).running():
        await witnesses[2].sees((key, n) for key, n in expected if n >= 2)
        async with one:
            await settled(one, "t")
    by_key = defaultdict(list)
    for key, n in handled():
        by_key[key].append(n)
    assert by_key.pop("new") == [0]
    assert all(numbers == [0, 1, 2, 3, 4] for numbers in by_key.values())


@pytest.mark.parametrize("takes_message", [False, True])
async def test_rates_by_key_and_by_name_hold_both(server_url: str, prefix: str, takes_message: bool) -> None:
    """What one of them holds back does not count for the other, and each says what waits for it."""
    broker, seen = Broker(Settings(url=server_url, prefix=prefix, preflight="warn")), list[str]()
    rates = Rate(2, per=HOUR, by="key"), Rate(6, per=HOUR, by=lambda message: message.data.decode().strip('"')[0])
    if takes_message:

        @broker.handler("t", group="g", rate=rates)
        async def note_message(text: str, _message: Message) -> None:
            seen.append(text)
    else:

        @broker.handler("t", group="g", rate=rates)
        async def note(text: str) -> None:
            seen.append(text)

    async with broker, broker.running():
        (consumer,) = broker.worker.consumers if broker.worker is not None else ()
        await broker.publish_many("t", [f"a{n}" for n in range(4)], key=lambda _: "one")
        await until(lambda: len(seen) == 2, "the key one has two")
        await broker.publish_many("t", [f"a{n}" for n in range(10)], key=lambda text: text)
        await until(lambda: len(seen) == 6, "the name a has six, and none was used by what waits for its key")
        await broker.publish_many("t", [f"b{n}" for n in range(5)], key=lambda text: text[1:])
        await until(lambda: len(seen) == 11, "the name b has room")
        assert seen[:2] == ["a0", "a1"]
        assert consumer.queue.message_rate is not None
        waiting = consumer.queue.message_rate.waiting(consumer.lanes.values())
        assert waiting == {"one": 2, "a": 6}
        assert consumer.queue.limited == 8
        assert sum(len(lane.windows or ()) for lane in consumer.lanes.values()) == 1 + 4 + 5, "only what has started"


async def test_rate_by_key_opens_again(make: Callable[..., Broker]) -> None:
    """Each held message starts when the window of its key has room, in order."""
    witness = Witness()
    broker = make(witness, Rate(2, per=timedelta(milliseconds=60), by="key"))
    async with broker, broker.running():
        expected = await publish(broker, keys=3, each=9)
        await witness.sees(expected)
        await settled(broker, "t")
    assert [n for key, n in witness.seen if key == "k1"] == list(range(9))


async def test_starts_of_keys_are_packed_for_the_next_owner() -> None:
    """Only those that still count, by the server's clock; keys of any bytes."""
    clock, lane, next_lane = ServerClock(), make_lane(0), make_lane(0)
    rate = KeyRate(Rate(2, per=HOUR, by="key"), clock, lambda *_: None)
    for number in range(2500):
        assert rate.starts(make_message(lane, number + 1, 1 + number // 2), lane)
    assert lane.windows is not None
    assert len(lane.windows) == 1250
    lane.windows.restore({b"\xff": [monotonic()], b"old": [monotonic() - 2 * HOUR.total_seconds()]})
    other = KeyRate(Rate(2, per=HOUR, by="key"), clock, lambda *_: None)
    other.unpack(next_lane, rate.pack(lane).encode())
    assert next_lane.windows is not None
    assert len(next_lane.windows) == 1251
    assert next_lane.windows.admit([b"\xff"] * 2, monotonic(), monotonic()) == 1, "one of two starts was taken along"
    assert not other.starts(make_message(next_lane, 1, 7), next_lane)
    quick, brief = KeyRate(Rate(1, per=timedelta(microseconds=1), by="key"), clock, lambda *_: None), make_lane(0)
    for number in range(5000):
        assert quick.starts(make_message(brief, number + 1, number + 1), brief)
    assert brief.windows is not None
    assert len(brief.windows) <= 2 * FEWEST_KEYS, "keys whose time is over are forgotten"


@given(
    st.integers(1, 4),
    st.lists(st.tuples(st.floats(0, 2), st.lists(st.sampled_from([b"a", b"b", None])), st.integers(0, 5)), max_size=40),
)
def test_windows_of_keys_decide_as_a_plain_list_of_starts(
    limit: int, pages: list[tuple[float, list[bytes | None], int]]
) -> None:
    """Whole pages of keys, of which some are given back: each start is admitted if, and only if, its key has room."""
    windows, now, starts = KeyWindows(limit, 3.0), 0.0, defaultdict[bytes | None, list[float]](list)
    for step, keys, back in pages:
        now += step
        expected = list[bytes | None]()
        for key in keys:
            if key is not None and sum(1 for at in starts[key] if at > now - 3.0) >= limit:
                break
            starts[key].append(now)
            expected.append(key)
        count = windows.admit(keys, now, now)
        assert count == len(expected)
        if count < len(keys):
            held = keys[count]
            assert held is not None
            assert windows.wait(held, now) == pytest.approx(starts[held][-limit] + 3.0 - now)
        unused = expected[max(0, len(expected) - back) :]
        windows.give_back(unused)
        for key in unused:
            starts[key].pop()
    for key, times in windows.open_ones(now).items():
        assert [at for at in times if at > now - 3.0] == [at for at in starts[key] if at > now - 3.0]


@pytest.mark.parametrize(
    ("rate", "options", "problem"),
    [
        (Rate(1, by="key"), {"ordering": "none"}, "needs the owner of a key"),
        (Rate(1, by="key"), {"distribution": "shared"}, "needs the owner of a key"),
        (100, {}, "rate=100 is not a Rate: write rate=Rate"),
        (Rate(1), {"batch": 5}, "rate counts single messages: leave batch out"),
        ([Rate(1), 5], {}, "rate=5 is not a Rate"),
        ([Rate(1), Rate(2)], {}, "several rates of one kind"),
        ([Rate(1, by=str), Rate(2, by=repr)], {}, "several rates of one kind"),
        ([Rate(1), Rate(1, by="key")], {"ordering": "none"}, "needs the owner of a key"),
    ],
)
def test_handler_with_an_impossible_rate_is_refused(rate: Any, options: dict[str, Any], problem: str) -> None:
    """The error comes when the handler is registered."""

    async def handle(orders: list[dict[str, int]]) -> None: ...

    with pytest.raises(ConfigError, match=problem):
        build_handler(handle, "t", group="g", rate=rate, **options)


@pytest.mark.parametrize(
    "wrong",
    [
        {"limit": 1, "over": "key"},
        {"limit": 0},
        {"limit": 1.5},
        {"limit": 1, "per": 1},
        {"limit": 1, "over": "all"},
        {"limit": 1, "by": "topic"},
    ],
)
def test_impossible_rate_is_refused(wrong: dict[str, Any]) -> None:
    """A number without a unit, or out of range."""
    with pytest.raises(ConfigError, match=r"a rate (of|per|over|by) .* (not possible|unknown)|per=1 is not a duration"):
        Rate(**wrong)


def test_rate_over_a_key_names_the_other_option() -> None:
    """`over` and `by` are easily mistaken for each other."""
    with pytest.raises(ConfigError, match="or by='key'"):
        Rate(1, over="key")  # type: ignore[arg-type]
