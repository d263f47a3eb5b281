"""Whether a worker in this process has done all there is to do now; and moving what is due later to an earlier time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any, Final

import anyio

from rsmq.clock import to_ms
from rsmq.connect import Client
from rsmq.consumer.consumer import Consumer
from rsmq.entry import place
from rsmq.keys import Keys
from rsmq.script import Value
from rsmq.stream import as_dict, is_missing, pipelined
from rsmq.topic import Topic

LOOK: Final = 0.002
"""Seconds between two looks."""


async def until_quiet(client: Client, keys: Keys, consumers: Sequence[Consumer], seconds: float) -> None:
    """Wait until nothing is due, undelivered, or in hand. Raises AssertionError with what is, after `seconds`."""
    work: list[str] = []
    with anyio.move_on_after(seconds):
        while True:
            work = await work_left(client, keys, consumers)
            if not work:
                return
            await anyio.sleep(LOOK)
    raise AssertionError(f"after {seconds:g} s the handlers are still busy: {'; '.join(work)}")


async def work_left(client: Client, keys: Keys, consumers: Sequence[Consumer]) -> list[str]:
    """What is still to be done now, a line for each partition and group.

    Sound without locks: what the server counts as pending is either waiting for its retry behind a key, which the
    consumer knows and counts, or work; a message on its way between the two is pending, and counted nowhere else.
    """
    return [line for consumer in consumers for line in await _work_of(client, keys, consumer)]


async def _work_of(client: Client, keys: Keys, consumer: Consumer) -> list[str]:
    topic, group, shelved = consumer.topic, consumer.handler.group, consumer.queue.shelved
    found, pending, now = [], 0, await server_ms(client.node_for(keys.stream(topic.name, 0)))
    for partition, row in enumerate(await _look(client, keys, topic, group, now)):
        is_undelivered, owed, due = row
        pending += owed
        if is_undelivered or due:
            found.append(f"{topic.name}.{partition}/{group} has messages to deliver")
    if pending != shelved or consumer.queue.in_hand or consumer.queue.shelved != shelved:
        found.append(f"{topic.name}/{group} has {max(consumer.queue.in_hand, pending - shelved)} in hand")
    return found


async def _look(client: Client, keys: Keys, topic: Topic, group: str, now: int) -> list[tuple[bool, int, int]]:
    """Of each partition: whether anything is undelivered, how much is pending, how much is due."""
    questions: list[Sequence[Value]] = []
    for partition in range(topic.partitions):
        stream = keys.stream(topic.name, partition)
        questions += [
            ("XINFO", "STREAM", stream),
            ("XINFO", "GROUPS", stream),
            ("ZCOUNT", keys.delayed(topic.name, partition), "-inf", now),
            ("ZCOUNT", keys.retry(topic.name, partition, group), "-inf", now),
        ]
    replies = await _ask(client, questions)
    rows = []
    for info, groups, delayed, retries in batched(replies, 4):
        row = next((row for row in map(as_dict, groups or ()) if row["name"].decode() == group), None)
        is_behind = (
            info is not None
            and row is not None
            and place(row["last-delivered-id"]) < place(as_dict(info)["last-generated-id"])
        )
        rows.append((is_behind, 0 if row is None else row["pending"], delayed + retries))
    return rows


def batched(replies: Sequence[Any], size: int) -> Iterable[Sequence[Any]]:
    """Rows of `size`."""
    return (replies[at : at + size] for at in range(0, len(replies), size))


async def bring_forward(client: Client, keys: Keys, consumers: Sequence[Consumer], span: timedelta) -> None:
    """Everything that waits for its time (retries, delayed messages) is due earlier by `span`.

    The consumers put what they have set aside back to the server first and take it over again: their own timers are
    of the old time. Nothing may be in hand: wait with `until_quiet`.
    """
    lanes = [(consumer, lane) for consumer in consumers for lane in list(consumer.lanes.values())]
    stopped = await asyncio.gather(*(consumer.warden.quiesce(lane, 10) for consumer, lane in lanes))
    assert all(stopped), "a handler began meanwhile and does not end"
    for key in {key for consumer in consumers for key in _clocks(keys, consumer)}:
        await _shift(client, key, to_ms(span))
    for consumer, lane in lanes:
        lane.retry_at = 0.0
        await consumer.warden.resume_lane(lane)


def _clocks(keys: Keys, consumer: Consumer) -> Iterable[str]:
    """The keys that hold due times."""
    topic, group = consumer.topic, consumer.handler.group
    for partition in range(topic.partitions):
        yield keys.retry(topic.name, partition, group)
        yield keys.delayed(topic.name, partition)


async def _shift(client: Client, key: str, ms: int) -> None:
    """XX: what is moved into the stream at this very moment does not come back."""
    members = await client.execute_command("ZRANGE", key, 0, -1)
    for reply in await pipelined(client, [("ZADD", key, "XX", "INCR", -ms, member) for member in members]):
        if isinstance(reply, Exception):
            raise reply


async def server_ms(client: Client) -> int:
    """The server's time, in milliseconds since 1970."""
    seconds, micros = await client.execute_command("TIME")
    return int(seconds) * 1000 + int(micros) // 1000


async def _ask(client: Client, questions: Sequence[Sequence[Value]]) -> list[Any]:
    """The replies; None for a stream that does not exist."""
    replies = await pipelined(client, questions)
    for reply in replies:
        if isinstance(reply, Exception) and not is_missing(reply):
            raise reply
    return [None if isinstance(reply, Exception) else reply for reply in replies]
