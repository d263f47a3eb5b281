"""A server that comes back without its last writes and gives the ids of lost messages to new ones.

A new message is settled by its own handling only, and not by that of a lost one, which a worker still has in hand.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal

import anyio
import pytest
from anyio.to_thread import run_sync
from tenacity import wait_fixed

from rsmq import Broker, RetryPolicy, Settings
from rsmq.consumer.consumer import Consumer
from rsmq.model.partition import partition_for
from tests.contract.witness import add, ask, patient, settled
from tests.patience import until
from tests.servers import Server

pytestmark = pytest.mark.usefixtures("no_task_left")

Distribution = Literal["hash", "shared"]


def key_in(partition: int, name: str) -> str:
    """A key of one of two partitions."""
    return next(key for key in (f"{name}{n}" for n in range(100)) if partition_for(key, 2) == partition)


class Scene:
    """A worker with two partitions. Messages of the first have gates that hold their handlers."""

    def __init__(self, server: Server, broker: Broker, distribution: Distribution) -> None:
        self.server, self.broker, self.is_stubborn = server, broker, False
        self.stream = broker.keys.stream("t", 0)
        self.seen, self.failures = list[str](), Counter[str]()
        self.gates = {"lost": anyio.Event(), "new": anyio.Event()}
        retry = RetryPolicy(wait=wait_fixed(3600))
        broker.handler("t", group="g", concurrency=4, distribution=distribution, retry=retry, partitions=2)(self.handle)

    async def handle(self, order: dict[str, str]) -> None:
        """Wait at the gate, then fail as often as the test wants."""
        name = order["name"]
        self.seen.append(name)
        try:
            await self.is_let_in(name)
        except BaseException:
            if not self.is_stubborn:
                raise
            await self.is_let_in(name)
        if self.failures[name]:
            self.failures[name] -= 1
            raise ValueError("this attempt fails")

    async def is_let_in(self, name: str) -> None:
        if name in self.gates:
            await self.gates[name].wait()

    @property
    def consumer(self) -> Consumer:
        """The worker's only one."""
        assert self.broker.worker is not None
        return self.broker.worker.consumers[0]

    async def handles(self, name: str, partition: int = 1) -> None:
        """Publish a message and wait until its handler has begun. Then all partitions were read since."""
        await patient(self.broker.publish)("t", {"name": name}, key=key_in(partition, name))
        await until(lambda: name in self.seen, f"{name} is handled")

    async def saves(self) -> None:
        """Let the server write down what it has."""
        await self.handles("before")
        await settled(self.broker, "t")
        await ask(self.broker, "SAVE")

    async def goes_back(self) -> list[bytes]:
        """Restart the server with what it had written down, and give the ids of lost messages to others."""
        lost = await ask(self.broker, "XRANGE", self.stream, "-", "+")
        self.server.kill()
        await run_sync(self.server.start)
        return await self.gives_again(lost)

    async def gives_again(self, entries: list[Any]) -> list[bytes]:
        """Each entry of a lost message is one of a new message now."""
        for entry_id, fields in entries:
            fields = [part.replace(b"lost", b"new") for part in fields]
            await add(self.broker, self.stream, *fields, at=entry_id.decode())
        return [entry_id for entry_id, _ in entries]

    async def pending(self) -> list[bytes]:
        """The ids that are pending in the first partition."""
        return [row[0] for row in await ask(self.broker, "XPENDING", self.stream, "g", "-", "+", 10)]

    async def is_confirmed(self) -> None:
        """Wait until all that is done is settled."""
        await self.consumer.settler.wait_until_settled(self.consumer.lanes.values())


@asynccontextmanager
async def scene(prefix: str, distribution: Distribution, **more: Any) -> AsyncIterator[Scene]:
    """A worker on a server of its own."""
    with Server() as server:
        broker = Broker(Settings(url=server.url, prefix=prefix, preflight="warn", partitions=2, **more))
        found = Scene(server, broker, distribution)
        async with broker.running():
            yield found


