"""Clients of a cluster: every command reaches the node of its slot, also while slots move and masters die."""

from __future__ import annotations

import anyio
import pytest
from redis.exceptions import NoScriptError

from rsmq.connect import Client, Connector
from rsmq.errors import BrokerUnavailable
from rsmq.fleet import Fleet
from rsmq.script import RELEASE_LEASE
from rsmq.slot import slot_of
from rsmq.wire import pack
from tests.cluster.cluster import Cluster


def spread_keys(prefix: str, cluster: Cluster) -> list[str]:
    """Keys of every master."""
    keys = [f"{prefix}:{{{number}}}" for number in range(24)]
    assert {cluster.owner(key).port for key in keys} == {master.port for master in cluster.masters}
    return keys


async def test_a_command_reaches_its_node(client: Client, cluster: Cluster, prefix: str) -> None:
    """Keys of all nodes can be written and read, alone and together, in order."""
    keys = spread_keys(prefix, cluster)
    for number, key in enumerate(keys):
        await client.execute_command("SET", key, number, "PX", 60_000)
    replies = await client.pipelined([("GET", key) for key in keys])
    assert replies == [b"%d" % number for number in range(len(keys))]
    assert len(client.nodes) == 3


async def test_a_script_finds_its_node(client: Client, cluster: Cluster, prefix: str) -> None:
    """A script that no node knows yet is loaded where its key is."""
    for key in spread_keys(prefix, cluster):
        assert await RELEASE_LEASE(client, (key, key), ("nobody", "0", "g")) is not None


async def test_fleet_keeps_the_order_of_replies(client: Client, cluster: Cluster, prefix: str) -> None:
    """One exchange over all nodes: each reply in the place of its command, errors too."""
    fleet, keys = Fleet(client), spread_keys(prefix, cluster)
    assert await fleet.exchange([(key, pack(("SET", key, key, "PX", 60_000))) for key in keys]) == [b"OK"] * len(keys)
    replies = await fleet.exchange([(key, pack(("GET", key))) for key in keys])
    assert replies == [key.encode() for key in keys]
    (refused,) = await fleet.exchange([(keys[0], pack(("EVALSHA", "0" * 40, 1, keys[0])))])
    assert isinstance(refused, NoScriptError)
    await fleet.close()


async def test_a_moved_slot_is_followed(client: Client, connector: Connector, cluster: Cluster, prefix: str) -> None:
    """Clients that know the old owner reach the new one: command, pipeline, fleet and thread."""
    key, fleet, thread = f"{prefix}:{{moving}}", Fleet(client), connector.blocking_client()
    await client.execute_command("SET", key, 1, "PX", 60_000)
    assert thread.execute_command("GET", key) == b"1"
    assert await fleet.exchange([(key, pack(("INCR", key)))]) == [2]
    assert await client.pipelined([("INCR", key)]) == [3]
    for expected in (4, 6, 8):
        target = cluster.migrate(key)
        match expected:
            case 4:
                assert await client.execute_command("INCR", key) == 4
            case 6:
                assert await fleet.exchange([(key, pack(("INCR", key))), (key, pack(("INCR", key)))]) == [5, 6]
            case 8:
                assert await client.pipelined([("INCR", key), ("INCR", key)]) == [7, 8]
        assert thread.pipelined([("GET", key)]) == [b"%d" % expected]
        assert target.ask("GET", key) == b"%d" % expected
    await fleet.close()
    thread.close()


async def test_a_moving_slot_is_followed(client: Client, connector: Connector, cluster: Cluster, prefix: str) -> None:
    """While a slot is moved key by key, what has gone ahead is asked for where it is, and only for this once."""
    here, there = f"{prefix}:{{half}}:here", f"{prefix}:{{half}}:there"
    fleet, thread = Fleet(client), connector.blocking_client()
    for key in (here, there):
        await client.execute_command("SET", key, 1, "PX", 60_000)
    source = cluster.owner(here)
    target = next(master for master in cluster.masters if master is not source)
    target.ask("CLUSTER", "SETSLOT", slot_of(here), "IMPORTING", source.id)
    source.ask("CLUSTER", "SETSLOT", slot_of(here), "MIGRATING", target.id)
    source.ask("MIGRATE", "127.0.0.1", target.port, there, 0, 5000)
    try:
        assert await client.execute_command("INCR", there) == 2
        assert await client.pipelined([("INCR", there), ("INCR", here)]) == [3, 2]
        assert await fleet.exchange([(here, pack(("INCR", here))), (there, pack(("INCR", there)))]) == [3, 4]
        assert thread.pipelined([("INCR", there), ("INCR", here)]) == [5, 4]
        with pytest.raises(BrokerUnavailable, match="a slot is moving"):
            await client.execute_command("MGET", here, there)
    finally:
        source.ask("MIGRATE", "127.0.0.1", target.port, here, 0, 5000)
        for master in (target, source, *cluster.masters):
            master.ask("CLUSTER", "SETSLOT", slot_of(here), "NODE", target.id)
    assert await client.execute_command("MGET", here, there) == [b"4", b"5"]
    await fleet.close()
    thread.close()


async def test_one_slot_has_moved_while_another_moves(client: Client, cluster: Cluster, prefix: str) -> None:
    """Both lead to the same node, one of them only for this once: there is one connection, and one asks at a time."""
    keys = spread_keys(prefix, cluster)
    moving, moved = [key for key in keys if cluster.owner(key) is cluster.owner(keys[0])][:2]
    fleet, commands = Fleet(client), [(key, pack(("INCR", key))) for key in (moving, moved)]
    assert await fleet.exchange(commands) == [1, 1]
    target = cluster.migrate(moved)
    with cluster.moving(moving) as there:
        assert there is target
        assert await fleet.exchange(commands) == [2, 2]
    await client.execute_command("DEL", moving)
    await client.execute_command("DEL", moved)
    await fleet.close()


async def test_a_killed_master_is_replaced(client: Client, connector: Connector, cluster: Cluster, prefix: str) -> None:
    """The same clients go on with the replica, with BrokerUnavailable at most in between; other nodes never notice."""
    keys, fleet, thread = spread_keys(prefix, cluster), Fleet(client), connector.blocking_client()
    for key in keys:
        await client.execute_command("SET", key, 1, "PX", 60_000)
    assert thread.pipelined([("GET", key) for key in keys]) == [b"1"] * len(keys)
    assert await fleet.exchange([(key, pack(("GET", key))) for key in keys]) == [b"1"] * len(keys)
    victim = cluster.owner(keys[0])
    for master in cluster.masters:
        with master.client() as direct:
            direct.execute_command("WAIT", 1, 1000)
    victim.kill()
    try:
        commands = [(key, pack(("GET", key))) for key in keys]
        with anyio.fail_after(30):
            while await fleet.exchange(commands) != [b"1"] * len(keys):
                await anyio.sleep(0.05)
        assert await client.pipelined([("GET", key) for key in keys]) == [b"1"] * len(keys)
        thread.pipelined([("GET", keys[0])])  # the first one may find the dead connection
        assert thread.pipelined([("GET", key) for key in keys]) == [b"1"] * len(keys)
    finally:
        cluster.heal()
    await fleet.close()
    thread.close()
