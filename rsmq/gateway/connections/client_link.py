"""The connection of a client as others use it: who it is, and what is sent to it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Final, Protocol

from rsmq.errors import OwnershipError, SessionLost
from rsmq.gateway.connections.auth import Access, CallbackFailed
from rsmq.gateway.connections.counts import Counts
from rsmq.gateway.connections.delivery import Delivery
from rsmq.gateway.connections.peer import Peer
from rsmq.gateway.connections.rules import GatewayRules
from rsmq.gateway.connections.tracing import ClientTrace, Watch
from rsmq.gateway.fleet.inbox_reader import InboxReader
from rsmq.gateway.fleet.message import Published
from rsmq.gateway.protocol import encode, packet
from rsmq.gateway.protocol.machine import Machine, State
from rsmq.gateway.protocol.packet import ReasonCode, RefusedPacket
from rsmq.model.log_names import name_in_log, text_in_log
from rsmq.model.log_throttle import ThrottledLog

log = logging.getLogger("rsmq.gateway")
throttled_log = ThrottledLog(log)
"""A line for a client and ten seconds: two devices with one client id throw each other out without end."""

LINGER: Final = 2.0
"""Seconds in which a client may read why its connection ends."""
LARGEST: Final = 0xFFFFFFF


class Transport(Protocol):
    """The socket, as far as a connection needs it."""

    def write(self, data: bytes, /) -> None: ...
    def close(self) -> None: ...
    def abort(self) -> None: ...
    def can_write_eof(self) -> bool: ...
    def write_eof(self) -> None: ...
    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...
    def get_write_buffer_size(self) -> int: ...


def hang_up(transport: Transport, *, lingers: bool) -> None:
    """Close a connection. One that `lingers`, because its last packet says why, when the client has closed its side,
    or soon: bytes of the client that are not read would reset the connection, and it would lose that packet."""
    if not lingers or not transport.can_write_eof():
        transport.close()
        return
    try:
        transport.write_eof()
    except OSError:  # the client has reset the connection, which the event loop has not seen yet
        transport.abort()
    else:
        asyncio.get_running_loop().call_later(LINGER, transport.abort)


class ClientLink:
    """The connection of a client as others use it: who it is, and what is sent to it.

    `ClientConnection` acts on what the client sends.
    """

    __slots__ = (
        "_at_eof", "_counts", "_delivery", "_has_ended", "_is_reading", "_largest", "_loop", "_machine", "_outgoing",
        "_peer", "_reader", "_rules", "_stuck", "_trace", "_transport", "client_id", "inbound", "is_bridge",
        "is_closed", "level", "needs", "requests", "rights", "subscriptions", "user",
    )  # fmt: skip

    def __init__(self, rules: GatewayRules, counts: Counts, transport: Transport, peer: Peer) -> None:
        self._rules = rules
        self._counts = counts
        self._transport = transport
        self._peer = peer
        self._loop = asyncio.get_running_loop()
        self._machine = Machine(rules.limits)
        self.inbound = self._machine.inbound
        self._outgoing: list[bytes] = []
        self._largest = LARGEST
        """Bytes of a packet that the client takes."""
        self._is_reading = True
        """Whether the socket is read."""
        self._at_eof = False
        """The client sends nothing more, but may read."""
        self._has_ended = False
        """The socket is closed: what has come before is acted on still."""
        self.is_closed = False
        self.client_id = ""
        self.user: str | None = None
        self.level = 0
        """Of the protocol; 0 before CONNECT."""
        self.is_bridge = False
        """It is the bridge of another broker."""
        self.rights: dict[tuple[str, str], bool] = {}
        """Answers of the gatekeeper, by access and topic."""
        self.subscriptions: dict[str, packet.Subscription] = {}
        self.requests: list[packet.Subscribe | packet.Unsubscribe] = []
        """Those that are not answered yet."""
        self._trace: ClientTrace | None = None
        """Shows its packets to operators who watch it."""
        self._reader: InboxReader | None = None
        self._stuck: asyncio.Future[None] | None = None
        """While the client does not read; done when it reads again, or has gone."""
        self._delivery: Delivery | None = None
        self.needs = ""
        """What its next letter needs to be decoded, such as `key k7`, which this process does not have."""

    @property
    def address(self) -> str:
        """Where it has connected from, also through a load balancer."""
        return self._peer.address

    @property
    def epoch(self) -> str:
        """That of this connection: the server refuses its steps when the client has connected again."""
        return "" if self._reader is None else self._reader.epoch

    def may(self, access: Access, topic: str) -> bool:
        """Whether the client may publish to a topic name or read it. Answers are remembered."""
        return self._rules.gatekeeper.remembers(self.rights, self.client_id, self.user, access, topic)

    def _may_read(self, topic: str) -> bool:
        return not self._rules.gatekeeper.checks_delivery or self.may("read", topic)

    # -- sending -------------------------------------------------------------------------------------------------------

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
            if self._trace is not None:
                self._trace.went(data)
            self._counts["bytes sent"] += len(data)
            self._transport.write(data)
        if self._at_eof and not (self.is_closed or self._owes):
            self._transport.close()

    @property
    def _owes(self) -> bool:
        """Whether answers to what the client has sent are due."""
        return self._machine.owes or bool(self._outgoing)

    def direct(self, message: Published, *, retain: bool, identifiers: tuple[int, ...]) -> None:
        """Send a message of QoS 0, which is in no inbox. A client that does not read misses it."""
        if self._transport.get_write_buffer_size() > self._rules.options.write_buffer:
            self._counts.dropped("slow client, QoS 0")
            return
        assert self._delivery is not None
        try:
            self._delivery.direct(message, retain=retain, identifiers=identifiers)
        except CallbackFailed as error:
            self.refuse(error)

    def letters(self, seqs: list[int], envelopes: list[bytes], sent: int) -> int:
        """Send letters of its inbox, as `Delivery.letters` does. Returns how many."""
        assert self._delivery is not None
        try:
            return self._delivery.letters(seqs, envelopes, sent)
        except CallbackFailed as error:
            self.refuse(error)
            return 0

    @property
    def is_stuck(self) -> bool:
        """Whether the client does not read what is sent to it."""
        return self._stuck is not None

    async def has_read(self) -> None:
        """Wait until the client has read so much of what was sent that there is room for more, or has gone."""
        self._flush()
        while self._stuck is not None:
            await self._stuck

    def _go_on(self) -> None:
        """End the wait of those who write to a client that does not read."""
        stuck, self._stuck = self._stuck, None
        if stuck is not None and not stuck.done():
            stuck.set_result(None)

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

    def answered(self) -> None:
        """A request for subscriptions is answered: further ones may come."""
        self._machine.requests -= 1
        self._resume()

    def watch(self, watches: list[Watch]) -> None:
        """From now on these operators see its packets, and no others."""
        self._trace = ClientTrace(watches, self.level, self._machine.rest) if watches else None

    def hold(self, needs: str) -> None:
        """Its next letter needs something that this process does not have; empty: it does not, or not any more."""
        if needs != self.needs:
            self._counts.hold(self.needs, needs, name_in_log(self.client_id))
            self.needs = needs

    # -- the inbox -----------------------------------------------------------------------------------------------------

    def pause_delivery(self, *, is_paused: bool) -> None:
        """Whether the client does not read: then its messages wait in the inbox."""
        if not is_paused:
            self._go_on()
        elif self._stuck is None and not self.is_closed:
            self._stuck = self._loop.create_future()
        if self._reader is not None:
            self._reader.pause(is_paused=is_paused)

    def poll(self) -> None:
        """Look into the inbox in case a ring was lost; this renews the session, too."""
        if self._reader is not None:
            self._reader.ring()

    # -- the end -------------------------------------------------------------------------------------------------------

    def refuse(self, error: RefusedPacket) -> None:
        text = text_in_log(error.text, self.client_id)
        about = f"client {name_in_log(self.client_id)} of {self._peer.address or 'unknown'}"
        self._counts.refused(error.name, f"{about}: {text}")
        self.close(error.reason)

    def fail(self, error: Exception) -> None:
        """The connection has lost its session, or something that was accepted could not be stored: without an
        acknowledgement the client sends it again."""
        if self.is_closed:
            return
        if isinstance(error, OwnershipError) and not isinstance(error, SessionLost):
            self.close(
                ReasonCode.SESSION_TAKEN_OVER,
                "the client has connected elsewhere; if this comes again and again, two devices have this client id",
            )
            return
        text = text_in_log(str(error), self.client_id)
        log.warning("client %s is disconnected: %s", name_in_log(self.client_id), text)
        self._counts["failed: server"] += 1
        self.close(ReasonCode.UNSPECIFIED_ERROR)

    def close(self, reason: ReasonCode, text: str = "") -> None:
        """End the connection, with the packet that says why."""
        if self.is_closed:
            return
        if text:
            throttled_log.info(f"client {name_in_log(self.client_id)}", text)
        last = b"" if self._machine.state is State.CLOSED else self._machine.end(reason)
        if len(last) > self._largest:
            last = b""
        self.send(last)
        self._flush()
        if not self._has_ended:
            hang_up(self._transport, lingers=bool(last) and self._is_reading and not self._at_eof)
        self.lost()

    def lost(self) -> None:
        """The connection has ended, by whichever side."""
        raise AssertionError("a subclass says what ends with it")

    def _resume(self) -> None:
        """The machine waits no more: act on what has waited."""
        raise AssertionError("a subclass acts on packets")

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.client_id!r} {self._machine.state.name}>"
