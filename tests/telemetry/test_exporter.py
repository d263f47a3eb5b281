"""The exporter with a real server: its metrics agree with the state of the group."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import httpx

from rsmq import Broker, Reject, Settings
from rsmq.inspector.observer import Observer
from rsmq.model.keys import Keys
from rsmq.redis.client.connector import Client
from rsmq.telemetry.exporter import group_samples
from rsmq.telemetry.metric import GROUPS, Sample
from rsmq.testing.server import free_port
from tests.cli.conftest import Cli, Running
from tests.patience import PATIENCE
from tests.servers import Server, wait_until
from tests.telemetry.conftest import EndpointClient


async def look(client: Client, keys: Keys, settings: Settings) -> dict[str, float]:
    """The samples by name; every test has one topic and one group."""
    samples: list[Sample] = await group_samples(Observer(client, keys, settings))
    return {sample.metric.name: float(sample.value) for sample in samples}  # type: ignore[arg-type]


async def test_group_metrics_follow_the_work(client: Client, keys: Keys, settings: Settings) -> None:
    """Lag, pending, oldest, dead letters, members and owners, before, during and after the work."""
    go, started = asyncio.Event(), asyncio.Event()
    broker = Broker(replace(settings, preflight="warn", partitions=2, lease_ttl=timedelta(seconds=10)))

    @broker.handler("orders", group="billing", ordering="none")
    async def bill(order: dict[str, Any]) -> None:
        started.set()
        await go.wait()
        if order["n"] == 0:
            raise Reject("no")

    async with broker.running():
        pass  # now there are a topic and a group
    async with broker:
        await broker.publish_many("orders", [{"n": n} for n in range(3)])
        seen = await until(client, keys, settings, lambda now: now["rsmq_group_oldest_seconds"] > 0)
        assert (seen["rsmq_topic_messages"], seen["rsmq_group_unread_messages"]) == (3, 3)
        assert seen["rsmq_group_members"] == 0
        assert seen["rsmq_group_oldest_seconds"] < 60
        async with broker.running():
            await asyncio.wait_for(started.wait(), PATIENCE)
            seen = await until(client, keys, settings, lambda now: now["rsmq_group_running_messages"] == 3)
            assert (seen["rsmq_group_unread_messages"], seen["rsmq_group_members"]) == (0, 1)
            await until(client, keys, settings, lambda now: now["rsmq_group_unowned_partitions"] == 0)
            assert 0 < seen["rsmq_group_oldest_seconds"] < 60
            go.set()
            seen = await until(client, keys, settings, lambda now: now["rsmq_group_backlog_messages"] == 0)
            seen = await until(client, keys, settings, lambda now: now["rsmq_group_dead_letters"] == 1)
            assert seen["rsmq_group_oldest_seconds"] == seen["rsmq_group_ready_messages"] == 0
    await until(client, keys, settings, lambda now: now["rsmq_group_unowned_partitions"] == 2)
    assert seen.keys() <= {metric.name for metric in GROUPS}


async def until(
    client: Client, keys: Keys, settings: Settings, is_there: Callable[[dict[str, float]], bool]
) -> dict[str, float]:
    """Take samples until the condition holds; fails with the last one."""
    try:
        async with asyncio.timeout(PATIENCE):
            while not is_there(seen := await look(client, keys, settings)):
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"after {PATIENCE:g} s still {seen}") from None
    return seen


def test_exporter_without_server_shows_no_stale_value(cli: Cli, start: Callable[..., Running]) -> None:
    """All metrics are on the page; without the server there is only `rsmq_up 0`."""
    with Server(tcp=True, aof=True) as server:
        cli.environment |= {"RSMQ_URL": server.url, "RSMQ_CONNECT_TIMEOUT": "PT1S", "RSMQ_UNAVAILABLE_TIMEOUT": "PT0S"}
        cli.ok("publish", "orders", "{}")
        endpoint = EndpointClient(free_port())
        running = start("exporter", "--listen", endpoint.address, "--json")
        endpoint.expect("/readyz", 200)
        running.expect('"url"')
        running.expect("}", 2)
        at = running.lines.index("{")  # the log comes before
        assert json.loads("".join(running.lines[at : at + 3]))["url"] == f"http://{endpoint.address}/metrics"
        seen = endpoint.series()
        assert (seen["rsmq_up"], seen["rsmq_topic_messages{topic=orders}"]) == (1, 1)
        server.kill()
        endpoint.expect("/readyz", 503)
        seen = endpoint.series()
        assert [name for name in seen if name.startswith("rsmq_")] == ["rsmq_up"]
        assert seen["rsmq_up"] == 0
        server.start()
        endpoint.expect("/readyz", 200)


def test_scale_answers_how_many_workers_a_group_needs(cli: Cli, start: Callable[..., Running]) -> None:
    """One while something waits, none without anything; an unknown group, option or number has its own status."""
    (cli.directory / "app.py").write_text(
        "from rsmq import Broker\nbroker = Broker()\n"
        "@broker.handler('orders', group='billing', partitions=2)\nasync def bill(order: dict) -> None: ...\n"
    )
    worker = start("worker", "app:broker")
    worker.expect("reads 2 of 2 partitions")
    worker.signal(signal.SIGTERM)
    assert worker.end() == 0
    endpoint = EndpointClient(free_port())
    start("exporter", "--listen", endpoint.address)
    endpoint.expect("/readyz", 200)

    def scale(**query: str) -> tuple[int, str]:
        answer = httpx.get(f"http://{endpoint.address}/scale", params={"topic": "orders", "group": "billing"} | query)
        return answer.status_code, answer.text

    code, text = scale()
    assert (code, json.loads(text)["workers"], json.loads(text)["partitions"]) == (200, 0, 2)
    cli.ok("publish", "orders", "{}", "--delay", "1h")
    wait_until(lambda: json.loads(scale()[1])["workers"] == 1, "a delayed message needs a worker")
    assert json.loads(scale(max="0", min="2")[1])["workers"] == 2
    for query, status in (({"group": "x"}, 404), ({"drain": "soon"}, 400), ({"max": "-1"}, 400), ({"mxa": "1"}, 400)):
        assert scale(**query)[0] == status, query
