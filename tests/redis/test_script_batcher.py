"""The batcher of script calls: every call gets its own reply, also when the connection or other calls fail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import anyio
import anyio.abc
import pytest

from rsmq.errors import BrokerError, BrokerUnavailable
from rsmq.model.keys import Keys
from rsmq.model.settings import Settings
from rsmq.persistence.letter import pack_letter, pack_letters, seal
from rsmq.redis.client.connector import Client, Connector
from rsmq.redis.client.script_batcher import MOST_CALLS, ScriptBatcher
from rsmq.redis.scripts import ADD_LETTERS, OPEN_SESSION, SEEK_ENTRY, TAKE_LEASE
from tests.patience import until
from tests.servers import Server

SOON = 20.0
WEEK_MS = 7 * 24 * 3600 * 1000
LEASE = ("m", 10_000, "r", "", "", "g")


@pytest.fixture
async def tasks(no_task_left: None) -> AsyncIterator[anyio.abc.TaskGroup]:
    """Where a batcher runs, until the test ends."""
    async with anyio.create_task_group() as group:
        yield group
        group.cancel_scope.cancel()


# -- without patience: the worker's ---------------------------------------------------------------------------------


@pytest.fixture
async def batcher(client: Client, tasks: anyio.abc.TaskGroup) -> ScriptBatcher:
    """One that runs."""
    running = ScriptBatcher(client)
    await tasks.start(running.run)
    return running


async def test_concurrent_calls_get_their_own_replies(batcher: ScriptBatcher, client: Client, prefix: str) -> None:
    """What fifty tasks ask at once goes out in a few writes; an error is one task's, and a forgotten script is sent."""
    await client.execute_command("SCRIPT", "FLUSH")
    await client.execute_command("SET", f"{prefix}:7", "no hash")
    answers = await asyncio.gather(
        *[batcher.ask(TAKE_LEASE, [f"{prefix}:{number}", f"{prefix}:stream"], LEASE) for number in range(50)],
        return_exceptions=True,
    )
    await client.execute_command("DEL", *[f"{prefix}:{number}" for number in range(50)])
    assert isinstance(answers[7], BrokerError)
    assert [answer[0] for number, answer in enumerate(answers) if number != 7] == [b"OK"] * 49


async def test_a_cancelled_call_harms_no_other(batcher: ScriptBatcher, client: Client, prefix: str) -> None:
    """A task that stops waiting takes no other task's reply along."""
    gone = asyncio.ensure_future(batcher.ask(TAKE_LEASE, [f"{prefix}:a", f"{prefix}:stream"], LEASE))
    await asyncio.sleep(0)
    gone.cancel()
    assert (await batcher.ask(TAKE_LEASE, [f"{prefix}:b", f"{prefix}:stream"], LEASE))[0] == b"OK"
    await asyncio.wait([gone])
    await client.execute_command("DEL", f"{prefix}:a", f"{prefix}:b")


async def test_a_call_before_the_start_goes_by_itself(client: Client, prefix: str) -> None:
    """Before the batcher runs, and after, a call is written by itself."""
    assert (await ScriptBatcher(client).ask(TAKE_LEASE, [f"{prefix}:a", f"{prefix}:stream"], LEASE))[0] == b"OK"
    await client.execute_command("DEL", f"{prefix}:a")


async def test_a_stop_fails_the_calls_in_flight() -> None:
    """A caller that waits when the batcher is cancelled learns that there will be no reply."""
    with Server() as server:
        async with Connector(server.url, Settings(url=server.url)).connected() as client:
            batcher = ScriptBatcher(client)
            async with anyio.create_task_group() as tasks:
                await tasks.start(batcher.run)
                server.pause()
                waiting = [asyncio.ensure_future(batcher.ask(SEEK_ENTRY, ["a"], ("0",))) for _ in range(3)]
                await until(lambda: "in_flight=3" in repr(batcher), "all are in flight")
                tasks.cancel_scope.cancel()
            server.resume()
            for each in waiting:
                with pytest.raises(BrokerUnavailable):
                    await each


async def test_a_call_without_patience_fails_at_once(batcher: ScriptBatcher, client: Client, prefix: str) -> None:
    """The worker repeats by itself, as long as its lease lasts."""
    keys = [f"{prefix}:a", f"{prefix}:stream"]
    await batcher.ask(TAKE_LEASE, keys, LEASE)
    (connection,) = batcher._connections[0]._connections.values()
    await client.execute_command("CLIENT", "KILL", "ID", connection.client_id)
    with pytest.raises(BrokerUnavailable):
        await batcher.ask(TAKE_LEASE, keys, LEASE)
    await client.execute_command("DEL", f"{prefix}:a")


# -- with patience: the inboxes' ------------------------------------------------------------------------------------


@pytest.fixture
def patient(client: Client) -> ScriptBatcher:
    """Not running yet."""
    return ScriptBatcher(client, patience=30.0, connections=2)


def add(patient: ScriptBatcher, keys: Keys, device: str, count: int, size: int = 1) -> asyncio.Future[Any]:
    """Store so many letters, once."""
    envelope = seal(b"x" * size)
    letters = pack_letters([("source:s", [pack_letter(f"{n:016d}", "", "", envelope) for n in range(1, count + 1)])])
    return patient.submit(ADD_LETTERS, keys.device(device)[:3], (WEEK_MS, 10_000, 600_000, letters))


