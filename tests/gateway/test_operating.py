"""What an operator does: look at clients, end connections, look at retained messages, several processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import zlib
from collections.abc import Callable
from contextvars import Context
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote
from urllib.request import urlopen

import anyio
import httpx
import pytest
from typer.testing import CliRunner

from rsmq import Broker, ConfigError
from rsmq.cli import make_app
from rsmq.cli.failure import exit_code
from rsmq.control.audit import Audit
from rsmq.dashboard import Role, Rules, Visitor, create_app
from rsmq.dashboard.client_rates import ClientRate, WatchedClients
from rsmq.errors import RsmqError
from rsmq.model.keys import Keys
from rsmq.model.settings import Settings
from rsmq.persistence.mqtt_bans import BanKind, MqttBans
from rsmq.persistence.mqtt_traces import MqttTraces
from rsmq.persistence.retained_messages import BUCKETS
from rsmq.telemetry.metric import GATEWAY
from rsmq.testing.server import free_port
from tests.gateway import packets as p
from tests.gateway.process import ROOT, GatewayProcess
from tests.gateway.raw_client import RawClient
from tests.gateway.test_auth import hashed
from tests.patience import until
from tests.servers import Server, wait_until

Make = Callable[..., RawClient]


async def run(server: Server, prefix: str, *words: str) -> tuple[int, str, str]:
    """One command of rsmq: exit code, output, error. In a thread: a process of its own would take a second. It has no
    context of the test's: sniffio would say that the loop of the test runs there."""
    environment = {"RSMQ_URL": server.url, "RSMQ_PREFIX": prefix}
    invoke = partial(CliRunner().invoke, make_app(), list(words), env=environment)
    result = await asyncio.to_thread(Context().run, invoke)
    if isinstance(result.exception, RsmqError):
        return exit_code(result.exception), result.stdout, str(result.exception)
    assert result.exception is None, result.exception
    return result.exit_code, result.stdout, ""


