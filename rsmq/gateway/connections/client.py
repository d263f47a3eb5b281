"""One connection of an MQTT client: what its packets do, and how it begins and ends."""

from __future__ import annotations

import logging
from typing import Final

from rsmq.errors import BrokerError, BrokerUnavailable, OwnershipError, TooLarge
from rsmq.gateway.connections.admission import admit
from rsmq.gateway.connections.client_link import LARGEST, ClientLink, Transport
from rsmq.gateway.connections.clients import RECHECK
from rsmq.gateway.connections.context import Context
from rsmq.gateway.connections.delivery import Delivery
from rsmq.gateway.connections.grant import capped, grant
from rsmq.gateway.connections.limits import ClientRates
from rsmq.gateway.connections.peer import Peer
from rsmq.gateway.connections.publishing import ClientPublishing
from rsmq.gateway.connections.subscribing import serve
from rsmq.gateway.fleet.inbox_reader import InboxReader
from rsmq.gateway.fleet.sessions import NONE, SHARED, SLACK_MS, Ended
from rsmq.gateway.fleet.shares import has_shares
from rsmq.gateway.fleet.wills import pack, topic_of
from rsmq.gateway.protocol import encode, packet
from rsmq.gateway.protocol.machine import EARLY_BYTES, State
from rsmq.gateway.protocol.packet import PubAcks, Publish, ReasonCode, RefusedPacket
from rsmq.gateway.protocol.properties import Property
from rsmq.model.clock import to_ms
from rsmq.persistence.inbox_cursor import PAGE_BYTES
from rsmq.persistence.mqtt_clients import PUBLISHED, MqttConnection

log = logging.getLogger("rsmq.gateway")

QUICK: Final = 1.5
"""A client is given up after so many keep-alives."""


