"""What a client publishes: where it goes, who may, and the handshake of QoS 2."""

from __future__ import annotations

from typing import Protocol

from rsmq.gateway import encode
from rsmq.gateway.auth import Access
from rsmq.gateway.context import Context
from rsmq.gateway.ingest import STORED, ReceivedIds
from rsmq.gateway.message import Published, from_packet
from rsmq.gateway.packet import Ack, PendingAck, Publish, Reason, Will
from rsmq.gateway.topic_filter import MOST_LEVELS, levels_of


class Publisher(Protocol):
    """The connection of the client."""

    client_id: str
    level: int

    def confirm(self, pending: PendingAck, reason: int = 0) -> None: ...
    def fail(self, error: Exception) -> None: ...
    def send(self, data: bytes) -> None: ...
    def may(self, access: Access, topic: str) -> bool: ...


class Publishing:
    """The messages of one connection on their way to the server."""

    def __init__(self, context: Context, publisher: Publisher, received: ReceivedIds) -> None:
        self._context, self._publisher, self._received = context, publisher, received

    def publish(self, message: Publish) -> None:
        """Store a message, or pass it on."""
        context, publisher = self._context, self._publisher
        context.counts["messages received"] += 1
        reason = 0
        if levels_of(message.topic) > MOST_LEVELS:
            reason = Reason.TOPIC_NAME_INVALID
        elif not publisher.may("write", message.topic):
            reason = Reason.NOT_AUTHORIZED
        if reason:
            context.counts[f"refused: {Reason(reason).name.lower()}"] += 1
            if message.pending is not None:
                publisher.confirm(message.pending, reason)
            return
        route = context.routes.find(message.topic)
        if message.qos == 0 and not route.is_explicit:
            published = from_packet(message, publisher.client_id)
            if message.retain:
                context.ingest.retain_unstored(published, publisher)
            context.broadcast(published)
        elif message.qos == 2:
            self._publish_once(message, route.topic)
        else:
            target = context.routes.target_of(route.topic)
            context.ingest.store(message, publisher.client_id, target, publisher)

    def _publish_once(self, message: Publish, topic: str) -> None:
        """A message of QoS 2. Its token is noted first, so that a repetition is stored under the same one."""
        assert message.pending is not None
        received, packet_id = self._received, message.packet_id
        known = received.known.get(packet_id, "")
        if known.startswith(STORED):
            self._publisher.confirm(message.pending)
            return
        value = known or f"{topic}:{self._context.ingest.next_token()}"
        target = self._context.routes.target_of(value.partition(":")[0])

        def stored(reason: int) -> None:
            if received.known.get(packet_id) == value:  # it may be released already, or noted by a repetition
                received.note(packet_id, "" if reason >= 0x80 else STORED + value)

        def store() -> None:
            token = value.partition(":")[2]
            self._context.ingest.store(message, self._publisher.client_id, target, self._publisher, token, stored)

        received.note(packet_id, value, store)

    def release(self, answer: Ack) -> None:
        """The client has released a QoS 2 message: answer when the server has forgotten it."""
        data = encode.ack(answer.kind, answer.packet_id, answer.reason, self._publisher.level)
        if answer.reason:
            self._publisher.send(data)
        else:
            self._received.note(answer.packet_id, "", lambda: self._publisher.send(data))

    def __repr__(self) -> str:
        return f"<Publishing of {self._publisher.client_id!r}>"


class NoWaiter:
    """In place of a connection that has ended: its will is not acknowledged to anyone."""

    def confirm(self, _pending: PendingAck, _reason: int = 0) -> None:
        """Nothing waits for it."""

    def fail(self, _error: Exception) -> None:
        """Nothing waits for it."""


def publish_will(context: Context, client: str, user: str | None, will: Will) -> None:
    """Publish the will of a client, with the rights that it has now."""
    if not context.gatekeeper.allows(client, user, "write", will.topic):
        context.counts["refused: will not authorized"] += 1
        return
    message = Publish(
        will.topic, will.payload, will.qos, retain=will.retain, properties=will.properties, forwarded=will.forwarded
    )
    context.counts["wills published"] += 1
    route = context.routes.find(will.topic)
    if will.qos == 0 and not route.is_explicit:
        published: Published = from_packet(message, client)
        if will.retain:
            context.ingest.retain_unstored(published, NoWaiter())
        context.broadcast(published)
        return
    context.ingest.store(message, client, context.routes.target_of(route.topic), NoWaiter())
