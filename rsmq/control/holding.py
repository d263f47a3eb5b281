"""Holding names of a topic's groups by command, and ending that."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from rsmq.errors import ConfigError
from rsmq.model.clock import from_epoch_ms, to_ms
from rsmq.model.duration import LONGEST_DELAY, Duration, checked_duration
from rsmq.model.held_name import EVERYTHING, HeldName, bounded_name
from rsmq.model.keys import Keys, plain_text
from rsmq.model.words import duration, suggestion
from rsmq.redis.client.connector import Client
from rsmq.redis.holds import hold_name, holds_of
from rsmq.redis.streams import group_names
from rsmq.redis.topics import Topic


@dataclass(frozen=True, slots=True)
class GroupHold:
    """A name that a group of a topic holds."""

    topic: str
    group: str
    held: HeldName


class Holding:
    """Writes and reads the holds of groups. Every call can be repeated."""

    def __init__(self, client: Client, keys: Keys) -> None:
        self._client = client
        self._keys = keys

    async def begin(
        self,
        topic: Topic,
        name: str | None,
        span: Duration,
        group: str | None,
        cannot_hold: Callable[[str], bool] = lambda _: False,
    ) -> datetime:
        """Hold a name, or all messages, of one group or of all that exist. Returns the end.

        `cannot_hold`: whether a group is known to go on all the same. Raises ConfigError if all of them would.
        """
        length = checked_duration("duration", span)
        if not timedelta(0) < length <= LONGEST_DELAY:
            raise ConfigError(
                f"a hold for {duration(length)} is not possible: use more than 0, at most {duration(LONGEST_DELAY)}. "
                f"broker.end_hold and `rsmq hold end` end one"
            )
        groups = await self._groups(topic, group)
        if all(map(cannot_hold, groups)):
            raise ConfigError(
                f"nothing would be held: the handlers of {' and '.join(groups)} for {topic.name!r} take batches, or "
                f"have no rate, limit, permits or breaker. Stop the group with broker.pause_group, or give its handler "
                f"one"
            )
        ends = [
            (await hold_name(self._client, self._keys, topic.name, each, _stored(name), to_ms(length), "command"))[1]
            for each in groups
        ]
        return from_epoch_ms(max(ends))

    async def end(self, topic: Topic, name: str | None, group: str | None) -> int:
        """End it. Returns in how many groups it was held."""
        stored, ended = _stored(name), 0
        for each in await self._groups(topic, group):
            if any(held.name == stored for held in await holds_of(self._client, self._keys, topic.name, each)):
                await hold_name(self._client, self._keys, topic.name, each, stored, 0, "command", "end")
                ended += 1
        return ended

    async def list(self, topic: Topic, group: str | None) -> tuple[GroupHold, ...]:
        """What is held, by group and name."""
        groups = await self._groups(topic, group)
        found = await asyncio.gather(*[holds_of(self._client, self._keys, topic.name, each) for each in groups])
        return tuple(
            GroupHold(topic.name, each, held) for each, holds in zip(groups, found, strict=True) for held in holds
        )

    async def _groups(self, topic: Topic, group: str | None) -> Sequence[str]:
        names = sorted(await group_names(self._client, self._keys, topic.name, 0))
        if group is not None and group not in names:
            some = suggestion(group, names, "groups") or "it has no groups"
            raise ConfigError(f"topic {topic.name!r} has no group {group!r}: {some}")
        if not names:
            raise ConfigError(f"topic {topic.name!r} has no group yet: start a worker with a handler for it")
        return names if group is None else [plain_text(group)]


def _stored(name: str | None) -> str:
    """The name under which it is stored."""
    if name is None:
        return EVERYTHING
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{name!r} is no name: give text, such as 'twilio', or None for all messages")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ConfigError(
            f"name {name!r} is not valid Unicode: it has a lone surrogate. Give it as broker.holds shows it"
        ) from None
    return bounded_name(name)
