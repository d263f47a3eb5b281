"""What a new owner knows of messages that wait for a time, before it starts any."""

from __future__ import annotations

from rsmq.consumer.waiting.resting import Resting


def test_a_time_that_is_over_is_asked_about_again() -> None:
    """The message may have been rescheduled since the new owner has read all times: only the server knows."""
    resting = Resting()
    resting.load(1, {b"1-0": 5.0, b"2-0": 7.5})
    assert (resting.due_of(b"1-0"), resting.due_of(b"2-0")) == (5.0, 7.5)
    assert resting.excused == set()


def test_what_the_server_has_named_as_due_may_start() -> None:
    """It cannot be moved any more. The rule is not asked for what was rescheduled."""
    resting = Resting()
    resting.load(1, {b"1-0": 0.0, b"2-0": -1.0, b"3-0": -2.0})
    assert [resting.due_of(each) for each in (b"1-0", b"2-0", b"3-0", b"4-0")] == [None] * 4
    assert resting.excused == {b"2-0"}


def test_what_is_named_before_it_was_looked_at_may_start() -> None:
    """The server names it once. A message that waited for it then would wait for ever."""
    resting = Resting()
    resting.load(1, {b"1-0": 5.0, b"2-0": 7.5})
    resting.named(b"1-0", is_rescheduled=False)
    resting.named(b"2-0", is_rescheduled=True)
    assert [resting.due_of(b"1-0"), resting.due_of(b"2-0")] == [None, None]
    assert (resting.excused, list(resting.forgotten)) == ({b"2-0"}, [b"1-0", b"2-0"])
