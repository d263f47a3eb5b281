"""Messages of a client that wait to be confirmed: the order of its acknowledgements, and its open QoS 2 ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rsmq.gateway.protocol.packet import PUBACK, PUBCOMP, PUBREC, AckPacket, PendingAck, Publish


class Inbound:
    """The messages of one client that are under way to the server. No I/O.

    Acknowledgements leave in the order of the messages, in whatever order these are stored. `received` are the ids of
    QoS 2 messages that the client has not released yet: its next PUBLISH with such an id is a repetition.
    """

    __slots__ = ("_of_qos_1", "_pending", "received", "taken", "unconfirmed", "when_done")

    def __init__(self) -> None:
        self._pending: list[PendingAck] = []  # an empty deque takes ten times the memory
        self.unconfirmed = 0
        self._of_qos_1 = 0
        """Messages whose acknowledgement has not left, and those of QoS 1 among them."""
        self.received: dict[int, None] = {}  # an empty set takes three times the memory
        self.taken: dict[int, None] = {}
        """Those of them that were published in this connection: only they count against the Receive Maximum."""

        self.when_done: Callable[[], None] | None = None
        """Is called once, when all messages that are under way are confirmed."""

    @property
    def count(self) -> int:
        """Messages that count against the Receive Maximum of the server."""
        return self._of_qos_1 + len(self.taken)

    def admit(self, message: Publish) -> None:
        """Note a message of QoS 1 or 2, whose acknowledgement is then pending."""
        number = len(message.packet_ids)
        if message.qos == 1:
            pending = PendingAck(PUBACK, message.packet_ids)
            self._of_qos_1 += number
        else:
            packet_id = message.packet_id
            pending = PendingAck(PUBREC, message.packet_ids, is_repeated=packet_id in self.received)
            self.received[packet_id] = self.taken[packet_id] = None
        message.pending = pending
        self._pending.append(pending)
        self.unconfirmed += number

    def confirm(self, pending: PendingAck, reasons: Sequence[int] = ()) -> list[PendingAck]:
        """All messages of a packet are stored, or refused for these reasons. Returns what may be acknowledged now."""
        pending.is_done = True
        pending.reasons = reasons
        ready = list[PendingAck]()
        while self._pending and self._pending[0].is_done:
            done = self._pending.pop(0)
            number = len(done.packet_ids)
            self.unconfirmed -= number
            if done.kind == PUBACK:
                self._of_qos_1 -= number
            elif done.reason >= 0x80:
                self.received.pop(done.packet_id, None)  # refused: the id is free again
                self.taken.pop(done.packet_id, None)
            ready.append(done)
        if self.when_done is not None and not self._pending:
            self.done()
        return ready

    def done(self) -> None:
        """All messages are confirmed, or the connection has ended."""
        when_done, self.when_done = self.when_done, None
        if when_done is not None:
            when_done()

    def release(self, packet_id: int) -> AckPacket:
        """The client has released a QoS 2 message: its id is free again. Returns the PUBCOMP."""
        self.taken.pop(packet_id, None)
        if packet_id in self.received:
            del self.received[packet_id]
            return AckPacket(PUBCOMP, packet_id)
        return AckPacket(PUBCOMP, packet_id, 0x92)

    def __repr__(self) -> str:
        return f"<Inbound unconfirmed={self.unconfirmed} received={len(self.received)}>"
