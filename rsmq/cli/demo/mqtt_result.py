"""The result of the MQTT demo: what was published against what each receiver has got. No I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from rsmq.testing.ledger import Event

GROUP: Final = "confirm"
ANSWERS: Final = "confirmed"
"""The topic name of the answers in the inboxes of the aircraft."""

Arrival = tuple[str, int]
"""An aircraft, and the turn of its departure."""


@dataclass(frozen=True, slots=True)
class DepartureConfirmed(Event):
    """One departure that the handler has confirmed."""

    aircraft: str = ""
    turn: int = 0


@dataclass(frozen=True, slots=True)
class Received:
    """The messages of one receiver. `twice`: came again although it had QoS 2; `again`: came again with QoS 1."""

    receiver: str
    expected: int
    received: int
    lost: int
    unexpected: int
    out_of_order: int
    twice: int
    again: int

    @property
    def is_good(self) -> bool:
        """Nothing lost, invented, out of order or doubled. A repetition of QoS 1 is allowed."""
        return not (self.lost or self.unexpected or self.out_of_order or self.twice)


@dataclass(frozen=True, slots=True)
class MqttResult:
    """All receivers. `reconnect_seconds`: from the kill until every client was connected to another gateway."""

    receivers: tuple[Received, ...]
    unacknowledged: int
    was_killed: bool
    reconnect_seconds: float | None

    @property
    def is_good(self) -> bool:
        """Whether all promises held."""
        are_good = not self.unacknowledged and all(each.is_good for each in self.receivers)
        return are_good and (not self.was_killed or self.reconnect_seconds is not None)


def received(
    receiver: str, published: Mapping[str, int], arrivals: Sequence[Arrival], exactly_once: Collection[str]
) -> Received:
    """Compare what arrived, in its order, with how many departures each aircraft has published, from turn 0 on.

    The first arrivals of an aircraft's departures must be in its order. `exactly_once`: aircraft that use QoS 2.
    """
    counts = Counter(arrivals)
    wanted = {(aircraft, turn) for aircraft, number in published.items() for turn in range(number)}
    repeats = Counter({each: number - 1 for each, number in counts.items() if number > 1})
    twice = sum(number for (aircraft, _), number in repeats.items() if aircraft in exactly_once)
    return Received(
        receiver, len(wanted), len(wanted & counts.keys()), len(wanted - counts.keys()), len(counts.keys() - wanted),
        disorder(dict.fromkeys(arrivals)), twice, repeats.total() - twice,
    )  # fmt: skip


def disorder(arrivals: Iterable[Arrival]) -> int:
    """How many came after a later one of the same aircraft."""
    newest, found = dict[str, int](), 0
    for aircraft, turn in arrivals:
        found += turn < newest.get(aircraft, -1)
        newest[aircraft] = max(turn, newest.get(aircraft, -1))
    return found


def handled(events: Iterable[DepartureConfirmed]) -> list[Arrival]:
    """The messages that the handler got. One that was redelivered, under its id, is one: only a second one counts."""
    found = {each.message_id: (each.aircraft, each.turn) for each in events}
    return list(found.values())
