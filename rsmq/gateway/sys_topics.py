"""`$SYS/broker/...`: the figures of all gateways under Mosquitto's names, while a client of this gateway reads them."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import anyio

from rsmq.errors import BrokerError
from rsmq.gateway.connections.context import Context
from rsmq.gateway.fleet.message import Published
from rsmq.model.clock import epoch_ms
from rsmq.model.keys import Keys
from rsmq.model.own_process import own_version
from rsmq.persistence.mqtt_clients import MqttClients, MqttGateway
from rsmq.persistence.retained_messages import BUCKETS
from rsmq.redis.client.connector import Client
from rsmq.redis.streams import ask_all

log = logging.getLogger("rsmq.gateway")

ROOT: Final = "$SYS/broker/"
COUNTED: Final = {
    "bytes/received": "bytes received", "bytes/sent": "bytes sent", "publish/messages/received": "messages received",
    "publish/messages/dropped": "dropped",
}  # fmt: skip
"""Topic names, and the counters of a gateway that they show."""


def totals(counts: Mapping[str, int]) -> dict[str, int]:
    """The counters that others may read, with all reasons of a drop together."""
    found = {name: counts.get(name, 0) for name in COUNTED.values()}
    found["dropped"] = sum(number for name, number in counts.items() if name.startswith("dropped: "))
    return found


def figures(gateways: Iterable[MqttGateway], subscriptions: int, retained: int, now_ms: int) -> dict[str, str]:
    """The values to publish, by topic name. Counters are those of the gateways that run now."""
    live = [each for each in gateways if not each.is_late]
    counts = Counter[str]()
    for each in live:
        counts.update(each.counts)
    started = min((epoch_ms(each.started) for each in live if each.started is not None), default=now_ms)
    values: dict[str, Any] = {
        "version": f"rsmq version {own_version()}", "uptime": f"{max(0, now_ms - started) // 1000} seconds",
        "clients/connected": sum(each.clients for each in live), "subscriptions/count": subscriptions,
        "retained messages/count": retained,
    }  # fmt: skip
    return {ROOT + name: str(each) for name, each in values.items()} | {
        ROOT + topic: str(counts[name]) for topic, name in COUNTED.items()
    }


class SysTopics:
    """Publishes the figures to the clients of one gateway."""

    def __init__(self, client: Client, keys: Keys, deliver: Callable[[Published, Mapping[str, str]], None]) -> None:
        self._client = client
        self._clients = MqttClients(client, keys)
        self._deliver = deliver
        self._retained = [("ZCARD", keys.retained(bucket, "names")) for bucket in range(BUCKETS)]
        self._names = list(figures((), 0, 0, 0))

    async def run(self, context: Context) -> None:
        """Until cancelled. Nothing is asked while no client reads them."""
        while True:
            await anyio.sleep(context.rules.options.sys_interval.total_seconds())
            if not any(map(context.clients.has_subscribers, self._names)):
                continue
            try:
                gateways = await self._clients.gateways()
                retained = sum(await ask_all(self._client, self._retained))
            except BrokerError as error:
                log.info("$SYS waits for the server: %s", error)
                continue
            found = figures(gateways, context.fleet.registry.subscriptions, retained, context.fleet.clock.now_ms())
            for name, value in found.items():
                self._deliver(Published(name, value.encode(), 0, False, "", None, b""), {})

    def __repr__(self) -> str:
        return f"<SysTopics {len(self._names)}>"
