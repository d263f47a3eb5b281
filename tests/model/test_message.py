"""Messages: from a stream entry and back, and what is no message."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from rsmq.errors import Malformed
from rsmq.model.clock import now_ms
from rsmq.model.message import (
    BYTES,
    JSON,
    KNOWN_FIELDS,
    MAX_FIELDS,
    TEXT,
    Message,
    MessageOrigin,
    encode_payload,
    entry_fields,
    new_message_id,
    read_headers,
)
from rsmq.model.packing import pack_fields, unpack_fields


def read(*fields: bytes | str, entry_id: bytes = b"1700000000123-4", attempt: int = 1) -> Message:
    """A message as the fetcher makes it."""
    raw = [field.encode() if isinstance(field, str) else field for field in fields]
    return Message(MessageOrigin("orders", 3, "billing"), entry_id, raw, attempt)


def test_a_foreign_entry_needs_data_only() -> None:
    """An entry of `data` alone is a whole message; everything else has its default."""
    message = read("data", '{"n":1}')
    assert message.data == b'{"n":1}'
    assert (message.key, message.id, message.type, message.headers) == (None, "1700000000123-4", JSON, {})
    assert (message.topic, message.partition, message.group) == ("orders", 3, "billing")
    assert (message.stream_id, message.attempt, message.addressee) == ("1700000000123-4", 1, None)
    assert message.timestamp == datetime.fromtimestamp(1_700_000_000.123, UTC)
    assert repr(message) == "<Message 1700000000123-4 orders.3 key=None attempt=1>"


def test_every_field_is_read() -> None:
    """All fields of the wire format arrive, unknown ones as headers."""
    message = read(
        *("data", b"\x00\xff", "id", "m-1", "key", "c-42", "type", BYTES, "h", '{"traceparent":"00-1"}'),
        *("group", "audit", "source", "node"),
        attempt=4,
    )
    assert (message.data, message.id, message.key, message.type) == (b"\x00\xff", "m-1", "c-42", BYTES)
    assert message.headers == {"traceparent": "00-1", "source": "node"}
    assert (message.addressee, message.attempt) == (b"audit", 4)


def test_a_header_wins_over_an_unknown_field() -> None:
    """A field of the same name as a header does not replace it."""
    assert read("data", "", "h", '{"a":"header"}', "a", "field").headers == {"a": "header"}


def test_what_is_not_utf8_stays_readable() -> None:
    """Broken UTF-8 in key, id and unknown fields is shown escaped, and harms nothing."""
    message = read("data", "", "key", b"\xff", "id", b"\xfe", b"\xfd", b"\xfc")
    assert (message.key, message.id, message.routing_key) == ("\\xff", "\\xfe", b"\xff")
    assert message.headers == {"\\xfd": "\\xfc"}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (["key", "c"], "no field `data`"),
        ([], "no field `data`"),
        (["data", "1", "data", "2"], "a field occurs twice"),
        (["data", "", "h", "{"], "the headers are not JSON"),
        (["data", "", "h", b"\xff"], "the headers are not JSON"),
        (["data", "", "h", "[" * 30_000], "the headers are not JSON"),
        (["data", "", "h", "[]"], "not a JSON object of strings"),
        (["data", "", "h", '{"a": 1}'], "not a JSON object of strings"),
        (["data", "", "id", "m", "key", "k", "h", "null"], "not a JSON object of strings"),
        (["data", "", *(part for n in range(9_999) for part in (f"f{n}", ""))], "10000 fields, more than 256"),
    ],
)
def test_what_is_no_message_is_malformed(fields: list[str | bytes], says: str) -> None:
    """An unreadable entry is Malformed when it is read, before any handler sees it."""
    with pytest.raises(Malformed, match=says):
        read(*fields)


def test_the_timestamp_is_the_publishers() -> None:
    """A UUIDv7 carries the publisher's clock; any other id leaves the server's."""
    published = read("data", "", "id", "018bcfe5-687b-7000-8000-000000000000")
    assert published.timestamp == datetime.fromtimestamp(1_700_000_000.123, UTC)
    server = datetime.fromtimestamp(1_700_000_000.123, UTC)
    for other in ("m-1", "018bcfe5-ffff-4000-8000-000000000000", "ffffffff-ffff-7fff-bfff-ffffffffffff"):
        assert read("data", "", "id", other).timestamp == server


def test_message_ids_are_sorted_by_time() -> None:
    """New ids are unique, ascending, and say when they were made."""
    ids = [new_message_id() for _ in range(1000)]
    assert sorted(set(ids)) == ids
    assert abs(read("data", "", "id", ids[0]).timestamp.timestamp() * 1000 - now_ms()) < 60_000


class Order(BaseModel):
    number: int


def test_payloads_become_bytes() -> None:
    """Bytes stay, text is UTF-8, everything else is JSON that every language can read."""
    assert encode_payload(b"\xff") == (b"\xff", BYTES)
    assert encode_payload(memoryview(b"ab")) == (b"ab", BYTES)
    assert encode_payload("grüß") == ("grüß".encode(), TEXT)
    assert encode_payload(Order(number=1)) == (b'{"number":1}', JSON)
    assert encode_payload([None, {"null": None}]) == (b'[null,{"null":null}]', JSON)


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
HEADERS = st.dictionaries(TEXTS.filter(lambda name: name not in ("data", "key", "id", "type", "h", "group")), TEXTS)


@given(st.binary(max_size=50), TEXTS, st.none() | TEXTS, st.sampled_from([JSON, BYTES, TEXT]), HEADERS)
def test_a_message_survives_the_wire(
    data: bytes, message_id: str, key: str | None, content_type: str, headers: dict[str, str]
) -> None:
    """What was published is what is received, for any text anywhere."""
    message = read(*unpack_fields(pack_fields(entry_fields(data, message_id, key, content_type, headers))))
    assert (message.data, message.id, message.key, message.type) == (data, message_id, key, content_type)
    assert message.headers == headers


@given(HEADERS)
def test_headers_are_plain_json(headers: dict[str, str]) -> None:
    """Headers written by any JSON library are read."""
    assert read_headers(json.dumps(headers).encode()) == headers


@given(st.lists(st.binary(max_size=300)))
def test_packing_keeps_every_field(fields: list[bytes]) -> None:
    """Packed fields come out as they went in."""
    assert unpack_fields(pack_fields(fields)) == fields


def test_the_packed_form_is_fixed() -> None:
    """Packed fields are in the server's data, so their form is a contract."""
    assert pack_fields(["data", b"\x01"]) == b"\x00\x00\x00\x04data\x00\x00\x00\x01\x01"


@given(st.lists(st.binary(max_size=30), max_size=12).filter(lambda fields: len(fields) % 2 == 0))
def test_no_entry_crashes_the_reader(fields: list[bytes]) -> None:
    """Any entry is a message or Malformed, and a message answers every question."""
    try:
        message = read(*fields)
    except Malformed:
        return
    assert isinstance(message.headers, dict)
    assert message.timestamp.tzinfo is UTC
    assert repr(message).startswith("<Message ")


def test_the_page_names_every_field() -> None:
    """The page of the wire format lists each field, and the maximum number of fields."""
    page = (Path(__file__).parents[2] / "docs" / "wire-format.md").read_text(encoding="utf-8")
    assert [field for field in KNOWN_FIELDS if f"| `{field.decode()}` |" not in page] == []
    assert f"more than {MAX_FIELDS} fields" in page
