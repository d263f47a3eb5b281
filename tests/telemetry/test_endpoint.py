"""The endpoint of real worker processes: what was counted, and whether they make progress."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from rsmq import Broker, RetryPolicy, Settings
from rsmq.telemetry import Endpoint
from rsmq.telemetry.metric import WORKER
from rsmq.testing.server import free_port
from tests.cli.conftest import Cli, Running
from tests.contract.witness import dies, settled
from tests.servers import Server, wait_until
from tests.telemetry.conftest import MODULE, EndpointClient

BILLING = "{group=billing,topic=orders}"
SECRET = "4111-1111-1111-1111"


def test_metrics_count_what_the_worker_did(serve: Callable[..., Running], endpoint: EndpointClient, cli: Cli) -> None:
    """Settled, failed, dead-lettered, owned and timed: each series has the value that the messages made."""
    serve()
    for n in range(3):
        cli.ok("publish", "orders", json.dumps({"n": n}))
    cli.ok("publish", "orders", '{"n": 3, "note": "poison"}')
    wait_until(lambda: endpoint.series()[f"rsmq_messages_dead_lettered_total{BILLING}"] == 1, "one dead letter")
    wait_until(lambda: endpoint.series()[f"rsmq_messages_settled_total{BILLING}"] == 3, "three settled")
    seen = endpoint.series()
    assert seen[f"rsmq_messages_retried_total{BILLING}"] == 1
    assert seen["rsmq_handler_failures_total{group=billing,handler=bill,topic=orders}"] == 2
    assert seen["rsmq_handler_seconds_count{group=billing,handler=bill,topic=orders}"] == 5
    assert seen["rsmq_handler_seconds_sum{group=billing,handler=bill,topic=orders}"] > 0
    assert seen[f"rsmq_partitions_owned{BILLING}"] == 2
    assert seen["rsmq_lease_moves_total{group=billing,move=taken,topic=orders}"] == 2
    assert seen["rsmq_lease_moves_total{group=billing,move=lost,topic=orders}"] == 0
    assert seen[f"rsmq_messages_running{BILLING}"] == seen[f"rsmq_handlers_busy{BILLING}"] == 0
    assert seen["rsmq_heartbeat_age_seconds"] >= 0
    assert seen["rsmq_loop_lag_seconds_count"] > 0


def test_page_describes_every_metric(serve: Callable[..., Running], endpoint: EndpointClient) -> None:
    """What the page has is in the catalogue, with this kind and meaning; another path is not found."""
    serve()
    text = endpoint.get("/metrics")[1]
    described = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE rsmq_")}
    known = {metric.name: metric for metric in WORKER}
    assert described <= known.keys()
    unused = {name for name in known if name.startswith(("rsmq_outbox_", "rsmq_tenant", "rsmq_missing_key"))}
    assert known.keys() - described <= {"rsmq_messages_published_total", "rsmq_publish_failures_total", *unused}
    for name in described:
        assert f"# TYPE {name} {known[name].kind}\n" in text
        assert f"# HELP {name} {known[name].text}\n" in text
    assert endpoint.get("/")[0] == 404


def test_endpoint_answers_while_the_loop_is_blocked(
    serve: Callable[..., Running], endpoint: EndpointClient, cli: Cli
) -> None:
    """While a handler blocks the loop: not ready, with its name and stack; at last not live; and well again after."""
    running = serve(RSMQ_STALL_LIMIT="PT3S")
    cli.ok("publish", "orders", '{"n": 1, "note": "block"}')
    report = endpoint.expect("/readyz", 503)
    assert "blocked" in report["troubles"][0]
    assert "Handler bill orders/billing" in report["blocked"]["by"]
    assert "attempt 1" in report["blocked"]["by"]
    assert any("app.py" in line and "in bill" in line for line in report["blocked"]["stack"])
    assert endpoint.series()["rsmq_loop_blocked_seconds"] > 0.5
    report = endpoint.expect("/livez", 503)
    assert report["heartbeat"]["age_seconds"] < 6, "the heartbeat does not depend on the loop"
    Path(cli.directory, "go").touch()
    endpoint.expect("/livez", 200)
    endpoint.expect("/readyz", 200)
    running.expect("the event loop was blocked for")
    assert endpoint.series()["rsmq_lease_moves_total{group=billing,move=lost,topic=orders}"] == 0


def test_worker_without_server_is_live_but_not_ready(cli: Cli, start: Callable[..., Running]) -> None:
    """A server that is away is no reason to restart a worker; when it is back, so is the worker."""
    (cli.directory / "app.py").write_text(MODULE)
    with Server(tcp=True, aof=True) as server:
        endpoint = EndpointClient(free_port())
        cli.environment |= {"RSMQ_URL": server.url, "RSMQ_LEASE_TTL": "PT1S", "RSMQ_METRICS": endpoint.address}
        start("worker", "app:broker")
        endpoint.expect("/readyz", 200)
        server.kill()
        endpoint.expect("/readyz", 503)
        wait_until(lambda: "no answer from the server at" in endpoint.get("/readyz")[1], "it says why")
        assert endpoint.probe("/livez")[0] == 200
        server.start()
        endpoint.expect("/readyz", 200)


def test_each_process_serves_its_own_port(
    serve: Callable[..., Running], endpoint: EndpointClient, start: Callable[..., Running]
) -> None:
    """Of several processes the first answers at the given port, the second at the next; both stop in order."""
    running = serve("--processes", "2")
    second = EndpointClient(int(endpoint.address.rpartition(":")[2]) + 1)
    one, two = endpoint.expect("/readyz", 200), second.expect("/readyz", 200)
    assert one["member"] != two["member"]
    running.process.terminate()
    assert running.end() == 0
    assert endpoint.get("/livez")[0] == 0


def test_invalid_metrics_address_is_refused(cli: Cli, server: Server) -> None:
    """An invalid address, or one that cannot be used, is one line and exit code 2."""
    (cli.directory / "app.py").write_text(MODULE)
    for address, text in (
        ("9100", "is not a valid address"),
        ("127.0.0.1:99999", "is not a valid address"),
        ("192.0.2.1:9100", "listen"),
    ):
        done = cli("worker", "app:broker", "--metrics", address)
        assert (done.returncode, text in done.stderr, "Traceback" in done.stderr) == (2, True, False), done.stderr


def test_json_log_names_the_message(serve: Callable[..., Running], cli: Cli) -> None:
    """In a coroutine, a thread and a batch the JSON line has the message id, and never its payload."""
    running = serve("--json")
    message_id = cli.ok("publish", "orders", json.dumps({"n": 1, "note": SECRET})).strip()
    bad = cli.ok("publish", "orders", json.dumps({"n": SECRET, "note": 1})).strip()
    running.expect('billing"')
    running.expect("threading")
    running.expect("batching")
    running.expect("dead letter", 3)
    lines = [json.loads(line) for line in running.lines if line.startswith("{")]
    for text, group in (("billing", "billing"), ("threading", "thread")):
        line = next(line for line in lines if line["message"] == text)
        assert (line["topic"], line["group"], line["message_id"], line["attempt"]) == ("orders", group, message_id, 1)
        assert line["partition"] in (0, 1)
    batch = next(line for line in lines if line["message"] == "batching")
    assert (batch["topic"], batch["group"], batch["messages"]) == ("orders", "batch", 1)
    buried = next(line for line in lines if "dead letter" in line["message"])
    assert buried["message_id"] == bad
    assert SECRET not in "".join(running.lines)


@pytest.mark.parametrize("is_first", [True, False])
async def test_endpoint_serves_handlers_that_are_registered_after_it(settings: Settings, is_first: bool) -> None:
    """It may be made before or after the handlers: every message is handled, and its call is counted."""
    broker, seen = Broker(replace(settings, preflight="warn")), list[int]()

    def register() -> None:
        @broker.handler("orders", group="billing", retry=RetryPolicy(max_attempts=1))
        async def bill(order: dict[str, int]) -> None:
            seen.append(order["n"])
            if order["n"] == 0:
                raise ValueError("zero")

        @broker.handler("orders", group="batch", batch=10)
        async def in_batch(orders: list[dict[str, int]]) -> None: ...

    made = Endpoint(broker, "127.0.0.1:0") if is_first else None
    register()
    endpoint = made or Endpoint(broker, "127.0.0.1:0")
    async with broker.running(), endpoint.serving():
        for n in range(20):
            await broker.publish("orders", {"n": n})
        await dies(broker, "orders", "billing", 1)
        await settled(broker, "orders")
        assert endpoint.address is not None
        series = await anyio.to_thread.run_sync(EndpointClient(endpoint.address.port).series)
    assert sorted(seen) == list(range(20))
    labels = "group=billing,handler=bill,topic=orders"
    assert series[f"rsmq_handler_seconds_count{{{labels}}}"] == 20
    assert series[f"rsmq_handler_failures_total{{{labels}}}"] == 1
    assert series["rsmq_handler_seconds_count{group=batch,handler=in_batch,topic=orders}"] > 0


async def test_calls_that_return_their_error_have_failed(settings: Settings) -> None:
    """As those that raise. A batch has failed if each of its messages has. Before, none of them counted."""
    broker = Broker(replace(settings, preflight="warn"))
    once = RetryPolicy(max_attempts=1)

    @broker.handler("orders", group="one", retry=once)
    async def bill(n: int) -> Any:
        return ValueError("zero") if n == 0 else None

    @broker.handler("orders", group="many", retry=once, batch=2, linger="1min")
    async def some(orders: list[int]) -> list[Any]:
        return [ValueError("zero") if n == 0 else None for n in orders]

    @broker.handler("orders", group="all", retry=once, batch=2, linger="1min")
    async def each(orders: list[int]) -> list[Any]:
        return [ValueError("no") for _ in orders]

    endpoint = Endpoint(broker, "127.0.0.1:0")
    async with broker.running(), endpoint.serving():
        await broker.publish_many("orders", [0, 1], key=lambda _: "k")
        await dies(broker, "orders", "all", 2)
        await settled(broker, "orders")
        assert endpoint.address is not None
        series = await anyio.to_thread.run_sync(EndpointClient(endpoint.address.port).series)
    failures = {
        group: series[f"rsmq_handler_failures_total{{group={group},handler={name},topic=orders}}"]
        for group, name in (("one", "bill"), ("many", "some"), ("all", "each"))
    }
    assert failures == {"one": 1, "many": 0, "all": 1}
