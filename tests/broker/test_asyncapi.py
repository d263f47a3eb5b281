"""AsyncAPI documents: valid against the official schema, and what a change of the code would break.

`asyncapi/3.0.0.json.gz` is the schema of https://github.com/asyncapi/spec-json-schemas, under the licence beside it.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field
from typing_extensions import TypedDict

from rsmq import Broker, ConfigError, Message, SyncBroker
from rsmq.broker.asyncapi import asyncapi, breaking
from rsmq.model.json_schema import Comparison

SCHEMA = Path(__file__).parent / "asyncapi" / "3.0.0.json.gz"


class Color(StrEnum):
    """Values of a field."""

    RED = "red"
    BLUE = "blue"


class Item(BaseModel):
    """A part of a payload."""

    sku: str
    amount: int = Field(ge=1)
    parts: list[Item] = []


class Order(BaseModel):
    """A payload with much in it."""

    customer: str
    lines: list[Item]
    color: Color | None = None
    extra: dict[str, float] = {}
    pair: tuple[int, str] = (1, "a")


@dataclass
class Job:
    """Another kind of payload."""

    name: str


class Row(TypedDict):
    """And another."""

    n: int


def shop() -> Broker:
    """All that a broker can receive and send."""
    broker = Broker()
    broker.topic("payments", Item)

    @broker.handler("orders", group="billing", output="invoices")
    async def bill(order: Order, message: Message) -> Item | None:
        """Bill an order.

        More about it.
        """

    @broker.handler("orders", group="audit", batch=10)
    async def audit(orders: list[Order]) -> None: ...

    @broker.handler("quotes", group="pricing", replies=True)
    async def price(row: Row) -> int:
        return 1

    @broker.handler("raw", group="bytes")
    def raw(data: bytes) -> None: ...

    @broker.handler("raw", group="text")
    def text(data: str) -> None: ...

    @broker.handler("jobs", group="any")
    def anything(message: Message) -> None: ...

    @broker.handler("jobs", group="job")
    def job(job: Job) -> None: ...

    @broker.every("1h", "ticks")
    def tick() -> dict[str, int]:
        return {}

    return broker


def validate(document: dict[str, Any]) -> None:
    """Against the official schema."""
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads(gzip.decompress(SCHEMA.read_bytes()))
    jsonschema.Draft7Validator(schema).validate(document)


def test_the_document_is_valid_and_complete() -> None:
    """Each topic is a channel, and each group, output, schedule and typed topic an operation."""
    document = json.loads(json.dumps(asyncapi(shop(), title="shop", version="2.1.0")))
    validate(document)
    assert {name: each["action"] for name, each in document["operations"].items()} == {
        "orders.billing": "receive", "orders.billing.output": "send", "orders.audit": "receive",
        "quotes.pricing": "receive", "raw.bytes": "receive", "raw.text": "receive", "jobs.any": "receive",
        "jobs.job": "receive", "ticks.every.tick": "send", "payments.publish": "send",
    }  # fmt: skip
    assert document["operations"]["orders.billing"]["summary"] == "Bill an order."
    assert document["channels"]["orders"]["messages"]["Order"]["payload"] == {"$ref": "#/components/schemas/Order"}
    assert document["channels"]["raw"]["messages"]["bytes"]["contentType"] == "application/octet-stream"
    assert set(document["components"]["schemas"]) >= {"Order", "Item", "Color", "Job", "Row"}
    reply = document["operations"]["quotes.pricing"]["reply"]
    assert document["channels"]["quotes.pricing.answer"]["messages"]["int"]["payload"] == {"type": "integer"}
    assert reply["address"] == {"location": "$message.header#/reply-to"}
    assert breaking(document, document) == []


def test_a_broker_without_anything_is_valid() -> None:
    """An empty one, and one for code without an event loop."""
    validate(asyncapi(Broker(), title="x", version="1"))
    validate(asyncapi(SyncBroker().asynchronous, title="x", version="1"))


def test_the_validator_finds_a_mistake() -> None:
    """The schema is really used."""
    document = asyncapi(shop(), title="shop", version="2.1.0")
    document["operations"]["orders.billing"]["action"] = "eat"
    with pytest.raises(Exception, match="eat"):
        validate(document)


def document_of(register: Callable[[Broker], object]) -> dict[str, Any]:
    """The document of a small broker."""
    broker = Broker()
    register(broker)
    return asyncapi(broker, title="x", version="1")


def receiving(kind: Any) -> dict[str, Any]:
    """Of a broker with one handler."""

    def handle(payload: Any) -> None: ...

    handle.__annotations__["payload"] = kind
    return document_of(lambda broker: broker.handler("orders", group="g")(handle))


def sending(kind: Any) -> dict[str, Any]:
    """Of a broker with one typed topic."""
    return document_of(lambda broker: broker.topic("orders", kind))


class V1(BaseModel):
    """What was published."""

    name: str
    size: int = 1
    kind: Literal["a", "b"] = "a"
    tags: list[str] = []


class Required(V1):
    """A field that must be there now."""

    email: str


class Optional(V1):
    """A field that may be there."""

    email: str = ""


class Narrow(V1):
    """A field with fewer values."""

    kind: Literal["a"] = "a"


class Wide(V1):
    """A field with more values."""

    kind: Literal["a", "b", "c"] = "a"  # type: ignore[assignment]


class Number(V1):
    """A field with another type."""

    name: int  # type: ignore[assignment]


class Nullable(V1):
    """A field that may be null."""

    name: str | None  # type: ignore[assignment]


class Bounded(V1):
    """A field with a bound."""

    size: int = Field(1, le=10)


class Tagged(V1):
    """Items of another type."""

    tags: list[int] = []  # type: ignore[assignment]


class Closed(BaseModel):
    """No other fields."""

    model_config = ConfigDict(extra="forbid")
    name: str


class Float(V1):
    """An integer is a number."""

    size: float = 1  # type: ignore[assignment]


CHANGES: list[tuple[Any, Any, str]] = [
    (V1, Required, "email may be missing, and is required"),
    (V1, Optional, ""),
    (Optional, V1, ""),
    (V1, Narrow, "kind may be 'b', and must be one of ['a']"),
    (V1, Wide, ""),
    (V1, Number, "name may be string, and must be integer"),
    (V1, Nullable, ""),
    (Nullable, V1, "name may be null, and must be string"),
    (V1, Bounded, "size has maximum none, and must have 10"),
    (Bounded, V1, ""),
    (V1, Tagged, "tags[] may be string, and must be integer"),
    (V1, Closed, "may be there, and is refused"),
    (V1, Float, ""),
    (Float, V1, "size may be number, and must be integer"),
    (V1, dict[str, Any], ""),
    (dict[str, Any], V1, "name may be missing, and is required"),
    (V1, str, "the content is application/json, and must be text/plain"),
    (Item, Item, ""),
    (dict[str, int], dict[str, str], ".* may be integer, and must be string"),
]


@pytest.mark.parametrize(("before", "after", "problem"), CHANGES)
def test_a_handler_must_accept_what_was_published(before: Any, after: Any, problem: str) -> None:
    """And a message that is sent must be accepted by its old readers: the same in the other direction."""
    lines = breaking(receiving(before), receiving(after))
    assert [line for line in lines if problem not in line] == []
    assert bool(lines) == bool(problem)
    assert [line.replace("orders.publish", "orders.g") for line in breaking(sending(after), sending(before))] == lines


def test_what_is_gone_breaks() -> None:
    """A group, a sender, and a handler's answer."""
    empty = document_of(lambda broker: None)
    assert breaking(receiving(V1), empty) == ["orders.g: it is gone, so its messages are handled no more"]
    assert breaking(sending(V1), empty) == ["orders.publish: it is gone, so its readers get nothing"]
    assert breaking(empty, receiving(V1)) == []

    def answering(kind: Any, **options: Any) -> dict[str, Any]:
        def handle(payload: str) -> Any: ...

        handle.__annotations__["return"] = kind
        return document_of(lambda broker: broker.handler("quotes", group="g", **options)(handle))

    assert breaking(answering(int, replies=True), answering(float, replies=True)) == [
        "quotes.g (answer): the payload may be number, and must be integer"
    ]
    assert breaking(answering(int, replies=True), answering(int)) == ["quotes.g (answer): there is none any more"]


def test_no_document_is_refused() -> None:
    """It says how to write one."""
    with pytest.raises(ConfigError, match="no AsyncAPI 3 document: write one with `rsmq docs"):
        breaking({"asyncapi": "2.6.0"}, {"asyncapi": "3.0.0"})


def test_schemas_that_contain_themselves_end() -> None:
    """Two models that refer to each other."""
    definitions = {"A": {"type": "object", "properties": {"b": {"$ref": "#/d/B"}}},
                   "B": {"type": "object", "properties": {"a": {"$ref": "#/d/A"}}}}  # fmt: skip
    assert list(Comparison(definitions, definitions).problems({"$ref": "#/d/A"}, {"$ref": "#/d/A"})) == []
