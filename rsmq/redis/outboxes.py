"""The rows that wait in the outboxes of services' databases, as their relays last counted it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Final

from pydantic import TypeAdapter, ValidationError
from pydantic_core import to_json

from rsmq.model.clock import LATEST_MS, server_ms, to_ms
from rsmq.model.keys import Keys
from rsmq.redis.client.connector import Client
from rsmq.redis.streams import as_dict, ask_all

KEPT: Final = timedelta(days=1)
"""For how long an outbox is listed that no worker relays any more."""


@dataclass(frozen=True, slots=True)
class CountedOutbox:
    """`backlog` rows waited, the oldest for `age_seconds`, and `refused` cannot be published. `member` relays, and has
    counted at `at_ms`, by the clock of the server."""

    database: str
    backlog: int
    age_seconds: float
    refused: int
    member: str
    at_ms: int = 0


@dataclass(frozen=True, slots=True)
class OutboxState:
    """An outbox, and how long ago its relay has counted it."""

    id: str
    counted: CountedOutbox
    counted_ago: timedelta

    @property
    def oldest(self) -> timedelta | None:
        """How long the oldest row has waited by now; None without one."""
        return timedelta(seconds=self.counted.age_seconds) + self.counted_ago if self.counted.backlog else None


READER: Final = TypeAdapter(CountedOutbox)


async def report_outbox(client: Client, keys: Keys, name: str, counted: CountedOutbox) -> None:
    """Let dashboards know of an outbox. What nothing reports any more is removed after a while."""
    time, flat = await ask_all(client, [("TIME",), ("HGETALL", keys.outboxes)])
    stamped = replace(counted, at_ms=server_ms(time))
    await client.execute_command("HSET", keys.outboxes, name, to_json(stamped))
    await client.execute_command("PEXPIRE", keys.outboxes, to_ms(KEPT))
    others = zip(flat[::2], flat[1::2], strict=True)
    old = [field for field, value in others if field != name.encode() and read_counted(value, stamped.at_ms) is None]
    if old:
        await client.execute_command("HDEL", keys.outboxes, *old)


async def read_outboxes(client: Client, keys: Keys) -> list[OutboxState]:
    """Those that were relayed within the last day, by database."""
    time, found = await ask_all(client, [("TIME",), ("HGETALL", keys.outboxes)])
    read = [(name, read_counted(value, server_ms(time))) for name, value in as_dict(found).items()]
    states = [OutboxState(name, *each) for name, each in read if each is not None]
    return sorted(states, key=lambda state: (state.counted.database, state.id))


def read_counted(value: bytes, now_ms: int) -> tuple[CountedOutbox, timedelta] | None:
    """What was counted, and how long ago. None: nothing reports it any more, or another client has written it."""
    try:
        counted = READER.validate_json(value)
    except ValidationError:
        return None
    if not (0 <= counted.at_ms <= LATEST_MS and 0 <= counted.age_seconds <= LATEST_MS / 1000):
        return None
    ago = timedelta(milliseconds=max(0, now_ms - counted.at_ms))
    return (counted, ago) if ago < KEPT else None
