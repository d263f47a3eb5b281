"""What a typed topic of structs, Protobuf messages or Avro records takes is read back equal, or refused with what to
do. Random types and values; no text of an error has a value."""

from __future__ import annotations

import re
from collections import Counter
from datetime import UTC, datetime
from decimal import Decimal
from typing import Annotated, Any, Final, Generic, TypeVar
from uuid import UUID

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from rsmq import Broker, ConfigError, NotJson
from rsmq.broker.asyncapi import asyncapi
from rsmq.handler.payload import decoder_for, formats_for
from rsmq.model.message import encode_payload

SECRET: Final = "hunter2"
TEXT, LONGS = st.text(st.characters(), max_size=4), st.integers(-(1 << 63), (1 << 63) - 1)


def is_taken(kind: Any, value: Any) -> bool:
    """Whether a topic of this type takes a value, which is then read back equal."""
    topic, refusal = Broker().topic("t", kind), ""
    try:
        assert topic.checked(value) is value
    except (ConfigError, NotJson) as error:
        refusal = str(error)
    if refusal:
        assert re.search(r"Publish what|: publish |: set what", refusal)
        return False
    stored, content_type = encode_payload(value)
    back = formats_for(kind).get(content_type, decoder_for(kind))(stored)
    assert back == value or ("nan" in repr(value) and encode_payload(back) == (stored, content_type))
    return True


# -- msgspec -----------------------------------------------------------------------------------------------------------

V = TypeVar("V")


class Boxed(msgspec.Struct, Generic[V]):
    """A generic struct."""

    inner: V


LEAVES: Final[list[tuple[Any, Any]]] = [
    (int, st.integers()), (str, TEXT), (bool, st.booleans()), (float, st.floats()), (bytes, st.binary(max_size=4)),
    (Decimal, st.decimals(allow_nan=False, allow_infinity=False)), (UUID, st.uuids()),
    (datetime, st.datetimes(timezones=st.just(UTC))),
    (Annotated[int, msgspec.Meta(ge=0, le=9)], st.integers(-1, 10)),  # checked when it is read
    (Any, st.datetimes() | st.tuples(st.integers()) | st.integers()),  # only some of it comes back
]  # fmt: skip


@st.composite
def parts(draw: st.DrawFn, depth: int) -> tuple[Any, Any]:
    """A type for a field of a struct, and a strategy for its values."""
    forms = ["leaf", "list", "dict", "tuple", "optional", "generic", "struct", "tagged"]
    form = draw(st.sampled_from(forms if depth == 0 else forms[:6] if depth == 1 else forms[:1]))
    if form == "leaf":
        return draw(st.sampled_from(LEAVES))
    if form == "struct":
        return draw(structs(depth + 1))
    if form == "tagged":
        (one, ones), (two, twos) = draw(structs(depth + 1, tag="one")), draw(structs(depth + 1, tag="two"))
        return one | two, ones | twos
    kind, values = draw(parts(depth + 1))
    if form == "list":
        return list[kind], st.lists(values, max_size=2)
    if form == "dict":
        return dict[str, kind], st.dictionaries(TEXT, values, max_size=2)
    if form == "tuple":
        return tuple[kind, int], st.tuples(values, st.integers(0, 9))
    if form == "generic":
        return Boxed[kind], st.builds(Boxed, values)
    return kind if kind is Any else kind | None, values | st.none()


@st.composite
def structs(draw: st.DrawFn, depth: int = 0, tag: str | None = None) -> tuple[Any, Any]:
    """A class of msgspec with any options, and a strategy for its values."""
    chosen = {f"field_{n}": part for n, part in enumerate(draw(st.lists(parts(depth), min_size=1, max_size=3)))}
    names = ("frozen", "forbid_unknown_fields", "omit_defaults", "kw_only")
    options = draw(st.fixed_dictionaries({name: st.booleans() for name in names}))
    rename, is_list = draw(st.sampled_from([None, "camel", "upper"])), tag is None and draw(st.booleans())
    fields = [(name, kind) for name, (kind, _) in chosen.items()]
    made = msgspec.defstruct("Made", fields, rename=rename, tag=tag, array_like=is_list, **options)
    return made, st.builds(made, **{name: values for name, (_, values) in chosen.items()})


def test_struct_that_is_taken_is_read_back_equal() -> None:
    """One in another: tagged unions, generics, constraints, renamed, as arrays; as JSON and as MessagePack."""
    taken = Counter[bool]()

    @settings(max_examples=60, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def check(data: st.DataObject) -> None:
        kind, values = data.draw(structs())
        value = data.draw(values)
        is_read = is_taken(kind, value)
        taken[is_read] += 1
        if is_read:
            try:
                packed = msgspec.msgpack.encode(value)
            except OverflowError:  # MessagePack has no integer of more than 64 bits
                return
            assert formats_for(kind)["application/msgpack"](packed) == value

    check()
    assert taken.keys() == {True, False}


class Sent(msgspec.Struct, tag=True):
    """One of a union."""

    to: str


class Failed(msgspec.Struct, tag=True):
    """The other one."""

    why: str


class Anything(msgspec.Struct):
    """What its field holds is known when it is published."""

    inner: Any


class Model(BaseModel):
    """Of pydantic."""

    n: int


@pytest.mark.parametrize(
    ("kind", "value", "says"),
    [
        (Sent | Failed, Failed("no"), ""), (Sent | None, Sent("ada"), ""), (Sent | None, None, ""),
        (Boxed[Sent], Boxed(Sent("ada")), ""), (Boxed[int], Boxed(1), ""),
        (Boxed[Sent], Boxed(Failed("no")), "does not fit"), (Boxed[int], Boxed("x"), "does not fit"),
        (Anything, Anything(Sent("ada")), "inner is of type Sent, and would be read as dict"),
        (Anything, Anything((1,)), "inner is of type tuple, and would be read as list"),
        (list[Sent], [Sent("ada")], "cannot be written"),
    ],
    ids=lambda each: str(each)[-40:],
)  # fmt: skip
def test_type_that_is_made_of_structs_is_read(kind: Any, value: Any, says: str) -> None:
    """A union or a generic struct is a payload; a list of structs is read, and written by other publishers only."""
    topic = Broker().topic("t", kind)
    if says:
        with pytest.raises((ConfigError, NotJson), match=says):
            topic.checked(value)
    else:
        assert topic.checked(value) is value
        assert is_taken(kind, value)


def test_struct_beside_a_type_that_msgspec_cannot_read_is_refused() -> None:
    """With the reason, when the topic is declared."""
    with pytest.raises(ConfigError, match=r"msgspec cannot read .*Sent \| .*Model: .*unions containing a custom type"):
        Broker().topic("t", Sent | Model)


def test_document_of_the_broker_has_a_union_of_structs() -> None:
    """AsyncAPI: both schemas, and a name for the message."""
    broker = Broker()
    broker.topic("notes", Sent | Failed)
    found = asyncapi(broker, title="t", version="1")
    (message,) = found["channels"]["notes"]["messages"].values()
    assert (message["contentType"], len(message["payload"]["anyOf"])) == ("application/json", 2)
    assert {"Sent", "Failed"} <= found["components"]["schemas"].keys()
