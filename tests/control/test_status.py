"""The pure part of `rsmq.control`: where an id is searched for, and what the replies of the server mean."""

from __future__ import annotations

from datetime import timedelta
from uuid import UUID

from rsmq import Cancelled, Running, Settled, Unknown
from rsmq.control.answer import combined
from rsmq.control.finder import candidates, ranges
from rsmq.control.status import Report, group_status
from rsmq.model.message import new_message_id
from rsmq.model.message_ref import Location, MessageRef
from rsmq.model.stream_id import sent_ms
from rsmq.redis.topics import Topic

HOUR = timedelta(hours=1)


def test_time_of_an_id() -> None:
    """Of a UUIDv7 and of a stream id; another id has none."""
    ref = new_message_id()
    assert sent_ms(ref) == UUID(ref).int >> 80
    assert (sent_ms("1718000000000-3"), sent_ms("2/1718000000000-3")) == (1718000000000, 1718000000000)
    assert (sent_ms("order-1"), sent_ms("00000000-0000-4000-8000-000000000000")) == (None, None)


def test_ranges_grow_and_do_not_overlap() -> None:
    """Each millisecond around the time is looked at once, the nearest first."""
    seen: list[int] = []
    for start, end in ranges([10_000_000]):
        assert not any(int(start) <= each <= int(end) for each in seen)
        seen += [int(start), int(end)]
    assert (min(seen), max(seen)) == (9_100_000, 10_900_000)


def test_partitions_to_search() -> None:
    """A ref and a key name one; a message without a key is where its id belongs, and then anywhere."""
    topic = Topic("orders", 4, 0, "reject", HOUR, 0, 0)
    assert list(candidates(MessageRef.of("x", Location("orders", 2), None), topic, None)) == [(2,)]
    assert list(candidates("3/17-1", topic, None)) == [(3,)]
    assert len(list(candidates("x", topic, "ada"))) == 1
    first, rest = candidates("x", topic, None)
    assert sorted([*first, *rest]) == [0, 1, 2, 3]


def test_status_of_an_old_note() -> None:
    """A parked message whose note could not be kept has no error; a running one has that of the attempt before."""
    base = Report(b"1718000000000", b"5-0", b"m", 10, 2, 2, b"1718000009000", b"1 1718000000000 old", b"", b"m", b"")
    assert group_status("g", b"4-0", base).error is None
    running = group_status("g", b"4-0", base._replace(parked_attempts=-1))
    assert (running.state, running.error, running.attempt) == ("running", "old", 2)
    assert group_status("g", b"6-0", base).state == "unread"


def test_one_answer_for_all_groups() -> None:
    """The least certain one counts."""
    assert combined({"a": "settled", "b": "settled"}) == Settled({"a": "settled", "b": "settled"})
    assert isinstance(combined({"a": "settled", "b": "cancelled"}), Cancelled)
    assert isinstance(combined({"a": "running", "b": "cancelled"}), Running)
    assert isinstance(combined({"a": "running", "b": "unknown"}), Unknown)
    assert isinstance(combined({}), Unknown)
