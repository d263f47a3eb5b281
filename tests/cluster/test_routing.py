"""Clients of a cluster: every command reaches the node of its slot, even while slots move and masters die."""

from __future__ import annotations

import asyncio

import anyio
import pytest
from redis.exceptions import NoScriptError

from rsmq.broker import Broker
from rsmq.errors import BrokerUnavailable, ConfigError
from rsmq.model.settings import Settings
from rsmq.redis.client.connector import Client, Connector
from rsmq.redis.client.raw_connection import ShardedConnection, pack
from rsmq.redis.client.script_batcher import ScriptBatcher
from rsmq.redis.scripts import RELEASE_LEASE
from rsmq.redis.wire.slots import slot_of
from tests.cluster.cluster import Cluster


def spread_keys(prefix: str, cluster: Cluster) -> list[str]:
    """Keys that are spread over all masters."""
    keys = [f"{prefix}:{{{number}}}" for number in range(24)]
    assert {cluster.owner(key).port for key in keys} == {master.port for master in cluster.masters}
    return keys


async def test_commands_reach_the_node_of_their_key(client: Client, cluster: Cluster, prefix: str) -> None:
    """Keys of all nodes can be written and read, alone and together, in order."""
    keys = spread_keys(prefix, cluster)
    for number, key in enumerate(keys):
        await client.execute_command("SET", key, number, "PX", 60_000)
    replies = await client.pipelined([("GET", key) for key in keys])
    assert replies == [b"%d" % number for number in range(len(keys))]
    assert len(client.nodes) == 3


async def test_url_of_one_server_is_refused_with_the_scheme_of_clusters(cluster: Cluster, prefix: str) -> None:
    """Every node would refuse most keys: a broker does not start there, and says which URL would fit."""
    for node in cluster.masters:
        settings = Settings(url=f"redis://127.0.0.1:{node.port}", prefix=prefix)
        with pytest.raises(ConfigError, match=r"node of a cluster: use redis\+cluster://"):
            async with Broker(settings):
                pass


async def test_unknown_script_is_loaded_on_the_node_of_its_key(client: Client, cluster: Cluster, prefix: str) -> None:
    """No node has the script before."""
    for key in spread_keys(prefix, cluster):
        assert await RELEASE_LEASE(client, (key, key), ("unknown", "0", "g")) is not None


async def test_sharded_exchange_keeps_the_order_of_replies(client: Client, cluster: Cluster, prefix: str) -> None:
    """One exchange over all nodes returns each reply at the position of its command, errors too."""
    sharded, keys = ShardedConnection(client), spread_keys(prefix, cluster)
    assert await sharded.exchange([(key, pack(("SET", key, key, "PX", 60_000))) for key in keys]) == [b"OK"] * len(keys)
    replies = await sharded.exchange([(key, pack(("GET", key))) for key in keys])
    assert replies == [key.encode() for key in keys]
    (refused,) = await sharded.exchange([(keys[0], pack(("EVALSHA", "0" * 40, 1, keys[0])))])
    assert isinstance(refused, NoScriptError)
    await sharded.close()


async def test_call_after_one_without_reply_first_ends_what_is_late(cluster: Cluster, prefix: str) -> None:
    """A node that keeps writes waiting answers a call too late. The next call ends that connection before it is sent,
    so the late one cannot be executed after it; calls on other nodes go on meanwhile.
    """
    settings = Settings(url=cluster.url, prefix=prefix, command_timeout="PT0.5S")
    first, *keys = spread_keys(prefix, cluster)
    other = next(key for key in keys if cluster.owner(key) is not cluster.owner(first))

    def kills() -> int:
        return int(cluster.owner(first).ask("INFO", "commandstats").get("cmdstat_client|kill", {"calls": 0})["calls"])

    async with Connector(cluster.url, settings).connected() as client, anyio.create_task_group() as tasks:
        batcher = ScriptBatcher(client)
        await tasks.start(batcher.run)

        async def release(key: str) -> None:
            assert await batcher.ask(RELEASE_LEASE, (key, key), ("unknown", "0", "g", "")) is not None

        await release(first)
        before = kills()
        cluster.owner(first).ask("CLIENT", "PAUSE", 60_000, "WRITE")
        try:
            with pytest.raises(BrokerUnavailable):
                await release(first)
            await release(other)
        finally:
            cluster.owner(first).ask("CLIENT", "UNPAUSE")
        await release(first)
        assert kills() == before + 1
        tasks.cancel_scope.cancel()


