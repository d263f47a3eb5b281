"""The clients of the MQTT demo, with paho: aircraft that publish their departures, and a tower that reads all."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from typing import Any, Literal

from paho.mqtt.client import Client, MQTTMessage
from paho.mqtt.enums import CallbackAPIVersion

from rsmq.cli.demo.flight import Departure
from rsmq.cli.demo.result import TOPIC

RETRY_SECONDS = 1
"""How long paho waits before it connects again: its shortest time."""


class DemoClient:
    """A client with a persistent session. When its connection ends it goes on at the next gateway."""

    def __init__(self, client_id: str, ports: Sequence[int], transport: Literal["tcp", "websockets"]) -> None:
        self.inner = Client(CallbackAPIVersion.VERSION2, client_id, clean_session=False, transport=transport)
        self.port = 0
        self._ports = itertools.cycle(ports)
        self.inner.on_disconnect = self.inner.on_connect_fail = self._go_on
        self.inner.reconnect_delay_set(RETRY_SECONDS, RETRY_SECONDS)

    def start(self) -> None:
        """Connect, in a thread of paho."""
        self._go_on()
        self.inner.loop_start()

    def _go_on(self, *_: object) -> None:
        """A load balancer would choose the next gateway."""
        self.port = next(self._ports)
        self.inner.connect_async("127.0.0.1", self.port)

    @property
    def is_connected(self) -> bool:
        """Whether its CONNECT is answered."""
        return self.inner.is_connected()

    def stop(self) -> None:
        """Disconnect, and do not connect again."""
        self.inner.on_disconnect = None
        self.inner.on_connect_fail = None
        self.inner.disconnect()
        self.inner.loop_stop()


class Aircraft(DemoClient):
    """Publishes its departures with one QoS, and reads the answers in its inbox. It subscribes to nothing.

    After a disconnect it hands nothing new to paho until what is out is acknowledged: paho may send a new message
    before those that it repeats.
    """

    def __init__(self, name: str, ports: Sequence[int], qos: int) -> None:
        super().__init__(name, ports, "tcp")
        self.name, self.qos = name, qos
        self.published = 0
        self.acknowledged = 0
        self.answers: list[int] = []
        self._waiting: deque[Departure] = deque()
        self._is_repeating = False
        self.inner.max_queued_messages_set(0)
        self.inner.on_publish = self._on_publish
        self.inner.on_message = self._on_message

    def publish(self, departure: Departure) -> None:
        """Publish a departure, behind those that wait."""
        self._waiting.append(departure)
        self.published += 1
        self.flush()

    def flush(self) -> None:
        """Hand to paho what may be sent now."""
        if self._is_repeating:
            self._is_repeating = self.acknowledged + len(self._waiting) < self.published
        while self._waiting and self.is_connected and not self._is_repeating:
            departure = self._waiting.popleft()
            self.inner.publish(f"{TOPIC}/{self.name}", departure.model_dump_json(), qos=self.qos)

    def _go_on(self, *_: object) -> None:
        self._is_repeating = True
        super()._go_on()

    def _on_publish(self, *_: object) -> None:
        self.acknowledged += 1

    def _on_message(self, _client: Client, _data: Any, message: MQTTMessage) -> None:
        self.answers.append(int(message.payload))


class Tower(DemoClient):
    """Reads the departures of all aircraft over WebSocket, with QoS 2."""

    def __init__(self, ports: Sequence[int]) -> None:
        super().__init__("tower", ports, "websockets")
        self.seen: list[tuple[str, int]] = []
        self.is_subscribed = False
        self.inner.on_connect = self._on_connect
        self.inner.on_subscribe = self._on_subscribe
        self.inner.on_message = self._on_message

    def _on_connect(self, *_: object) -> None:
        if not self.is_subscribed:
            self.inner.subscribe(f"{TOPIC}/+", qos=2)

    def _on_subscribe(self, *_: object) -> None:
        self.is_subscribed = True

    def _on_message(self, _client: Client, _data: Any, message: MQTTMessage) -> None:
        departure = Departure.model_validate_json(message.payload)
        self.seen.append((departure.aircraft, departure.turn))
