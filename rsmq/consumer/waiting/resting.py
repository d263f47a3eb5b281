"""What waits in one lane for a time: the ids of messages that hold their keys and may not start yet."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from math import inf
from typing import Final

from rsmq.model.clock import monotonic

ALONE: Final = b"\xff\xff"
"""Begins the key under which a message without a key waits; its id follows. No text in UTF-8 begins so."""
NOW: Final = 1.0
"""A due time that is over, in ms since 1970. What has 0 was named to its owner already."""


class Resting:
    """Only the id of such a message is kept. When it may start, the server knows: this has no due times.

    `notes` are due times that the server does not have yet, as text: ms since 1970, or `+ms` after it was stored.
    `forgotten` are ids that it may forget.
    `known` are the due times that it had when the lane was taken over. `excused` were rescheduled: the rule is not
    asked again. `retries` are those of what waits that have failed before. `look_at` (monotonic): when the next one is
    due.
    """

    __slots__ = ("_by_id", "_by_key", "_loaded", "excused", "forgotten", "known", "look_at", "notes", "retries")

    def __init__(self) -> None:
        self._by_key: dict[bytes, bytes] = {}
        self._by_id: dict[bytes, bytes] = {}
        self.clear()

    def clear(self) -> None:
        """Forget all of it: the next owner finds it in the server."""
        self._by_key.clear()
        self._by_id.clear()
        self.notes = dict[bytes, str]()
        self.forgotten = dict[bytes, None]()
        self.known: dict[bytes, float] = {}
        self.excused = set[bytes]()
        self.retries = set[bytes]()
        self.look_at = inf
        self._loaded = -1

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, key: object) -> bool:
        return key in self._by_key

    @property
    def keys(self) -> Iterable[bytes]:
        """The keys that are held so. May be called from any thread."""
        return list(self._by_key)

    @property
    def ids(self) -> Iterable[bytes]:
        """The ids that wait."""
        return self._by_id.keys()

    def key_of(self, entry_id: bytes) -> bytes | None:
        """The key that a message holds while it waits."""
        return self._by_id.get(entry_id)

    def first_of(self, key: bytes) -> bytes | None:
        """The message that holds a key while it waits."""
        return self._by_key.get(key)

    def add(self, key: bytes, entry_id: bytes, *, is_retry: bool) -> None:
        """A message waits, and holds its key."""
        self._by_key[key] = entry_id
        self._by_id[entry_id] = key
        self.forgotten.pop(entry_id, None)
        if is_retry:
            self.retries.add(entry_id)

    def note(self, entry_id: bytes, due_ms: float) -> None:
        """Tell the server until when, in ms since 1970."""
        self.notes[entry_id] = f"{due_ms:.0f}"

    def note_window(self, entry_id: bytes, span_ms: int) -> None:
        """Tell the server to wait for so long after the message was stored."""
        self.notes[entry_id] = f"+{span_ms}"

    def wake(self, entry_id: bytes, *, is_rescheduled: bool) -> bytes | None:
        """Its time has come. Returns its key; None: it does not wait here."""
        key = self._by_id.pop(entry_id, None)
        if key is None:
            return None
        del self._by_key[key]
        self.retries.discard(entry_id)
        if is_rescheduled:
            self.excused.add(entry_id)
        return key

    def due_of(self, entry_id: bytes) -> float | None:
        """When the last owner let a message start; None: the server has no time for it, or has named it as due.

        A time that is over counts, too: it may have been rescheduled since it was read, so the server is asked. What
        was named as rescheduled is excused.
        """
        due = self.known.pop(entry_id, None)
        if due == -1:
            self.excused.add(entry_id)
        return due if due is not None and due > 0 else None

    def look_in(self, seconds: float) -> None:
        """Ask the server again in so many seconds."""
        self.look_at = monotonic() + seconds

    def forget(self, entry_id: bytes) -> None:
        """It does not wait any more: the server may forget it."""
        self.forgotten[entry_id] = None

    def named(self, entry_id: bytes, *, is_rescheduled: bool) -> None:
        """The server has named it as due, and will not name it again. What was not looked at yet may start."""
        if entry_id in self.known:
            self.known[entry_id] = -1.0 if is_rescheduled else 0.0
        self.forget(entry_id)

    # -- the server -----------------------------------------------------------------------------------------------

    def is_loaded(self, recovery: int) -> bool:
        """Whether the due times were read for the recovery with this number."""
        return self._loaded == recovery

    def load(self, recovery: int, dues: Mapping[bytes, float], window_ms: int | None = None) -> None:
        """The due times that the server has. What waits here and is not among them is asked about at once, or waits
        for `window_ms` after it was stored."""
        self._loaded = recovery
        self.known = {entry_id: due for entry_id, due in dues.items() if entry_id not in self._by_id}
        for entry_id in self._by_id.keys() - dues.keys() - self.notes.keys():
            if window_ms is None:
                self.note(entry_id, NOW)
            else:
                self.note_window(entry_id, window_ms)
        self.look_at = monotonic()

    def news(self, most: int) -> tuple[list[bytes], list[tuple[bytes, str]]]:
        """Some ids that the server may forget, and some due times for it."""
        return list(islice(self.forgotten, most)), list(islice(self.notes.items(), most))

    def told(self, forgotten: Sequence[bytes], notes: Sequence[tuple[bytes, str]]) -> None:
        """The server has these."""
        for entry_id in forgotten:
            self.forgotten.pop(entry_id, None)
        for entry_id, due in notes:
            if self.notes.get(entry_id) == due:
                del self.notes[entry_id]

    @property
    def has_news(self) -> bool:
        """Whether there is something to tell the server."""
        return bool(self.notes or self.forgotten)

    def __repr__(self) -> str:
        return f"<Resting {len(self)} news={len(self.notes) + len(self.forgotten)}>"
