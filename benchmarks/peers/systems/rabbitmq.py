"""RabbitMQ with aio-pika: a durable queue, persistent messages, publisher confirms, prefetch 100, one ack a message."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aio_pika

from benchmarks.peers.system import HELD, Payload, System, main, run_loop


class Rabbit(System):
    """Five hundred confirmed publishes at once. Nothing to tune: the broker sees the connection close."""

    async def open(self) -> None:
        self._connection = await aio_pika.connect(self.url)
        self._channel = await self._connection.channel(publisher_confirms=True)

    async def prepare(self) -> None:
        queue = await self._channel.declare_queue("q", durable=True)
        await queue.purge()

    async def close(self) -> None:
        await self._connection.close()

    async def publish(self, message: Payload) -> None:
        body = aio_pika.Message(json.dumps(message).encode(), delivery_mode=aio_pika.DeliveryMode.PERSISTENT)
        await self._channel.default_exchange.publish(body, "q")

    async def publish_fast(self, payloads: list[Payload]) -> None:
        for start in range(0, len(payloads), 500):
            await asyncio.gather(*[self.publish(message) for message in payloads[start : start + 500]])

    def work(self) -> None:
        run_loop(self._work())

    async def _work(self) -> None:
        connection = await aio_pika.connect(self.url)
        channel = await connection.channel()
        await channel.set_qos(HELD if self.options.mode == "hold" else 100)
        queue = await channel.declare_queue("q", durable=True)

        async def handle(message: Any) -> None:
            await self.handle(json.loads(message.body))
            await message.ack()

        await queue.consume(handle)
        await asyncio.Event().wait()


if __name__ == "__main__":
    main(Rabbit)
