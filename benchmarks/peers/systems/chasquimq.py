"""ChasquiMQ (Rust core). It reads with XREADGROUP … CLAIM, which only Redis 8.4 and newer have."""

from __future__ import annotations

from typing import Any

import redis.asyncio
from chasquimq import Queue, Worker

from benchmarks.peers.system import Payload, System, main, run_loop


class Chasqui(System):
    """`add_bulk` in slices of 500. Tuned: `claim_min_idle_ms` of five seconds."""

    async def open(self) -> None:
        await self._check_server()
        self._queue = Queue("q", redis_url=self.url)
        await self._queue.__aenter__()

    async def _check_server(self) -> None:
        """On an older server it would hang without a word."""
        client = redis.asyncio.from_url(self.url)
        await client.xgroup_create("probe", "g", mkstream=True)
        try:
            await client.execute_command(
                "XREADGROUP", "GROUP", "g", "c", "COUNT", 1, "CLAIM", 1, "STREAMS", "probe", ">"
            )
        except redis.ResponseError:
            raise SystemExit("Unavailable: needs Redis 8.4 or newer (XREADGROUP … CLAIM)") from None
        finally:
            await client.delete("probe")
            await client.aclose()

    async def close(self) -> None:
        await self._queue.close()

    async def publish(self, message: Payload) -> None:
        await self._queue.add("handle", message)

    async def publish_fast(self, payloads: list[Payload]) -> None:
        for start in range(0, len(payloads), 500):
            await self._queue.add_bulk([{"name": "handle", "data": each} for each in payloads[start : start + 500]])

    def work(self) -> None:
        run_loop(self._work())

    async def _work(self) -> None:
        async def handle(job: Any) -> None:
            await self.handle(job.data)

        tuned = {"claim_min_idle_ms": 5000} if self.tuned else {}
        async with Worker("q", handle, redis_url=self.url, concurrency=self.concurrency, **tuned) as worker:
            await worker.run()


if __name__ == "__main__":
    main(Chasqui)
