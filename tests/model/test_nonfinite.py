"""NaN and infinity: JSON has neither, so no payload with them is published."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from math import inf, nan
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, field_serializer
from pydantic.dataclasses import dataclass as pydantic_dataclass

from rsmq import Broker, NotJson, Settings
from rsmq.model.message import JSON, TEXT, encode_payload


class Float64(float):
    """A number of another library, as numpy has."""


@dataclass
class Plain:
    price: Any


@pydantic_dataclass
class Checked:
    price: float | None


class Priced(BaseModel):
    price: float | None
    others: list[float] = []
    asked: Any = None


class AsText(BaseModel):
    model_config = ConfigDict(ser_json_inf_nan="strings")
    price: float | None
    note: None = None


class AsNull(BaseModel):
    model_config = ConfigDict(ser_json_inf_nan="null")
    price: float


class Written(BaseModel):
    price: float
    secret: float = Field(default=inf, exclude=True)
    note: None = None

    @field_serializer("price")
    def words(self, price: float) -> str:
        return str(price)


@pytest.mark.parametrize("number", [nan, inf, -inf, Float64("nan")])
@pytest.mark.parametrize(
    ("make", "where"),
    [
        (lambda x: x, "its top"),
        (lambda x: {"price": x}, "[name 1]"),
        (lambda x: {"note": None, "lines": [{"price": 1.5}, {"price": x}]}, "[name 2].1.[name 1]"),
        (lambda x: (None, x), "1"),
        (Plain, "price"),
        (Checked, "price"),
        (lambda x: Priced(price=x), "price"),
        (lambda x: Priced(price=None, others=[1, x]), "others.1"),
        (lambda x: {"order": [Priced(price=x)]}, "[name 1].0.price"),
        (lambda x: Plain(Priced(price=x)), "price.price"),
        (lambda x: Priced(price=1, asked=Plain(Priced(price=x))), "asked.price.price"),
    ],
)
def test_number_that_json_does_not_have_is_refused(number: float, make: Any, where: str) -> None:
    """NaN and infinity would become null without an error. The error says where they are."""
    with pytest.raises(NotJson) as caught:
        encode_payload(make(number))
    assert caught.value.where == where
    assert f"NaN or infinity at {where}," in str(caught.value)


def test_number_that_a_model_writes_its_own_way_is_not_refused() -> None:
    """A model that says what becomes of them is taken at its word, and text is only text."""
    assert encode_payload(AsText(price=nan)) == (b'{"price":"NaN","note":null}', JSON)
    assert encode_payload([AsNull(price=nan)]) == (b'[{"price":null}]', JSON)
    assert encode_payload(Written(price=nan)) == (b'{"price":"nan","note":null}', JSON)
    assert encode_payload({"name": "NaN", "null": None}) == (b'{"name":"NaN","null":null}', JSON)
    assert encode_payload("NaN") == (b"NaN", TEXT)


CIRCULAR: dict[str, Any] = {}
CIRCULAR["self"] = CIRCULAR


@pytest.mark.parametrize("payload", [object(), {"a": range(3)}, CIRCULAR, "\ud800", ["\ud800"], {"a": b"\xff"}],
                         ids=["object", "range", "circle", "text", "text inside", "bytes inside"])  # fmt: skip
def test_payload_that_cannot_be_written_is_refused_with_what_to_do(payload: Any) -> None:
    """Before, it was an error of pydantic, which did not say what can be published."""
    with pytest.raises(
        NotJson, match=r"a payload of type \w+ cannot be written \(.+\): publish bytes, text, or"
    ) as caught:
        encode_payload(payload)
    assert caught.value.where == ""
    cause = caught.value.__cause__
    assert cause is None if payload == "\ud800" else isinstance(cause, ValueError)  # Python's would have the text


@given(st.recursive(st.none() | st.floats() | st.text(max_size=3), lambda inner: st.lists(inner) | st.dictionaries(
    st.text(max_size=3), inner), max_leaves=8))  # fmt: skip
def test_payload_is_refused_exactly_if_json_refuses_it(payload: Any) -> None:
    """Python's own encoder agrees."""
    try:
        json.dumps(payload, allow_nan=False)
    except ValueError:
        with pytest.raises(NotJson):
            encode_payload(payload)
    else:
        data, kind = encode_payload(payload)
        assert kind == TEXT or json.loads(data) == payload


@pytest.fixture
async def broker(settings: Settings) -> AsyncIterator[Broker]:
    """A connected broker."""
    async with Broker(replace(settings, preflight="warn")) as broker:
        yield broker


WAYS: dict[str, Callable[[Broker, Any], Awaitable[Any]]] = {
    "publish": lambda broker, bad: broker.publish("t", bad),
    "with an id": lambda broker, bad: broker.publish("t", bad, message_id="m"),
    "delayed": lambda broker, bad: broker.publish("t", bad, delay=timedelta(hours=1)),
    "many": lambda broker, bad: broker.publish_many("t", [bad, bad]),
    "letter": lambda broker, bad: broker.send("phone", bad),
    "letters": lambda broker, bad: broker.send_many([("phone", bad)]),
}


@pytest.mark.parametrize("way", WAYS)
async def test_no_way_to_publish_takes_nan(broker: Broker, way: str) -> None:
    """Nothing is stored, and the next message is."""
    with pytest.raises(NotJson, match=r"NaN or infinity at \[name 1\], and JSON has neither: publish None or a text"):
        await WAYS[way](broker, {"price": nan})
    assert await broker.client.execute_command("KEYS", f"{broker.settings.prefix}:{{*.*}}*") == []
    assert await broker.client.execute_command("KEYS", f"{broker.settings.prefix}:{{phone}}*") == []
    await WAYS[way](broker, {"price": None})
