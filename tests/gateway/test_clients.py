"""Clients that others have written: from wheels, and Mosquitto's where it is installed."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import aiomqtt
import gmqtt
import paho.mqtt.client as paho
import pytest

from tests.gateway.paho_client import leave
from tests.gateway.process import GatewayProcess
from tests.gateway.raw_client import SECONDS


@pytest.mark.parametrize("version", [paho.MQTTv31, paho.MQTTv311, paho.MQTTv5])
def test_paho_publishes_and_receives_at_each_qos(gateway: GatewayProcess, name: str, version: Any) -> None:
    got, subscribed, finished = list[tuple[str, bytes, int]](), threading.Event(), threading.Event()
    client = paho.Client(paho.CallbackAPIVersion.VERSION2, name, protocol=version)

    def on_message(_client: Any, _data: Any, message: paho.MQTTMessage) -> None:
        got.append((message.topic, message.payload, message.qos))
        if len(got) == 30:
            finished.set()

    client.on_message = on_message
    client.on_subscribe = lambda *_: subscribed.set()
    client.on_connect = lambda *_: client.subscribe(f"{name}/#", 2)
    client.connect("127.0.0.1", gateway.port)
    client.loop_start()
    try:
        assert subscribed.wait(SECONDS)
        waiting = [client.publish(f"{name}/{qos}", b"%d" % n, qos) for n in range(10) for qos in (0, 1, 2)]
        for each in waiting:
            each.wait_for_publish(SECONDS)
        assert finished.wait(SECONDS), got
    finally:
        leave(client)
    for qos in (0, 1, 2):
        assert [each for each in got if each[0].endswith(str(qos))] == [
            (f"{name}/{qos}", b"%d" % n, qos) for n in range(10)
        ]


async def test_aiomqtt_publishes_and_receives(gateway: GatewayProcess, name: str) -> None:
    async with asyncio.timeout(SECONDS), aiomqtt.Client("127.0.0.1", gateway.port, identifier=name) as client:
        await client.subscribe(f"{name}/+", qos=1)
        for number in range(10):
            await client.publish(f"{name}/x", b"%d" % number, qos=1)
        got = list[Any]()
        async for message in client.messages:
            got.append(message.payload)
            if len(got) == 10:
                break
        assert got == [b"%d" % number for number in range(10)]


async def test_gmqtt_publishes_and_receives_with_properties(gateway: GatewayProcess, name: str) -> None:
    client = gmqtt.Client(name, clean_session=True)
    got, subscribed = asyncio.Queue[Any](), asyncio.Event()

    async def on_message(_client: Any, topic: str, payload: bytes, _qos: int, properties: dict[str, Any]) -> int:
        await got.put((topic, payload, properties))
        return 0

    client.on_message = on_message
    client.on_subscribe = lambda *_: subscribed.set()
    async with asyncio.timeout(SECONDS):
        await client.connect("127.0.0.1", gateway.port, version=gmqtt.constants.MQTTv50)
        client.subscribe(f"{name}/#", qos=1, subscription_identifier=9)
        await subscribed.wait()
        client.publish(f"{name}/x", b"hello", qos=1, content_type="text/x", user_property=[("a", "b"), ("a", "c")])
        topic, payload, properties = await got.get()
        await client.disconnect()
    assert (topic, payload) == (f"{name}/x", b"hello")
    assert properties["content_type"] == ["text/x"]
    assert properties["user_property"] == [("a", "b"), ("a", "c")]
    assert properties["subscription_identifier"] == [9]
