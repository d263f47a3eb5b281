"""Celery's chord on Redis, for `benchmarks.chords`: a worker, and a publisher of chords. `acks_late`, five seconds of
visibility timeout, so that a killed worker's tasks come again while the benchmark looks."""

from __future__ import annotations

import os
import sys

import redis
from celery import Celery, chord

URL = os.environ["CHORD_URL"]
app = Celery("chords", broker=URL, backend=URL)
app.conf.update(
    task_acks_late=True, task_reject_on_worker_lost=True, broker_connection_retry_on_startup=True,
    broker_transport_options={"visibility_timeout": 5}, worker_hijack_root_logger=False,
)  # fmt: skip


@app.task(name="member")
def member(number: int) -> int:
    """One task of the header."""
    return number


@app.task(name="body")
def body(results: list[int], name: str) -> None:
    """What is called when all tasks of the header are done."""
    redis.Redis.from_url(URL).rpush("called", f"{name}|{len(results)}")


def main() -> None:
    """`work`, or `publish BATCHES MEMBERS`."""
    if sys.argv[1] == "work":
        options = ["-P", "threads", "-c", "16", "--loglevel=ERROR", "-n", f"w{os.getpid()}@chords"]
        app.worker_main(["worker", *options, "--without-gossip", "--without-mingle", "--without-heartbeat"])
        return
    for number in range(int(sys.argv[2])):
        chord([member.s(n) for n in range(int(sys.argv[3]))])(body.s(f"b{number}"))


if __name__ == "__main__":
    main()
