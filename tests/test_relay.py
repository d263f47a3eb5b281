"""`rsmq.asgi.relay`: a device at a WebSocket, of a real server in this process."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from starlette.applications import Starlette
from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket
from uvicorn.config import WS_PROTOCOLS
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from rsmq import Broker, Settings
from rsmq.asgi import lifespan, relay
from tests.web import served

WEBSOCKETS = "websockets-sansio" if "websockets-sansio" in WS_PROTOCOLS else "websockets"
"""As uvicorn speaks them; the second one is the older way."""

pytestmark = pytest.mark.anyio


@pytest.fixture
async def broker(server_url: str, prefix: str) -> AsyncIterator[Broker]:
    """Connected, on the shared server."""
    async with Broker(Settings(url=server_url, prefix=prefix, preflight="warn")) as broker:
        yield broker


@asynccontextmanager
async def gateway(broker: Broker, **options: Any) -> AsyncIterator[str]:
    """The address of a gateway with a broker of its own, in this process."""
    own = Broker(broker.settings)

    async def serve(websocket: WebSocket) -> None:
        await relay(websocket, own, websocket.path_params["phone"], **options)

    app = Starlette(routes=[WebSocketRoute("/{phone}", serve)], lifespan=lifespan(own))
    async with served(app, ws=WEBSOCKETS) as address:
        yield f"ws://{address}"


async def letter(connection: ClientConnection) -> Any:
    """The next one."""
    with anyio.fail_after(60):
        return json.loads(await connection.recv())


async def close_code(connection: ClientConnection) -> int:
    """The one with which the gateway ends the connection."""
    try:
        with anyio.fail_after(60):
            while True:
                await connection.recv()
    except ConnectionClosed as closed:
        return closed.rcvd.code if closed.rcvd else 1006


async def until_offline(broker: Broker, client_id: str) -> int:
    """Wait until the session has ended; the number of letters in the inbox."""
    with anyio.fail_after(60):
        while (device := await broker.devices.find(client_id)) is None or device.gateway is not None:
            await anyio.sleep(0.01)
    return device.backlog


async def test_letters_that_were_not_acknowledged_come_again_marked(broker: Broker) -> None:
    """In order, window by window; an acknowledgement that comes twice or for an unknown letter does nothing."""
    await broker.send_many([("phone", {"n": n}) for n in range(3)], topic="news")
    async with gateway(broker, window=2) as address:
        async with connect(f"{address}/phone") as phone:
            first, second = await letter(phone), await letter(phone)
            assert first == {
                "seq": 1, "topic": "news", "type": "application/json", "payload": {"n": 0}, "redelivered": False,
            }  # fmt: skip
            for _ in range(2):
                await phone.send(json.dumps({"ack": first["seq"]}))
            await phone.send(b'{"ack": 77}')
            assert (await letter(phone))["payload"] == {"n": 2}
        assert await until_offline(broker, "phone") == 2
        async with connect(f"{address}/phone") as phone:
            again = [await letter(phone), await letter(phone)]
            assert [each["seq"] for each in again] == [second["seq"], 3]
            assert [each["redelivered"] for each in again] == [True, True]
            for each in again:
                await phone.send(json.dumps({"ack": each["seq"]}))
        assert await until_offline(broker, "phone") == 0


async def test_the_newest_connection_ends_the_older_one_with_4001(broker: Broker) -> None:
    """At another gateway; the older one is idle, and is ended all the same."""
    async with gateway(broker) as one, gateway(broker) as other, connect(f"{one}/phone") as older:
        await broker.send("phone", "first")
        assert (await letter(older))["payload"] == "first"
        async with connect(f"{other}/phone") as newer:
            assert await close_code(older) == 4001
            received = await letter(newer)
            assert (received["payload"], received["redelivered"]) == ("first", True)


async def test_a_lost_session_ends_with_1012(broker: Broker) -> None:
    """The data of the server was deleted: connect again."""
    async with gateway(broker) as address, connect(f"{address}/phone") as phone:
        await broker.send("phone", 1)
        received = await letter(phone)
        *keys, _ = broker.keys.device("phone")
        await broker.client.execute_command("DEL", *keys)
        await phone.send(json.dumps({"ack": received["seq"]}))
        assert await close_code(phone) == 1012


async def test_anything_else_than_an_acknowledgement_ends_with_1008(broker: Broker) -> None:
    """The letters stay."""
    frames = ["no json", "7", "[]", '{"ack": "7"}', '{"ack": true}', '{"nack": 1}', b"\xff", ""]
    async with gateway(broker) as address:
        for number, frame in enumerate(frames):
            await broker.send(f"phone-{number}", 1)
            async with connect(f"{address}/phone-{number}") as phone:
                await letter(phone)
                await phone.send(frame)
                assert await close_code(phone) == 1008, frame
                assert await until_offline(broker, f"phone-{number}") == 1


async def test_payloads_of_all_types(broker: Broker) -> None:
    """Bytes are base64, also those that are not what their content type says; `encode` may do it another way."""
    await broker.send_many([("phone", "text"), ("phone", b"\xff\x00")])
    async with gateway(broker) as address, connect(f"{address}/phone") as phone:
        assert [(await letter(phone))["payload"] for _ in range(2)] == ["text", "/wA="]
    async with gateway(broker, encode=lambda each: each.data) as address, connect(f"{address}/phone") as phone:
        assert [await phone.recv() for _ in range(2)] == [b"text", b"\xff\x00"]
