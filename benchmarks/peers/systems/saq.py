"""saq on Redis, results not kept. No bulk call."""

from __future__ import annotations

import logging

from saq import Queue, Worker

from benchmarks.peers.system import Payload, System, main, run_loop


class Saq(System):
    """Tuned: five retries, a timeout of five seconds, a sweep every second."""

    async def open(self) -> None:
        self._queue = Queue.from_url(self.url)
        await self._queue.connect()
        self._tuned = {"retries": 5, "timeout": 5} if self.tuned else {}

    async def close(self) -> None:
        await self._queue.disconnect()

    async def publish(self, message: Payload) -> None:
        await self._queue.enqueue("handle", message=message, ttl=-1, **self._tuned)

    def work(self) -> None:
        logging.getLogger("saq").setLevel(logging.WARNING)
        run_loop(self._work())

    async def _work(self) -> None:
        async def handle(context: dict, *, message: dict) -> None:
            await self.handle(message)

        queue = Queue.from_url(self.url)
        await queue.connect()
        tuned = {"timers": {"sweep": 1}} if self.tuned else {}
        await Worker(queue, functions=[("handle", handle)], concurrency=self.concurrency, **tuned).start()


if __name__ == "__main__":
    main(Saq)
