"""Payloads as columns with types, by the model that a handler has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal

import pytest
from pydantic import BaseModel, Field
from pyspark.sql import DataFrame

from rsmq.errors import ConfigError
from rsmq.pipeline import schema_of, typed_rows
from tests.pipeline.conftest import Store


class Line(BaseModel):
    """A part of an order."""

    article: str
    count: int = 1


class Order(BaseModel):
    """A payload with most kinds of fields."""

    number: int = Field(alias="n")
    total: Decimal | None = None
    paid: bool = False
    at: datetime | None = None
    lines: list[Line] = []
    tags: dict[str, float] = {}


@dataclass
class Ping:
    """A payload as a dataclass."""

    host: str
    ms: float


class Node(BaseModel):
    """A model that contains itself."""

    inner: Node | None = None


def test_a_model_has_a_schema() -> None:
    """Names of the JSON, types of Spark; only a required field that may not be null is not nullable."""
    schema = schema_of(Order)
    assert schema.simpleString() == (
        "struct<n:bigint,total:string,paid:boolean,at:timestamp,lines:array<struct<article:string,count:bigint>>,"
        "tags:map<string,double>>"
    )
    assert [field.name for field in schema.fields if not field.nullable] == ["n"]
    assert schema_of(Ping).simpleString() == "struct<host:string,ms:double>"
    with pytest.raises(ConfigError, match="Node contains itself"):
        schema_of(Node)
    with pytest.raises(ConfigError, match="has no fields"):
        schema_of(int)


def test_a_row_that_does_not_fit_goes_into_a_column(
    reading: Callable[..., DataFrame], store: Store, topic: str
) -> None:
    """No JSON, a list, another type, a field that is missing, also within a list: the query goes on, and shows it."""
    store.make(topic, 1)
    bad = ["{", '{"n": "x"}', '{"paid": true}', "5", ' [{"n": 1}, {"n": 2}]', '{"n": 1, "lines": [{"count": 2}]}']
    for data in ['{"n": 1, "lines": [{"article": "a"}]}', *bad]:
        store.add(topic, 0, {"data": data})
    rows = typed_rows(reading(subscribe=topic), Order).orderBy("id_ms", "id_seq").collect()
    assert [row.bad for row in rows] == [None, *bad]
    assert [row.payload for row in rows[1:]] == [None] * len(bad)
    assert (rows[0].payload.n, rows[0].payload.lines[0].article) == (1, "a")
