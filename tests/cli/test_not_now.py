"""A server that answers, and does nothing: what stands still says so, and a stop signal ends it all the same."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator

import pytest

from rsmq.redis.client.client import TRANSIENT
from rsmq.testing.server import free_port
from tests.cli.conftest import Cli, Running
from tests.redis.answers import answering
from tests.servers import Server
from tests.telemetry.conftest import EndpointClient

APP = """
from datetime import timedelta
from rsmq import Broker
from rsmq.gateway import Gateway, GatewayOptions
from rsmq.handler.retry import RetryPolicy

broker = Broker(lease_ttl="2s", command_timeout="1s")
gateway = Gateway(broker, options=GatewayOptions(anonymous=True, lease=timedelta(seconds=2)))

@broker.every("1s", topic="ticks")
def tick() -> dict:
    return {}

@broker.handler("orders", group="billing", retry=RetryPolicy(max_attempts=100))
async def bill(order: dict) -> None:
    raise OSError("not this time")
"""


@pytest.fixture(scope="module")
def durable() -> Iterator[Server]:
    """A server of its own, behind a proxy."""
    with Server(tcp=True, aof=True) as server:
        yield server


@pytest.mark.parametrize("answer", ["READONLY", "BUSY", "silence"])
def test_what_stands_still_is_not_ready_and_stops(
    cli: Cli, start: Callable[..., Running], durable: Server, answer: str
) -> None:
    """After a lease /readyz is 503 and says why, in its body and in the log; SIGTERM is a clean end meanwhile."""
    (cli.directory / "app.py").write_text(APP)
    endpoints = {name: EndpointClient(free_port()) for name in ("worker", "gateway", "exporter")}
    commands = {
        "worker": ("app:broker", "--metrics", endpoints["worker"].address, "--grace", "1s"),
        "gateway": ("app:gateway", "--listen", "mqtt://127.0.0.1:0", "--metrics", endpoints["gateway"].address),
        "exporter": ("--listen", endpoints["exporter"].address),
        "dashboard": ("--port", "0"),
    }
    with answering(durable.port) as proxy:
        cli.environment |= {"RSMQ_URL": proxy.url, "RSMQ_PREFLIGHT": "warn"}
        cli.ok("publish", "orders", "{}")
        running = {name: start(name, *arguments) for name, arguments in commands.items()}
        for endpoint in endpoints.values():
            endpoint.expect("/readyz", 200)
        running["worker"].expect("not this time")
        running["dashboard"].expect("Ctrl-C ends it")
        proxy.answer = answer
        reason = TRANSIENT.get(answer, "no answer")  # from the server, or not yet
        for name, endpoint in endpoints.items():
            assert reason in str(endpoint.expect("/readyz", 503)), name
        for name in ("worker", "gateway"):
            assert reason in running[name].expect("/readyz fails: ")[0]
        for each in running.values():
            each.signal(signal.SIGTERM)
        assert {name: each.end() for name, each in running.items()} == dict.fromkeys(running, 0)
