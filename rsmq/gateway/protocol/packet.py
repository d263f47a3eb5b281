"""The control packets of MQTT 3.1, 3.1.1 and 5.0 as values, their types and reason codes. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, Final, NamedTuple

from rsmq.model.mqtt_subscription import Subscription as Subscription  # packets consist of them

CONNECT: Final = 1
CONNACK: Final = 2
PUBLISH: Final = 3
PUBACK: Final = 4
PUBREC: Final = 5
PUBREL: Final = 6
PUBCOMP: Final = 7
SUBSCRIBE: Final = 8
SUBACK: Final = 9
UNSUBSCRIBE: Final = 10
UNSUBACK: Final = 11
PINGREQ: Final = 12
PINGRESP: Final = 13
DISCONNECT: Final = 14
AUTH: Final = 15

V31: Final = 3
V311: Final = 4
V5: Final = 5
"""The protocol levels."""
BRIDGE: Final = 0x80
"""Set in the protocol level by a bridge of another broker, such as Mosquitto's with its defaults."""

MOST_PACKET_IDS: Final = 65_535
LONGEST_NAME: Final = 256
"""Characters of a topic name up to which caches keep it: so their number of names bounds their memory."""
NO_ID: Final = b"\0\0"

Properties = dict[int, Any]
"""Properties by their identifier. A property that may be repeated has a list."""


class ReasonCode(IntEnum):
    """The reason codes of version 5 that this server sends or acts on."""

    SUCCESS = 0x00
    GRANTED_QOS_1 = 0x01
    GRANTED_QOS_2 = 0x02
    DISCONNECT_WITH_WILL = 0x04
    NO_MATCHING_SUBSCRIBERS = 0x10
    NO_SUBSCRIPTION_EXISTED = 0x11
    UNSPECIFIED_ERROR = 0x80
    MALFORMED_PACKET = 0x81
    PROTOCOL_ERROR = 0x82
    IMPLEMENTATION_ERROR = 0x83
    UNSUPPORTED_VERSION = 0x84
    CLIENT_ID_NOT_VALID = 0x85
    BAD_CREDENTIALS = 0x86
    NOT_AUTHORIZED = 0x87
    SERVER_UNAVAILABLE = 0x88
    SERVER_BUSY = 0x89
    BANNED = 0x8A
    SERVER_SHUTTING_DOWN = 0x8B
    BAD_AUTHENTICATION_METHOD = 0x8C
    KEEP_ALIVE_TIMEOUT = 0x8D
    SESSION_TAKEN_OVER = 0x8E
    TOPIC_FILTER_INVALID = 0x8F
    TOPIC_NAME_INVALID = 0x90
    PACKET_ID_IN_USE = 0x91
    PACKET_ID_NOT_FOUND = 0x92
    RECEIVE_MAXIMUM_EXCEEDED = 0x93
    TOPIC_ALIAS_INVALID = 0x94
    PACKET_TOO_LARGE = 0x95
    MESSAGE_RATE_TOO_HIGH = 0x96
    QUOTA_EXCEEDED = 0x97
    ADMINISTRATIVE_ACTION = 0x98
    PAYLOAD_FORMAT_INVALID = 0x99
    USE_ANOTHER_SERVER = 0x9C
    SHARED_NOT_SUPPORTED = 0x9E
    CONNECTION_RATE_EXCEEDED = 0x9F


RETURN_CODES: Final = {
    ReasonCode.UNSUPPORTED_VERSION: 1,
    ReasonCode.CLIENT_ID_NOT_VALID: 2,
    ReasonCode.SERVER_UNAVAILABLE: 3,
    ReasonCode.SERVER_BUSY: 3,
    ReasonCode.QUOTA_EXCEEDED: 3,
    ReasonCode.CONNECTION_RATE_EXCEEDED: 3,
    ReasonCode.SERVER_SHUTTING_DOWN: 3,
    ReasonCode.USE_ANOTHER_SERVER: 3,
    ReasonCode.BAD_CREDENTIALS: 4,
    ReasonCode.NOT_AUTHORIZED: 5,
    ReasonCode.BANNED: 5,
}
"""The return codes of a CONNACK in version 3. The rest has none: the connection is closed."""


class RefusedPacket(Exception):
    """A packet that ends its connection, and the reason code for it."""

    def __init__(self, reason: ReasonCode, text: str, limit: str = "") -> None:
        super().__init__(text)
        self.reason, self.text = reason, text
        self.name = limit or reason.name.lower()
        """What it is counted as: the option that limits it, or the reason."""


class MalformedPacket(RefusedPacket):
    """Bytes that are no valid packet."""

    def __init__(self, text: str) -> None:
        super().__init__(ReasonCode.MALFORMED_PACKET, text)


