"""ardiq (Rust core), results not kept."""

from __future__ import annotations

from ardiq import Ardiq

from benchmarks.peers.system import Options, Payload, System, main, run_loop


class Ard(System):
    """`enqueue_many` in slices of 500. Tuned: `idle_timeout_ms` of five seconds."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        tuned = {"idle_timeout_ms": 5000} if self.tuned else {}
        self._app = Ardiq(redis_url=self.url, queue_name="q", concurrency=self.concurrency, result_ttl_ms=0, **tuned)

        @self._app.task(name="handle")
        async def handle(message: dict) -> None:
            await self.handle(message)

        self._task = handle

    async def publish(self, message: Payload) -> None:
        await self._task.enqueue(message)

    async def publish_fast(self, payloads: list[Payload]) -> None:
        for start in range(0, len(payloads), 500):
            await self._app.enqueue_many([self._task.prepare(each) for each in payloads[start : start + 500]])

    def work(self) -> None:
        run_loop(self._app.run())


if __name__ == "__main__":
    main(Ard)
