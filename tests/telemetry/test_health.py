"""The verdict of the probes, and what goes into it, without a worker."""

from __future__ import annotations

import pytest

from rsmq import ConfigError, Settings
from rsmq.telemetry.endpoint import Address
from rsmq.telemetry.health import Facts, Limits, report, troubles
from rsmq.telemetry.histogram import Histogram
from rsmq.telemetry.pulse import Block

LIMITS = Limits(stall=60, turn=70, read=7, beat=6)
WELL = {"is_serving": True, "beat_age": 1.0, "turned": {"h": 1.0}, "read": {"h": 1.0}}


@pytest.mark.parametrize(
    ("change", "live", "ready"),
    [
        ({}, True, True),
        ({"is_serving": False}, True, False),
        ({"is_stopping": True}, True, False),
        ({"loop_late": 0.9}, True, True),
        ({"loop_late": 1.0}, True, False),
        ({"loop_late": 59.0}, True, False),
        ({"loop_late": 60.0}, False, False),
        ({"beat_age": 5.9}, True, True),
        ({"beat_age": 600.0}, True, False),
        ({"beat_age": None}, True, True),
        ({"beat_is_alive": False}, False, True),
        ({"read": {"h": 1.0, "i": 8.0}}, True, False),
        ({"read": {"h": 40.0}, "turned": {"h": 40.0}, "loop_late": 40.0}, True, False),
        ({"turned": {"h": 70.0}, "read": {"h": 70.0}}, False, False),
        ({"turned": {"h": 70.0}, "read": {"h": 70.0}, "is_serving": False}, True, False),
    ],
)
def test_the_verdict(change: dict[str, object], live: bool, ready: bool) -> None:
    """Live says that a restart would not help; ready says that it works now. Each reason counts for what it is."""
    facts = Facts(**{**WELL, **change})  # type: ignore[arg-type]
    assert (not troubles(facts, LIMITS, "live"), not troubles(facts, LIMITS, "ready")) == (live, ready)


def test_the_report_says_who_blocks() -> None:
    """The culprit is in the reason, its stack in the report, a line each."""
    block = Block(3.0, "<Handler bill orders/billing>", ('  File "app.py", line 7, in bill\n    time.sleep(9)\n',))
    told = report(Facts(**WELL, loop_late=3.0, block=block), LIMITS, "ready")  # type: ignore[arg-type]
    assert told["status"] == "failing"
    assert "by <Handler bill orders/billing>" in told["troubles"][0]
    assert told["blocked"]["stack"] == ['  File "app.py", line 7, in bill', "    time.sleep(9)"]


def test_limits_follow_the_settings() -> None:
    """A stall is allowed as the setting says, a heartbeat may be as old as the lease, an outage is no death."""
    limits = Limits.of(Settings(url="redis://localhost"))
    assert (limits.stall, limits.beat) == (60, 6)
    assert limits.turn > 60
    assert limits.turn > 30 + 5, "waiting for a server that is away"


def test_a_histogram_counts_by_upper_bound() -> None:
    """A value belongs to the first bucket that it does not exceed; buckets add up."""
    histogram = Histogram((0.1, 1.0))
    for value in (0.05, 0.1, 0.5, 7.0):
        histogram.observe(value)
    assert list(histogram.buckets()) == [("0.1", 2), ("1.0", 3), ("+Inf", 4)]
    assert histogram.sum == pytest.approx(7.65)


@pytest.mark.parametrize("text", ["9100", "localhost", "localhost:", ":9100", "h:99999", "::1:9100", "http://h:1", ""])
def test_what_is_no_address(text: str) -> None:
    """A host and a port, nothing less: who listens on all interfaces has to say so."""
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:9100"):
        Address.parse(text)


def test_addresses_of_several_processes() -> None:
    """Each has the next port; a free port is free for each."""
    address = Address.parse("[::1]:9100")
    assert [str(address.of_slot(slot)) for slot in (1, 2, 3)] == ["[::1]:9100", "[::1]:9101", "[::1]:9102"]
    assert Address.parse("0.0.0.0:0").of_slot(5) == Address("0.0.0.0", 0)
