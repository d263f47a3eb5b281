"""Runs the services of a broker inside its worker, and restarts those that fail."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import anyio
import anyio.abc

from rsmq.errors import BrokerError, ConfigError, OtherServer
from rsmq.handler.service import ClaimsDatabase, Service
from rsmq.model.backoff import Backoff
from rsmq.redis.server_context import ServerContext

log = logging.getLogger("rsmq.service")

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0


class Services:
    """Serves until `stop`. A service that fails is logged once, and tried again until it works."""

    def __init__(self, services: Sequence[Service], context: ServerContext) -> None:
        self._services, self._context = services, context
        self._stopping = anyio.Event()

    async def claim(self) -> None:
        """Before handlers run. Raises ConfigError if another server uses the database of a service, under the same
        prefix. One that cannot be asked now is asked again while it is served."""
        for service in self._services:
            if isinstance(service, ClaimsDatabase):
                try:
                    await service.claim(self._context)
                except OtherServer:
                    raise
                except Exception as error:  # away, or without its tables: `serve` says so, too, and tries again
                    log.warning("%r cannot be claimed yet: %s", service, error)

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Until `stop`; at once without services."""
        task_status.started()
        async with anyio.create_task_group() as tasks:
            for service in self._services:
                tasks.start_soon(self._serve, service)
            if self._services:
                await self._stopping.wait()
            tasks.cancel_scope.cancel()

    def stop(self) -> None:
        """End them."""
        self._stopping.set()

    async def _serve(self, service: Service) -> None:
        backoff, said = Backoff(FIRST_PAUSE, LONGEST_PAUSE), ""
        while True:
            started = anyio.current_time()
            try:
                await service.serve(self._context)
                return
            except Exception as error:
                if anyio.current_time() - started > LONGEST_PAUSE:
                    backoff.reset()
                if str(error) != said:
                    said = str(error)
                    log.warning(
                        "%r waits: %s", service, error, exc_info=not isinstance(error, BrokerError | ConfigError)
                    )
            await anyio.sleep(backoff.next())
