"""Groups: how one is joined, paused and reset."""

from __future__ import annotations

from datetime import datetime

from rsmq.clock import now_ms
from rsmq.connect import Client
from rsmq.errors import BrokerError, ConfigError
from rsmq.keys import Keys
from rsmq.script import RESET_GROUP
from rsmq.stream import Partitioned, start_id


async def join_group(client: Client, keys: Keys, topic: Partitioned, group: str, distribution: str) -> None:
    """Note how the group distributes its messages. Raises ConfigError when its other members do it differently."""
    key = keys.group(topic.name, group)
    await client.execute_command("HSETNX", key, "created_ms", now_ms())
    if await client.execute_command("HSETNX", key, "distribution", distribution):
        return
    found = (await client.execute_command("HGET", key, "distribution") or b"").decode()
    if found != distribution:
        raise ConfigError(
            f"group {group!r} of topic {topic.name!r} has distribution {found!r}, not {distribution!r}: mixed members "
            f"would break each other's promises. Use another group name, or stop all members and run "
            f"`rsmq group reset {topic.name} {group} --to earliest`"
        )


async def set_paused(client: Client, keys: Keys, topic: str, group: str, *, paused: bool) -> None:
    """Stop or resume the delivery to a group; its members keep their leases and what is in hand."""
    await client.execute_command("HSET", keys.group(topic, group), "paused", int(paused))
    await client.execute_command("PUBLISH", keys.changes(topic, group), "")


async def reset_group(client: Client, keys: Keys, topic: Partitioned, group: str, start: str | datetime) -> None:
    """Let a group handle the topic again from `start` (`earliest`, `latest`, a stream id, a time).

    What was pending or parked is dropped with the old run; messages in hand of live members are settled by nobody.
    """
    place = start_id(start)
    for partition in range(topic.partitions):
        names = (
            keys.stream(topic.name, partition),
            keys.lease(topic.name, partition, group),
            keys.retry(topic.name, partition, group),
        )
        await RESET_GROUP(client, names, (group, place))
    await client.execute_command("HDEL", keys.group(topic.name, group), "distribution")
    await client.execute_command("PUBLISH", keys.changes(topic.name, group), "")


async def delete_group(client: Client, keys: Keys, topic: Partitioned, group: str) -> None:
    """Forget a group with its place, its retries and its dead letters. Its members must have stopped before.

    The group's own entry goes last, so that an interrupted delete can be repeated.
    """
    for partition in range(topic.partitions):
        at = (topic.name, partition, group)
        names = (keys.lease(*at), keys.retry(*at), keys.dlq(*at))
        await client.execute_command("UNLINK", *names)
        try:
            await client.execute_command("XGROUP", "DESTROY", keys.stream(topic.name, partition), group)
        except BrokerError as error:
            if not is_missing_stream(error):
                raise
    await client.execute_command("UNLINK", keys.group(topic.name, group), keys.members(topic.name, group))
    await client.execute_command("PUBLISH", keys.changes(topic.name, group), "")


def is_missing_stream(error: BrokerError) -> bool:
    """XGROUP wants a stream that exists."""
    return "requires the key to exist" in str(error) or "no such key" in str(error).lower()
