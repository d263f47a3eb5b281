"""A settler that writes into the ledger what the server has accepted, so that the checker sees double commits."""

from __future__ import annotations

from typing import Any, ClassVar

import rsmq.consumer.consumer
from rsmq.consumer.settling.settler import Settler
from rsmq.consumer.waiting.lane import Lane
from rsmq.errors import BrokerError
from rsmq.redis.scripts import STALE_EPOCH
from tests.chaos.ledger import EventWriter


class RecordingSettler(Settler):
    """Records `settle` for a batch if the server has acknowledged all of it, each message for the first time.

    If the server has acknowledged only a part of a batch, it is not known which part, so nothing is recorded. The
    ledger may therefore have fewer settlements than there were, never more.
    """

    names: ClassVar[dict[tuple[int, bytes], tuple[str, int]]] = {}
    """Partition and stream id -> message."""
    ledger: ClassVar[EventWriter]

    def _confirm(self, lane: Lane, ids: list[bytes], answer: Any) -> None:
        """As the settler does, and record it."""
        super()._confirm(lane, ids, answer)
        if isinstance(answer, BrokerError) or answer[0] == STALE_EPOCH:
            return
        known = [self.names.pop((lane.partition, entry_id), None) for entry_id in ids]
        if answer[1] == len(ids):
            self.ledger.note_all("settle", [name for name in known if name is not None])


def install(ledger: EventWriter) -> None:
    """Make every consumer of this process use a recording settler from now on."""
    RecordingSettler.ledger = ledger
    rsmq.consumer.consumer.Settler = RecordingSettler  # type: ignore[misc]
