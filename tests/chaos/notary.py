"""The notary: a settler that writes into the ledger what the server has accepted, so that double commits are seen."""

from __future__ import annotations

from typing import Any, ClassVar

import rsmq.consumer.consumer
from rsmq.consumer.lane import Lane
from rsmq.consumer.settler import Settler
from rsmq.errors import BrokerError
from rsmq.script import STALE_EPOCH
from tests.chaos.ledger import Pen


class Notary(Settler):
    """Notes `settle` for a batch of which the server has acknowledged all, each for the first time.

    Of a batch of which it has acknowledged a part nobody knows which: it is not noted. So the ledger may know of less
    than there was, never of more.
    """

    names: ClassVar[dict[tuple[int, bytes], tuple[str, int]]] = {}
    """Partition and stream id -> message."""
    pen: ClassVar[Pen]

    def _confirm(self, lane: Lane, ids: list[bytes], answer: Any) -> None:
        """As the settler does, and note it."""
        super()._confirm(lane, ids, answer)
        if isinstance(answer, BrokerError) or answer[0] == STALE_EPOCH:
            return
        known = [self.names.pop((lane.partition, entry_id), None) for entry_id in ids]
        if answer[1] == len(ids):
            self.pen.note_all("settle", [name for name in known if name is not None])


def swear_in(pen: Pen) -> None:
    """Every consumer of this process settles through a notary from now on."""
    Notary.pen = pen
    rsmq.consumer.consumer.Settler = Notary  # type: ignore[misc]
