"""The verdict of the probes, and what goes into it, without a worker."""

from __future__ import annotations

import pytest

from rsmq import ConfigError, Settings
from rsmq.telemetry.endpoint import Address
from rsmq.telemetry.health import HealthLimits, ProbeInput, report, troubles
from rsmq.telemetry.loop_monitor import LoopBlock
from rsmq.telemetry.metric import Histogram

LIMITS = HealthLimits(stall=60, turn=70, read=7, heartbeat=6)
WELL = {"is_serving": True, "heartbeat_age": 1.0, "turned": {"h": 1.0}, "read": {"h": 1.0}}


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
        ({"heartbeat_age": 5.9}, True, True),
        ({"heartbeat_age": 600.0}, True, False),
        ({"heartbeat_age": None}, True, True),
        ({"heartbeat_is_alive": False}, False, True),
        ({"read": {"h": 1.0, "i": 8.0}}, True, False),
        ({"read": {"h": 40.0}, "turned": {"h": 40.0}, "loop_late": 40.0}, True, False),
        ({"turned": {"h": 70.0}, "read": {"h": 70.0}}, False, False),
        ({"turned": {"h": 70.0}, "read": {"h": 70.0}, "is_serving": False}, True, False),
        ({"broken": {"h": "its pool has ended"}}, False, False),
        ({"broken": {"h": "its pool has ended"}, "is_serving": False, "is_stopping": True}, True, False),
        ({"unclaimed": {"h": 59.0}}, True, True),
        ({"unclaimed": {"h": 60.0}}, False, False),
        ({"failure": "KeyError: 'x'", "is_serving": False}, False, False),
    ],
)
def test_probe_fails_for_each_reason(change: dict[str, object], live: bool, ready: bool) -> None:
    """Live: a restart would not help. Ready: the worker serves now."""
    seen = ProbeInput(**{**WELL, **change})  # type: ignore[arg-type]
    assert (not troubles(seen, LIMITS, "live"), not troubles(seen, LIMITS, "ready")) == (live, ready)


def test_report_names_the_blocking_handler() -> None:
    """The handler is in the reason, its stack in the report, a line each."""
    block = LoopBlock(3.0, "<Handler bill orders/billing>", ('  File "app.py", line 7, in bill\n    time.sleep(9)\n',))
    answer = report(ProbeInput(**WELL, loop_late=3.0, block=block), LIMITS, "ready")  # type: ignore[arg-type]
    assert answer["status"] == "failing"
    assert "by <Handler bill orders/billing>" in answer["troubles"][0]
    assert answer["blocked"]["stack"] == ['  File "app.py", line 7, in bill', "    time.sleep(9)"]


def test_probe_limits_follow_the_settings() -> None:
    """The stall limit is the setting, a heartbeat may be as old as the lease, an outage does not fail live."""
    limits = HealthLimits.of(Settings(url="redis://localhost"))
    assert (limits.stall, limits.heartbeat) == (60, 6)
    assert limits.turn > 60
    assert limits.turn > 30 + 5, "waiting for a server that is away"


def test_histogram_counts_by_upper_bound() -> None:
    """A value belongs to the first bucket that it does not exceed; buckets add up."""
    histogram = Histogram((0.1, 1.0))
    for value in (0.05, 0.1, 0.5, 7.0):
        histogram.observe(value)
    assert list(histogram.buckets()) == [("0.1", 2), ("1.0", 3), ("+Inf", 4)]
    assert histogram.sum == pytest.approx(7.65)


@pytest.mark.parametrize("text", ["9100", "localhost", "localhost:", ":9100", "h:99999", "::1:9100", "http://h:1", ""])
def test_invalid_address_is_refused(text: str) -> None:
    """An address needs a host and a port: listening on all interfaces must be explicit."""
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:9100"):
        Address.parse(text)


def test_each_process_gets_the_next_port() -> None:
    """A free port is free for each process."""
    address = Address.parse("[::1]:9100")
    assert [str(address.of_slot(slot)) for slot in (1, 2, 3)] == ["[::1]:9100", "[::1]:9101", "[::1]:9102"]
    assert Address.parse("0.0.0.0:0").of_slot(5) == Address("0.0.0.0", 0)
