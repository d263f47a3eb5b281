"""How much a client may send, and how many may come: pure decisions about rates. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from rsmq.gateway.options import GatewayOptions
from rsmq.gateway.protocol.packet import Packet, PubAcks, Publish, ReasonCode, RefusedPacket


class TokenBucket:
    """How much may still come: `burst` at once (default: as much as in a second), and then so much a second."""

    __slots__ = ("_at", "_burst", "_left", "_most")

    def __init__(self, most: int, burst: int = 0) -> None:
        self._most = most
        self._burst = max(most, burst)
        self._left = float(self._burst)
        self._at = 0.0

    def allows(self, number: int, now: float) -> bool:
        """Whether so many more may come now."""
        self._left = min(self._burst, self._left + (now - self._at) * self._most) - number
        self._at = now
        return self._left >= 0


class ClientRates:
    """The rates of one client: bytes, packets and messages. A limit of 0 is none."""

    __slots__ = ("_bytes", "_messages", "_packets")

    def __init__(self, options: GatewayOptions, packet_size: int) -> None:
        # the largest packet must be possible
        self._bytes = TokenBucket(options.most_bytes, packet_size) if options.most_bytes else None
        self._packets = TokenBucket(options.most_packets) if options.most_packets else None
        self._messages = TokenBucket(options.most_messages) if options.most_messages else None

    @classmethod
    def of(cls, options: GatewayOptions, packet_size: int) -> Self | None:
        """The rates of a new connection, or None if there are no limits."""
        has_some = options.most_bytes or options.most_packets or options.most_messages
        return cls(options, packet_size) if has_some else None

    def take(self, packets: Sequence[Packet], size: int, now: float) -> None:
        """Packets have come, or are not held back any more, and so many bytes. Raises RefusedPacket for too many."""
        if size and self._bytes is not None and not self._bytes.allows(size, now):
            raise too_many("bytes", "most_bytes")
        if self._packets is not None and not self._packets.allows(sum(map(number_of, packets)), now):
            raise too_many("packets", "most_packets")
        if self._messages is not None:
            messages = sum(len(each.payloads) for each in packets if type(each) is Publish)
            if not self._messages.allows(messages, now):
                raise too_many("messages", "most_messages")


def number_of(packet: Packet) -> int:
    """How many packets of a client are read as this one."""
    if isinstance(packet, Publish):
        return len(packet.payloads)
    return len(packet.packet_ids) if isinstance(packet, PubAcks) else 1


def too_many(what: str, limit: str) -> RefusedPacket:
    """The refusal of a client that sends faster than it may."""
    return RefusedPacket(ReasonCode.MESSAGE_RATE_TOO_HIGH, f"it sends more {what} a second than it may", limit)


class Arrivals:
    """Spreads the clients that connect over time: `most` a second, as many at once. 0 is no limit.

    `longest`: who would have to wait for longer is refused.
    """

    def __init__(self, most: int, longest: float) -> None:
        self._most, self._longest = most, longest
        self._next = float("-inf")

    def wait(self, now: float) -> float:
        """For how many seconds a client that has come now must wait. Raises RefusedPacket."""
        if not self._most:
            return 0.0
        at = max(self._next, now - 1.0) + 1.0 / self._most
        if at - now > self._longest:
            raise RefusedPacket(ReasonCode.CONNECTION_RATE_EXCEEDED, "too many clients connect", "most_connects")
        self._next = at
        return max(0.0, at - now)
