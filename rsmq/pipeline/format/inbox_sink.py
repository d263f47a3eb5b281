"""Letters into device inboxes: grouped by device, one script call for a device, many calls in one write.

none: at least once. marker: each letter once, however often the job runs, because an inbox stores the last position of
the job. All rows of a device must then be in one task, in the order of their positions; the order of the devices does
not matter. A job with one row for each device may use the same position for all.
"""

from __future__ import annotations

import hashlib
import secrets
from typing import Any, Final

import pyarrow as pa
from pydantic_core import to_json
from redis.exceptions import RedisError

from rsmq.errors import ConfigError, TooLarge
from rsmq.model.clock import to_ms
from rsmq.model.encoding import Encoding
from rsmq.model.message import JSON
from rsmq.persistence.letter import pack_letter, pack_letters, seal
from rsmq.pipeline.format.options import WriteOptions
from rsmq.pipeline.format.row_encoding import RowEncoder, bound_letter
from rsmq.pipeline.format.rows import bytes_column, header_pairs, headers_column, source_positions
from rsmq.pipeline.format.task_connection import TaskConnection
from rsmq.pipeline.format.topic_sink import DIGEST, TaskResult
from rsmq.redis.client.client import translate
from rsmq.redis.scripts import ADD_LETTERS, Value

MAX_LETTERS: Final = 500
"""Letters of one device in one script call: about 2 ms of the server's time."""
MAX_CALLS: Final = 500
MAX_BYTES: Final = 4 << 20

Call = tuple[tuple[str, ...], list[Value]]
"""Keys and arguments."""


class InboxSink:
    """Writes the rows of one task into inboxes.

    Invariant: at most one call for a device is in flight. If an earlier call failed and a later one succeeded, the mark
    would rise above letters that are missing.
    """

    def __init__(self, connection: TaskConnection, options: WriteOptions) -> None:
        self._connection, self._options = connection, options
        settings = connection.settings
        self._payload_limit = int(settings.payload_limit)
        self._encoder = RowEncoder(connection, options.encode)
        self._is_marked = options.idempotence == "marker"
        self._source = f"source:{options.job_id}" if self._is_marked else f"source:~{secrets.token_hex(5)}"
        self._limits = (to_ms(settings.inbox_ttl), settings.inbox_limit, to_ms(options.dedupe_window))
        self._ttl: Value = b"" if options.expires is None else to_ms(options.expires)
        self._count = 0
        self._last: dict[bytes, str] = {}
        """The last position of each device of this task: about 200 bytes for each."""
        self._waiting: dict[str, list[bytes]] = {}
        self._size = 0
        self._stored = 0
        self._skipped = 0

    @property
    def result(self) -> TaskResult:
        """The result; with marker also which devices came, so that the driver finds one that came in two tasks."""
        digests = (hashlib.blake2b(device, digest_size=DIGEST).digest() for device in self._last)
        return TaskResult(self._stored, self._skipped, devices=b"".join(digests))

    def put(self, batch: pa.RecordBatch) -> None:
        """Add the rows of an Arrow batch, and send the waiting letters whenever there are enough."""
        if not batch.num_rows:
            return
        devices = bytes_column(batch, "device") or []
        if None in devices or not devices:
            raise ConfigError("column 'device' is null in a row: a letter needs a device")
        encoding = self._encoder.of_inboxes(devices[0].decode())
        envelopes = self._envelopes(batch, encoding)
        rows = zip(devices, self._positions(batch, devices), published_ms(batch), envelopes, strict=True)
        for device, position, published, envelope in rows:
            letters = self._waiting.setdefault(device.decode(), [])
            letters.append(pack_letter(position, published, self._ttl, envelope))
            self._size += len(envelope)
            if len(letters) >= MAX_LETTERS or len(self._waiting) >= MAX_CALLS or self._size >= MAX_BYTES:
                self.flush()

    def flush(self) -> None:
        """Send the waiting letters, repeated while the server is away."""
        waiting = self._waiting
        self._waiting = {}
        self._size = 0
        keys = self._connection.keys
        calls: list[Call] = [
            (keys.device(device)[:3], [*self._limits, pack_letters([(self._source, letters)])])
            for device, letters in waiting.items()
        ]
        replies = self._connection.attempt(lambda: self._send(calls))
        for reply, letters in zip(replies, waiting.values(), strict=True):
            _, stored, _, expired, late = reply
            self._stored += stored
            self._skipped += len(letters) - stored - expired - late

    def _send(self, calls: list[Call]) -> list[Any]:
        """Send all calls in one write."""
        replies = self._connection.client.pipelined([ADD_LETTERS.command(keys, args) for keys, args in calls])
        for reply in replies:
            if isinstance(reply, RedisError | OSError):
                raise translate(reply, self._connection.url)
        return replies

    def _positions(self, batch: pa.RecordBatch, devices: list[bytes]) -> list[str]:
        """The source position of each row, as text of fixed width."""
        if not self._is_marked:
            start = self._count
            self._count += len(devices)
            return [f"{number:016d}" for number in range(start, self._count)]
        positions: list[str] = source_positions(batch).to_pylist()
        for device, position in zip(devices, positions, strict=True):
            if position <= self._last.get(device, ""):
                raise out_of_order(
                    device.decode(errors="replace"), position, is_repeated=position == self._last[device]
                )
            self._last[device] = position
        return positions

    def _envelopes(self, batch: pa.RecordBatch, encoding: Encoding | None) -> list[bytes]:
        """Each row as an envelope, without the stamp that the server prepends."""
        values, count = bytes_column(batch, "value") or [None] * batch.num_rows, batch.num_rows
        if None in values:
            raise ConfigError("the value of a row is null: a letter has a payload, so filter such rows")
        types, headers = bytes_column(batch, "type") or [None] * count, headers_column(batch) or [None] * count
        topics = [self._options.topic.encode()] * count if self._options.topic else bytes_column(batch, "topic")
        kinds = [JSON if each is None else each.decode() for each in types]
        stored = [bound_letter(*each, encoding) for each in zip(values, kinds, strict=True)]
        largest = max(len(data) for data, _ in stored)
        if largest > self._payload_limit:
            raise TooLarge(largest, self._payload_limit)
        rows = zip(stored, kinds, topics or [None] * count, headers, strict=True)
        return [
            seal(data, kind, topic or b"", header_json(row_headers), binding)
            for (data, binding), kind, topic, row_headers in rows
        ]


