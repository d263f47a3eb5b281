"""Properties of the envelope and of packet ids: whatever goes in comes out, and what is broken says so."""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rsmq.clock import from_epoch_ms
from rsmq.errors import ConfigError, Malformed, TooLarge
from rsmq.message import BYTES, JSON, TEXT
from rsmq.persistence.letter import PACKET_IDS, STAMP, VERSION, Letter, packet_id_of, read_envelope, seal, seal_payload

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
def test_an_envelope_gives_back_what_it_was_given(
    data: bytes, kind: str, topic: str, headers: dict[str, str], published: int, expires: int
) -> None:
    """Any bytes, content type, topic and headers, and both times to the millisecond."""
    letter = Letter(7, stamped(seal(data, kind, topic, headers), published, expires))
    assert (letter.data, letter.type, letter.topic, letter.headers) == (data, kind, topic, headers)
    assert letter.timestamp == from_epoch_ms(published)
    assert letter.expires_at == from_epoch_ms(expires)
    assert not letter.is_received


@given(payload=json_values)
def test_json_stays_json(payload: Any) -> None:
    """Numbers of any size, empty lists and empty objects stay what they are."""
    assert Letter(1, stamped(seal_payload(payload, "", None, 1 << 20))).payload == payload


@given(payload=words | st.binary())
def test_text_and_bytes_stay_themselves(payload: str | bytes) -> None:
    """The receiver gets the type that the sender gave."""
    assert Letter(1, stamped(seal_payload(payload, "t", {"a": "b"}, 1 << 20))).payload == payload


@given(data=st.binary(max_size=20), kind=kinds, topic=labels, headers=st.dictionaries(words, words), at=st.floats(0, 1))
def test_a_cut_envelope_is_malformed(data: bytes, kind: str, topic: str, headers: dict[str, str], at: float) -> None:
    """Cut anywhere before its payload, an envelope is Malformed, never a different letter or another error."""
    whole = stamped(seal(data, kind, topic, headers))
    cut = int(at * (len(whole) - len(data)))
    assume(cut < len(whole) - len(data))
    with pytest.raises(Malformed):
        read_envelope(whole[:cut])


@given(noise=st.binary(max_size=60))
def test_noise_is_malformed_or_a_letter(noise: bytes) -> None:
    """Foreign bytes under a letter's key raise nothing but Malformed."""
    try:
        _, _, _, data = read_envelope(bytes([VERSION]) + bytes(STAMP - 1) + noise)
    except Malformed:
        return
    assert noise.endswith(data)


@given(cut=st.binary(max_size=11), ms=st.integers(LATEST_MS + 1, 2**48 - 1))
def test_times_that_are_none(cut: bytes, ms: int) -> None:
    """An envelope that ends before them, or a year that no calendar has, is Malformed as well."""
    for broken in (Letter(5, bytes([VERSION]) + cut), Letter(5, stamped(seal(b""), 0, ms))):
        with pytest.raises(Malformed, match="letter 5: its envelope holds no time"):
            _ = broken.expires_at
    for broken in (Letter(5, bytes([VERSION]) + cut[:5]), Letter(5, stamped(seal(b""), ms))):
        with pytest.raises(Malformed, match="letter 5: its envelope holds no time"):
            _ = broken.timestamp


def test_the_golden_example_of_the_page() -> None:
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
    assert letter.expires_at - letter.timestamp == timedelta(days=7)
    assert envelope == stamped(
        seal_payload({"n": 1}, "alerts", None, 100), to_epoch_ms(letter.timestamp), to_epoch_ms(letter.expires_at)
    )


def to_epoch_ms(moment: datetime) -> int:
    """Whole milliseconds since 1970."""
    return round(moment.timestamp() * 1000)


@pytest.mark.parametrize("raw", [b"[]", b"1", b'{"a":1}', b"{", b"\xff", b"[" * 30_000])
def test_headers_that_are_none(raw: bytes) -> None:
    """Anything but a JSON object of strings is Malformed; the payload can still be read."""
    letter = Letter(1, stamped(seal(b"{}", headers=raw)))
    with pytest.raises(Malformed, match="the headers are not"):
        _ = letter.headers
    assert letter.payload == {}


@pytest.mark.parametrize("version", [b"\x00", b"\x02", b"\xff", b"{"])
def test_another_version_says_so(version: bytes) -> None:
    """Written by a newer rsmq: told with the version, not guessed at."""
    with pytest.raises(Malformed, match=f"version {version.hex()}.*newer rsmq"):
        read_envelope(version + bytes(30))


def test_payloads_that_are_not_what_they_say() -> None:
    """Broken JSON and broken text are Malformed; the raw bytes can still be read."""
    for data, kind in ((b"{", JSON), (b"NaN", JSON), (b"", JSON), (b"\xff", TEXT)):
        letter = Letter(3, stamped(seal(data, kind)))
        with pytest.raises(Malformed, match="letter 3"):
            _ = letter.payload
        assert letter.data == data


def test_a_received_letter_has_no_content() -> None:
    """Half way through its handshake only its seq and packet id count."""
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
def test_what_is_too_long_is_refused(arguments: dict[str, Any], text: str) -> None:
    """One byte or two of length: more is an error before anything is sent, with the number to keep to."""
    with pytest.raises(ConfigError, match=text):
        seal(b"", **arguments)


def test_large_payloads_are_refused() -> None:
    """The limit of payloads is that of messages."""
    assert seal_payload(b"x" * 10, "", None, 10)
    with pytest.raises(TooLarge):
        seal_payload(b"x" * 11, "", None, 10)


@given(seq=st.integers(1, 2**53 - 1))
def test_packet_ids_go_round(seq: int) -> None:
    """1 to 65 535, one after the other, then from 1: the same for a whole round only."""
    assert 1 <= packet_id_of(seq) <= PACKET_IDS
    assert packet_id_of(seq + 1) in (packet_id_of(seq) + 1, 1)
    assert packet_id_of(seq + PACKET_IDS) == packet_id_of(seq)
    assert Letter(seq, b"").packet_id == packet_id_of(seq)


@given(seq=st.integers(1, 2**53 - PACKET_IDS), span=st.integers(1, PACKET_IDS - 1))
def test_packet_ids_are_unique_within_a_round(seq: int, span: int) -> None:
    """Letters less than a round apart never share one."""
    assert packet_id_of(seq) != packet_id_of(seq + span)
