"""`format("rsmq")` for Spark: topics as DataFrames and streams, and DataFrames into topics or device inboxes.

Reading, the columns are those of Spark's Kafka source: `key binary, value binary, topic string, partition int, offset
string` (the stream id), `id_ms bigint, id_seq bigint, timestamp timestamp`; with `includeHeaders` also `headers
array<struct<key string, value binary>>`, `id string` (message id), `type string` (content type), `expires bigint` (ms
since 1970), `on_expiry string`, `unique string`, `cancelled string` (the groups for which the message was cancelled or
replaced, with commas; `*`: for all) and `band string` (null where the topic has no bands). Stream ids do not sort as
text: sort by (`id_ms`, `id_seq`). `.schema("partition int, id_ms bigint")` chooses columns: others are not made, and do
not go from Python to the JVM.

Writing uses the same names: `value` (string or binary) and, if there are such columns, `key`, `topic` (or the option of
that name), `headers`, `id`, `type`, `expires`, `on_expiry`, `unique` and `band`. `partition`, `id_ms` and `id_seq` are
the source position of a row. With `target=inbox` a row is a letter for the device in column `device`; `topic` is its
topic, `timestamp` when it was published.
"""

from __future__ import annotations

from dataclasses import replace

from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType

from rsmq.errors import ConfigError
from rsmq.pipeline.format.columns import SCHEMA, WITH_HEADERS
from rsmq.pipeline.format.options import ReadOptions, read_options, write_options
from rsmq.pipeline.format.plain_errors import plain_errors
from rsmq.pipeline.format.reader import BatchReader, PushingReader, StreamReader
from rsmq.pipeline.format.writer import BatchWriter, StreamWriter, check_write


class RsmqSource(DataSource):
    """The data source. Options are checked when Spark plans a read or write, before the server is contacted."""

    @classmethod
    def name(cls) -> str:
        """The argument of `format`."""
        return "rsmq"

    @plain_errors
    def schema(self) -> StructType:
        """The columns of a read."""
        return WITH_HEADERS if read_options(self.options).include_headers else SCHEMA

    @plain_errors
    def reader(self, schema: StructType) -> BatchReader:
        """For `spark.read`."""
        return BatchReader(self._read_options(schema))

    @plain_errors
    def streamReader(self, schema: StructType) -> StreamReader:  # noqa: N802
        """For `spark.readStream`."""
        return StreamReader(self._read_options(schema))

    @plain_errors
    def writer(self, schema: StructType, overwrite: bool) -> BatchWriter:
        """For `df.write`."""
        return BatchWriter(check_write(write_options(self.options), schema, overwrite))

    @plain_errors
    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:  # noqa: N802
        """For `df.writeStream`."""
        return StreamWriter(check_write(write_options(self.options), schema, overwrite))

    def _read_options(self, schema: StructType) -> ReadOptions:
        """The options of a read of these columns. Raises ConfigError for a column that a topic does not have."""
        known = {field.name: field.dataType for field in WITH_HEADERS.fields}
        for field in schema.fields:
            if known.get(field.name) != field.dataType:
                has = ", ".join(f"{name} {kind.simpleString()}" for name, kind in known.items())
                raise ConfigError(
                    f".schema(...) chooses columns of a topic, and {field.name} {field.dataType.simpleString()} is not "
                    f"one: it has {has}"
                )
        return replace(read_options(self.options), columns=tuple(schema.names))


class PushingSource(RsmqSource):
    """The same source for sessions in which filters can be pushed down: see `register`."""

    @plain_errors
    def reader(self, schema: StructType) -> BatchReader:
        """For `spark.read`."""
        return PushingReader(self._read_options(schema))
