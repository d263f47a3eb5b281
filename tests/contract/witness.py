"""Records what handlers have seen, and waits for it: a failure names the missing or repeated messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from typing import Any

import anyio
from tenacity import retry, retry_if_exception_type, stop_after_delay, wait_fixed

from rsmq import Broker, BrokerError, BrokerUnavailable
from rsmq.dlq import DeadLetter
from rsmq.inspector.retention_holds import group_needs
from tests.patience import until

PATIENCE = 40.0
"""Seconds: far more than anything here needs, because the machine may be busy."""


patient = retry(
    retry=retry_if_exception_type(BrokerUnavailable),
    stop=stop_after_delay(PATIENCE),
    wait=wait_fixed(0.05),
    reraise=True,
)
"""Repeats a command of a test when its connection breaks, as a user would do."""


class Witness:
    """Handlers record here what they have handled."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def note(self, what: Hashable) -> None:
        """Record one message."""
        self.seen.append(what)

    async def sees(self, expected: Iterable[Hashable], *, again: bool = False) -> None:
        """Wait until all of it was seen, without repeats unless `again` allows them. Others are ignored."""
        wanted = set(expected)
        try:
            await until(lambda: wanted <= set(self.seen), "everything is seen")
        except AssertionError:
            raise AssertionError(f"Never: {sorted(wanted - set(self.seen), key=repr)[:20]}") from None
        more = {what: count for what, count in Counter(self.seen).items() if count > 1 and what in wanted}
        assert again or not more, f"MoreThanOnce: {more}"


@patient
async def ask(broker: Broker, *command: Any) -> Any:
    """One command of the test itself."""
    return await broker.client.execute_command(*command)


async def cut_connections(broker: Broker) -> None:
    """End all connections but those of the test itself, on a cluster at each node."""
    for node in broker.client.nodes:
        await node.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")


async def lose_all(broker: Broker) -> None:
    """Delete all keys under the prefix, with no more rights than rsmq itself has: at once, on a cluster one by one."""
    client, lost = broker.client, list[bytes]()
    for node in client.nodes:
        cursor = b"0"
        while True:
            cursor, found = await node.execute_command("SCAN", cursor, "MATCH", f"{broker.keys.prefix}*", "COUNT", 1000)
            lost += found
            if cursor == b"0":
                break
    for keys in [[key] for key in lost] if client.is_cluster else [lost]:
        await client.execute_command("UNLINK", *keys)


async def add(broker: Broker, stream: str, *fields: Any, at: str = "") -> None:
    """Add an entry as another client. It has an id, so an XADD whose reply was lost can be repeated."""
    if not at:
        newest = await ask(broker, "XREVRANGE", stream, "+", "-", "COUNT", 1)
        time, _, number = (newest[0][0] if newest else b"0-0").decode().partition("-")
        at = f"{time}-{int(number) + 1}"
    try:
        await ask(broker, "XADD", stream, at, *fields)
    except BrokerError as error:
        if "equal or smaller" not in str(error):
            raise  # else it was ours


@patient
async def settled(broker: Broker, topic: str) -> None:
    """Wait until no group holds anything of a topic: not delivered, pending or waiting for a retry."""
    found = await broker.topics.find(topic)
    assert found is not None
    holds: list[str] = []
    with anyio.move_on_after(PATIENCE):
        while True:
            holds = [
                f"{topic}.{partition} {needs}"
                for partition in found.numbers
                for needs in await group_needs(broker.client, broker.keys, topic, partition)
                if needs.is_holding
            ]
            if not holds:
                return
            await anyio.sleep(0.01)
    raise AssertionError(f"not settled: {holds}")


@patient
async def letters_of(broker: Broker, topic: str, group: str) -> list[DeadLetter]:
    """A group's dead letters, oldest first."""
    found = await broker.topics.find(topic)
    assert found is not None
    return [letter async for letter in broker.dead_letters.iterate(found, group)]


async def dead(broker: Broker, topic: str, group: str) -> list[tuple[str, bytes | None]]:
    """Reason and data of a group's dead letters, oldest first."""
    return [(letter.reason, letter.data) for letter in await letters_of(broker, topic, group)]


async def dies(broker: Broker, topic: str, group: str, count: int) -> list[tuple[str, bytes | None]]:
    """Wait until a group has so many dead letters."""
    letters: list[tuple[str, bytes | None]] = []
    with anyio.move_on_after(PATIENCE):
        while len(letters) < count:
            letters = await dead(broker, topic, group)
            await anyio.sleep(0.01)
    assert len(letters) == count, f"dead letters: {letters}"
    return letters


def lanes(broker: Broker) -> set[int]:
    """The partitions that the only handler of a running broker owns now."""
    assert broker.worker is not None
    (numbers,) = (sorted(consumer.lanes) for consumer in broker.worker.consumers)
    return set(numbers)


@patient
async def lengths(broker: Broker, topic: str) -> int:
    """How many entries a topic has in the server."""
    found = await broker.topics.find(topic)
    assert found is not None
    total = 0
    for partition in found.numbers:
        total += await broker.client.execute_command("XLEN", broker.keys.stream(topic, partition))
    return total
