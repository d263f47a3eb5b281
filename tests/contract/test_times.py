"""`when`: a message waits until its handler's rule lets it start. Order, counts and bounds hold all the same."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import anyio
import pytest

from rsmq import Broker, ConfigError, Message, MessageRef, RetryPolicy
from rsmq.control import Cancelled
from rsmq.inspector.observer import Observer
from rsmq.model.clock import epoch_ms
from rsmq.redis.streams import reset_group
from tests.contract.witness import Witness, ask, cut_connections, dies, letters_of, settled
from tests.matrix.way import steady_connections
from tests.patience import until

Make = Callable[..., Broker]
TOMORROW = datetime.now(UTC).replace(microsecond=0) + timedelta(days=1)


class Rule:
    """A rule by headers: `sleep` waits for tomorrow. It counts how often each message was asked about."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.is_night = True

    def __call__(self, message: Message) -> datetime | None:
        self.asked.append(message.data.decode())
        return TOMORROW if self.is_night and "sleep" in message.headers else None


class Night:
    """A handler with a rule, of one partition."""

    def __init__(self, broker: Broker, witness: Witness, rule: Any = None, **options: Any) -> None:
        self.broker, self.witness, self.attempts = broker, witness, list[int]()
        self.rule = Rule() if rule is None else rule
        broker.handler("t", group="g", when=self.rule, partitions=1, **options)(self.handle)

    async def handle(self, data: str, message: Message) -> None:
        self.attempts.append(message.attempt)
        self.witness.note(data)
        if data.startswith("bad"):
            raise ValueError("not now")

    async def publish(self, data: str, key: str | None, *, sleep: bool = False) -> MessageRef:
        return await self.broker.publish("t", data, key=key, headers={"sleep": "1"} if sleep else {})

    async def counts(self) -> list[int]:
        rows = await ask(self.broker, "XPENDING", self.broker.keys.stream("t", 0), "g", "-", "+", 10_000)
        return [row[3] for row in rows]

    async def waits(self) -> dict[str, float]:
        flat = await ask(self.broker, "ZRANGE", self.broker.keys.waits("t", 0, "g"), 0, -1, "WITHSCORES")
        return {each.decode(): float(due) for each, due in zip(flat[::2], flat[1::2], strict=True)}

    async def wait_for(self, number: int) -> None:
        """So many messages wait for a time, and the server knows it."""
        with anyio.fail_after(30):
            while len(await self.waits()) != number:
                await anyio.sleep(0.01)

    async def wait_for_counts(self, *counts: int) -> None:
        """The counts of all that is pending are these."""
        with anyio.fail_after(30):
            while await self.counts() != list(counts):
                await anyio.sleep(0.01)

    async def state(self, ref: MessageRef) -> str:
        status = (await self.broker.look(ref)).group("g")
        assert status is not None
        return status.state


@steady_connections
async def test_message_that_may_not_start_yet_waits_with_a_count_of_0_and_its_key_with_it(
    broker: Broker, witness: Witness
) -> None:
    """Other keys go on. It is seen until when it waits, and starts when it is rescheduled, without another question."""
    night = Night(broker, witness)
    async with broker.running():
        first = await night.publish("first", "ada", sleep=True)
        second = await night.publish("second", "ada")
        await night.publish("other", "bob")
        await witness.sees(["other"])
        await night.wait_for(1)
        await night.wait_for_counts(0, 0)
        assert await night.state(second) == "waiting_for_key"
        status = (await broker.look(first)).group("g")
        assert status is not None
        assert (status.state, status.due) == ("waiting_for_time", TOMORROW)
        assert f"waits until {TOMORROW}" in status.text
        assert await night.waits() == {status_id(await broker.look(first)): float(epoch_ms(TOMORROW))}
        assert await broker.reschedule(first, delay=timedelta(0)) is not None
        await witness.sees(["first", "second"])
        await settled(broker, "t")
        await night.wait_for(0)
    assert witness.seen == ["other", "first", "second"]
    assert night.attempts == [1, 1, 1]
    assert night.rule.asked.count("first") == 1


def status_id(status: Any) -> str:
    """The stream id of a status."""
    return str(status.stream_id)


async def test_message_that_waits_for_a_time_starts_when_it_is_due_and_not_before(
    broker: Broker, witness: Witness
) -> None:
    """By the server's clock; with and without a key, in order of the due times."""
    dues = {"late": 400, "soon": 200, "alone": 300}
    started: dict[str, int] = {}
    begun = epoch_ms(datetime.now(UTC))

    def rule(message: Message) -> datetime | None:
        return datetime.fromtimestamp((begun + dues[message.data.decode()]) / 1000, UTC)

    @broker.handler("t", group="g", when=rule, partitions=1)
    async def handle(data: str) -> None:
        seconds, micros = await ask(broker, "TIME")
        started[data] = int(seconds) * 1000 + int(micros) // 1000 - begun
        witness.note(data)

    async with broker.running():
        for data in ("late", "soon"):
            await broker.publish("t", data, key=data)
        await broker.publish("t", "alone")
        await witness.sees(dues)
    assert all(started[each] >= dues[each] for each in dues)


