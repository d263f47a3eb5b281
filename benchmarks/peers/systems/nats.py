"""NATS JetStream on files with nats-py: a pull consumer, 100 a fetch, 64 tasks, one ack a message."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import nats
from nats.js.api import AckPolicy, ConsumerConfig, StorageType, StreamConfig

from benchmarks.peers.system import Payload, System, main, run_loop


class Nats(System):
    """`publish_async` with a thousand confirmations outstanding. Tuned: `ack_wait` of five seconds."""

    async def open(self) -> None:
        self._client = await nats.connect(self.url)
        self._stream = self._client.jetstream(publish_async_max_pending=1000)

    async def prepare(self) -> None:
        with contextlib.suppress(nats.js.errors.NotFoundError):
            await self._stream.delete_stream("S")
        await self._stream.add_stream(StreamConfig(name="S", subjects=["q"], storage=StorageType.FILE))
        wait = 5 if self.tuned else 30
        await self._stream.add_consumer(
            "S", ConsumerConfig(durable_name="d", ack_policy=AckPolicy.EXPLICIT, ack_wait=wait, max_ack_pending=5000)
        )

    async def close(self) -> None:
        await self._client.close()

    async def publish(self, message: Payload) -> None:
        await self._stream.publish("q", json.dumps(message).encode())

    async def publish_fast(self, payloads: list[Payload]) -> None:
        await asyncio.gather(*[await self._stream.publish_async("q", json.dumps(each).encode()) for each in payloads])

    def work(self) -> None:
        run_loop(self._work())

    async def _work(self) -> None:
        client = await nats.connect(self.url)
        pull = await client.jetstream().pull_subscribe("q", durable="d", stream="S")
        free, tasks = asyncio.Semaphore(self.concurrency), set()

        async def handle(message: Any) -> None:
            try:
                await self.handle(json.loads(message.data))
                await message.ack()
            finally:
                free.release()

        while True:
            with contextlib.suppress(nats.errors.TimeoutError):
                for message in await pull.fetch(100, timeout=1):
                    await free.acquire()
                    task = asyncio.create_task(handle(message))
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)


if __name__ == "__main__":
    main(Nats)
