"""arq, results not kept. No bulk call."""

from __future__ import annotations

import asyncio
import logging

import uvloop
from arq import create_pool, func
from arq.connections import RedisSettings
from arq.worker import Worker

from benchmarks.peers.system import Payload, System, main


class Arq(System):
    """Tuned: `job_timeout` of five seconds (a job is taken for dead ten seconds after that)."""

    async def open(self) -> None:
        self._pool = await create_pool(RedisSettings.from_dsn(self.url))

    async def close(self) -> None:
        await self._pool.aclose()

    async def publish(self, message: Payload) -> None:
        await self._pool.enqueue_job("handle", message)

    def work(self) -> None:
        logging.getLogger("arq").setLevel(logging.WARNING)

        async def handle(context: dict, message: dict) -> None:
            await self.handle(message)

        asyncio.set_event_loop(uvloop.new_event_loop())
        tuned = {"job_timeout": 5} if self.tuned else {}
        Worker(
            functions=[func(handle, name="handle")],
            redis_settings=RedisSettings.from_dsn(self.url),
            max_jobs=self.concurrency,
            keep_result=0,
            **tuned,
        ).run()


if __name__ == "__main__":
    main(Arq)
