"""The verdict: compares what was sent with what the phones have received. No I/O, so that tests can make it fail."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from phones import Receipt


@dataclass
class Verdict:
    """Counts of letters. `again`: repeats of an earlier connection that were marked. `unmarked`: all other repeats."""

    received: int = 0
    again: int = 0
    lost: int = 0
    unexpected: int = 0
    out_of_order: int = 0
    unmarked: int = 0
    left: int = 0

    @property
    def wrong(self) -> dict[str, int]:
        """The violations that there are."""
        counts = {field.name: getattr(self, field.name) for field in fields(self)[2:]}
        return {name: count for name, count in counts.items() if count}


def judge(phones: Sequence[str], letters: int, receipts: Mapping[str, Sequence[Receipt]], left: int) -> Verdict:
    """Each phone must have the letters 0, 1, 2 ... in this order, and repeats must be marked. `left`: still stored."""
    verdict = Verdict(left=left)
    for phone in phones:
        seen: dict[int, int] = {}
        for receipt in receipts.get(phone, ()):
            if receipt.number in seen:
                is_marked = receipt.is_redelivered and seen[receipt.number] < receipt.connection
                verdict.again += is_marked
                verdict.unmarked += not is_marked
            else:
                verdict.out_of_order += bool(seen) and receipt.number < max(seen)
                verdict.unexpected += not 0 <= receipt.number < letters
            seen[receipt.number] = receipt.connection
        verdict.received += len(seen)
        verdict.lost += len(set(range(letters)) - seen.keys())
    return verdict
