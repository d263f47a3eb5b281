"""What a typed topic of structs, Protobuf messages or Avro records takes is read back equal, or refused with what to
do. Random types and values; no text of an error has a value."""

from __future__ import annotations

import enum
import math
import re
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Annotated, Any, Final, Generic, Literal, TypeVar
from uuid import UUID

import msgspec
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from rsmq import Broker, ConfigError, NotJson
from rsmq.broker.asyncapi import asyncapi
from rsmq.codecs import avro_record
from rsmq.errors import Malformed
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
    assert taken[True]  # of sixty values one to twelve are refused, and now and then none: refusals have tests below


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
        (list[Sent], [Sent("ada")], ""),
    ],
    ids=lambda each: str(each)[-40:],
)  # fmt: skip
def test_type_that_is_made_of_structs_is_read(kind: Any, value: Any, says: str) -> None:
    """A union, a generic struct and a list of structs are payloads."""
    topic = Broker().topic("t", kind)
    if says:
        with pytest.raises((ConfigError, NotJson), match=says):
            topic.checked(value)
    else:
        assert topic.checked(value) is value
        assert is_taken(kind, value)


@pytest.mark.parametrize(
    ("kind", "value", "is_read"),
    [
        (list[Sent], [Sent("a")], True), (dict[str, Sent], {"a": Sent("a")}, True),
        (tuple[Sent, ...], (Sent("a"),), True), (dict[str, list[Sent]], {"a": [Sent("a"), Sent("b")]}, True),
        (str | Sent, Sent("a"), True), (str | Sent, "{}", True),
        (str | Sent | None, None, True), (bytes | Sent, b"\xff", True), (bytes | Sent, Sent("a"), True),
        (Literal["x"] | Sent, "x", True), (Literal["x"] | Sent, "y", False), (list[Sent], [Failed("no")], False),
        (list[Boxed[float]], [Boxed(math.nan)], False), (list[Sent], [Sent("a"), object()], False),
    ],
)  # fmt: skip
def test_containers_and_unions_of_structs_are_published_and_read(kind: Any, value: Any, is_read: bool) -> None:
    """Lists, dicts and tuples as JSON, text and bytes as they are. What would not come back is refused."""
    assert is_taken(kind, value) == is_read


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


# -- Protobuf ----------------------------------------------------------------------------------------------------------


