"""`rsmq pipeline report`: what was published (by the archive or the topics) and how things stand, on one HTML page."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import anyio
from pyspark.sql import DataFrame, SparkSession

from rsmq.address import redact
from rsmq.errors import ConfigError, RsmqError
from rsmq.pipeline.facts import Facts
from rsmq.pipeline.failure import spoken
from rsmq.pipeline.history import history, now
from rsmq.pipeline.option import read_options
from rsmq.pipeline.page import page
from rsmq.pipeline.standing import Standing
from rsmq.pipeline.store import Store


@dataclass(frozen=True, slots=True)
class Order:
    """What to report on: topics (none: all) in a window of time. `archive` None: what the topics still hold."""

    topics: tuple[str, ...]
    connection: dict[str, str]
    archive: str | None = None
    since: datetime | None = None
    until: datetime | None = None


def collect(spark: SparkSession, order: Order) -> Facts:
    """Look and count. Raises RsmqError."""
    settings = read_options(order.connection | {"subscribePattern": ".*"}).access.settings()
    with spoken():
        counted = history(read(spark, order), order.since, order.until)
    standing = Standing(settings, counted.spreads)
    anyio.run(standing.look, order.topics)
    return Facts(
        made_at=now(),
        server=redact(settings.url or ""),
        source="the topics" if order.archive is None else f"the archive {order.archive}",
        history=counted,
        groups=tuple(standing.groups),
        deaths=tuple(standing.deaths),
        backlog=standing.backlog,
        cut=tuple(standing.cut),
    )


def read(spark: SparkSession, order: Order) -> DataFrame:
    """The messages, from where they were asked for."""
    if order.archive is None:
        chosen = {"subscribe": ",".join(order.topics)} if order.topics else {"subscribePattern": ".*"}
        options = order.connection | chosen | {"includeHeaders": "true"}
        return spark.read.format("rsmq").options(**options).load()
    store = Store(spark, order.archive)
    topics = list(order.topics) or store.topics()
    if not topics:
        raise ConfigError(f"there is no archive at {order.archive}: see `rsmq pipeline archive`")
    days = (None if moment is None else moment.date() for moment in (order.since, order.until))
    return store.read(store.parts(topics, *days))


def write(facts: Facts, path: str) -> Path:
    """The page as a file of this machine, whole or not at all. Raises RsmqError."""
    target = Path(path).absolute()
    draft = target.with_name(f".{target.name}.draft")
    try:
        draft.write_text(page(facts), encoding="utf-8")
        draft.replace(target)
    except OSError as error:
        raise RsmqError(f"{target} cannot be written: {error.strerror}") from None
    return target
