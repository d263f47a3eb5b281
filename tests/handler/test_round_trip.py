"""What a typed topic or handler accepts, its own type reads back equal, or it is refused with what to do."""

from __future__ import annotations

import enum
import logging
import math
import re
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import InitVar, dataclass, field, make_dataclass
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from functools import cached_property
from ipaddress import IPv4Address
from pathlib import Path
from typing import Annotated, Any, Final, Generic, Literal, NamedTuple, NewType, TypeVar
from uuid import UUID
from zoneinfo import ZoneInfo

import anyio
import anyio.to_thread
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import VERSION as PYDANTIC
from pydantic import (
    AliasChoices,
    Base64Bytes,
    Base64Str,
    BaseModel,
    ConfigDict,
    Field,
    Json,
    PlainSerializer,
    PrivateAttr,
    Secret,
    SecretStr,
    computed_field,
    create_model,
    field_serializer,
    field_validator,
    model_serializer,
)
from pydantic_core import core_schema, from_json
from typing_extensions import TypedDict

from rsmq import Broker, ConfigError, NotJson, Router, Settings
from rsmq.handler.handler import build_handler
from rsmq.handler.payload import decoder_for, formats_for, refusal_of
from rsmq.model.message import encode_payload


class Colour(enum.Enum):
    RED = "r"
    BLUE = 2


class Line(BaseModel):
    sku: str = Field(alias="SKU")
    count: int
    price: Decimal
    weight: float


class Order(BaseModel):
    id: UUID
    lines: list[Line]
    at: datetime
    day: date
    took: timedelta
    colour: Colour
    note: str | int | None
    tags: set[str]
    raw: bytes
    pair: tuple[int, str]
    by: dict[int, float]


@dataclass
class Point:
    x: float
    y: int
    label: str | None = None


class Row(TypedDict):
    name: str
    points: list[Point]


class Pair(NamedTuple):
    first: int
    second: str


TEXT, FLOAT = st.text(st.characters()), st.floats()
LINES = st.builds(
    Line, SKU=TEXT, count=st.integers(), price=st.decimals(allow_nan=False, allow_infinity=False), weight=FLOAT
)
POINTS = st.builds(Point, x=FLOAT, y=st.integers(), label=TEXT | st.none())
ORDERS = st.builds(
    Order, id=st.uuids(), lines=st.lists(LINES, max_size=2), at=st.datetimes(timezones=st.just(UTC) | st.none()),
    day=st.dates(), took=st.timedeltas(), colour=st.sampled_from(Colour), note=TEXT | st.integers() | st.none(),
    tags=st.sets(TEXT, max_size=2), raw=st.binary(), pair=st.tuples(st.integers(), TEXT),
    by=st.dictionaries(st.integers(), FLOAT, max_size=2),
)  # fmt: skip
VALUES: Final[list[tuple[Any, Any]]] = [
    (Order, ORDERS), (Row, st.fixed_dictionaries({"name": TEXT, "points": st.lists(POINTS, max_size=2)})),
    (Pair, st.builds(Pair, st.integers(), TEXT)), (dict[str, Line], st.dictionaries(TEXT, LINES, max_size=2)),
    (float, FLOAT), (Decimal, st.decimals()), (datetime, st.datetimes()), (timedelta, st.timedeltas()),
    (time, st.times()), (bytes, st.binary()), (str, TEXT), (Line | Point, LINES | POINTS),
]  # fmt: skip
"""Types and their values, also those that JSON does not have."""


@pytest.mark.parametrize(("kind", "values"), VALUES, ids=[str(kind) for kind, _ in VALUES])
def test_what_is_published_is_read_back_equal_or_refused(kind: Any, values: Any) -> None:
    """At publish: NaN, infinity, lone surrogates, bytes that are no text."""
    decode = decoder_for(kind)

    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(values)
    def check(value: Any) -> None:
        try:
            data, _ = encode_payload(value)
        except NotJson:
            return
        assert decode(data) == value

    assert refusal_of(kind) == ""
    check()


