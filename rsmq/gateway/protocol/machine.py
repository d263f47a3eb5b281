"""One connection as a state machine without I/O: bytes in, valid packets out, and the bytes with which it ends."""

from __future__ import annotations

from enum import Enum
from typing import Final, NamedTuple

from rsmq.gateway.protocol import encode
from rsmq.gateway.protocol.burst import PUBACK_FIRST, read_more, read_pubacks
from rsmq.gateway.protocol.decode import decode, read_frame
from rsmq.gateway.protocol.inbound import Inbound
from rsmq.gateway.protocol.packet import (
    DISCONNECT,
    PUBLISH,
    SUBSCRIBE,
    UNSUBSCRIBE,
    V5,
    Auth,
    Connect,
    Disconnect,
    Packet,
    Properties,
    ProtocolError,
    PubAcks,
    Publish,
    ReasonCode,
    RefusedPacket,
    Subscribe,
    Unsubscribe,
    UnsupportedVersion,
)
from rsmq.gateway.protocol.properties import Property

FIRST_CONNECT: Final = 0x10
"""The first byte of a CONNECT."""
OPENING: Final = b"\0\4MQTT\5"
"""The first bytes of the body of a CONNECT of version 5."""
EARLY_BYTES: Final = 64 << 10
"""Bytes behind a CONNECT that are kept until it is answered."""
LARGEST_CONNECT: Final = 192 << 10
"""Bytes of a CONNECT: a will and a password of the largest size fit in. No client is known before its CONNECT."""
MOST_REQUESTS: Final = 20
"""SUBSCRIBE and UNSUBSCRIBE packets that are not answered. Further ones wait, as messages of version 3 do."""


def is_version_5(data: bytes, at: int) -> bool:
    """Whether a packet that may be malformed is a CONNECT of version 5."""
    if data[at] != FIRST_CONNECT:
        return False
    at += 1
    while at < len(data) - 1 and data[at] >= 128:
        at += 1
    return data.startswith(OPENING, at + 1)


class ClientLimits(NamedTuple):
    """The limits of one client."""

    packet_size: int = 1 << 20
    receive_maximum: int = 20
    topic_aliases: int = 16


class State(Enum):
    """The life of a connection."""

    NEW = "no packet yet"
    CONNECTING = "CONNECT is not answered yet"
    CONNECTED = "connected"
    CLOSED = "closed"


