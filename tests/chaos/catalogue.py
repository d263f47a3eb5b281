"""The catalogue: every scenario of the chaos suite, registered where it is defined.

A scenario is a coroutine that gets a `Testbed` (servers, runs, a seed, a duration) and returns a verdict. Its
registration says which fault it injects and what must be true afterwards; tests/chaos/README.md is generated from it.
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

Function = Callable[..., Awaitable[Verdict]]
KINDS: tuple[Kind, ...] = ("valkey-9.1", "redis-8.2", "valkey-8.1")
ONE: tuple[Kind, ...] = ("valkey-9.1",)


@dataclass(frozen=True, slots=True)
class Scenario:
    """One entry.

    `number` is that of the design's catalogue of faults, or a letter and a number for a fault that it does not list.
    `injection` is the fault; `bound` says what is checked beyond: nothing lost, nothing unexpected, order per key, no
    double commit, dead letters exactly the poison, everything settled, nothing leaked. `variants` are further keyword
    arguments. `is_cheap`: takes some seconds, so CI can run it. `servers`: the servers on which it runs; a fault that
    does not involve the server needs only one.
    """

    number: str
    name: str
    injection: str
    bound: str
    function: Function
    variants: Sequence[Mapping[str, Any]] = ({},)
    servers: tuple[Kind, ...] = KINDS
    is_cheap: bool = False

    def titles(self) -> list[tuple[str, Mapping[str, Any]]]:
        """Each variant with its name."""
        return [(" ".join([self.name, *map(str, given.values())]), given) for given in self.variants]

    @property
    def sort_key(self) -> tuple[int, str, int]:
        """Numbers first, then the faults with a letter."""
        letter, digits = re.fullmatch(r"([A-Z]?)(\d+)", self.number.partition(",")[0]).groups()  # type: ignore[union-attr]
        return len(letter), letter, int(digits)


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """An entry of the design's catalogue that tests in another folder cover, because they need its fixtures."""

    number: str
    name: str
    tests: tuple[str, ...]


CATALOGUE: dict[str, Scenario] = {}


def scenario(number: str, *, injection: str, bound: str = "", **more: Any) -> Callable[[Function], Function]:
    """Register the decorated coroutine under its name, with spaces for underscores."""

    def register(function: Function) -> Function:
        name = function.__name__.replace("_", " ")
        assert name not in CATALOGUE, f"two scenarios are called {name}"
        CATALOGUE[name] = Scenario(number, name, injection, bound, function, **more)
        return function

    return register


def load() -> list[Scenario]:
    """Import all scenarios; returns them in the order of their numbers."""
    for module in pkgutil.iter_modules(scenarios.__path__):
        importlib.import_module(f"{scenarios.__name__}.{module.name}")
    return sorted(CATALOGUE.values(), key=lambda each: each.sort_key)


ELSEWHERE = [
    Elsewhere("1", "SIGKILL before or after any step: of a relay that sends and cancels rows, of erasing a key", (
        "tests/chaos/test_dying.py",)),
    Elsewhere("1", "SIGKILL of workers that send notifications by three channels, with fallbacks", (
        "tests/chaos/test_notifications_run.py",)),
    Elsewhere("1", "SIGKILL of a publisher around a put of a body, of all while the store fails or keys are rotated", (
        "tests/chaos/test_bodies.py",)),
    Elsewhere("21", "a payload over the limit is refused before it is sent", (
        "tests/contract/test_bounds.py::test_too_large_is_refused_before_sending",)),
    Elsewhere("47", "sentinel: the master is lost, the pool leaves a stale one", (
        "tests/sentinel/test_failover.py::test_a_master_is_lost",)),
    Elsewhere("47", "sentinel: the master is killed, or replaced in order, under MQTT gateways", (
        "tests/sentinel/test_gateway.py",)),
    Elsewhere("45, 47", "sentinel: the master is lost, and the next one's clock is an hour ahead, or behind", (
        "tests/sentinel/test_failover.py::test_next_master_has_another_clock",)),
    Elsewhere("48", "sentinel: the master is cut off with its clients", (
        "tests/sentinel/test_failover.py::test_a_master_is_cut_off",
        "tests/sentinel/test_failover.py::test_a_cut_off_master_is_left")),
    Elsewhere("49", "cluster: a master is killed or stands still, slots move, a worker is killed", (
        "tests/cluster/test_faults.py",)),
    Elsewhere("51", "inbox: reconnect while a batch is written, two sessions, take-over in an acknowledgement", (
        "tests/persistence/test_defects.py::test_reconnect_makes_the_old_session_stale",
        "tests/persistence/test_defects.py::test_ack_of_an_old_session_is_refused_after_a_takeover",
        "tests/contract/test_devices.py::test_a_device_that_comes_and_goes",
        "tests/contract/test_devices.py::test_backlog_and_live_letters_do_not_race")),
    Elsewhere("51", "inbox: expiry between index and letter, trimming against an acknowledgement, packet-id wrap", (
        "tests/persistence/test_defects.py::test_inbox_keys_all_expire_after_their_letters",
        "tests/persistence/test_defects.py::test_ack_of_trimmed_letters_removes_only_the_rest",
        "tests/persistence/test_defects.py::test_packet_id_wrap_skips_the_id_of_an_unacknowledged_letter")),
    Elsewhere("51", "inbox: the server restarts under a session, a slot moves under a device", (
        "tests/contract/test_devices.py::test_the_server_restarts_under_a_session",
        "tests/cluster/test_devices.py::test_device_whose_slot_moves_under_load_gets_all_letters_in_order")),
    Elsewhere("51", "inbox: answers are lost and calls repeated after another client's call, storms of take-overs", (
        "tests/persistence/test_lost_answers.py",)),
    Elsewhere("30, 51", "FLUSHALL under a schedule, delayed messages, a feed and the session of a device", (
        "tests/robustness/test_flushall.py::test_flushall_under_load_every_role_begins_again",
        "tests/persistence/test_endings.py::test_flushall_under_a_session_ends_it_at_the_next_letter")),
]  # fmt: skip
