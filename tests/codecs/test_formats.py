"""Payloads that write themselves: msgspec structs, Protobuf messages, Avro records, each told by its content type."""

from __future__ import annotations

import math
import struct
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import attrs
import fastavro
import msgspec
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from hypothesis import given, settings
from hypothesis import strategies as st

from rsmq import Broker, ConfigError, Message
from rsmq.broker.asyncapi import asyncapi
from rsmq.codecs import Encrypt, Keyring, Offload, Zstd, avro_record
from rsmq.errors import CannotDecode, Malformed, NotJson
from rsmq.handler.payload import decoder_for, formats_for
from rsmq.model.message import encode_payload
from tests.contract.witness import Witness, add, settled


class Item(msgspec.Struct, rename="camel", omit_defaults=True):
    """A struct in a struct."""

    item_name: str
    at: datetime
    price: Decimal = Decimal(0)


class Order(msgspec.Struct, tag=True):
    """With what JSON has no form for of its own."""

    n: int
    ratio: float = 0.0
    note: str | None = None
    raw: bytes = b""
    tags: frozenset[str] = frozenset()
    items: tuple[Item, ...] = ()


def parcel_class() -> Any:
    """As protoc makes it: `message Parcel { int64 n = 1; string note = 2; repeated string tags = 3; }`."""
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="parcel.proto", package="test", syntax="proto3")
    made = file.message_type.add(name="Parcel")
    for number, (name, kind, label) in enumerate(
        [("n", kinds.TYPE_INT64, kinds.LABEL_OPTIONAL), ("note", kinds.TYPE_STRING, kinds.LABEL_OPTIONAL),
         ("tags", kinds.TYPE_STRING, kinds.LABEL_REPEATED)], 1,
    ):  # fmt: skip
        made.field.add(name=name, number=number, type=kind, label=label)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)  # type: ignore[no-untyped-call]
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("test.Parcel"))


Parcel = parcel_class()
OLD = {"type": "record", "name": "Flight", "fields": [{"name": "n", "type": "long"}]}
NEW = {**OLD, "fields": [*OLD["fields"], {"name": "gate", "type": ["null", "string"], "default": None}]}
LATER = {**NEW, "fields": [*NEW["fields"], {"name": "crew", "type": "int", "default": 0}]}


@avro_record(NEW, older=[OLD])
@dataclass
class Flight:
    """Its second field came later."""

    n: int
    gate: str | None = None


WHEN = datetime(2026, 1, 2, tzinfo=UTC)
VALUES: list[tuple[Any, str]] = [
    (Order(1, 0.5, "x", b"\xff", frozenset({"a"}), (Item("b", WHEN, Decimal("1.10")),)), "application/json"),
    (Parcel(n=1, note="x", tags=["a", "b"]), "application/x-protobuf"),
    (Flight(1, "A7"), "application/avro"),
]


def read(kind: type, data: bytes, content_type: str) -> Any:
    """As a handler with this annotation reads it."""
    return formats_for(kind).get(content_type, decoder_for(kind))(data)


@pytest.mark.parametrize(("value", "content_type"), VALUES, ids=lambda value: type(value).__name__)
def test_a_value_comes_back_equal(value: Any, content_type: str) -> None:
    """The content type says what was written; the same value has the same bytes."""
    data, written = encode_payload(value)
    assert (written, encode_payload(value)) == (content_type, (data, written))
    assert read(type(value), data, written) == value


FORMS = ("payload", "message", "batch")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("is_encrypted", [False, True], ids=["plain", "encrypted"])
@pytest.mark.parametrize("number", range(3), ids=["msgspec", "protobuf", "avro"])
async def test_a_backlog_of_two_formats_is_read_by_one_handler(
    broker: Broker, witness: Witness, number: int, is_encrypted: bool, form: str
) -> None:
    """JSON of another client, and what its own publisher writes, before and after encryption."""
    value: Any = VALUES[number][0]
    kind = type(value)
    codecs = [Zstd(above=0), Encrypt(Keyring({"k1": b"1" * 32}))] if is_encrypted else []
    mine = Broker(broker.settings, codecs=codecs)
    topic = mine.topic("t", kind)

    def note(found: Any) -> None:
        assert type(found) is kind
        witness.note(found.n)

    if form == "payload":

        @topic.handler(group="g", partitions=1)
        async def take(payload: Any) -> None:
            note(payload)
    elif form == "message":

        @topic.handler(group="g", partitions=1)
        async def take_both(payload: Any, message: Message) -> None:
            note(payload)
    else:

        @topic.handler(group="g", partitions=1, batch=10)
        async def take_batch(payloads: list[Any]) -> None:
            for each in payloads:
                note(each)

    async with mine:
        await topic.publish(value, headers={"mark": "x"})
        await topic.publish_many([value])
        text = b'{"type":"Order","n":7}' if number == 0 else b'{"n":7}'
        await add(mine, mine.keys.stream("t", 0), "data", text)
        packed = msgspec.msgpack.encode(Order(8)) if number == 0 else text
        kind_of = "application/msgpack" if number == 0 else "application/json"
        await add(mine, mine.keys.stream("t", 0), "data", packed, "type", kind_of)
        async with mine.running():
            await settled(mine, "t")
    assert sorted(witness.seen) == [1, 1, 7, 8 if number == 0 else 7]


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (Order(1, math.nan), "ratio"), (Order(1, math.inf), "ratio"), (Order(object()), "cannot be written"),
        (Flight("x"), "does not fit its schema"), (Flight(1 << 70), "does not fit its schema"),
    ],
)  # fmt: skip
def test_what_would_not_come_back_is_refused(value: Any, says: str) -> None:
    """At publish, with the field where it is known."""
    with pytest.raises(NotJson, match=says):
        encode_payload(value)