@pytest.mark.parametrize("size", [1, 50_000])
async def test_more_calls_than_one_write_takes_get_their_own_replies(
    patient: ScriptBatcher, keys: Keys, tasks: anyio.abc.TaskGroup, size: int
) -> None:
    """Too many for one write, by number or by bytes, and made before it runs: none gets another's reply."""
    answers = [add(patient, keys, f"phone-{n}", n % 4 + 1, size) for n in range(MOST_CALLS + 20)]
    await tasks.start(patient.run)
    with anyio.fail_after(SOON):
        replies = await asyncio.gather(*answers)
    assert [reply[1] for reply in replies] == [n % 4 + 1 for n in range(MOST_CALLS + 20)]
    assert repr(patient) == "<ScriptBatcher waiting=0 in_flight=0>"


async def test_an_error_fails_only_its_own_call(
    patient: ScriptBatcher, client: Client, keys: Keys, tasks: anyio.abc.TaskGroup
) -> None:
    """Calls in the same write as one that fails succeed."""
    await client.execute_command("SET", keys.inbox("phone-1"), "foreign")
    answers = [add(patient, keys, f"phone-{n}", 1) for n in range(3)]
    await tasks.start(patient.run)
    with anyio.fail_after(SOON):
        one, other, third = await asyncio.gather(*answers, return_exceptions=True)
    assert one == third == [b"OK", 1, 0, 0, 0]
    assert isinstance(other, BrokerError)
    assert "WRONGTYPE" in str(other)


async def test_forgotten_scripts_of_one_write_are_sent_again(
    patient: ScriptBatcher, client: Client, keys: Keys, tasks: anyio.abc.TaskGroup
) -> None:
    """Both scripts go again with their source, and all calls of that write are carried out, once."""
    await client.execute_command("SCRIPT", "FLUSH")
    answers = [add(patient, keys, f"phone-{n}", 1) for n in range(5)]
    connect = ("gateway", 0, WEEK_MS, "source:!g", "0000000000000001", 600_000)
    answers += [patient.submit(OPEN_SESSION, keys.device(f"phone-{n}"), connect) for n in range(5)]
    await tasks.start(patient.run)
    with anyio.fail_after(SOON):
        replies = await asyncio.gather(*answers)
    assert all(reply[0] == b"OK" for reply in replies)
    assert [reply[1] for reply in replies[:5]] == [1] * 5


async def test_a_cut_connection_stores_every_call_once(
    patient: ScriptBatcher, client: Client, keys: Keys, tasks: anyio.abc.TaskGroup
) -> None:
    """A cut connection is opened again; a call that is repeated is stored once."""
    await tasks.start(patient.run)
    for n in range(1, 20):
        opened = [each for sharded in patient._connections for each in sharded._connections.values() if each.is_open]
        client_ids = [each.client_id for each in opened]
        answers = [add(patient, keys, f"phone-{each}", n) for each in range(3)]
        await asyncio.sleep(0)
        for client_id in client_ids:
            await client.execute_command("CLIENT", "KILL", "ID", client_id)
        with anyio.fail_after(SOON):
            await asyncio.gather(*answers)
    for each in range(3):
        assert await client.execute_command("ZCARD", keys.inbox(f"phone-{each}")) == 19
        assert await client.execute_command("HGET", keys.session(f"phone-{each}"), "seq") == b"19"


async def test_a_call_cancelled_while_it_waits_is_not_written(
    patient: ScriptBatcher, client: Client, keys: Keys, tasks: anyio.abc.TaskGroup
) -> None:
    """A call that its caller has given up is left out; the one beside it is written."""
    cancelled, wanted = add(patient, keys, "phone", 1), add(patient, keys, "tablet", 1)
    cancelled.cancel()
    await tasks.start(patient.run)
    with anyio.fail_after(SOON):
        await wanted
    assert await client.execute_command("EXISTS", keys.session("phone")) == 0


async def test_a_call_cancelled_at_any_moment_disturbs_no_later_call(
    patient: ScriptBatcher, keys: Keys, tasks: anyio.abc.TaskGroup
) -> None:
    """Its reply, if one comes, is dropped."""
    await tasks.start(patient.run)
    for turns in range(6):
        gone = add(patient, keys, f"phone-{turns}", 1)
        for _ in range(turns):
            await asyncio.sleep(0)
        gone.cancel()
        with anyio.fail_after(SOON):
            assert (await add(patient, keys, f"tablet-{turns}", 2))[1] == 2


async def test_closing_fails_every_call(patient: ScriptBatcher, keys: Keys) -> None:
    """A call made before the end and one made afterwards get the error: neither caller waits for ever."""
    early = add(patient, keys, "phone", 1)
    with anyio.CancelScope() as scope:
        scope.cancel()
        await patient.run()
    late = add(patient, keys, "phone", 2)
    for answer in (early, late):
        with anyio.fail_after(SOON), pytest.raises(BrokerUnavailable, match="the broker was closed"):
            await answer
