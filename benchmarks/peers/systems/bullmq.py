"""BullMQ for Python, done jobs removed."""

from __future__ import annotations

import asyncio
from typing import Any

from bullmq import Queue, Worker

from benchmarks.peers.system import Payload, System, main, run_loop

REMOVE = {"removeOnComplete": True}


class Bull(System):
    """`addBulk` in slices of 500. Tuned: locks of three seconds, a look for stalled jobs every two."""

    async def open(self) -> None:
        self._queue = Queue("q", {"connection": self.url})

    async def close(self) -> None:
        await self._queue.close()

    async def publish(self, message: Payload) -> None:
        await self._queue.add("handle", message, REMOVE)

    async def publish_fast(self, payloads: list[Payload]) -> None:
        for start in range(0, len(payloads), 500):
            jobs = [{"name": "handle", "data": each, "opts": REMOVE} for each in payloads[start : start + 500]]
            await self._queue.addBulk(jobs)

    def work(self) -> None:
        run_loop(self._work())

    async def _work(self) -> None:
        async def handle(job: Any, token: str) -> None:
            await self.handle(job.data)

        tuned = {"lockDuration": 3000, "stalledInterval": 2000} if self.tuned else {}
        worker = Worker("q", handle, {"connection": self.url, "concurrency": self.concurrency, **tuned})
        await asyncio.Event().wait()
        await worker.close()


if __name__ == "__main__":
    main(Bull)
