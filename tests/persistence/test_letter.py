"""Properties of the envelope and of packet ids: round trips, and Malformed for anything broken."""

from __future__ import annotations

import json
import re
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rsmq.codecs import Encrypt, Keyring
from rsmq.errors import CannotDecode, ConfigError, Malformed, TooLarge
from rsmq.model.clock import from_epoch_ms
from rsmq.model.encoding import Binding, Encoding
from rsmq.model.message import BYTES, JSON, TEXT
from rsmq.persistence.letter import (
    HEAD_BYTES,
    PACKET_IDS,
    STAMP,
    VERSION,
    Letter,
    enc_of,
    pack_binding,
    packet_id_of,
    read_envelope,
    read_mqtt,
    seal,
    seal_mqtt,
    seal_payload,
)

ROOT = Path(__file__).parents[2]
LATEST_MS = 253_402_300_799_999
words = st.text(st.characters(exclude_categories=["Cs"]))
labels = words.filter(lambda text: len(text.encode()) <= 255)
kinds = st.sampled_from([JSON, BYTES, TEXT]) | labels
stamps = st.integers(0, LATEST_MS)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(words, inner, max_size=4),
    max_leaves=8,
)


def stamped(sealed: bytes, published: int = 0, expires: int = 0) -> bytes:
    """As the server stores it."""
    return bytes([VERSION]) + published.to_bytes(6, "big") + expires.to_bytes(6, "big") + sealed


@given(
    data=st.binary(), kind=kinds, topic=labels, headers=st.dictionaries(words, words), published=stamps, expires=stamps
)
def test_envelope_round_trip_keeps_every_field(
    data: bytes, kind: str, topic: str, headers: dict[str, str], published: int, expires: int
) -> None:
    """Any bytes, content type, topic and headers, and both times to the millisecond."""
    letter = Letter(7, stamped(seal(data, kind, topic, headers), published, expires))
    assert (letter.data, letter.type, letter.topic, letter.headers) == (data, kind, topic, headers)
    assert letter.timestamp == from_epoch_ms(published)
    assert letter.expires == from_epoch_ms(expires)
    assert not letter.is_received


@given(payload=json_values)
def test_json_payload_round_trip(payload: Any) -> None:
    """Numbers of any size, empty lists and empty objects stay what they are."""
    assert Letter(1, stamped(seal_payload(payload, "", None, 1 << 20))).payload == payload


@given(payload=words | st.binary())
def test_text_and_bytes_payload_round_trip(payload: str | bytes) -> None:
    """The receiver gets the type that the sender gave."""
    assert Letter(1, stamped(seal_payload(payload, "t", {"a": "b"}, 1 << 20))).payload == payload


@given(data=st.binary(max_size=20), kind=kinds, topic=labels, headers=st.dictionaries(words, words), at=st.floats(0, 1))
def test_cut_envelope_is_malformed(data: bytes, kind: str, topic: str, headers: dict[str, str], at: float) -> None:
    """Cut anywhere before its payload it is Malformed, never another letter or another error."""
    whole = stamped(seal(data, kind, topic, headers))
    cut = int(at * (len(whole) - len(data)))
    assume(cut < len(whole) - len(data))
    with pytest.raises(Malformed):
        read_envelope(whole[:cut])


@given(noise=st.binary(max_size=60))
def test_random_bytes_are_malformed_or_a_letter(noise: bytes) -> None:
    """Foreign bytes under a letter key raise only Malformed."""
    try:
        _, _, _, data = read_envelope(bytes([VERSION]) + bytes(STAMP - 1) + noise)
    except Malformed:
        return
    assert noise.endswith(data)


