"""A rolling deployment under load, as Kubernetes does it: a new worker becomes ready, then an old one gets SIGTERM."""

from __future__ import annotations

import signal
import threading
from collections import Counter
from collections.abc import Callable

from tests.cli.conftest import Cli, Running
from tests.servers import Server, wait_until

APP = """
import asyncio
from rsmq import Broker

broker = Broker()

@broker.handler("orders", group="billing", partitions=8, concurrency=16)
async def bill(order: dict) -> None:
    print("begun", order["n"], flush=True)
    await asyncio.sleep(0.02)
"""
PODS = 2


def test_rolling_deployment_under_load_repeats_nothing(cli: Cli, start: Callable[..., Running], server: Server) -> None:
    """All pods are replaced, one by one, while messages come in: each message is begun once, and all are settled."""
    (cli.directory / "app.py").write_text(APP)
    pods = [start("worker", "app:broker") for _ in range(PODS)]
    everyone = list(pods)
    for pod in pods:
        pod.expect(" serves ")
        pod.expect("of 8 partitions")
    published, is_over = 0, threading.Event()
    prefix = cli.environment["RSMQ_PREFIX"]

    def publish() -> None:
        nonlocal published
        with server.client() as redis:
            while not is_over.wait(0.005):
                key = f"c-{published % 50}"
                stream = f"{prefix}:{{orders.{published % 50 % 8}}}"
                redis.xadd(stream, {"data": f'{{"n": {published}}}', "key": key})
                published += 1

    def begun() -> Counter[str]:
        return Counter(line for pod in everyone for line in pod.matching("begun "))

    publisher = threading.Thread(target=publish)
    publisher.start()
    try:
        wait_until(lambda: len(begun()) > 50, "they work")
        for old in pods:
            new = start("worker", "app:broker")
            everyone.append(new)
            new.expect("of 8 partitions")  # what readiness waits for
            old.signal(signal.SIGTERM)
            assert old.end() == 0
        before = len(begun())
        wait_until(lambda: len(begun()) > before + 50, "the new ones work")
    finally:
        is_over.set()
        publisher.join()
    wait_until(lambda: len(begun()) == published, f"all {published} are handled")
    assert set(begun().values()) == {1}
    wait_until(lambda: cli.json("group", "show", "orders", "billing")["pending"] == 0, "all are settled")
    assert cli.json("group", "show", "orders", "billing")["unread"] == 0
