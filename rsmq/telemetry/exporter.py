"""The exporter: figures of all topics and groups for Prometheus, from one process beside the workers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Final

from rsmq.clock import monotonic
from rsmq.errors import RsmqError
from rsmq.telemetry.endpoint import Address, Answer, Listener
from rsmq.telemetry.exposition import page_of
from rsmq.telemetry.metric import UP, Sample

log = logging.getLogger("rsmq.exporter")

FRESH: Final = 1.0
"""Seconds for which an answer serves several scrapers: the server is asked once a second at most."""
PATIENCE: Final = 9.0
"""Seconds for one look; Prometheus itself gives up after 10."""


class Exporter:
    """Asks the server when it is scraped, in the event loop, and answers from threads.

    When the server does not answer, the page has `rsmq_up 0` and nothing else of ours: a figure is never old.
    """

    def __init__(self, take: Callable[[], Awaitable[Sequence[Sample]]]) -> None:
        self._take = take
        self._page = page_of(self._read)
        self._lock = asyncio.Lock()
        self._seen: Sequence[Sample] = ()
        self._seen_at = float("-inf")
        self._is_up = False
        self._loop: asyncio.AbstractEventLoop | None = None

    @asynccontextmanager
    async def serving(self, address: Address) -> AsyncIterator[Address]:
        """Answer for the length of the block; gives the address, with its port."""
        self._loop = asyncio.get_running_loop()
        routes = {"/metrics": self._metrics, "/livez": self._livez, "/readyz": self._readyz}
        listener = Listener(address, routes)
        try:
            yield listener.address
        finally:
            self._loop = None
            listener.close()

    def _read(self) -> Sequence[Sample]:
        """For one scrape, in its thread."""
        loop = self._loop
        if loop is None:
            return ()
        return asyncio.run_coroutine_threadsafe(self._look(), loop).result(PATIENCE + 1)

    async def _look(self) -> Sequence[Sample]:
        async with self._lock:
            if monotonic() - self._seen_at >= FRESH:
                try:
                    self._seen, is_up = await asyncio.wait_for(self._take(), PATIENCE), True
                except (RsmqError, TimeoutError) as error:
                    (log.warning if self._is_up else log.debug)("the server does not answer: %s", error)
                    self._seen, is_up = (), False
                self._is_up, self._seen_at = is_up, monotonic()
            return [Sample(UP, (), self._is_up), *self._seen]

    def _metrics(self, accept: str) -> Answer:
        return (HTTPStatus.OK, *self._page(accept))

    def _livez(self, _accept: str) -> Answer:
        return HTTPStatus.OK, "application/json", b'{"status": "ok"}\n'

    def _readyz(self, _accept: str) -> Answer:
        self._read()
        if self._is_up:
            return self._livez(_accept)
        return HTTPStatus.SERVICE_UNAVAILABLE, "application/json", b'{"status": "failing"}\n'

    def __repr__(self) -> str:
        return f"<Exporter {'up' if self._is_up else 'down'}>"
