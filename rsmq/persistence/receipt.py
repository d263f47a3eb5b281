"""A receipt: whoever has sent letters waits for it, however many parcels they have gone into."""

from __future__ import annotations

import asyncio


class Receipt:
    """Complete when every parcel it was put on is stored. Waited for by one task."""

    __slots__ = ("_waiter", "error", "missing")

    def __init__(self) -> None:
        self.missing = 0
        self.error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def stored(self, error: Exception | None) -> None:
        """One parcel has ended: stored, or with an error."""
        self.missing -= 1
        self.error = self.error or error
        if self.missing == 0 and self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def complete(self) -> None:
        """Wait for all of them; then raise the first error, if there was any."""
        if self.missing:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self.error is not None:
            raise self.error

    def __repr__(self) -> str:
        return f"<Receipt missing={self.missing}{f' {self.error!r}' if self.error else ''}>"
