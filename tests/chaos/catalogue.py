"""The catalogue: every scenario of the chaos suite, registered where it is written.

A scenario is a coroutine that is given a `Stage` (a seed, a duration, servers and scenes) and returns a verdict. What
it does to whom, and what must be true afterwards, is said in its registration: the page of results is made from it.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.chaos import scenarios
from tests.chaos.checker import Verdict
from tests.servers import Kind

Play = Callable[..., Awaitable[Verdict]]
KINDS: tuple[Kind, ...] = ("valkey-9.1", "redis-8.2", "valkey-8.1")
ONE: tuple[Kind, ...] = ("valkey-9.1",)


@dataclass(frozen=True, slots=True)
class Scenario:
    """One entry.

    `number` is that of the design's catalogue of faults, or a letter and a number for what it misses. `bound` says what
    is checked beyond: nothing lost, nothing unexpected, order per key, no double commit, dead letters exactly the
    poison, everything settled, nothing leaked. `variants` are further keyword arguments. `is_cheap`: some seconds, so
    that CI can run it. `servers`: on which it runs; one that has to do with rsmq alone needs one server only.
    """

    number: str
    name: str
    injection: str
    bound: str
    play: Play
    variants: Sequence[Mapping[str, Any]] = ({},)
    servers: tuple[Kind, ...] = KINDS
    is_cheap: bool = False

    def titles(self) -> list[tuple[str, Mapping[str, Any]]]:
        """Each variant with its name."""
        return [(" ".join([self.name, *map(str, given.values())]), given) for given in self.variants]

    @property
    def place(self) -> tuple[int, str, int]:
        """What it is sorted by."""
        letter, digits = re.fullmatch(r"([A-Z]?)(\d+)", self.number.partition(",")[0]).groups()  # type: ignore[union-attr]
        return len(letter), letter, int(digits)


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """An entry of the design's catalogue that tests outside this folder play, because what they need lives there."""

    number: str
    name: str
    tests: tuple[str, ...]


CATALOGUE: dict[str, Scenario] = {}


def scenario(number: str, *, injection: str, bound: str = "", **more: Any) -> Callable[[Play], Play]:
    """Register the decorated coroutine under its own name, underscores as blanks."""

    def register(play: Play) -> Play:
        name = play.__name__.replace("_", " ")
        assert name not in CATALOGUE, f"two scenarios are called {name}"
        CATALOGUE[name] = Scenario(number, name, injection, bound, play, **more)
        return play

    return register


def load() -> list[Scenario]:
    """Import all scenarios; returns them in the order of their numbers."""
    for module in pkgutil.iter_modules(scenarios.__path__):
        importlib.import_module(f"{scenarios.__name__}.{module.name}")
    return sorted(CATALOGUE.values(), key=lambda each: each.place)


ELSEWHERE = [
    Elsewhere("21", "a payload over the limit is refused before it is sent", (
        "tests/contract/test_bounds.py::test_too_large_is_refused_before_sending",)),
    Elsewhere("47", "sentinel: the master is lost, the pool leaves a stale one", (
        "tests/sentinel/test_failover.py::test_a_master_is_lost",)),
    Elsewhere("48", "sentinel: the master is cut off with its clients", (
        "tests/sentinel/test_failover.py::test_a_master_is_cut_off",
        "tests/sentinel/test_failover.py::test_a_cut_off_master_is_left")),
    Elsewhere("49", "cluster: a master is killed or stands still, slots move, a worker is killed", (
        "tests/cluster/test_faults.py",)),
    Elsewhere("51", "inbox: reconnect while a batch is written, two sessions, take-over in an acknowledgement", (
        "tests/persistence/test_defects.py::test_no_reconnect_race",
        "tests/persistence/test_defects.py::test_takeover_during_ack",
        "tests/contract/test_devices.py::test_a_device_that_comes_and_goes",
        "tests/contract/test_devices.py::test_backlog_and_live_letters_do_not_race")),
    Elsewhere("51", "inbox: expiry between index and letter, trimming against an acknowledgement, packet-id wrap", (
        "tests/persistence/test_defects.py::test_every_key_expires",
        "tests/persistence/test_defects.py::test_trimming_half_way_through_an_acknowledgement",
        "tests/persistence/test_defects.py::test_packet_id_wrap")),
    Elsewhere("51", "inbox: the server restarts under a session, a slot moves under a device", (
        "tests/contract/test_devices.py::test_the_server_restarts_under_a_session",
        "tests/cluster/test_devices.py::test_a_device_moves_under_load")),
]  # fmt: skip
