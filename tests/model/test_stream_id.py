"""The ids of stream entries."""

import pytest

from rsmq.model.stream_id import following_id

LARGEST = 2**64 - 1


@pytest.mark.parametrize(
    ("entry_id", "following"),
    [
        (b"5-0", b"5-1"),
        (b"5", b"5-1"),
        (b"5-%d" % LARGEST, b"6-0"),
        (b"%d-%d" % (LARGEST, LARGEST), b"%d-%d" % (LARGEST, LARGEST)),
    ],
)
def test_following_id_is_the_next_one_that_a_stream_can_have(entry_id: bytes, following: bytes) -> None:
    """The largest one has none."""
    assert following_id(entry_id) == following
