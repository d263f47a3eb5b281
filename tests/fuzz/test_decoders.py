"""A fuzzer over every decoder: any bytes or text give a value or one of rsmq's own errors.

Short in every run; `CHAOS=long` gives each decoder a hundred times as many tries.
"""

from __future__ import annotations

import asyncio
import json
import os
import struct
from dataclasses import dataclass, fields
from datetime import UTC, timedelta
from typing import Any

import pytest
import typer
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from rsmq.cli.parameters import duration_argument, parse_headers, parse_payload, parse_start, parse_time
from rsmq.dlq.dead_letter import letter_id, read_dead_letter, split_id
from rsmq.errors import BrokerError, ConfigError, Malformed, NotJson, RsmqError
from rsmq.handler.payload import decoder_for
from rsmq.inspector.state import read_info
from rsmq.model.keys import Keys, check_name, decode_device, encode_device
from rsmq.model.message import Message, MessageOrigin, entry_fields, read_headers, refuse_oversized
from rsmq.model.packing import pack_fields, unpack_fields
from rsmq.model.settings import Settings
from rsmq.persistence.devices import read_device
from rsmq.persistence.letter import STAMP, VERSION, Letter, read_envelope, seal_payload
from rsmq.redis.client.connector import Connector, check_url
from rsmq.redis.client.raw_connection import RawConnection, pack
from rsmq.redis.preflight.facts import flags_of, parse_info
from rsmq.redis.preflight.vulnerabilities import vulnerabilities_of
from rsmq.redis.streams import as_dict, start_id
from rsmq.redis.wire.url import redact

IS_LONG = os.environ.get("CHAOS") == "long"
ORIGIN = MessageOrigin("orders", 3, "billing")


def fuzz(tries: int) -> Any:
    """So many tries of one decoder."""
    return settings(
        max_examples=tries * 100 if IS_LONG else tries // 2,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )


pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1800)] if IS_LONG else []


@dataclass
class Order:
    number: int
    items: list[str]


class Model(BaseModel):
    n: int
    nested: dict[str, list[float]] = {}


TEXTS = st.text(max_size=30)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)
JSON_BYTES = JSON_VALUES.map(lambda value: json.dumps(value).encode())
HOSTILE = st.sampled_from([
    b"", b"null", b"NaN", b"-", b'"', b"[" * 5000, b'{"a":' * 5000, b"1" * 10_000, b"1e999999", b'"\xff"', b'"\\ud800"',
    b'{"a":1,"a":2}', b"\x00", b" " * 1000, "\ufeff{}".encode(), b"\xf0\x9f", b'{"n":' + b"9" * 5000 + b"}",
])  # fmt: skip
BYTES = st.one_of(st.binary(max_size=60), JSON_BYTES, HOSTILE)
NAMES = st.sampled_from([b"data", b"key", b"id", b"type", b"h", b"group", b"dlq.packed", b"dlq.at_ms"]) | st.binary(
    max_size=8
)
IDS = st.sampled_from([b"1700000000123-4", b"0-0", b"18446744073709551615-18446744073709551615", b"253402300800000-0"])


