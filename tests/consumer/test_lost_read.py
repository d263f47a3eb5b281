"""A read whose answer is lost on its way: what it delivered has been seen by nobody."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import anyio
import pytest

from rsmq import Broker, BrokerUnavailable, Message, Settings
from rsmq.consumer import reclaimer
from rsmq.script import CLAIM_PENDING
from tests.chaos.proxy import Proxy
from tests.contract.witness import ask, settled
from tests.patience import until
from tests.servers import Server


@pytest.mark.parametrize("distribution", ["hash", "shared"])
@pytest.mark.parametrize("batch", [None, 10])
async def test_it_is_no_attempt(distribution: Any, batch: int | None) -> None:
    """It is pending for a reader that has never had it in hand: once the line is back its first attempt starts."""
    ordering = "none" if distribution == "shared" else "key"
    with Server(tcp=True) as server:
        async with Proxy(server.port) as line:
            # what blocks now does so until long after this test
            patient: Any = {"preflight": "warn", "partitions": 1, "block": "PT20S", "lease_ttl": "PT60S"}
            patient["presence_grace"] = "PT0S"
            worker, publisher = (Broker(Settings(url=url, **patient)) for url in (line.url, server.url))
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
                line.cut()
                await publisher.publish_many("t", [{"n": n} for n in range(1, 6)])
                await until(is_delivered, "the answer is on its way")
                line.reset()
                line.mend()
                await settled(publisher, "t")
            assert seen == [(n, 1) for n in range(6)]


async def test_what_was_adopted_from_another_has_been_started(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer to the adoption is lost, and then the reading connection: it is ours, but it was in others' hands."""
    short = {"partitions": 1, "prefetch": 4, "lease_ttl": timedelta(seconds=2), "preflight": "warn"}
    broker = Broker(settings.model_copy(update=short))
    seen, is_lost, is_over = list[tuple[int, int]](), anyio.Event(), anyio.Event()

    async def claim(client: Any, names: Any, args: Any) -> Any:
        reply = await CLAIM_PENDING(client, names, args)
        if args[5] and reply[3:] and not is_lost.is_set():
            is_lost.set()
            raise BrokerUnavailable("the answer is lost")
        return reply

    monkeypatch.setattr(reclaimer, "CLAIM_PENDING", claim)

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
        client_id, _, _ = broker.worker.consumers[0].readers[0].reader.partition(" ")
        await ask(broker, "CLIENT", "KILL", "ID", client_id)
        is_over.set()
        await settled(broker, "t")
    assert sorted(seen) == [(0, 1), (1, 1), (2, 1), (3, 2)]


async def test_a_takeover_that_is_begun_anew_meanwhile_is(
    server_url: str, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page is on its way when another role asks for a new beginning: it does not say where to go on any more."""
    broker, pages = Broker(Settings(url=server_url, prefix=prefix, preflight="warn", partitions=1)), list[Any]()

    async def claim(*args: Any) -> Any:
        reply = await CLAIM_PENDING(*args)
        if not pages:
            (lane,) = broker.worker.consumers[0].lanes.values()
            lane.begin_anew()
        pages.append(reply)
        return reply

    monkeypatch.setattr(reclaimer, "CLAIM_PENDING", claim)
    broker.handler("t", group="g")(ignore)
    async with broker.running():
        await until(lambda: len(pages) == 2, "it has been gone through twice")


async def ignore(order: dict[str, int]) -> None:
    """Nothing is published."""