def classes_of_protobuf() -> tuple[Any, Any, Any]:
    """As protoc makes them: one with maps, a oneof and an enum, a newer one with more fields, one that requires one."""
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="kinds.proto", package="kinds", syntax="proto3")
    colour = file.enum_type.add(name="Colour")
    colour.value.add(name="NONE", number=0)
    colour.value.add(name="RED", number=1)
    part = file.message_type.add(name="Part")
    part.field.add(name="n", number=1, type=kinds.TYPE_INT64)
    part.field.add(name="ratio", number=2, type=kinds.TYPE_DOUBLE)
    whole = file.message_type.add(name="Whole")
    entry = whole.nested_type.add(name="ByEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, type=kinds.TYPE_STRING)
    entry.field.add(name="value", number=2, type=kinds.TYPE_MESSAGE, type_name=".kinds.Part")
    whole.oneof_decl.add(name="one")
    for number, (name, kind, more) in enumerate(
        [
            ("by", kinds.TYPE_MESSAGE, {"label": kinds.LABEL_REPEATED, "type_name": ".kinds.Whole.ByEntry"}),
            ("parts", kinds.TYPE_MESSAGE, {"label": kinds.LABEL_REPEATED, "type_name": ".kinds.Part"}),
            ("word", kinds.TYPE_STRING, {"oneof_index": 0}), ("number", kinds.TYPE_INT32, {"oneof_index": 0}),
            ("colour", kinds.TYPE_ENUM, {"type_name": ".kinds.Colour"}), ("raw", kinds.TYPE_BYTES, {}),
            ("small", kinds.TYPE_FLOAT, {}),
        ], 1,
    ):  # fmt: skip
        whole.field.add(name=name, number=number, type=kind, **more)  # type: ignore[arg-type]
    newer = file.message_type.add(name="Newer")
    newer.field.add(name="raw", number=6, type=kinds.TYPE_BYTES)
    newer.field.add(name="later", number=99, type=kinds.TYPE_STRING)
    older = descriptor_pb2.FileDescriptorProto(name="needs.proto", package="kinds", syntax="proto2")
    older.message_type.add(name="Needs").field.add(
        name="n", number=1, type=kinds.TYPE_INT32, label=kinds.LABEL_REQUIRED
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)  # type: ignore[no-untyped-call]
    pool.Add(older)  # type: ignore[no-untyped-call]
    whole_class, newer_class, needs_class = (
        message_factory.GetMessageClass(pool.FindMessageTypeByName(f"kinds.{name}"))
        for name in ("Whole", "Newer", "Needs")
    )
    return whole_class, newer_class, needs_class


Whole, Newer, Needs = classes_of_protobuf()
WORDS = st.text(max_size=4)
PARTS = st.fixed_dictionaries({}, optional={"n": LONGS, "ratio": st.floats()})
WHOLES = st.fixed_dictionaries({}, optional={
    "by": st.dictionaries(WORDS, PARTS, max_size=2), "parts": st.lists(PARTS, max_size=2), "raw": st.binary(max_size=4),
    "colour": st.integers(0, 5), "small": st.floats(),
})  # fmt: skip
ONES = st.none() | st.tuples(st.just("word"), WORDS) | st.tuples(st.just("number"), st.integers(-9, 9))


@settings(max_examples=50, suppress_health_check=list(HealthCheck))
@given(WHOLES, ONES, st.booleans())
def test_message_of_protobuf_is_read_back_equal(
    values: dict[str, Any], one: tuple[str, Any] | None, more: bool
) -> None:
    """Maps, a oneof, NaN, numbers of an enum that have no name, and fields that a newer publisher has set."""
    message = Whole(**values, **dict([one] if one else []))
    if more:
        message.MergeFromString(Newer(later="x").SerializeToString())
    assert is_taken(Whole, message)
    stored, content_type = encode_payload(message)
    back = formats_for(Whole)[content_type](stored)
    assert back.WhichOneof("one") == message.WhichOneof("one")
    assert Newer.FromString(back.SerializeToString()).later == ("x" if more else "")


def test_message_of_protobuf_without_a_required_field_is_refused() -> None:
    """It names the field; with it the message is taken, and one of another class is not."""
    with pytest.raises(NotJson, match=r"Needs cannot be written \(.*\bn\b.*\): set what its \.proto file asks for"):
        Broker().topic("t", Needs).checked(Needs())
    assert is_taken(Needs, Needs(n=1))
    with pytest.raises(ConfigError, match=r"publish Whole\(\.\.\.\)"):
        Broker().topic("t", Whole).checked(Newer())


# -- Avro --------------------------------------------------------------------------------------------------------------


def record(name: str, fields: dict[str, Any]) -> dict[str, Any]:
    """A schema; a tuple is a type with a default."""
    return {"type": "record", "name": name, "fields": [
        {"name": each, "type": kind[0], "default": kind[1]} if isinstance(kind, tuple) else {"name": each, "type": kind}
        for each, kind in fields.items()
    ]}  # fmt: skip


@avro_record(
    record("Trip", {
        "choice": ["null", "string", "long", "double"], "at": {"type": "long", "logicalType": "timestamp-millis"},
        "exact": {"type": "long", "logicalType": "timestamp-micros"}, "day": {"type": "int", "logicalType": "date"},
        "price": {"type": "bytes", "logicalType": "decimal", "precision": 6, "scale": 2},
        "id": {"type": "string", "logicalType": "uuid"}, "counts": {"type": "map", "values": "long"},
        "flags": {"type": "array", "items": ["null", "boolean"]},
        "grade": {"type": "enum", "name": "Grade", "symbols": ["A", "B"]}, "small": "float",
        "note": (["null", "string"], None), "tries": ("long", 3),
    })
)  # fmt: skip
@dataclass
class Trip:
    """Unions, logical types and defaults."""

    choice: str | int | float | None
    at: datetime
    exact: datetime
    day: date
    price: Decimal
    id: UUID
    counts: dict[str, int]
    flags: list[bool | None]
    grade: str
    small: float
    note: str | None = None
    tries: int = 3


GOOD: Final[dict[str, Any]] = {
    "choice": None, "at": datetime(2026, 1, 2, tzinfo=UTC), "exact": datetime(2026, 1, 2, tzinfo=UTC),
    "day": date(2026, 1, 2), "price": Decimal("1.10"), "id": UUID(int=7), "counts": {}, "flags": [], "grade": "A",
    "small": 0.5,
}  # fmt: skip
TIMES = st.datetimes(datetime(1900, 1, 1), datetime(2100, 1, 1), timezones=st.just(UTC) | st.none())
RANDOM: Final[dict[str, Any]] = {
    "choice": st.none() | TEXT | st.integers() | st.floats() | st.booleans(), "at": TIMES, "exact": TIMES,
    "day": st.dates(), "price": st.decimals(min_value=-99999, max_value=99999, places=3) | st.just(Decimal("NaN")),
    "counts": st.dictionaries(TEXT, st.integers(), max_size=2), "flags": st.lists(st.none() | st.booleans()),
    "grade": st.sampled_from("ABC"), "small": st.floats(width=32) | st.floats(), "id": st.uuids(),
    "note": st.none() | TEXT, "tries": LONGS,
}  # fmt: skip


def test_record_of_avro_that_is_taken_is_read_back_equal() -> None:
    """Its union, logical types and defaults; what rounds or has no form in the schema is refused."""
    taken = Counter[bool]()

    @settings(max_examples=80, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def check(data: st.DataObject) -> None:
        names = data.draw(st.lists(st.sampled_from(sorted(RANDOM)), max_size=3, unique=True))
        taken[is_taken(Trip, Trip(**{**GOOD, **{name: data.draw(RANDOM[name]) for name in names}}))] += 1

    check()
    assert taken.keys() == {True, False}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, ""), ({"choice": 5}, ""), ({"choice": 1.5}, ""), ({"choice": True}, "does not fit its schema at choice"),
        ({"at": GOOD["at"] + timedelta(microseconds=1)}, "at would be read as another datetime"),
        ({"at": datetime(2026, 1, 2, tzinfo=timezone(timedelta(hours=5)))}, ""), ({"small": math.nan}, ""),
        ({"small": 0.1}, "small would be read as another float"), ({"price": Decimal("1.105")}, "its schema: publish"),
        ({"grade": "C"}, "its schema: publish what the schema has a form for"), ({"tries": 1 << 63}, "its schema"),
    ],
    ids=str,
)  # fmt: skip
def test_record_of_avro_that_its_schema_changes_is_refused(changes: dict[str, Any], says: str) -> None:
    """A millisecond, a float of 32 bits, two places of a decimal: what is lost is named."""
    value = Trip(**{**GOOD, **changes})
    if not says:
        assert is_taken(Trip, value)
        return
    with pytest.raises((ConfigError, NotJson), match=says):
        Broker().topic("t", Trip).checked(value)