def mutated(base: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    """Good bytes with a piece cut out, replaced or put in: nearer to what a decoder accepts than noise."""

    def change(raw: bytes, at: int, length: int, piece: bytes) -> bytes:
        at %= len(raw) + 1
        return raw[:at] + piece + raw[at + length :]

    return st.builds(change, base, st.integers(0, 200), st.integers(0, 8), st.binary(max_size=8))


# -- messages


@fuzz(250)
@given(st.lists(st.tuples(NAMES, BYTES), max_size=6), IDS)
@example([(b"data", b""), (b"id", b"ffffffff-ffff-7fff-bfff-ffffffffffff")], b"1-1")
def test_entry_is_a_message_or_malformed(pairs: list[tuple[bytes, bytes]], entry_id: bytes) -> None:
    """Any fields give Malformed at once, or a message whose properties all work."""
    try:
        message = Message(ORIGIN, entry_id, [part for pair in pairs for part in pair])
        refuse_oversized(message)
    except Malformed:
        return
    assert isinstance(message.data, bytes)
    assert all(isinstance(text, str) for text in (message.id, message.type, message.stream_id, repr(message)))
    assert all(isinstance(part, str) for pair in message.headers.items() for part in pair)
    assert "\n" not in repr(message)
    if entry_id.startswith(b"17"):
        assert message.timestamp.tzinfo is UTC


DECODERS = {
    str(kind): decoder_for(kind)
    for kind in (bytes, str, Any, dict, list, dict[str, int], list[Order], Order, Model, int | None, timedelta)
}


@pytest.mark.parametrize("kind", DECODERS)
@fuzz(60)
@given(raw=st.one_of(BYTES, mutated(JSON_BYTES)))
def test_payload_is_a_value_or_malformed(kind: str, raw: bytes) -> None:
    """For every kind of annotation."""
    try:
        DECODERS[kind](raw)
    except Malformed:
        return


@fuzz(250)
@given(
    st.one_of(BYTES, mutated(st.dictionaries(TEXTS, TEXTS, max_size=4).map(lambda value: json.dumps(value).encode())))
)
def test_headers_are_strings_or_malformed(raw: bytes) -> None:
    """An object of strings, nothing else."""
    try:
        headers = read_headers(raw)
    except Malformed:
        return
    assert all(isinstance(part, str) for pair in headers.items() for part in pair)


@fuzz(200)
@given(st.one_of(st.binary(max_size=80), mutated(st.lists(st.binary(max_size=10), max_size=6).map(pack_fields))))
@example(b"\xff\xff\xff\xff")
@example(b"\x00\x00\x00\x00")
def test_packed_fields_are_fields_or_malformed(packed: bytes) -> None:
    """Unpacking returns exactly what was packed."""
    try:
        fields = unpack_fields(packed)
    except Malformed:
        return
    assert pack_fields(fields) == packed


@fuzz(200)
@given(st.binary(max_size=40), TEXTS, st.none() | TEXTS, st.dictionaries(TEXTS, TEXTS, max_size=3))
def test_message_round_trip_keeps_every_field(
    data: bytes, message_id: str, key: str | None, headers: dict[str, str]
) -> None:
    """Published, packed, unpacked and read. The encoder refuses text with a lone surrogate."""
    try:
        raw = unpack_fields(pack_fields(entry_fields(data, message_id, key, headers=headers)))
    except (UnicodeEncodeError, ValueError):
        return
    message = Message(ORIGIN, b"1-1", raw)
    assert (message.data, message.id, message.key, message.headers) == (data, message_id, key, headers)


# -- letters


@fuzz(200)
@given(
    st.binary(max_size=60) | st.builds(lambda rest: bytes([VERSION]) + bytes(STAMP - 1) + rest, st.binary(max_size=60))
)
def test_envelope_is_a_letter_or_malformed(envelope: bytes) -> None:
    """Each property is a value or Malformed."""
    letter = Letter(7, envelope)
    for name in ("data", "payload", "topic", "type", "headers", "timestamp", "expires", "packet_id"):
        try:
            getattr(letter, name)
        except Malformed:
            continue
    assert repr(letter)


@fuzz(200)
@given(
    st.one_of(st.binary(max_size=30), TEXTS, JSON_VALUES), TEXTS, st.dictionaries(TEXTS, TEXTS, max_size=3), st.data()
)
def test_letter_round_trip_and_cut_it_is_malformed(
    payload: Any, topic: str, headers: dict[str, str], data: st.DataObject
) -> None:
    """A cut envelope is a shorter payload or Malformed, never something else."""
    try:
        sealed = bytes([VERSION]) + struct.pack(">HIHI", 0, 1, 0, 2) + seal_payload(payload, topic, headers, 1 << 20)
    except (ConfigError, NotJson, UnicodeEncodeError, ValueError):
        return
    assert (Letter(1, sealed).topic, Letter(1, sealed).headers) == (topic, headers)
    cut = sealed[: data.draw(st.integers(0, len(sealed)))]
    try:
        read_envelope(cut)
    except Malformed:
        return
    assert sealed.startswith(cut)


# -- ids, names, keys


@fuzz(200)
@given(st.text(max_size=300))
def test_device_id_round_trip_through_its_key(device: str) -> None:
    """An accepted id can be read back from its key, and no other id has that key."""
    try:
        encoded = encode_device(device)
    except ConfigError:
        return
    assert decode_device(encoded) == device
    key = Keys("p").session(device)
    assert (key.count("{"), key.count("}")) == (1, 1)
    assert key == f"p:{{{encoded}}}_session"
    assert key.isprintable() or not device.isprintable()


@fuzz(200)
@given(
    st.one_of(st.text(max_size=140), st.from_regex(r"[A-Za-z0-9._-]{1,130}", fullmatch=True)),
    st.sampled_from(["topic", "group"]),
)
def test_name_is_allowed_or_refused(name: str, kind: str) -> None:
    """An allowed name cannot end a hash tag or begin another key."""
    try:
        check_name(kind, name)
    except ConfigError:
        return
    assert not set(name) & set("{}:* \n")


@fuzz(200)
@given(st.one_of(TEXTS, st.from_regex(r"\d{1,22}(-\d{0,22})?", fullmatch=True)))
def test_start_is_a_stream_id_or_refused(text: str) -> None:
    """The option `start` of a handler."""
    try:
        assert start_id(text).isascii()
    except ConfigError:
        return


@fuzz(200)
@given(st.one_of(TEXTS, st.from_regex(r"\d{0,12}/\d{0,22}(-\d{0,22})?", fullmatch=True)))
@example("²/1-1")
@example("1/1-²")
def test_dead_letter_id_is_read_or_refused(text: str) -> None:
    """An accepted id is written the same again."""
    try:
        partition, stream_id = split_id(text)
    except ConfigError:
        return
    assert split_id(letter_id(partition, stream_id.encode())) == (partition, stream_id)


DEAD_NAMES = st.sampled_from([b"dlq.attempts", b"dlq.reason", b"dlq.origin", b"dlq.body"]) | NAMES


@fuzz(250)
@given(st.lists(st.tuples(DEAD_NAMES, BYTES)), IDS)
@example([(b"dlq.at_ms", b"999999999999999")], b"1-1")
@example([(b"dlq.packed", b"\x00\x00")], b"1-1")
def test_dead_letter_of_any_fields_is_readable(pairs: list[tuple[bytes, bytes]], stream_id: bytes) -> None:
    """An unreadable message becomes a dead letter, too."""
    letter = read_dead_letter("t", 0, "g", stream_id, [part for pair in pairs for part in pair])
    assert letter.at.tzinfo is UTC
    plain = tuple(pair for pair in pairs if not pair[0].startswith(b"dlq."))
    assert letter.fields == plain or any(name == b"dlq.packed" for name, _ in pairs)


# -- replies


REPLIES = st.recursive(
    st.none() | st.integers(-5, 1 << 63) | BYTES,
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=8,
)


def spelled(reply: Any) -> bytes:
    """A reply in wire form."""
    if reply is None:
        return b"$-1\r\n"
    if isinstance(reply, int):
        return b":%d\r\n" % reply
    if isinstance(reply, bytes):
        return b"$%d\r\n%b\r\n" % (len(reply), reply)
    return b"*%d\r\n%b" % (len(reply), b"".join(map(spelled, reply)))


@fuzz(40)
@given(st.one_of(st.binary(min_size=1, max_size=40), mutated(REPLIES.map(spelled)), REPLIES.map(spelled)))
@example(b"+\r\n+\r\n$-1\r\n")
@example(b"-MOVED 1 x\r\n")
@example(b"-MOVED 99999999999 h:1\r\n")
@example(b"-ASK\r\n")
@example(b"*-2\r\n")
@example(b"-ERR \xff\xfe\r\n")
def test_server_bytes_are_replies_or_broker_errors(answer: bytes) -> None:
    """Another service on the port, a proxy page, a cut connection: a reply or a BrokerError, within the time limit."""
    asyncio.run(exchange_with(answer))


async def exchange_with(answer: bytes) -> None:
    """A peer that answers every command with the same bytes, then closes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(4096)
        writer.write(answer)
        writer.close()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with listener:
        url = f"redis://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        client = Connector(url, Settings(command_timeout=timedelta(seconds=1))).client()
        wire = RawConnection(client)
        try:
            await wire.open()
            await wire.exchange([pack(("PING",))])
        except RsmqError:
            pass
        finally:
            await wire.close()
            await client.aclose()


@fuzz(200)
@given(
    st.one_of(
        st.binary(max_size=200),
        st.text(max_size=100).map(lambda text: text.encode(errors="replace")),
    )
)
def test_server_info_of_any_bytes_is_read(reply: bytes) -> None:
    """INFO, and the version in it."""
    info = parse_info(reply)
    vulnerabilities_of(info)
    vulnerabilities_of({"redis_version": reply.decode(errors="replace")})
    flags_of(reply)
    flags_of([b"flags", [reply]])


@fuzz(200)
@given(BYTES)
def test_member_info_of_any_bytes_is_read(info: bytes) -> None:
    """Any client may write under that key: it is a dict, or nothing."""
    assert isinstance(read_info(info), dict)


@fuzz(150)
@given(
    st.lists(
        st.tuples(st.sampled_from([b"seq", b"epoch", b"held", b"seen_ms", b"gateway", b"connected_ms"]), BYTES),
        max_size=5,
    )
)
def test_device_state_of_any_fields_is_read(pairs: list[tuple[bytes, bytes]]) -> None:
    """A hash that another client wrote is a state or an RsmqError."""
    try:
        read_device("phone", [part for pair in pairs for part in pair], 0)
    except RsmqError:
        return


@fuzz(100)
@given(st.lists(st.binary(max_size=5), max_size=6))
def test_flat_reply_of_any_fields_is_read(flat: list[bytes]) -> None:
    """It is a dict of pairs or an RsmqError."""
    try:
        as_dict(flat)
    except RsmqError:
        return


# -- text of users


NAMES_OF_SETTINGS = sorted(each.name for each in fields(Settings))


@fuzz(250)
@given(
    st.sampled_from(NAMES_OF_SETTINGS),
    st.one_of(TEXTS, st.from_regex(r"P(T\d{1,30}[HMS])?|\d{1,30}(KiB|GB)?", fullmatch=True)),
)
def test_setting_of_any_text_is_valid_or_refused(name: str, text: str) -> None:
    """Any text for any setting, as from the environment."""
    try:
        made = Settings(**{name: text})
    except ConfigError:
        return
    assert made.lease_ttl <= timedelta(days=36_500)


@fuzz(250)
@given(
    st.one_of(
        TEXTS,
        st.from_regex(
            r"(redis|rediss|unix|rediss?\+sentinel|rediss?\+cluster)://[a-z:@\[\]0-9,/?=&#%_.-]{0,40}", fullmatch=True
        ),
    )
)
@example("redis+sentinel")
@example("redis+sentinel:m")
@example("redis+cluster:h")
@example("unix:s")
@example("redis://h:99999")
@example("redis://[::1")
@example("redis+sentinel://:x@[/m")
@example("rediss://h?ssl_cert_reqs=maybe")
@example("redis://h?db=x")
@example("unix:///s?db=x")
def test_url_of_any_text_is_valid_or_refused(text: str) -> None:
    """Neither the URL nor the error shows the password."""
    assert isinstance(redact(text), str)
    try:
        connector = Connector(check_url(text), Settings(allow_insecure=True))
        connector.client()
        connector.blocking_client()
    except ConfigError:
        return


@fuzz(150)
@given(st.one_of(TEXTS, st.from_regex(r"[Pp]?T?\d{0,30}[HMSDW]?", fullmatch=True), st.datetimes().map(str)))
def test_command_line_value_of_any_text_is_valid_or_refused(text: str) -> None:
    """A value, or a usage error."""
    for parse in (duration_argument, parse_time, parse_start, lambda raw: parse_headers([raw])):
        try:
            parse(text)
        except typer.BadParameter:
            continue
    try:
        parse_payload(text, is_text=False)
    except typer.BadParameter:
        assert parse_payload(text, is_text=True) == text


def test_command_line_value_of_any_length_is_refused_quickly() -> None:
    """JSON that nests deeper than Python can parse is no JSON."""
    with pytest.raises(typer.BadParameter):
        parse_payload("[" * 100_000, is_text=False)


# -- the pipeline


POSITIONS = st.fixed_dictionaries({"id": TEXTS, "added": st.integers() | TEXTS})
TOPICS = st.dictionaries(st.sampled_from(["epoch", "0", "1", "x"]), st.integers() | TEXTS | POSITIONS, max_size=3)


@fuzz(150)
@given(JSON_VALUES | st.dictionaries(TEXTS, TOPICS, max_size=2))
def test_offsets_are_read_or_refused(found: Any) -> None:
    """A Spark checkpoint that was edited by hand."""
    offset = pytest.importorskip("rsmq.pipeline.format.offsets")
    try:
        offsets = offset.Offsets.from_json(found)
    except RsmqError:
        return
    assert offset.Offsets.from_json(json.loads(json.dumps(offsets.to_json()))) == offsets


OPTIONS = st.sampled_from([
    "url", "prefix", "subscribe", "subscribePattern", "assign", "startingOffsets", "endingOffsets", "startingTimestamp",
    "maxOffsetsPerTrigger", "minPartitions", "failOnDataLoss", "fetchSize", "passwordEnv", "topic", "x",
])  # fmt: skip
PLAUSIBLE = st.sampled_from(["redis://[::1", "a", "1", '{"a":{"0":"1-1"}}', "(", '{"a":[0]}'])


@pytest.mark.filterwarnings("ignore::FutureWarning")  # what Python thinks of a pattern such as [[
@fuzz(120)
@given(st.dictionaries(OPTIONS, TEXTS | JSON_VALUES.map(json.dumps) | PLAUSIBLE))
def test_read_options_of_any_text_are_valid_or_refused(given_options: dict[str, str]) -> None:
    """Any text for any option gives a value or a one-line error."""
    option = pytest.importorskip("rsmq.pipeline.format.options")
    for read in (option.read_options, option.write_options):
        try:
            read(given_options)
        except RsmqError:
            continue


def test_errors_have_one_root() -> None:
    """The fuzzer accepts only errors that a caller can catch."""
    assert all(issubclass(each, RsmqError) for each in (Malformed, ConfigError, BrokerError))
