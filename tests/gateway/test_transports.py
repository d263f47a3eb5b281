"""Real clients over TCP, TLS, WebSocket and WebSocket with TLS, in all three versions, with each QoS."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiomqtt
import gmqtt
import paho.mqtt.client as paho
import pytest
import trustme

from tests.gateway import packets as p
from tests.gateway.process import ROOT, GatewayProcess
from tests.gateway.raw_client import SECONDS, RawClient
from tests.servers import Server

SCHEMES = ["mqtt", "mqtts", "ws", "wss"]
VERSIONS = [paho.MQTTv31, paho.MQTTv311, paho.MQTTv5]
PACKAGES = Path(os.environ.get("NODE_PATH") or ROOT / ".venv" / "node" / "mqtt" / "node_modules")
"""Where `make test` installs MQTT.js."""
MQTT_JS = """
const fs = require("fs"), mqtt = require("mqtt"), [servers, authority] = JSON.parse(process.argv[1]);
let left = 0;
for (const [url, version] of servers) {
  const client = mqtt.connect(url, {
    protocolVersion: version, protocolId: version === 3 ? "MQIsdp" : "MQTT", reconnectPeriod: 0,
    clientId: `js-${left++}`, ca: fs.readFileSync(authority),
  });
  const topic = `js/${url.split(":")[0]}/${version}`, got = [];
  client.on("connect", () => client.subscribe(`${topic}/#`, {qos: 2}, () => {
    for (const qos of [0, 1, 2]) client.publish(`${topic}/${qos}`, "hello", {qos});
  }));
  client.on("message", (name, payload, packet) => {
    got.push(`${name} ${payload} ${packet.qos}`);
    if (got.length === 3) { console.log(got.sort().join("\\n")); client.end(); }
  });
  client.on("error", (error) => {  // after its DISCONNECT it may still write to a connection that has ended
    if (!client.disconnecting) { console.error(url, version, error); process.exit(1); }
  });
}
"""


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> tuple[trustme.CA, Path]:
    """An authority, and its certificate as a file."""
    made, path = trustme.CA(), tmp_path_factory.mktemp("authority") / "ca.pem"
    made.cert_pem.write_to_path(path)
    return made, path


@pytest.fixture(scope="module")
def gateway(server: Server, fleet_prefix: str, authority: tuple[trustme.CA, Path]) -> Iterator[GatewayProcess]:
    """A gateway that listens in four ways."""
    path = authority[1].with_name("server.pem")
    authority[0].issue_cert("127.0.0.1", "localhost").private_key_and_cert_chain_pem.write_to_path(path)
    with GatewayProcess(server.url, fleet_prefix, schemes=SCHEMES, certificate=str(path)) as running:
        yield running


def test_mqtt_js_over_every_transport_and_version(gateway: GatewayProcess, authority: tuple[Any, Path]) -> None:
    """All twelve connections of one process of Node.js."""
    if shutil.which("node") is None or not (PACKAGES / "mqtt").is_dir():
        pytest.skip("Node.js or its package mqtt is not there: `make test` installs the package where npm is")
    servers = [
        (f"{scheme}://localhost:{port}/mqtt", version)
        for scheme, port in zip(SCHEMES, gateway.ports, strict=True)
        for version in (3, 4, 5)
    ]
    done = subprocess.run(
        ["node", "-e", MQTT_JS, json.dumps([servers, str(authority[1])])], capture_output=True, timeout=60, text=True,
        env={**os.environ, "NODE_PATH": str(PACKAGES)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n")[:-1]) == sorted(
        f"js/{scheme}/{version}/{qos} hello {qos}" for scheme in SCHEMES for version in (3, 4, 5) for qos in range(3)
    )


async def test_a_plain_client_at_a_tls_port_is_closed(gateway: GatewayProcess) -> None:
    plain = await RawClient(gateway.ports[1]).open()
    plain.send(p.connect("plain"))
    assert await plain.ended() is None
    plain.abort()


@pytest.mark.parametrize("transport", SCHEMES)
async def test_aiomqtt_and_paho_over_every_transport_and_version(
    gateway: GatewayProcess, authority: tuple[Any, Path], name: str, transport: str
) -> None:
    """aiomqtt is paho's codec below asyncio."""
    options: dict[str, Any] = {"transport": "websockets" if transport.startswith("ws") else "tcp"}
    if transport.endswith("s") and transport != "ws":
        options["tls_context"] = ssl.create_default_context(cafile=str(authority[1]))
    port = gateway.ports[SCHEMES.index(transport)]
    async with asyncio.timeout(SECONDS):
        for version in VERSIONS:
            protocol, topic = aiomqtt.ProtocolVersion(version), f"{name}/{version}"
            async with aiomqtt.Client("127.0.0.1", port, identifier=topic, protocol=protocol, **options) as client:
                await client.subscribe(f"{topic}/#", qos=2)
                for qos in range(3):
                    await client.publish(f"{topic}/{qos}", b"hello", qos=qos)
                got = [await anext(client.messages) for _ in range(3)]
            assert sorted((str(each.topic), each.payload, each.qos) for each in got) == [
                (f"{topic}/{qos}", b"hello", qos) for qos in range(3)
            ]


