"""A look over everything, where the partitions are on several nodes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta

from rsmq import Broker
from rsmq.connect import Client
from rsmq.keys import Keys
from rsmq.observer import Observer
from rsmq.settings import Settings
from rsmq.timetable import look_up
from rsmq.topic import Topics


async def test_a_snapshot_of_all_nodes(
    client: Client, settings: Settings, keys: Keys, make_broker: Callable[..., Broker]
) -> None:
    """Every partition, share and member is counted, wherever it is."""
    broker = make_broker()

    @broker.handler("orders", group="billing", partitions=8)
    async def bill(order: dict[str, int]) -> None:
        """Takes it."""

    broker.every(timedelta(hours=1), "ticks", name="clock")(lambda: "x")
    async with broker.running():
        await broker.publish_many("orders", [{"n": n} for n in range(40)], key=lambda each: str(each["n"]))
        topics = (await Observer(client, keys, settings).look()).topics
        topic = next(each for each in topics if each.name == "orders")
        assert sum(stream.added for stream in topic.streams) == 40
        (group,) = topic.groups
        assert len(group.shares) == 8
        (member,) = group.members
        assert member.heard_ago is not None
        assert member.heard_ago < timedelta(minutes=1)
        assert {share.owner for share in group.shares} <= {member.id, ""}
        async with asyncio.timeout(40):
            while not (states := await look_up(client, keys, Topics(client, keys, settings))) or not states[0].leader:
                await asyncio.sleep(0.01)
        assert [(state.topic, state.name, state.leader) for state in states] == [("ticks", "clock", member.id)]
