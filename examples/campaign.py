"""A campaign: Spark joins and filters an audience, sends letters to device inboxes, and draws when they arrived.

    python examples/campaign.py
    python examples/campaign.py --rows 20000 --picture arrival.svg

The two million customers and four million purchases are generated. Each customer who bought shoes lately and wants
letters gets one, in their own language. Run it again, and no letter is sent twice. Letters expire after an hour.
"""

import argparse
import asyncio
import time
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from rsmq import Broker, Settings
from rsmq.pipeline import open_session, register
from rsmq.pipeline.report.charts import stacked
from rsmq.redis.embedded.server import embedded

SAMPLE = 5000
AT_ONCE = 50


def name_of(rows: int) -> str:
    """The name of the campaign: each size is a campaign of its own."""
    return f"shoes-{rows}"


def audience(spark: SparkSession, rows: int) -> DataFrame:
    """Customers: a device each, a language, and whether they want letters."""
    luck = F.pmod(F.xxhash64("id"), F.lit(100))
    language = F.when(luck < 40, "ko").when(luck < 70, "en").otherwise("de")
    return spark.range(rows).select(
        F.col("id").alias("customer"),
        F.concat(F.lit("device-"), F.col("id")).alias("device"),
        language.alias("language"),
        (F.pmod(F.xxhash64("id", F.lit("consent")), F.lit(100)) < 60).alias("wants_letters"),
    )


def purchases(spark: SparkSession, rows: int) -> DataFrame:
    """Two purchases a customer on average, of ten kinds, within the last year."""
    return spark.range(2 * rows).select(
        F.pmod(F.xxhash64("id", F.lit("who")), F.lit(rows)).alias("customer"),
        F.pmod(F.xxhash64("id", F.lit("what")), F.lit(10)).alias("kind"),
        F.pmod(F.xxhash64("id", F.lit("when")), F.lit(365)).alias("days_ago"),
    )


def letters(spark: SparkSession, rows: int) -> DataFrame:
    """One letter for each chosen customer."""
    shoes = (
        purchases(spark, rows).where("kind = 3 AND days_ago < 180").groupBy("customer").agg(F.count("*").alias("pairs"))
    )
    chosen = audience(spark, rows).where("wants_letters").join(shoes, "customer")
    greeting = (
        F.when(F.col("language") == "ko", "신발 할인")
        .when(F.col("language") == "de", "Schuhe, reduziert")
        .otherwise("Shoes on sale")
    )
    text = F.to_json(F.struct(greeting.alias("text"), "pairs"))
    return chosen.select("device", text.alias("value"), F.lit(1).alias("id_ms"), F.lit(0).alias("id_seq"))


def send(spark: SparkSession, rows: int, connection: dict[str, str]) -> int:
    """Send the letters to the inboxes; returns how many there are."""
    found = letters(spark, rows).repartition("device").sortWithinPartitions("device").persist()
    count = found.count()
    (
        found.write.format("rsmq")
        .options(**connection, target="inbox", topic=name_of(rows), expires="PT1H")
        .options(idempotence="marker", jobId=name_of(rows))
        .mode("append")
        .save()
    )
    return count


async def arrivals(settings: Settings, rows: int) -> list[datetime]:
    """When the letters of some devices were stored, by the server's clock."""
    async with Broker(settings) as broker:
        step = max(1, rows // (20 * SAMPLE))
        devices = [f"device-{number}" for number in range(0, rows, step)]
        found: list[datetime] = []
        for start in range(0, len(devices), AT_ONCE):
            boxes = await asyncio.gather(*(broker.devices.peek(each) for each in devices[start : start + AT_ONCE]))
            found += [letter.timestamp for box in boxes for letter in box if letter.topic == name_of(rows)]
            if len(found) >= SAMPLE:
                break
        return sorted(found)


def curve(moments: list[datetime], count: int) -> str:
    """Arrived letters over time as SVG, scaled from the sample."""
    seconds = Counter(int(moment.timestamp() * 5) for moment in moments)
    first, last = min(seconds), max(seconds)
    times = [datetime.fromtimestamp(number / 5, UTC) for number in range(first, last + 2)]
    arrived = [0.0]
    for number in range(first, last + 1):
        arrived.append(arrived[-1] + seconds[number] * count / len(moments))
    return stacked("arrival", times, [("letters", arrived)], "letters stored")


def main() -> None:
    options = argparse.ArgumentParser(description="A campaign from Spark into device inboxes.")
    options.add_argument("--rows", type=int, default=2_000_000, help="customers")
    options.add_argument("--picture", type=Path, default=Path("campaign.svg"), help="where the arrival curve goes")
    args = options.parse_args()
    settings = Settings()
    with embedded() if settings.url is None else nullcontext(settings.url) as address:
        settings = replace(settings, url=address)
        spark = open_session()
        register(spark)
        begun = time.perf_counter()
        count = send(spark, args.rows, {"url": address, "prefix": settings.prefix})
        took = time.perf_counter() - begun
        spark.stop()
        moments = asyncio.run(arrivals(settings, args.rows))
    args.picture.write_text(curve(moments, count))
    window = (moments[-1] - moments[0]).total_seconds()
    print(f"{args.rows} customers, {2 * args.rows} purchases: {count} letters in {took:.1f} s")
    print(f"stored within {window:.1f} s, seen at {len(moments)} devices: {args.picture}")


if __name__ == "__main__":
    main()
