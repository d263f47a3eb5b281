"""A fuzzer over every decoder: whatever the bytes or the text, it is a value or one of rsmq's own errors.

Short in every run; `CHAOS=long` gives each decoder a hundred times as many tries.
"""

from __future__ import annotations

import asyncio
import json
import os
import struct
from dataclasses import dataclass
from datetime import UTC, timedelta
from typing import Any

import pytest
import typer
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from rsmq.address import redact
from rsmq.cli.value import parse_headers, parse_moment, parse_payload, parse_place, parse_span
from rsmq.connect import Connector, check_url
from rsmq.dlq.letter import DeadLetter, letter_id, split_id
from rsmq.errors import BrokerError, ConfigError, Malformed, RsmqError
from rsmq.flaw import flaws_of
from rsmq.inspector import read_info
from rsmq.keys import Keys, check_name, decode_device, encode_device
from rsmq.message import Message, Place, entry_fields, pack_fields, read_headers, unpack_fields
from rsmq.payload import decoder_for
from rsmq.persistence.device import read_device
from rsmq.persistence.letter import STAMP, VERSION, Letter, read_envelope, seal_payload
from rsmq.preflight.facts import flags_of, parse_info
from rsmq.settings import Settings
from rsmq.stream import as_dict, start_id
from rsmq.wire import Wire, pack

IS_LONG = os.environ.get("CHAOS") == "long"
PLACE = Place("orders", 3, "billing")


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
def test_an_entry_is_a_message_or_malformed(pairs: list[tuple[bytes, bytes]], entry_id: bytes) -> None:
    """Any fields: Malformed at once, or a message that answers every question."""
    try:
        message = Message(PLACE, entry_id, [part for pair in pairs for part in pair])
        message.check_size()
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
def test_a_payload_is_a_value_or_malformed(kind: str, raw: bytes) -> None:
    """For every kind of annotation."""
    try:
        DECODERS[kind](Message(PLACE, b"1-1", [b"data", raw]))
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
    """What is read is exactly what was there."""
    try:
        fields = unpack_fields(packed)
    except Malformed:
        return
    assert pack_fields(fields) == packed


@fuzz(200)
@given(st.binary(max_size=40), TEXTS, st.none() | TEXTS, st.dictionaries(TEXTS, TEXTS, max_size=3))
def test_a_message_comes_back(data: bytes, message_id: str, key: str | None, headers: dict[str, str]) -> None:
    """Published, packed, unpacked, read: the same. Text with a lone surrogate is refused by the publisher's encoder."""
    try:
        raw = unpack_fields(pack_fields(entry_fields(data, message_id, key, headers=headers)))
    except (UnicodeEncodeError, ValueError):
        return
    message = Message(PLACE, b"1-1", raw)
    assert (message.data, message.id, message.key, message.headers) == (data, message_id, key, headers)


# -- letters


@fuzz(200)
@given(
    st.binary(max_size=60) | st.builds(lambda rest: bytes([VERSION]) + bytes(STAMP - 1) + rest, st.binary(max_size=60))
)
def test_an_envelope_is_a_letter_or_malformed(envelope: bytes) -> None:
    """Each property is a value or Malformed."""
    letter = Letter(7, envelope)
    for name in ("data", "payload", "topic", "type", "headers", "timestamp", "expires_at", "packet_id"):
        try:
            getattr(letter, name)
        except Malformed:
            continue
    assert repr(letter)


@fuzz(200)
@given(
    st.one_of(st.binary(max_size=30), TEXTS, JSON_VALUES), TEXTS, st.dictionaries(TEXTS, TEXTS, max_size=3), st.data()
)
def test_a_letter_comes_back_and_cut_it_is_malformed(
    payload: Any, topic: str, headers: dict[str, str], data: st.DataObject
) -> None:
    """What was sealed is read; any shorter piece is a shorter payload or Malformed, never something else."""
    try:
        sealed = bytes([VERSION]) + struct.pack(">HIHI", 0, 1, 0, 2) + seal_payload(payload, topic, headers, 1 << 20)
    except (ConfigError, UnicodeEncodeError, ValueError):
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
def test_a_device_comes_back_from_its_key(device: str) -> None:
    """Every id that is taken is found again in its key, and no other id has that key."""
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
def test_a_name_is_allowed_or_refused(name: str, kind: str) -> None:
    """And what is allowed cannot end a hash tag or begin another key."""
    try:
        check_name(kind, name)
    except ConfigError:
        return
    assert not set(name) & set("{}:* \n")


@fuzz(200)
@given(st.one_of(TEXTS, st.from_regex(r"\d{1,22}(-\d{0,22})?", fullmatch=True)))
def test_a_start_is_a_stream_id_or_refused(text: str) -> None:
    """Where a group begins."""
    try:
        assert start_id(text).isascii()
    except ConfigError:
        return


