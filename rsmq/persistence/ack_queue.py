"""Acknowledgements of letters on their way to the server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final, Protocol

from rsmq.redis import scripts
from rsmq.redis.scripts import Script, Value

MOST_ACKS: Final = 500
"""Seqs in one script call: about 1 ms of the server's time."""


class AckingReader(Protocol):
    """The reader of an inbox whose acknowledgements these are."""

    def call(self, script: Script, *args: Value) -> asyncio.Future[Any]:
        """Call a script of the inbox, which checks the epoch first."""

    def confirmed(self, script: Script, seqs: list[int]) -> None:
        """The server has these acknowledgements, as far as it has the letters."""

    def unconfirmed(self, error: BaseException | None, word: bytes) -> None:
        """A call has failed, was cancelled (no error), or was refused with a word: nothing more is sent."""

    def rewind(self, kept: int) -> bool:
        """The server has lost the letters above `kept`. Returns whether the reader goes on."""

    def answered(self) -> None:
        """A call has ended, and the next one is on its way if more is pending."""


class AckQueue:
    """Seqs for one script. One call is in flight; later seqs go with the next one, in order.

    A negative packet id stands for a letter that the server has lost: there is nothing to call for it.
    """

    __slots__ = ("_in_flight", "_is_scheduled", "_pending", "_reader", "_script", "_taken")

    def __init__(self, reader: AckingReader, script: Script) -> None:
        self._reader = reader
        self._script = script
        self._pending: list[int] = []
        self._taken: list[int] = []
        """Those of the call in flight."""
        self._in_flight: asyncio.Future[Any] | None = None
        self._is_scheduled = False

    def add(self, *seqs: int) -> None:
        """Add seqs, to be sent with all others of this turn of the loop."""
        self._pending += seqs
        if seqs and not self._is_scheduled and self._in_flight is None:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self.flush)

    @property
    def is_in_flight(self) -> bool:
        """Whether a call is on its way."""
        return self._in_flight is not None

    def rewind(self, kept: int, lost: Callable[[int], int]) -> None:
        """The server has lost the letters above `kept`. `lost` is what stands for such a seq; 0 is nothing."""
        self._pending = [new for each in self._pending if (new := each if each <= kept else lost(each))]
        self._taken = [each if each <= kept else lost(each) for each in self._taken]

    def flush(self) -> None:
        """Send the pending seqs now, unless a call is in flight."""
        self._is_scheduled = False
        while self._pending and self._in_flight is None:
            self._taken = self._pending[:MOST_ACKS]
            self._pending = self._pending[MOST_ACKS:]
            seqs = self._taken if min(self._taken) > 0 else [each for each in self._taken if each > 0]
            if not seqs:
                self._reader.confirmed(self._script, self._taken)
                continue
            self._in_flight = self._reader.call(self._script, *seqs)
            self._in_flight.add_done_callback(self._replied)

    def _replied(self, answer: asyncio.Future[Any]) -> None:
        self._in_flight = None
        error = None if answer.cancelled() else answer.exception()
        if answer.cancelled() or error is not None:
            self._pending.clear()
            self._reader.unconfirmed(error, b"")
        elif answer.result()[0] == scripts.BEHIND and self._reader.rewind(answer.result()[1]):
            self._pending[:0] = filter(None, self._taken)
        elif answer.result()[0] != scripts.OK:
            self._pending.clear()
            self._reader.unconfirmed(None, answer.result()[0])
        else:
            self._reader.confirmed(self._script, self._taken)
        self.flush()
        self._reader.answered()

    async def settled(self) -> None:
        """Wait until nothing is pending or in flight."""
        self.flush()
        while self._in_flight is not None:
            await asyncio.wait([self._in_flight])

    def __repr__(self) -> str:
        return f"<AckQueue pending={len(self._pending)}{' in flight' if self._in_flight else ''}>"
