"""MQTT over WebSocket: real clients, and what the standard demands of frames (section 6)."""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Iterator
from typing import Any

import paho.mqtt.client as paho
import pytest
import trustme
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.typing import Origin, Subprotocol

from tests.gateway import packets as p
from tests.gateway.paho_client import leave
from tests.gateway.process import GatewayProcess
from tests.gateway.raw_client import SECONDS, RawClient
from tests.servers import Server

MQTT = [Subprotocol("mqtt")]


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def web(
    server: Server, fleet_prefix: str, authority: trustme.CA, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayProcess]:
    """A gateway that listens in three ways."""
    path = tmp_path_factory.mktemp("tls") / "server.pem"
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(path)
    with GatewayProcess(
        server.url, fleet_prefix, schemes=["mqtt", "ws", "wss"], certificate=str(path),
        origins=["https://shop.example"], connect_timeout=2,
    ) as running:  # fmt: skip
        yield running


async def opened(web: GatewayProcess, **options: Any) -> ClientConnection:
    options = {"subprotocols": MQTT, "origin": Origin("https://shop.example"), "proxy": None} | options
    return await connect(f"ws://127.0.0.1:{web.ports[1]}/mqtt", **options)


async def take(socket: ClientConnection) -> tuple[int, bytes]:
    """The next packet, of one that comes alone in its frame."""
    async with asyncio.timeout(SECONDS):
        data = await socket.recv()
    assert isinstance(data, bytes)
    ((head, body),), rest = p.split(data)
    assert not rest
    return head >> 4, body


def test_paho_sends_large_messages_over_websocket(web: GatewayProcess, name: str) -> None:
    got, finished = list[bytes](), threading.Event()
    client = paho.Client(paho.CallbackAPIVersion.VERSION2, name, protocol=paho.MQTTv5, transport="websockets")  # type: ignore[attr-defined]
    client.ws_set_options("/anything", {"Origin": "https://shop.example"})

    def on_message(_client: Any, _data: Any, message: Any) -> None:
        got.append(message.payload)
        if len(got) == 9:
            finished.set()

    client.on_message = on_message
    client.on_connect = lambda *_: client.subscribe(f"{name}/#", 2)  # type: ignore[assignment]
    client.on_subscribe = lambda *_: [client.publish(f"{name}/x", b"%d" % n * 9000, n % 3) for n in range(9)]  # type: ignore[assignment]
    client.connect("127.0.0.1", web.ports[1])
    client.loop_start()
    try:
        assert finished.wait(SECONDS), got
    finally:
        leave(client)
    assert sorted(got) == [b"%d" % n * 9000 for n in range(9)]


async def test_a_packet_may_span_frames_and_a_frame_may_hold_several(web: GatewayProcess, name: str) -> None:
    socket = await opened(web)
    data = p.connect(name) + p.subscribe([(name, 1)], 7) + p.publish(name, b"x" * 300, 1, 9) + p.PING
    for at in range(0, len(data), 7):
        await socket.send(data[at : at + 7])
    found, kinds = b"", list[int]()
    while len(kinds) < 5:
        more = await asyncio.wait_for(socket.recv(), SECONDS)
        assert isinstance(more, bytes)
        found += more
        kinds = [head >> 4 for head, _ in p.split(found)[0]]
    assert kinds[0] == 2
    assert sorted(kinds[1:]) == [3, 4, 9, 13]
    await socket.send([p.PING[:1], p.PING[1:]])  # one message in two fragments
    assert (await take(socket))[0] == 13
    await socket.send(p.PING * 3)
    answer = await socket.recv()
    assert answer == b"\xd0\0" * 3
    assert await asyncio.wait_for(await socket.ping(), SECONDS) >= 0
    await socket.close()


async def test_a_close_frame_behind_a_disconnect_is_answered(web: GatewayProcess, name: str) -> None:
    """RFC 6455, 5.5.1, also when both come in one read."""
    socket = await opened(web)
    await socket.send(p.connect(name))
    assert (await take(socket))[0] == 2
    protocol = socket.protocol
    protocol.send_binary(p.DISCONNECT)
    protocol.send_close(1000)
    socket.transport.write(b"".join(protocol.data_to_send()))
    await asyncio.wait_for(socket.wait_closed(), SECONDS)
    assert protocol.close_rcvd is not None
    assert protocol.close_rcvd.code == 1000


