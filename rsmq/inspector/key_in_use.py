"""With which key the newest message of a topic, or the newest letter of a device, is encrypted: programs that know no
broker store what they add likewise. It only reads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from rsmq.inspector.key_status import value_of
from rsmq.model.encoding import key_of
from rsmq.model.keys import Keys
from rsmq.model.record import whole
from rsmq.model.stream_id import parse_stream_id
from rsmq.persistence.letter import HEAD_BYTES, enc_of
from rsmq.redis.client.connector import Client
from rsmq.redis.streams import ask_all
from rsmq.redis.topics import Topic

AT_ONCE: Final = 16
"""Partitions that are asked together. The first of these that have a message decide."""

Entry = Sequence[Any]
"""A stream id, and the fields of its entry."""


async def key_of_topic(client: Client, keys: Keys, topic: Topic | None) -> str | None:
    """The id of the key; empty if the newest message is not encrypted, None if there is no message."""
    streams = [] if topic is None else [keys.stream(topic.name, number) for number in topic.numbers]
    for at in range(0, len(streams), AT_ONCE):
        commands = [("XREVRANGE", stream, "+", "-", "COUNT", 1) for stream in streams[at : at + AT_ONCE]]
        replies = await ask_all(client, commands)
        if any(replies):
            return key_of_newest(entry for reply in replies for entry in reply)
    return None


def key_of_newest(entries: Iterable[Entry]) -> str:
    """The id of the key of the newest of some entries; empty if it is not encrypted."""
    _, fields = max(entries, key=lambda entry: parse_stream_id(entry[0]))
    return key_of(value_of(fields or ()))


async def key_of_inbox(client: Client, keys: Keys, device: str) -> str | None:
    """The same of the newest letter of a device."""
    refs = await client.execute_command("ZREVRANGE", keys.inbox(device), 0, 0)
    seq = whole(refs[0]) if refs else None
    if seq is None:
        return None
    return key_of(enc_of(await client.execute_command("GETRANGE", keys.letter(device, seq), 0, HEAD_BYTES)))
