"""The notary: a settler that writes into the ledger what the server has accepted, so that double commits are seen."""

from __future__ import annotations

from typing import Any, ClassVar

import rsmq.consumer.consumer
from rsmq.consumer.settler import Batch, Settler
from rsmq.errors import BrokerError
from tests.chaos.ledger import Pen


class Notary(Settler):
    """Notes `settle` for a batch of which the server has acknowledged all, each for the first time.

    Of a batch of which it has acknowledged a part nobody knows which: it is not noted. So the ledger may know of less
    than there was, never of more.
    """

    names: ClassVar[dict[tuple[int, bytes], tuple[str, int]]] = {}
    """Partition and stream id -> message."""
    pen: ClassVar[Pen]

    async def confirm(self, batch: Batch, reply: Any) -> None:
        """As the settler does, and note it."""
        before = self._stats["settled"]
        await super().confirm(batch, reply)
        if isinstance(reply, BrokerError):
            return
        known = [self.names.pop((batch[0].partition, entry_id), None) for entry_id in batch[1]]
        if self._stats["settled"] - before == len(known):
            self.pen.note_all("settle", [name for name in known if name is not None])


def swear_in(pen: Pen) -> None:
    """Every consumer of this process settles through a notary from now on."""
    Notary.pen = pen
    rsmq.consumer.consumer.Settler = Notary  # type: ignore[misc]