async def test_a_text_frame_ends_the_connection(web: GatewayProcess, name: str) -> None:
    socket = await opened(web)
    await socket.send("text")
    with pytest.raises(ConnectionClosed) as closed:
        await socket.recv()
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1003
    other = await opened(web)  # nothing else is harmed
    await other.send(p.connect(name))
    assert (await take(other))[0] == 2
    await other.close()


async def test_a_request_without_the_subprotocol_or_from_a_foreign_page_is_refused(web: GatewayProcess) -> None:
    for options, status in [
        ({"subprotocols": None}, 400), ({"subprotocols": [Subprotocol("chat")]}, 400),
        ({"origin": Origin("https://evil.example")}, 403),
    ]:  # fmt: skip
        with pytest.raises(InvalidStatus) as refused:
            await opened(web, **options)
        assert refused.value.response.status_code == status


async def test_malformed_frames_and_silent_clients_are_closed(web: GatewayProcess, name: str) -> None:
    """Neither an HTTP request that is none, nor an unmasked frame, nor silence harms anything else."""
    reader, writer = await asyncio.open_connection("127.0.0.1", web.ports[1])
    writer.write(b"\x10\x0c\0\4MQTT\4\2\0\x3c\0\0")  # plain MQTT
    assert await asyncio.wait_for(reader.read(), SECONDS) is not None
    silent, idle = await asyncio.open_connection("127.0.0.1", web.ports[1])
    socket = await opened(web)
    await socket.send(p.connect(name, 5))
    assert (await take(socket))[0] == 2
    await socket.send(b"\xff" * 20)  # a malformed packet: DISCONNECT, then the close frame
    kind, body = await take(socket)
    assert (kind, body[0]) in ((14, 0x81), (14, 0x82))
    with pytest.raises(ConnectionClosed):
        await socket.recv()
    raw = await opened(web)
    raw.transport.write(b"\x82\x01x")  # not masked
    with pytest.raises(ConnectionClosed) as closed:
        await raw.recv()
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1002
    assert await asyncio.wait_for(silent.read(), SECONDS) == b""
    for each in (writer, idle):
        each.close()
        await each.wait_closed()


async def test_a_session_goes_on_from_websocket_to_tcp_and_a_will_is_published(web: GatewayProcess, name: str) -> None:
    watcher = await RawClient(web.port).connect(f"{name}-w")
    await watcher.subscribe((f"{name}/will", 1))
    socket = await opened(web)
    await socket.send(p.connect(name, clean=False, will=(f"{name}/will", b"gone", 1, False)))
    assert (await take(socket))[0] == 2
    await socket.send(p.subscribe([(f"{name}/x", 1)]))
    assert (await take(socket))[0] == 9
    await socket.close()  # a close frame is not a DISCONNECT
    assert (await watcher.message()).payload == b"gone"
    await watcher.publish(f"{name}/x", b"waiting")
    moved = await RawClient(web.port).connect(name, clean=False)
    assert moved.connack is not None
    assert moved.connack.session_present
    assert (await moved.message()).payload == b"waiting"
    watcher.abort()
    moved.abort()


async def test_wss_is_encrypted(web: GatewayProcess, authority: trustme.CA, name: str) -> None:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    options: dict[str, Any] = {"subprotocols": MQTT, "origin": Origin("https://shop.example"), "proxy": None}
    async with connect(f"wss://127.0.0.1:{web.ports[2]}/", ssl=context, **options) as socket:
        await socket.send(p.connect(name))
        assert (await take(socket))[0] == 2


async def test_health_checks_and_clients_leave_no_line_of_the_log_and_refusals_do(web: GatewayProcess) -> None:
    """A load balancer asks every few seconds; a page that may not connect is named."""
    before = len(web.log())
    for _ in range(5):
        reader, writer = await asyncio.open_connection("127.0.0.1", web.ports[1])
        writer.write(b"GET / HTTP/1.1\r\nHost: gateway\r\n\r\n")
        assert b" 426 " in await asyncio.wait_for(reader.readline(), SECONDS)
        writer.close()
        await (await opened(web)).close()
    with pytest.raises(InvalidStatus):
        await opened(web, origin=Origin("https://evil.example"))
    lines = web.log()[before:].splitlines()
    assert len([line for line in lines if "websockets.server" in line or "frames" in line]) == 0, lines
    assert "clients are refused, websocket: 127.0.0.1: 40" in web.log(), "a line in ten seconds"
