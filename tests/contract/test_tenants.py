"""No tenant and no name of a rate holds up others: what waits for its turn is put aside. Order per key holds."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import anyio
import pytest
from tenacity import wait_fixed

from rsmq import Broker, Message, Rate, RetryPolicy
from rsmq.control import asking
from tests.contract.test_flows import far_of
from tests.contract.witness import Witness, settled
from tests.matrix.way import steady_connections
from tests.patience import PATIENCE, until

Make = Callable[..., Broker]
PREFETCH = 40


def tenant(message: Message) -> str | None:
    """The tenant in the headers."""
    return message.headers.get("tenant")


class Shared:
    """A handler of several tenants with four slots; each call waits for `gate`."""

    def __init__(self, broker: Broker, witness: Witness, **options: Any) -> None:
        self.broker, self.witness, self.gate = broker, witness, anyio.Event()
        self.attempts = Counter[int]()
        broker.handler("t", group="g", concurrency=4, **options)(self.handle)

    async def handle(self, order: dict[str, Any], message: Message) -> None:
        if order["who"] != "quiet":
            await self.gate.wait()
        self.attempts[message.attempt] += 1
        self.witness.note((order["who"], order["n"]))

    async def publish(self, who: str, count: int, key: Callable[[Any], str] | None = None) -> list[tuple[str, int]]:
        """Messages of one tenant."""
        orders = [{"who": who, "n": n} for n in range(count)]
        await self.broker.publish_many("t", orders, key=key, headers={"tenant": who})
        return [(who, n) for n in range(count)]


@pytest.fixture
def one(make_broker: Make) -> Broker:
    """A worker with little memory, of one partition."""
    return make_broker(prefetch=PREFETCH, partitions=1)


@pytest.mark.parametrize("ordering", ["key", "none"])
async def test_quiet_tenant_is_served_before_the_backlog_of_another(
    one: Broker, witness: Witness, ordering: str
) -> None:
    """Thirty times what fits into memory, of different keys: the quiet one takes its turn when a slot is free."""
    shared = Shared(one, witness, tenant=tenant, ordering=ordering)
    async with one.running():
        noisy = await shared.publish("noisy", 30 * PREFETCH, lambda order: f"k{order['n']}")
        quiet = await shared.publish("quiet", 5)
        (consumer,) = one.worker.consumers  # type: ignore[union-attr]
        await until(lambda: consumer.queue.tenants(consumer.lanes.values())["quiet"] == 5, "all of it is read")
        assert far_of(one) >= 28 * PREFETCH, "the others are kept as ids"
        shared.gate.set()
        await witness.sees([*noisy, *quiet])
        await settled(one, "t")
    last = max(witness.seen.index(each) for each in quiet)
    assert last < 4 + 2 * (len(quiet) + 1), "one of the other tenant for each of them, after what ran"
    assert set(shared.attempts) == {1}


async def test_order_per_key_wins_where_messages_of_a_key_name_several_tenants(one: Broker, witness: Witness) -> None:
    """A later message of a key never starts before an earlier one, and either tenant may be served."""
    shared = Shared(one, witness, tenant=tenant)
    async with one.running():
        await shared.publish("noisy", 10 * PREFETCH, lambda order: f"k{order['n'] % 50}")
        await until(lambda: far_of(one) > 5 * PREFETCH, "most wait as ids")
        quiet = await shared.publish("quiet", 50, lambda order: f"k{order['n']}")
        shared.gate.set()
        await witness.sees([*quiet, *[("noisy", n) for n in range(10 * PREFETCH)]])
    for n in range(50):
        of_key = [("noisy", each) for each in range(n, 10 * PREFETCH, 50)] + [("quiet", n)]
        assert [each for each in witness.seen if each in set(of_key)] == of_key


@steady_connections
async def test_tenants_share_by_weight(one: Broker, witness: Witness) -> None:
    """While both have a backlog."""
    shared = Shared(one, witness, tenant=tenant, weights={"gold": 3})
    async with one:
        every = [*await shared.publish("gold", 600), *await shared.publish("lead", 600)]
    async with one.running():
        await until(lambda: far_of(one) >= 1200 - PREFETCH, "both have a backlog")
        shared.gate.set()
        await witness.sees(every)
    served = Counter(who for who, _ in witness.seen[100:700])
    assert served["gold"] == pytest.approx(450, abs=12)


@steady_connections
async def test_next_owner_serves_the_tenants_of_a_backlog_in_turn(make_broker: Make, witness: Witness) -> None:
    """A worker stops with ids; nothing of them counts as an attempt."""
    first = Shared(make_broker(prefetch=PREFETCH, partitions=1), witness, tenant=tenant)
    async with first.broker.running():
        noisy = await first.publish("noisy", 10 * PREFETCH)
        await until(lambda: far_of(first.broker) > 5 * PREFETCH, "most wait as ids")
    async with first.broker:
        quiet = await first.publish("quiet", 3)
    second = Shared(make_broker(prefetch=PREFETCH, partitions=1), witness, tenant=tenant)
    second.gate.set()
    async with second.broker.running():
        await witness.sees([*noisy, *quiet])
        await settled(second.broker, "t")
    assert set(second.attempts) == {1}


@pytest.mark.parametrize("keyed", [True, False])
async def test_name_whose_rate_is_used_up_stops_no_reading(one: Broker, witness: Witness, keyed: bool) -> None:
    """All keys differ, or there is none: thirty times what fits into memory waits, and another name is served."""
    shared = Shared(one, witness, rate=Rate(8, per="1h", by=tenant))
    shared.gate.set()
    async with one.running():
        await shared.publish("noisy", 30 * PREFETCH, (lambda order: f"k{order['n']}") if keyed else None)
        await until(lambda: far_of(one) >= 20 * PREFETCH, "the others are kept as ids")
        quiet = await shared.publish("quiet", 5)
        await until(lambda: set(quiet) <= set(witness.seen), "the quiet name is served")
        (consumer,) = one.worker.consumers  # type: ignore[union-attr]
        assert consumer.work.waiting_for_rate == 30 * PREFETCH - 8
        assert consumer.work.waiting_for_key == consumer.work.ready == 0


async def test_what_waits_for_a_rate_by_name_is_handled_in_order_of_its_key(one: Broker, witness: Witness) -> None:
    """Read ahead, put aside and read again, with a failure now and then."""
    failed = set[int]()

    @one.handler(
        "t", group="g", concurrency=4, rate=Rate(150, per="100ms", by=tenant), retry=RetryPolicy(wait=wait_fixed(0.001))
    )
    async def handle(order: dict[str, Any]) -> None:
        if order["n"] % 37 == 5 and order["n"] not in failed:
            failed.add(order["n"])
            raise ValueError("now and then")
        witness.note(order["n"])

    count = 20 * PREFETCH
    async with one.running():
        orders = [{"n": n} for n in range(count)]
        await one.publish_many("t", orders, key=lambda order: f"k{order['n'] % 90}", headers={"tenant": "a"})
        await witness.sees(list(range(count)))
        await settled(one, "t")
    for key in range(90):
        of_key = [n for n in witness.seen if n % 90 == key]
        assert of_key == sorted(of_key)


async def test_tenants_whose_provider_is_used_up_take_its_starts_in_turn(one: Broker, witness: Witness) -> None:
    """They share a rate by another name; what needs no such start is not held up."""
    shared = Shared(one, witness, tenant=tenant, rate=Rate(10, per="200ms", by=lambda m: m.headers.get("via")))
    shared.gate.set()

    async def send(who: str, count: int, via: str) -> list[tuple[str, int]]:
        orders = [{"who": who, "n": n} for n in range(count)]
        await one.publish_many("t", orders, headers={"tenant": who, "via": via})
        return [(who, n) for n in range(count)]

    async with one:
        await send("noisy", 10 * PREFETCH, "sms")
    async with one.running():
        await until(lambda: far_of(one) >= 5 * PREFETCH, "most wait as ids")
        mail = await send("mail", 20, "mail")
        before = len(witness.seen)
        quiet = await send("quiet", 10, "sms")
        await until(lambda: set(mail) | set(quiet) <= set(witness.seen), "they are served meanwhile")
        seen = witness.seen[before:]
    noisy = sum(who == "noisy" for who, _ in seen[: seen.index(("quiet", 9))])
    assert noisy <= 40, "about one of the noisy tenant for each of the quiet one"
    await asyncio.sleep(0)


@steady_connections
async def test_what_waits_for_a_rate_is_seen_everywhere(
    one: Broker, witness: Witness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it is, what keeps a topic from being trimmed, who has most: and no handler is said to hang."""
    monkeypatch.setattr(asking, "ANSWER_SECONDS", PATIENCE)
    shared = Shared(one, witness, rate=Rate(1, per="1h", by=tenant), tenant=lambda message: message.headers["tenant"])
    shared.gate.set()
    async with one.running():
        await shared.publish("noisy", 10 * PREFETCH)
        await until(lambda: far_of(one) > 5 * PREFETCH, "most wait as ids")
        (consumer,) = one.worker.consumers  # type: ignore[union-attr]
        lane = consumer.lanes[0]
        await until(lambda: not lane.flows.aside, "the server knows it")
        name, number = next(iter(lane.flows.named.counts()))
        assert name == ("noisy", "noisy")
        assert number == far_of(one)
        waits, near = [*lane.flows.named.ids()], lane.flows.named.near[name]
        status = await one.look(f"{lane.partition}/{waits[5].decode()}", topic="t")
        assert [(each.state, each.member) for each in status.groups] == [("waiting_for_rate", consumer.member)]
        assert [(each.name, each.tenant, each.before) for each in status.groups] == [("noisy", "noisy", near + 5)]
        assert consumer._vitals()["waiting_by_tenant"] == {"noisy": 10 * PREFETCH - 1}
        assert consumer._vitals()["waiting_for_rate_by"] == {"noisy": 10 * PREFETCH - 1}
        assert consumer.tenants == [10 * PREFETCH - 1]


async def test_tenants_of_a_topic_with_bands_wait_for_their_rate(one: Broker, witness: Witness) -> None:
    """In each band they take turns, and the last one that waits for a rate starts, too."""
    one.topic("t", dict, bands=("urgent", "normal"))

    @one.handler("t", group="g", concurrency=4, tenant=tenant, rate=Rate(4, per="50ms", by=lambda _: "all"))
    async def handle(order: dict[str, Any]) -> None:
        witness.note(order["n"])

    async with one.running():
        for n in range(24):
            await one.publish("t", {"n": n}, headers={"tenant": f"t{n % 3}"}, band=("urgent", "normal")[n % 2])
        await witness.sees(list(range(24)))
        await settled(one, "t")