LEAVES: Final[list[tuple[Any, Any]]] = [
    (int, st.integers()), (str, TEXT), (bool, st.booleans()), (float, FLOAT),
    (Decimal, st.decimals(allow_nan=False, allow_infinity=False)),
    (datetime, st.datetimes(timezones=st.just(UTC))), (UUID, st.uuids()), (bytes, st.binary(max_size=8)),
    (Colour, st.sampled_from(Colour)),
]  # fmt: skip


@st.composite
def types_and_values(draw: st.DrawFn, depth: int = 0) -> tuple[Any, Any]:
    """A type, made of others, and a strategy for its values."""
    forms = ["leaf", "list", "dict", "optional", "tuple", "model", "dataclass", "typed dict"]
    form = draw(st.sampled_from(forms if depth < 2 else forms[:1]))
    if form == "leaf":
        return draw(st.sampled_from(LEAVES))
    kind, values = draw(types_and_values(depth + 1))
    other, others = draw(types_and_values(depth + 1))
    made: dict[str, Callable[[], tuple[Any, Any]]] = {
        "list": lambda: (list[kind], st.lists(values, max_size=2)),
        "dict": lambda: (dict[str, kind], st.dictionaries(TEXT, values, max_size=2)),
        "optional": lambda: (kind | None, values | st.none()),
        "tuple": lambda: (tuple[kind, other], st.tuples(values, others)),
        "model": lambda: fields_of(create_model("Made", one=(kind, ...), two=(other, ...)), values, others),
        "dataclass": lambda: fields_of(make_dataclass("Made", [("one", kind), ("two", other)]), values, others),
        "typed dict": lambda: fields_of(TypedDict("Made", {"one": kind, "two": other}), values, others),  # type: ignore[operator]
    }
    return made[form]()


def fields_of(kind: Any, one: Any, two: Any) -> tuple[Any, Any]:
    """A type with two fields, and its values."""
    return kind, st.builds(kind, one=one, two=two)


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_what_any_type_accepts_is_read_back_equal_or_refused(data: st.DataObject) -> None:
    """Random types of pydantic, dataclasses and TypedDicts, one in another, with random values."""
    kind, values = data.draw(types_and_values())
    value = data.draw(values)
    try:
        stored, content_type = encode_payload(value)
    except NotJson:
        return
    assert refusal_of(kind) == ""
    assert formats_for(kind).get(content_type, decoder_for(kind))(stored) == value
    assert Broker().topic("t", kind).checked(value) is value


class Size(enum.StrEnum):
    LARGE = "l"


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (str | None, "text"), (str | None, None), (bytes | None, b"\xff"), (Literal["on", 1], "on"), (Size, Size.LARGE),
        (Annotated[str, Field(max_length=5)], "text"), (dict[str, int] | str, "{}"), (dict[str, int] | str, {"a": 1}),
    ],
)  # fmt: skip
def test_text_and_bytes_are_read_by_types_that_may_be_something_else(kind: Any, value: Any) -> None:
    """They are published as they are, not as JSON."""
    stored, content_type = encode_payload(value)
    found = formats_for(kind).get(content_type, decoder_for(kind))(stored)
    assert (found, type(found)) == (value, type(value))


class Doubled(BaseModel):
    number: int

    @field_validator("number", mode="before")
    @classmethod
    def double(cls, given: int) -> int:
        return 2 * given


class Shifted(BaseModel):
    number: Annotated[int, PlainSerializer(lambda given: given + 1)]


class Renamed(BaseModel):
    number: int

    @model_serializer
    def written(self) -> dict[str, int]:
        return {"other": self.number}


class OneWayBytes(BaseModel):
    model_config = ConfigDict(ser_json_bytes="base64")
    raw: bytes


class Seconds(BaseModel):
    model_config = ConfigDict(ser_json_timedelta="float")
    took: timedelta


class More(Line):
    more: str = "x"


class First(BaseModel):
    n: int = 0


class Second(BaseModel):
    n: int = 0


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")
    n: int = 0

    @computed_field  # type: ignore[prop-decorator]
    @property
    def twice(self) -> int:
        return 2 * self.n


T = TypeVar("T")


class Box(BaseModel, Generic[T]):
    inner: T


@dataclass
class Counted:
    """Its second part is made, and may be changed."""

    n: int
    made: int = field(init=False, default=7)


@dataclass
class Grown:
    n: int

    def __post_init__(self) -> None:
        self.n *= 2


