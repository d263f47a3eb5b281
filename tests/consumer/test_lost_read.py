"""A read whose answer is lost on its way: what it delivered has been seen by nobody."""

from __future__ import annotations

from typing import Any

import pytest

from rsmq import Broker, Message, Settings
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