async def test_cancelled_message_that_waits_for_a_time_lets_its_key_go(broker: Broker, witness: Witness) -> None:
    """The answer comes at once and is final."""
    night = Night(broker, witness)
    async with broker.running():
        first = await night.publish("first", "ada", sleep=True)
        await night.wait_for(1)
        await night.publish("second", "ada")
        assert isinstance(await broker.cancel(first), Cancelled)
        await witness.sees(["second"])
        await settled(broker, "t")
        assert await night.state(first) == "cancelled"
    assert witness.seen == ["second"]


async def test_what_waits_for_a_time_is_no_backlog(broker: Broker, witness: Witness) -> None:
    """It stands beside it, and is not the oldest message; a scaler wants no worker for it."""
    night = Night(broker, witness)
    async with broker.running():
        for number in range(5):
            await night.publish(f"m{number}", f"k{number % 3}", sleep=True)
        await night.wait_for(3)
        await night.wait_for_counts(0, 0, 0, 0, 0)
        assert broker.worker is not None
        (consumer,) = broker.worker.consumers
        assert (consumer.work.waiting_for_time, consumer.work.backlog) == (5, 0)
        observer = Observer(broker.client, broker.keys, broker.settings)
        (group,) = (await observer.snapshot()).groups
        assert (group.pending, group.unread, group.shares[0].oldest) == (5, 0, None)


async def test_next_owner_keeps_the_due_times_and_does_not_ask_the_rule(make_broker: Make, witness: Witness) -> None:
    """A worker ends; another one finds what waits, with its count of 0 and its time."""
    first = Night(make_broker(), witness)
    async with first.broker.running():
        refs = [await first.publish(f"m{number}", f"k{number}", sleep=True) for number in range(3)]
        await first.wait_for(3)
        before = await first.waits()
    second = Night(make_broker(), witness)
    async with second.broker.running():
        await second.publish("other", "bob")
        await witness.sees(["other"])
        await until(lambda: resting(second.broker) == 3, "they wait in the new owner")
        assert await second.waits() == before
        assert second.rule.asked == ["other"]
        await second.wait_for_counts(0, 0, 0)
        for ref in refs:
            await second.broker.reschedule(ref, delay=timedelta(0))
        await witness.sees(["m0", "m1", "m2"])
        await settled(second.broker, "t")
    assert second.attempts == [1, 1, 1, 1]


def resting(broker: Broker) -> int:
    """How many messages wait for a time in a worker."""
    consumers = broker.worker.consumers if broker.worker is not None else ()
    return sum(len(lane.flows.resting) for consumer in consumers for lane in consumer.lanes.values())


async def test_retry_that_comes_due_in_quiet_hours_waits_and_keeps_its_count(broker: Broker, witness: Witness) -> None:
    """The second attempt of a message waits for its time."""
    rule = Rule()
    rule.is_night = False
    night = Night(broker, witness, rule, retry=RetryPolicy(max_attempts=2, wait=lambda _: 3600.0))

    async with broker.running():
        ref = await broker.publish("t", "bad", key="ada", headers={"sleep": "1"})
        await witness.sees(["bad"])
        rule.is_night = True
        while await night.state(ref) != "waiting_for_retry":  # its handler has noted it before it failed
            await anyio.sleep(0.01)
        await broker.reschedule(ref, delay=timedelta(0))
        await night.wait_for(1)
        await night.wait_for_counts(1)
        assert await night.state(ref) == "waiting_for_time"
        await broker.reschedule(ref, delay=timedelta(0))
        await until(lambda: len(night.attempts) == 2, "it is tried again")
        assert await dies(broker, "t", "g", 1) == [("failed", b"bad")]
    assert night.attempts == [1, 2]


async def test_error_of_a_rule_is_a_failed_attempt(broker: Broker, witness: Witness) -> None:
    """The handler is not called; what returns no time is an error, too."""

    def rule(message: Message) -> Any:
        if message.data == b"naive":
            return datetime(2099, 1, 1)
        return message.headers["tz"] if message.data == b"fails" else None

    night = Night(broker, witness, rule, retry=RetryPolicy(max_attempts=1))
    async with broker.running():
        for data in ("fails", "naive", "fine"):
            await night.publish(data, data)
        await witness.sees(["fine"])
        await dies(broker, "t", "g", 2)
        letters = await letters_of(broker, "t", "g")
    naive, failed = sorted(letters, key=lambda letter: letter.error)
    assert "has no time zone" in naive.error
    assert "KeyError: 'tz'" in failed.error
    assert witness.seen == ["fine"]


