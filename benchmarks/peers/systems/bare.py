"""The loop one would write by hand: redis-py with hiredis, batches of 100. No order, no retries, no recovery.

Variant `keyed` carries what rsmq's messages carry (a message id and a key) over eight streams, still promising nothing.
"""

from __future__ import annotations

import os

import redis.asyncio
from pydantic_core import from_json, to_json

from benchmarks.peers.system import Options, Payload, System, main, run_loop


class Bare(System):
    """XADD in pipelines of 100; XREADGROUP COUNT 100, an inline call, one XACK a batch."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._streams = [f"q{number}" for number in range(8)] if self.variant == "keyed" else ["q"]

    async def open(self) -> None:
        self._client = redis.asyncio.from_url(self.url, protocol=2)

    async def prepare(self) -> None:
        for stream in self._streams:
            await self._client.xgroup_create(stream, "g", "0", mkstream=True)

    async def close(self) -> None:
        await self._client.aclose()

    def _entry(self, message: Payload) -> tuple[str, dict[str, bytes | str]]:
        """Where it goes and what is written."""
        if self.variant != "keyed":
            return "q", {"data": to_json(message)}
        key = message["i"] % 1000
        return self._streams[key % 8], {"data": to_json(message), "id": os.urandom(16).hex(), "key": f"k{key}"}

    async def publish(self, message: Payload) -> None:
        await self._client.xadd(*self._entry(message))

    async def publish_fast(self, payloads: list[Payload]) -> None:
        for start in range(0, len(payloads), 100):
            pipe = self._client.pipeline(transaction=False)
            for message in payloads[start : start + 100]:
                pipe.xadd(*self._entry(message))
            await pipe.execute()

    def work(self) -> None:
        run_loop(self._work())

    async def _work(self) -> None:
        client = redis.asyncio.from_url(self.url, protocol=2, socket_timeout=None)
        me, streams = f"c{os.getpid()}", dict.fromkeys(self._streams, ">")
        while True:
            for stream, rows in await client.xreadgroup("g", me, streams, count=100, block=1000):
                for _, fields in rows:
                    await self.handle(from_json(fields[b"data"]))
                await client.xack(stream, "g", *[entry_id for entry_id, _ in rows])


if __name__ == "__main__":
    main(Bare)
