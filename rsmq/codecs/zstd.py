"""Compression of payloads with zstd, and decompression that stops at a limit."""

from __future__ import annotations

import threading
from typing import Any, Final, Literal

from rsmq.errors import ConfigError, Malformed
from rsmq.model.encoding import Binding
from rsmq.model.size import as_size

LEVEL: Final = 1
"""A higher one costs several times the CPU, and makes JSON of a few KiB a tenth smaller."""
LARGEST_WINDOW: Final = 8 << 20
"""What the format asks each reader to support: a frame that needs more memory is refused."""


class Zstd:
    """Compresses payloads of at least `above` bytes, such as `1KiB`, if that makes them smaller."""

    step: Literal["compress"] = "compress"
    name = word = "zstd"
    is_required = False

    def __init__(self, above: int | str = "1KiB") -> None:
        self._above = checked_size(above)
        self._local = threading.local()  # neither a compressor nor a decompressor may be used by two threads at once
        self._library = library()

    def shrink(self, data: bytes) -> bytes | None:
        """The compressed data; None if it is too small, or does not become smaller."""
        if len(data) < self._above:
            return None
        smaller: bytes = self._pair()[0].compress(data)
        return smaller if len(smaller) < len(data) else None

    def seal(self, data: bytes, _binding: Binding) -> bytes:
        """Nothing: it compresses."""
        return data

    def undo(self, data: bytes, _argument: str, _binding: Binding, limit: int) -> bytes:
        """The decompressed data. Raises Malformed for what is no single whole frame, or larger than `limit`."""
        try:
            size = self._library.get_frame_parameters(data).content_size
            if size == self._library.CONTENTSIZE_UNKNOWN:
                size = 0
            elif size > limit:
                raise Malformed(
                    f"the payload has {size} bytes when it is decompressed, more than {limit} (RSMQ_DECODED_LIMIT)"
                )
            found: bytes = self._pair()[1].decompress(data, max_output_size=size or limit, allow_extra_data=False)
        except self._library.ZstdError as error:
            raise Malformed(
                f"the payload is not zstd, or has more than {limit} bytes when it is decompressed ({error})"
            ) from None
        return found

    def _pair(self) -> tuple[Any, Any]:
        """The compressor and the decompressor of this thread."""
        pair: tuple[Any, Any] | None = getattr(self._local, "pair", None)
        if pair is None:
            window = self._library.ZstdDecompressor(max_window_size=LARGEST_WINDOW)
            pair = self._local.pair = (self._library.ZstdCompressor(level=LEVEL), window)
        return pair

    def __repr__(self) -> str:
        return f"Zstd(above={self._above})"


def checked_size(above: int | str) -> int:
    """A number of bytes. Raises ConfigError."""
    try:
        size = as_size(above)
    except ValueError:
        size = -1
    if size < 0:
        raise ConfigError(f"above={above!r} is not possible: write a number of bytes, or text such as '1KiB'")
    return size


def library() -> Any:
    """The package. Raises ConfigError without it."""
    try:
        import zstandard
    except ImportError:
        raise ConfigError("Zstd needs the package zstandard: pip install 'rsmq[codecs]'") from None
    return zstandard