@fuzz(200)
@given(st.one_of(TEXTS, st.from_regex(r"\d{0,12}/\d{0,22}(-\d{0,22})?", fullmatch=True)))
@example("²/1-1")
@example("1/1-²")
def test_the_id_of_a_dead_letter_is_read_or_refused(text: str) -> None:
    """What is read is spelled the same again."""
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
def test_a_dead_letter_is_always_shown(pairs: list[tuple[bytes, bytes]], stream_id: bytes) -> None:
    """It may be here because it cannot be read."""
    letter = DeadLetter.read("t", 0, "g", stream_id, [part for pair in pairs for part in pair])
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
def test_whatever_a_peer_answers_is_a_reply_or_our_error(answer: bytes) -> None:
    """Another service on the port, a proxy's page, a cut line: a reply, or an error of rsmq, within the time limit."""
    asyncio.run(exchange_with(answer))


async def exchange_with(answer: bytes) -> None:
    """One peer that gives the same answer to everything, then hangs up."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(4096)
        writer.write(answer)
        writer.close()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with listener:
        url = f"redis://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        client = Connector(url, Settings(command_timeout=timedelta(seconds=1))).client()
        wire = Wire(client)
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
def test_what_a_server_tells_about_itself(reply: bytes) -> None:
    """INFO, and what is made of its version."""
    info = parse_info(reply)
    flaws_of(info)
    flaws_of({"redis_version": reply.decode(errors="replace")})
    flags_of(reply)
    flags_of([b"flags", [reply]])


@fuzz(200)
@given(BYTES)
def test_what_a_member_tells_about_itself(info: bytes) -> None:
    """Anybody may write under that key: it is a dict, or nothing."""
    assert isinstance(read_info(info), dict)


@fuzz(150)
@given(
    st.lists(
        st.tuples(st.sampled_from([b"seq", b"epoch", b"held", b"seen_ms", b"gateway", b"connected_ms"]), BYTES),
        max_size=5,
    )
)
def test_the_state_of_a_device(pairs: list[tuple[bytes, bytes]]) -> None:
    """A hash that somebody else wrote: a state, or one of our errors."""
    try:
        read_device("phone", [part for pair in pairs for part in pair], 0)
    except RsmqError:
        return


@fuzz(100)
@given(st.lists(st.binary(max_size=5), max_size=6))
def test_a_flat_reply(flat: list[bytes]) -> None:
    """Pairs, or one of our errors."""
    try:
        as_dict(flat)
    except RsmqError:
        return


# -- text of users


NAMES_OF_SETTINGS = sorted(Settings.model_fields)


@fuzz(250)
@given(
    st.sampled_from(NAMES_OF_SETTINGS),
    st.one_of(TEXTS, st.from_regex(r"P(T\d{1,30}[HMS])?|\d{1,30}(KiB|GB)?", fullmatch=True)),
)
def test_a_setting_holds_or_is_refused(name: str, text: str) -> None:
    """Any text for any setting, as the environment gives it."""
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
def test_an_address_holds_or_is_refused(text: str) -> None:
    """And the password in it is shown by neither."""
    assert isinstance(redact(text), str)
    try:
        connector = Connector(check_url(text), Settings(allow_insecure=True))
        connector.client()
        connector.blocking_client()
    except ConfigError:
        return


@fuzz(150)
@given(st.one_of(TEXTS, st.from_regex(r"[Pp]?T?\d{0,30}[HMSDW]?", fullmatch=True), st.datetimes().map(str)))
def test_values_on_the_command_line(text: str) -> None:
    """A value, or a mistake that is explained."""
    for parse in (parse_span, parse_moment, parse_place, lambda raw: parse_headers([raw])):
        try:
            parse(text)
        except typer.BadParameter:
            continue
    parse_payload(text, is_text=False)


def test_long_values_on_the_command_line() -> None:
    """What nests deeper than Python goes is text."""
    assert parse_payload("[" * 100_000, is_text=False) == "[" * 100_000


# -- the pipeline


POSITIONS = st.fixed_dictionaries({"id": TEXTS, "added": st.integers() | TEXTS})
TOPICS = st.dictionaries(st.sampled_from(["epoch", "0", "1", "x"]), st.integers() | TEXTS | POSITIONS, max_size=3)


@fuzz(150)
@given(JSON_VALUES | st.dictionaries(TEXTS, TOPICS, max_size=2))
def test_offsets_are_read_or_refused(found: Any) -> None:
    """A checkpoint that was edited by hand."""
    offset = pytest.importorskip("rsmq.pipeline.offset")
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
def test_options_of_a_read_hold_or_are_refused(given_options: dict[str, str]) -> None:
    """Any text for any option, one line of what is wrong."""
    option = pytest.importorskip("rsmq.pipeline.option")
    for read in (option.read_options, option.write_options):
        try:
            read(given_options)
        except RsmqError:
            continue


def test_our_errors_have_one_root() -> None:
    """What the fuzzer lets pass is what a caller can catch."""
    assert all(issubclass(each, RsmqError) for each in (Malformed, ConfigError, BrokerError))