class Some(TypedDict, total=False):
    a: int


class Mark(enum.Enum):
    TWO = 2
    PAIR = (1, 2)


def changed(value: Any, name: str, to: Any) -> Any:
    """A value with another part, which nothing checks."""
    object.__setattr__(value, name, to)
    return value


LINE = {"SKU": "a", "count": 1, "price": Decimal(1), "weight": 1.0}
WHEN = datetime(2026, 1, 2)
UNREAD: Final[list[tuple[Any, Any, str]]] = [
    (Doubled, Doubled(number=1), "number would be read as another int"),
    (Shifted, Shifted(number=1), "number would be read as another int"),
    (Renamed, Renamed(number=1), "number: Field required"),
    (Grown, Grown(1), "n would be read as another int"),
    (OneWayBytes, OneWayBytes(raw=b"\xff"), "raw would be read as another bytes"),
    (Seconds, Seconds(took=timedelta(days=100_000, microseconds=1)), "took would be read as another timedelta"),
    (Line, More(**LINE), "more would be lost"),
    (list[Line], [More(**LINE)], "0.more would be lost"),
    (First | Second, Second(n=1), "it is of type Second, and would be read as First"),
    (Open, Open(n=1), "twice would be read, and was not published"),
    (Box, Box(inner=First()), "inner is of type First, and would be read as dict"),
    (Counted, changed(Counted(1), "made", 8), "made would be read as another int"),
    (Line, changed(Line(**LINE), "count", "x"), "count: Input should be a valid integer"),
    (First, changed(First(), "n", 1.5), "n: Input should be a valid integer"),
    (Some, {"a": 1, "b": 2}, "[name 2] would be lost"),
    (Mark, Mark.PAIR, "does not fit"),
    (dict[Mark, int], {Mark.TWO: 1}, "does not fit"),
    (Annotated[int, Field(gt=0)], 0, "greater than 0"),
    (dict, {1: 2}, "[name 1] is a name of type int, and would be read as str"),
    (dict[Any, int], {1: 1, "1": 2}, "[name 1] is a name"),
    (dict[tuple[int, int], int], {(1, 2): 3}, "does not fit"),
    (dict[float, int], {math.inf: 1}, "does not fit"),
    (dict[str, Any], {"at": WHEN}, "[name 1] is of type datetime, and would be read as str"),
    (list, [(1, 2)], "0 is of type tuple"),
    (str | Decimal, Decimal("1.5"), "it is of type Decimal, and would be read as str"),
    (Sequence[int], (1, 2), "it is of type tuple, and would be read as list"),
    (Iterable[int], [1], "it is of type list"),
    (int, "1", "it is of type str, and would be read as int"),
    (str, b"x", "it is of type bytes"),
    (bytes, "x", "it is of type str"),
    (tuple[int, ...], [1], "it is of type list, and would be read as tuple"),
    (date, datetime(2026, 1, 2, 3), "does not fit date"),
    (datetime, datetime(2026, 1, 2, tzinfo=timezone(timedelta(seconds=30))), "it would be read as another datetime"),
    (int, 10**4300, "more than 4300 digits"),
]


@pytest.mark.parametrize(
    ("kind", "value", "says"), UNREAD, ids=[f"{n}-{says[:30]}" for n, (_, _, says) in enumerate(UNREAD)]
)
def test_value_that_its_type_does_not_read_back_is_refused_by_its_topic(kind: Any, value: Any, says: str) -> None:
    """Nothing of the type shows it. The text names the part, and shows no value."""
    topic = Broker().topic("orders", kind)
    with pytest.raises((ConfigError, NotJson), match=re.escape(says)):
        topic.checked(value)


class Cached(BaseModel):
    n: int
    _seen: int = PrivateAttr(default=0)

    @cached_property
    def large(self) -> list[int]:
        return [self.n]


class Base64(BaseModel):
    text: Base64Str
    raw: Base64Bytes


class Hex(BaseModel):
    model_config = ConfigDict(ser_json_bytes="hex", val_json_bytes="hex", ser_json_inf_nan="strings")
    raw: bytes
    number: float
    parts: frozenset[UUID]
    when: datetime


