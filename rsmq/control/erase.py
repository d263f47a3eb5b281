"""Erasing what a server holds of one key: its messages in every topic, and what was noted of them."""

from __future__ import annotations

import asyncio
import getpass
import hashlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any, Final

from rsmq.control.asking import MOST_ATTEMPTS
from rsmq.control.audit import Audit
from rsmq.dlq.dead_letter import read_dead_letter
from rsmq.errors import ConfigError, Malformed, StoreUnavailable
from rsmq.model.backoff import Backoff
from rsmq.model.body import NAME, REF, Offloading
from rsmq.model.clock import awake, to_ms
from rsmq.model.headers import REPLY_TO, read_headers
from rsmq.model.keys import Keys
from rsmq.model.packing import by_name, readable_fields
from rsmq.model.partition import not_unicode
from rsmq.model.record import text
from rsmq.model.settings import Settings
from rsmq.persistence import Devices
from rsmq.redis.client.connector import Client
from rsmq.redis.identity import deployment_id
from rsmq.redis.pubsub import announce
from rsmq.redis.scripts import CANCEL_DELAYED, CANCEL_MESSAGE, ERASE_ENTRIES, ERASE_NAMES, ERASE_RECORD
from rsmq.redis.streams import group_names
from rsmq.redis.topics import Topic, Topics

log = logging.getLogger("rsmq.erase")

PAGE: Final = 1000
FIRST_PAUSE: Final = 0.05
LONGEST_PAUSE: Final = 1.0


@dataclass(frozen=True, slots=True)
class Erased:
    """What was deleted: messages in the streams (`stored`) and among the delayed ones, dead letters, outputs on their
    way between slots of a cluster, unique names, letters of the named devices, answers to its requests, bodies in the
    store.

    `running`: messages that are left, because a worker has them in its hands, or one that has ended had them. What has
    not started does not start any more, and goes when a worker of the group runs. With 0, all that was stored before
    the call is gone.
    """

    stored: int = 0
    delayed: int = 0
    dead: int = 0
    outputs: int = 0
    names: int = 0
    letters: int = 0
    replies: int = 0
    bodies: int = 0
    running: int = 0


