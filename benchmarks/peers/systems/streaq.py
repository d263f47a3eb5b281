"""streaQ on coredis, results not kept."""

from __future__ import annotations

import logging

from streaq import Worker

from benchmarks.peers.system import Options, Payload, System, main


class Streaq(System):
    """`enqueue_many` in slices of 500. Tuned: `idle_timeout` of five seconds."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        tuned = {"idle_timeout": 5} if self.tuned else {}
        self._worker = Worker(
            redis_url=self.url, concurrency=self.concurrency, anyio_kwargs={"use_uvloop": True}, **tuned
        )

        @self._worker.task(ttl=0)
        async def handle(message: dict) -> None:
            await self.handle(message)

        self._task = handle

    async def open(self) -> None:
        await self._worker.__aenter__()

    async def close(self) -> None:
        await self._worker.__aexit__(None, None, None)

    async def publish(self, message: Payload) -> None:
        await self._task.enqueue(message)

    async def publish_fast(self, payloads: list[Payload]) -> None:
        for start in range(0, len(payloads), 500):
            await self._worker.enqueue_many([self._task.enqueue(each) for each in payloads[start : start + 500]])

    def work(self) -> None:
        logging.getLogger("streaq").setLevel(logging.WARNING)
        self._worker.run_sync()


if __name__ == "__main__":
    main(Streaq)
