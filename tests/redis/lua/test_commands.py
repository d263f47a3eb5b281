"""The commands that a letter costs the server: counted, for no check may creep in that a read has made already."""

from __future__ import annotations

import pytest

from rsmq.model.keys import Keys
from rsmq.redis.client.connector import Client
from rsmq.redis.scripts import ACK_LETTERS
from tests.persistence.conftest import Inbox
from tests.redis.lua.refusals import Refusals


async def counted(client: Client) -> dict[str, int]:
    """Calls of each command since the last look, without those of this look."""
    stats = (await client.execute_command("INFO", "commandstats")).decode()
    await client.execute_command("CONFIG", "RESETSTAT")
    rows = [line.partition(":calls=") for line in stats.splitlines() if line.startswith("cmdstat_")]
    calls = {name.removeprefix("cmdstat_"): int(rest.partition(",")[0]) for name, _, rest in rows}
    own = ("info", "config", "evalsha", "eval", "client", "hello", "ping")
    return {name: number for name, number in calls.items() if name.partition("|")[0] not in own}


@pytest.fixture
def inbox(client: Client, keys: Keys, refusals: Refusals) -> Inbox:
    """The inbox of `phone`, without calls in vain."""
    refusals.is_off = True
    return Inbox(client, keys)


async def test_a_letter_costs_its_reads_and_writes(client: Client, inbox: Inbox) -> None:
    """Each key of a letter is read before it is written: no script asks for its type once more."""
    await inbox.add("first")
    epoch, _ = await inbox.open()
    await inbox.page(epoch)
    await inbox.have_sent(100)
    await counted(client)

    await inbox.add("second")
    added = {"time": 1, "hmget": 1, "zcard": 1, "set": 1, "zadd": 1, "hset": 1, "spublish": 1}
    assert await counted(client) == added
    await inbox.page(epoch, 1)
    page = {"time": 1, "hmget": 1, "zrangebyscore": 1, "mget": 1, "hset": 1}
    assert await counted(client) == page
    await client.execute_command("HSET", inbox.session, "sent", 100)
    await counted(client)
    keys = (inbox.inbox, inbox.session, inbox.expiry)
    assert await ACK_LETTERS(client, keys, (epoch, 2)) == [b"OK", 1]
    assert await counted(client) == {"hmget": 1, "zcard": 1, "zrem": 1, "del": 1}


async def test_a_connect_asks_for_no_type(client: Client, inbox: Inbox) -> None:
    """A device connects and leaves."""
    await counted(client)
    epoch, _ = await inbox.open()
    assert await inbox.close(epoch) == b"OK"
    assert "type" not in await counted(client)