class Erase:
    """Cancels and deletes what has a key, round by round, until a round finds nothing.

    A message is cancelled for all groups before it is deleted: its handler does not start, and it leaves no dead
    letter. What a handler works on goes on, and is deleted in a later round.
    """

    def __init__(
        self, client: Client, keys: Keys, settings: Settings, topics: Topics, store: Offloading | None = None
    ) -> None:
        """`store`: of large bodies; without it they are left to the sweeps."""
        self._client, self._keys = client, keys
        self._store = store
        self._topics = topics
        self._window_ms = to_ms(settings.dedup_window)
        self._named = set[str]()
        """The bodies of the entries that a round has met."""

    async def __call__(self, key: str, devices: Collection[str], seconds: float) -> Erased:
        """Everything of this key, and the inboxes of these devices. Noted in the audit, without the key itself."""
        if not isinstance(key, str) or not key:
            raise ConfigError(f"key={key!r} is no ordering key: pass the text that its messages were published with")
        if isinstance(devices, str):
            raise ConfigError(f"devices={devices!r} is a text: pass a list of client ids")
        try:
            mark = hashlib.sha256(key.encode()).hexdigest()
        except UnicodeEncodeError:
            raise not_unicode(key) from None
        done = Erased()

        async def act() -> str:
            nonlocal done
            done = await self._rounds(key, devices, seconds)
            return ", ".join(f"{each.name} {getattr(done, each.name)}" for each in fields(done))

        async def nothing() -> dict[str, Any]:
            return {}

        who = "?"
        with suppress(OSError, KeyError):  # a user id without a name, as in a container
            who = getpass.getuser()
        result = await Audit(self._client, self._keys).record(who, f"erase key sha256:{mark}", ("", ""), nothing, act)
        log.info("erased the key sha256:%s: %s", mark, result)
        return done

    async def _rounds(self, key: str, devices: Collection[str], seconds: float) -> Erased:
        done, end, backoff = Counter[str](), awake() + seconds, Backoff(FIRST_PAUSE, LONGEST_PAUSE)
        requests, named, deleted = set[str](), set[str](), set[str]()
        for device in devices:
            done["letters"] += await Devices(self._client, self._keys).purge(device)
        while True:
            found, self._named = Counter[str](), set()
            for name in await self._topics.names():
                topic = await self._topics.find(name)
                if topic is not None:
                    await self._round(topic, key, found, requests)
            named |= self._named
            # a handler that was waited for has answered meanwhile
            found["replies"] += await self._replies(requests)
            running = found.pop("running", 0)
            found["bodies"] += await self._bodies(named - self._named - deleted)
            deleted |= named - self._named
            done += found
            if (not found.total() and not running) or awake() >= end:
                return Erased(**done, running=running)
            if running:
                await asyncio.sleep(min(backoff.next(), max(0.0, end - awake())))

    async def _round(self, topic: Topic, key: str, found: Counter[str], requests: set[str]) -> None:
        """Its partitions: of the key one in each band; outputs with the key may wait in any of them."""
        of_key = topic.layout.numbers_for(key)
        for partition in topic.numbers:
            groups = sorted(await group_names(self._client, self._keys, topic.name, partition))
            if partition in of_key:
                # what is due moves from the delayed ones into the stream, and from there to the dead letters
                found["delayed"] += await self._delayed(topic, partition, key)
                stored, running = await self._stored(topic, partition, key, groups, requests)
                found["stored"] += stored
                found["running"] += running
                found["names"] += await self._names(topic, partition, key)
                for group in groups:
                    found["dead"] += await self._dead(topic, partition, key, group)
                    if not running:
                        names = (
                            self._keys.stream(topic.name, partition),
                            self._keys.calls(topic.name, partition, group),
                        )
                        found["running"] += await ERASE_RECORD(self._client, names, (group, key))
            for group in groups if self._client.is_cluster else ():
                out = self._keys.out(topic.name, partition, group)
                ids = [entry_id async for entry_id, flat in self._entries(out) if self._has_key(flat, key)]
                found["outputs"] += await self._remove(out, ids)

    async def _bodies(self, names: Collection[str]) -> int:
        """Delete bodies of this server that an earlier round has met, and that no entry of this round names."""
        count = 0
        if self._store is not None and names:
            own = await deployment_id(self._client, self._keys)
            for name in names:
                if name.startswith(f"{own}/"):
                    try:
                        await self._store.delete(name)
                        count += 1
                    except StoreUnavailable as error:
                        log.warning("bodies of what was erased are left to the sweep: %s", error)
                        break
        return count

    def _has_key(self, flat: Sequence[bytes], key: str) -> bool:
        """Whether an entry has this key; then its body is noted."""
        is_its = has_key(flat, key)
        if is_its and self._store is not None:
            ref = by_name(flat).get(REF.encode(), b"").decode("latin-1")
            if NAME.fullmatch(ref):
                self._named.add(ref)
        return is_its

    async def _delayed(self, topic: Topic, partition: int, key: str) -> int:
        """Cancel its delayed messages: a publish that is sent again does not bring them back."""
        at, start, found = (topic.name, partition), 0, list[tuple[bytes, str]]()
        while page := await self._client.execute_command("ZRANGE", self._keys.delayed(*at), start, start + PAGE - 1):
            start += PAGE
            for packed in page:
                flat = readable_fields(packed)
                if self._has_key(flat, key):
                    found.append((packed, text(by_name(flat).get(b"id"))))
        count = 0
        for packed, message_id in found:
            names = (self._keys.delayed(*at), self._keys.dedup(topic.name, topic.layout.root_of(partition), message_id))
            await CANCEL_DELAYED(self._client, names, (packed, self._window_ms))
            count += 1
        return count

    async def _stored(
        self, topic: Topic, partition: int, key: str, groups: Sequence[str], requests: set[str]
    ) -> tuple[int, int]:
        """Cancel its messages for each group, and delete those that no group has. Returns how many, and how many are
        left. `requests` gets where the answers to them are stored."""
        keys, at, erased, left, ids = self._keys, (topic.name, partition), 0, 0, list[bytes]()
        async for entry_id, flat in self._entries(keys.stream(*at)):
            if self._has_key(flat, key):
                ids.append(entry_id)
                requests.update(request_of(flat))
        for group in groups:
            parts = (keys.retry, keys.cancels, keys.cancelled, keys.waits)
            own = [part(*at, group) for part in parts]
            words = [
                await CANCEL_MESSAGE(self._client, (keys.stream(*at), *own), (group, entry_id, "asked", MOST_ATTEMPTS))
                for entry_id in ids
            ]
            if any(word[0] == b"ASKED" or word[1:2] == [1] for word in words):
                await announce(self._client, keys, topic.name, group)
        per_group = [part(*at, group) for group in groups for part in (keys.retry, keys.errors, keys.cancels)]
        names = (keys.stream(*at), keys.removed(*at), *per_group)
        for first in range(0, len(ids), PAGE):
            page = ids[first : first + PAGE]
            gone, waiting = await ERASE_ENTRIES(self._client, names, (len(groups), *groups, *page))
            erased, left = erased + gone, left + waiting
        return erased, left

    async def _replies(self, requests: Collection[str]) -> int:
        """Answers that were not read yet."""
        return sum([await self._client.execute_command("UNLINK", self._keys.reply(each)) for each in sorted(requests)])

    async def _names(self, topic: Topic, partition: int, key: str) -> int:
        names = (self._keys.unique(topic.name, partition), self._keys.delayed(topic.name, partition))
        cursor, total = b"0", 0
        while True:
            cursor, forgotten = await ERASE_NAMES(self._client, names, (cursor, PAGE, key))
            total += int(forgotten)
            if cursor == b"0":
                return total

    async def _dead(self, topic: Topic, partition: int, key: str, group: str) -> int:
        dlq = self._keys.dlq(topic.name, partition, group)
        ids = list[bytes]()
        async for entry_id, flat in self._entries(dlq):
            if read_dead_letter(topic.name, partition, group, entry_id, flat).key == key:
                self._has_key(flat, key)
                ids.append(entry_id)
        return await self._remove(dlq, ids)

    async def _entries(self, stream: str) -> AsyncIterator[tuple[bytes, list[bytes]]]:
        """All entries of a stream, in pages."""
        start = "-"
        while page := await self._client.execute_command("XRANGE", stream, start, "+", "COUNT", PAGE):
            for entry_id, flat in page:
                yield entry_id, flat
            start = f"({page[-1][0].decode()}"

    async def _remove(self, stream: str, ids: Sequence[bytes | str]) -> int:
        removed = 0
        for first in range(0, len(ids), PAGE):
            removed += await self._client.execute_command("XDEL", stream, *ids[first : first + PAGE])
        return removed

    def __repr__(self) -> str:
        return f"<Erase under {self._keys.prefix}>"


def request_of(flat: Sequence[bytes]) -> list[str]:
    """Where the answer to an entry is stored, if it is a request."""
    raw = by_name(flat).get(b"h")
    with suppress(Malformed):
        headers = {} if raw is None else read_headers(raw)
        return [headers[REPLY_TO]] if REPLY_TO in headers else []
    return []


def has_key(flat: Sequence[bytes], key: str) -> bool:
    """Whether an entry has this key."""
    return any(name == b"key" and value == key.encode() for name, value in zip(flat[::2], flat[1::2], strict=False))
