"""How long a member has settled nothing: counted from looks at its numbers."""

from __future__ import annotations

from rsmq.model.standstill import ENDINGS, Standstill
from rsmq.model.work import Work

BUSY, IDLE = Work(ready=1), Work()


def test_what_is_there_from_one_look_to_the_next_stands_until_something_ends() -> None:
    """Each way to leave the backlog counts; a retry does not."""
    for name in ENDINGS:
        standstill = Standstill()
        looks = [({}, 10.0), ({"retried": 5, "failed": 5}, 12.0), ({name: 1}, 14.0), ({name: 1}, 15.5)]
        assert [standstill.seconds(stats, BUSY, at) for stats, at in looks] == [0.0, 2.0, 0.0, 1.5]


def test_time_without_work_does_not_count() -> None:
    """A message that comes after a quiet hour has just come; what waits for a retry or a time is no work yet."""
    standstill = Standstill()
    assert standstill.seconds({}, IDLE, 1.0) is None
    assert standstill.seconds({"settled": 3}, IDLE, 10.0) == 0.0
    assert standstill.seconds({"settled": 3}, Work(waiting_for_retry=1, waiting_for_time=2), 3610.0) == 3600.0
    assert standstill.seconds({"settled": 3}, BUSY, 3612.0) == 0.0
    assert standstill.seconds({"settled": 3}, Work(waiting_for_key=1), 3614.0) == 2.0
    assert standstill.seconds({"settled": 3}, IDLE, 3616.0) == 3606.0
    assert standstill.seconds({"settled": 3}, BUSY, 3618.0) == 0.0
