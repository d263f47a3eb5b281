"""A stretch: entries of one lane as they were read, for a batch handler that may be done with them before anybody has
to look at each."""

from __future__ import annotations

from collections.abc import Coroutine, Generator, Sequence
from typing import Any

from rsmq.consumer.lane import Lane
from rsmq.message import Message

Row = tuple[bytes, list[bytes]]
"""A stream id and the fields of its entry."""
Part = tuple[Lane, list[Row]]
"""What a batch takes of one lane."""


class Stretch:
    """First deliveries in our own publisher's layout, in order. Their keys are not taken yet.

    Invariant: no key of the lane is taken while it waits in the queue, so that whatever it holds may start.
    """

    __slots__ = ("origin", "rows")

    def __init__(self, origin: Lane, rows: list[Row]) -> None:
        self.origin, self.rows = origin, rows

    def messages(self) -> list[Message]:
        """Each for itself, after all."""
        return [Message(self.origin, entry_id, entry) for entry_id, entry in self.rows]

    def __repr__(self) -> str:
        return f"<Stretch {self.origin.topic}.{self.origin.partition} rows={len(self.rows)}>"


def size_of_plain(rows: Sequence[Row]) -> int | None:
    """Bytes of payload in all, if every entry holds data, id and perhaps a key, in this order; else None."""
    size = 0
    try:
        for _, entry in rows:
            count = len(entry)
            if entry[0] != b"data" or entry[2] != b"id" or (count != 4 and (count != 6 or entry[4] != b"key")):
                return None
            size += len(entry[1])
    except IndexError:
        return None
    return size


class Rest:
    """What is left of a coroutine that was sent its first step by hand, and waits for something."""

    __slots__ = ("_coroutine", "_waits_for")

    def __init__(self, coroutine: Coroutine[Any, Any, Any], waits_for: Any) -> None:
        self._coroutine, self._waits_for = coroutine, waits_for

    def __await__(self) -> Generator[Any, Any, Any]:
        coroutine, waits_for = self._coroutine, self._waits_for
        try:
            while True:
                try:
                    answer = yield waits_for
                except GeneratorExit:
                    coroutine.close()
                    raise
                except BaseException as error:
                    waits_for = coroutine.throw(error)
                else:
                    waits_for = coroutine.send(answer)
        except StopIteration as end:
            return end.value


async def ended(value: Any) -> Any:
    """A coroutine that ended in its first step."""
    return value


async def failed(error: BaseException) -> Any:
    """One that failed there."""
    raise error
