"""Commands that many tasks await one by one: in one write, each with its own answer, and nobody left waiting."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import anyio
import pytest

from rsmq.connect import Client, Connector
from rsmq.consumer.convoy import Convoy
from rsmq.errors import BrokerError, BrokerUnavailable
from rsmq.script import SEEK_ENTRY, TAKE_LEASE
from rsmq.settings import Settings
from tests.servers import Server

LEASE = ("m", 10_000, "r", "", "", "g")


@pytest.fixture
async def convoy(client: Client) -> AsyncIterator[Convoy]:
    """One that runs."""
    running = Convoy(client)
    async with anyio.create_task_group() as tasks:
        await tasks.start(running.run)
        yield running
        tasks.cancel_scope.cancel()


async def test_each_gets_its_own_answer(convoy: Convoy, client: Client, prefix: str) -> None:
    """What fifty tasks ask at once goes out in a few writes; an error is one task's, and a forgotten script is sent."""
    await client.execute_command("SCRIPT", "FLUSH")
    await client.execute_command("SET", f"{prefix}:7", "no hash")
    answers = await asyncio.gather(
        *[convoy.ask(TAKE_LEASE, [f"{prefix}:{number}", f"{prefix}:stream"], LEASE) for number in range(50)],
        return_exceptions=True,
    )
    await client.execute_command("DEL", *[f"{prefix}:{number}" for number in range(50)])
    assert isinstance(answers[7], BrokerError)
    assert [answer[0] for number, answer in enumerate(answers) if number != 7] == [b"OK"] * 49


async def test_who_is_cancelled_harms_nobody(convoy: Convoy, client: Client, prefix: str) -> None:
    """A task that stops waiting takes nobody's answer along."""
    gone = asyncio.ensure_future(convoy.ask(TAKE_LEASE, [f"{prefix}:a", f"{prefix}:stream"], LEASE))
    await asyncio.sleep(0)
    gone.cancel()
    assert (await convoy.ask(TAKE_LEASE, [f"{prefix}:b", f"{prefix}:stream"], LEASE))[0] == b"OK"
    await asyncio.wait([gone])
    await client.execute_command("DEL", f"{prefix}:a", f"{prefix}:b")


async def test_it_works_while_it_does_not_run(client: Client, prefix: str) -> None:
    """Before it runs, and after, a command goes by itself."""
    assert (await Convoy(client).ask(TAKE_LEASE, [f"{prefix}:a", f"{prefix}:stream"], LEASE))[0] == b"OK"
    await client.execute_command("DEL", f"{prefix}:a")


async def test_its_end_is_told_to_all() -> None:
    """Whoever waits when it is cancelled learns that there will be no answer."""
    with Server() as server:
        async with Connector(server.url, Settings(url=server.url)).connected() as client:
            convoy = Convoy(client)
            async with anyio.create_task_group() as tasks:
                await tasks.start(convoy.run)
                server.pause()
                waiting = [asyncio.ensure_future(convoy.ask(SEEK_ENTRY, ["a"], ("0",))) for _ in range(3)]
                while not convoy._waiting:
                    await asyncio.sleep(0)
                tasks.cancel_scope.cancel()
            server.resume()
            for each in waiting:
                with pytest.raises(BrokerUnavailable):
                    await each
