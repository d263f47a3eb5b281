"""Celery on Redis with a plain function in 64 threads, `acks_late`, results ignored. No bulk call, it blocks."""

from __future__ import annotations

import os

from celery import Celery

from benchmarks.peers.system import Options, Payload, System, main


class Cel(System):
    """Tuned: a visibility timeout of five seconds."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._app = Celery("bench", broker=f"{self.url}/0")
        self._app.conf.update(
            task_acks_late=True, task_reject_on_worker_lost=True, task_ignore_result=True, worker_prefetch_multiplier=1,
            broker_connection_retry_on_startup=True, worker_hijack_root_logger=False,
        )  # fmt: skip
        if self.tuned:
            self._app.conf.broker_transport_options = {"visibility_timeout": 5}

        def handle(message: dict) -> None:
            self.handle_sync(message)

        self._task = self._app.task(name="handle")(handle)

    def publish(self, message: Payload) -> None:
        self._task.apply_async((message,), ignore_result=True)

    async def publish_fast(self, payloads: list[Payload]) -> None:
        with self._app.producer_pool.acquire(block=True) as producer:
            for message in payloads:
                self._task.apply_async((message,), producer=producer)

    def work(self) -> None:
        options = ["-P", "threads", "-c", str(self.concurrency), "--loglevel=ERROR", "-n", f"w{os.getpid()}@bench"]
        self._app.worker_main(["worker", *options, "--without-gossip", "--without-mingle", "--without-heartbeat"])


if __name__ == "__main__":
    main(Cel)
