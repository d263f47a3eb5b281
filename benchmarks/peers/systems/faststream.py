"""FastStream on Redis Streams: consumer group, 64 workers, 100 records a read. Variant `batch`: a list a call."""

from __future__ import annotations

import logging
import os

import redis.asyncio
from faststream import FastStream
from faststream.redis import RedisBroker, StreamSub

from benchmarks.peers.system import Payload, System, main, run_loop


class Fast(System):
    """Pipelines of 500 are the documented quick way. Tuned: a second subscriber with `min_idle_time`."""

    async def open(self) -> None:
        self._broker = RedisBroker(self.url, logger=None)
        await self._broker.connect()
        self._client = redis.asyncio.from_url(self.url)

    async def prepare(self) -> None:
        await self._client.xgroup_create("q", "g", id="0", mkstream=True)

    async def close(self) -> None:
        await self._broker.stop()
        await self._client.aclose()

    async def publish(self, message: Payload) -> None:
        await self._broker.publish(message, stream="q")

    async def publish_fast(self, payloads: list[Payload]) -> None:
        for start in range(0, len(payloads), 500):
            async with self._client.pipeline(transaction=False) as pipe:
                for message in payloads[start : start + 500]:
                    await self._broker.publish(message, stream="q", pipeline=pipe)
                await pipe.execute()

    def work(self) -> None:
        broker, me = RedisBroker(self.url, logger=None), f"c{os.getpid()}"
        if self.variant == "batch":

            @broker.subscriber(stream=StreamSub("q", group="g", consumer=me, batch=True, max_records=100))
            async def handle_batch(messages: list[dict]) -> None:
                for message in messages:
                    await self.handle(message)

        else:

            @broker.subscriber(
                stream=StreamSub("q", group="g", consumer=me, max_records=100), max_workers=self.concurrency
            )
            async def handle_one(message: dict) -> None:
                await self.handle(message)

            if self.tuned:

                @broker.subscriber(
                    stream=StreamSub("q", group="g", consumer=f"{me}x", min_idle_time=5000), max_workers=1
                )
                async def handle_abandoned(message: dict) -> None:
                    await self.handle(message)

        run_loop(FastStream(broker).run(log_level=logging.ERROR))


if __name__ == "__main__":
    main(Fast)
