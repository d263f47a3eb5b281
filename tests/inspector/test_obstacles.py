"""A worker tells with its heartbeat behind which key its messages wait, and the doctor names the key."""

from __future__ import annotations

import asyncio
from datetime import timedelta

from rsmq import Broker, Settings
from rsmq.inspector.doctor import gather, judge
from rsmq.inspector.observer import Observer
from tests.patience import until


async def test_key_in_front_of_most_of_a_backlog_is_named(server_url: str, prefix: str) -> None:
    """Also what waits behind it as an id only; it ends with the backlog."""
    beat, gate = timedelta(milliseconds=50), asyncio.Event()
    broker = Broker(Settings(url=server_url, prefix=prefix, preflight="warn", heartbeat=beat, prefetch=40))

    @broker.handler("orders", group="billing", partitions=1)
    async def bill(data: dict) -> None:  # type: ignore[type-arg]
        await gate.wait()

    async with broker.running():
        await broker.publish_many("orders", [{"n": n} for n in range(150)], key=lambda _: "c-1")
        observer = Observer(broker.client, broker.keys, broker.settings)

        async def is_told() -> bool:
            (member,) = (await observer.snapshot()).members
            quiet = member.settled_nothing_for
            return member.waiting_for_key_by == (("c-1", 149),) and quiet is not None and quiet > timedelta(0)

        await until(is_told, "it tells the key, and since when nothing was settled")
        found = judge(await gather(broker.client, broker.keys, broker.settings, timedelta(0)))
        said = "149 of 150 messages of group billing of orders wait behind the key 'c-1'"
        assert any(each.text.startswith(said) for each in found), found
        gate.set()

        async def is_over() -> bool:
            (member,) = (await observer.snapshot()).members
            return member.waiting_for_key_by == () and not member.pending

        await until(is_over, "all are handled")
