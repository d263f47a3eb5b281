"""`format("rsmq")` for Spark: topics as DataFrames and streams, and DataFrames into topics or device inboxes.

Reading, the columns are those of Spark's Kafka source: `key binary, value binary, topic string, partition int, offset
string` (the stream id), `id_ms bigint, id_seq bigint, timestamp timestamp`; with `includeHeaders` also `headers
array<struct<key string, value binary>>`, `id string` (message id) and `type string` (content type). Stream ids do not
sort as text: sort by (`id_ms`, `id_seq`).

Writing uses the same names: `value` (string or binary) and, if there are such columns, `key`, `topic` (or the option of
that name), `headers`, `id` and `type`. `partition`, `id_ms` and `id_seq` are the source position of a row. With
`target=inbox` a row is a letter for the device in column `device`; `topic` is its topic, `timestamp` when it was
published.
"""

from __future__ import annotations

from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType

from rsmq.errors import ConfigError
from rsmq.pipeline.format.columns import SCHEMA, WITH_HEADERS
from rsmq.pipeline.format.options import read_options, write_options
from rsmq.pipeline.format.reader import BatchReader, StreamReader
from rsmq.pipeline.format.writer import BatchWriter, StreamWriter, check_write


class RsmqSource(DataSource):
    """The data source. Options are checked when Spark plans a read or write, before the server is contacted."""

    @classmethod
    def name(cls) -> str:
        """The argument of `format`."""
        return "rsmq"

    def schema(self) -> StructType:
        """The columns of a read."""
        return WITH_HEADERS if read_options(self.options).include_headers else SCHEMA

    def reader(self, schema: StructType) -> BatchReader:
        """For `spark.read`."""
        self._check(schema)
        return BatchReader(read_options(self.options))

    def streamReader(self, schema: StructType) -> StreamReader:  # noqa: N802
        """For `spark.readStream`."""
        self._check(schema)
        return StreamReader(read_options(self.options))

    def writer(self, schema: StructType, overwrite: bool) -> BatchWriter:
        """For `df.write`."""
        return BatchWriter(check_write(write_options(self.options), schema, overwrite))

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:  # noqa: N802
        """For `df.writeStream`."""
        return StreamWriter(check_write(write_options(self.options), schema, overwrite))

    def _check(self, schema: StructType) -> None:
        if schema != self.schema():
            raise ConfigError(
                "the columns of an rsmq topic are fixed: remove .schema(...) and select the columns that you need"
            )
