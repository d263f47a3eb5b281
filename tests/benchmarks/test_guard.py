"""The price of a message must not creep up: CPU and commands per message beside the bare client, in one run.

Commands are counted, so their bounds are tight. CPU time is taken as the ratio to the bare client in the same short
rounds; its bounds leave room for a busy machine and for other servers, and still stand far below what a
single awaited command, task or timer a message costs.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pytest

from rsmq.cli.bench.run import BY_NAME
from tests.servers import Server

ROOT: Final = Path(__file__).parents[2]
Rounds = Mapping[str, list[dict[str, float]]]

MOST_CPU: Final = {
    "many": 0.9, "concurrent": 1.6, "send": 0.6, "single": 3.0, "typed": 3.5, "single-key": 3.0,
    "single-data": 3.0, "limited": 3.3, "batch": 2.0, "suspending": 2.5,
}  # fmt: skip
"""Times the client CPU of the bare client. Where there are goals, they are 0.25, 0.5, 1.0, 1.3, 0.7 and 1.5."""
MOST_SERVER_CPU: Final = {
    "many": 3.5, "concurrent": 5.0, "send": 3.0, "single": 3.0, "typed": 3.0, "single-key": 3.0,
    "single-data": 3.0, "limited": 3.0, "batch": 3.0, "suspending": 4.0,
}  # fmt: skip
"""Times the server CPU of the bare client. For a letter that is one that writes the same keys."""
MOST_COMMANDS: Final = {
    "many": 1.02, "concurrent": 1.02, "send": 0.05, "single": 0.03, "typed": 0.03,
    "single-key": 0.03, "single-data": 0.03, "limited": 0.03, "batch": 0.03, "suspending": 0.05,
}  # fmt: skip
"""Commands sent per message, with 8 partitions: to publish, an XADD as the bare client sends it, and nothing else. All
else is shared: one read for many, one acknowledgement for many, one call for many letters."""


@pytest.fixture(scope="module")
def rounds() -> Rounds:
    """Every trial a few times in turn, on a server of its own."""
    with Server(aof=True) as server:
        done = subprocess.run(
            [sys.executable, "-m", "tests.benchmarks.probe", server.url],
            cwd=ROOT, capture_output=True, text=True, timeout=250, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result: Rounds = json.loads(done.stdout)
    return result


def best_ratio(rounds: Rounds, name: str, figure: str) -> float:
    """The median of the rounds' ratios, or the ratio of the least of each: noise spoils one or the other."""
    base = BY_NAME[name].base
    assert base is not None
    mine, bare = ([cost[figure] for cost in rounds[each]] for each in (name, base))
    ratios = [one / max(0.01, other) for one, other in zip(mine, bare, strict=True)]
    return min(statistics.median(ratios), min(mine) / max(0.01, min(bare)))


@pytest.mark.parametrize("name", MOST_CPU)
def test_client_cpu_stays_near_the_bare_client(rounds: Rounds, name: str) -> None:
    """What a message costs a process, times what it costs a hand-written loop."""
    assert best_ratio(rounds, name, "client_us") <= MOST_CPU[name], rounds[name]


@pytest.mark.parametrize("name", MOST_SERVER_CPU)
def test_server_cpu_stays_near_the_bare_client(rounds: Rounds, name: str) -> None:
    """What a message costs the server, times what a hand-written loop costs it."""
    assert best_ratio(rounds, name, "server_us") <= MOST_SERVER_CPU[name], rounds[name]


@pytest.mark.parametrize("name", MOST_COMMANDS)
def test_commands_are_shared_by_many_messages(rounds: Rounds, name: str) -> None:
    """Nothing is sent per message, but its XADD."""
    assert min(cost["commands"] for cost in rounds[name]) <= MOST_COMMANDS[name], rounds[name]


def test_every_measurement_has_a_bound() -> None:
    """A trial that is added is guarded, too."""
    compared = {name for name, trial in BY_NAME.items() if trial.base is not None}
    assert set(MOST_CPU) == set(MOST_SERVER_CPU) == set(MOST_COMMANDS) == compared