async def test_rates_of_a_client_are_known_while_its_page_is_open(
    gateway: GatewayProcess, server: Server, fleet_prefix: str, client: Make, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packets, messages and bytes in each direction; without a page its gateway is asked no more."""
    monkeypatch.setattr("rsmq.dashboard.client_rates.PATIENCE", 0.5)
    one = await client(5).connect(name)
    await one.subscribe((f"{name}/#", 0))
    async with (
        Broker(Settings(url=server.url, prefix=fleet_prefix)) as operator, anyio.create_task_group() as tasks
    ):  # fmt: skip
        rates = WatchedClients(MqttTraces(operator.client, operator.keys))
        await tasks.start(rates.run)

        async def passes() -> bool:
            watched = rates.watch(name)
            assert watched is not None
            await one.publish(f"{name}/x", b"x" * 50)
            await one.message()
            later = watched.since + 5
            came, went = watched.rate(later, "in"), watched.rate(later, "out")
            return came is not None and went is not None and min(came.messages, went.messages) > 0

        assert rates.watch(name).rate(0, "in") is None  # type: ignore[union-attr]
        await until(passes, "its gateway tells what passes")
        watched = rates.watch(name)
        assert watched is not None
        number, ways = len(watched.passed), {each[1] for each in watched.passed}
        assert (ways, all(each[4] > 50 * each[3] for each in watched.passed)) == ({"in", "out"}, True)
        assert sum(each[2] for each in watched.passed) == number
        await until(lambda: "[]" in repr(rates), "it is not watched any more")
        tasks.cancel_scope.cancel()
    watched.saw(watched.since + 1, {"way": "in", "packet": "PUBLISH", "bytes": 10, "left_out": 9})
    watched.saw(watched.since + 1, {"way": "in", "packet": ["?"], "bytes": "many", "left_out": None})
    assert watched.passed[-2][2:] == (10, 10, 100)
    assert watched.passed[-1][2:] == (1, 0, 0)
    assert watched.rate(watched.since + 60, "in") == ClientRate(0, 0, 0)


async def test_clients_are_listed_shown_and_kicked(
    gateway: GatewayProcess, server: Server, fleet_prefix: str, client: Make, name: str
) -> None:
    one = await client(5).connect(
        name, clean=False, raw_props=b"\x11\0\0\0\x3c", will=(f"{name}/will", b"gone", 1, False)
    )
    await one.subscribe((f"{name}/+", 1 | 8), raw_props=b"\x0b\x07")
    code, out, _ = await run(server, fleet_prefix, "client", "list", "-n", "1000", "--json")
    assert code == 0
    gateways = {each["client"]: each["gateway"] for each in json.loads(out)}
    code, out, _ = await run(server, fleet_prefix, "client", "show", name, "--json")
    found: dict[str, Any] = json.loads(out)
    assert found["gateway"] == gateways[name]
    assert (found["client_id"], found["expiry"], found["has_will"], found["waiting"]) == (name, 60, True, 0)
    assert [(each["filter"], each["retain_as_published"], each["identifier"]) for each in found["subscriptions"]] == [
        (f"{name}/+", True, 7)
    ]
    said = found["connection"]
    assert (said["address"], said["user"], said["level"], said["keep_alive"]) == ("127.0.0.1", None, 5, 60)
    code, out, _ = await run(server, fleet_prefix, "client", "show", name)
    assert "address: 127.0.0.1\nuser: none\nprotocol: MQTT 5\nkeep alive: 60 s\n" in out
    code, out, _ = await run(server, fleet_prefix, "client", "kick", name)
    assert (code, out) == (0, f"ended the connection of {name}\n")
    last = await one.ended()
    assert last is not None
    assert last.reason == 0x98
    again = await client(5).connect(name, clean=False, raw_props=b"\x11\0\0\0\x3c")
    assert again.connack is not None
    assert again.connack.session_present
    assert (await again.message()).payload == b"gone"  # its will: it did not say goodbye
    await again.disconnect()
    code, out, _ = await run(server, fleet_prefix, "client", "show", name)
    assert f"subscription: {name}/+ QoS 1, retain as published, id 7" in out
    assert "waiting: 0\ndropped: 0\n" in out
    for words in (("kick", name), ("kick", "unknown"), ("show", "unknown")):
        code, _, err = await run(server, fleet_prefix, "client", *words)
        assert (code, "not connected" in err) == (1, True), words


async def test_kicks_and_bans_of_the_command_are_in_the_audit(
    gateway: GatewayProcess, server: Server, fleet_prefix: str, client: Make, name: str, broker: Broker
) -> None:
    """Who, what, and the state before and after; also what has failed."""
    await client(5).connect(name)
    for words in (("kick", name), ("kick", name), ("ban", name, "--reason", "loud"), ("unban", name), ("unban", name)):
        await run(server, fleet_prefix, "client", *words)
    found = [each for each in await Audit(broker.client, broker.keys).newest() if name in each.before]
    assert [each.what for each in reversed(found)] == ["kick-client"] * 2 + ["ban-client"] + ["unban-client"] * 2
    kick, failed, ban, unban, unknown = reversed(found)
    assert kick.who.startswith("rsmq client of ")
    assert (json.loads(kick.before)["gateway"] is None, json.loads(kick.after)["gateway"]) == (False, None)
    assert (json.loads(ban.before)["ban"], json.loads(ban.after)["ban"]["reason"]) == (None, "loud")
    assert (json.loads(unban.before)["ban"]["reason"], json.loads(unban.after)["ban"]) == ("loud", None)
    assert [each.result[:16] for each in (failed, unknown)] == ["failed: NotFound"] * 2


async def test_what_is_banned_is_disconnected_and_refused(
    gateway: GatewayProcess, server: Server, fleet_prefix: str, client: Make, name: str
) -> None:
    """A client id: at once, in each version, until the ban ends; its session stays. Another client is not concerned."""
    one = await client(5).connect(name, clean=False, raw_props=b"\x11\0\0\0\x3c")
    other = await client(4).connect(f"{name}-2")
    await one.subscribe((name, 1))
    assert (await run(server, fleet_prefix, "client", "ban", name, "--reason", "too loud"))[0] == 0
    last = await one.ended()
    assert last is not None
    assert last.reason == 0x98
    assert await other.publish(name, b"while it is away", 1) == 0
    for level, code in ((5, 0x8A), (4, 5)):
        refused = await client(level).connect(name)
        assert refused.connack is not None
        assert refused.connack.reason == code
    code, out, _ = await run(server, fleet_prefix, "client", "bans", "--json")
    [found] = json.loads(out)
    assert (found["kind"], found["name"], found["until"], found["reason"]) == ("client", name, None, "too loud")
    assert (await run(server, fleet_prefix, "client", "unban", name))[0] == 0
    again = await client(5).open()

    async def is_in() -> bool:
        nonlocal again
        again = await client(5).connect(name, clean=False, raw_props=b"\x11\0\0\0\x3c")
        return again.connack is not None and again.connack.reason == 0

    await until(is_in, "the gateway has read that the ban has ended")
    assert (await again.message()).payload == b"while it is away"
    code, _, err = await run(server, fleet_prefix, "client", "unban", name)
    assert (code, "not banned" in err) == (1, True)


async def test_an_address_and_a_user_are_banned_until_the_end_of_the_ban(
    server: Server, tmp_path: Path, fleet_prefix: str, client: Make, name: str
) -> None:
    """A network concerns each address in it. A ban that ends needs no command, and goes with the next one."""
    prefix = f"{fleet_prefix}b"
    (tmp_path / "passwords").write_text(f"ada:{hashed(b'right')}\n")
    ada = {"username": "ada", "password": b"right"}
    with GatewayProcess(server.url, prefix, password_file=str(tmp_path / "passwords")) as running:
        one = await client(5, running.port).connect(name, **ada)
        async with Broker(Settings(url=server.url, prefix=prefix)) as operator:
            bans = MqttBans(operator.client, operator.keys)
            wrong: tuple[tuple[BanKind, str], ...] = (("address", "here"), ("client", ""), ("user", "x" * 9999))
            for each in wrong:
                with pytest.raises(ConfigError):
                    await bans.put(*each, None)
            put = await bans.put("address", "127.0.0.9/8", timedelta(milliseconds=700))
            assert (put.name, put.until is not None) == ("127.0.0.0/8", True)
            last = await one.ended()
            assert last is not None
            assert last.reason == 0x98
            refused = await client(5, running.port).connect(name, **ada)
            assert refused.connack is not None
            assert refused.connack.reason == 0x8A

            async def is_in() -> bool:
                found = await client(5, running.port).connect(name, **ada)
                return found.connack is not None and found.connack.reason == 0

            await until(is_in, "the ban has ended")
            assert await bans.in_force() == []
            await operator.client.execute_command("HSET", operator.keys.bans, "client", "x", b"\xff", "1|2|3")
            two = await client(5, running.port).connect(f"{name}-2", **ada)
            await bans.put("user", "ada", None)
            last = await two.ended()
            assert last is not None
            assert last.reason == 0x98
            refused = await client(5, running.port).connect(name, **ada)
            assert refused.connack is not None
            assert refused.connack.reason == 0x8A
            assert [(each.kind, each.name) for each in await bans.in_force()] == [("user", "ada")]
            assert await operator.client.execute_command("HEXISTS", operator.keys.bans, "address 127.0.0.0/8") == 0


@pytest.mark.parametrize("level", [4, 5])
async def test_the_packets_of_a_client_are_traced(
    server: Server, fleet_prefix: str, client: Make, name: str, gateway: GatewayProcess, level: int
) -> None:
    """Of one that is connected from now on, and of its next connection from CONNECT on. Other clients are not seen."""
    one = await client(level).connect(name)
    other = await client(level).connect(f"{name}-2")
    seen = list[dict[str, Any]]()
    async with (
        Broker(Settings(url=server.url, prefix=fleet_prefix)) as operator, anyio.create_task_group() as tasks
    ):  # fmt: skip
        traces = MqttTraces(operator.client, operator.keys)
        tasks.start_soon(partial(traces.follow, name, seen.append, payloads=True))
        tasks.start_soon(traces.follow, f"{name}-3", seen.append)

        async def has_begun() -> bool:
            one.send(p.PING)
            await one.take(13)
            return bool(seen)

        await until(has_begun, "the trace has begun")
        await one.subscribe((f"{name}/#", 1))
        await other.publish(f"{name}/x", b"secret", 1)
        assert (await one.message()).payload == b"secret"
        one.send(p.DISCONNECT)
        again = await client(level).connect(name, username="ada", password=b"hidden")
        again.abort()
        third = await client(level).connect(f"{name}-3")
        await third.publish(f"{name}/y", b"no payload", 1)
        await until(lambda: seen and seen[-1]["packet"] == "PUBACK" and seen[-1]["client"] == f"{name}-3", "all")
        tasks.cancel_scope.cancel()
    assert {each["client"] for each in seen} == {name, f"{name}-3"}
    own = [each for each in seen if each["client"] == name and not each["packet"].startswith("PING")]
    assert [(each["way"], each["packet"]) for each in own[:4]] == [
        ("in", "SUBSCRIBE"), ("out", "SUBACK"), ("out", "PUBLISH"), ("in", "PUBACK")
    ]  # fmt: skip
    assert own[0]["filters"] == [f"{name}/# QoS 1"]
    assert own[1]["reasons"] == [1]
    assert (own[2]["topic"], own[2]["payload"], own[2]["qos"]) == (f"{name}/x", "c2VjcmV0", 1)
    assert own[3]["id"] == own[2]["id"]
    assert [(each["packet"], each.get("user"), each.get("reason")) for each in own[4:7]] == [
        ("DISCONNECT", None, 0), ("CONNECT", "ada", None), ("CONNACK", None, 0)
    ]  # fmt: skip
    assert not any("hidden" in json.dumps(each) for each in seen)
    [published] = [each for each in seen if each["client"] == f"{name}-3" and each["packet"] == "PUBLISH"]
    assert (published["payload_bytes"], "payload" in published) == (10, False)
    code, out, _ = await run(server, fleet_prefix, "client", "trace", f"{name}-4", "--for", "100ms")
    assert (code, out) == (0, "")
    async with Broker(Settings(url=server.url, prefix=fleet_prefix)) as operator:
        newest = (await Audit(operator.client, operator.keys).newest())[0]
    assert (newest.what, f"{name}-4" in newest.before, newest.result) == (
        "trace-client", True, f"saw 0 packets of {name}-4"
    )  # fmt: skip


async def test_each_packet_of_a_trace_is_a_line_of_json(
    server: Server, fleet_prefix: str, client: Make, name: str, gateway: GatewayProcess
) -> None:
    """A trace may go on for ever: a program reads it line by line."""
    one = await client(5).connect(name)
    environment = os.environ | {"RSMQ_URL": server.url, "RSMQ_PREFIX": fleet_prefix}
    command = [sys.executable, "-m", "rsmq", "client", "trace", name, "--json"]
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, env=environment, stdout=subprocess.PIPE)
    assert process.stdout is not None
    first = asyncio.ensure_future(process.stdout.readline())
    try:

        async def has_come() -> bool:
            one.send(p.PING)
            await one.take(13)
            return first.done()

        await until(has_come, "a packet is printed")
        assert json.loads(await first)["packet"] in ("PINGREQ", "PINGRESP")
        assert json.loads(await process.stdout.readline())["client"] == name
    finally:
        first.cancel()
        process.send_signal(signal.SIGINT)
        await process.wait()


async def test_the_dashboard_shows_connections_and_ends_one_for_those_who_may(
    gateway: GatewayProcess, server: Server, fleet_prefix: str, client: Make, name: str
) -> None:
    """Names of clients are text. A visitor who may only look has no button, and its form is refused."""
    visitors = {role.name: Visitor(role.name, role) for role in (Role.LOOK, Role.ACT)}
    rules = Rules(authorize=lambda request: visitors.get(request.headers.get("who", "")))
    app = create_app(Settings(url=server.url, prefix=fleet_prefix), rules=rules)
    one = await client(5).connect(f"{name}<b>", clean=False, raw_props=b"\x11\0\0\0\x3c")
    await one.subscribe((f"{name}/+", 1 | 4), raw_props=b"\x0b\x07")
    form = {"client": f"{name}<b>", "confirmed": "yes"}
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as web,
    ):

        async def page(path: str, who: str = "ACT") -> str:
            return (await web.get(path, headers={"who": who})).text

        rows = await page("/connections")
        assert f"{name}&lt;b&gt;</a>" in rows
        assert "is kept for 1 min" in rows
        assert f"{name}&lt;b&gt;" in await page(f"/connections?client={name}<b>", "LOOK")
        await one.publish(f"{name}/<i>kept", b"{}", 1, retain=True)
        retained = await page(f"/retained?q={name}")
        assert ("1 retained message" in retained, f"{name}/&lt;i&gt;kept" in retained) == (True, True)
        assert "0 retained messages" in await page("/retained?q=no-such-topic", "LOOK")
        await one.publish(f"{name}/<i>kept", b"", 1, retain=True)  # or later tests would see it
        path = f"/connection/{quote(f'{name}<b>')}"
        shown = await page(path)
        assert [each for each in ("127.0.0.1", "MQTT 5", "1 min") if f"<dd>{each}</dd>" not in shown] == []
        assert f">{name}/+<" in await page(path)
        assert "no local, id 7" in await page(path)
        assert ("kick-client" in await page(path), "kick-client" in await page(path, "LOOK")) == (True, False)
        assert (await web.post("/do/kick-client", data=form, headers={"who": "LOOK"})).status_code == 403
        assert (
            "It may connect again"
            in (await web.post("/do/kick-client", data={"client": f"{name}<b>"}, headers={"who": "ACT"})).text
        )
        done = await web.post("/do/kick-client", data=form, headers={"who": "ACT"})
        last = await one.ended()
        assert last is not None
        assert (done.status_code, last.reason) == (303, 0x98)
        assert (await web.post("/do/kick-client", data=form, headers={"who": "ACT"})).status_code == 404
        audit = await page("/audit", "LOOK")
        assert f"ended the connection of {name}&lt;b&gt;" in audit
        assert "not connected" in await page(f"/connections?client={name}<b>")


async def test_the_doctor_sees_a_gateway(gateway: GatewayProcess, server: Server, fleet_prefix: str) -> None:
    """What it says about itself: its only listener is local."""
    assert gateway.port
    code, out, _ = await run(server, fleet_prefix, "doctor", "--over", "0s", "--json")
    assert code == 0
    assert [each for each in json.loads(out)["findings"] if each["topic"] == "mqtt"] == []
    with server.client() as redis:
        name = redis.zrange(f"{fleet_prefix}:{{%mqtt}}:gateways", 0, 0)[0].decode()
        said = json.loads(redis.get(f"{fleet_prefix}:{{%mqtt.g.{name}}}:about"))
        assert said | {"counts": 0, "started_ms": 0} == {
            "listen": ["mqtt://127.0.0.1:0"], "anonymous": True, "certificate_until": None,
            "routes": [["ingest/#", "ingest", True]], "counts": 0, "started_ms": 0,
            "server": redis.info("server")["run_id"],
        }  # fmt: skip
        other = f"{fleet_prefix}-o"  # the gateway of the module writes what it says again, all the time
        redis.zadd(f"{other}:{{%mqtt}}:gateways", {name: int(redis.time()[0] + 600) * 1000})
        redis.set(f"{other}:{{%mqtt.g.{name}}}:about", json.dumps(said | {"listen": ["mqtt://0.0.0.0:0"]}))
    code, out, _ = await run(server, other, "doctor", "--over", "0s", "--json")
    assert "lets clients without credentials connect from other machines" in out


async def test_sys_topics_show_the_figures_of_the_fleet_to_those_who_read_them(
    gateway: GatewayProcess, client: Make, name: str
) -> None:
    """Under Mosquitto's names. They are no retained messages, and `#` does not match them."""
    one, other = await client(5).connect(name), await client().connect(f"{name}-all")
    await other.subscribe(("#", 0))
    await one.subscribe(("$SYS/broker/#", 0))
    found, counts = dict[str, bytes](), ("$SYS/broker/clients/connected", "$SYS/broker/subscriptions/count")
    while len(found) < 9 or min(int(found[each]) for each in counts) < 2:
        got = await one.message()
        found[got.topic] = got.payload
    assert found["$SYS/broker/version"].startswith(b"rsmq version ")
    assert found["$SYS/broker/uptime"].endswith(b" seconds")
    assert int(found["$SYS/broker/bytes/received"]) >= 0
    assert {"publish/messages/received", "publish/messages/dropped", "retained messages/count"} <= {
        each.removeprefix("$SYS/broker/") for each in found
    }
    assert await other.is_silent()


async def test_retained_messages_are_listed_and_purged(
    gateway: GatewayProcess, server: Server, fleet_prefix: str, client: Make, name: str
) -> None:
    one = await client().connect(name)
    for number in range(3):
        await one.publish(f"{name}/{number}", b"%d" % number, 1, retain=True)
    code, out, _ = await run(server, fleet_prefix, "retained", "list", f"{name}/#", "--json")
    assert code == 0
    assert sorted((each["topic"], each["data"], each["qos"]) for each in json.loads(out)) == [
        (f"{name}/{number}", number, 1) for number in range(3)
    ]
    code, out, _ = await run(server, fleet_prefix, "retained", "purge", f"{name}/+", "--yes")
    assert (code, out) == (0, "removed 3 retained messages\n")
    await one.subscribe((f"{name}/#", 1))
    assert await one.is_silent()
    await one.publish(f"{name}/1", b"new", 1, retain=True)
    assert (await one.message()).payload == b"new"
    code, out, _ = await run(server, fleet_prefix, "retained", "list", f"{name}/#")
    assert "new" in out
    for words in (("purge", "a#", "--yes"), ("purge", "a#"), ("list", "a#")):  # also before anything is asked
        code, _, err = await run(server, fleet_prefix, "retained", *words)
        assert (code, "no topic filter" in err) == (2, True), words
    code, out, _ = await run(server, fleet_prefix, "retained", "list", f"{name}/none")
    assert (code, out) == (0, f"no retained message matches {name}/none\n")


async def test_a_retained_message_whose_times_no_calendar_has_is_listed(
    gateway: GatewayProcess, server: Server, fleet_prefix: str, client: Make, name: str
) -> None:
    """Another client may have written them."""
    one = await client().connect(name)
    await one.publish(name, b"kept", 1, retain=True)
    key = Keys(fleet_prefix).retained(zlib.crc32(name.encode()) % BUCKETS, "messages")
    with server.client() as redis:
        stamp, _, envelope = redis.hget(key, name).partition(b"|")
        redis.hset(key, name, b"%b|%b%b%b" % (stamp, envelope[:1], b"\xff" * 12, envelope[13:]))
    code, out, err = await run(server, fleet_prefix, "retained", "list", name)
    assert (code, err) == (0, "")
    assert "9999-12-31" in out


def scrape(port: int) -> dict[str, float]:
    """The values of a page of metrics."""
    with urlopen(f"http://127.0.0.1:{port}/readyz", timeout=10) as answer:
        assert answer.status == 200
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line.startswith("rsmq_"))}