@steady_connections
@pytest.mark.parametrize("ordering", ["key", "none"])
async def test_many_messages_that_wait_for_a_time_hold_up_no_others(
    make_broker: Make, witness: Witness, ordering: str
) -> None:
    """Far more than the worker keeps in memory, with and without order and keys; then their time comes."""
    broker = make_broker(prefetch=20)
    night = Night(broker, witness, ordering=ordering)
    async with broker.running():
        refs = [
            await night.publish(f"m{number}", None if number % 3 == 0 else f"k{number % 50}", sleep=True)
            for number in range(300)
        ]
        await night.publish("awake", "free")
        await witness.sees(["awake"])
        await until(lambda: far(broker) == 300, "all of them wait as ids")
        await night.wait_for(150 if ordering == "key" else 300)  # what is behind a key needs no time of its own
        night.rule.is_night = False
        for entry_id in await night.waits():
            await ask(broker, "ZADD", broker.keys.waits("t", 0, "g"), 1, entry_id)
        await broker.reschedule(refs[0], delay=timedelta(0))  # the owner looks
        await witness.sees([f"m{number}" for number in range(300)])
        await settled(broker, "t")
        await night.wait_for(0)
    if ordering == "key":
        numbers = [int(each[1:]) for each in witness.seen if each[0] == "m" and int(each[1:]) % 3]
        for key in range(50):
            own = [each for each in numbers if each % 50 == key]
            assert own == sorted(own)
    assert set(night.attempts) == {1}


def far(broker: Broker) -> int:
    """How many messages wait of which only the id is kept."""
    consumers = broker.worker.consumers if broker.worker is not None else ()
    return sum(consumer.queue.far(consumer.lanes.values()) for consumer in consumers)


@pytest.mark.parametrize("loss", ["reset", "flush", "waits"])
async def test_what_waits_for_a_time_outlives_a_loss(broker: Broker, witness: Witness, loss: str) -> None:
    """A reset of the group asks the rule again, after FLUSHALL nothing is left; lost times are asked about anew."""
    night = Night(broker, witness)
    async with broker.running():
        await night.publish("first", "ada", sleep=True)
        await night.publish("second", "ada")
        await night.wait_for(1)
        topic = await broker.topics.find("t")
        assert topic is not None
        if loss == "reset":
            await reset_group(broker.client, broker.keys, topic, "g", "earliest")
        elif loss == "flush":
            names = [broker.keys.stream("t", 0), broker.keys.waits("t", 0, "g"), broker.keys.lease("t", 0, "g")]
            await ask(broker, "DEL", *names)
            await until(lambda: resting(broker) == 0, "nothing waits any more")
            await night.publish("first", "ada", sleep=True)
            await night.publish("second", "ada")
        else:
            await ask(broker, "DEL", broker.keys.waits("t", 0, "g"))
            await cut_connections(broker)
        with anyio.fail_after(30):
            while [*(await night.waits()).values()] != [float(epoch_ms(TOMORROW))]:
                await anyio.sleep(0.01)
        night.rule.is_night = False
        for entry_id in await night.waits():
            await broker.reschedule(await broker_ref(broker, entry_id), topic="t", delay=timedelta(0))
        await witness.sees(["first", "second"])
        await settled(broker, "t")
    assert witness.seen == ["first", "second"]


async def broker_ref(broker: Broker, entry_id: str) -> str:
    """The id of the message of an entry."""
    ((_, fields),) = await ask(broker, "XRANGE", broker.keys.stream("t", 0), entry_id, entry_id)
    return str(dict(zip(fields[::2], fields[1::2], strict=True))[b"id"].decode())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"when": "22:00"}, "when='22:00' is no rule: write QuietHours"),
        ({"when": print, "batch": 10}, "when lets single messages wait: leave batch out"),
        ({"when": print, "distribution": "shared"}, "because no member owns them"),
        ({"when": print, "ordering": "partition"}, "stops its whole partition"),
    ],
)
def test_rule_that_cannot_hold_is_refused(broker: Broker, options: dict[str, Any], text: str) -> None:
    """The error says what to do."""

    async def one(data: Any) -> None: ...
    async def many(data: list[Any]) -> None: ...

    with pytest.raises(ConfigError, match=text):
        broker.handler("t", group="g", **options)(many if "batch" in options else one)


async def test_rule_without_read_ahead_is_refused(make_broker: Make) -> None:
    """What waits is kept as ids."""
    broker = make_broker(read_ahead=0)

    @broker.handler("t", group="g", when=lambda _: None)
    async def handle(data: str) -> None: ...

    with pytest.raises(ConfigError, match="RSMQ_READ_AHEAD=0 allows none"):
        async with broker.running():
            pass


@steady_connections
async def test_what_waits_for_a_time_is_erased_with_its_key(broker: Broker, witness: Witness) -> None:
    """Nothing of the person is left, and others go on."""
    night = Night(broker, witness)
    async with broker.running():
        for data, key in (("a", "ada"), ("b", "bob"), ("c", "ada")):
            await night.publish(data, key, sleep=True)
        await night.wait_for_counts(0, 0, 0)
        erased = await broker.erase("ada")
        assert erased.running == 0
        await night.wait_for_counts(0)
        await night.wait_for(1)