async def test_clients_with_an_old_slot_map_follow_a_moved_slot(
    client: Client, connector: Connector, cluster: Cluster, prefix: str
) -> None:
    """Command, pipeline, sharded connection and blocking client reach the new owner."""
    key, sharded, thread = f"{prefix}:{{moving}}", ShardedConnection(client), connector.blocking_client()
    await client.execute_command("SET", key, 1, "PX", 60_000)
    assert thread.execute_command("GET", key) == b"1"
    assert await sharded.exchange([(key, pack(("INCR", key)))]) == [2]
    assert await client.pipelined([("INCR", key)]) == [3]
    for expected in (4, 6, 8):
        target = cluster.migrate(key)
        match expected:
            case 4:
                assert await client.execute_command("INCR", key) == 4
            case 6:
                assert await sharded.exchange([(key, pack(("INCR", key))), (key, pack(("INCR", key)))]) == [5, 6]
            case 8:
                assert await client.pipelined([("INCR", key), ("INCR", key)]) == [7, 8]
        assert thread.pipelined([("GET", key)]) == [b"%d" % expected]
        assert target.ask("GET", key) == b"%d" % expected
    await sharded.close()
    thread.close()


async def test_clients_follow_keys_of_a_moving_slot(
    client: Client, connector: Connector, cluster: Cluster, prefix: str
) -> None:
    """A key that has already moved is asked for on the new node, for this command only."""
    here, there = f"{prefix}:{{half}}:here", f"{prefix}:{{half}}:there"
    sharded, thread = ShardedConnection(client), connector.blocking_client()
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
        assert await sharded.exchange([(here, pack(("INCR", here))), (there, pack(("INCR", there)))]) == [3, 4]
        assert thread.pipelined([("INCR", there), ("INCR", here)]) == [5, 4]
        with pytest.raises(BrokerUnavailable, match="a slot is moving"):
            await client.execute_command("MGET", here, there)
    finally:
        source.ask("MIGRATE", "127.0.0.1", target.port, here, 0, 5000)
        for master in (target, source, *cluster.masters):
            master.ask("CLUSTER", "SETSLOT", slot_of(here), "NODE", target.id)
    assert await client.execute_command("MGET", here, there) == [b"4", b"5"]
    await sharded.close()
    thread.close()


async def test_clients_wait_while_two_nodes_each_name_the_other_as_owner_of_a_slot(
    client: Client, cluster: Cluster, prefix: str
) -> None:
    """As around the end of a move, until both have heard of it. A command, a pipeline and an exchange on a sharded
    connection reach the new owner then."""
    for number in range(3):
        key, sharded = f"{prefix}:{{twice{number}}}", ShardedConnection(client)
        await client.execute_command("SET", key, 1, "PX", 60_000)
        source = cluster.owner(key)
        with cluster.moving(key) as target:
            source.ask("CLUSTER", "SETSLOT", slot_of(key), "NODE", target.id)  # the target has not heard of it
            replies = await asyncio.gather(
                client.execute_command("INCR", key), client.pipelined([("INCR", key)]),
                sharded.exchange([(key, pack(("INCR", key)))]),
            )  # fmt: skip
        assert sorted([replies[0], *replies[1], *replies[2]]) == [2, 3, 4]
        await sharded.close()


async def test_moved_and_moving_slot_of_one_node_share_a_connection(
    client: Client, cluster: Cluster, prefix: str
) -> None:
    """Both redirections lead to the same node, one of them only for this command; they do not mix."""
    keys = spread_keys(prefix, cluster)
    moving, moved = [key for key in keys if cluster.owner(key) is cluster.owner(keys[0])][:2]
    sharded, commands = ShardedConnection(client), [(key, pack(("INCR", key))) for key in (moving, moved)]
    assert await sharded.exchange(commands) == [1, 1]
    target = cluster.migrate(moved)
    with cluster.moving(moving) as there:
        assert there is target
        assert await sharded.exchange(commands) == [2, 2]
    await client.execute_command("DEL", moving)
    await client.execute_command("DEL", moved)
    await sharded.close()


async def test_clients_after_the_death_of_a_master_use_its_replica(
    client: Client, connector: Connector, cluster: Cluster, prefix: str
) -> None:
    """In between they raise at most BrokerUnavailable; commands for other nodes succeed."""
    keys, sharded, thread = spread_keys(prefix, cluster), ShardedConnection(client), connector.blocking_client()
    for key in keys:
        await client.execute_command("SET", key, 1, "PX", 60_000)
    assert thread.pipelined([("GET", key) for key in keys]) == [b"1"] * len(keys)
    assert await sharded.exchange([(key, pack(("GET", key))) for key in keys]) == [b"1"] * len(keys)
    victim = cluster.owner(keys[0])
    for master in cluster.masters:
        with master.client() as direct:
            direct.execute_command("WAIT", 1, 1000)
    victim.kill()
    try:
        commands = [(key, pack(("GET", key))) for key in keys]
        with anyio.fail_after(30):
            while await sharded.exchange(commands) != [b"1"] * len(keys):
                await anyio.sleep(0.05)
        assert await client.pipelined([("GET", key) for key in keys]) == [b"1"] * len(keys)
        thread.pipelined([("GET", keys[0])])  # the first one may find the dead connection
        assert thread.pipelined([("GET", key) for key in keys]) == [b"1"] * len(keys)
    finally:
        cluster.heal()
    await sharded.close()
    thread.close()