class Machine:
    """The rules of the standard for the packets of one connection.

    `feed` returns the packets that may be acted on, in order. `error` is set by the first one that ends the connection:
    those before it are still acted on. While CONNECT or a request for subscriptions is not answered, or a client of
    version 3 has too many messages unconfirmed, further packets wait; `resume` returns them.
    """

    __slots__ = (
        "_aliases", "_auth_method", "_held", "_limits", "_needed", "_parts", "_session_expiry", "error", "inbound",
        "level", "requests", "state",
    )  # fmt: skip

    def __init__(self, limits: ClientLimits) -> None:
        self._limits = limits
        self.state = State.NEW
        self.level = 0
        self.error: RefusedPacket | None = None
        self.inbound = Inbound()
        self.requests = 0
        """Requests for subscriptions that are not answered."""
        self._parts: list[bytes] = []
        self._held = 0
        self._needed = 1
        self._aliases: dict[int, str] = {}
        self._session_expiry = 0
        self._auth_method: str | None = None

    @property
    def held(self) -> int:
        """Bytes that wait."""
        return self._held

    @property
    def rest(self) -> bytes:
        """The bytes that wait."""
        return b"".join(self._parts)

    @property
    def is_waiting(self) -> bool:
        """Whether packets wait because of the state of the connection, so that reading may pause."""
        return (
            self.state is State.CONNECTING
            or (self.level != V5 and self.inbound.unconfirmed >= self._limits.receive_maximum)
            or self.requests > 0
        )

    @property
    def holds_back(self) -> bool:
        """Whether there are bytes that wait because of that."""
        return self._held > 0 and self.is_waiting

    @property
    def owes(self) -> bool:
        """Whether packets of the client are not answered yet."""
        return self.state is State.CONNECTING or self.requests > 0 or self.inbound.unconfirmed > 0

    @property
    def _under_way(self) -> int:
        """Messages that count against the Receive Maximum."""
        return self.inbound.count if self.level == V5 else self.inbound.unconfirmed

    def feed(self, data: bytes) -> list[Packet]:
        """The packets that bytes of the client complete."""
        if self.error is not None or self.state is State.CLOSED:
            return []
        self._parts.append(data)
        self._held += len(data)
        return self.resume() if self._held >= self._needed else []

    def resume(self) -> list[Packet]:
        """The packets that need not wait any more."""
        found = list[Packet]()
        if self.error is not None or self.state is State.CLOSED or not self._held:
            return found
        data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        at, size, largest = 0, len(data), self._limits.packet_size
        if self.state is State.NEW:
            largest = min(largest, LARGEST_CONNECT)
        self._needed = 1
        try:
            while at < size and not (self.is_waiting and self._may_wait(data[at])):
                if self.state is State.NEW and data[at] != FIRST_CONNECT:
                    raise ProtocolError("the first packet is not a CONNECT")
                if data[at] == PUBACK_FIRST and self.state is State.CONNECTED and (ids := read_pubacks(data, at)):
                    found.append(PubAcks(ids))
                    at += 4 * len(ids)
                    continue
                body, end = read_frame(data, at, size, largest)
                if end < 0:
                    break
                packet = decode(data[at], data, body, end, self.level)
                start, at = at, end
                if type(packet) is Publish and packet.qos == 1 and packet.properties is None and not packet.retain:
                    at = read_more(
                        packet, data, start, at, self._limits.packet_size, self.level,
                        self._limits.receive_maximum - self._under_way - 1,
                    )  # fmt: skip
                self._check(packet)
                found.append(packet)
                if type(packet) is Disconnect:
                    self.state = State.CLOSED
                    break
        except RefusedPacket as error:
            self.error = error
            if isinstance(error, UnsupportedVersion):
                self.level = V5 if error.level >= V5 else 4
                self.state = State.CONNECTING
            elif self.state is State.NEW and is_version_5(data, at):
                self.level = V5  # so that the CONNACK says what is wrong
                self.state = State.CONNECTING
        rest = data[at:] if at else data
        if self.error is not None or self.state is State.CLOSED:
            rest = b""
        self._parts = [rest] if rest else []
        self._held = len(rest)
        return found

    def goodbye(self) -> Disconnect | None:
        """The DISCONNECT in the bytes that wait."""
        data, at = self.rest, 0
        try:
            while at < len(data):
                body, end = read_frame(data, at, len(data), self._limits.packet_size)
                if end < 0:
                    return None
                if data[at] >> 4 == DISCONNECT:
                    found = decode(data[at], data, body, end, self.level)
                    return found if isinstance(found, Disconnect) else None
                at = end
        except RefusedPacket:
            return None
        return None

    def _may_wait(self, first: int) -> bool:
        """Whether a packet with this first byte waits. Behind too many messages only further ones do: a client that
        waits for its acknowledgements still gets the answers to its pings.

        A message behind a request for subscriptions meets what was asked for, and so does the end of the session.
        """
        kind = first >> 4
        if self.state is State.CONNECTING or (self.requests and kind in (PUBLISH, DISCONNECT)):
            return True
        if kind == PUBLISH:
            return bool(first & 6) and self.level != V5 and self.inbound.unconfirmed >= self._limits.receive_maximum
        return kind in (SUBSCRIBE, UNSUBSCRIBE) and self.requests >= MOST_REQUESTS

    # -- the rules -------------------------------------------------------------------------------------------------

    def _check(self, packet: Packet) -> None:
        """Raise RefusedPacket for a packet that may not come now."""
        kind = type(packet)
        if kind is Publish:
            assert isinstance(packet, Publish)
            if self.state is State.NEW:
                raise ProtocolError("the first packet is not a CONNECT")
            self._check_publish(packet)
        elif kind is Subscribe or kind is Unsubscribe:
            self.requests += 1
        elif isinstance(packet, Connect):
            if self.state is not State.NEW:
                raise ProtocolError("a second CONNECT")
            self.state = State.CONNECTING
            self.level = packet.level
            self._session_expiry = packet.properties.get(Property.SESSION_EXPIRY, 0)
            self._auth_method = packet.properties.get(Property.AUTH_METHOD)
            if Property.AUTH_DATA in packet.properties and self._auth_method is None:
                raise ProtocolError("authentication data without a method")
        elif isinstance(packet, Auth):
            raise ProtocolError("an AUTH without an authentication method")
        elif isinstance(packet, Disconnect):
            expiry = packet.properties.get(Property.SESSION_EXPIRY, 0)
            if expiry and not self._session_expiry:
                raise ProtocolError("a session expiry of 0 cannot be raised by DISCONNECT")

    def _check_publish(self, packet: Publish) -> None:
        if packet.properties is not None:
            alias = packet.properties.get(Property.TOPIC_ALIAS)
            if alias is not None:
                self._resolve_alias(packet, alias)
        if packet.qos:
            if self.level == V5 and self.inbound.count >= self._limits.receive_maximum:
                if packet.qos == 2 and packet.packet_id in self.inbound.taken:
                    pass  # a repetition takes no place of its own
                else:
                    raise ProtocolError("more messages than Receive Maximum", ReasonCode.RECEIVE_MAXIMUM_EXCEEDED)
            self.inbound.admit(packet)

    def _resolve_alias(self, packet: Publish, alias: int) -> None:
        if alias > self._limits.topic_aliases:
            raise ProtocolError(f"topic alias {alias} is above the maximum", ReasonCode.TOPIC_ALIAS_INVALID)
        if packet.topic:
            self._aliases[alias] = packet.topic
            return
        topic = self._aliases.get(alias)
        if topic is None:
            raise ProtocolError(f"topic alias {alias} is not known")
        packet.topic = topic

    # -- answers ---------------------------------------------------------------------------------------------------

    def accept(self, *, session_present: bool, properties: Properties | None = None) -> bytes:
        """The CONNACK that opens the connection. `resume` returns what came early."""
        self.state = State.CONNECTED
        return encode.connack(ReasonCode.SUCCESS, self.level, session_present=session_present, properties=properties)

    def end(self, reason: ReasonCode, properties: Properties | None = None) -> bytes:
        """The last bytes to send: a CONNACK, a DISCONNECT or nothing, by state and version."""
        state, self.state = self.state, State.CLOSED
        self._parts = []
        self._held = 0
        if state is State.CONNECTING:
            return encode.connack(reason, self.level, properties=properties)
        if state is State.CONNECTED and self.level == V5:
            return encode.disconnect(reason, properties)
        return b""

    def __repr__(self) -> str:
        return f"<Machine {self.state.name} level={self.level} {self.inbound!r}>"
