"""dramatiq on Redis with a plain function in eight threads, its own default for a process. No bulk call, it blocks."""

from __future__ import annotations

import logging
import os
import signal
import time

import dramatiq
from dramatiq.brokers.redis import RedisBroker

from benchmarks.peers.system import Options, Payload, System, main

THREADS = 8


class Dramatiq(System):
    """Tuned: `heartbeat_timeout` of five seconds, and maintenance with every command."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        tuned = {"heartbeat_timeout": 5000, "maintenance_chance": 1_000_000} if self.tuned else {}
        self._broker = RedisBroker(url=self.url, **tuned)
        dramatiq.set_broker(self._broker)

        def handle(message: dict) -> None:
            self.handle_sync(message)

        self._actor = dramatiq.actor(handle)

    def publish(self, message: Payload) -> None:
        self._actor.send(message)

    async def publish_fast(self, payloads: list[Payload]) -> None:
        for message in payloads:
            self._actor.send(message)

    def work(self) -> None:
        logging.getLogger("dramatiq").setLevel(logging.CRITICAL)
        threads = THREADS if self.options.mode == "count" else self.concurrency
        dramatiq.Worker(self._broker, worker_threads=threads).start()
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
        while True:
            time.sleep(1)


if __name__ == "__main__":
    main(Dramatiq)
