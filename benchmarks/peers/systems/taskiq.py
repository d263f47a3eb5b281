"""taskiq-redis' stream broker under the receiver that taskiq's command line runs. No bulk call; no results."""

from __future__ import annotations

import logging

from taskiq.api import run_receiver_task
from taskiq_redis import RedisStreamBroker

from benchmarks.peers.system import Options, Payload, System, main, run_loop


class Taskiq(System):
    """Tuned: `idle_timeout` and the lock of the reclaimer at five seconds."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        tuned = {"idle_timeout": 5000, "unacknowledged_lock_timeout": 5} if self.tuned else {}
        self._broker = RedisStreamBroker(self.url, consumer_id="0", **tuned)

        @self._broker.task(task_name="handle")
        async def handle(message: dict) -> None:
            await self.handle(message)

        self._task = handle

    async def open(self) -> None:
        await self._broker.startup()

    async def close(self) -> None:
        await self._broker.shutdown()

    async def publish(self, message: Payload) -> None:
        await self._task.kiq(message)

    def work(self) -> None:
        logging.getLogger("taskiq").setLevel(logging.WARNING)
        self._broker.is_worker_process = True
        run_loop(run_receiver_task(self._broker, max_async_tasks=self.concurrency, run_startup=True))


if __name__ == "__main__":
    main(Taskiq)
