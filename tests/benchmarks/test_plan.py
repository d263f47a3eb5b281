"""The plan on paper is arithmetic over measured costs, and its costs are those that were measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.plan import Plan, costs_of
from benchmarks.scale import SECTION, STUDIES, power, verdict
from benchmarks.section import RESULTS

PLAN = Plan(
    publish_server_us=4, consume_server_us=4, publish_client_us=3, consume_client_us=3, publish_commands=0.01,
    consume_commands=0.02, entry_bytes=250, device_bytes=1200, session_bytes=1000, letter_us=5,
)  # fmt: skip


def test_masters_follow_the_load() -> None:
    """Twice the messages need twice the cores; each further group costs what a group costs; never fewer than three."""
    assert PLAN.server_cores == pytest.approx(8.05)
    assert PLAN.masters_by_cpu == 21
    assert replace(PLAN, messages=2_000_000).server_cores == pytest.approx(16.05)
    assert replace(PLAN, groups=3).server_cores == pytest.approx(16.05)
    assert replace(PLAN, messages=1000, devices=0, letters=0).masters == 3


def test_memory_may_decide() -> None:
    """A long outage of the consumers has to fit."""
    assert PLAN.devices_bytes == pytest.approx(10_000_000 * 1400)
    day = replace(PLAN, outage_seconds=86_400)
    assert day.masters == day.masters_by_memory > day.masters_by_cpu
    assert any("masters by memory" in line for line in day.page())


def test_publishing_one_by_one_needs_more_masters() -> None:
    """Each way of publishing has a line; 100 million devices have one, too."""
    plan = replace(PLAN, publish_at_once_us=[(1, 22.0), (64, 4.0)])
    batches, many, single = [line.split("|")[1:5] for line in plan.cases() if line[:3] in ("| i", "| `")]
    assert batches[2:] == many[2:]
    assert (single[0].strip(), float(single[3])) == ("`publish`, one by one", pytest.approx(66 / 21, abs=0.01))
    assert any(line.startswith("100,000,000 devices") for line in plan.cases())


def test_power_of_a_growing_cost_is_found() -> None:
    """Constant is 0, in proportion 1."""
    assert power([10, 1000], [5, 5]) == pytest.approx(0)
    assert power([10, 1000], [5, 500]) == pytest.approx(1)
    study = next(each for each in STUDIES if each.name == "delayed")
    flat = [dict.fromkeys(study.watched, 3.0)] * 3
    assert verdict(study, flat).startswith("**In proportion")
    assert "longest call" in verdict(study, [*flat[:2], {**flat[0], "longest_ms": 300.0}])


def test_the_plan_uses_what_was_measured() -> None:
    """The costs on the page are those of the two files of figures."""
    report = SECTION.read()
    assert set(report["studies"]) == {study.name for study in STUDIES}
    plan = costs_of(RESULTS, report["studies"])
    assert plan["entry_bytes"] == report["plan"]["entry_bytes"]
