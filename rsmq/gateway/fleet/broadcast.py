"""Messages of QoS 0 between the gateways: over sharded pub/sub, stored nowhere."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Final

import anyio
from pydantic_core import from_json, to_json

from rsmq.errors import BrokerError, CannotDecode, ConfigError, Malformed, TooLarge
from rsmq.gateway.fleet.message import Published, decoded, encoded, from_headers
from rsmq.model.backoff import Backoff
from rsmq.model.encoding import NO_CODECS, Binding, Encoding
from rsmq.model.message import BYTES, LARGEST_HEADERS, read_headers, write_headers
from rsmq.persistence.doorbell import NodeSubscription
from rsmq.persistence.mqtt_clients import BROADCAST
from rsmq.redis.client.connector import Client
from rsmq.redis.client.script_batcher import ScriptBatcher

log = logging.getLogger("rsmq.gateway")

SHARES: Final = "mqtt-shares"
"""The header with the chosen member of each share."""
ID: Final = "mqtt-id"
ENC: Final = "mqtt-enc"
"""The headers with the id and the encoding of an encoded payload."""
MOST_WAITING: Final = 1_000
"""Messages that wait for their write; more are dropped, as QoS 0 allows, and counted."""


class Broadcast:
    """Passes messages on to all other gateways. `received` gets theirs; `dropped` is called for each that is lost.

    Its connection also listens on the channel `alive`, so that the others notice at once when this process has died.
    """

    def __init__(
        self, client: Client, channel: str, alive: str, batcher: ScriptBatcher, gateway: str,
        received: Callable[[Published, Mapping[str, str]], None], dropped: Callable[[], None],
        encoding: Encoding = NO_CODECS,
    ) -> None:  # fmt: skip
        """`encoding`: the payloads of messages are encoded on their way."""
        self._encoding = encoding
        self._client = client
        self._channel = channel
        self._batcher = batcher
        self._alive = (b"SSUBSCRIBE" if client.is_cluster else b"SUBSCRIBE", alive.encode())
        self._own = bytes((len(gateway),)) + gateway.encode()
        self._received = received
        self._dropped = dropped
        self._orders: dict[str, Callable[[str], None]] = {}
        self._waiting: list[bytes] = []
        self._in_flight = 0

    def obey(self, name: str, order: Callable[[str], None]) -> None:
        """Call `order` with what another gateway asks for under this name."""
        self._orders[name] = order

    def send(self, message: Published, chosen: Mapping[str, str]) -> None:
        """Pass a message on, together with all others of this turn of the loop. `chosen`: a member of each share."""
        if len(self._waiting) + self._in_flight >= MOST_WAITING:
            self._dropped()
            return
        found = message.headers()
        if self._encoding.names:
            try:
                message = encoded(message, self._encoding)
            except TooLarge:
                self._dropped()
                return
        if message.binding is not None:
            found |= {ID: message.binding.message_id.decode(), ENC: message.binding.enc.decode()}
        if chosen:
            found[SHARES] = to_json(chosen).decode()
        try:
            headers = write_headers(found, LARGEST_HEADERS)
        except ConfigError:  # a topic name or user properties that are larger than headers may be
            self._dropped()
            return
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._flush)
        self._waiting.append(b"%b%b%b%b" % (self._own, len(headers).to_bytes(2, "big"), headers, message.payload))

    def order(self, name: str, value: str) -> None:
        """Ask all other gateways for something. It may get lost."""
        headers = write_headers({name: value})
        data = b"%b%b%b" % (self._own, len(headers).to_bytes(2, "big"), headers)
        self._batcher.submit(BROADCAST, (self._channel,), (data,)).add_done_callback(asyncio.Future.exception)

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        self._in_flight += len(waiting)
        call = self._batcher.submit(BROADCAST, (self._channel,), waiting)
        call.add_done_callback(lambda done: self._sent(done, len(waiting)))

    def _sent(self, call: asyncio.Future[object], count: int) -> None:
        self._in_flight -= count
        if call.cancelled() or call.exception() is not None:
            for _ in range(count):
                self._dropped()

    async def run(self) -> None:
        """Receive the messages of the others until cancelled."""
        backoff = Backoff(0.1, 2.0)

        def rung(_: bytes, data: bytes) -> None:
            backoff.reset()
            if data and not data.startswith(self._own):
                self._read(data)

        while True:
            subscription = NodeSubscription(self._client.node_for(self._channel), rung)
            subscription.listen(self._channel.encode())
            subscription.send(*self._alive)
            try:
                await subscription.run()
            except BrokerError as error:
                log.info("messages of other gateways are interrupted: %s", error)
            await anyio.sleep(backoff.next())
            try:
                await self._client.refresh()
            except BrokerError as error:
                log.info("the cluster's nodes cannot be looked up: %s", error)

    def _read(self, data: bytes) -> None:
        at = 1 + data[0]
        end = at + 2 + int.from_bytes(data[at : at + 2], "big")
        try:
            headers = read_headers(data[at + 2 : end])
            for name, order in self._orders.items():
                if name in headers:
                    order(headers[name])
                    return
            binding = None
            if enc := headers.get(ENC):
                binding = Binding(headers.get(ID, "").encode(), None, BYTES.encode(), enc.encode())
            message, chosen = from_headers(headers, data[end:], binding), from_json(headers.get(SHARES, "{}"))
            message = None if message is None else decoded(message, self._encoding)
        except CannotDecode:
            self._dropped()
            return
        except (Malformed, ValueError):
            message = None
        if message is not None:
            self._received(message, chosen)

    def __repr__(self) -> str:
        return f"<Broadcast waiting={len(self._waiting)}>"
