"""A rate over the group by a function: exact, shared by demand, with few commands, and through faults."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from secrets import token_hex
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsmq import Broker, ConfigError, Message, Rate, Settings
from rsmq.consumer.waiting.allowance import Allowance, ages
from rsmq.handler.handler import build_handler
from rsmq.inspector import Inspector
from rsmq.model.partition import partition_for
from rsmq.redis.scripts import Script
from tests.consumer.members import consumer_of
from tests.contract.witness import Witness, patient, settled
from tests.patience import until

HOUR = timedelta(hours=1)
Make = Callable[..., Broker]


def provider(message: Message) -> str | None:
    """What the rates of this file count by."""
    return message.headers.get("provider")


@pytest.fixture
def make(server_url: str, prefix: str) -> Make:
    """Makes members of one group, which note (provider, n)."""

    def member(witness: Witness, rate: Rate | None, **options: Any) -> Broker:
        broker = Broker(Settings(url=server_url, prefix=prefix, preflight="warn"))

        @broker.handler("t", group="g", rate=rate, **options)
        async def handle(order: dict[str, Any], message: Message) -> None:
            witness.note((provider(message), order["n"]))

        return broker

    return member


async def publish(broker: Broker, provider: str, count: int, keys: list[str] | None = None) -> set[tuple[str, int]]:
    """So many messages to one provider."""
    chosen = keys or [f"k{n}" for n in range(40)]
    for n in range(count):
        headers = {"provider": provider}
        send = patient(broker.publish)  # with an id, so on a starved machine a second call stores nothing twice
        await send("t", {"n": n}, key=chosen[n % len(chosen)], headers=headers, message_id=token_hex(8))
    return {(provider, n) for n in range(count)}


async def test_rate_of_a_group_is_used_up_by_one_member_while_others_are_idle(make: Make) -> None:
    """All of it, though each of three members would have a third. Never more, of each provider by itself."""
    witnesses = [Witness() for _ in range(3)]
    brokers = [make(witness, Rate(12, per=HOUR, by=provider)) for witness in witnesses]
    async with brokers[0].running(), brokers[1].running(), brokers[2].running():
        members = [consumer_of(broker) for broker in brokers]
        await until(lambda: all(len(each.membership.live) == 3 for each in members), "they see each other")
        await until(lambda: sorted(len(each.lanes) for each in members) == [2, 3, 3], "each has its partitions")
        mine = next(at for at, each in enumerate(members) if 0 in each.lanes)
        keys = [key for key in (f"a{n}" for n in range(99)) if partition_for(key, 8) in members[mine].lanes]
        await publish(brokers[0], "acme", 20, keys[:5])
        await until(lambda: sum(len(each.seen) for each in witnesses) == 12, "all of the limit is used")
        await until(lambda: sum(each.queue.limited for each in members) == 8, "the rest waits")
        assert len(witnesses[mine].seen) > 12 / 3, "by one member, unless a busy machine has moved its partitions"
        inspector = Inspector(brokers[0].client, brokers[0].keys, brokers[0].settings)

        async def shown() -> bool:
            found = (await patient(inspector.snapshot)()).members
            by = [each.waiting_for_rate_by for each in found if each.work.waiting_for_rate]
            return {name for each in by for name, _ in each} == {"acme"} and sum(n for each in by for _, n in each) == 8

        await until(shown, "rsmq top and the dashboard show which provider it is")
        await publish(brokers[0], "other", 12)
        handled = lambda: Counter(name for witness in witnesses for name, _ in witness.seen)  # noqa: E731
        await until(lambda: handled() == {"acme": 12, "other": 12}, "the other provider goes on in all members")
        assert members[mine].queue.in_flight == 0, "what is limited does not fill the prefetch"


async def test_limit_changed_by_a_restart_larger_one_holds_until_the_last_old_member_has_left(make: Make) -> None:
    """Each member keeps the limit that it was started with, and counts what all have started."""
    was, now = Witness(), Witness()
    old, new = make(was, Rate(12, per=HOUR, by=provider)), make(now, Rate(4, per=HOUR, by=provider))
    async with new.running():
        async with old.running():
            theirs, ours = consumer_of(old), consumer_of(new)
            await until(lambda: len(theirs.lanes) == len(ours.lanes) == 4, "each has its partitions")
            keys = [f"b{n}" for n in range(99)]
            await publish(old, "acme", 10, [key for key in keys if partition_for(key, 8) in theirs.lanes])
            await until(lambda: len(was.seen) == 10, "the old limit is 12")
            await publish(new, "acme", 8, [key for key in keys if partition_for(key, 8) in ours.lanes])
            await until(lambda: ours.queue.limited == 8, "ten have started, and the new limit is 4")
            await publish(old, "acme", 4, [key for key in keys if partition_for(key, 8) in theirs.lanes])
            await until(lambda: (len(was.seen), theirs.queue.limited) == (12, 2), "the old member uses its own limit")
        await until(lambda: ours.queue.limited == 10, "the new member holds all that is left")
        assert now.seen == []
        await publish(new, "other", 6)
        await until(lambda: ours.queue.limited == 12, "its limit holds for another name")
        assert len(now.seen) == 4


@pytest.mark.parametrize("options", [{}, {"ordering": "none"}, {"ordering": "partition"}, {"distribution": "shared"}])
async def test_rate_of_a_group_opens_again_and_loses_nothing(make: Make, options: dict[str, Any]) -> None:
    """In any ordering, with messages that have no provider between them, and through a stop."""
    witness, other = Witness(), Witness()
    rate = Rate(6, per=timedelta(milliseconds=40), by=provider)
    first, second = make(witness, rate, **options), make(other, rate, **options)
    async with first:
        async with first.running():
            expected = await publish(first, "acme", 60)
            await first.publish("t", {"n": 0}, key="none")
            await witness.sees([("acme", 3), (None, 0)])
        async with second.running():
            await until(lambda: {*witness.seen, *other.seen} == expected | {(None, 0)}, "all are handled")
            await settled(first, "t")
    assert len(witness.seen) + len(other.seen) == len(expected) + 1


async def test_function_of_a_rate_that_fails_limits_and_loses_nothing(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """All messages with which it fails have one rate: a limit is never ignored."""
    witness = Witness()
    broker = make(witness, Rate(3, per=HOUR, by=lambda message: message.headers["missing"]))
    async with broker, broker.running():
        await publish(broker, "acme", 5)
        queue = consumer_of(broker).queue
        await until(lambda: (len(witness.seen), queue.limited) == (3, 2), "the limit holds")
    assert "the function of a limit has failed: KeyError: 'missing'" in caplog.text


async def test_rate_that_does_not_bind_costs_few_commands(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks, not a command for each message."""
    witness = Witness()
    broker = make(witness, Rate(100_000, by=provider))
    async with broker, broker.running():
        settler, scripts = consumer_of(broker).settler, Counter[str]()
        rate: Any = consumer_of(broker).queue.message_rate

        async def ask(script: Script, *args: Any) -> Any:
            scripts[script.name] += 1
            return await settler.ask(script, *args)

        monkeypatch.setattr(rate, "_ask", ask)
        await broker.publish_many("t", [{"n": n} for n in range(2000)], headers={"provider": "acme"})
        await witness.sees(("acme", n) for n in range(2000))
    assert 0 < scripts["take_starts"] < 100, "some calls, not one for each message"


