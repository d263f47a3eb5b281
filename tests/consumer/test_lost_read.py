"""A read whose reply is lost: what it delivered has not arrived at any handler."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import anyio
import pytest

from rsmq import Broker, BrokerUnavailable, Message, Settings
from rsmq.consumer.reading import reclaimer
from rsmq.consumer.reading.retry_poller import RetryPoller
from rsmq.redis.scripts import ADOPT_PENDING, CLAIM_PENDING
from rsmq.testing.proxy import Proxy
from tests.contract.witness import ask, settled
from tests.patience import until
from tests.servers import Server


@pytest.mark.parametrize("distribution", ["hash", "shared"])
@pytest.mark.parametrize("batch", [None, 10])
async def test_messages_of_a_lost_reply_are_first_attempts(
    distribution: Any, batch: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are pending for a member that never received them: their first attempt starts after the reconnect."""
    # nothing is parked here; a poll for retries whose reply is lost as well would make them second attempts
    monkeypatch.setattr(RetryPoller, "_poll", no_poll)
    ordering = "none" if distribution == "shared" else "key"
    with Server(tcp=True) as server:
        async with Proxy(server.port) as proxy:
            # what blocks now does so until long after this test
            patient: Any = {"preflight": "warn", "partitions": 1, "block": "PT20S", "lease_ttl": "PT60S"}
            patient["presence_grace"] = "PT0S"
            worker, publisher = (Broker(Settings(url=url, **patient)) for url in (proxy.url, server.url))
            seen = list[tuple[int, int]]()

            async def note(orders: list[dict[str, int]], messages: list[Message]) -> None:
                seen.extend((order["n"], message.attempt) for order, message in zip(orders, messages, strict=True))

            async def note_one(order: dict[str, int], message: Message) -> None:
                await note([order], [message])

            worker.handler("t", group="g", distribution=distribution, ordering=ordering, batch=batch)(
                note_one if batch is None else note
            )

            async def is_blocked() -> bool:
                return b" flags=b " in await publisher.client.execute_command("CLIENT", "LIST")

            async def is_delivered() -> bool:
                return bool((await ask(publisher, "XPENDING", publisher.keys.stream("t", 0), "g"))[0] == 5)

            async with publisher, worker.running():
                await publisher.publish("t", {"n": 0})
                await settled(publisher, "t")
                await until(is_blocked, "it reads")
                proxy.cut()
                await publisher.publish_many("t", [{"n": n} for n in range(1, 6)])
                await until(is_delivered, "the reply is on its way")
                proxy.reset()
                proxy.mend()
                await settled(publisher, "t")
            assert seen == [(n, 1) for n in range(6)]


async def test_answer_that_comes_after_another_member_took_over_is_not_used() -> None:
    """Shared distribution: what was read longer than half a lease ago may be handled elsewhere by now."""
    with Server(tcp=True) as server:
        async with Proxy(server.port) as proxy:
            short: Any = {"preflight": "warn", "partitions": 1, "lease_ttl": "PT2S"}
            brokers = [Broker(Settings(url=url, **short)) for url in (proxy.url, server.url)]
            seen = list[tuple[int, int]]()

            async def note(order: dict[str, int], message: Message) -> None:
                seen.append((order["n"], message.attempt))

            for broker in brokers:
                broker.handler("t", group="g", distribution="shared", ordering="none")(note)
            first, second = brokers
            async with first.running():
                assert first.worker is not None
                (reading,) = first.worker.consumers[0].fetchers.active
                before = reading.reader
                proxy.hold(lambda data: b'{"n":7}' in data)
                async with second:
                    await second.publish("t", {"n": 7})
                    await until(lambda: proxy.is_holding, "the answer is on its way")
                async with second.running():
                    await until(lambda: bool(seen), "it is taken over")
                    proxy.release()
                    await until(lambda: reading.reader not in (before, ""), "the first one reads again")
                    await second.publish("t", {"n": 8})
                    await until(lambda: any(n == 8 for n, _ in seen), "the next one is handled")
                    await settled(second, "t")
            assert [attempt for n, attempt in seen if n == 7] == [2], "once, by the member that took it over"


async def test_messages_of_a_lost_adoption_keep_their_attempts(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reply to the adoption is lost, then the reading connection: the dead member may have started them."""
    short = {"partitions": 1, "prefetch": 4, "lease_ttl": timedelta(seconds=2), "preflight": "warn"}
    broker = Broker(replace(settings, **short))
    seen, is_lost, is_over = list[tuple[int, int]](), anyio.Event(), anyio.Event()

    async def adopt(*args: Any) -> Any:
        reply = await ADOPT_PENDING(*args)
        if reply[3:] and not is_lost.is_set():
            is_lost.set()
            raise BrokerUnavailable("the reply is lost")
        return reply

    monkeypatch.setattr(reclaimer, "ADOPT_PENDING", adopt)

    @broker.handler("t", group="g", distribution="shared", ordering="none", concurrency=4)
    async def handle(order: dict[str, int], message: Message) -> None:
        seen.append((order["n"], message.attempt))
        await is_over.wait()

    async with broker.running():
        stream = broker.keys.stream("t", 0)
        await broker.publish_many("t", [{"n": n} for n in range(3)])
        await until(lambda: len(seen) == 3, "it has no room to read more")
        await broker.publish("t", {"n": 3})
        ((_, ((entry_id, _),)),) = await ask(broker, "XREADGROUP", "GROUP", "g", "dead", "STREAMS", stream, ">")
        await ask(broker, "XCLAIM", stream, "g", "dead", 0, entry_id, "IDLE", 86_400_000, "RETRYCOUNT", 1, "JUSTID")
        await until(is_lost.is_set, "the dead one's message is adopted")
        assert broker.worker is not None
        client_id, _, _ = broker.worker.consumers[0].fetchers.active[0].reader.partition(" ")
        await ask(broker, "CLIENT", "KILL", "ID", client_id)
        is_over.set()
        await settled(broker, "t")
    assert sorted(seen) == [(0, 1), (1, 1), (2, 1), (3, 2)]


async def test_recovery_that_is_restarted_during_a_claim_begins_again(
    server_url: str, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page is on its way when another role restarts the recovery: the page must not move the cursor."""
    broker, pages = Broker(Settings(url=server_url, prefix=prefix, preflight="warn", partitions=1)), list[Any]()

    async def claim(*args: Any) -> Any:
        reply = await CLAIM_PENDING(*args)
        if not pages:
            (lane,) = broker.worker.consumers[0].lanes.values()
            lane.recovery.restart()
        pages.append(reply)
        return reply

    monkeypatch.setattr(reclaimer, "CLAIM_PENDING", claim)
    broker.handler("t", group="g")(ignore)
    async with broker.running():
        await until(lambda: len(pages) == 2, "it has been gone through twice")


async def no_poll(_poller: RetryPoller) -> None:
    """Asks for no retries."""


async def ignore(order: dict[str, int]) -> None:
    """Nothing is published."""
