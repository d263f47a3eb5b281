"""The partition of a key: the golden vectors that every client must meet, and what they imply."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsmq.errors import ConfigError
from rsmq.model.partition import partition_for

PAGE = Path(__file__).parents[2] / "docs" / "wire-format.md"
ROW = re.compile(
    r"^\| `(\"(?:[^`])*\")`(?: times (\d+))? \| `(0x[0-9a-f]{8})` \| (\d+) \| (\d+) \| (\d+) \|$", re.MULTILINE
)


def golden() -> list[tuple[str, int, tuple[int, int, int]]]:
    """The vectors of the page: key (a JSON string, repeated where it says so), hash, partition of 8, 12 and 1024."""
    rows = ROW.findall(PAGE.read_text(encoding="utf-8"))
    return [(json.loads(key) * int(times or 1), int(value, 16), tuple(map(int, of))) for key, times, value, *of in rows]  # type: ignore[misc]


def test_key_that_is_not_unicode_is_refused() -> None:
    """JSON can hold a lone surrogate, and mmh3 ends the process with a segmentation fault for one."""
    with pytest.raises(ConfigError, match="not valid Unicode"):
        partition_for(json.loads('"\\ud800"'), 8)


def test_the_page_has_enough_vectors() -> None:
    """The golden vectors cover the empty key, ASCII, UTF-8, emoji and long keys."""
    keys = [key for key, _, _ in golden()]
    assert len(set(keys)) >= 12
    assert "" in keys
    assert any(key.isascii() and key for key in keys)
    assert any(ord(char) > 0xFFFF for key in keys for char in key)
    assert any(len(key) > 200 for key in keys)


@pytest.mark.parametrize(("key", "value", "partitions"), golden(), ids=lambda part: str(part)[:12])
def test_the_golden_vectors_hold(key: str, value: int, partitions: tuple[int, int, int]) -> None:
    """The code gives what the page promises to other languages."""
    assert partition_for(key, 2**32) == value
    assert tuple(partition_for(key, count) for count in (8, 12, 1024)) == partitions


@given(st.text(st.characters(exclude_categories=["Cs"])), st.integers(1, 1024))
def test_text_and_its_bytes_are_one_key(key: str, partitions: int) -> None:
    """A key hashes by its UTF-8 bytes, into the range."""
    assert 0 <= partition_for(key, partitions) < partitions
    assert partition_for(key, partitions) == partition_for(key.encode(), partitions)


def test_keys_spread_evenly_over_partitions() -> None:
    """A thousand customers leave no partition empty and fill none twice over."""
    counts = [0] * 8
    for number in range(1000):
        counts[partition_for(f"customer-{number}", 8)] += 1
    assert min(counts) > 60
    assert max(counts) < 250
