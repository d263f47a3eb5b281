"""Letters of an inbox as PUBLISH packets of one connection, and the client's acknowledgements of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from rsmq.errors import CannotDecode, Malformed
from rsmq.gateway.fleet.inbox_reader import InboxReader
from rsmq.gateway.fleet.message import Published, Timings, identifiers_of
from rsmq.gateway.protocol import encode, packet
from rsmq.gateway.protocol.packet import AckPacket, ProtocolError
from rsmq.gateway.protocol.properties import Property
from rsmq.model.encoding import NO_CODECS, Encoding
from rsmq.persistence.letter import (
    EXPIRES,
    PACKET_IDS,
    RETAIN,
    STAMP,
    MqttLetter,
    ms_left,
    packet_id_of,
    read_mqtt,
)

PUBLISHED, RECEIVED, RELEASED = "published", "received", "released"
"""A letter of QoS 2: sent; its PUBREC has come; its PUBREL was sent."""
ALIAS: Final = bytes((Property.TOPIC_ALIAS,))
NO_NAME: Final = "rsmq"
"""The topic name of a letter that was sent without one."""


class Alike(NamedTuple):
    """The common parts of letters from one client by one topic name, and of the packets for them.

    `front`: the envelope from its stamp to the payload. `size`: of the whole envelope. `start` and `middle`: the packet
    before and behind its packet id.
    """

    front: bytes
    size: int
    start: bytes
    middle: bytes


NOTHING: Final = Alike(b"", -1, b"", b"")


def alike_of(letter: MqttLetter, envelope: bytes, data: bytes) -> Alike:
    """How to send letters that differ from this one in nothing but the payload, whose packet is `data`."""
    if letter.flags & (3 | EXPIRES) != 1 or letter.binding is not None:
        return NOTHING  # each has a state, a lifetime, or an encoding of its own
    at = 2
    while data[at - 1] & 128:
        at += 1
    at += 2 + (data[at] << 8 | data[at + 1])
    size = len(letter.data)
    return Alike(envelope[STAMP : len(envelope) - size], len(envelope), data[:at], data[at + 2 : len(data) - size])


class StopAt(Exception):
    """A letter that this process cannot decode: it has no such key. The letters behind it wait, too."""

    def __init__(self, seq: int, needs: str) -> None:
        super().__init__(needs)
        self.seq = seq
        self.needs = needs


class Delivery:
    """The letters that are out at a client. `counts` gets a letter that was dropped, by reason.

    A PUBREL leaves when the server has noted the PUBREC: a message that the client has released must not come again.
    """

    __slots__ = (
        "_aliases", "_dropped", "_encoding", "_hold", "_largest", "_level", "_may_read", "_most_aliases", "_needs",
        "_now_ms", "_send", "_since_ms", "_states", "_timings", "reader",
    )  # fmt: skip

    def __init__(
        self,
        send: Callable[..., None],
        now_ms: Callable[[], int],
        may_read: Callable[[str], bool],
        dropped: Callable[[str], None],
        *,
        level: int,
        largest: int,
        aliases: int = 0,
        timings: Timings | None = None,
        encoding: Encoding = NO_CODECS,
        hold: Callable[[str], None] | None = None,
    ) -> None:
        """`hold` is called with what a letter needs, such as `key k7`, if it waits for that, and with nothing when none
        waits any more."""
        self._encoding = encoding
        self._hold = hold
        self._needs = ""
        self._send = send
        self._now_ms = now_ms
        self._may_read = may_read
        self._dropped = dropped
        self._level = level
        self._largest = largest
        self._most_aliases = aliases
        self._timings = timings
        self._since_ms = now_ms()
        self._aliases: dict[str, int] = {}
        self._states: dict[int, str] = {}
        self.reader: InboxReader | None = None

    # -- out -------------------------------------------------------------------------------------------------------

    def letters(self, seqs: Sequence[int], envelopes: Sequence[bytes], sent: int) -> int:
        """Send letters, or what their handshakes need next. Those up to the seq `sent` were sent before.

        Returns how many. It stops at one that is encoded in a way that this process cannot undo: that one and those
        behind it have to wait.
        """
        packets, needs = list[bytes](), ""
        try:
            self._add(packets, seqs, envelopes, sent)
        except StopAt as stop:
            seqs, needs = seqs[: seqs.index(stop.seq)], stop.needs
        self._send(*packets)
        if needs != self._needs and self._hold is not None:
            self._hold(needs)
        self._needs = needs
        return len(seqs)

    def _add(self, packets: list[bytes], seqs: Sequence[int], envelopes: Sequence[bytes], sent: int) -> None:
        """Add the packets of letters. Raises StopAt."""
        aliases, timings = len(self._aliases), self._timings
        front, size, start, middle = NOTHING
        data_at = STAMP
        for seq, envelope in zip(seqs, envelopes, strict=True):
            is_redelivered = seq <= sent
            if len(envelope) == size and not is_redelivered and envelope.startswith(front, STAMP):
                packet_id = (seq - 1) % PACKET_IDS + 1
                packets.append(start + packet_id.to_bytes(2, "big") + middle + envelope[data_at:])
            elif (letter := self._letter(packets, seq, envelope, is_redelivered=is_redelivered)) is not None:
                if seq != seqs[-1] and not is_redelivered and len(self._aliases) == aliases:
                    front, size, start, middle = alike_of(letter, envelope, packets[-1])
                    data_at = STAMP + len(front)
                aliases = len(self._aliases)
            else:
                continue
            if timings is not None and not is_redelivered:
                stored_ms = int.from_bytes(envelope[1:7], "big")
                if stored_ms >= self._since_ms:  # what has waited for the client says nothing about the way
                    timings.delivered(max(0, self._now_ms() - stored_ms) / 1000)

    def _letter(self, packets: list[bytes], seq: int, envelope: bytes, *, is_redelivered: bool) -> MqttLetter | None:
        """Add the packet for one letter, and return the letter if it is sent. Raises StopAt."""
        packet_id = packet_id_of(seq)
        if not envelope:
            self._states[packet_id] = RELEASED
            packets.append(encode.ack(packet.PUBREL, packet_id, 0, self._level))
            return None
        try:
            letter = read_mqtt(envelope)
            if letter.binding is not None:
                letter = letter._replace(data=self._encoding.undo(letter.data, letter.binding))
            data = self._encode(letter, envelope, packet_id, is_redelivered=is_redelivered)
        except CannotDecode as error:
            raise StopAt(seq, error.needs) from None
        except (Malformed, ValueError):
            letter, data = None, None
            self._dropped("malformed letter")
        assert self.reader is not None
        if data is None or letter is None:
            self.reader.ack(packet_id)
            return None
        packets.append(data)
        qos = letter.flags & 3
        if qos == 0:
            self.reader.ack(packet_id)
        elif qos == 2:
            self._states[packet_id] = PUBLISHED
        return letter

    def _encode(self, letter: MqttLetter, envelope: bytes, packet_id: int, *, is_redelivered: bool) -> bytes | None:
        """The packet, or None for a letter that this client does not get."""
        topic = letter.topic or NO_NAME
        if "+" in topic or "#" in topic or "\0" in topic:
            self._dropped("topic name with a wildcard")
            return None
        if not self._may_read(topic):
            self._dropped("not authorized to read")
            return None
        properties = letter.properties
        if letter.flags & EXPIRES:
            left = max(0, -(-ms_left(envelope, self._now_ms()) // 1000))
            if not left and not is_redelivered:  # what has been sent is finished
                self._dropped("expired")
                return None
            properties = bytes((Property.MESSAGE_EXPIRY,)) + left.to_bytes(4, "big") + properties
        qos = letter.flags & 3
        return self._packet(
            topic, letter.data, qos, packet_id, properties, retain=bool(letter.flags & RETAIN),
            dup=is_redelivered and qos > 0,
        )  # fmt: skip

    def _packet(
        self, topic: str, payload: bytes, qos: int, packet_id: int, properties: bytes, *, retain: bool, dup: bool
    ) -> bytes | None:
        """The packet, or None if it is too large. The first topic names of a connection get an alias, if it wants."""
        alias = self._aliases.get(topic)
        if alias is not None:
            short = ALIAS + alias.to_bytes(2, "big") + properties
            data = encode.publish("", payload, qos, packet_id, self._level, retain=retain, dup=dup, properties=short)
        else:
            data = encode.publish(
                topic, payload, qos, packet_id, self._level, retain=retain, dup=dup, properties=properties
            )
            alias = len(self._aliases) + 1
            if alias <= self._most_aliases:
                longer = ALIAS + alias.to_bytes(2, "big") + properties
                found = encode.publish(
                    topic, payload, qos, packet_id, self._level, retain=retain, dup=dup, properties=longer
                )
                if len(found) <= self._largest:
                    self._aliases[topic], data = alias, found
        if len(data) > self._largest:
            self._dropped("larger than the client allows")
            return None
        return data

    def direct(self, message: Published, *, retain: bool, identifiers: tuple[int, ...]) -> None:
        """Send a message of QoS 0 that is in no inbox."""
        if not self._may_read(message.topic):
            self._dropped("not authorized to read")
            return
        properties = message.forwarded + identifiers_of(identifiers)
        if message.expiry is not None:
            properties = bytes((Property.MESSAGE_EXPIRY,)) + message.expiry.to_bytes(4, "big") + properties
        data = self._packet(message.topic, message.payload, 0, 0, properties, retain=retain, dup=False)
        if data is not None:
            self._send(data)

    def received(self, packet_ids: list[int]) -> None:
        """The server has noted that the client has these letters: release them, in the order of their PUBRECs."""
        for packet_id in packet_ids:
            self._states[packet_id] = RELEASED
            self._send(encode.ack(packet.PUBREL, packet_id, 0, self._level))

    # -- in --------------------------------------------------------------------------------------------------------

    def acks(self, packet_ids: list[int]) -> None:
        """PUBACKs of the client, as `ack` takes them."""
        reader, states = self.reader, self._states
        assert reader is not None
        if states:
            for at, packet_id in enumerate(packet_ids):
                if packet_id in states:
                    reader.ack(*packet_ids[:at])
                    raise ProtocolError("a PUBACK for a message of QoS 2")
        reader.ack(*packet_ids)

    def ack(self, ack: AckPacket) -> None:
        """A PUBACK, PUBREC or PUBCOMP of the client. Raises ProtocolError for one that does not fit its letter."""
        packet_id, reader = ack.packet_id, self.reader
        assert reader is not None
        state = self._states.get(packet_id)
        is_out = packet_id in reader.out
        if ack.kind == packet.PUBACK:
            self.acks([packet_id])
        elif ack.kind == packet.PUBREC:
            self._pubrec(ack, state, is_out=is_out)
        elif state == RELEASED:
            del self._states[packet_id]
            reader.ack(packet_id)
        elif is_out:
            raise ProtocolError("a PUBCOMP for a message that was not released")

    def _pubrec(self, ack: AckPacket, state: str | None, *, is_out: bool) -> None:
        assert self.reader is not None
        if state is None:
            if is_out:
                raise ProtocolError("a PUBREC for a message of QoS 1")
            if ack.reason < 0x80:  # behind an error comes no PUBREL
                self._send(encode.ack(packet.PUBREL, ack.packet_id, 0x92, self._level))
        elif ack.reason >= 0x80:
            del self._states[ack.packet_id]
            self.reader.ack(ack.packet_id)
        elif state == PUBLISHED:
            self._states[ack.packet_id] = RECEIVED
            self.reader.receive(ack.packet_id)
        elif state == RELEASED:
            self._send(encode.ack(packet.PUBREL, ack.packet_id, 0, self._level))

    def __repr__(self) -> str:
        return f"<Delivery handshakes={len(self._states)}>"