def out_of_order(device: str, position: str, *, is_repeated: bool) -> ConfigError:
    """The error for a row that the mark of its device would hide."""
    id_ms, id_seq = map(int, position.split("-"))
    if is_repeated:
        return ConfigError(
            f"device {device!r} has two rows with the same position (id_ms={id_ms}, id_seq={id_seq}): with "
            f"idempotence=marker each row of a device needs its own, which stays the same when the job runs again. "
            f"Number them by columns that tell them apart: .withColumn('id_seq', "
            f"F.row_number().over(Window.partitionBy('device').orderBy('sent_at', 'value')).cast('bigint'))"
        )
    return ConfigError(
        f"the rows of device {device!r} are not in order (a higher position came before id_ms={id_ms}, "
        f"id_seq={id_seq}): with idempotence=marker bring all rows of a device into one task and sort them there: "
        f".repartition('device').sortWithinPartitions('device', 'id_ms', 'id_seq')"
    )


def header_json(headers: Any) -> bytes | None:
    """The headers of a row as a JSON object of strings. Raises ConfigError for a header that is not UTF-8."""
    if not headers:
        return None
    try:
        return to_json({name: value.decode() for name, value in header_pairs(headers)})
    except UnicodeDecodeError:
        raise ConfigError("a header of a row is not UTF-8: the headers of a letter are text") from None


def published_ms(batch: pa.RecordBatch) -> list[Value]:
    """When each row was published, in ms since 1970; empty means now."""
    if "timestamp" not in batch.schema.names:
        return [b""] * batch.num_rows
    column = batch.column("timestamp").cast(pa.timestamp("ms", tz="UTC"), safe=False).cast(pa.int64())
    return [b"" if ms is None else ms for ms in column.to_pylist()]
