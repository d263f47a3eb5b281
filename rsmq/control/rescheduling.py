"""Giving a message that waits for a time another due time: a delayed one, or a parked one."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import datetime
from typing import Final

from rsmq.control.asking import MOST_ATTEMPTS, Waking, groups_of_message, refuse_one_group
from rsmq.control.finder import Finder, Found
from rsmq.control.status import moment
from rsmq.errors import ConfigError
from rsmq.model.clock import LATEST_MS, from_epoch_ms, to_ms
from rsmq.model.expiry import expiry_of_packed
from rsmq.model.keys import Keys
from rsmq.model.settings import Settings
from rsmq.redis.client.connector import Client
from rsmq.redis.scripts import OK, RESCHEDULE_DELAYED, RESCHEDULE_PARKED, RESCHEDULE_WAIT
from rsmq.redis.topics import Topic

ASKED: Final = b"ASKED"
MOST_TRIES: Final = 5
"""A delayed message may become due, and fail, while it is looked for."""


class Reschedule:
    """Moves messages. A call whose answer was lost can be repeated, and answers the same."""

    def __init__(self, client: Client, keys: Keys, settings: Settings) -> None:
        self._client = client
        self._keys = keys
        self._settings = settings
        self._finder = Finder(client, keys)

    async def __call__(
        self, message_id: str, topic: Topic, key: str | None, due: str, *, group: str | None = None
    ) -> datetime:
        """Move it to `due` (see `due_time`), and return that time: a delayed one, or where it is parked, for one group
        or for all. Raises ConfigError if it waits for no time, with what it does instead."""
        for _ in range(MOST_TRIES):
            found = await self._finder.find(message_id, topic, key)
            if found is None or found.is_cancelled:
                break
            await self._refuse_after_expiry(found, due)
            if found.packed is None:
                return await self._stored(found, due, group)
            await refuse_one_group(self._client, self._keys, found, group, "reschedule")
            at = (topic.name, found.partition)
            names = (self._keys.delayed(*at), self._keys.dedup(topic.name, found.root, found.message.id))
            window_ms = to_ms(self._settings.dedup_window)
            word, *rest = await RESCHEDULE_DELAYED(self._client, names, (found.packed, due, window_ms))
            if word == OK:
                return moment(rest[0])
        raise refusal(message_id, {})

    async def _refuse_after_expiry(self, found: Found, due: str) -> None:
        """Raise ConfigError if the message has expired when it would be due: it would end without an attempt."""
        if found.message.is_plain or found.message.expires_ms is None:
            return
        due_ms, expires_ms = int(due), found.message.expires_ms
        if due.startswith("+"):
            seconds, micros = await self._client.execute_command("TIME")
            due_ms += 1000 * int(seconds) + int(micros) // 1000
        if found.packed is not None:  # a duration that another client has stored counts from then
            expires_ms = expiry_of_packed(found.packed, due_ms) or expires_ms
        if due_ms >= expires_ms:
            raise ConfigError(
                f"{found.message.id} expires at {from_epoch_ms(min(expires_ms, LATEST_MS)).isoformat()}, which is not "
                f"after its new due time: it would never be handled. Give an earlier time, or cancel it and publish it "
                f"again"
            )

    async def _stored(self, found: Found, due: str, group: str | None) -> datetime:
        chosen = await groups_of_message(self._client, self._keys, found, group)
        stream_id, topic_partition = found.message.entry_id, (found.topic.name, found.partition)
        asked = [self.parked((*topic_partition, each), stream_id, due) for each in chosen]
        answers = dict(zip(chosen, await asyncio.gather(*asked), strict=True))
        moved = [each for each in answers.values() if isinstance(each, datetime)]
        if not moved:
            raise refusal(found.message.id, {name: str(word) for name, word in answers.items()})
        return max(moved)

    async def parked(self, at: tuple[str, int, str], stream_id: bytes, due: str) -> datetime | str:
        """Move a message that waits for a time, or is parked, for a group: `at` is topic, partition and group. Returns
        its due time, or where it is instead."""
        keys = self._keys
        own = (keys.lease, keys.retry, keys.cancels, keys.cancelled, keys.errors)
        names = (keys.stream(*at[:2]), *[part(*at) for part in own])
        waiting = [part(*at) for part in (keys.waits, keys.cancels, keys.cancelled)]
        word, *rest = await RESCHEDULE_WAIT(self._client, (names[0], *waiting), (at[2], stream_id, due))
        if word == OK:
            await Waking(self._client, keys, self._settings, at[0], at[2]).wake()
            return moment(rest[0])
        waking, wanted = Waking(self._client, keys, self._settings, at[0], at[2]), due
        while True:
            args = (at[2], stream_id, wanted, MOST_ATTEMPTS, "end" if waking.is_over else "ask")
            word, *rest = await RESCHEDULE_PARKED(self._client, names, args)
            if word == OK:
                await waking.wake()  # it may be due earlier than its member expects
                return moment(rest[0])
            if word != ASKED:
                return str(word.decode().lower())
            wanted = rest[0].decode()  # `+5000` counts from the first time
            await waking.wait()

    def __repr__(self) -> str:
        return f"<Reschedule under {self._keys.prefix}>"


ADVICE: Final[Mapping[str, str]] = {
    "unread": "what is in the stream keeps its place there, so cancel it with broker.cancel, and publish it again "
    "with delay=",
    "running": "a member has it in its hands, where it runs or starts next: its handler can raise Retry(after=...)",
    "settled": "it is done, or a dead letter: publish it again, or replay it with `rsmq dlq replay`",
    "cancelled": "publish it again",
}
"""What to do instead."""


def refusal(message_id: str, groups: Mapping[str, str]) -> ConfigError:
    """Why a message cannot be rescheduled."""
    where = ", ".join(f"{name}: {word}" for name, word in sorted(groups.items()))
    advice = "; ".join(ADVICE[word] for word in ADVICE if word in groups.values())
    return ConfigError(
        f"{message_id} is neither delayed nor waits for a retry or a time, so it cannot be rescheduled"
        f"{f' ({where})' if where else ''}: " + (advice or "`rsmq trace` says where it is")
    )
