"""The result of the MQTT demo detects broken promises, one at a time."""

from __future__ import annotations

import pytest

from rsmq.cli.demo.mqtt_result import DepartureConfirmed, MqttResult, handled, received

PUBLISHED = {"N1": 4, "N2": 3}
GOOD = [("N1", 0), ("N2", 0), ("N1", 1), ("N1", 2), ("N2", 1), ("N1", 3), ("N2", 2)]
"""N2 uses QoS 2."""


def test_result_of_all_departures_in_order_is_good() -> None:
    """Aircraft may come in any order among each other."""
    found = received("tower", PUBLISHED, GOOD, {"N2"})
    assert (found.is_good, found.expected, found.received) == (True, 7, 7)
    assert received("tower", PUBLISHED, sorted(GOOD), {"N2"}).is_good


def test_result_with_a_repetition_of_qos_1_is_good() -> None:
    """Its first arrival counts for the order."""
    found = received("tower", PUBLISHED, [*GOOD, ("N1", 1)], {"N2"})
    assert (found.is_good, found.again, found.out_of_order) == (True, 1, 0)


@pytest.mark.parametrize(
    ("arrivals", "what"),
    [
        (GOOD[:-1], "lost"),
        ([*GOOD, ("N1", 4)], "unexpected"),
        ([*GOOD[1:], GOOD[0]], "out_of_order"),
        ([*GOOD, ("N2", 1)], "twice"),
    ],
)
def test_result_finds_each_broken_promise(arrivals: list[tuple[str, int]], what: str) -> None:
    """A lost departure, an invented one, one out of order, and a QoS 2 message that came twice."""
    found = received("tower", PUBLISHED, arrivals, {"N2"})
    assert getattr(found, what) == 1
    assert not found.is_good
    assert not MqttResult((found,), 0, False, None).is_good


def test_result_wants_acknowledgements_and_connections() -> None:
    """A departure without its acknowledgement is a broken promise, and so is a client that stays away."""
    good = (received("tower", PUBLISHED, GOOD, ()),)
    assert MqttResult(good, 0, True, 1.2).is_good
    assert not MqttResult(good, 1, True, 1.2).is_good
    assert not MqttResult(good, 0, True, None).is_good


def test_redelivered_message_is_handled_once() -> None:
    """A second message with the same departure is not."""
    events = [DepartureConfirmed("commit", 1, 0.0, message_id=each, aircraft="N1", turn=0) for each in ("a", "a", "b")]
    assert handled(events) == [("N1", 0), ("N1", 0)]