@pytest.mark.parametrize("transport", ["mqtt", "mqtts"])
async def test_gmqtt_over_tcp_and_tls(
    gateway: GatewayProcess, authority: tuple[Any, Path], name: str, transport: str
) -> None:
    """It knows no WebSocket, and no version 3.1."""
    encryption: Any = ssl.create_default_context(cafile=str(authority[1])) if transport == "mqtts" else False
    for version in (gmqtt.constants.MQTTv311, gmqtt.constants.MQTTv50):
        client = gmqtt.Client(f"{name}-{version}", clean_session=True)
        got, subscribed = asyncio.Queue[Any](), asyncio.Event()

        async def on_message(
            _client: Any, topic: str, payload: bytes, qos: int, _properties: Any, *, into: Any = got
        ) -> int:
            await into.put((topic, payload, qos))
            return 0

        client.on_message = on_message
        client.on_subscribe = lambda *_, event=subscribed: event.set()
        async with asyncio.timeout(SECONDS):
            await client.connect("localhost", gateway.ports[SCHEMES.index(transport)], version=version, ssl=encryption)
            client.subscribe(f"{name}/{version}/#", qos=2)
            await subscribed.wait()
            for qos in range(3):
                client.publish(f"{name}/{version}/{qos}", b"hello", qos=qos)
            found = sorted([await got.get() for _ in range(3)])
            with contextlib.suppress(ssl.SSLError):  # of Python, for an acknowledgement that meets a client that closes
                await client.disconnect()
        assert found == [(f"{name}/{version}/{qos}", b"hello", qos) for qos in range(3)]


@pytest.mark.skipif(shutil.which("mosquitto_pub") is None, reason="mosquitto-clients are not installed")
@pytest.mark.parametrize("transport", ["mqtt", "mqtts"])
def test_mosquitto_clients_over_tcp_and_tls(
    gateway: GatewayProcess, authority: tuple[Any, Path], name: str, transport: str
) -> None:
    """They know no WebSocket. All versions, two connections for each: the subscription outlives its connection."""
    encryption = ["--cafile", str(authority[1])] if transport == "mqtts" else []
    port = str(gateway.ports[SCHEMES.index(transport)])
    for version in ("31", "311", "5"):
        common = ["-h", "localhost", "-p", port, "-V", version, "-q", "2", *encryption]
        topic = f"{name}/{version}"
        expiry = ["-x", "60"] if version == "5" else []
        subscribe = ["mosquitto_sub", *common, "-i", topic, "-c", "-t", topic, "-C", "1", "-W", "15", *expiry]
        for command in ([*subscribe, "-E"], ["mosquitto_pub", *common, "-t", topic, "-m", "hello"]):
            assert subprocess.run(command, timeout=30).returncode == 0
        done = subprocess.run(subscribe, timeout=30, capture_output=True, text=True)
        assert done.stdout == "hello\n"