@pytest.mark.parametrize("kind", [Order, Parcel, Flight], ids=lambda kind: kind.__name__)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_bytes_are_decoded_or_malformed(kind: type, data: st.DataObject) -> None:
    """Random, cut and changed bytes under each content type: one of two errors, or a value of the type."""
    good = {Order: VALUES[0][0], Parcel: VALUES[1][0], Flight: VALUES[2][0]}[kind]
    whole = encode_payload(good)[0]
    at = data.draw(st.integers(0, len(whole)))
    raw = data.draw(st.sampled_from([whole[:at], whole[:at] + b"\xff\x00" + whole[at:]]) | st.binary(max_size=60))
    for content_type in (*formats_for(kind), "application/json"):
        with suppress(Malformed, CannotDecode):
            assert type(read(kind, raw, content_type)) is kind


def test_an_older_schema_is_read_as_the_new_one() -> None:
    """Its fields get their defaults. The fingerprint is that of Avro's specification."""
    import io

    stream = io.BytesIO()
    fastavro.schemaless_writer(stream, OLD, {"n": 4})
    canonical = fastavro.schema.to_parsing_canonical_form(OLD)
    head = b"\xc3\x01" + bytes.fromhex(fastavro.schema.fingerprint(canonical, "CRC-64-AVRO"))
    assert read(Flight, head + stream.getvalue(), "application/avro") == Flight(4)
    number = fastavro.schema.fingerprint(fastavro.schema.to_parsing_canonical_form("int"), "CRC-64-AVRO")
    assert struct.unpack("<Q", bytes.fromhex(number))[0] == 0x7275D51A3F395C8F
    with pytest.raises(Malformed, match="bytes too many"):
        read(Flight, head + stream.getvalue() + b"x", "application/avro")


def test_a_schema_that_is_not_known_yet_is_named() -> None:
    """The message waits for a reader that knows it, like one without its key."""
    later = Later(1, None, 2)
    data, _ = encode_payload(later)
    with pytest.raises(CannotDecode, match=f"schema {data[2:10].hex()}"):
        read(Flight, data, "application/avro")


@avro_record(LATER)
@dataclass
class Later:
    """What a newer publisher has."""

    n: int
    gate: str | None
    crew: int


def test_a_wrong_schema_is_refused() -> None:
    """When the class is decorated."""
    with pytest.raises(ConfigError, match="the schema cannot be used"):
        avro_record({"type": "nonsense"})


@attrs.define
class Parting:
    """A class of attrs: neither pydantic nor a format knows it."""

    n: int


def test_a_class_of_attrs_is_refused() -> None:
    """By a handler, a typed topic and a publish, also inside of a list: nothing of it arrives as something else."""
    broker = Broker("redis://localhost")

    async def take(parting: Parting) -> None: ...

    for kind in (Parting, list[Parting]):
        with pytest.raises(ConfigError, match=r"Parting.*: annotate it with a pydantic model, a dataclass"):
            broker.topic("partings", kind)
    with pytest.raises(ConfigError, match="annotate it with a pydantic model, a dataclass"):
        broker.handler("partings", group="g")(take)
    for value in (Parting(1), [Parting(1)]):
        with pytest.raises(NotJson, match=r"publish bytes, text, or what JSON has a form for: .* a dataclass"):
            encode_payload(value)


def test_the_document_of_the_broker_names_the_content_type() -> None:
    """AsyncAPI: a struct has its schema, the others their content type, and all how they are encoded."""
    broker = Broker(codecs=[Zstd(), Encrypt(Keyring({"k1": b"1" * 32}))])
    for kind in (Order, Parcel, Flight):
        broker.topic(kind.__name__.lower(), kind)
    document = asyncapi(broker, title="t", version="1")
    channels = document["channels"]
    found = {name: next(iter(channel["messages"].values()))["contentType"] for name, channel in channels.items()}
    assert found == {
        "order": "application/json", "parcel": "application/x-protobuf", "flight": "application/avro",
    }  # fmt: skip
    assert "ratio" in document["components"]["schemas"]["Order"]["properties"]
    assert channels["order"]["messages"]["Order"]["x-enc"] == "zstd;a256gcm"


@pytest.mark.parametrize(("codecs", "encoded"), [([], "ref"), ([Zstd()], "zstd;ref")])
def test_the_document_of_a_broker_with_a_store_says_so(tmp_path: Path, codecs: list[Zstd], encoded: str) -> None:
    """An answer does not go there."""
    broker = Broker(codecs=codecs, offload=Offload(tmp_path))

    @broker.handler("orders", group="g", replies=True)
    async def price(order: Order) -> int:
        return 1

    channels = asyncapi(broker, title="t", version="1")["channels"]
    assert channels["orders"]["messages"]["Order"]["x-enc"] == encoded
    (answer,) = channels["orders.g.answer"]["messages"].values()
    assert answer.get("x-enc", "") == encoded.removesuffix("ref").rstrip(";")


def test_no_package_of_a_format_is_loaded_for_others() -> None:
    """A process that publishes and handles JSON imports none of them, nor the codecs."""
    code = (
        "import sys; from rsmq import Broker; b = Broker()\n"
        "@b.handler('t', group='g')\nasync def handle(payload: dict) -> None: ...\n"
        "import rsmq.worker.worker\n"
        "names = ('msgspec', 'google.protobuf', 'fastavro', 'zstandard', 'rsmq.codecs')\n"
        "print([name for name in names if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