class Uncompared:
    """No `==` compares it."""

    def __init__(self, n: int) -> None:
        self.n = n

    @classmethod
    def __get_pydantic_core_schema__(cls, _source: Any, _handler: Any) -> Any:
        written = core_schema.plain_serializer_function_ser_schema(lambda each: each.n)
        return core_schema.no_info_after_validator_function(cls, core_schema.int_schema(), serialization=written)


class Holder(BaseModel):
    model_config = ConfigDict(arbitrary_types_allowed=True)
    one: Uncompared


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"


class Dog(BaseModel):
    kind: Literal["dog"] = "dog"


CACHED = Cached(n=1)
CACHED._seen = 5
assert CACHED.large
ZONE = ZoneInfo("Europe/Berlin")
READ: Final[list[tuple[Any, Any]]] = [
    (Cached, CACHED),
    (Base64, Base64(text="aGk=", raw=b"aGk=")),
    (Counted, Counted(1)),
    (Some, {}),
    (Holder, Holder.model_validate({"one": 1})),
    (Hex, Hex(raw=b"\xff", number=math.nan, parts=frozenset({UUID(int=1)}), when=WHEN)),
    (datetime, datetime(2026, 10, 25, 2, 30, tzinfo=ZONE)),
    (datetime, datetime(2026, 10, 25, 2, 30, fold=1, tzinfo=ZONE)),
    (Annotated[Cat | Dog, Field(discriminator="kind")], Dog()),
    (Box[First], Box[First](inner=First())),
    (float, 1),
    (int, True),
    (Path, Path("a/b")),
    (NewType("Id", int), 3),
    (set, {1}),
    (dict[date, int], {date(2026, 1, 2): 1}),
    (dict[bytes, int], {b"a": 1}),
    (str | bytes, b"x"),
    (int, -(10**4298)),
    (str, "1" * 9000),
    (defaultdict[str, int], defaultdict(int, a=1)),
    (Any, WHEN),
    (object, WHEN),
    (bytes, memoryview(b"abc")),
]


@pytest.mark.parametrize(("kind", "value"), READ, ids=[f"{n}-{kind}"[:40] for n, (kind, _) in enumerate(READ)])
def test_value_that_its_type_reads_back_is_taken_by_its_topic(kind: Any, value: Any) -> None:
    """Also where no `==` says so: private attributes, hours that occur twice, NaN, objects that cannot be compared."""
    assert Broker().topic("orders", kind).checked(value) is value


@pytest.mark.parametrize(("kind", "value"), [(IPv4Address, IPv4Address("10.0.0.1")), (deque[int], deque([1]))])
def test_value_that_only_a_newer_pydantic_writes_is_taken_or_refused_with_what_to_do(kind: Any, value: Any) -> None:
    """From 2.14 on it is taken; before, nothing of it is stored."""
    topic = Broker().topic("orders", kind)
    if PYDANTIC.startswith(("2.12.", "2.13.")):
        with pytest.raises(NotJson, match="publish bytes, text, or what JSON has a form for"):
            topic.checked(value)
    else:
        assert topic.checked(value) is value


class Inner(BaseModel):
    token: SecretStr


class Revealed(Inner):
    @field_serializer("token")
    def reveal(self, token: SecretStr) -> str:
        return token.get_secret_value()


class Outer(BaseModel):
    inners: dict[str, list[Inner]]


class Masked(BaseModel):
    number: Secret[int]


class Text(BaseModel):
    rows: Json[list[int]]


class Hidden(BaseModel):
    kept: int
    left: int = Field(default=0, exclude=True)


class ReadBy(BaseModel):
    name: str = Field(default="", validation_alias="Name")


class WrittenBy(BaseModel):
    name: str = Field(default="", serialization_alias="Name")


class Choices(BaseModel):
    name: str = Field(default="", validation_alias=AliasChoices("new", "old"), serialization_alias="old")


class ByName(BaseModel):
    model_config = ConfigDict(populate_by_name=True)
    name: str = Field(default="", validation_alias="Name")


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")
    one: int

    @computed_field  # type: ignore[prop-decorator]
    @property
    def two(self) -> int:
        return 2 * self.one


class Loose(Strict):
    model_config = ConfigDict(extra="ignore")


@dataclass
class Initial:
    kept: int
    gone: InitVar[int]


