"""The packets of one MQTT client, as an operator watches them: a gateway sends them while it is asked for them."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any, Final, NamedTuple, NoReturn

import anyio
from pydantic_core import from_json, to_json

from rsmq.model.keys import Keys
from rsmq.model.own_tasks import own_tasks
from rsmq.persistence.doorbell import NodeSubscription
from rsmq.persistence.mqtt_clients import BROADCAST, order_frame
from rsmq.redis.client.connector import Client

TRACE: Final = "mqtt-trace"
"""The header of a request for the packets of a client."""
ASK_EVERY: Final = 4.0
LONGEST_SILENCE: Final = 10.0
"""Seconds after which a gateway sends nothing more to an operator who has not asked again."""
MOST_A_SECOND: Final = 1000
"""Packets of one client that are sent in a second."""


class TraceOrder(NamedTuple):
    """A request for the packets of a client. `token` names the operator who asks."""

    client: str
    token: str
    payloads: bool


def read_order(raw: str) -> TraceOrder | None:
    """A request as a gateway gets it; None for one that is wrong."""
    try:
        client, token, payloads = from_json(raw)
        return TraceOrder(str(client), str(token), bool(payloads))
    except (ValueError, TypeError):
        return None


class MqttTraces:
    """Watches clients. Nothing is stored on the server, and who does not watch misses what has passed."""

    def __init__(self, client: Client, keys: Keys) -> None:
        self._client, self._keys = client, keys

    async def follow(
        self, client_id: str, show: Callable[[dict[str, Any]], None], *, payloads: bool = False
    ) -> NoReturn:
        """Call `show` with each packet of a client from now on, also when it connects again, at any gateway.

        Each has `at_ms`, `client`, `way` (`in` from the client, `out` to it), `packet`, `bytes` and what else it has;
        `left_out` counts packets before it that were too many: a gateway sends 1 000 a second. Passwords are never in
        it; payloads, at most 4 KiB of each in base64, if asked for. Until cancelled. Raises BrokerUnavailable.
        """
        order = TraceOrder(client_id, secrets.token_hex(8), payloads)
        channel = self._keys.trace(order.token)
        is_subscribed = anyio.Event()

        def rung(_: bytes, lines: bytes) -> None:
            is_subscribed.set()
            for line in lines.split(b"\n") if lines else ():
                show(from_json(line))

        subscription = NodeSubscription(self._client.node_for(channel), rung)
        subscription.listen(channel.encode())
        async with own_tasks() as tasks:
            tasks.start_soon(self._ask, order_frame(TRACE, to_json(order).decode()), is_subscribed)
            await subscription.run()
        raise AssertionError("it ends by an exception")

    async def _ask(self, frame: bytes, is_subscribed: anyio.Event) -> None:
        await is_subscribed.wait()
        while True:
            await BROADCAST(self._client, (self._keys.broadcast,), (frame,))
            await anyio.sleep(ASK_EVERY)

    def __repr__(self) -> str:
        return f"<MqttTraces prefix={self._keys.prefix!r}>"
