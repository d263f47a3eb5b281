"""The retained messages of MQTT, for operators: read from the server, without a gateway and without scripts."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

from rsmq.errors import Malformed, MessageError
from rsmq.model.clock import LATEST_MS, from_epoch_ms
from rsmq.model.encoding import NO_CODECS, Encoding, why_sealed
from rsmq.model.keys import Keys
from rsmq.model.record import exact_text
from rsmq.persistence.letter import EXPIRES, STAMP, read_mqtt
from rsmq.redis.client.connector import Client

BUCKETS: Final = 8
"""Hashes that the messages are spread over, by their topic names."""
PAGE: Final = 100


@dataclass(frozen=True, slots=True)
class RetainedMessage:
    """The newest message of a topic name, which new subscribers get."""

    topic: str
    qos: int
    published: datetime
    expires: datetime | None
    data: bytes = field(repr=False)
    """The payload, or what is stored of one that cannot be decoded here: `sealed` says why."""
    sealed: str = ""


async def some_retained(
    client: Client, keys: Keys, wanted: str, most: int, most_scanned: int, encoding: Encoding = NO_CODECS
) -> tuple[list[RetainedMessage], bool]:
    """Retained messages whose topic names contain a text, by name, and whether there may be more.

    It looks at `most_scanned` messages at most, in no order, and changes nothing. `encoding` undoes their payloads.
    """
    found, scanned = list[RetainedMessage](), 0
    for bucket in range(BUCKETS):
        key, cursor = keys.retained(bucket, "messages"), b"0"
        while True:
            cursor, flat = await client.execute_command("HSCAN", key, cursor, "COUNT", PAGE)
            read = (read_retained(*each, encoding) for each in zip(flat[::2], flat[1::2], strict=True))
            found += [each for each in read if each is not None and wanted in each.topic]
            scanned += len(flat) // 2
            if len(found) > most or scanned >= most_scanned:
                return sorted(found, key=lambda each: each.topic)[:most], True
            if cursor == b"0":
                break
    return sorted(found, key=lambda each: each.topic), False


def read_retained(raw: bytes, kept: bytes, encoding: Encoding) -> RetainedMessage | None:
    """A message from its field; None for a removal that is remembered, and for what another client has written."""
    name, envelope = exact_text(raw), kept.partition(b"|")[2]
    if name is None or len(envelope) <= STAMP:
        return None
    try:
        return retained_message(envelope, encoding)
    except Malformed:
        return None


def retained_message(envelope: bytes, encoding: Encoding) -> RetainedMessage:
    """A message from its envelope. Raises Malformed."""
    letter = read_mqtt(envelope)
    published, until = (int.from_bytes(envelope[at : at + 6], "big") for at in (1, 7))
    expires = from_epoch_ms(min(until, LATEST_MS)) if letter.flags & EXPIRES else None
    data, sealed = letter.data, ""
    if letter.binding is not None:
        try:
            data = encoding.undo(data, letter.binding)
        except MessageError as error:
            sealed = why_sealed(error, letter.binding.enc.decode(errors="backslashreplace"))
    at = from_epoch_ms(min(published, LATEST_MS))
    return RetainedMessage(letter.topic, letter.flags & 3, at, expires, data, sealed)
