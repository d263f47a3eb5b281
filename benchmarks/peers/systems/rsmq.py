"""rsmq with its defaults: eight partitions, order by key, leases, fenced settles; a worker as `rsmq worker` sets it
up. Variants: `typed`, `batch`."""

from __future__ import annotations

from pydantic import BaseModel

from benchmarks.peers.system import Payload, System, main, run_loop
from rsmq import Broker, Settings, tune_garbage_collector


class Order(BaseModel):
    """The payload as a model."""

    i: int
    sent: float
    event: str
    tenant: str
    ok: bool
    data: str


class Rsmq(System):
    """`publish_many`, `publish`, and a worker in this process."""

    async def open(self) -> None:
        self._broker = Broker(Settings(url=self.url))
        await self._broker.__aenter__()

    async def close(self) -> None:
        await self._broker.__aexit__(None, None, None)

    async def publish(self, message: Payload) -> None:
        await self._broker.publish("orders", message, key=f"k{message['i'] % 1000}")

    async def publish_fast(self, payloads: list[Payload]) -> None:
        await self._broker.publish_many("orders", payloads, key=lambda message: f"k{message['i'] % 1000}")

    def work(self) -> None:
        broker = Broker(Settings(url=self.url))
        if self.variant == "typed":

            @broker.handler("orders", group="g", concurrency=self.concurrency)
            async def handle_typed(order: Order) -> None:
                await self.handle(order.__dict__)

        elif self.variant == "batch":

            @broker.handler("orders", group="g", batch=500)
            async def handle_batch(orders: list[dict]) -> None:  # type: ignore[type-arg]
                for order in orders:
                    await self.handle(order)

        else:

            @broker.handler("orders", group="g", concurrency=self.concurrency)
            async def handle_one(order: dict) -> None:  # type: ignore[type-arg]
                await self.handle(order)

        tune_garbage_collector()  # as `rsmq worker` does
        run_loop(self._work(broker))

    async def _work(self, broker: Broker) -> None:
        async with broker:
            await broker.run()


if __name__ == "__main__":
    main(Rsmq)
