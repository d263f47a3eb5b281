"""A server is replaced by one that has lost letters of a topic, with their settlement."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import anyio
import pytest

from rsmq import Broker, Settings
from rsmq.redis.scripts import ADD_LETTERS, SETTLE_MESSAGES
from tests.patience import until
from tests.persistence.lost_answers import LostAnswers
from tests.servers import Server, wait_until

DEVICE = "phone"


class Failover:
    """A master, a replica that takes over, and a feed that stops before each message until it may go on."""

    def __init__(self, master: Server, replica: Server, proxy: LostAnswers, prefix: str) -> None:
        self.master, self.replica, self.proxy = master, replica, proxy
        self.broker = Broker(Settings(url=proxy.url, prefix=prefix, preflight="warn"))
        self.broker.deliver("news", to=self._to, partitions=1, batch=1)
        self.asked: list[int] = []
        """The messages whose devices were looked up."""
        self._may_go_on = [anyio.Event() for _ in range(3)]
        self._is_slow = False
        self.is_over = anyio.Event()

    async def _to(self, number: int) -> str:
        self.asked.append(number)
        await self._may_go_on[number].wait()
        if self._is_slow and number == 0:
            await anyio.sleep(0.5)  # what is sent again without being asked for comes first
        return DEVICE

    def go_on(self, number: int) -> None:
        """Let the letter of this message be stored."""
        self._may_go_on[number].set()

    async def forget_what_follows(self) -> None:
        """What is written from now on is not on the server that takes over."""
        with self.replica.client() as client:
            await anyio.to_thread.run_sync(wait_until, lambda: self._is_caught_up(client), "the replica has all")
            client.execute_command("REPLICAOF", "NO", "ONE")

    def _is_caught_up(self, replica: Any) -> bool:
        with self.master.client() as master:
            return int(master.info("replication")["master_repl_offset"]) == int(
                replica.info("replication").get("slave_repl_offset", -1)
            )

    def settled(self) -> int:
        """How many messages the master knows as settled."""
        with self.master.client() as client:
            (group,) = client.xinfo_groups(self.broker.keys.stream("news", 0))
            return int(group["entries-read"] or 0) - int(group["pending"])

    async def take_over(self) -> None:
        """The other server answers from now on, and all connections to the first one end."""
        self.proxy.move(self.replica.port)
        self._is_slow = True
        with self.master.client() as client:
            client.execute_command("CLIENT", "KILL", "TYPE", "normal")
        self.is_over.set()

    async def letters(self, count: int = 3) -> list[Any]:
        """What the device gets."""
        found = list[Any]()
        async with self.broker.connect(DEVICE) as session:
            with anyio.move_on_after(5):
                async for letter in session:
                    found.append(letter.payload)
                    await session.ack(letter)
                    if len(found) == count:
                        break
        return found


@pytest.fixture
async def failover(prefix: str) -> AsyncIterator[Failover]:
    """Replica and master are in sync."""
    async with AsyncExitStack() as stack:
        master = stack.enter_context(Server(tcp=True))
        replica = stack.enter_context(
            Server("--repl-diskless-sync-delay", "0", "--replicaof", "127.0.0.1", str(master.port), tcp=True)
        )
        proxy = await stack.enter_async_context(LostAnswers(master.port))
        yield Failover(master, replica, proxy, prefix)


async def test_a_later_letter_does_not_overtake_what_was_lost(failover: Failover) -> None:
    """Its call is on its way while the server is replaced. Had it been stored first, the earlier ones would count as
    stored when they come again."""
    broker = failover.broker
    async with broker.running():
        for number in range(3):
            await broker.publish("news", number)
        await until(lambda: failover.asked == [0], "the first message is being delivered")
        await failover.forget_what_follows()
        failover.go_on(0)
        await until(lambda: failover.asked == [0, 1], "its letter is stored")
        await until(lambda: failover.settled() == 1, "and settled")
        await failover.take_over()
        failover.go_on(1)
        failover.go_on(2)
        assert await failover.letters() == [0, 1, 2]


@pytest.mark.parametrize("count", [3, 1], ids=["with the next read", "in a call of its own"])
async def test_a_settlement_is_not_repeated_where_its_letter_was_lost(failover: Failover, count: int) -> None:
    """Its answer was lost, so it comes again: to the server that has not got the letter."""
    broker = failover.broker
    async with broker.running():
        for number in range(count):
            await broker.publish("news", number)
        await until(lambda: failover.asked == [0], "the first message is being delivered")
        await failover.forget_what_follows()
        failover.proxy.lose(SETTLE_MESSAGES, between=failover.take_over)
        for number in range(3):
            failover.go_on(number)
        await failover.is_over.wait()
        assert await failover.letters(count) == list(range(count))


async def test_what_a_process_sends_itself_goes_to_the_server_that_took_over(failover: Failover) -> None:
    """It has no other source: a letter whose answer was lost is sent again, and stored once on each server."""
    broker = failover.broker
    async with broker:
        await broker.send(DEVICE, "before")
        await failover.forget_what_follows()
        failover.proxy.lose(ADD_LETTERS, between=failover.take_over)
        await broker.send(DEVICE, "lost")
        await failover.is_over.wait()
        await broker.send(DEVICE, "after")
        assert await failover.letters() == ["before", "lost", "after"]
