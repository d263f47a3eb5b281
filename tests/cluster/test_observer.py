"""A snapshot where the partitions are on several nodes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta

from rsmq import Broker
from rsmq.inspector.observer import Observer
from rsmq.inspector.schedules import look_up
from rsmq.model.keys import Keys
from rsmq.model.settings import Settings
from rsmq.redis.client.connector import Client
from rsmq.redis.topics import Topics


async def test_snapshot_of_a_cluster_counts_every_partition_and_member(
    client: Client, settings: Settings, keys: Keys, make_broker: Callable[..., Broker]
) -> None:
    """Partitions and members on all nodes are included."""
    broker = make_broker()

    @broker.handler("orders", group="billing", partitions=8)
    async def bill(order: dict[str, int]) -> None:
        """Takes it."""

    broker.every(timedelta(hours=1), "ticks", name="clock")(lambda: "x")
    async with broker.running():
        await broker.publish_many("orders", [{"n": n} for n in range(40)], key=lambda each: str(each["n"]))
        seen = await Observer(client, keys, settings).snapshot(["orders"])
        assert sum(partition.added for partition in seen.topics[0].partitions) == 40
        (group,), (member,) = seen.groups, seen.members
        assert len(group.shares) == 8
        assert member.heard_ago is not None
        assert member.heard_ago < timedelta(minutes=1)
        assert {share.owner for share in group.shares} <= {member.id, ""}
        async with asyncio.timeout(40):
            while not (states := await look_up(client, keys, Topics(client, keys, settings))) or not states[0].leader:
                await asyncio.sleep(0.01)
        assert [(state.topic, state.name, state.leader) for state in states] == [("ticks", "clock", member.id)]
