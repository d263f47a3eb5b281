"""Which keys the letters, retained messages and wills of devices still need. It only reads, all inboxes, in pages."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from typing import Final

from pydantic_core import from_json

from rsmq.model.encoding import key_of
from rsmq.model.keys import Keys
from rsmq.model.record import whole
from rsmq.persistence.devices import Devices
from rsmq.persistence.letter import HEAD_BYTES, STAMP, enc_of
from rsmq.persistence.retained_messages import BUCKETS
from rsmq.redis.client.connector import Client
from rsmq.redis.streams import ask_all, hash_fields

PAGE: Final = 500
ENC_OF_WILL: Final = 7
"""The place of `enc` in the head of a will, which is shorter where its payload is not encoded."""


async def will_keys(client: Client, keys: Keys) -> Counter[str]:
    """How many wills of all devices need a key; an empty id: none. To be read before all that a will may become."""
    found = Counter[str]()
    async for name in Devices(client, keys).names():
        for _, will in await hash_fields(client, keys.will(name)):
            if will:
                found[key_of(enc_of_will(will))] += 1
    return found


async def letter_keys(client: Client, keys: Keys) -> dict[str, Counter[str]]:
    """How many of the `letters` and `retained` messages of all devices need a key; an empty id: none. To be read after
    the topics whose messages become letters."""
    found = {"letters": Counter[str](), "retained": Counter[str]()}
    for bucket in range(BUCKETS):
        for _, kept in await hash_fields(client, keys.retained(bucket, "messages")):
            envelope = kept.partition(b"|")[2]
            if len(envelope) > STAMP:  # else it is remembered that one was removed
                found["retained"][key_of(enc_of(envelope))] += 1
    async for name in Devices(client, keys).names():
        async for enc in letters_of(client, keys, name):
            found["letters"][key_of(enc)] += 1
    return found


async def letters_of(client: Client, keys: Keys, device: str) -> AsyncIterator[bytes]:
    """How each letter in an inbox is encoded, from its first bytes; also while letters before it are acknowledged."""
    inbox, cursor = keys.inbox(device), None
    while cursor != b"0":
        cursor, page = await client.execute_command("ZSCAN", inbox, cursor or b"0", "COUNT", PAGE)
        seqs = [seq for ref in page[::2] if (seq := whole(ref)) is not None]  # another client may write anything
        for head in await ask_all(client, [("GETRANGE", keys.letter(device, seq), 0, HEAD_BYTES) for seq in seqs]):
            if head:
                yield enc_of(head)


def enc_of_will(raw: bytes) -> bytes:
    """How the payload of a will is encoded; empty if it is not, or if that cannot be read."""
    try:
        head = from_json(raw.partition(b"|")[2].partition(b"\n")[0])
        return str(head[ENC_OF_WILL]).encode()
    except (ValueError, LookupError, TypeError):
        return b""
