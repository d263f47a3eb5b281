"""Cancelling one message, in any state: never both cancelled and handled, never neither."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from rsmq.control.answer import Answer, Cancelled, Unknown, Word, combined
from rsmq.control.asking import MOST_ATTEMPTS, Waking, groups_of_message, refuse_one_group
from rsmq.control.finder import Finder, Found
from rsmq.errors import BrokerError, Malformed
from rsmq.model.clock import to_ms
from rsmq.model.keys import Keys
from rsmq.model.request import answer_commands, asked_by
from rsmq.model.settings import Settings
from rsmq.redis.client.connector import Client
from rsmq.redis.scripts import CANCEL_DELAYED, CANCEL_MESSAGE, CANCEL_UNREAD, CANCELLED
from rsmq.redis.topics import Topic

log = logging.getLogger("rsmq.cancel")

CancelCounter = Counter[tuple[str, str]]
NO_GROUP: Final = ""
"""The group of a delayed message, which is cancelled for all of them."""
MOST_TRIES: Final = 5
"""A delayed message may become due while it is looked for, and a first group may come."""


class Cancel:
    """Cancels messages. A call whose answer was lost can be repeated, and answers the same.

    `counted`: by topic and group, what was cancelled here for good. The owners of partitions count the rest.
    """

    def __init__(self, client: Client, keys: Keys, settings: Settings, counted: CancelCounter | None = None) -> None:
        self._client = client
        self._keys = keys
        self._settings = settings
        self._finder = Finder(client, keys)
        self._counted = CancelCounter() if counted is None else counted

    async def __call__(
        self,
        message_id: str,
        topic: Topic,
        key: str | None = None,
        *,
        group: str | None = None,
        running: bool = False,
        waits: bool = True,
    ) -> Answer:
        """Cancel it for one group, or for all; `running`: also interrupt its handler. Waits at most for a lease, and
        not at all for an owner's answer without `waits`: its mark is set then."""
        for _ in range(MOST_TRIES):
            found = await self._finder.find(message_id, topic, key)
            if found is None:
                return Unknown()
            if found.packed is None:
                chosen = await groups_of_message(self._client, self._keys, found, group)
                if chosen:
                    answer = await self._stored(found, chosen, running, waits)
                    if group is None and isinstance(answer, Cancelled):
                        await self._end_request(found)
                    return answer
            if await (self._delayed(found, group) if found.packed is not None else self._unread(found)):
                await self._end_request(found)
                return Cancelled()
        return Unknown()

    async def _end_request(self, found: Found) -> None:
        """Tell who waits for an answer to the message that none comes. It is cancelled all the same if that fails."""
        request = None
        with suppress(Malformed):
            request = None if found.message.is_plain else asked_by(found.message.headers)
        if request is None:
            return
        about = {"reason": "cancelled", "error": "no handler answers"}
        try:
            replies = await self._client.pipelined(answer_commands(self._keys, *request, about, b""))
        except BrokerError as error:
            replies = [error]
        for reply in replies:
            if isinstance(reply, Exception):
                log.info("who has asked with %s waits until its timeout: %s", found.message.id, reply)

    async def _delayed(self, found: Found, group: str | None) -> bool:
        """Cancel a delayed message. False: it has become due meanwhile."""
        if found.is_cancelled:
            return True
        at, keys = (found.topic.name, found.partition), self._keys
        await refuse_one_group(self._client, keys, found, group, "cancel")
        names = (keys.delayed(*at), keys.dedup(at[0], found.root, found.message.id))
        window_ms = to_ms(self._settings.dedup_window)
        is_cancelled = await CANCEL_DELAYED(self._client, names, (found.packed or b"", window_ms)) == CANCELLED
        self._counted[at[0], NO_GROUP] += is_cancelled
        return bool(is_cancelled)

    async def _unread(self, found: Found) -> bool:
        """Cancel a message that no group reads yet, for all that will. False: a group has come, or it is gone."""
        at, keys = (found.topic.name, found.partition), self._keys
        ids = (found.message.id, found.message.stream_id)
        names = (keys.stream(*at), *(keys.dedup(at[0], found.root, each) for each in ids), keys.removed(*at))
        args = (found.message.entry_id, to_ms(self._settings.dedup_window))
        is_cancelled = await CANCEL_UNREAD(self._client, names, args) == CANCELLED
        self._counted[at[0], NO_GROUP] += is_cancelled
        return bool(is_cancelled)

    async def _stored(self, found: Found, chosen: Sequence[str], running: bool, waits: bool) -> Answer:
        answers: dict[str, Word] = {}

        async def cancel(name: str) -> None:
            answers[name] = await self._for_group(found, name, "interrupt" if running else "asked", waits)

        await asyncio.gather(*map(cancel, chosen))
        return combined(answers)

    async def _for_group(self, found: Found, group: str, how: str, waits: bool) -> Word:
        """Set the mark, and wait for the answer of the owner where only it can know."""
        at, keys = (found.topic.name, found.partition, group), self._keys
        own = (keys.retry, keys.cancels, keys.cancelled, keys.waits)
        names = (keys.stream(*at[:2]), *[part(*at) for part in own])
        args = (group, found.message.entry_id, how, MOST_ATTEMPTS)
        waking = Waking(self._client, keys, self._settings, at[0], group)
        while True:
            word, *rest = await CANCEL_MESSAGE(self._client, names, args)
            if word != b"ASKED":
                if rest and rest[0]:
                    await waking.wake()
                self._counted[at[0], group] += word == CANCELLED and rest[1:] == [1]
                return WORDS[word]
            if not waits:
                await waking.wake()
            if waking.is_over or not waits:
                return "unknown"
            await waking.wait()

    def __repr__(self) -> str:
        return f"<Cancel under {self._keys.prefix}>"


WORDS: Final[dict[bytes, Word]] = {
    b"CANCELLED": "cancelled", b"RUNNING": "running", b"SETTLED": "settled", b"UNKNOWN": "unknown",
}  # fmt: skip