def two_free_ports() -> int:
    """The first of two neighbours: the second process has the next port."""
    while True:
        port = free_port()
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port + 1)):
            return port


def test_the_page_has_every_metric_of_a_gateway() -> None:
    page = (ROOT / "docs" / "telemetry.md").read_text("utf-8")
    for each in GATEWAY:
        assert f"| `{each.name}` | {each.kind} | {', '.join(each.labels)} | {each.text} |" in page


async def publish_past(one: RawClient, topic: str) -> int:
    """Publish `last`, and return the reason code of its acknowledgement. Messages that come before it are left out."""
    one.send(p.publish(topic, b"last", 1, 9, 5))
    while (got := await one.take()).kind != 4:
        if got.qos == 1:
            one.send(p.ack(4, got.packet_id))
    return got.reason


async def payloads(one: RawClient) -> list[bytes]:
    """What comes until the answer to a ping."""
    one.send(p.PING)
    found = list[bytes]()
    while (got := await one.take()).kind != 13:
        found.append(got.payload)
    return found


@pytest.mark.parametrize("processes", ["1", "2"])
async def test_a_gateway_warns_of_another_deployment_at_its_port(
    server: Server, fleet_prefix: str, tmp_path: Path, processes: str
) -> None:
    """Both start, because gateways share ports, and each gets some of the other's clients. Before, neither said so."""
    (tmp_path / "app.py").write_text("from rsmq import Broker\n\nbroker = Broker()\n")
    address, logs = f"mqtt://127.0.0.1:{free_port()}", [tmp_path / "first", tmp_path / "second"]
    started = list[subprocess.Popen[bytes]]()
    try:
        for log in logs:
            environment = os.environ | {"RSMQ_URL": server.url, "RSMQ_PREFIX": f"{fleet_prefix}-{log.name}"}
            command = ["gateway", "app:broker", "--anonymous", "--processes", processes]
            with log.open("w") as writing:
                started.append(subprocess.Popen(  # noqa: ASYNC220
                    [sys.executable, "-m", "rsmq", *command, "--listen", address],
                    cwd=tmp_path, env=environment | {"PYTHONPATH": str(ROOT)}, stderr=writing,
                ))  # fmt: skip
            ready = partial(lambda log: log.read_text().count(f" listens on {address}\n") == int(processes), log)
            await asyncio.to_thread(wait_until, ready, "all listen")
    finally:
        for each in started:
            each.terminate()
    assert [await asyncio.to_thread(each.wait, 30) for each in started] == [0, 0]
    said = f"another process listens on {address}, too, and gets some of the clients"
    assert [log.read_text().count(said) for log in logs] == [0, 1]