# -- no values in texts ------------------------------------------------------------------------------------------------


class Way(enum.Enum):
    """Of an enum of texts."""

    AIR = "air"


class Strict(msgspec.Struct, tag="strict", forbid_unknown_fields=True):
    """Each field has its own error."""

    way: Way = Way.AIR
    word: Literal["x"] = "x"
    at: datetime | None = None
    counts: dict[int, int] = field(default_factory=dict)


@pytest.mark.parametrize(
    ("kind", "data", "where"),
    [
        (Strict, '{"type": "strict", "way": "hunter2"}', "at `$.way`"), (Strict, '{"type": "hunter2"}', "at `$.type`"),
        (Strict, '{"type": "strict", "word": "hunter2 - at `$.hunter2`"}', "at `$.word`"),
        (Strict, '{"type": "strict", "hunter2": 1}', "unknown field"),
        (Strict, '{"type": "strict", "counts": {"hunter2": 1}}', "in `$.counts`"),
        (Strict | Sent, '{"type": "hunter2"}', "at `$.type`"), (Strict, "hunter2", "malformed"),
        (Whole, '{"parts": [{"n": "hunter2"}]}', "at parts.n"), (Whole, '{"by": {"hunter2": {"n": []}}}', "at by.n"),
        (Whole, '{"raw": ["hunter2"]}', "at raw"), (Whole, '{"parts": {"hunter2": 1}}', "at parts"),
        (Whole, "hunter2", "cannot be read"), (Trip, '{"choice": ["hunter2"]}', "choice"),
    ],
)  # fmt: skip
def test_error_of_a_reader_has_no_value(kind: Any, data: str, where: str) -> None:
    """It goes into logs and dead letters."""
    with pytest.raises(Malformed) as caught:
        decoder_for(kind)(data.encode())
    assert SECRET not in str(caught.value)
    assert where in str(caught.value)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ["at", "day", "price", "id", "counts", "flags", "grade", "small", "tries"])
def test_error_of_a_publisher_of_avro_has_no_value(name: str) -> None:
    """Nor has a warning of pydantic."""
    with pytest.raises((ConfigError, NotJson)) as caught:
        Broker().topic("t", Trip).checked(Trip(**{**GOOD, name: SECRET}))
    assert SECRET not in str(caught.value)