class Login(TypedDict):
    token: SecretStr


@pytest.mark.parametrize(("kind", "says"), [
    (Inner, "secret token"), (Outer, "secret inners.token"), (Masked, "secret number"), (list[Inner], "secret token"),
    (Login, "secret token"), (Text, "rows is Json"), (Hidden, "left is excluded"), (ReadBy, "read as 'Name'"),
    (WrittenBy, "written as 'Name'"), (Strict, "two is computed"), (Initial, "gone is an InitVar"),
    (Order | Inner, "secret token"),
])  # fmt: skip
def test_type_that_does_not_read_what_it_writes_is_refused_by_its_topic(
    kind: Any, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Before anything is sent; a handler of it says so in the log."""
    topic = Broker().topic("logins", kind)
    with pytest.raises(ConfigError, match=says):
        topic.publish_sync(None)

    async def handle(payload: Any) -> None: ...

    with caplog.at_level(logging.WARNING):
        build_handler(handle, "logins", group="g", payload=kind)
    assert says in caplog.text


async def test_broker_refuses_what_its_handler_would_not_read_back(server_url: str, prefix: str) -> None:
    """Of a type that does not read what it writes, an object of exactly that type: by each way to publish. Everything
    else goes on, and another value of the type, which comes back."""
    broker = Broker(Settings(url=server_url, prefix=prefix, preflight="warn"))
    router = Router()

    @broker.handler("hidden", group="g")
    async def hidden(payload: Hidden) -> None: ...

    @router.handler("logins", group="g", batch=5)
    async def logins(payloads: list[ReadBy]) -> None: ...

    broker.include(router, prefix="a.")
    lost = r"would not come back from topic '{}' as it is: {}"
    async with broker:
        with pytest.raises(ConfigError, match=lost.format("hidden", "left would be read as another int")):
            await broker.publish("hidden", Hidden(kept=1, left=5))
        with pytest.raises(ConfigError, match=lost.format("a.logins", "name would be")):
            await broker.publish_many("a.logins", [ReadBy(Name="ada")])
        with pytest.raises(ConfigError, match="would not come back"):
            await anyio.to_thread.run_sync(broker.publish_sync, "hidden", Hidden(kept=1, left=5))
        with pytest.raises(NotJson, match="the secret at token"):
            await broker.publish("elsewhere", Inner(token=SecretStr("x")))
        await broker.publish("hidden", Hidden(kept=1))
        await broker.publish("hidden", {"kept": 1, "left": 5})
        await broker.publish("elsewhere", Hidden(kept=1, left=5))
        await broker.publish("a.logins", {"Name": "ada"})


@pytest.mark.parametrize("kind", [Revealed, Choices, ByName, Loose, Order, Row, Point, Pair, dict[str, Revealed]])
def test_type_that_reads_what_it_writes_is_taken(kind: Any) -> None:
    """Also one that its user has mended."""
    assert refusal_of(kind) == ""


LEVELS: dict[str, Callable[[int, Any], Any]] = {
    "arrays": lambda _, value: [value],
    "objects": lambda _, value: {"in": value},
    "both": lambda level, value: {"in": value} if level % 2 else [value],
    "rows": lambda level, value: [{"n": level}] * 3 + [value],
    "texts with brackets": lambda level, value: ["]" * (level % 3), value, "{" * (level % 5)],
}


@pytest.mark.parametrize("form", LEVELS)
@pytest.mark.parametrize("levels", [199, 200, 201, 202, 250, 300])
def test_depth_that_no_reader_takes_is_refused_at_publish(form: str, levels: int) -> None:
    """A reader takes 200 levels. What it takes is not refused."""
    deep: Any = {"n": 1}
    for level in range(levels - 1):
        deep = LEVELS[form](level, deep)
    if levels <= 200:
        assert from_json(encode_payload(deep)[0]) == deep
    else:
        with pytest.raises(NotJson):
            encode_payload(deep)


@pytest.mark.parametrize("payload", [[{"n": [n]} for n in range(1000)], ["{[" * 300] * 3, [[]] * 1000, "[" * 1000])
def test_many_brackets_are_not_deep(payload: Any) -> None:
    """A long list of objects, texts with brackets."""
    assert encode_payload(payload)[0]
