"""Letters into device inboxes: grouped by device, many script calls in one write, by the script of `rsmq.persistence`.

none: at least once. marker: each letter once, however often the job runs: an inbox remembers the last position of the
job's source. Rows must then be sorted by device and position, all rows of a device in one task; where a job has one row
a device, the position may be the same for all.
"""

from __future__ import annotations

import secrets
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from pydantic_core import to_json
from redis.exceptions import NoScriptError, RedisError

from rsmq.client import translate
from rsmq.clock import to_ms
from rsmq.errors import ConfigError, TooLarge
from rsmq.message import JSON
from rsmq.persistence.letter import seal
from rsmq.pipeline.link import Link
from rsmq.pipeline.option import WriteOptions
from rsmq.pipeline.row import headers_of, pairs, positions, texts
from rsmq.pipeline.sink import Written
from rsmq.script import ADD_LETTERS, Value

MOST_LETTERS: Final = 500
"""Letters of one device in one script call: about 2 ms of the server's time."""
MOST_CALLS: Final = 500
MOST_BYTES: Final = 4 << 20

Letter = tuple[Value, Value, Value, bytes]
"""Position, published_ms, ttl_ms and envelope, as the script takes them."""
Call = tuple[tuple[str, ...], list[Value]]
"""Keys and arguments."""


class Inbox:
    """One task's way into inboxes.

    Invariant: of one device at most one call is under way: a later one that succeeds where an earlier one has failed
    would raise the mark over what is missing.
    """

    def __init__(self, link: Link, options: WriteOptions) -> None:
        self._link, self._options = link, options
        settings = link.settings
        self._limit = int(settings.payload_limit)
        self._is_marked = options.idempotence == "marker"
        self._source = f"source:{options.job_id}" if self._is_marked else f"source:~{secrets.token_hex(5)}"
        self._head = (to_ms(settings.inbox_ttl), settings.inbox_limit, to_ms(options.dedupe_window))
        self._ttl: Value = b"" if options.expiry is None else to_ms(options.expiry)
        self._count = 0
        self._last: tuple[bytes, str] = (b"", "")
        self._waiting: dict[str, list[Letter]] = {}
        self._size = 0
        self.written = Written()

    def put(self, batch: pa.RecordBatch) -> None:
        """Take the rows of an Arrow batch; what has gathered is sent when it is enough."""
        if not batch.num_rows:
            return
        devices = texts(batch, "device") or []
        if None in devices or not devices:
            raise ConfigError("column 'device' is null in a row: a letter goes to a device")
        positions = self._positions(batch, devices)
        published = moments_of(batch)
        for device, position, moment, envelope in zip(
            devices, positions, published, self._envelopes(batch), strict=True
        ):
            letters = self._waiting.setdefault(device.decode(), [])
            letters.append((position, moment, self._ttl, envelope))
            self._size += len(envelope)
            if len(letters) >= MOST_LETTERS or len(self._waiting) >= MOST_CALLS or self._size >= MOST_BYTES:
                self.flush()

    def flush(self) -> None:
        """Send what has gathered, again while the server is away."""
        waiting, self._waiting, self._size = self._waiting, {}, 0
        keys = self._link.keys
        calls: list[Call] = [
            (
                keys.device(device),
                [*self._head, self._source, len(letters), *(part for letter in letters for part in letter)],
            )
            for device, letters in waiting.items()
        ]
        for reply, letters in zip(self._link.attempt(lambda: self._exchange(calls)), waiting.values(), strict=True):
            _, stored, _, expired, late = reply
            self.written.stored += stored
            self.written.skipped += len(letters) - stored - expired - late

    def _exchange(self, calls: list[Call]) -> list[Any]:
        """All calls in one write; those that the server does not know by their hash once more with the source."""
        client = self._link.client
        replies = client.pipelined([ADD_LETTERS.command(keys, args) for keys, args in calls])
        unknown = [number for number, reply in enumerate(replies) if isinstance(reply, NoScriptError)]
        if unknown:
            again = client.pipelined([ADD_LETTERS.full_command(*calls[number]) for number in unknown])
            for number, reply in zip(unknown, again, strict=True):
                replies[number] = reply
        for reply in replies:
            if isinstance(reply, RedisError | OSError):
                raise translate(reply, self._link.url)
        return replies

    def _positions(self, batch: pa.RecordBatch, devices: list[bytes]) -> list[str]:
        """Where each row stands in its source, as text of fixed width."""
        if not self._is_marked:
            start = self._count
            self._count += len(devices)
            return [f"{number:016d}" for number in range(start, self._count)]
        found: list[str] = positions(batch).to_pylist()
        for place in zip(devices, found, strict=True):
            if place <= self._last:
                raise ConfigError(
                    "target=inbox with idempotence=marker needs the rows of a device in one task and in order: "
                    ".repartition('device').sortWithinPartitions('device', 'id_ms', 'id_seq')"
                )
            self._last = place
        return found

    def _envelopes(self, batch: pa.RecordBatch) -> list[bytes]:
        """Each row as an envelope, without the stamp that the server puts in front."""
        values, count = texts(batch, "value") or [None] * batch.num_rows, batch.num_rows
        if None in values:
            raise ConfigError("the value of a row is null: a letter has a payload, so filter such rows")
        largest = pc.max(pc.binary_length(batch.column("value"))).as_py()
        if largest > self._limit:
            raise TooLarge(largest, self._limit)
        types, headers = texts(batch, "type") or [None] * count, headers_of(batch) or [None] * count
        topics = [(self._options.topic or "").encode()] * count if self._options.topic else texts(batch, "topic")
        return [
            seal(value, JSON if kind is None else kind.decode(), topic or b"", header_json(extra))
            for value, kind, topic, extra in zip(values, types, topics or [None] * count, headers, strict=True)
        ]


def header_json(headers: Any) -> bytes | None:
    """The headers of a row as a JSON object of strings. Raises ConfigError for one that is no text."""
    if not headers:
        return None
    try:
        return to_json({name: value.decode() for name, value in pairs(headers)})
    except UnicodeDecodeError:
        raise ConfigError("a header of a row is not UTF-8: the headers of a letter are text") from None


def moments_of(batch: pa.RecordBatch) -> list[Value]:
    """When each row was published, in ms since 1970; empty for now."""
    if "timestamp" not in batch.schema.names:
        return [b""] * batch.num_rows
    moments = batch.column("timestamp").cast(pa.timestamp("ms", tz="UTC"), safe=False).cast(pa.int64()).to_pylist()
    return [b"" if each is None else each for each in moments]
