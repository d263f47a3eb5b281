"""What a client has published and waits to be confirmed: the order of its acknowledgements, and its open QoS 2 ids."""

from __future__ import annotations

from collections import deque

from rsmq.gateway.packet import PUBACK, PUBCOMP, PUBREC, Ack, PendingAck, Publish


class Inbound:
    """The messages of one client that are under way to the server. No I/O.

    Acknowledgements leave in the order of the messages, in whatever order these are stored. `received` are the ids of
    QoS 2 messages that the client has not released yet: its next PUBLISH with such an id is a repetition.
    """

    def __init__(self) -> None:
        self._pending: deque[PendingAck] = deque()
        self._of_qos_1 = 0
        self.received: set[int] = set()
        self.taken: set[int] = set()
        """Those of them that were published in this connection: only they count against the Receive Maximum."""

    @property
    def unconfirmed(self) -> int:
        """Messages whose acknowledgement has not left."""
        return len(self._pending)

    @property
    def count(self) -> int:
        """Messages that count against the Receive Maximum of the server."""
        return self._of_qos_1 + len(self.taken)

    def admit(self, message: Publish) -> None:
        """Note a message of QoS 1 or 2, whose acknowledgement is then pending."""
        if message.qos == 1:
            pending = PendingAck(PUBACK, message.packet_id)
            self._of_qos_1 += 1
        else:
            pending = PendingAck(PUBREC, message.packet_id, is_repeated=message.packet_id in self.received)
            self.received.add(message.packet_id)
            self.taken.add(message.packet_id)
        message.pending = pending
        self._pending.append(pending)

    def confirm(self, pending: PendingAck, reason: int = 0) -> list[Ack]:
        """A message is stored, or refused for this reason. Returns the acknowledgements that may leave now."""
        pending.is_done, pending.reason = True, reason
        ready = list[Ack]()
        while self._pending and self._pending[0].is_done:
            done = self._pending.popleft()
            if done.kind == PUBACK:
                self._of_qos_1 -= 1
            elif done.reason >= 0x80:
                self.received.discard(done.packet_id)  # refused: the id is free again
                self.taken.discard(done.packet_id)
            ready.append(Ack(done.kind, done.packet_id, done.reason))
        return ready

    def release(self, packet_id: int) -> Ack:
        """The client has released a QoS 2 message: its id is free again. Returns the PUBCOMP."""
        self.taken.discard(packet_id)
        if packet_id in self.received:
            self.received.discard(packet_id)
            return Ack(PUBCOMP, packet_id)
        return Ack(PUBCOMP, packet_id, 0x92)

    def __repr__(self) -> str:
        return f"<Inbound unconfirmed={len(self._pending)} received={len(self.received)}>"
