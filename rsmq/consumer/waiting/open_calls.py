"""Which messages of a key are handled together: its open call, until all of them are settled."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from rsmq.model.stream_id import parse_stream_id

START: Final = b"0-0"
MOST_ENDED: Final = 200
"""Records of ended calls that the server forgets in one call."""


class CallPlan(NamedTuple):
    """A call that may begin: the ids of its messages in order, and how many attempts were charged before.

    `window_end`: all that was stored before it, in ms since 1970, must have been received; 0: this is not asked.
    `starts`: otherwise only what is cancelled leaves, in front.
    """

    key: bytes
    ids: list[bytes]
    attempts: int
    window_end: int
    starts: bool
    of: int
    """The filling of the flows that they are from: after `clear` they are forgotten."""


@dataclass(slots=True)
class OpenCall:
    """A call that has begun: its last message, how many attempts are charged to it, and its messages as they began."""

    last: tuple[int, int]
    attempts: int
    ids: list[bytes] = field(default_factory=list)


class OpenCalls:
    """The calls of one lane whose messages are of one key each, with the records that the server has of them.

    `newest` is the newest entry that was received. `unchecked` are keys whose call begins with what is there, because
    an operator has moved its time. Keys in `headless` have lost their first message, which was cancelled.
    """

    __slots__ = ("_ended", "_known", "_loaded", "_open", "headless", "newest", "unchecked")

    def __init__(self) -> None:
        self.newest = START
        self._open = dict[bytes, OpenCall]()
        self._known = dict[bytes, bytes]()
        self._ended = dict[bytes, tuple[bytes, Collection[bytes]]]()
        self._loaded = -1
        self.unchecked = set[bytes]()
        self.headless = set[bytes]()

    def clear(self, running: Container[bytes]) -> None:
        """Forget all but what is running, by key: the next owner finds it in the server."""
        self._open = {key: call for key, call in self._open.items() if key in running}
        self._known.clear()
        self._ended.clear()
        self._loaded = -1
        self.unchecked.clear()
        self.headless.clear()

    def receive(self, entry_id: bytes) -> None:
        """Everything up to this entry was received, or taken over."""
        if parse_stream_id(entry_id) > parse_stream_id(self.newest):
            self.newest = entry_id

    # -- after a take-over ----------------------------------------------------------------------------------------

    def load(self, recovery: int, known: Mapping[bytes, bytes]) -> None:
        """The records of the server, for the recovery with this number: key -> last message of its latest call."""
        self._loaded = recovery
        self._known = dict(known)

    def is_loaded(self, recovery: int) -> bool:
        """Whether the records were read for the recovery with this number."""
        return self._loaded == recovery

    def attempts_of(self, key: bytes, entry_id: bytes, attempts: int) -> int | None:
        """How many attempts count of a message that was taken over, with so many charged. None: its call has not
        begun."""
        record = self._known.get(key)
        if record is None or parse_stream_id(entry_id) > parse_stream_id(record):
            return None
        call = self._open.get(key)
        if call is None:  # the first one speaks for all
            call = self._open[key] = OpenCall(parse_stream_id(record), attempts)
        return call.attempts

    def recovered(self) -> None:
        """Everything pending is known: records of calls of which nothing is left are for the server to forget."""
        for key, last in self._known.items():
            if key not in self._open and key not in self._ended:
                self._ended[key] = last, ()
        self._known = {}

    def is_complete(self, key: bytes, cursor: bytes | None) -> bool:
        """Whether all messages of the key's open call are known, while a take-over has come to this cursor."""
        record = self._known.get(key)
        return cursor is None or record is None or parse_stream_id(cursor) > parse_stream_id(record)

    # -- its life -------------------------------------------------------------------------------------------------

    def of(self, key: bytes) -> OpenCall | None:
        """The call of a key that has begun and is not settled."""
        return self._open.get(key)

    def has(self, key: bytes, entry_id: bytes) -> bool:
        """Whether a message belongs to the open call of its key."""
        call = self._open.get(key)
        return call is not None and parse_stream_id(entry_id) <= call.last

    def begin(self, key: bytes, ids: Iterable[bytes], attempt: int) -> None:
        """The server has marked these as handled together, in this attempt."""
        ids = list(ids)
        self._open[key] = OpenCall(parse_stream_id(ids[-1]), attempt, ids)
        self._ended.pop(key, None)
        self.unchecked.discard(key)

    def try_again(self, key: bytes, attempts: int) -> None:
        """The same messages are handled once more, after so many attempts."""
        self._open[key].attempts = attempts

    def end(self, key: bytes) -> None:
        """All of its messages are settled, or will be with the next settlement."""
        call = self._open.pop(key, None)
        if call is not None:
            self._ended[key] = b"%d-%d" % call.last, call.ids

    def awaits_settlement(self, key: bytes, in_flight: Container[bytes]) -> bool:
        """Whether the last call of a key has ended, and the server may not have settled it: if the owner died now, its
        messages would come again together with those of the next call."""
        _, ids = self._ended.get(key, (b"", ()))
        return any(each in in_flight for each in ids)

    def to_forget(self, in_flight: Collection[bytes]) -> dict[bytes, bytes]:
        """Records that the server needs no more: all messages of these calls are settled for certain."""
        found = dict[bytes, bytes]()
        for key, (last, ids) in self._ended.items():
            if len(found) >= MOST_ENDED:
                break
            if not any(each in in_flight for each in ids):
                found[key] = last
        return found

    def forgotten(self, records: Mapping[bytes, bytes]) -> None:
        """The server has forgotten these."""
        for key, last in records.items():
            if self._ended.get(key, (b"",))[0] == last:
                del self._ended[key]

    def __repr__(self) -> str:
        return f"<OpenCalls {len(self._open)} ended={len(self._ended)}>"
