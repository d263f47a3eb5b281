"""A client of Spark Connect: `SPARK_REMOTE=sc://HOST:PORT python connect_client.py URL PREFIX TOPIC COPY FOLDER`.

Copies a topic, streams it into FOLDER, and prints what it has seen as a line of JSON.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass

from pyspark.sql.connect.session import SparkSession

from rsmq.errors import ConfigError
from rsmq.pipeline import open_session, typed_rows
from rsmq.pipeline.spark.errors import spark_errors


@dataclass
class Order:
    """The payload of the topic."""

    n: int


def main(url: str, prefix: str, topic: str, copy: str, folder: str) -> None:
    """Read, write and stream."""
    connection = {"url": url, "prefix": prefix}
    spark = open_session()
    rows = spark.read.format("rsmq").options(**connection, subscribe=topic).load()
    rows.select("key", "value").write.format("rsmq").options(**connection, topic=copy).mode("append").save()
    error = ""
    try:
        with spark_errors():
            spark.read.format("rsmq").options(url=url, subscribe=topic, wrong="1").load().collect()
    except ConfigError as found:
        error = str(found)
    seen = {
        "is_connect": isinstance(spark, SparkSession),
        "is_active_again": open_session() is spark,
        "numbers": sorted(
            row.n for row in typed_rows(rows, Order).where("partition = 0").select("payload.n").collect()
        ),
        "pushed": spark.conf.get("spark.sql.python.filterPushdown.enabled"),
        "error": error,
    }
    print(json.dumps(seen | streamed(spark, connection, topic, folder)))


def streamed(spark: SparkSession, connection: dict[str, str], topic: str, folder: str) -> dict[str, int]:
    """How many rows a stream has written, and how many messages it is behind."""
    stream = spark.readStream.format("rsmq").options(**connection, subscribe=topic, startingOffsets="earliest").load()
    to = stream.select("value").writeStream.option("checkpointLocation", f"{folder}/checkpoint")
    query = to.trigger(availableNow=True).start(f"{folder}/rows", format="parquet")
    query.awaitTermination(300)
    return {
        "streamed": spark.read.parquet(f"{folder}/rows").count(),
        "behind": json.loads(query.lastProgress["sources"][0]["latestOffset"])["@behind"]["messages"]["sum"],
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
