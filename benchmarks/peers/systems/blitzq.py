"""BlitzQ in its reliable mode (streams, at least once), results switched off."""

from __future__ import annotations

import logging

from blitzq import Queue
from blitzq.worker import Worker

from benchmarks.peers.system import Options, Payload, System, main, run_loop


class Blitz(System):
    """`enqueue_many` in slices of 500. Tuned: `visibility_timeout` of five seconds."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        tuned = {"visibility_timeout": 5.0} if self.tuned else {}
        self._queue = Queue("q", redis_url=self.url, store_results=False, **tuned)

        @self._queue.task(name="handle")
        async def handle(message: dict) -> None:
            await self.handle(message)

        self._task = handle

    async def open(self) -> None:
        await self._queue.connect()

    async def close(self) -> None:
        await self._queue.close()

    async def publish(self, message: Payload) -> None:
        await self._task.enqueue(message)

    async def publish_fast(self, payloads: list[Payload]) -> None:
        for start in range(0, len(payloads), 500):
            await self._task.enqueue_many([(message,) for message in payloads[start : start + 500]])

    def work(self) -> None:
        logging.getLogger("blitzq").setLevel(logging.WARNING)
        run_loop(self._work())

    async def _work(self) -> None:
        await Worker(self._queue, concurrency=self.concurrency).run()


if __name__ == "__main__":
    main(Blitz)