@pytest.mark.parametrize("distribution", ["hash", "shared"])
async def test_new_message_with_the_id_of_a_lost_one_stays_pending_until_it_is_handled(
    prefix: str, distribution: Distribution
) -> None:
    """The lost message is handled to its end. Its partition is read again after that, and the others meanwhile."""
    async with scene(prefix, distribution) as each:
        await each.saves()
        await each.handles("lost", partition=0)
        ids = await each.goes_back()
        await each.handles("after")
        each.gates["lost"].set()
        await until(lambda: "new" in each.seen, "the new message is handled")
        await each.is_confirmed()
        assert await each.pending() == ids
        each.gates["new"].set()
        await settled(each.broker, "t")
        assert Counter(each.seen) == dict.fromkeys(("before", "lost", "after", "new"), 1)


async def test_lost_message_that_fails_lets_no_later_message_of_its_key_start(prefix: str) -> None:
    """Both come again, in order. The later one must not be handled before that."""
    async with scene(prefix, "hash") as each:
        await each.saves()
        await each.handles("lost", partition=0)
        await patient(each.broker.publish)("t", {"name": "lost, too"}, key=key_in(0, "lost"))
        await until(lambda: len(each.consumer.lanes[0].in_flight) == 2, "the later one waits for its key")
        await each.goes_back()
        await each.handles("after")
        each.failures["lost"] = 1
        for gate in each.gates.values():
            gate.set()
        await until(lambda: "new, too" in each.seen, "both are handled again")
        await settled(each.broker, "t")
        assert [name for name in each.seen if "after" not in name] == ["before", "lost", "new", "new, too"]


@pytest.mark.parametrize("distribution", ["hash", "shared"])
async def test_lost_message_that_fails_is_not_retried_under_the_id_of_a_new_one(
    prefix: str, distribution: Distribution
) -> None:
    """Its retry would come in an hour, and would count for the new message."""
    async with scene(prefix, distribution) as each:
        await each.saves()
        await each.handles("lost", partition=0)
        await each.goes_back()
        await each.handles("after")
        each.failures["lost"] = 1
        for gate in each.gates.values():
            gate.set()
        await until(lambda: "new" in each.seen, "the new message is handled")
        await settled(each.broker, "t")
        assert Counter(each.seen) == dict.fromkeys(("before", "lost", "after", "new"), 1)


async def test_lost_message_that_waits_for_its_retry_holds_its_partition_for_one_lease(prefix: str) -> None:
    """With key order it stays in flight for the hour until its retry. The new message does not wait so long."""
    async with scene(prefix, "hash", lease_ttl="PT2S") as each:
        each.failures["lost"] = 1
        for gate in each.gates.values():
            gate.set()
        await each.saves()
        await each.handles("lost", partition=0)
        await until(lambda: each.consumer.lanes[0].flows.parked, "it waits for its retry")
        await each.goes_back()
        await until(lambda: "new" in each.seen, "the new message is handled")
        await settled(each.broker, "t")


async def test_handler_that_outlives_a_flush_settles_no_new_message(prefix: str) -> None:
    """After FLUSHALL the new lease has a greater epoch than the lost one: epochs grow with the clock."""
    async with scene(prefix, "hash") as each:
        each.is_stubborn = True
        await each.handles("lost", partition=0)
        lost, epoch = await ask(each.broker, "XRANGE", each.stream, "-", "+"), each.consumer.lanes[0].epoch
        await ask(each.broker, "FLUSHALL")
        ids = await each.gives_again(lost)
        await until(lambda: "new" in each.seen, "the new message is handled")
        assert int(each.consumer.lanes[0].epoch) > int(epoch)
        each.gates["lost"].set()
        await each.handles("after")
        await each.is_confirmed()
        assert await each.pending() == ids
        each.gates["new"].set()
        await settled(each.broker, "t")
