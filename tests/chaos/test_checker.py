"""The checker detects each kind of broken promise in a bad ledger."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.chaos.checker import (
    DoubleCommit,
    DuplicateStart,
    Finding,
    History,
    Innocent,
    Leak,
    MoreThanOnce,
    Never,
    OutOfOrder,
    Spared,
    Stuck,
    TooMany,
    Unexpected,
    check,
)
from tests.chaos.ledger import Event, EventLedger, EventWriter
from tests.chaos.scenarios.permits import Calls, most_at_once
from tests.chaos.worker import provider_of


def run(*words: str) -> list[Event]:
    """Events in short form: `start:k0` is message 0 of key k, `commit:k0@7` by process 7."""
    events = []
    for at, word in enumerate(words):
        what, _, rest = word.partition(":")
        name, _, pid = rest.partition("@")
        events.append(Event(what, int(pid or 1), float(at), name[0], int(name[1:]), 1))
    return events


def handled(*names: str) -> list[Event]:
    """Messages handled one after the other."""
    return run(*[word for name in names for word in (f"start:{name}", f"commit:{name}")])


STORED = {("k", 0), ("k", 1), ("k", 2)}
GOOD = handled("k0", "k1", "k2")


def faults(history: History) -> list[Finding]:
    """The broken promises."""
    return check(history).faults


def test_a_good_run_has_no_findings() -> None:
    """Everything once and in order."""
    assert check(History(stored=STORED, events=GOOD)).findings == []


def test_a_lost_message_is_found() -> None:
    """Published, never handled; started only does not count."""
    assert faults(History(stored=STORED, events=[*handled("k0", "k1"), *run("start:k2")])) == [Never(("k", 2))]


def test_message_removed_by_another_client_is_reported_as_excused() -> None:
    """A trimmed message is a finding with its reason, not a fault; a handled one is no finding."""
    history = History(stored=STORED, events=handled("k0", "k1"), given_up={("k", 1): "trimmed", ("k", 2): "trimmed"})
    verdict = check(history)
    assert verdict.findings == [Never(("k", 2), "trimmed")]
    assert verdict.faults == []
    assert "1 Never (trimmed)" in str(verdict)


def test_message_removed_by_another_client_may_come_late() -> None:
    """Its order is not checked; that of all other messages is."""
    late = History(stored=STORED, events=handled("k1", "k2", "k0"), given_up={("k", 0): "its consumer was deleted"})
    assert faults(late) == []
    assert faults(replace(late, given_up={("k", 1): "its consumer was deleted"})) == [OutOfOrder(("k", 1), ("k", 0))]


def test_a_message_of_unknown_outcome_may_be_missing_or_there() -> None:
    """It was not confirmed."""
    assert faults(History(stored=STORED, unknown={("k", 3)}, events=GOOD)) == []
    assert faults(History(stored=STORED, unknown={("k", 3)}, events=GOOD + handled("k3"))) == []


def test_a_message_from_nowhere_is_found() -> None:
    """Handled, but never published."""
    assert faults(History(stored=STORED, events=GOOD + handled("k9"))) == [Unexpected(("k", 9))]


def test_a_repeat_needs_an_excuse() -> None:
    """A duplicate is a fault, unless one of its handlers ran in a process with an injected fault."""
    twice = GOOD + run("start:k2@7", "commit:k2@7")
    assert faults(History(stored=STORED, events=twice)) == [MoreThanOnce(("k", 2), (1, 7))]
    excused = check(History(stored=STORED, events=twice, excused={1: "killed"}))
    assert excused.faults == []
    assert excused.repeats == [MoreThanOnce(("k", 2), (1, 7), "killed")]
    assert faults(History(stored=STORED, events=twice, excused={8: "killed"})) == [MoreThanOnce(("k", 2), (1, 7))]


def test_swapped_messages_of_a_key_are_found() -> None:
    """Message 2 before message 1."""
    assert faults(History(stored=STORED, events=handled("k0", "k2", "k1"))) == [OutOfOrder(("k", 2), ("k", 1))]


def test_overlapping_messages_of_a_key_are_found() -> None:
    """In order, but the second started before the first was done."""
    events = run("start:k0", "start:k1", "commit:k0", "commit:k1")
    assert faults(History(stored=STORED - {("k", 2)}, events=events)) == [OutOfOrder(("k", 1), ("k", 0))]
    assert faults(History(stored=STORED - {("k", 2)}, events=events, is_ordered=False)) == []


def test_a_repeat_is_no_disorder() -> None:
    """A redelivery may repeat an earlier message behind a later one; other keys do not matter at all."""
    events = handled("k0", "k1", "k2", "k1", "j0")
    stored = STORED | {("j", 0)}
    assert faults(History(stored=stored, events=events, excused={1: "killed"})) == []


def test_dead_letters_other_than_the_poison_are_found() -> None:
    """The dead letters must be exactly the poison: not more, not less, not twice."""
    events = handled("k0", "k1")
    poison = {("k", 2)}
    assert faults(History(STORED, poison=poison, dead=[(("k", 2), "crashed")], events=events)) == []
    assert faults(History(STORED, poison=poison, events=events)) == [Never(("k", 2)), Spared(("k", 2), 0)]
    assert faults(History(STORED, poison=poison, dead=[(("k", 2), "x")] * 2, events=events)) == [Spared(("k", 2), 2)]
    assert faults(History(STORED, dead=[(("k", 2), "crashed")], events=events)) == [Innocent(("k", 2), "crashed")]


def test_unsettled_message_is_found() -> None:
    """A handled message must also be settled."""
    assert faults(History(stored=STORED, events=GOOD, holds=["3 pending"])) == [Stuck("3 pending")]


@given(st.data())
def test_any_damage_to_a_good_run_is_found(data: st.DataObject) -> None:
    """Drop, repeat or swap anything in a good ledger of any size, and it is not good any more."""
    counts = data.draw(st.lists(st.integers(2, 6), min_size=1, max_size=4))
    order = [(key, n) for key, count in enumerate(counts) for n in range(count)]
    names = [f"{'abcd'[key]}{n}" for key, n in order]
    stored = {(name[0], int(name[1:])) for name in names}
    damaged = list(names)
    at = data.draw(st.integers(0, len(names) - 1))
    damage = data.draw(st.sampled_from(["drop", "repeat", "swap"]))
    if damage == "drop":
        del damaged[at]
    elif damage == "repeat":
        damaged.append(damaged[at])
    else:
        while order[at][1] + 1 >= counts[order[at][0]]:
            at -= 1
        damaged[at], damaged[at + 1] = damaged[at + 1], damaged[at]
    assert check(History(stored=stored, events=handled(*names))).findings == []
    assert faults(History(stored=stored, events=handled(*damaged)))


def test_a_ledger_is_read_while_it_is_written(tmp_path: Path) -> None:
    """Half a line is not yet an event."""
    ledger, writer = EventLedger(tmp_path / "ledger"), EventWriter(tmp_path / "ledger")
    writer.note("start", "k", 1, 1)
    assert [(event.what, event.key, event.n) for event in ledger.events()] == [("start", "k", 1)]
    with ledger.path.open("ab") as file:
        file.write(b'{"what":"commit","pid":1,"at":2.0,"key":"k"')
    assert len(ledger.events()) == 1
    with ledger.path.open("ab") as file:
        file.write(b',"n":1,"attempt":1}\n')
    assert ledger.commits() == {("k", 1)}


def test_half_a_line_of_a_killed_process_is_ignored(tmp_path: Path) -> None:
    """Half a line is ignored if its process wrote nothing more; otherwise the file is damaged."""
    half = b'{"what":"try","pid":1,"at":2.0,"key":"k'
    ledger, writer = EventLedger(tmp_path / "ledger"), EventWriter(tmp_path / "ledger")
    with ledger.path.open("ab") as file:
        file.write(b'\n{"what":"try","pid":1,"at":2.0,"key":"k","n":1}\n' + half)
    writer.note("start", "k", 7, 1)
    assert [(event.what, event.n) for event in ledger.events()] == [("try", 1), ("start", 7)]
    assert ledger.torn == [half]
    with ledger.path.open("ab") as file:
        file.write(b'\n{"what":"try","pid":1,"at":3.0,"key":"k","n":2}\n')
    with pytest.raises(ValueError, match="damaged"):
        ledger.events()


def test_a_second_start_needs_an_excuse() -> None:
    """Started again although the first start is open or was done; after a failure it must be."""
    again = GOOD[:4] + run("start:k2@7", "start:k2@1", "commit:k2@1")
    assert faults(History(stored=STORED, events=again)) == [DuplicateStart(("k", 2), (7, 1))]
    assert check(History(stored=STORED, events=again, excused={7: "killed"})).faults == []
    failed = GOOD[:4] + run("start:k2@7", "fail:k2@7", "start:k2@1", "commit:k2@1")
    assert check(History(stored=STORED, events=failed)).findings == []


def test_more_repeats_than_a_fault_may_cost_are_found() -> None:
    """Even excused repeats are limited if the bound is known."""
    again = handled("k0") + run("start:k1@7", "start:k1@1", "commit:k1@1", "start:k2@7", "start:k2@1", "commit:k2@1")
    history = History(stored=STORED, events=again, excused={7: "killed"}, most_repeats=1)
    assert faults(history) == [TooMany(2, 1)]
    history.most_repeats = 2
    assert faults(history) == []


def test_a_double_commit_is_found() -> None:
    """Two settlements of one message that the server has accepted, though it was handled once."""
    twice = GOOD + run("settle:k0@1", "settle:k1@1", "settle:k1@7")
    assert faults(History(stored=STORED, events=twice)) == [DoubleCommit(("k", 1), (1, 7))]
    assert faults(History(stored=STORED, events=twice, excused={7: "killed"})) == [DoubleCommit(("k", 1), (1, 7))]
    assert faults(History(stored=STORED, events=twice, rewound="FLUSHALL")) == []


def test_a_leak_is_found() -> None:
    """A leak is something that is left when all processes have stopped."""
    assert faults(History(stored=STORED, events=GOOD, leaks=["a connection"])) == [Leak("a connection")]


def test_a_verdict_names_the_messages() -> None:
    """The text of the verdict names the messages of its findings."""
    history = History(stored=STORED, events=handled("k0", "k2", "k9") + run("start:k0@7", "settle:k0@1", "settle:k0@7"))
    said = str(check(history))
    for kind in (
        "Never(message=('k', 1)",
        "Unexpected(message=('k', 9))",
        "DuplicateStart(message=('k', 0)",
        "DoubleCommit(",
    ):
        assert kind in said


def test_calls_at_once_are_counted_until_they_end_or_their_worker_is_struck() -> None:
    """A killed worker's calls end with it; a second start of a message is another call."""
    calls: Any = Calls()
    calls.stop(SimpleNamespace(now=lambda: 3.0), SimpleNamespace(pid=1))
    events = [
        Event("start", 1, 1.0, "k0", 0), Event("start", 1, 2.0, "k3", 0), Event("commit", 1, 2.5, "k3", 0),
        Event("start", 2, 3.5, "k0", 0), Event("start", 2, 4.0, "k3", 1), Event("fail", 2, 5.0, "k0", 0),
        Event("commit", 2, 6.0, "k3", 1),
    ]  # fmt: skip
    name = provider_of("k0")
    found = sorted(calls.intervals(events))
    assert found == [(name, 1.0, 3.0), (name, 2.0, 2.5), (name, 3.5, 5.0), (name, 4.0, 6.0)]
    assert most_at_once(found) == (2, {name: 2})
    assert most_at_once([*found, (provider_of("k1"), 4.5, 4.6)]) == (3, {name: 2, provider_of("k1"): 1})
    assert most_at_once([(name, 1.0, 2.0), (name, 2.0, 3.0)]) == (1, {name: 1}), "one ends as another begins"
