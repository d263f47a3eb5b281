"""What a write stores for payloads: the option `encode`. Keys are those of the machine that writes, RSMQ_KEYS: options
are in plans and logs.

newest: as the newest message of the topic, or letter of the first device, is stored; keys decide where there is none.
all: compressed and encrypted. none: as the rows are. A row with a header `enc` is encoded already, and is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any, Final

from rsmq.codecs.reading import codecs_beside, codecs_to_write
from rsmq.errors import BrokerError, ConfigError
from rsmq.model.encoding import ENC, Binding, Encoding, key_of
from rsmq.model.message import new_message_id
from rsmq.model.record import whole
from rsmq.pipeline.format.options import Encode
from rsmq.pipeline.format.task_connection import TaskConnection
from rsmq.redis.scripts import Value
from rsmq.redis.streams import AT_ONCE, is_missing, key_of_newest, last_entries
from rsmq.redis.topics import Topic

OTHERWISE: Final = ', on every executor, or write .option("encode", "none") to store it readable'


class RowEncoder:
    """Encodes the rows of one task. Raises ConfigError for keys that this machine does not have."""

    def __init__(self, connection: TaskConnection, encode: Encode) -> None:
        self._connection = connection
        self._encode = encode
        self._made = dict[str, Encoding | None]()

    def of_topic(self, topic: Topic) -> Encoding | None:
        """What encodes the rows for a topic; None: they stay as they are."""
        if topic.name not in self._made:
            self._made[topic.name] = self._encoding(f"topic {topic.name!r}", lambda: self._newest_message(topic))
        return self._made[topic.name]

    def of_inboxes(self, device: str) -> Encoding | None:
        """The same for letters: the first device of the task decides."""
        if "" not in self._made:
            self._made[""] = self._encoding(f"the inbox of {device!r}", lambda: self._newest_letter(device))
        return self._made[""]

    def _encoding(self, what: str, newest: Any) -> Encoding | None:
        if self._encode == "none":
            return None
        codecs = codecs_to_write() if self._encode == "all" else codecs_beside(newest(), what, OTHERWISE)
        if self._encode == "all" and not codecs:
            raise ConfigError("encode=all needs keys: set RSMQ_KEYS, or RSMQ_KEYS_FILE, on every executor")
        return Encoding(codecs, int(self._connection.settings.decoded_limit)) if codecs else None

    def _newest_message(self, topic: Topic) -> str | None:
        numbers, keys = list(topic.numbers), self._connection.keys
        for at in range(0, len(numbers), AT_ONCE):
            streams = [keys.stream(topic.name, number) for number in numbers[at : at + AT_ONCE]]
            if entries := last_entries(map(self._info, streams)):
                return key_of_newest(entries)
        return None

    def _info(self, stream: str) -> Any:
        """What XINFO says of a stream; None: it is not there."""
        try:
            return self._connection.ask("XINFO", "STREAM", stream)
        except BrokerError as error:
            if is_missing(error):
                return None
            raise

    def _newest_letter(self, device: str) -> str | None:
        keys = self._connection.keys
        refs = self._connection.ask("ZRANGE", keys.inbox(device), -1, -1)
        seq = whole(refs[0]) if refs else None
        if seq is None:
            return None
        letters: Any = import_module("rsmq.persistence.letter")  # only a write of letters loads it
        return key_of(letters.enc_of(self._connection.ask("GET", keys.letter(device, seq)) or b""))

    def __repr__(self) -> str:
        return f"<RowEncoder {self._encode}>"


def encoded_entry(entry: Sequence[Value], encoding: Encoding) -> Sequence[Value]:
    """The number of the fields of an entry, and the fields, with an encoded payload. An entry without an id gets one.
    Raises TooLarge, and ConfigError for a key or an id that is not UTF-8."""
    named = dict(zip(entry[1::2], entry[2::2], strict=True))
    if ENC in named or 2 * len(named) < len(entry) - 1:  # what has a field twice stays malformed
        return entry
    try:
        texts = [None if (raw := named.get(name)) is None else text_of(raw) for name in (b"id", b"key", b"type")]
    except UnicodeDecodeError:
        raise ConfigError("the key or id of a row is not UTF-8, and an encrypted message is bound to it") from None
    message_id, key, kind = texts
    given = new_message_id() if message_id is None else message_id
    data, enc = encoding.encode(bytes_of(named[b"data"]), given, key, kind or "application/json")
    fields = [part for name, value in named.items() for part in (name, data if name == b"data" else value)]
    fields += [] if message_id is not None else [b"id", given]
    fields += [ENC, enc] if enc else []
    return (len(fields), *fields)


def payload_size(entry: Sequence[Value]) -> int:
    """The bytes of the payload of an entry."""
    return len(bytes_of(entry[2::2][entry[1::2].index(b"data")]))


def bound_letter(value: bytes, kind: str, encoding: Encoding | None) -> tuple[bytes, Binding | None]:
    """The payload of a letter as it is stored, and what undoes it; None: it is not encoded. Raises TooLarge."""
    return (value, None) if encoding is None else encoding.bound(value, new_message_id(), None, kind)


def text_of(raw: Value) -> str:
    """A value of a field as text."""
    return raw.decode() if isinstance(raw, bytes) else str(raw)


def bytes_of(raw: Value) -> bytes:
    """A value of a field as bytes."""
    return raw if isinstance(raw, bytes) else str(raw).encode()
