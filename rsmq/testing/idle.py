"""Waiting until a worker in this process is idle, and moving the due times of messages forward."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Final

import anyio

from rsmq.consumer.consumer import Consumer
from rsmq.consumer.waiting.lane import Lane
from rsmq.handler.service import Belongs
from rsmq.model.clock import monotonic, to_ms
from rsmq.model.keys import Keys
from rsmq.model.stream_id import parse_stream_id
from rsmq.model.words import count
from rsmq.redis.client.connector import Client
from rsmq.redis.holds import hold_name, holds_of
from rsmq.redis.scripts import Value
from rsmq.redis.streams import as_dict, ask_all, newest_id, server_now_ms
from rsmq.redis.topics import Topic

POLL: Final = 0.002
"""Seconds between two checks."""


async def until_idle(
    client: Client, keys: Keys, consumers: Sequence[Consumer], seconds: float, outboxes: Sequence[Belongs] = ()
) -> None:
    """Wait until nothing is in an outbox, due, undelivered or in flight. Raises AssertionError with the rest after
    `seconds`."""
    work: list[str] = []
    with anyio.move_on_after(seconds):
        while True:
            work = await rows_left(outboxes) or await work_left(client, keys, consumers)
            if not work and not await rows_left(outboxes):  # a handler may have put one there
                return
            await anyio.sleep(POLL)
    raise AssertionError(f"after {seconds:g} s the handlers are still busy: {'; '.join(work)}")


async def rows_left(outboxes: Sequence[Belongs]) -> list[str]:
    """One line for each outbox that has rows."""
    counts = [(outbox, await outbox.rows_left()) for outbox in outboxes]
    return [f"{outbox!r} has {count(number, 'row')} to relay" for outbox, number in counts if number]


async def work_left(client: Client, keys: Keys, consumers: Sequence[Consumer]) -> list[str]:
    """The work that is left now, one line for each partition and group.

    Correct without locks: a message that the server counts as pending is either blocked behind a retry of its key,
    which the consumer counts, or it is work. A message that changes between the two is pending and counted only there.
    """
    return [line for consumer in consumers for line in await _work_of(client, keys, consumer)]


async def _work_of(client: Client, keys: Keys, consumer: Consumer) -> list[str]:
    topic, group = consumer.topic, consumer.handler.group
    waits = consumer.queue.limited - consumer.queue.held  # ready, but for a rate that opens later
    blocked = consumer.queue.blocked + waits + resting(consumer)
    found, pending, due, over, now = [], 0, 0, 0, await server_now_ms(client.node_for(keys.stream(topic.name, 0)))
    for partition, row in zip(topic.numbers, await _partition_states(client, keys, topic, group, now), strict=True):
        is_undelivered, pending_here, due_here, over_here = row
        pending += pending_here
        due += due_here
        over += over_here
        if is_undelivered:
            found.append(f"{topic.name}.{partition}/{group} has messages to deliver")
    if due > held_retries(consumer) or over:
        found.append(f"{topic.name}/{group} has messages that are due")
    in_flight = consumer.queue.in_flight - waits
    held = in_flight if consumer.waits_for_permits else 0  # by handlers that wait for a time, and behind these
    if (
        pending != blocked + held
        or in_flight != held
        or consumer.queue.blocked + waits + resting(consumer) != blocked
        or (consumer.running and not held)
    ):
        found.append(f"{topic.name}/{group} has {max(in_flight, pending - blocked)} in flight")
    if consumer.limits_undecided:
        found.append(f"the limits of {topic.name}/{group} wait for the server")
    return found


def held_retries(consumer: Consumer) -> int:
    """Retries that are due, and held by a limit or a time: their keys wait in the member."""
    lanes = list(consumer.lanes.values())
    held = [pair for lane in lanes for pair in lane.flows.held.items()]
    by_limit = sum(message.is_redelivered for name, message in held if isinstance(name, bytes))
    return by_limit + sum(len(lane.flows.resting.retries) for lane in lanes)


def resting(consumer: Consumer) -> int:
    """What waits for a time, with what is behind it, as far as the server knows."""
    lanes = list(consumer.lanes.values())
    if any(lane.flows.resting.has_news or lane.flows.aside for lane in lanes):
        return -1  # the server is being told
    return consumer.queue.waits(lanes)["time"]


async def _partition_states(
    client: Client, keys: Keys, topic: Topic, group: str, now: int
) -> list[tuple[bool, int, int, int]]:
    """For each partition: whether anything is undelivered, how much is pending, how much is due, and how much waits
    for a time that is over."""
    questions: list[Sequence[Value]] = []
    for partition in topic.numbers:
        stream = keys.stream(topic.name, partition)
        questions += [
            ("XINFO", "STREAM", stream),
            ("XINFO", "GROUPS", stream),
            ("ZCOUNT", keys.delayed(topic.name, partition), "-inf", now),
            ("ZCOUNT", keys.retry(topic.name, partition, group), "-inf", now),
            ("ZCOUNT", keys.waits(topic.name, partition, group), "-inf", now),
        ]
    replies = await ask_all(client, questions)
    rows = []
    for at in range(0, len(replies), 5):
        info, groups, delayed, retries, waits = replies[at : at + 5]
        row = next((row for row in map(as_dict, groups or ()) if row["name"].decode() == group), None)
        is_behind = (
            info is not None
            and row is not None
            and parse_stream_id(row["last-delivered-id"]) < parse_stream_id(newest_id(as_dict(info)))
        )
        rows.append((is_behind, 0 if row is None else row["pending"], delayed + retries, waits))
    return rows


async def bring_forward(client: Client, keys: Keys, consumers: Sequence[Consumer], span: timedelta) -> None:
    """Make retries and delayed messages due earlier by `span`.

    Nothing may be in flight, but for handlers that wait for a permit: call `until_idle` before. Each consumer first
    gives its blocked messages back to the server and afterwards takes its lanes over again, because its own timers
    still have the old due times. A handler that waits stays as it is.
    """
    lanes = [(consumer, lane) for consumer in consumers for lane in list(consumer.lanes.values())]
    stopped = await asyncio.gather(*(_is_quiet(consumer, lane) for consumer, lane in lanes))
    assert all(stopped), "a handler started meanwhile and does not finish"
    for key in {key for consumer in consumers for key in _due_keys(keys, consumer)}:
        await _shift(client, key, to_ms(span))
    for consumer in consumers:
        await _advance_limits(client, keys, consumer, span)
    for consumer, lane in lanes:
        lane.recovery.look_for_retries(0)
        await consumer.lifecycle.resume(lane)


async def _is_quiet(consumer: Consumer, lane: Lane) -> bool:
    """Stop reading a lane, and hand back what has not started. False: a handler runs that waits for no permit."""
    seconds = 0 if consumer.waits_for_permits else 10
    return await consumer.lifecycle.quiesce(lane, seconds) or consumer.waits_for_permits


MOVE_RATE: Final = """
local text = redis.call('GET', KEYS[1])
if not text then return end
local state = cjson.decode(text)
for _, each in ipairs(state.used) do each[1] = math.max(0, each[1] - ARGV[1]) end
if state.even then state.even = math.max(0, state.even - ARGV[1]) end
redis.call('SET', KEYS[1], cjson.encode(state), 'KEEPTTL')
"""
"""The starts that a rate over the group counts are so much longer ago."""


async def _advance_limits(client: Client, keys: Keys, consumer: Consumer, span: timedelta) -> None:
    """Starts that count, and the ends of holds, are earlier by `span`: on the server, then in this process."""
    about, ms = (consumer.topic.name, consumer.handler.group), to_ms(span)
    for rate in consumer.named_rates:
        for name in rate.names:
            moved = ms + round(1000 * rate.coarseness)
            await client.execute_command("EVAL", MOVE_RATE, 1, keys.rate(*about, name), moved)
    for held in await holds_of(client, keys, *about):
        left = held.until_ms - ms - await server_now_ms(client.node_for(keys.group(*about)))
        await hold_name(client, keys, *about, held.name, left, held.kind)
    await consumer.advance_limits(span.total_seconds())
    if consumer.holds is not None:  # from now on it ignores what was asked before they were moved
        asked = monotonic()
        consumer.holds.saw(await client.execute_command("HGET", keys.group(*about), "holds") or b"", asked)


def _due_keys(keys: Keys, consumer: Consumer) -> Iterable[str]:
    """The keys of sorted sets whose scores are due times."""
    topic, group = consumer.topic, consumer.handler.group
    for partition in topic.numbers:
        yield keys.retry(topic.name, partition, group)
        yield keys.waits(topic.name, partition, group)
        yield keys.delayed(topic.name, partition)


async def _shift(client: Client, key: str, ms: int) -> None:
    """Lower the due times. XX: a member that was moved into the stream meanwhile is not added again."""
    members = await client.execute_command("ZRANGE", key, 0, -1)
    for reply in await client.pipelined([("ZADD", key, "XX", "INCR", -ms, member) for member in members]):
        if isinstance(reply, Exception):
            raise reply
