"""Retained messages: the newest message of each topic name, for those who subscribe later."""

from __future__ import annotations

import zlib
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

from rsmq.errors import BrokerUnavailable, Malformed
from rsmq.gateway.fleet.message import Published, encoded
from rsmq.gateway.fleet.scripts import FIND_RETAINED, RETAIN_MESSAGE
from rsmq.gateway.protocol.topic_filter import matches
from rsmq.model.encoding import Encoding
from rsmq.model.keys import Keys
from rsmq.model.record import exact_text
from rsmq.model.stream_id import sortable
from rsmq.persistence.letter import STAMP, read_mqtt
from rsmq.persistence.retained_messages import BUCKETS
from rsmq.redis.client.connector import Client
from rsmq.redis.client.script_batcher import ScriptBatcher
from rsmq.redis.scripts import Value
from rsmq.redis.streams import server_now_ms

PAGE: Final = 500
REMEMBERED_MS: Final = 600_000
"""How long a removal keeps its stamp."""


class Retained:
    """The retained messages of the whole fleet, on the server."""

    def __init__(
        self,
        client: Client,
        keys: Keys,
        batcher: ScriptBatcher | None,
        limit: int,
        encoding_of: Callable[[str], Encoding] | None = None,
    ) -> None:
        """`encoding_of`: by topic name, what encodes a message that is kept."""
        self._encoding_of = encoding_of
        self._client = client
        self._batcher = batcher
        self._limit = limit
        self._keys = [
            tuple(keys.retained(bucket, name) for name in ("messages", "names", "expiries"))
            for bucket in range(BUCKETS)
        ]

    async def keep(self, message: Published, stamp: str, *, by_clock: bool = False) -> bytes:
        """Keep a message, or remove the one that is kept if the payload is empty. Returns the word of the script.

        `by_clock`: the stamp is no position in a stream, but the server's clock, which may have been set back.
        """
        if message.payload and self._encoding_of is not None:
            message = encoded(message, self._encoding_of(message.topic))
        envelope = message.envelope(message.qos, retain=True) if message.payload else b""
        ttl: Value = message.ttl_ms if message.payload else b""
        most = max(1, self._limit // BUCKETS)
        args = (message.topic, stamp, envelope, ttl, REMEMBERED_MS, most, int(by_clock))
        assert self._batcher is not None, "only a gateway keeps messages"
        reply: bytes = await self._batcher.submit(RETAIN_MESSAGE, self._bucket(message.topic), args)
        return reply

    def _bucket(self, name: str) -> tuple[str, ...]:
        return self._keys[zlib.crc32(name.encode()) % BUCKETS]

    async def find_one(self, name: str) -> bytes:
        """The envelope of the message with this topic name, with its stamp; empty if there is none."""
        key, batcher = self._bucket(name)[:1], self._batcher
        if batcher is None:
            found = await self._client.execute_command(*FIND_RETAINED.command(key, (name,)))
        else:
            found = await batcher.submit(FIND_RETAINED, key, (name,))
        return b"" if found is None else envelope_of(found)

    async def find(self, pattern: str, most: int) -> AsyncIterator[bytes]:
        """The envelopes of the messages that a filter matches, at most so many, with their stamps."""
        if is_name(pattern):
            if is_readable(envelope := await self.find_one(pattern)):
                yield envelope
            return
        async for messages, page in self._names(pattern):
            for found in await self._values(messages, page[: max(0, most)]):
                if found is not None and is_readable(envelope := envelope_of(found)):
                    most -= 1
                    yield envelope
            if most <= 0:
                return

    async def _names(self, pattern: str) -> AsyncIterator[tuple[str, list[bytes]]]:
        """The topic names of retained messages that a filter matches, a page at a time, with their hash."""
        front = pattern[: min((at for at in (pattern.find("+"), pattern.find("#")) if at >= 0), default=len(pattern))]
        for messages, names, _ in self._keys:
            low, high = b"[" + front.encode(), b"[" + front.encode() + b"\xff"
            if front.endswith("/") and pattern == front + "#":
                low = b"[" + front[:-1].encode()  # `a/#` matches `a`, too
            while True:
                page = await self._client.execute_command("ZRANGEBYLEX", names, low, high, "LIMIT", 0, PAGE)
                named = [(raw, exact_text(raw)) for raw in page]  # another client may write anything
                yield messages, [raw for raw, name in named if name is not None and matches(pattern, name)]
                if len(page) < PAGE:
                    break
                low = b"(" + page[-1]

    async def _values(self, messages: str, names: list[bytes]) -> list[Any]:
        """The values of these fields, in several answers where a large one breaks."""
        values, limit = list[Any](), self._client.page_limit
        while len(values) < len(names):
            some = names[len(values) :][: limit.of(PAGE)]
            try:
                with limit.asking():
                    values += await self._client.execute_command("HMGET", messages, *some)
            except BrokerUnavailable as error:
                if not error.is_broken or len(some) == 1:
                    raise
        return values

    async def purge(self, pattern: str) -> int:
        """Remove the messages that a filter matches, a page at a time. Returns how many."""
        number, keys = 0, {messages: (messages, *others) for messages, *others in self._keys}
        async for messages, page in self._names(pattern):
            newest = f"{await server_now_ms(self._client):0>20}{'9' * 40}"  # above every message that is stored by now
            for name in page:
                found = await self._client.execute_command("HGET", messages, name)
                number += bool(found and envelope_of(found))
                await RETAIN_MESSAGE(self._client, keys[messages], (name, newest, b"", b"", REMEMBERED_MS, 1, 1))
        return number

    def __repr__(self) -> str:
        return f"<Retained limit={self._limit}>"


def stamp(stream_id: bytes, position: int = 0) -> str:
    """The position of a retained message: its stream id, or that of its batch, and its number among those."""
    return f"{sortable(stream_id)}{position:020d}"


def is_name(pattern: str) -> bool:
    """Whether a filter matches one topic name only."""
    return "+" not in pattern and "#" not in pattern


def envelope_of(kept: bytes) -> bytes:
    """The envelope of what is kept under a topic name; empty for a removal that is remembered."""
    envelope = kept.partition(b"|")[2]
    return envelope if len(envelope) > STAMP else b""


def is_readable(envelope: bytes) -> bool:
    """Whether it is the envelope of a message: another client may write anything."""
    try:
        return bool(envelope) and bool(read_mqtt(envelope).topic)
    except Malformed:
        return False