class ClientConnection(ClientLink):
    """Acts on the packets of one client. The rules of the packets themselves are in `Machine`."""

    __slots__ = ("_context", "_keep_alive", "_keeps_will", "_publishing", "_rates", "expiry", "heard")

    def __init__(self, context: Context, transport: Transport, peer: Peer) -> None:
        super().__init__(context.rules, context.counts, transport, peer)
        self._context = context
        options = context.rules.options
        self.heard = self._loop.time()
        """When the last bytes came."""
        self._keep_alive = 0
        """In seconds; 0 is none."""
        self.expiry = 0
        """Of the session, in seconds after the connection."""
        self._keeps_will = True
        """The client has not said goodbye."""
        self._publishing: ClientPublishing | None = None
        self._rates = ClientRates.of(options, context.rules.limits.packet_size)
        context.clients.wheel.add_after(options.connect_timeout.total_seconds(), self._connect_deadline)

    # -- bytes -----------------------------------------------------------------------------------------------------

    def received(self, data: bytes) -> None:
        """Bytes have come."""
        if self.is_closed:
            return
        self.heard = self._loop.time()
        self._counts["bytes received"] += len(data)
        if self._trace is not None:
            self._trace.came(data)
            if self._trace.has_ended:
                self._trace = None
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
            self.refuse(error)
            return
        if self._machine.error is not None:
            self.refuse(self._machine.error)
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
            self._largest = each.properties.get(Property.MAXIMUM_PACKET_SIZE, LARGEST)
            self._context.spawn(self._connect(each))
        elif isinstance(each, packet.Disconnect):
            if self.expiry and Property.SESSION_EXPIRY in each.properties:
                self.expiry = capped(each.properties[Property.SESSION_EXPIRY], self._rules.options)
            self._keeps_will = each.reason != ReasonCode.SUCCESS
            self.close(ReasonCode.SUCCESS)

    # -- the beginning ---------------------------------------------------------------------------------------------

    async def _connect(self, request: packet.Connect) -> None:
        try:
            await self._begin(request)
        except RefusedPacket as error:
            self.refuse(error)
        except OwnershipError:
            self.close(ReasonCode.SESSION_TAKEN_OVER)
        except BrokerError as error:
            log.warning("a client cannot connect: %s", error)
            self.close(ReasonCode.SERVER_UNAVAILABLE)

    async def _begin(self, request: packet.Connect) -> None:
        context = self._context
        self.level = request.level
        self.is_bridge = request.is_bridge
        granted = grant(request, context.rules.options, context.rules.limits)
        self.client_id = granted.client_id
        self.expiry = granted.expiry
        self._keep_alive = granted.keep_alive
        if context.clients.watches and (watches := context.clients.watches.of(self.client_id)):
            self.watch(watches)
            assert self._trace is not None
            self._trace.connects(request)
        await admit(context, self, request, self._peer)
        if self.is_closed:
            return
        if self._keep_alive:
            context.clients.wheel.add(self.heard, self._keep_alive_deadline)
        await context.fleet.sessions.left(self.client_id)
        try:
            present = await self._open(request)
        except BaseException:
            if self._reader is not None:
                self._reader.close()
                self._keeps_will = False
                if self.epoch:
                    context.fleet.sessions.close_later(self._ended(self.epoch))
            raise
        if self.is_closed:  # it has gone meanwhile
            self._keeps_will = False
            await context.fleet.sessions.closed(self._ended(self.epoch))
            return
        context.clients.enter(self)
        self.send(self._machine.accept(session_present=present, properties=granted.answer))
        context.counts["connects accepted"] += 1
        context.fleet.sessions.began(is_new=not present)
        assert self._reader is not None
        context.fleet.sessions.resumed(self.client_id, self._reader.before)
        self._reader.start()
        self._resume()

    async def _open(self, request: packet.Connect) -> bool:
        """Take the inbox over, and the session with it. Returns whether there was one."""
        context, properties = self._context, request.properties
        asked = properties.get(Property.RECEIVE_MAXIMUM, packet.MOST_PACKET_IDS)
        self._delivery = Delivery(
            self.send, context.fleet.clock.now_ms, self._may_read, context.counts.dropped,
            level=self.level, largest=self._largest,
            aliases=min(properties.get(Property.TOPIC_ALIAS_MAXIMUM, 0), context.rules.options.topic_aliases),
            timings=context.timings, encoding=context.fleet.inboxes.encoding, hold=self.hold,
        )  # fmt: skip
        self._reader = self._delivery.reader = InboxReader(
            context.fleet.inboxes, self.client_id, min(asked, context.rules.options.window),
            page_bytes=min(context.rules.options.write_buffer, PAGE_BYTES), on_letters=self.letters,
            on_received=self._delivery.received, on_end=self.fail, history=context.clients.history,
            acks=context.fleet.acks,
        )  # fmt: skip
        life_ms = max(self.expiry * 1000, 3 * to_ms(context.fleet.inboxes.settings.inbox_poll)) + SLACK_MS
        clean = await self._reader.open(clean=request.clean_start, life_ms=life_ms)
        removed, found, own = NONE, list[packet.Subscription](), (self.client_id, self.epoch)
        said = MqttConnection(self.address, self.user, self.level, self.is_bridge, int(self._keep_alive)).packed()
        noted = context.fleet.sessions.note(*own, self.expiry, said)  # in the same write as what follows
        if self._reader.is_new:
            removed = await context.fleet.registry.begin(*own)
        else:
            found = await context.fleet.registry.claim(*own)
        await context.fleet.sessions.noted(noted)
        # without subscriptions: the gateway that ends the last session may not have passed its letters on yet, or has
        # died in the middle of a clean start
        if self._reader.is_new and removed in (SHARED, NONE) and self._reader.leftover:
            await context.fleet.shares.pass_on(self.client_id)
        try:
            will = b"" if request.will is None else pack(request.will, self.user, context.fleet.inboxes.encoding)
        except TooLarge as error:
            raise RefusedPacket(ReasonCode.PACKET_TOO_LARGE, f"its will: {error}", "will") from None
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
                await context.fleet.registry.write(*own, found)  # it is connected again
        return present

    async def _publish_older(self, older: dict[str, bytes]) -> set[str]:
        """Publish the wills of older connections, before what this one publishes. Returns their topic names.

        Raises BrokerUnavailable if that is not possible now: later they would stand behind what this one publishes.
        """
        fleet = self._context.fleet
        due = [(epoch, self.client_id) for epoch in older if epoch != PUBLISHED.decode()]
        for epoch, _ in due:
            await fleet.wills.schedule(self.client_id, epoch, fleet.clock.now_ms())
        if not await fleet.wills.publish(due):
            self._keeps_will = False  # its own one: the client is refused
            await fleet.sessions.closed(self._ended(self.epoch))
            raise BrokerUnavailable("the will of its last connection cannot be published yet")
        return {topic for raw in older.values() if (topic := topic_of(raw))}

    # -- the end ---------------------------------------------------------------------------------------------------

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
            self._has_ended = True
            self._keeps_will = last.reason != ReasonCode.SUCCESS
            self._go_on()
            self._outgoing.clear()

    def lost(self) -> None:
        """The connection has ended, by whichever side."""
        if self.is_closed:
            return
        self.is_closed = True
        self.inbound.done()
        self._go_on()
        self._outgoing.clear()
        context = self._context
        context.counts["disconnects"] += 1
        self.hold("")
        context.clients.leave(self)
        if self._reader is not None:
            self._reader.close()
            if self._publishing is not None:  # else the connect goes on, and ends what it has opened
                self._publishing.ended()
                context.fleet.sessions.leave(self._ended(self._reader.epoch), self._reader.settled)

    def _ended(self, epoch: str) -> Ended:
        shares = has_shares(self.subscriptions.values())
        return Ended(self.client_id, epoch, self.expiry, self._keeps_will, shares)

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

    @property
    def _owes(self) -> bool:
        releases = self._publishing is not None and self._publishing.releases > 0
        return releases or super()._owes
