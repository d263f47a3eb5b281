"""A web service that runs its worker inside itself, under a real gunicorn: several processes, a reload, a stop."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from tests.cli.conftest import ROOT, Cli
from tests.servers import wait_until

APP = """
import os
from pathlib import Path
from typing import Annotated

from fastapi import Depends, FastAPI

from rsmq import Broker
from rsmq.asgi import connected, lifespan

broker = Broker()


@broker.handler("orders", group="billing", partitions=6)
async def bill(order: dict[str, int]) -> None:
    with Path("billed").open("a") as file:
        file.write(f"{os.getpid()} {order['number']}\\n")


app = FastAPI(lifespan=lifespan(broker, worker=True))


@app.post("/orders", status_code=202)
async def order(order: dict[str, int], queue: Annotated[Broker, Depends(connected)]) -> dict[str, str]:
    number = order["number"]
    return {"id": await queue.publish("orders", order, key=str(number), message_id=f"order-{number}")}
"""
WSGI = """
import os

from flask import Flask, request

from rsmq import SyncBroker

broker = SyncBroker()
broker.publish("orders", {"number": 0})  # a connection in the master, before it forks
app = Flask("shop")


@app.post("/orders")
def order():
    return {"id": broker.publish("orders", request.get_json()), "pid": os.getpid()}
"""


class Gunicorn:
    """A master with two workers."""

    def __init__(self, directory: Path, environment: dict[str, str], *options: str) -> None:
        command = [sys.executable, "-m", "gunicorn", "web:app", "--workers", "2", "--bind", "127.0.0.1:0", *options]
        self._log = directory / "gunicorn.log"
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                command, cwd=directory, env=environment, stdout=subprocess.DEVNULL, stderr=log, start_new_session=True
            )
        wait_until(lambda: self.matching("Listening at: ") or self.process.poll() is not None, "it listens")
        found = re.search(r"http://127.0.0.1:\d+", self._log.read_text())
        assert found is not None, self._log.read_text()
        self.url = found[0]

    def matching(self, text: str) -> list[str]:
        """Lines of its log."""
        return [line for line in self._log.read_text().splitlines() if text in line]

    def order(self, number: int) -> dict[str, str]:
        """Send an order, again if the process that had it has ended: its id makes it one."""
        body = json.dumps({"number": number}).encode()
        for _ in range(5):
            try:
                with urlopen(Request(f"{self.url}/orders", body, {"Content-Type": "application/json"})) as answer:
                    found: dict[str, str] = json.load(answer)
                    return found
            except OSError as error:
                trouble = error
        raise trouble


@pytest.fixture
def cli(tmp_path: Path, server_url: str, prefix: str) -> Cli:
    """Commands and gunicorn in one directory, with leases and a presence that change hands soon."""
    quick = {"RSMQ_LEASE_TTL": "2s", "RSMQ_PREFLIGHT": "warn"}
    return Cli(tmp_path, {"RSMQ_URL": server_url, "RSMQ_PREFIX": prefix, "PYTHONPATH": str(ROOT), **quick})


@pytest.fixture
def started() -> Iterator[list[Gunicorn]]:
    """What the test has started; the whole process group ends with it."""
    found: list[Gunicorn] = []
    yield found
    for each in found:
        if each.process.poll() is None:
            each.process.kill()
            each.process.wait()


def billed(cli: Cli) -> list[tuple[int, int]]:
    """Process and number of each handled order."""
    path = cli.directory / "billed"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(int(pid), int(number)) for pid, number in map(str.split, lines)]


def test_workers_inside_of_gunicorn_survive_a_reload_and_a_stop(cli: Cli, started: list[Gunicorn]) -> None:
    """Two processes share the partitions; SIGHUP replaces them, SIGTERM ends them; each order is handled once."""
    (cli.directory / "web.py").write_text(APP)
    gunicorn = Gunicorn(cli.directory, cli.environment, "--worker-class", "uvicorn.workers.UvicornWorker")
    started.append(gunicorn)
    numbers = iter(range(1_000_000))
    sent: list[int] = []

    def send_until(are_enough: int, without: set[int]) -> set[int]:
        """Send orders until so many other processes have handled some, and return these."""

        def seen() -> set[int]:
            return {pid for pid, _ in billed(cli)} - without

        def one_more() -> bool:
            sent.append(next(numbers))
            assert gunicorn.order(sent[-1])["id"] == f"order-{sent[-1]}"
            return len(seen()) >= are_enough

        wait_until(one_more, f"{are_enough} processes handle orders")
        return seen()

    first = send_until(2, set())
    gunicorn.process.send_signal(signal.SIGHUP)
    second = send_until(2, first)
    assert not first & second
    gunicorn.process.send_signal(signal.SIGTERM)
    assert gunicorn.process.wait(60) == 0, gunicorn.matching("")
    assert cli.json("member", "list") == []
    handled = sorted(number for _, number in billed(cli))
    assert len(set(handled)) == len(handled), "an order was handled twice"
    group = cli.json("group", "show", "orders", "billing")
    assert (group["pending"], len(handled) + group["unread"]) == (0, len(sent))
    assert gunicorn.matching("Traceback") == []


def test_publishers_inside_of_gunicorn_have_connections_of_their_own(cli: Cli, started: list[Gunicorn]) -> None:
    """`--preload` with a broker that was used before the fork: each process publishes, also after a reload."""
    (cli.directory / "web.py").write_text(WSGI)
    gunicorn = Gunicorn(cli.directory, cli.environment, "--preload", "--threads", "2")
    started.append(gunicorn)
    ids, pids = set[str](), set[int]()

    def one_more() -> bool:
        answer = gunicorn.order(1)
        ids.add(answer["id"])
        pids.add(int(answer["pid"]))
        return len(pids) >= 2

    wait_until(one_more, "two processes publish")
    before = set(pids)
    gunicorn.process.send_signal(signal.SIGHUP)
    wait_until(lambda: one_more() and bool(pids - before), "a new one publishes")
    gunicorn.process.send_signal(signal.SIGTERM)
    assert gunicorn.process.wait(60) == 0, gunicorn.matching("")
    assert cli.json("topic", "show", "orders")["length"] == len(ids) + 1
    assert gunicorn.matching("Traceback") == []
