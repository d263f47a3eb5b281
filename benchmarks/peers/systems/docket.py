"""docket (pydocket), executions not kept after they are done. No bulk call."""

from __future__ import annotations

import logging
from datetime import timedelta

from docket import Docket, Worker

from benchmarks.peers.system import Payload, System, main, run_loop


class Dock(System):
    """Tuned: `redelivery_timeout` of five seconds."""

    def _docket(self) -> Docket:
        docket = Docket(name="bench", url=f"{self.url}/0", execution_ttl=timedelta(0))

        async def handle(message: dict) -> None:
            await self.handle(message)

        docket.register(handle)
        self._task = handle
        return docket

    async def open(self) -> None:
        self._open = self._docket()
        await self._open.__aenter__()

    async def close(self) -> None:
        await self._open.__aexit__(None, None, None)

    async def publish(self, message: Payload) -> None:
        await self._open.add(self._task)(message)

    def work(self) -> None:
        logging.getLogger("docket").setLevel(logging.WARNING)
        run_loop(self._work())

    async def _work(self) -> None:
        tuned = {"redelivery_timeout": timedelta(seconds=5)} if self.tuned else {}
        async with self._docket() as docket, Worker(docket, concurrency=self.concurrency, **tuned) as worker:
            await worker.run_forever()


if __name__ == "__main__":
    main(Dock)