@given(cut=st.binary(max_size=11), ms=st.integers(LATEST_MS + 1, 2**48 - 1))
def test_impossible_time_is_malformed(cut: bytes, ms: int) -> None:
    """An envelope that ends before its times, or a year outside the calendar."""
    for broken in (Letter(5, bytes([VERSION]) + cut), Letter(5, stamped(seal(b""), 0, ms))):
        with pytest.raises(Malformed, match="letter 5: its envelope has no valid time"):
            _ = broken.expires
    for broken in (Letter(5, bytes([VERSION]) + cut[:5]), Letter(5, stamped(seal(b""), ms))):
        with pytest.raises(Malformed, match="letter 5: its envelope has no valid time"):
            _ = broken.timestamp


def test_envelope_matches_the_example_of_the_page() -> None:
    """What docs/wire-format.md shows is what is written and read."""
    page = (
        (Path(__file__).parents[2] / "docs" / "wire-format.md").read_text(encoding="utf-8").split("\n## Letters\n")[1]
    )
    found = re.search(r"`(01 [0-9a-f ]+)`.* is `(.+?)` about `(\w+)`", page)
    assert found is not None
    envelope = bytes.fromhex(found[1])
    letter = Letter(1, envelope)
    assert (letter.data.decode(), letter.type, letter.topic, letter.headers) == (found[2], JSON, found[3], {})
    assert letter.payload == {"n": 1}
    assert letter.expires - letter.timestamp == timedelta(days=7)
    assert envelope == stamped(
        seal_payload({"n": 1}, "alerts", None, 100), to_epoch_ms(letter.timestamp), to_epoch_ms(letter.expires)
    )


def to_epoch_ms(moment: datetime) -> int:
    """Whole milliseconds since 1970."""
    return round(moment.timestamp() * 1000)


@pytest.mark.parametrize("raw", [b"[]", b"1", b'{"a":1}', b"{", b"\xff", b"[" * 30_000])
def test_wrong_headers_are_malformed(raw: bytes) -> None:
    """Anything but a JSON object of strings is Malformed; the payload can still be read."""
    letter = Letter(1, stamped(seal(b"{}", headers=raw)))
    with pytest.raises(Malformed, match="the headers are not"):
        _ = letter.headers
    assert letter.payload == {}


@pytest.mark.parametrize("version", [b"\x00", b"\x02", b"\xff", b"{"])
def test_envelope_of_another_version_names_it(version: bytes) -> None:
    """The error says that a newer rsmq may have written it."""
    with pytest.raises(Malformed, match=f"version {version.hex()}.*newer rsmq"):
        read_envelope(version + bytes(30))


def test_payload_of_a_wrong_type_is_malformed() -> None:
    """Broken JSON and broken text are Malformed; the raw bytes can still be read."""
    for data, kind in ((b"{", JSON), (b"NaN", JSON), (b"", JSON), (b"\xff", TEXT)):
        letter = Letter(3, stamped(seal(data, kind)))
        with pytest.raises(Malformed, match="letter 3"):
            _ = letter.payload
        assert letter.data == data


def test_received_letter_has_no_content() -> None:
    """During its handshake only its seq and packet id are left."""
    letter = Letter(PACKET_IDS + 1, b"", is_redelivered=True)
    assert (letter.is_received, letter.packet_id, letter.payload, letter.data) == (True, 1, None, b"")
    assert (letter.topic, letter.headers) == ("", {})


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"topic": "é" * 128}, "256 bytes: use at most 255"),
        ({"kind": "x" * 256}, "256 bytes: use at most 255"),
        ({"headers": {"a": "x" * 65_535}}, "use at most 32768"),
    ],
)
def test_envelope_with_oversized_fields_is_refused(arguments: dict[str, Any], text: str) -> None:
    """Lengths have one byte or two: more is an error before anything is sent, with the limit."""
    with pytest.raises(ConfigError, match=text):
        seal(b"", **arguments)


def test_payload_above_the_limit_is_refused() -> None:
    """Letters have the payload limit of messages."""
    assert seal_payload(b"x" * 10, "", None, 10)
    with pytest.raises(TooLarge):
        seal_payload(b"x" * 11, "", None, 10)


