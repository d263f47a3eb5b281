"""How far a group has settled a partition."""

from __future__ import annotations

from rsmq.model.stream_id import parse_stream_id
from rsmq.redis.scripts import MEASURE_GROUP_PARTITION
from rsmq.redis.server_context import ServerContext
from rsmq.redis.streams import groups_of


async def settled_floor(
    context: ServerContext, topic: str, partition: int, group: str, most_parked: int
) -> tuple[int, int] | None:
    """The oldest entry that the group may still handle, or None if that is not known: no such group. With more than
    `most_parked` messages that wait for a retry, it is the oldest entry that is there: a message needs its own."""
    keys, topic_partition = context.keys, (topic, partition)
    stream = keys.stream(*topic_partition)
    row = next((row for row in await groups_of(context.client, stream) if row["name"] == group.encode()), None)
    if row is None:
        return None
    last = row["last-delivered-id"]
    names = (stream, *(part(*topic_partition, group) for part in (keys.lease, keys.retry, keys.dlq)))
    pending, undelivered, parked, count, *_ = await MEASURE_GROUP_PARTITION(
        context.client, names, (group, last, most_parked)
    )
    found = [parse_stream_id(each) for each in (pending, undelivered, parked) if each]
    if count > most_parked:
        entries = await context.client.execute_command("XRANGE", stream, "-", "+", "COUNT", 1)
        found = [parse_stream_id(entry_id) for entry_id, _ in entries]
    ms, seq = parse_stream_id(last)
    return min(found, default=(ms, seq + 1))