def test_batch_handler_with_a_rate_by_a_function_is_refused() -> None:
    """It counts single messages."""

    async def handle(orders: list[dict[str, int]]) -> None: ...

    with pytest.raises(ConfigError, match="rate counts single messages"):
        build_handler(handle, "t", group="g", batch=5, rate=Rate(1, by=provider))
    with pytest.raises(ConfigError, match="holds over the whole group: leave over='member' out"):
        Rate(1, over="member", by=provider)


class Server:
    """A model of `take_starts.lua` for one member: it grants what it is asked for, up to what it has."""

    def __init__(self, room: int) -> None:
        self.room, self.held = room, 0

    def answer(self, kept: int, wanted: int, used: int) -> list[int]:
        """The reply."""
        kept = min(kept, self.held)
        self.room += self.held - kept - used
        given = min(wanted, self.room)
        self.room, self.held = self.room - given, kept + given
        return [kept, 0, given] if given else [kept]


@given(st.integers(1, 50), st.integers(0, 2**32))
def test_allowance_and_server_agree_at_all_times(limit: int, seed: int) -> None:
    """Whatever is used, asked, lost or answered late: what a member may use never exceeds what the server counts."""
    chance, server, now = random.Random(seed), Server(limit), 0.0
    allowance, started, reported = Allowance(), 0, 0
    for _ in range(60):
        now += chance.random() / 10
        for _ in range(chance.randrange(6)):
            most = chance.randrange(1, 4)
            taken = allowance.take(now, most)
            assert taken == min(most, taken + allowance.usable(now)), "all that there is"
            used = chance.randrange(taken + 1)
            if taken > used:
                allowance.put_back(now, taken - used)
            allowance.note(now, used)
            started += used
        question = allowance.ask(now, chance.randrange(20), 4, limit)
        if chance.random() < 0.1:  # it does not arrive
            allowance.failed(question)
            continue
        used = sum(number for _, number in question.used)
        reply = server.answer(question.kept, question.wanted, used)
        reported += used
        if chance.random() < 0.1:  # the reply is lost
            allowance.failed(question)
            reported -= used
            server.room += used  # they are reported again
            continue
        allowance.answered(question, reply, now, 0.5)
        assert allowance.held <= server.held
        assert allowance.usable(now + 3) == 0, "all of it ends"
    assert started <= limit


def test_ages_of_uses_are_never_rounded_up() -> None:
    """An older use would end its window too early."""
    assert ages([(10.0, 1), (10.004, 3), (10.0049, 1), (9.0, 1)], 10.0104, 0.005) == [10, 1, 5, 4, 1010, 1]
    assert ages([(9.0, 1)], 9.0009, 0.001) == [0, 1]
