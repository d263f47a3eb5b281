"""What was cancelled or replaced after it was archived: notes beside the data, which readers of the archive take over.

The column `cancelled` says what was cancelled when a message was read. Each run of an archive job asks the server once
more about what it has archived, as long as the server still knows, and writes what is new into a file of its own:
`_rsmq/cancelled/<ms>-<random>.json`. A run that is killed before that leaves it to the next one.
"""

from __future__ import annotations

import json
from uuid import uuid4

from rsmq.model.clock import now_ms
from rsmq.pipeline.format.offsets import NO_ID, Offsets
from rsmq.pipeline.format.options import TopicSelection
from rsmq.pipeline.format.selected_streams import SelectedStreams
from rsmq.pipeline.format.task_connection import TaskConnection
from rsmq.pipeline.jobs.archive_store import CANCELLED, ArchiveStore, Cancellations, Ends


def known_ends(saved: Offsets, streams: SelectedStreams) -> Ends:
    """How far an archive is, in the topics as they are now."""
    ends: Ends = {}
    for (topic, number), epoch in streams.epochs().items():
        position = saved.positions.get((topic, number))
        if position is not None and saved.epochs[topic] == epoch:
            ends.setdefault(topic, {})[str(number)] = position.id
    return ends


class CancellationNotes:
    """The notes of one archive job. What was noted before, by any job, is read once."""

    def __init__(
        self, store: ArchiveStore, connection: TaskConnection, selection: TopicSelection, archive: str
    ) -> None:
        self._store, self._archive = store, archive
        self._streams = SelectedStreams(connection, selection)
        self._known: Cancellations | None = None

    def note(self) -> None:
        """Write down what was cancelled or replaced since, of what is archived."""
        new: dict[str, dict[str, dict[str, str]]] = {}
        for topic, ids in known_ends(self._store.positions(self._archive), self._streams).items():
            for number, upto in ids.items():
                found = self._streams.cancelled((topic, int(number)), NO_ID, upto)
                if not found:
                    continue
                if self._known is None:
                    self._known = self._store.cancellations()
                known = self._known.setdefault((topic, int(number)), {})
                later = {each.decode(): groups for each, groups in found.items() if known.get(each.decode()) != groups}
                if later:
                    known |= later
                    new.setdefault(topic, {})[number] = later
        if new:
            self._store.folder.write(f"{CANCELLED}/{now_ms():013}-{uuid4().hex[:8]}.json", json.dumps(new))
