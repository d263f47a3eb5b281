"""The chaos kit: a user's handlers under kills, pauses and cuts, and a verdict that can condemn."""

from __future__ import annotations

from pathlib import Path

import pytest

from rsmq import ConfigError
from rsmq.testing import Chaos, Event, MoreThanOnce, Never, OutOfOrder, Stuck
from rsmq.testing.ledger import Ledger, Pen
from rsmq.testing.verdict import Stored, Story, Where, judge

TARGET = "tests.testing.application:broker"


@pytest.mark.chaos
async def test_nothing_is_lost() -> None:
    """Kill, pause, break, restart, cut: everything is handled in all groups, what handlers published too."""
    async with Chaos(TARGET, workers=2) as chaos:
        for n in range(300):
            await chaos.publish("shop.orders", {"n": n}, key=f"customer-{n % 10}")
            if n == 60:
                await chaos.handled(40)
                chaos.kill()
            elif n == 120:
                chaos.pause()
            elif n == 180:
                chaos.resume()
                chaos.reset()
            elif n == 240:
                chaos.restart_server()
                chaos.cut()
        verdict = await chaos.verdict()
    verdict.assert_nothing_lost()
    assert verdict.handled == 300 + 297 + 297  # audit, billing without the refused, mail
    assert verdict.dead == 3
    assert len(chaos.hands) > 2, "the killed worker was replaced"


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        ("tests.testing.application", "is no Broker with handlers: write module:broker"),
        ("tests.testing.application:router", "is no Broker with handlers"),
        ("tests.testing.application:forgetful", "is no Broker with handlers"),
        ("tests.testing.nowhere:broker", "names no broker .*: write module:broker"),
    ],
)
async def test_a_wrong_target(target: str, problem: str) -> None:
    """What cannot be served is refused before any worker starts."""
    with pytest.raises(ConfigError, match=problem):
        async with Chaos(target):
            pass


def test_a_ledger_of_killed_writers(tmp_path: Path) -> None:
    """Half a line of a process that was killed while it wrote does not spoil the line of the next one."""
    ledger = Ledger(tmp_path / "ledger")
    Pen(str(ledger.path)).note("start", "t", "g", "a")
    whole = ledger.path.read_bytes()
    for length in range(1, len(whole)):
        ledger.path.write_bytes(whole + whole[:length])
        Pen(str(ledger.path)).note("commit", "t", "g", "b")
        seen = [(each.what, each.message_id) for each in Ledger(ledger.path).events()]
        assert seen in ([("start", "a"), ("commit", "b")], [("start", "a"), ("start", "a"), ("commit", "b")])
    assert ledger.commits() == 1


# -- the verdict, without any process

BILLING = ("orders", "billing")


def event(what: str, message_id: str, pid: int = 1) -> Event:
    """Of group billing."""
    return Event(what, pid, 0.0, *BILLING, message_id)  # type: ignore[arg-type]


def stored(*ids: str, key: str | None = "k") -> list[Stored]:
    """Entries of one key."""
    return [Stored("orders", 0, key, each) for each in ids]


def run(*names: str) -> list[Event]:
    """Each started and ended."""
    return [event(what, name) for name in names for what in ("start", "commit")]


def test_all_is_well() -> None:
    """Handled once, or a dead letter: nothing to report."""
    dead = frozenset({Where(*BILLING, "b")})
    verdict = judge(Story({BILLING: "single"}, stored("a", "b", "c"), dead=dead, events=run("a", "c")))
    assert (verdict.findings, verdict.handled, verdict.dead) == ((), 2, 1)
    verdict.assert_nothing_lost()


def test_lost() -> None:
    """What is in the topic, or was confirmed to a publisher and is not even there, and was never handled."""
    verdict = judge(Story({BILLING: "single"}, stored("a", "b"), [("orders", "c")], events=run("a")))
    assert verdict.faults == [Never(Where(*BILLING, "b")), Never(Where(*BILLING, "c"))]
    with pytest.raises(AssertionError, match="1 handled, 0 dead letters; 2 Never"):
        verdict.assert_nothing_lost()


def test_a_run_that_did_not_end_is_no_handling() -> None:
    """A start alone is nothing."""
    verdict = judge(Story({BILLING: "single"}, stored("a"), events=[event("start", "a")]))
    assert verdict.faults == [Never(Where(*BILLING, "a"))]


def test_repeats_need_an_excuse() -> None:
    """Handled twice is a fault, unless something was done to one of the workers."""
    events = [*run("a"), event("commit", "a", pid=2)]
    story = Story({BILLING: "single"}, stored("a"), events=events)
    assert judge(story).faults == [MoreThanOnce(Where(*BILLING, "a"), (1, 2))]
    story.excused = {1: "was killed"}
    verdict = judge(story)
    assert verdict.faults == []
    assert verdict.repeats == [MoreThanOnce(Where(*BILLING, "a"), (1, 2), "was killed")]
    assert "1 MoreThanOnce (was killed)" in str(verdict)


def test_order() -> None:
    """A message of a key that starts before an earlier one has ended; without a key or with no order it may."""
    events = [event("start", "b"), *run("a"), event("commit", "b")]
    story = Story({BILLING: "single"}, stored("a", "b"), events=events)
    assert judge(story).faults == [OutOfOrder(Where(*BILLING, "b"), "a")]
    assert judge(Story({BILLING: "none"}, stored("a", "b"), events=events)).faults == []
    assert judge(Story({BILLING: "single"}, stored("a", "b", key=None), events=events)).faults == []


def test_order_within_a_batch() -> None:
    """The messages of a batch begin together, in order; of two processes the second must wait for the first."""
    together = [event("start", "a"), event("start", "b"), event("commit", "a"), event("commit", "b")]
    story = Story({BILLING: "batch"}, stored("a", "b"), events=together)
    assert judge(story).faults == []
    story.events = [together[1], together[0], *together[2:]]
    assert judge(story).faults == [OutOfOrder(Where(*BILLING, "b"), "a")]
    story.events = [together[0], event("start", "b", pid=2), *together[2:]]
    assert judge(story).faults == [OutOfOrder(Where(*BILLING, "b"), "a")]


def test_stuck() -> None:
    """What the server still keeps is a fault."""
    assert judge(Story({BILLING: "single"}, holds=["orders.0: pending"])).faults == [Stuck("orders.0: pending")]
