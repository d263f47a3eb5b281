"""A worker process with an endpoint, and what asks it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from rsmq import Broker, Settings
from rsmq.telemetry.tracing import trace
from rsmq.testing.server import free_port
from tests.cli.conftest import Cli, Running
from tests.cli.conftest import cli as cli
from tests.cli.conftest import start as start
from tests.servers import wait_until
from tests.telemetry.traces import Traces

MODULE = """
import logging, time
from pathlib import Path
from pydantic import BaseModel
from tenacity import wait_none
from rsmq import Broker, Message, RetryPolicy

log = logging.getLogger("app")
broker = Broker()

class Order(BaseModel):
    n: int
    note: str = ""

@broker.handler("orders", group="billing", retry=RetryPolicy(max_attempts=2, wait=wait_none()))
async def bill(order: Order) -> None:
    log.info("billing")
    if order.note == "poison":
        raise ValueError("poisoned")
    while order.note == "block" and not Path("go").exists():
        time.sleep(0.01)

@broker.handler("orders", group="thread")
def in_thread(order: Order) -> None:
    log.info("threading")

@broker.handler("orders", group="batch", batch=10)
async def in_batch(orders: list[Order]) -> None:
    log.info("batching")
"""


class EndpointClient:
    """A client of one worker's endpoint."""

    def __init__(self, port: int) -> None:
        self.address = f"127.0.0.1:{port}"

    def get(self, path: str) -> tuple[int, str]:
        """Status and body; 0 while the port is closed."""
        try:
            with urlopen(f"http://{self.address}{path}", timeout=10) as response:
                return response.status, response.read().decode()
        except HTTPError as error:
            with error:
                return error.code, error.read().decode()
        except URLError:
            return 0, ""

    def probe(self, path: str) -> tuple[int, Any]:
        """Status and the report."""
        status, body = self.get(path)
        return status, json.loads(body or "{}")

    def expect(self, path: str, status: int) -> Any:
        """Wait for a status, and return the report that came with it."""
        seen: list[Any] = []

        def is_there() -> bool:
            seen[:] = self.probe(path)
            return bool(seen[0] == status)

        wait_until(is_there, f"{path} answers {status}: {seen}")
        return seen[1]

    def series(self) -> dict[str, float]:
        """Every sample of /metrics as `name{label="value"}` without the `le` buckets."""
        status, text = self.get("/metrics")
        assert status == 200, text
        samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
        return {named(sample.name, sample.labels): sample.value for sample in samples if "le" not in sample.labels}


def named(name: str, labels: Mapping[str, str]) -> str:
    """`name{label=value,...}`, labels sorted."""
    return name + ("{" + ",".join(f"{key}={value}" for key, value in sorted(labels.items())) + "}" if labels else "")


@pytest.fixture
def endpoint() -> EndpointClient:
    """Where the worker of this test will answer."""
    return EndpointClient(free_port())


@pytest.fixture
def serve(cli: Cli, start: Callable[..., Running], endpoint: EndpointClient) -> Iterator[Callable[..., Running]]:
    """Start a worker with that endpoint, and wait until it is ready."""
    (cli.directory / "app.py").write_text(MODULE)

    def launch(*args: str, **environment: str) -> Running:
        cli.environment |= environment
        running = start("worker", "app:broker", "--metrics", endpoint.address, *args)
        wait_until(lambda: endpoint.get("/readyz")[0] == 200 or running.process.poll() is not None, "it is ready")
        assert running.process.poll() is None, running.lines
        return running

    yield launch
    Path(cli.directory, "go").touch()


@pytest.fixture
def traces() -> Traces:
    """Everything is sampled."""
    return Traces()


@pytest.fixture
def make(server_url: str, prefix: str) -> Callable[[Traces], Broker]:
    """A traced broker on the shared server."""

    def broker(traces: Traces) -> Broker:
        made = Broker(Settings(url=server_url, prefix=prefix, preflight="warn", partitions=2))
        trace(made, traces.provider)
        return made

    return broker
