"""Messages of clients: where each goes, who may publish it, and the handshake of QoS 2."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence

from rsmq.gateway.connections.auth import CallbackFailed
from rsmq.gateway.connections.client_link import ClientLink
from rsmq.gateway.connections.context import Context
from rsmq.gateway.connections.counts import Counts
from rsmq.gateway.connections.ingest import STORED, Ingest, ReceivedIds, size_of
from rsmq.gateway.connections.rules import GatewayRules
from rsmq.gateway.fleet.message import from_packet
from rsmq.gateway.fleet.routes import Route
from rsmq.gateway.protocol import encode
from rsmq.gateway.protocol.packet import PUBACK, AckPacket, PendingAck, Publish, ReasonCode
from rsmq.gateway.protocol.topic_filter import is_within
from rsmq.model.log_names import name_in_log


class ClientPublishing:
    """The messages of one connection on their way to the server. `known`: those of QoS 2 that are not released.

    `will_topics`: the topic names of its will, and of older ones that were published when it began.
    """

    __slots__ = ("_context", "_noting", "_publisher", "_received", "_will_topics", "releases")

    def __init__(
        self, context: Context, publisher: ClientLink, life_ms: int, known: dict[int, str],
        will_topics: Collection[str] = (),
    ) -> None:  # fmt: skip
        self._context = context
        self._publisher = publisher
        self._will_topics = will_topics
        keys, batcher = context.fleet.inboxes.keys, context.fleet.inboxes.batcher
        both = (keys.session(publisher.client_id), keys.received(publisher.client_id))
        self._received = ReceivedIds(batcher, both, publisher.epoch, life_ms, known, publisher.fail)
        self._noting = 0
        """Bytes of messages of QoS 2 whose packet ids are being noted."""
        self.releases = 0
        """Those of messages of QoS 2 that are not answered yet."""

    def publish(self, message: Publish) -> None:
        """Store a message, or pass it on."""
        context, publisher = self._context, self._publisher
        number = len(message.payloads)
        context.counts["messages received"] += number
        reason = 0
        if not is_within(message.topic, context.rules.options.most_levels, context.rules.options.most_topic_bytes):
            reason = ReasonCode.TOPIC_NAME_INVALID
        elif not publisher.may("write", message.topic):
            reason = ReasonCode.NOT_AUTHORIZED
        if reason:
            name = ReasonCode(reason).name.lower()
            context.counts[f"refused: {name}"] += number
            about = f"client {name_in_log(publisher.client_id)}: {name_in_log(message.topic)}"
            context.counts.warn(f"messages are refused, {name}", about)
            if message.pending is not None:
                publisher.confirm(message.pending, (reason,) * number)
            return
        route = context.rules.routes.find(message.topic)
        if message.qos == 0:
            self._publish_unacknowledged(message, route)
        elif message.qos == 2:
            self._publish_once(message, route.target)
        else:
            target = context.rules.routes.target_of(route.target)
            context.ingest.store(message, publisher.client_id, target, publisher)

    def _publish_unacknowledged(self, message: Publish, route: Route) -> None:
        """A message of QoS 0. No Receive Maximum bounds how many wait for the server: what is too much is dropped.

        What has the topic name of the client's will is stored as that is: on two ways one could overtake the other.
        """
        context, publisher = self._context, self._publisher
        is_stored = route.is_explicit or message.topic in self._will_topics
        is_written = is_stored or message.retain
        if is_written and not context.ingest.has_room(len(message.payload)):
            context.counts.dropped("server too slow, QoS 0")
            is_written = False
        if is_stored:
            if is_written:
                target = context.rules.routes.target_of(route.target)
                context.ingest.store(message, publisher.client_id, target, publisher)
            return
        published = from_packet(message, publisher.client_id)
        if is_written:
            context.ingest.retain_unstored(published, publisher)
        context.unstored.publish(published)

    def _publish_once(self, message: Publish, name: str) -> None:
        """A message of QoS 2. Its token is noted first, so that a repetition is stored under the same one."""
        assert message.pending is not None
        received, packet_id = self._received, message.packet_id
        known = received.known.get(packet_id, "")
        if known.startswith(STORED):
            self._publisher.confirm(message.pending)
            return
        size = size_of(message)
        value = known or f"{name}:{self._context.ingest.next_token()}"
        target = self._context.rules.routes.target_of(value.partition(":")[0])

        def stored(reason: int) -> None:
            if received.known.get(packet_id) == value:  # it may be released already, or noted by a repetition
                received.note(packet_id, "" if reason >= 0x80 else STORED + value)

        def store() -> None:
            token = value.partition(":")[2]
            self._note(-min(size, self._noting))  # 0 if the connection has ended
            self._context.ingest.store(message, self._publisher.client_id, target, self._publisher, token, stored)

        self._note(size)
        received.note(packet_id, value, store)

    def _note(self, size: int) -> None:
        self._noting += size
        self._context.ingest.wait_for(size)

    def ended(self) -> None:
        """The connection has ended: packet ids that are not noted may never be."""
        self._note(-self._noting)

    def release(self, answer: AckPacket) -> None:
        """The client has released a QoS 2 message: answer when the server has forgotten it."""
        data = encode.ack(answer.kind, answer.packet_id, answer.reason, self._publisher.level)
        if answer.reason:
            self._publisher.send(data)
        else:
            self.releases += 1
            self._received.note(answer.packet_id, "", lambda: self._released(data))

    def _released(self, answer: bytes) -> None:
        self.releases -= 1
        self._publisher.send(answer)

    def __repr__(self) -> str:
        return f"<ClientPublishing of {self._publisher.client_id!r}>"


class ConfirmedWithoutConnection:
    """In place of a connection that has ended: `done` is set when its message is stored or refused."""

    def __init__(self) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def confirm(self, _pending: PendingAck, _reasons: Sequence[int] = ()) -> None:
        """It is stored, or refused for good."""
        if not self.done.done():
            self.done.set_result(None)

    def fail(self, error: Exception) -> None:
        """It is not known whether it is stored."""
        if not self.done.done():
            self.done.set_exception(error)


class WillPublisher:
    """Publishes the wills of clients, with the rights that they have then."""

    def __init__(self, rules: GatewayRules, counts: Counts, ingest: Ingest) -> None:
        self._rules = rules
        self._counts = counts
        self._ingest = ingest

    async def publish(self, client: str, user: str | None, message: Publish, token: str) -> None:
        """Publish the will of a client. Returns when it is stored, or refused for good.

        Repeated with the same token, it is stored once. That is why one of QoS 0 is stored, too.
        """
        try:
            is_allowed = self._rules.gatekeeper.allows(client, user, "write", message.topic)
        except CallbackFailed as error:
            self._counts["refused: will, callback"] += 1
            self._counts.warn("wills are not published", f"that of client {name_in_log(client)}: {error.text}")
            return
        if not is_allowed:
            self._counts["refused: will not authorized"] += 1
            return
        self._counts["wills published"] += 1
        sink, route = ConfirmedWithoutConnection(), self._rules.routes.find(message.topic)
        message.pending = PendingAck(PUBACK, [])
        self._ingest.store(message, client, self._rules.routes.target_of(route.target), sink, token)
        await sink.done
