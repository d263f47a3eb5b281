"""Compression, and frames that would fill memory."""

from __future__ import annotations

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from rsmq import ConfigError
from rsmq.codecs import Zstd
from rsmq.errors import Malformed
from rsmq.model.encoding import Binding

LIMIT = 100_000
ABOUT = Binding(b"m", None, b"text/plain", b"zstd")


def unknown_size(data: bytes) -> bytes:
    """A frame that does not say how large its content is, as a stream of another language may be."""
    return zstandard.ZstdCompressor(write_content_size=False).compress(data)


def test_a_small_payload_stays_as_it_is() -> None:
    """So does one that would not become smaller."""
    assert Zstd(above="1KiB").shrink(b" " * 1023) is None
    assert Zstd(above="1KiB").shrink(b" " * 1024) is not None
    assert Zstd(above=0).shrink(bytes(range(256))) is None


@pytest.mark.parametrize("make", [zstandard.compress, unknown_size])
def test_a_frame_is_read_up_to_the_limit(make: object) -> None:
    """With and without its size in its header."""
    assert callable(make)
    assert Zstd().undo(make(b" " * LIMIT), "", ABOUT, LIMIT) == b" " * LIMIT
    assert Zstd().undo(make(b""), "", ABOUT, LIMIT) == b""
    with pytest.raises(Malformed, match=str(LIMIT)):
        Zstd().undo(make(b" " * (LIMIT + 1)), "", ABOUT, LIMIT)


def test_a_bomb_is_refused_before_it_is_unpacked() -> None:
    """Its header says 1 TiB: no buffer of that size is made. One that wants a large window is refused, too."""
    small = zstandard.compress(b" " * 300)
    header = zstandard.get_frame_parameters(small)
    assert header.content_size == 300
    bomb = small[:4] + bytes([0b11100000]) + (1 << 40).to_bytes(8, "little") + small[7:]
    assert zstandard.get_frame_parameters(bomb).content_size == 1 << 40
    with pytest.raises(Malformed, match="1099511627776 bytes"):
        Zstd().undo(bomb, "", ABOUT, LIMIT)
    parameters = zstandard.ZstdCompressionParameters.from_level(19, window_log=27)
    wide = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    frame = wide.compress(bytes(range(256)) * 64) + wide.flush()
    with pytest.raises(Malformed):
        Zstd().undo(frame, "", ABOUT, LIMIT)


@pytest.mark.parametrize(
    "data", [b"", b"x", b"\x28\xb5\x2f\xfd", zstandard.compress(b" " * 999)[:-1], zstandard.compress(b"a") + b"b",
             zstandard.compress(b"a" * 99) + zstandard.compress(b"b" * 99)],
)  # fmt: skip
def test_what_is_no_single_whole_frame_is_malformed(data: bytes) -> None:
    """Cut, with something behind it, or two of them."""
    with pytest.raises(Malformed):
        Zstd().undo(data, "", ABOUT, LIMIT)


@given(st.binary(max_size=200), st.integers(0, 30), st.binary(max_size=6))
@settings(max_examples=100, deadline=None)
def test_any_bytes_are_decoded_or_malformed(data: bytes, at: int, other: bytes) -> None:
    """Mutated frames: bounded output, and one error."""
    frame = zstandard.compress(data)
    mutated = frame[:at] + other + frame[at + len(other) :]
    try:
        found = Zstd().undo(mutated, "", ABOUT, 1000)
    except Malformed:
        return
    assert len(found) <= 1000


@pytest.mark.parametrize("above", ["1 KoB", -1, None, "", "-5"])
def test_a_size_that_is_none_is_refused(above: object) -> None:
    """With how to write one."""
    with pytest.raises(ConfigError, match="1KiB"):
        Zstd(above=above)  # type: ignore[arg-type]
