"""Cancelling one message, in any state: never both cancelled and handled, never neither."""

from __future__ import annotations

import asyncio
from typing import Final

from rsmq.control.answer import Answer, Cancelled, Unknown, Word, combined
from rsmq.control.finder import Finder, Found
from rsmq.errors import ConfigError
from rsmq.heartbeat.membership import announce
from rsmq.model.backoff import Backoff
from rsmq.model.clock import awake, to_ms
from rsmq.model.keys import Keys
from rsmq.model.settings import Settings
from rsmq.redis.connector import Client
from rsmq.redis.scripts import CANCEL_DELAYED, CANCEL_MESSAGE, CANCELLED
from rsmq.redis.streams import group_names
from rsmq.redis.topics import Topic

MOST_ATTEMPTS: Final = 1000
"""A message that is parked without being pending is found up to so many attempts."""
FIRST_PAUSE: Final = 0.005
LONGEST_PAUSE: Final = 0.25
"""Seconds between two questions for the answer of the owner."""
MOST_TRIES: Final = 5
"""A delayed message may become due while it is looked for."""


class Cancel:
    """Cancels messages. A call whose answer was lost can be repeated, and answers the same."""

    def __init__(self, client: Client, keys: Keys, settings: Settings) -> None:
        self._client, self._keys, self._settings, self._finder = client, keys, settings, Finder(client, keys)

    async def __call__(
        self, message_id: str, topic: Topic, key: str | None = None, *, group: str | None = None, running: bool = False
    ) -> Answer:
        """Cancel it for one group, or for all; `running`: also interrupt its handler. Waits at most for a lease."""
        for _ in range(MOST_TRIES):
            found = await self._finder.find(message_id, topic, key)
            if found is None:
                return Unknown()
            if found.packed is None:
                return await self._stored(found, group, running)
            if await self._delayed(found, group):
                return Cancelled()
        return Unknown()

    async def _delayed(self, found: Found, group: str | None) -> bool:
        """Cancel a delayed message. False: it has become due meanwhile."""
        if found.is_cancelled:
            return True
        at, keys = (found.topic.name, found.partition), self._keys
        if group is not None and (others := set(await group_names(self._client, keys, *at)) - {group}):
            raise ConfigError(
                f"{found.message.id} is delayed, and so not in the stream of any group yet: cancel it for all groups "
                f"(without group=), or when it is due. {found.topic.name!r} is read by {', '.join(sorted(others))}, too"
            )
        names = (keys.delayed(*at), keys.dedup(*at, found.message.id))
        window_ms = to_ms(self._settings.dedup_window)
        return bool(await CANCEL_DELAYED(self._client, names, (found.packed or b"", window_ms)) == CANCELLED)

    async def _stored(self, found: Found, group: str | None, running: bool) -> Answer:
        names = await group_names(self._client, self._keys, found.topic.name, found.partition)
        if group is not None and group not in names:
            raise ConfigError(f"topic {found.topic.name!r} has no group {group!r}: it has {', '.join(names) or 'none'}")
        addressee = found.message.addressee
        chosen = [each for each in names if group in (None, each) and addressee in (None, each.encode())]
        answers: dict[str, Word] = {}

        async def cancel(name: str) -> None:
            answers[name] = await self._for_group(found, name, "interrupt" if running else "asked")

        await asyncio.gather(*map(cancel, chosen))
        return combined(answers)

    async def _for_group(self, found: Found, group: str, how: str) -> Word:
        """Set the mark, and wait for the answer of the owner where only it can know."""
        at, keys = (found.topic.name, found.partition, group), self._keys
        names = (keys.stream(*at[:2]), keys.retry(*at), keys.cancels(*at), keys.cancelled(*at))
        args = (group, found.message.entry_id, how, MOST_ATTEMPTS)
        patience = self._settings.lease_ttl.total_seconds() + self._settings.lease_margin.total_seconds()
        deadline, backoff = awake() + patience, Backoff(FIRST_PAUSE, LONGEST_PAUSE)
        while True:
            word, *rest = await CANCEL_MESSAGE(self._client, names, args)
            if word != b"ASKED":
                if rest and rest[0]:
                    await announce(self._client, keys, found.topic.name, group)
                return WORDS[word]
            if awake() >= deadline:
                return "unknown"
            await announce(self._client, keys, found.topic.name, group)
            await asyncio.sleep(backoff.next())

    def __repr__(self) -> str:
        return f"<Cancel under {self._keys.prefix}>"


WORDS: Final[dict[bytes, Word]] = {
    b"CANCELLED": "cancelled", b"RUNNING": "running", b"SETTLED": "settled", b"UNKNOWN": "unknown",
}  # fmt: skip
