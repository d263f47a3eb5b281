"""The verdict: what was published, held against what the phones received. Pure, so that it can be shown to fail."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ledger import AGAIN, NEW, Entry

from rsmq.demo.flight import Departure


@dataclass(frozen=True)
class Verdict:
    """What became of the letters. `again` counts the repeats that said so themselves, `unmarked` those that did not.

    `left` and `dropped` are the server's own word: letters still in an inbox, and those removed before their time.
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
        """Whether everything came, in order, and nothing came twice without saying so."""
        return not (self.lost or self.unexpected or self.out_of_order or self.unmarked or self.left or self.dropped)


def judge(
    departures: Sequence[Departure],
    passengers: Callable[[Departure], Iterable[str]],
    entries: Iterable[Entry],
    left: int = 0,
    dropped: int = 0,
) -> Verdict:
    """Compare. Order is that in which each letter first reached its phone: a repeat may repeat, never reorder.

    The departures of an airport are published in order, under one key: so they must come to each phone. The seqs of its
    letters, which are the order of storing, must grow whatever the airport.
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
        for line, place in ((airport.get(entry.flight, ""), entry.flight), ("seq", entry.seq)):
            before = newest.get((entry.phone, line), -1)
            out_of_order += place < before
            newest[entry.phone, line] = max(place, before)
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
