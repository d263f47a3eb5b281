"""Phones that connect and disconnect: a run with small numbers, and the verdict, which detects each violation."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.examples.program import EXAMPLES, run_python

SOURCE = EXAMPLES / "devices"
EVENTS = {"+": "connected", "-": "left", "n": "new", "a": "again"}
MODULES = ("ledger", "verdict", "history", "passenger")


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The modules of the example can be imported, and are forgotten afterwards."""
    monkeypatch.syspath_prepend(str(SOURCE))
    yield
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.fixture
def verdict(devices: None) -> ModuleType:
    """The verdict module."""
    return importlib.import_module("verdict")


@pytest.fixture
def history(devices: None) -> ModuleType:
    """The history module."""
    return importlib.import_module("history")


def entries(*lines: str) -> list[object]:
    """Ledger entries from `ms event phone seq flight published_ms`, with + - n a for the events."""
    found: list[object] = []
    for at, event, phone, *numbers in map(str.split, lines):
        found.append(importlib.import_module("ledger").Entry(float(at), EVENTS[event], phone, *map(int, numbers)))
    return found


def test_run_with_a_killed_gateway_has_a_good_verdict(env: dict[str, str], tmp_path: Path) -> None:
    """Phones come and go, a gateway is killed, every letter arrives: the verdict is good and the chart is drawn."""
    output = run_python(
        SOURCE / "run.py", "--phones", "40", "--flights", "30", "--seconds", "2", "--chart", "chart.svg",
        cwd=tmp_path, env=env,
    )  # fmt: skip
    assert output.splitlines()[-1] == "Nothing lost, order kept."
    published, received = (count(output, title) for title in ("published for a phone", "received"))
    assert published == received > 0
    assert "<svg" in (tmp_path / "chart.svg").read_text()


def count(output: str, title: str) -> int:
    """A number of the verdict."""
    found = re.search(rf"^ *{title} +([0-9,]+) *$", output, re.MULTILINE)
    assert found is not None, output
    return int(found[1].replace(",", ""))


def test_run_with_a_wrong_number_prints_a_usage_error(tmp_path: Path, env: dict[str, str]) -> None:
    """An impossible number gives exit code 2 and no traceback."""
    command = [sys.executable, str(SOURCE / "run.py"), "--phones", "0"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "greater than or equal to 2" in " ".join(done.stderr.split()) or "range" in done.stderr


def test_passengers_of_a_departure_are_always_the_same(devices: None) -> None:
    """Publisher, worker and verdict get the same passengers, none of them twice."""
    passenger = importlib.import_module("passenger")
    departures = importlib.import_module("rsmq.cli.demo.flight").read_departures(20)
    for departure in departures:
        aboard = passenger.passengers(departure, 1000)
        assert aboard == passenger.passengers(departure, 1000)
        assert 50 <= len(set(aboard)) == len(aboard) <= 180
    assert len(passenger.passengers(departures[0], 10)) == 5


GOOD = ["1 + p 0 0 0", "2 n p 1 0 1", "3 n p 2 1 1", "4 n p 3 2 1"]
CASES = {
    "good": (GOOD, {}),
    "again, marked": ([*GOOD, "5 a p 2 1 1"], {"again": 1}),
    "lost": (GOOD[:-1], {"lost": 1}),
    "again, unmarked": ([*GOOD, "5 n p 2 1 1"], {"unmarked": 1}),
    "out of order": (["1 n p 1 1 1", "2 n p 2 0 1", "3 n p 3 2 1"], {"out_of_order": 1}),
    "seqs out of order": (["1 n p 2 0 1", "2 n p 1 1 1", "3 n p 3 2 1"], {"out_of_order": 1}),
    "at the wrong phone": ([*GOOD, "5 n q 1 1 1"], {"unexpected": 1}),
}


@pytest.mark.parametrize("case", CASES)
def test_verdict_detects_each_violation(verdict: ModuleType, case: str) -> None:
    """Each violation has its own count and makes the verdict bad; a marked repeat does not."""
    departures = importlib.import_module("rsmq.cli.demo.flight").read_departures(3)
    same_airport = [departure.model_copy(update={"origin": "JFK"}) for departure in departures]
    lines, wrong = CASES[case]
    judged = verdict.judge(same_airport, lambda departure: ["p"], entries(*lines))
    counts = ("again", "lost", "unmarked", "out_of_order", "unexpected")
    assert {name: getattr(judged, name) for name in counts} == dict.fromkeys(counts, 0) | wrong
    assert judged.is_good == (case in ("good", "again, marked"))


@pytest.mark.parametrize("word", ["left", "dropped"])
def test_verdict_is_bad_when_the_server_kept_or_dropped_letters(verdict: ModuleType, word: str) -> None:
    """A letter that is left in an inbox, or was dropped, makes the verdict bad."""
    assert verdict.judge([], lambda departure: [], []).is_good
    assert not verdict.judge([], lambda departure: [], [], **{word: 1}).is_good


def test_history_counts_letters_away_and_on_their_way(history: ModuleType) -> None:
    """A letter is away until its phone connects, then on its way; a killed gateway takes its phones offline."""
    lines = (
        "1000 + p 0 0 0",
        "2000 n p 1 0 0",
        "3000 n p 2 1 2500",
        "3500 + q 0 0 0",
        "5000 + p 0 0 0",
        "6000 - p 0 0 0",
    )
    told = history.History(entries(*lines), 0.0, (4.0, 4.5), ["p"])
    times = importlib.import_module("numpy").array([0.5, 1.5, 2.7, 3.7, 4.2, 5.5])
    assert told.away.at(times).tolist() == [1, 0, 0, 0, 0, 0]
    assert told.on_its_way.at(times).tolist() == [0, 1, 1, 0, 0, 0]
    assert told.connected.at(times).tolist() == [0, 1, 1, 2, 1, 2]
    assert [(visit.start, visit.letters, visit.seconds) for visit in told.visits] == [(1.0, 1, 1.0)]
    assert told.latencies == [0.5]
