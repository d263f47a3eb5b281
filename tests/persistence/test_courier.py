"""The courier: every call gets its own answer, whatever happens to the connection, the scripts and the others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import anyio
import anyio.abc
import pytest

from rsmq.connect import Client
from rsmq.errors import BrokerError, BrokerUnavailable
from rsmq.keys import Keys
from rsmq.persistence.courier import MOST_CALLS, Courier
from rsmq.persistence.letter import seal
from rsmq.script import ADD_LETTERS, OPEN_SESSION
from rsmq.settings import Settings
from tests.persistence.conftest import WEEK_MS

SOON = 20.0


@pytest.fixture
def courier(client: Client, settings: Settings) -> Courier:
    """Not running yet."""
    return Courier(client, settings)


@pytest.fixture
async def tasks() -> AsyncIterator[anyio.abc.TaskGroup]:
    """Where it runs, until the test ends."""
    async with anyio.create_task_group() as group:
        yield group
        group.cancel_scope.cancel()


def add(courier: Courier, keys: Keys, device: str, count: int, size: int = 1) -> asyncio.Future[Any]:
    """Store so many letters, once."""
    envelope = seal(b"x" * size)
    parts = [part for n in range(1, count + 1) for part in (f"{n:016d}", "", "", envelope)]
    return courier.ask(ADD_LETTERS, keys.device(device), (WEEK_MS, 10_000, 600_000, "source:s", count, *parts))


@pytest.mark.parametrize("size", [1, 50_000])
async def test_everyone_gets_its_own_answer(
    courier: Courier, keys: Keys, tasks: anyio.abc.TaskGroup, size: int
) -> None:
    """More calls than one write takes, by number or by bytes, asked before it runs: none gets another's reply."""
    answers = [add(courier, keys, f"phone-{n}", n % 4 + 1, size) for n in range(MOST_CALLS + 20)]
    await tasks.start(courier.run)
    with anyio.fail_after(SOON):
        replies = await asyncio.gather(*answers)
    assert [reply[1] for reply in replies] == [n % 4 + 1 for n in range(MOST_CALLS + 20)]
    assert repr(courier) == "<Courier waiting=0 flying=0>"


async def test_an_error_is_only_its_own(
    courier: Courier, client: Client, keys: Keys, tasks: anyio.abc.TaskGroup
) -> None:
    """Calls in the same write as one that fails succeed."""
    await client.execute_command("SET", keys.inbox("phone-1"), "foreign")
    answers = [add(courier, keys, f"phone-{n}", 1) for n in range(3)]
    await tasks.start(courier.run)
    with anyio.fail_after(SOON):
        one, other, third = await asyncio.gather(*answers, return_exceptions=True)
    assert one == third == [b"OK", 1, 0, 0, 0]
    assert isinstance(other, BrokerError)
    assert "WRONGTYPE" in str(other)


async def test_forgotten_scripts_in_one_write(
    courier: Courier, client: Client, keys: Keys, tasks: anyio.abc.TaskGroup
) -> None:
    """Each script is sent once more with its source, and all calls of that write are carried out, once."""
    await client.execute_command("SCRIPT", "FLUSH")
    answers = [add(courier, keys, f"phone-{n}", 1) for n in range(5)]
    answers += [courier.ask(OPEN_SESSION, keys.device(f"phone-{n}"), ("gateway", 0, WEEK_MS)) for n in range(5)]
    await tasks.start(courier.run)
    with anyio.fail_after(SOON):
        replies = await asyncio.gather(*answers)
    assert all(reply[0] == b"OK" for reply in replies)
    assert [reply[1] for reply in replies[:5]] == [1] * 5


async def test_the_connections_are_cut_between_calls(
    courier: Courier, client: Client, keys: Keys, tasks: anyio.abc.TaskGroup
) -> None:
    """A cut connection is opened again; a call that is repeated is stored once."""
    await tasks.start(courier.run)
    for n in range(1, 20):
        lanes = [wire.client_id for lane in courier._lanes for wire in lane._wires.values() if wire.is_open]
        answers = [add(courier, keys, f"phone-{each}", n) for each in range(3)]
        await asyncio.sleep(0)
        for number in lanes:
            await client.execute_command("CLIENT", "KILL", "ID", number)
        with anyio.fail_after(SOON):
            await asyncio.gather(*answers)
    for each in range(3):
        assert await client.execute_command("ZCARD", keys.inbox(f"phone-{each}")) == 19
        assert await client.execute_command("HGET", keys.session(f"phone-{each}"), "seq") == b"19"


async def test_who_gave_up_is_not_served(
    courier: Courier, client: Client, keys: Keys, tasks: anyio.abc.TaskGroup
) -> None:
    """A question that nobody waits for any more does not set out; the one beside it does."""
    moot, asked = add(courier, keys, "phone", 1), add(courier, keys, "tablet", 1)
    moot.cancel()
    await tasks.start(courier.run)
    with anyio.fail_after(SOON):
        await asked
    assert await client.execute_command("EXISTS", keys.session("phone")) == 0


async def test_an_answer_to_nobody(courier: Courier, keys: Keys, tasks: anyio.abc.TaskGroup) -> None:
    """Giving up at any moment disturbs no later call."""
    await tasks.start(courier.run)
    for turns in range(6):
        gone = add(courier, keys, f"phone-{turns}", 1)
        for _ in range(turns):
            await asyncio.sleep(0)
        gone.cancel()
        with anyio.fail_after(SOON):
            assert (await add(courier, keys, f"tablet-{turns}", 2))[1] == 2


async def test_closing_answers_everyone(courier: Courier, keys: Keys) -> None:
    """What was asked before and what is asked afterwards: told that it is closed, and nobody waits for ever."""
    early = add(courier, keys, "phone", 1)
    with anyio.CancelScope() as scope:
        scope.cancel()
        await courier.run()
    late = add(courier, keys, "phone", 2)
    for answer in (early, late):
        with anyio.fail_after(SOON), pytest.raises(BrokerUnavailable, match="the broker was closed"):
            await answer