class ProtocolError(RefusedPacket):
    """A packet that is valid by itself, but not here."""

    def __init__(self, text: str, reason: ReasonCode = ReasonCode.PROTOCOL_ERROR) -> None:
        super().__init__(reason, text)


class UnsupportedVersion(RefusedPacket):
    """A CONNECT of a protocol level that does not exist. `level` decides the form of the answer."""

    def __init__(self, level: int) -> None:
        super().__init__(ReasonCode.UNSUPPORTED_VERSION, f"protocol level {level} is not supported")
        self.level = level


class Will(NamedTuple):
    """The message that the server publishes when the connection ends without a DISCONNECT."""

    topic: str
    payload: bytes
    qos: int
    retain: bool
    properties: Properties
    forwarded: bytes

    def __repr__(self) -> str:
        return f"<Will {self.topic!r} qos={self.qos} bytes={len(self.payload)}>"


class Connect(NamedTuple):
    """The first packet of a client. `is_bridge`: it is another broker."""

    level: int
    client_id: str
    clean_start: bool
    keep_alive: int
    will: Will | None
    username: str | None
    password: bytes | None
    properties: Properties
    is_bridge: bool = False

    def __repr__(self) -> str:
        return f"<Connect {self.client_id!r} level={self.level} user={self.username!r}>"


class PendingAck:
    """The place of the acknowledgements of one PUBLISH of a client. `is_repeated`: this QoS 2 id was received before.

    `reasons`: one for each of its messages, or empty if all are stored. The PUBACK of a will has no packet id.
    """

    __slots__ = ("is_done", "is_repeated", "kind", "packet_ids", "reasons")

    def __init__(self, kind: int, packet_ids: list[bytes], *, is_repeated: bool = False) -> None:
        self.kind = kind
        self.packet_ids = packet_ids
        self.is_repeated = is_repeated
        self.reasons: Sequence[int] = ()
        self.is_done = False

    @property
    def packet_id(self) -> int:
        """That of its first message."""
        return int.from_bytes(self.packet_ids[0], "big")

    @property
    def reason(self) -> int:
        """That of its first message."""
        return self.reasons[0] if self.reasons else 0


class Publish:
    """A message of a client, or several of QoS 1 that came together and differ in nothing but payload and packet id.

    A packet with an alias gets its topic from the machine. `forwarded`: the encoded properties that a receiver gets
    unchanged, in their order. Only messages without properties and retain flag are joined: see `burst.read_more`.
    """

    __slots__ = ("dup", "forwarded", "packet_ids", "payloads", "pending", "properties", "qos", "retain", "topic")

    def __init__(
        self,
        topic: str,
        payload: bytes,
        qos: int = 0,
        packet_id: bytes = b"",
        *,
        retain: bool = False,
        dup: bool = False,
        properties: Properties | None = None,
        forwarded: bytes = b"",
    ) -> None:
        self.topic = topic
        self.payloads = [payload]
        self.qos = qos
        self.packet_ids = [packet_id]
        self.retain = retain
        self.dup = dup
        self.properties = properties
        self.forwarded = forwarded
        self.pending: PendingAck | None = None

    @property
    def payload(self) -> bytes:
        """That of its first message."""
        return self.payloads[0]

    @property
    def packet_id(self) -> int:
        """That of its first message; 0 with QoS 0."""
        return int.from_bytes(self.packet_ids[0], "big")

    def __repr__(self) -> str:
        return f"<Publish {self.topic!r} qos={self.qos} id={self.packet_id} messages={len(self.payloads)}>"


class AckPacket:
    """A PUBACK, PUBREC, PUBREL or PUBCOMP."""

    __slots__ = ("kind", "packet_id", "reason")

    def __init__(self, kind: int, packet_id: int, reason: int = 0) -> None:
        self.kind = kind
        self.packet_id = packet_id
        self.reason = reason

    def __repr__(self) -> str:
        return f"<AckPacket {self.kind} id={self.packet_id} reason={self.reason:#x}>"


class PubAcks(NamedTuple):
    """PUBACKs without a reason code that came one behind the other: nearly all of them are such."""

    packet_ids: list[int]


class Subscribe(NamedTuple):
    """A request for subscriptions."""

    packet_id: int
    subscriptions: tuple[Subscription, ...]


class Unsubscribe(NamedTuple):
    """A request to end subscriptions."""

    packet_id: int
    filters: tuple[str, ...]


class Disconnect(NamedTuple):
    """The last packet of a client."""

    reason: int
    properties: Properties


class Ping(NamedTuple):
    """A sign of life that wants an answer."""


class Auth(NamedTuple):
    """A step of an enhanced authentication (version 5)."""

    reason: int
    properties: Properties

    def __repr__(self) -> str:
        return f"<Auth reason={self.reason:#x}>"


Packet = Connect | Publish | AckPacket | PubAcks | Subscribe | Unsubscribe | Disconnect | Ping | Auth
