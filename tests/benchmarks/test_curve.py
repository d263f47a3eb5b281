"""What the page about growth says of a curve."""

from __future__ import annotations

import math
from typing import Any

import pytest

from benchmarks.curve import growth, verdict

VALUES = [10, 100, 1000]


def curve(name: str, costs: list[float], *, per_byte: bool = False) -> dict[str, Any]:
    """A curve whose figures all are these."""
    rows = [{"client_us": cost, "server_us": cost, "commands": cost} for cost in costs]
    return {"name": name, "per_byte": per_byte, "of": "message", "values": VALUES, "steps": {"consume": rows}}


def test_growth_is_against_the_least_of_the_smaller_values() -> None:
    """A dear small value, where fixed costs are shared by few, does not hide growth."""
    ratio, _ = growth(VALUES, [9.0, 1.0, 10.0], per_byte=False)
    assert ratio == pytest.approx(10)


def test_the_power_is_that_of_the_last_points() -> None:
    """Twice the cost at ten times the value, twice."""
    _, power = growth([1, *VALUES], [500.0, 1.0, 2.0, 4.0], per_byte=False)
    assert power == pytest.approx(math.log10(2))


def test_a_payload_may_cost_in_proportion() -> None:
    """A cost a byte that stays the same is no growth."""
    assert growth(VALUES, [10.0, 100.0, 1000.0], per_byte=True) == pytest.approx((1, 0))
    assert "constant" in verdict(curve("payload", [10.0, 100.0, 1000.0], per_byte=True))


def test_a_message_must_not_cost_more_because_more_are_waiting() -> None:
    """With an amount of work any growth of a message's cost is more than linear in all."""
    assert verdict(curve("backlog", [1.0, 1.5, 3.0])).startswith("**Faster than linear.**")
    assert verdict(curve("backlog", [1.0, 1.0, 1.1])).startswith("**Not faster than linear.**")


def test_a_shape_may_cost_in_proportion() -> None:
    """Ten times the partitions may cost ten times, not more."""
    assert verdict(curve("partitions", [1.0, 5.0, 50.0])).startswith("**Not faster than linear.**")
    assert verdict(curve("partitions", [1.0, 5.0, 5000.0])).startswith("**Faster than linear.**")
