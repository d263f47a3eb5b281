"""Leadership: one member does a piece of work, and the next one asks when the lease of a dead one ends."""

from __future__ import annotations

import pytest

from rsmq.model.keys import Keys
from rsmq.model.settings import Settings
from rsmq.redis import leadership
from rsmq.redis.client.connector import Client
from rsmq.redis.leadership import TTL, Leadership
from rsmq.redis.server_context import ServerContext
from rsmq.redis.topics import Topics


def bidder(client: Client, keys: Keys, settings: Settings, name: str) -> Leadership:
    """One member."""
    return Leadership(ServerContext(client, keys, settings, Topics(client, keys, settings), name), "work")


async def test_next_leader_asks_when_the_lease_ends(
    client: Client, keys: Keys, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not sooner and not later: a dead leader is replaced within its lease. The late one is refused then."""
    first, second = (bidder(client, keys, settings, name) for name in ("first", "second"))
    assert await first.bid() == 0
    wait = await second.bid()
    until, (seconds, micros) = await client.pipelined([("HGET", keys.leader("work"), "until_ms"), ("TIME",)])
    left = int(until) / 1000 - (int(seconds) + int(micros) / 1e6)
    assert left <= wait <= TTL
    await client.execute_command("HSET", keys.leader("work"), "until_ms", "1")  # the lease has ended
    assert await second.bid() == 0
    assert second.epoch > first.epoch
    monkeypatch.setattr(leadership, "RENEW", 0.0)
    assert await first.bid() > 0
    assert first.epoch == 0


async def test_released_leadership_is_free_at_once(client: Client, keys: Keys, settings: Settings) -> None:
    """A worker that stops does not make the others wait."""
    first, second = (bidder(client, keys, settings, name) for name in ("first", "second"))
    assert await first.bid() == 0
    await first.release()
    assert await second.bid() == 0