@given(seq=st.integers(1, 2**53 - 1))
def test_packet_id_follows_the_seq_and_wraps(seq: int) -> None:
    """It counts from 1 to 65 535 and starts again at 1."""
    assert 1 <= packet_id_of(seq) <= PACKET_IDS
    assert packet_id_of(seq + 1) in (packet_id_of(seq) + 1, 1)
    assert packet_id_of(seq + PACKET_IDS) == packet_id_of(seq)
    assert Letter(seq, b"").packet_id == packet_id_of(seq)


@given(seq=st.integers(1, 2**53 - PACKET_IDS), span=st.integers(1, PACKET_IDS - 1))
def test_packet_ids_are_unique_within_a_round(seq: int, span: int) -> None:
    """Letters less than 65 535 apart never share one."""
    assert packet_id_of(seq) != packet_id_of(seq + span)


def vectors() -> list[dict[str, Any]]:
    """Those of encoded letters, on the page of the wire format."""
    page = (ROOT / "docs" / "wire-format.md").read_text(encoding="utf-8")
    found: list[dict[str, Any]] = json.loads(page.split("\n## Letters\n")[1].split("```json\n")[1].split("```")[0])
    return found


@pytest.mark.parametrize("vector", vectors(), ids=lambda vector: vector["topic"])
def test_the_golden_vectors_of_encoded_letters_are_what_is_written_and_read(vector: dict[str, Any]) -> None:
    encoding = Encoding([Encrypt(Keyring({"k7": bytes(range(32))}))])
    raw = bytes.fromhex(vector["letter"])
    letter = Letter(1, raw, encoding=encoding)
    assert letter.topic == vector["topic"]
    binding = read_envelope(raw).binding
    assert binding is not None
    assert letter.data == bytes.fromhex(vector["payload"])
    key = None if binding.key is None else binding.key.decode()
    data, again = encoding.bound(letter.data, binding.message_id.decode(), key, binding.type.decode())
    assert again == binding
    assert enc_of(raw[:HEAD_BYTES]) == b"a256gcm=k7"
    if "flags" in vector:
        parts = vector["topic"].encode(), bytes.fromhex(vector.get("properties", ""))
        assert raw[STAMP:] == seal_mqtt(vector["flags"] & ~16, *parts, data, vector.get("share", ""), binding)
        assert read_mqtt(raw)[:3] == (vector["flags"], parts[0].decode(), parts[1])
    else:
        assert raw[STAMP:] == seal(data, "", vector["topic"], None, binding)
        assert letter.type == binding.type.decode()


@pytest.mark.parametrize("vector", vectors(), ids=lambda vector: vector["topic"])
def test_an_encoded_letter_that_is_cut_off_or_changed_is_malformed_and_needs_its_key(vector: dict[str, Any]) -> None:
    """Wherever it is cut: never another error, and never another payload."""
    encoding, raw = Encoding([Encrypt(Keyring({"k7": bytes(range(32))}))]), bytes.fromhex(vector["letter"])
    for end in range(STAMP, len(raw)):
        with pytest.raises(Malformed):
            assert not Letter(1, raw[:end], encoding=encoding).data
        enc_of(raw[:end])
    with pytest.raises(Malformed, match="does not decrypt"):
        assert not Letter(1, raw[:-1] + bytes([raw[-1] ^ 1]), encoding=encoding).data
    with pytest.raises(CannotDecode, match="key k7"):
        assert not Letter(1, raw).data
    assert Letter(1, raw).sealed == "encrypted (k7)"
    assert Letter(1, raw[:-1], encoding=encoding).sealed.startswith("unreadable: ")


def test_an_id_or_a_key_that_is_too_long_for_a_letter_is_refused() -> None:
    with pytest.raises(ConfigError, match="fewer than 65535"):
        pack_binding(Binding(b"x" * 65_535, None, b"", b"zstd"))