async def test_processes_share_a_port_and_one_that_dies_is_replaced(
    server: Server, fleet_prefix: str, name: str, tmp_path: Path
) -> None:
    (tmp_path / "app.py").write_text("from rsmq import Broker\n\nbroker = Broker()\n")
    users, rights = tmp_path / "users", tmp_path / "rights"
    users.write_text(f"ada:{hashed(b'a')}\nbob:{hashed(b'b')}\n")
    rights.write_text("topic readwrite #\nuser ada\ntopic readwrite #\nuser bob\ntopic readwrite #\n")
    port, metrics = free_port(), two_free_ports()
    environment = os.environ | {"RSMQ_URL": server.url, "RSMQ_PREFIX": f"{fleet_prefix}-p", "PYTHONPATH": str(ROOT)}
    log = tmp_path / "log"
    with log.open("w") as writing:
        parent = subprocess.Popen(  # noqa: ASYNC220
            [sys.executable, "-m", "rsmq", "gateway", "app:broker", "--listen", f"mqtt://127.0.0.1:{port}",
             "--anonymous", "--processes", "2", "--keep-alive", "60s", "--most-levels", "2",
             "--password-file", str(users), "--acl-file", str(rights),
             "--session-expiry", "1h", "--metrics", f"127.0.0.1:{metrics}"],
            cwd=tmp_path, env=environment, stderr=writing,
        )  # fmt: skip
    try:
        await asyncio.to_thread(wait_until, lambda: log.read_text().count("listens on") == 2, "both listen")
        made = [await RawClient(port, 5).connect(f"{name}-{n}", keep_alive=120, clean=False) for n in range(20)]
        assert all(each.connack is not None and each.connack.properties[19] == [60] for each in made)
        await made[0].subscribe((f"{name}/#", 1))
        for number, each in enumerate(made):  # whichever process has the publisher and the subscriber
            await each.publish(f"{name}/x", b"%d" % number)
            if number == 0:
                assert (await made[0].message()).payload == b"0"
        assert await made[1].publish("$SYS/x", b"no") == 0x87
        assert await made[1].publish("a/b/c", b"no") == 0x90
        pages = list[dict[str, float]]()

        async def all_are_routed() -> bool:  # a publish is acknowledged when it is stored, and routed a moment later
            pages[:] = [await asyncio.to_thread(scrape, metrics + slot) for slot in range(2)]
            return sum(page["rsmq_mqtt_letters_total"] for page in pages) >= 20

        await until(all_are_routed, "all messages are in the inbox")
        assert sum(page["rsmq_mqtt_connections"] for page in pages) == 20
        assert sum(page["rsmq_mqtt_messages_total"] for page in pages) == 22
        assert sum(page.get('rsmq_mqtt_refused_total{reason="not_authorized"}', 0) for page in pages) == 1
        assert sum(page["rsmq_mqtt_letters_total"] for page in pages) == 20
        assert sum(page["rsmq_mqtt_publish_seconds_count"] for page in pages) == 20
        assert sum(page["rsmq_mqtt_publish_seconds_sum"] for page in pages) > 0
        assert 1 <= sum(page["rsmq_mqtt_delivery_seconds_count"] for page in pages) <= 20
        named = {each: await RawClient(port, 5).connect(each, username=each, password=each[:1].encode())
                 for each in ("ada", "bob")}  # fmt: skip
        for each in (*named.values(), *made[2:]):
            await each.subscribe((f"{name}/#", 1))
            assert await each.publish(f"{name}/ok", b"x") == 0
        users.write_text(f"ada:{hashed(b'a')}\ncleo:{hashed(b'c')}\n")
        rights.write_text("topic write other/#\nuser ada\ntopic readwrite #\ntopic deny no/#\n")
        parent.send_signal(signal.SIGHUP)
        await asyncio.to_thread(wait_until, lambda: log.read_text().count("files are read again") == 2, "both reload")
        while (got := await named["bob"].take()).kind != 14:
            pass
        assert got.reason == 0x87  # it is gone
        codes = [await publish_past(each, f"{name}/ok") for each in made]
        assert codes == [0x87] * 20  # at once, in both processes, and no connection was lost
        assert [await publish_past(named["ada"], topic) for topic in ("no/x", f"{name}/last")] == [0x87, 0]
        assert b"last" not in await payloads(made[2])  # its subscription is there, but it may not read any more
        rights.write_text("nonsense\n")
        parent.send_signal(signal.SIGHUP)
        await asyncio.to_thread(wait_until, lambda: log.read_text().count("are not read again") == 2, "both complain")
        cleo = await RawClient(port, 5).connect("cleo", username="cleo", password=b"c")
        assert cleo.connack is not None
        assert cleo.connack.reason == 0
        assert await cleo.publish("other/x", b"x") == 0x87
        rights.write_text("topic readwrite #\n")
        parent.send_signal(signal.SIGHUP)
        await asyncio.to_thread(wait_until, lambda: log.read_text().count("files are read again") == 4, "both reload")
        pid = int(log.read_text().partition("has pid ")[2].split()[0])
        os.kill(pid, signal.SIGKILL)
        await asyncio.to_thread(wait_until, lambda: log.read_text().count("listens on") == 3, "another one listens")
        fresh = await RawClient(port, 5).connect(f"{name}-fresh")
        assert await fresh.publish("x", b"x") == 0
        for each in (*made, fresh, cleo, *named.values()):
            each.abort()
    finally:
        parent.terminate()
    assert await asyncio.to_thread(parent.wait, 30) == 0, log.read_text()
    assert "Traceback" not in log.read_text()
