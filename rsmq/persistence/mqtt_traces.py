"""The packets of one MQTT client, as an operator watches them: a gateway sends them while it is asked for them."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any, Final, NamedTuple, NoReturn

import anyio
from pydantic_core import from_json, to_json

from rsmq.errors import BrokerError, BrokerUnavailable
from rsmq.model.keys import Keys
from rsmq.model.own_tasks import own_tasks
from rsmq.persistence.doorbell import PING_EVERY, SILENCE
from rsmq.persistence.mqtt_clients import BROADCAST, order_frame
from rsmq.redis.client.connector import Client
from rsmq.redis.client.raw_connection import RawConnection, pack

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
        connection = RawConnection(self._client.node_for(channel))
        try:
            await connection.open()
            await connection.send([pack(("SSUBSCRIBE", channel))])
            async with own_tasks() as tasks:
                tasks.start_soon(self._ask, order_frame(TRACE, to_json(order).decode()))
                tasks.start_soon(self._ping, connection)
                while True:
                    for line in read_lines((await connection.receive(1, SILENCE))[0]):
                        show(line)
        finally:
            with anyio.CancelScope(shield=True):
                await connection.close()
        raise AssertionError("it ends by an exception")

    async def _ask(self, frame: bytes) -> None:
        while True:
            await BROADCAST(self._client, (self._keys.broadcast,), (frame,))
            await anyio.sleep(ASK_EVERY)

    async def _ping(self, connection: RawConnection) -> None:
        while True:
            await anyio.sleep(PING_EVERY)
            await connection.send([pack(("PING",))])

    def __repr__(self) -> str:
        return f"<MqttTraces prefix={self._keys.prefix!r}>"


def read_lines(reply: object) -> list[dict[str, Any]]:
    """The packets in what a gateway has sent; none in an answer to something else."""
    if isinstance(reply, Exception):
        raise reply if isinstance(reply, BrokerError) else BrokerUnavailable(str(reply))
    if not isinstance(reply, list) or reply[0] != b"smessage":
        return []
    return [from_json(line) for line in reply[2].split(b"\n")]
