"""The verdict: compares what was published with what the phones received. No I/O, so that tests can make it fail."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ledger import AGAIN, NEW, Entry

from rsmq.cli.demo.flight import Departure


@dataclass(frozen=True)
class Verdict:
    """The counts of letters. `again`: repeats that were marked as redelivered; `unmarked`: repeats that were not.

    `left` and `dropped` come from the server: letters still in an inbox, and letters removed before delivery.
    """

    expected: int
    received: int
    again: int
    lost: int
    unexpected: int
    out_of_order: int
    unmarked: int
    left: int
    dropped: int

    @property
    def is_good(self) -> bool:
        """Whether every letter was received, in order, and no repeat was unmarked."""
        return not (self.lost or self.unexpected or self.out_of_order or self.unmarked or self.left or self.dropped)


def judge(
    departures: Sequence[Departure],
    passengers: Callable[[Departure], Iterable[str]],
    entries: Iterable[Entry],
    left: int = 0,
    dropped: int = 0,
) -> Verdict:
    """Compare. The order is that of the first receipt of each letter; repeats do not count.

    Each phone must receive the departures of an airport in publish order, because they have one key. The sequence
    numbers of a phone's letters must increase over all airports.
    """
    airport = {departure.number: departure.origin for departure in departures}
    expected = {(phone, departure.number) for departure in departures for phone in passengers(departure)}
    seen: set[tuple[str, int]] = set()
    newest: dict[tuple[str, str], int] = {}
    again = unmarked = out_of_order = 0
    for entry in sorted((each for each in entries if each.event in (NEW, AGAIN)), key=lambda entry: entry.at_ms):
        letter = (entry.phone, entry.flight)
        if letter in seen:
            again += entry.event == AGAIN
            unmarked += entry.event == NEW
            continue
        seen.add(letter)
        for order, number in ((airport.get(entry.flight, ""), entry.flight), ("seq", entry.seq)):
            before = newest.get((entry.phone, order), -1)
            out_of_order += number < before
            newest[entry.phone, order] = max(number, before)
    return Verdict(
        expected=len(expected),
        received=len(expected & seen),
        again=again,
        lost=len(expected - seen),
        unexpected=len(seen - expected),
        out_of_order=out_of_order,
        unmarked=unmarked,
        left=left,
        dropped=dropped,
    )
