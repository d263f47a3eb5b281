"""The headers of a message as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Final

from pydantic_core import from_json, to_json

from rsmq.errors import ConfigError, Malformed

LARGEST_HEADERS: Final = 32 << 10
"""Largest size of the headers as JSON. W3C baggage alone may have 8 KiB."""
MOST_PUBLISHED: Final = 24 << 10
"""What a publisher may use of it. The rest is for headers that are added on the way: a fallback says in up to 8 KiB
where a message comes from and why."""
MOST_REMEMBERED: Final = 512
"""Bytes of headers that `check_headers` may get: what it remembers is bounded."""
ONLY_TEXT: Final = {str}
REPLY_TO: Final = "reply-to"
"""The header of a request: where its answer is stored."""


def read_headers(raw: bytes) -> dict[str, str]:
    """Headers from a JSON object. Raises Malformed for anything but an object of strings."""
    if len(raw) > LARGEST_HEADERS:
        raise Malformed(f"the headers have {len(raw)} bytes, more than {LARGEST_HEADERS}")
    try:
        headers = from_json(raw)
    except ValueError as error:
        raise Malformed(f"the headers are not JSON: {error}") from None
    if not isinstance(headers, dict) or not {*map(type, headers.values())} <= ONLY_TEXT:
        raise Malformed("the headers are not a JSON object of strings")
    return headers


check_headers = lru_cache(maxsize=1024)(read_headers)
"""Raises Malformed for wrong headers. The messages of one device all have the same ones."""


def require_text(headers: Mapping[str, str]) -> None:
    """Raises ConfigError for headers that are no mapping of text to text."""
    if type(headers) is not dict and not isinstance(headers, Mapping):
        raise ConfigError(f"headers={headers!r} are not a mapping of names to values")
    if not all(type(part) is str for pair in headers.items() for part in pair):
        raise ConfigError(f"headers={dict(headers)!r}: names and values must be str")


def write_headers(headers: Mapping[str, str], most: int = MOST_PUBLISHED) -> bytes:
    """Headers as a JSON object. Raises ConfigError when they are not Unicode, or larger than `most`: what a publisher
    may use, or for what was published before what a reader accepts."""
    try:
        raw = to_json(headers)
    except ValueError:
        raise ConfigError(f"headers={dict(headers)!r} are not valid Unicode: they have a lone surrogate") from None
    if len(raw) > most:
        raise ConfigError(
            f"the headers have {len(raw)} bytes as JSON: use at most {most}, and put large values into the payload"
        )
    return raw
