"""One connection of an MQTT client: what its packets do, and how it begins and ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, Final

from rsmq.errors import BrokerError, BrokerUnavailable, OwnershipError, SessionLost
from rsmq.gateway.connections.admission import admit
from rsmq.gateway.connections.context import QUICK, RECHECK, Context, Transport, hang_up
from rsmq.gateway.connections.delivery import Delivery
from rsmq.gateway.connections.grant import capped, grant
from rsmq.gateway.connections.limits import ClientRates
from rsmq.gateway.connections.peer import Peer
from rsmq.gateway.connections.publishing import ClientPublishing
from rsmq.gateway.connections.subscribing import serve
from rsmq.gateway.fleet.inbox_reader import InboxReader
from rsmq.gateway.fleet.message import Published
from rsmq.gateway.fleet.sessions import SHARED, SLACK_MS, Ended
from rsmq.gateway.fleet.shares import has_shares
from rsmq.gateway.fleet.wills import pack, topic_of
from rsmq.gateway.protocol import encode, packet
from rsmq.gateway.protocol.machine import EARLY_BYTES, Machine, State
from rsmq.gateway.protocol.packet import PubAcks, Publish, ReasonCode, RefusedPacket
from rsmq.gateway.protocol.properties import Property
from rsmq.model.clock import to_ms
from rsmq.persistence.mqtt_clients import PUBLISHED
from rsmq.persistence.session import PAGE_BYTES

log = logging.getLogger("rsmq.gateway")

NONE: Final = b"NONE"
LARGEST: Final = 0xFFFFFFF


class ClientConnection:
    """The packets of one client against the server. The rules of the packets themselves are in `Machine`."""

    __slots__ = (
        "_at_eof", "_context", "_delivery", "_has_ended", "_is_reading", "_keep_alive", "_keeps_will", "_largest",
        "_loop", "_machine", "_outgoing", "_peer", "_publishing", "_rates", "_reader", "_transport", "client_id",
        "expiry", "heard", "inbound", "is_bridge", "is_closed", "level", "requests", "rights", "subscriptions", "user",
    )  # fmt: skip

    def __init__(self, context: Context, transport: Transport, peer: Peer) -> None:
        self._context, self._transport, self._peer = context, transport, peer
        self._machine = Machine(context.limits)
        self.inbound = self._machine.inbound
        self._loop = asyncio.get_running_loop()
        self._outgoing: list[bytes] = []
        self._largest = LARGEST
        self._is_reading = True
        self.is_closed = self._has_ended = self._at_eof = False
        self.client_id, self.user = "", None  # type: tuple[str, str | None]
        self.level = 0
        self.is_bridge = False
        self.subscriptions: dict[str, packet.Subscription] = {}
        self.heard = self._loop.time()
        self._keep_alive = self.expiry = 0
        self._keeps_will = True
        self._reader: InboxReader | None = None
        self._delivery: Delivery | None = None
        self._publishing: ClientPublishing | None = None
        self.requests: list[packet.Subscribe | packet.Unsubscribe] = []
        self.rights: dict[tuple[str, str], bool] = {}
        self._rates = ClientRates.of(context.options, context.limits.packet_size)
        context.wheel.add(self.heard + context.options.connect_timeout.total_seconds(), self._connect_deadline)

    # -- bytes -----------------------------------------------------------------------------------------------------

    def received(self, data: bytes) -> None:
        """Bytes have come."""
        if self.is_closed:
            return
        self.heard = self._loop.time()
        self._context.counts["bytes received"] += len(data)
        self._act(self._machine.feed(data), len(data))

    def _act(self, packets: list[packet.Packet], size: int = 0) -> None:
        """Act on packets, behind `size` bytes that have just come."""
        try:
            if self._rates is not None:
                self._rates.take(packets, size, self._loop.time())
            for each in packets:
                if self.is_closed:
                    return
                self._handle(each)
        except RefusedPacket as error:
            self._refuse(error)
            return
        if self._machine.error is not None:
            self._refuse(self._machine.error)
        elif self._machine.is_waiting and self._machine.held > EARLY_BYTES and self._is_reading:
            self._is_reading = False
            self._transport.pause_reading()

    def _resume(self) -> None:
        """The machine waits no more: act on what has waited."""
        if not self.is_closed:
            self._act(self._machine.resume())
            stays = self._is_reading or self._machine.is_waiting or self.is_closed or self._has_ended
            if not (stays or self._context.ingest.holds_back(self._resume)):
                self._is_reading = True
                self._transport.resume_reading()

    def send(self, *packets: bytes, size: int = 0) -> None:
        """Send packets, together with all others of this turn of the loop. `size`: of each, if several are joined."""
        if self.is_closed or self._has_ended or not packets or not packets[-1]:
            return
        if (size or max(map(len, packets))) > self._largest:
            self.close(ReasonCode.PACKET_TOO_LARGE, "an answer is larger than it allows")
            return
        if not self._outgoing:
            self._loop.call_soon(self._flush)
        self._outgoing += packets

    def _flush(self) -> None:
        if self._outgoing:
            data = self._outgoing[0] if len(self._outgoing) == 1 else b"".join(self._outgoing)
            self._outgoing.clear()
            self._context.counts["bytes sent"] += len(data)
            self._transport.write(data)
        if self._at_eof and not (self.is_closed or self._owes):
            self._transport.close()

    @property
    def _owes(self) -> bool:
        """Whether answers to what the client has sent are due."""
        releases = self._publishing is not None and self._publishing.releases > 0
        return releases or self._machine.owes or bool(self._outgoing)

    def pause_delivery(self, *, is_paused: bool) -> None:
        """Whether the client does not read: then its messages wait in the inbox."""
        if self._reader is not None:
            self._reader.is_paused = is_paused
            self._reader.turn()

    # -- packets ---------------------------------------------------------------------------------------------------

    def _handle(self, each: packet.Packet) -> None:
        if isinstance(each, Publish):
            assert self._publishing is not None
            self._publishing.publish(each)
            if self._is_reading and self._context.ingest.holds_back(self._resume):
                self._is_reading = False
                self._transport.pause_reading()
        elif isinstance(each, PubAcks):
            assert self._delivery is not None
            self._delivery.acks(each.packet_ids)
        elif isinstance(each, packet.AckPacket):
            assert self._publishing is not None
            assert self._delivery is not None
            if each.kind == packet.PUBREL:
                answer = self._machine.inbound.release(each.packet_id)
                self._publishing.release(answer)
            else:
                self._delivery.ack(each)
        elif isinstance(each, packet.Ping):
            self.send(encode.PINGRESP)
        elif isinstance(each, packet.Subscribe | packet.Unsubscribe):
            self.requests.append(each)
            if len(self.requests) == 1:
                self._context.spawn(serve(self._context, self))
        elif isinstance(each, packet.Connect):
            self._context.spawn(self._connect(each))
        elif isinstance(each, packet.Disconnect):
            if self.expiry and Property.SESSION_EXPIRY in each.properties:
                self.expiry = capped(each.properties[Property.SESSION_EXPIRY], self._context.options)
            self._keeps_will = each.reason != ReasonCode.SUCCESS
            self.close(ReasonCode.SUCCESS)

    def answered(self) -> None:
        """A request for subscriptions is answered: further ones may come."""
        self._machine.requests -= 1
        self._resume()

    def confirm(self, pending: packet.PendingAck, reasons: Sequence[int] = ()) -> None:
        """The messages of a packet are stored, or refused: send the acknowledgements that may leave now."""
        if self.is_closed:
            return
        if (
            self.level != packet.V5
            and (worst := max(reasons, default=0)) >= 0x80
            and worst != ReasonCode.NOT_AUTHORIZED
        ):
            self.close(ReasonCode(worst), "a message cannot be stored")
            return
        for ready in self._machine.inbound.confirm(pending, reasons):
            self.send(encode.acks(ready, self.level), size=encode.LONGEST_ACK)
        if self._machine.held:
            self._resume()

    def direct(self, message: Published, *, retain: bool, identifiers: tuple[int, ...]) -> None:
        """Send a message of QoS 0, which is in no inbox. A client that does not read misses it."""
        if self._transport.get_write_buffer_size() > self._context.options.write_buffer:
            self._context.counts["dropped: slow client, QoS 0"] += 1
            return
        assert self._delivery is not None
        self._delivery.direct(message, retain=retain, identifiers=identifiers)

    def may(self, access: Any, topic: str) -> bool:
        """Whether the client may publish to a topic name or read it. Answers are remembered."""
        return self._context.gatekeeper.remembers(self.rights, self.client_id, self.user, access, topic)

    # -- the beginning ---------------------------------------------------------------------------------------------

    async def _connect(self, request: packet.Connect) -> None:
        try:
            await self._begin(request)
        except RefusedPacket as error:
            self._refuse(error)
        except OwnershipError:
            self.close(ReasonCode.SESSION_TAKEN_OVER)
        except BrokerError as error:
            log.warning("a client cannot connect: %s", error)
            self.close(ReasonCode.SERVER_UNAVAILABLE)

    async def _begin(self, request: packet.Connect) -> None:
        context = self._context
        self.level, self.is_bridge = request.level, request.is_bridge
        granted = grant(request, context.options, context.limits)
        self.client_id, self.expiry, self._keep_alive = granted.client_id, granted.expiry, granted.keep_alive
        await admit(context, self, request, self._peer)
        if self.is_closed:
            return
        if self._keep_alive:
            context.wheel.add(self.heard, self._keep_alive_deadline)
        if (leaving := context.leaving.get(self.client_id)) is not None:
            await leaving.wait()
        try:
            present = await self._open(request)
        except BaseException:
            if self._reader is not None:
                self._reader.close()
                self._keeps_will = False
                if self.epoch:
                    context.sessions.close_later(self._ended(self.epoch))
            raise
        if self.is_closed:  # it has gone meanwhile
            self._keeps_will = False
            await context.sessions.closed(self._ended(self.epoch))
            return
        if (older := context.connections.get(self.client_id)) is not None:
            older.close(ReasonCode.SESSION_TAKEN_OVER, "the client has connected again")
        context.connections[self.client_id] = self
        for each in self.subscriptions.values():
            context.subscribe_locally(self, each)
        self.send(self._machine.accept(session_present=present, properties=granted.answer))
        context.counts["connects accepted"] += 1
        context.sessions.known += not present
        assert self._reader is not None
        context.sessions.resumed(self.client_id, self._reader.before)
        self._reader.start()
        self._resume()

    async def _open(self, request: packet.Connect) -> bool:
        """Take the inbox over, and the session with it. Returns whether there was one."""
        context, properties = self._context, request.properties
        asked = properties.get(Property.RECEIVE_MAXIMUM, packet.MOST_PACKET_IDS)
        self._largest = properties.get(Property.MAXIMUM_PACKET_SIZE, LARGEST)
        self._delivery = Delivery(
            self.send, context.now_ms, self._may_read, context.dropped, level=self.level, largest=self._largest,
            aliases=min(properties.get(Property.TOPIC_ALIAS_MAXIMUM, 0), context.options.topic_aliases),
            timings=context.timings,
        )  # fmt: skip
        self._reader = self._delivery.reader = InboxReader(
            context.inboxes, self.client_id, min(asked, context.options.window),
            page_bytes=min(context.options.write_buffer, PAGE_BYTES), on_letters=self._delivery.letters,
            on_received=self._delivery.received, on_end=self.fail, history=context.history,
        )  # fmt: skip
        life_ms = max(self.expiry * 1000, 3 * to_ms(context.inboxes.settings.inbox_poll)) + SLACK_MS
        clean = await self._reader.open(clean=request.clean_start, life_ms=life_ms)
        removed, found, own = NONE, list[packet.Subscription](), (self.client_id, self.epoch)
        noted = context.sessions.note(*own, self.expiry)  # in the same write as what follows
        if clean:
            removed = await context.registry.write(*own, ())
        else:
            found = await context.registry.claim(*own)
        await context.sessions.noted(noted)
        if removed == SHARED:
            await context.shares.pass_on(self.client_id)
        will = b"" if request.will is None else pack(request.will, self.user)
        present, known, wills = await self._reader.begin(
            clean=clean, expiry=self.expiry, has_removed=removed != NONE, will=will
        )
        will_topics = await self._publish_older(wills) if wills else set[str]()
        if request.will is not None:
            will_topics.add(request.will.topic)
        self._publishing = ClientPublishing(context, self, life_ms, known, will_topics)
        self._machine.inbound.received.update(dict.fromkeys(known))
        if present:
            self.subscriptions = {each.filter: each for each in found}
            if has_shares(found):
                await context.registry.write(*own, found)  # it is connected again
        elif found:  # the server has lost the session, but not its subscriptions
            await context.registry.write(*own, ())
        return present

    async def _publish_older(self, older: dict[str, bytes]) -> set[str]:
        """Publish the wills of older connections, before what this one publishes. Returns their topic names.

        Raises BrokerUnavailable if that is not possible now: later they would stand behind what this one publishes.
        """
        wills = self._context.sessions.wills
        due = [(epoch, self.client_id) for epoch in older if epoch != PUBLISHED.decode()]
        for epoch, _ in due:
            await wills.schedule(self.client_id, epoch, self._context.now_ms())
        if not await wills.publish(due):
            self._keeps_will = False  # its own one: the client is refused
            await self._context.sessions.closed(self._ended(self.epoch))
            raise BrokerUnavailable("the will of its last connection cannot be published yet")
        return {topic for raw in older.values() if (topic := topic_of(raw))}

    @property
    def epoch(self) -> str:
        """That of this connection: the server refuses its steps when the client has connected again."""
        return "" if self._reader is None else self._reader.epoch

    def _may_read(self, topic: str) -> bool:
        return not self._context.gatekeeper.checks_delivery or self.may("read", topic)

    # -- the end ---------------------------------------------------------------------------------------------------

    def _refuse(self, error: RefusedPacket) -> None:
        self._context.counts[f"refused: {error.name}"] += 1
        text = f"client {self.client_id!r} of {self._peer.address or 'unknown'}: {error.text}"
        self._context.refusals.warn(f"clients are refused, {error.name}", text)
        self.close(error.reason)

    def fail(self, error: Exception) -> None:
        """The connection has lost its session, or something that was accepted could not be stored: without an
        acknowledgement the client sends it again."""
        if self.is_closed:
            return
        if isinstance(error, OwnershipError) and not isinstance(error, SessionLost):
            self.close(ReasonCode.SESSION_TAKEN_OVER, "the client has connected elsewhere")
            return
        log.warning("client %r is disconnected: %s", self.client_id, error)
        self._context.counts["failed: server"] += 1
        self.close(ReasonCode.UNSPECIFIED_ERROR)

    def close(self, reason: ReasonCode, text: str = "") -> None:
        """End the connection, with the packet that says why."""
        if self.is_closed:
            return
        if text:
            log.info("client %r: %s", self.client_id, text)
        last = b"" if self._machine.state is State.CLOSED else self._machine.end(reason)
        self.send(last)
        self._flush()
        if not self._has_ended:
            hang_up(self._transport, lingers=bool(last) and self._is_reading and not self._at_eof)
        self.lost()

    def half_closed(self) -> bool:
        """The client sends nothing more, but may read. Returns whether answers are due, which are sent first."""
        self._at_eof = not self.is_closed and self._owes
        return self._at_eof

    def ended(self) -> None:
        """The connection is closed. If a DISCONNECT is in what it has sent before, and what waits for the server,
        all of that is acted on first. Without it, the client is going to send again what was not acknowledged."""
        last = self._machine.goodbye()
        if last is None:
            self.lost()
        else:
            self._has_ended, self._keeps_will = True, last.reason != ReasonCode.SUCCESS
            self._outgoing.clear()

    def lost(self) -> None:
        """The connection has ended, by whichever side."""
        if self.is_closed:
            return
        self.is_closed = True
        self.inbound.done()
        self._outgoing.clear()
        context = self._context
        context.counts["disconnects"] += 1
        if self.user is not None:
            context.users.remove(self.user)
        if context.connections.get(self.client_id) is self:
            del context.connections[self.client_id]
        for each in self.subscriptions.values():
            context.local.remove(each.filter, self)
        if self._reader is not None:
            self._reader.close()
            if self._publishing is not None:  # else the connect goes on, and ends what it has opened
                self._publishing.ended()
                context.leave(self._ended(self._reader.epoch), self._reader.settled)

    def _ended(self, epoch: str) -> Ended:
        shares = has_shares(self.subscriptions.values())
        return Ended(self.client_id, epoch, self.expiry, self._keeps_will, shares)

    def end_with_token(self, _now: float) -> float | None:
        self.close(ReasonCode.NOT_AUTHORIZED, "its token has ended")
        return None

    def _connect_deadline(self, _now: float) -> float | None:
        if self._machine.state in (State.NEW, State.CONNECTING) and not self.is_closed:
            self.close(ReasonCode.SERVER_BUSY, "CONNECT took too long")
        return None

    def _keep_alive_deadline(self, now: float) -> float | None:
        if self.is_closed:
            return None
        if self._machine.holds_back or not self._is_reading:
            self.heard = now  # what it has sent waits for this gateway
        elif now >= self.heard + QUICK * self._keep_alive:
            self.close(ReasonCode.KEEP_ALIVE_TIMEOUT, "nothing was heard for one and a half keep-alives")
        return None if self.is_closed else min(self.heard + QUICK * self._keep_alive, now + RECHECK)

    def poll(self) -> None:
        """Look into the inbox in case a ring was lost; this renews the session, too."""
        if self._reader is not None:
            self._reader.ring()

    def __repr__(self) -> str:
        return f"<ClientConnection {self.client_id!r} {self._machine.state.name}>"
