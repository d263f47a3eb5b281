"""A published message between its client, the stream, the routers and the inboxes: its headers and its envelope."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple, Protocol

from rsmq.gateway.protocol.packet import Publish, Subscription
from rsmq.gateway.protocol.properties import Property, write_varint
from rsmq.model.encoding import Binding, Encoding
from rsmq.model.message import BYTES, TEXT, new_message_id
from rsmq.model.record import whole
from rsmq.persistence.letter import EXPIRES, RETAIN, seal_mqtt

TOPIC: Final = "mqtt-topic"
CLIENT: Final = "mqtt-client"
QOS: Final = "mqtt-qos"
RETAINED: Final = "mqtt-retain"
EXPIRY: Final = "mqtt-expiry"
PROPERTIES: Final = "mqtt-properties"
"""The headers of a message that came from an MQTT client."""
LONGEST_EXPIRY: Final = 0xFFFFFFFF
"""In seconds: a property has four bytes for it."""
OWN: Final = {TOPIC, CLIENT, QOS, RETAINED, EXPIRY, PROPERTIES}


class Published(NamedTuple):
    """A message as the router and retained storage need it. `expiry` is in seconds; `forwarded` are properties.

    `binding`: what undoes the payload, if that is encoded.
    """

    topic: str
    payload: bytes
    qos: int
    retain: bool
    client: str
    expiry: int | None
    forwarded: bytes
    binding: Binding | None = None

    def headers(self, pairs: Iterable[tuple[str, str]] = ()) -> dict[str, str]:
        """The headers under which it is stored; user properties are among them."""
        found = {name: value for name, value in pairs if name not in OWN}
        found |= {TOPIC: self.topic, CLIENT: self.client, QOS: str(self.qos)}
        if self.retain:
            found[RETAINED] = "1"
        if self.expiry is not None:
            found[EXPIRY] = str(self.expiry)
        if self.forwarded:
            found[PROPERTIES] = b64encode(self.forwarded).decode()
        return found

    @property
    def ttl_ms(self) -> int | bytes:
        """Its expiry for the server, empty for none."""
        return b"" if self.expiry is None else self.expiry * 1000

    def envelope(self, qos: int, *, retain: bool, identifiers: Iterable[int] = (), share: str = "") -> bytes:
        """The letter for one receiver, without the stamp of the server."""
        flags = qos | (RETAIN if retain else 0) | (0 if self.expiry is None else EXPIRES)
        properties = self.forwarded + identifiers_of(identifiers)
        return seal_mqtt(flags, self.topic.encode(), properties, self.payload, share, self.binding)

    def __repr__(self) -> str:
        return f"<Published {self.topic} bytes={len(self.payload)}>"


def encoded(message: Published, encoding: Encoding) -> Published:
    """The same message with its payload encoded, under an id of its own. Raises TooLarge."""
    if message.binding is not None or not encoding.names:
        return message
    payload, binding = encoding.bound(message.payload, new_message_id(), None, BYTES)
    return message._replace(payload=payload, binding=binding)


def decoded(message: Published, encoding: Encoding) -> Published:
    """The same message as it was published. Raises Malformed, and CannotDecode without its key."""
    if message.binding is None:
        return message
    return message._replace(payload=encoding.undo(message.payload, message.binding), binding=None)


def identifiers_of(identifiers: Iterable[int]) -> bytes:
    """Subscription identifiers as properties."""
    return b"".join(bytes((Property.SUBSCRIPTION_ID,)) + write_varint(each) for each in identifiers)


def from_packet(packet: Publish, client: str) -> Published:
    """A message of a client."""
    properties = packet.properties
    expiry = None if properties is None else properties.get(Property.MESSAGE_EXPIRY)
    return Published(packet.topic, packet.payload, packet.qos, packet.retain, client, expiry, packet.forwarded)


def content_type_of(packet: Publish) -> str:
    """The content type of a message: what its client says, else text or bytes."""
    properties = packet.properties
    if properties is None:
        return BYTES
    given = properties.get(Property.CONTENT_TYPE)
    return str(given) if given else TEXT if properties.get(Property.PAYLOAD_FORMAT) else BYTES


def from_headers(headers: Mapping[str, str], payload: bytes, binding: Binding | None = None) -> Published | None:
    """A message out of a topic, or None if it did not come from an MQTT client."""
    topic, client, qos = headers.get(TOPIC), headers.get(CLIENT), headers.get(QOS, "0")
    if not topic or client is None or qos not in ("0", "1", "2"):
        return None
    expiry = headers.get(EXPIRY)
    forwarded = b64decode(headers.get(PROPERTIES, ""))
    seconds = None if (given := whole(expiry)) is None else min(given, LONGEST_EXPIRY)
    return Published(topic, payload, int(qos), RETAINED in headers, client, seconds, forwarded, binding)


class Timings(Protocol):
    """The histograms of `--metrics` implement it. Durations are in seconds."""

    def stored(self, seconds: float) -> None:
        """From a PUBLISH of QoS 1 or 2 until the server has it."""

    def delivered(self, seconds: float) -> None:
        """From the moment in which the server has stored a message to its PUBLISH for a client that was connected."""


class Copy(NamedTuple):
    """How one client gets a message that matches some of its subscriptions."""

    qos: int
    retain: bool
    identifiers: tuple[int, ...]


def combine(message: Published, found: Iterable[Subscription]) -> Copy | None:
    """One copy for all filters of a client that match: the highest QoS, and all identifiers. None if none wants it."""
    qos, retain, identifiers = -1, False, list[int]()
    for each in found:
        qos = max(qos, min(message.qos, each.qos))
        retain = retain or (each.retain_as_published and message.retain)
        if each.identifier:
            identifiers.append(each.identifier)
    return None if qos < 0 else Copy(qos, retain, tuple(dict.fromkeys(identifiers)))
