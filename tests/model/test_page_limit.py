"""How pages shrink and grow."""

from __future__ import annotations

import logging

import pytest

from rsmq.errors import BrokerUnavailable
from rsmq.model.page_limit import FIRST_HOLD, LEAST, SHORT, PageLimit


class Clock:
    """Moves when a test sets it."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def ask(limit: PageLimit, most: int, allowed: int) -> int:
    """One page; 0 if its answer broke, because it was larger than what is allowed."""
    size = limit.of(most)
    try:
        with limit.asking():
            if size > allowed:
                broken = BrokerUnavailable("closed by server")
                broken.is_broken = True
                raise broken
    except BrokerUnavailable:
        return 0
    return size


def test_pages_become_smaller_until_they_come_and_are_seldom_too_large_again(caplog: pytest.LogCaptureFixture) -> None:
    """Down to one entry, if need be; the log names the setting of the server."""
    clock = Clock()
    limit, sizes = PageLimit(clock), list[int]()
    for _ in range(600):
        sizes.append(ask(limit, 200, 60))
        clock.now += 0.25
    assert max(sizes) == 50
    assert sizes.count(0) <= 8  # 150 seconds
    assert "client-output-buffer-limit" in caplog.text
    limit = PageLimit(clock)
    assert [ask(limit, 200, 1) for _ in range(10)][-1] == 1
    for _ in range(100):
        limit.broke(limit.part, "closed")
    assert limit.part == LEAST
    assert limit.of(200) == 1


def test_pages_are_whole_again_soon_after_a_restart(caplog: pytest.LogCaptureFixture) -> None:
    """A single break is no limit, and one that lasts costs small pages for seconds, not for minutes."""
    clock = Clock()
    limit = PageLimit(clock)
    assert ask(limit, 200, 0) == 0
    assert not caplog.records
    for _ in range(3):
        ask(limit, 200, 0)
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            clock.now += SHORT
            ask(limit, 200, 1000)
    assert limit.part == 1


def test_answers_that_were_asked_for_together_count_once() -> None:
    """All of them are lost with one connection."""
    limit = PageLimit()
    for _ in range(20):
        limit.broke(1.0, "closed")
    assert limit.part == 0.5


def test_other_failures_say_nothing_of_the_size() -> None:
    """A refused connection, or a server that is full."""
    limit = PageLimit()
    for _ in range(3):
        with pytest.raises(BrokerUnavailable), limit.asking():
            raise BrokerUnavailable("connection refused")
    assert limit.part == 1
    assert FIRST_HOLD > SHORT
