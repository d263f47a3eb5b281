"""A proxy that loses the answers of chosen scripts: the server has executed the call, the client repeats it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final

from rsmq.redis.scripts import Script
from rsmq.testing.proxy import Proxy

READ: Final = 1 << 16

Between = Callable[[], Awaitable[object]]
"""What happens after the call was executed and before it is repeated."""


class LostAnswers(Proxy):
    """Loses the answers of a script `times` times. Each time it runs `between`, and only then breaks the connection.

    `share`: of all chunks with script calls, this share of answers is lost, chosen at random.
    """

    def __init__(self, target: int, share: float = 0.0) -> None:
        super().__init__(target)
        self._mark, self._left, self._share = b"", 0, share
        self._between: Between | None = None
        self._random = random.Random(1)
        self.lost = 0

    def lose(self, script: Script, times: int = 1, between: Between | None = None) -> None:
        """Lose the next answers of this script."""
        self._mark, self._left, self._between = script.sha.encode(), times, between

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        ends = [writer]
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
            ends.append(far_writer)
            back = asyncio.ensure_future(self._pump(far_reader, writer))
            with suppress(OSError):
                while data := await reader.read(READ):
                    is_chosen = self._left > 0 and self._mark in data
                    self._left -= is_chosen
                    is_lost = is_chosen or (b"EVAL" in data and self._random.random() < self._share)
                    if is_lost:
                        back.cancel()  # no call is in flight on this connection but this one
                        await asyncio.wait([back])
                    far_writer.write(data)
                    if is_lost:
                        answer = await far_reader.read(READ)
                        if is_chosen and b"NOSCRIPT" in answer:  # the client sends the source: that call counts
                            self._left, self._mark = self._left + 1, b"EVAL\r\n"
                            writer.write(answer)
                            back = asyncio.ensure_future(self._pump(far_reader, writer))
                            continue
                        self.lost += 1
                        if is_chosen and self._between is not None:
                            await self._between()
                        break
            back.cancel()
        except (OSError, asyncio.CancelledError):
            pass  # one end is gone, or the run is over
        finally:
            self._tasks.discard(task)
            for end in ends:
                end.transport.abort()
