"""Chaos: a user's handlers under kills, pauses and cuts, and a verdict that detects broken promises."""

from __future__ import annotations

from pathlib import Path

import pytest

from rsmq import ConfigError
from rsmq.testing import Chaos, Event, MoreThanOnce, Never, OutOfOrder, Stuck
from rsmq.testing.ledger import Ledger, LedgerWriter
from rsmq.testing.verdict import RunHistory, StoredEntry, Where, judge

TARGET = "tests.testing.application:broker"


@pytest.mark.chaos
async def test_chaos_with_all_faults_loses_nothing() -> None:
    """Kill, pause, reset, restart, cut: all groups handle every message, also those that handlers published."""
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
    assert len(chaos.processes) > 2, "the killed worker was replaced"


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        ("tests.testing.application", "is not a Broker with handlers: write module:broker"),
        ("tests.testing.application:router", "is not a Broker with handlers"),
        ("tests.testing.application:forgetful", "is not a Broker with handlers"),
        ("tests.testing.nowhere:broker", "cannot be imported .*: write module:broker"),
    ],
)
async def test_chaos_with_a_wrong_target_is_refused(target: str, problem: str) -> None:
    """A target that cannot be served is refused before any worker starts."""
    with pytest.raises(ConfigError, match=problem):
        async with Chaos(target):
            pass


def test_ledger_of_killed_writers_has_all_whole_lines(tmp_path: Path) -> None:
    """Half a line of a process that was killed while it wrote does not affect the line of the next one."""
    ledger = Ledger(tmp_path / "ledger", Event)
    LedgerWriter(ledger.path).write(event("start", "a"))
    whole = ledger.path.read_bytes()
    for length in range(1, len(whole)):
        ledger.path.write_bytes(whole + whole[:length])
        LedgerWriter(ledger.path).write(event("commit", "b"))
        seen = [(each.what, each.message_id) for each in Ledger(ledger.path, Event).events()]
        assert seen in ([("start", "a"), ("commit", "b")], [("start", "a"), ("start", "a"), ("commit", "b")])
    assert [each.what for each in ledger.events()].count("commit") == 1


# -- the verdict, without processes

BILLING = ("orders", "billing")


def event(what: str, message_id: str, pid: int = 1) -> Event:
    """An event of the group billing."""
    return Event(what, pid, 0.0, *BILLING, message_id)  # type: ignore[arg-type]


def stored(*ids: str, key: str | None = "k") -> list[StoredEntry]:
    """Entries with one key."""
    return [StoredEntry("orders", 0, key, each) for each in ids]


def run(*names: str) -> list[Event]:
    """Messages that were started and finished."""
    return [event(what, name) for name in names for what in ("start", "commit")]


def test_verdict_on_a_good_run_has_no_findings() -> None:
    """Each message was handled one time or is a dead letter."""
    dead = frozenset({Where(*BILLING, "b")})
    verdict = judge(RunHistory({BILLING: "single"}, stored("a", "b", "c"), dead=dead, events=run("a", "c")))
    assert (verdict.findings, verdict.handled, verdict.dead) == ((), 2, 1)
    verdict.assert_nothing_lost()


def test_verdict_finds_lost_messages() -> None:
    """Lost: in the topic and never handled, or confirmed and not in the topic."""
    verdict = judge(RunHistory({BILLING: "single"}, stored("a", "b"), [("orders", "c")], events=run("a")))
    assert verdict.faults == [Never(Where(*BILLING, "b")), Never(Where(*BILLING, "c"))]
    with pytest.raises(AssertionError, match="1 handled, 0 dead letters; 2 Never"):
        verdict.assert_nothing_lost()


def test_verdict_counts_an_unfinished_message_as_lost() -> None:
    """A start without a commit is not enough."""
    verdict = judge(RunHistory({BILLING: "single"}, stored("a"), events=[event("start", "a")]))
    assert verdict.faults == [Never(Where(*BILLING, "a"))]


def test_verdict_finds_repeats_without_an_excuse() -> None:
    """Handled twice is a fault, unless a fault was injected into one of the workers."""
    events = [*run("a"), event("commit", "a", pid=2)]
    history = RunHistory({BILLING: "single"}, stored("a"), events=events)
    assert judge(history).faults == [MoreThanOnce(Where(*BILLING, "a"), (1, 2))]
    history.excused = {1: "was killed"}
    verdict = judge(history)
    assert verdict.faults == []
    assert verdict.repeats == [MoreThanOnce(Where(*BILLING, "a"), (1, 2), "was killed")]
    assert "1 MoreThanOnce (was killed)" in str(verdict)


def test_verdict_finds_messages_out_of_order() -> None:
    """A message must not start before an earlier one of its key has finished; without key or order it may."""
    events = [event("start", "b"), *run("a"), event("commit", "b")]
    history = RunHistory({BILLING: "single"}, stored("a", "b"), events=events)
    assert judge(history).faults == [OutOfOrder(Where(*BILLING, "b"), "a")]
    assert judge(RunHistory({BILLING: "none"}, stored("a", "b"), events=events)).faults == []
    assert judge(RunHistory({BILLING: "single"}, stored("a", "b", key=None), events=events)).faults == []


def test_verdict_checks_the_order_within_a_batch() -> None:
    """The messages of a batch start together, in order; a second process must wait for the first one."""
    together = [event("start", "a"), event("start", "b"), event("commit", "a"), event("commit", "b")]
    history = RunHistory({BILLING: "batch"}, stored("a", "b"), events=together)
    assert judge(history).faults == []
    history.events = [together[1], together[0], *together[2:]]
    assert judge(history).faults == [OutOfOrder(Where(*BILLING, "b"), "a")]
    history.events = [together[0], event("start", "b", pid=2), *together[2:]]
    assert judge(history).faults == [OutOfOrder(Where(*BILLING, "b"), "a")]


def test_verdict_finds_unsettled_messages() -> None:
    """Something that the server still holds is a fault."""
    assert judge(RunHistory({BILLING: "single"}, holds=["orders.0: pending"])).faults == [Stuck("orders.0: pending")]
