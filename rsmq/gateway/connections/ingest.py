"""Messages of clients on their way into topics: each is confirmed, in order, when the server has it."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple, Protocol

from rsmq.errors import BrokerError, ConfigError, RsmqError, SessionTaken, TooLarge, TopicFull
from rsmq.gateway.connections.pressure import Pressure
from rsmq.gateway.fleet.message import Published, Timings, content_type_of, from_packet
from rsmq.gateway.fleet.retained import Retained, stamp
from rsmq.gateway.fleet.scripts import NOTE_RECEIVED
from rsmq.gateway.fleet.wills import ROUTED_MS
from rsmq.gateway.protocol.packet import LONGEST_NAME, PendingAck, Publish, ReasonCode
from rsmq.gateway.protocol.properties import Property
from rsmq.model.clock import monotonic
from rsmq.model.keys import Keys
from rsmq.model.stream_id import parse_stream_id
from rsmq.producer.batch import Batch, EntryEncoder
from rsmq.producer.producer import Producer
from rsmq.redis import scripts
from rsmq.redis.client.connector import Client
from rsmq.redis.client.script_batcher import ScriptBatcher
from rsmq.redis.topics import Topic

MOST_WAITING: Final = 64 << 20
"""Bytes of messages of all clients that may wait for the server."""
USUAL_BYTES: Final = 1024
"""A small message counts as so many."""
AHEAD_MS: Final = 1000
"""A stream id may be ahead of the server's clock by so much, as it is known here."""
STORED: Final = "!"
"""In front of the value of a packet id: the message is stored."""


class Sink(Protocol):
    """The connection that a message came from."""

    def confirm(self, pending: PendingAck, reasons: Sequence[int] = ()) -> None: ...
    def fail(self, error: Exception) -> None: ...


class StoredPacket:
    """Waits for the messages of one packet, as futures would, without a task. `batch`: that of the last message.

    It gets one result for each of them, in order. `stored` gets the reason code of a message with a token.
    """

    __slots__ = (
        "_ingest", "_is_lost", "_left", "_reasons", "_size", "_stored", "batch", "came", "client", "message_id",
        "packet", "sink", "topic",
    )  # fmt: skip

    def __init__(
        self, ingest: Ingest, packet: Publish, client: str, topic: str, sink: Sink,
        stored: Callable[[int], None] | None, message_id: str | None,
    ) -> None:  # fmt: skip
        self._ingest = ingest
        self._stored = stored
        self._left = len(packet.payloads)
        self.packet = packet
        self.client = client
        self.topic = topic
        self.sink = sink
        self.message_id = message_id
        self._size = size_of(packet)
        ingest.unconfirmed += self._left
        ingest.wait_for(self._size)
        self._reasons: list[int] = []
        """Empty until a message is refused."""
        self._is_lost = False
        self.batch: Batch | None = None
        self.came = 0.0

    def done(self) -> bool:
        """It waits for all of them."""
        return False

    def set_result(self, _result: None, /) -> None:
        """The server has the next message."""
        self._left -= 1
        if not self._left:
            self._end()

    def set_exception(self, exception: Exception, /) -> None:
        """The next message is not stored, or it is not known whether it is."""
        self.fail(len(self.packet.payloads) - self._left, exception)

    def fail(self, position: int, exception: Exception) -> None:
        """The message at a place is not stored, or it is not known whether it is."""
        self._left -= 1
        is_full = isinstance(exception, TopicFull) and self.packet.pending is not None
        if is_full or isinstance(exception, TooLarge | ConfigError):
            self._reasons = self._reasons or [0] * len(self.packet.payloads)
            self._reasons[position] = ReasonCode.QUOTA_EXCEEDED
        else:
            self._is_lost = True
            self.sink.fail(exception)
        if not self._left:
            self._end()

    def _end(self) -> None:
        self._ingest.unconfirmed -= len(self.packet.payloads)
        self._ingest.wait_for(-self._size)
        if self._is_lost:
            return
        if self._stored is not None:
            self._stored(max(self._reasons, default=0))
        self._ingest.ended(self, self._reasons)


class StoredAlone:
    """Waits for one message of a packet, whose others may be refused before it is stored."""

    def __init__(self, whole: StoredPacket, position: int) -> None:
        self._whole, self._position = whole, position

    def done(self) -> bool:
        """It waits."""
        return False

    def set_result(self, _result: None, /) -> None:
        """The server has the message."""
        self._whole.set_result(None)

    def set_exception(self, exception: Exception, /) -> None:
        """The message is not stored, or it is not known whether it is."""
        self._whole.fail(self._position, exception)


class Ingest:
    """Stores the messages of all clients of a gateway. `spawn` starts a task that the gateway ends."""

    def __init__(
        self, producer: Producer, client: Client, keys: Keys, retained: Retained,
        pressure: Pressure, spawn: Callable[[Any], object], now_ms: Callable[[], int], timings: Timings | None = None,
    ) -> None:  # fmt: skip
        self._producer = producer
        self._client = client
        self._keys = keys
        self._retained = retained
        self._pressure = pressure
        self._spawn = spawn
        self._now_ms = now_ms
        self._timings = timings
        self._token = secrets.token_hex(8)
        """Of this process."""
        self._count = 0
        """Of messages with a token or a stamp."""
        self.unconfirmed = 0
        """Messages that wait for the server."""
        self.waiting = 0
        """Bytes of those."""
        self._held_back: dict[Callable[[], None], None] = {}
        self._stored: dict[str, Batch] = {}
        """By stream: the newest batch that this gateway has stored."""

    def has_room(self, size: int) -> bool:
        """Whether a further message of QoS 0 may wait for the server."""
        return self.waiting + max(size, USUAL_BYTES) <= MOST_WAITING

    def holds_back(self, go_on: Callable[[], None]) -> bool:
        """Whether so much waits that those who publish are not read on. Then this is called once when that is over."""
        if self.waiting <= MOST_WAITING:
            return False
        self._held_back[go_on] = None
        return True

    def wait_for(self, size: int) -> None:
        """So many bytes more wait for the server. Negative: fewer, which may let clients go on."""
        self.waiting += size
        if self._held_back and self.waiting <= MOST_WAITING:
            held_back, self._held_back = self._held_back, {}
            for go_on in held_back:
                go_on()

    def just_stored(self) -> dict[str, str]:
        """The newest message of each partition that this gateway has stored just now: a router may not have passed it.

        What was acknowledged here before has no higher stream id. One that is ahead of the server's clock proves that
        the clock was set back, as by a failover, which may have lost the message and go on with lower ids.
        """
        now = self._now_ms()
        found = {
            f"{each.topic.name}.{each.partition}": each.newest.decode()
            for each in self._stored.values()
            if each.newest and -AHEAD_MS <= now - parse_stream_id(each.newest)[0] <= ROUTED_MS
        }  # fmt: skip
        if not found:
            self._stored.clear()
        return found

    def next_token(self) -> str:
        """A token that no other message has."""
        self._count += 1
        return f"{self._token}{self._count:x}"

    def store(
        self, packet: Publish, client: str, target: Topic, sink: Sink, token: str | None = None,
        stored: Callable[[int], None] | None = None,
    ) -> None:  # fmt: skip
        """Store a message, and then confirm it. `token`: it is stored once, however often it comes with this token."""
        message_id = None if token is None else f"mqtt:{token}"
        waiter = StoredPacket(self, packet, client, target.name, sink, stored, message_id)
        if self._timings is not None:
            waiter.came = monotonic()
        try:
            is_plain = packet.qos == 1 and packet.properties is None and not packet.retain
            if is_plain and len(packet.topic) <= LONGEST_NAME:
                encoder = plain_encoder(client, packet.topic)
            else:
                encoder = encoder_for(packet, client)
            waiter.batch = self._producer.enqueue(target, packet.payloads, waiter, encoder, message_id)
        except ConfigError as error:  # such as too large headers
            for position in range(len(packet.payloads)):
                waiter.fail(position, error)
        except TooLarge:
            for position, payload in enumerate(packet.payloads):
                try:
                    alone = StoredAlone(waiter, position)
                    waiter.batch = self._producer.enqueue(target, [payload], alone, encoder, message_id)
                except TooLarge as error:
                    waiter.fail(position, error)

    def ended(self, waiter: StoredPacket, reasons: Sequence[int]) -> None:
        """All messages of a packet are stored or refused: confirm them. A will has no client that could wait."""
        packet, pending, batch, sink = waiter.packet, waiter.packet.pending, waiter.batch, waiter.sink
        if batch is not None:
            self._stored[batch.stream] = batch
        if self._timings is not None and packet.qos and not reasons:
            self._timings.stored(monotonic() - waiter.came)
        if packet.retain and not reasons:
            self._spawn(self._retain(from_packet(packet, waiter.client), batch, waiter.message_id, sink, pending))
            return
        if pending is None:
            return
        pressure = self._pressure
        if pressure.is_on and pending.packet_ids and batch is not None:
            pressure.after(f"{waiter.topic}.{batch.partition}", lambda: sink.confirm(pending, reasons))
        else:
            sink.confirm(pending, reasons)

    async def _retain(
        self, published: Published, batch: Batch | None, message_id: str | None, sink: Sink, pending: PendingAck | None
    ) -> None:
        """Keep a retained message before its acknowledgement: its client finds it from then on."""
        self._count += 1
        position = self._count
        try:
            stored = b"" if batch is None else await self._stored_as(batch, message_id)
            reply = await self._retained.keep(published, stamp(stored, position))
        except RsmqError as error:
            sink.fail(error)
            return
        if pending is not None:
            sink.confirm(pending, [ReasonCode.QUOTA_EXCEEDED] if reply == b"FULL" else ())

    async def _stored_as(self, batch: Batch, message_id: str | None) -> bytes:
        """The stream id of a message, or of a later one of its batch.

        A message with an id of its own may be a repetition, whose first one was stored long before, behind which others
        came: its place is that of the first one. After a lost reply the id is not known, and the newest one counts.
        """
        newest = batch.newest
        if message_id is not None:
            key = batch.dedup(message_id)
            newest = await self._client.execute_command("GET", key) or newest
        if not newest:
            last = await self._client.execute_command("XREVRANGE", batch.stream, "+", "-", "COUNT", 1)
            newest = last[0][0] if last else b""
        return bytes(newest)

    def _by_clock(self) -> bytes:
        """The place of a message that is in no stream: that of the server's clock, and behind all that was stored here.

        That clock is known here as of an answer, so it is behind by the time that this one took.
        """
        clock = b"%d-0" % self._now_ms()
        return max((clock, *(each.newest for each in self._stored.values() if each.newest)), key=parse_stream_id)

    def retain_unstored(self, published: Published, sink: Sink) -> None:
        """Keep a retained message of QoS 0, which is in no stream: its stamp is the server's clock."""
        self.unconfirmed += 1
        self.wait_for(size := max(len(published.payload), USUAL_BYTES))
        self._spawn(self._retain_unstored(published, self._by_clock(), sink, size))

    async def _retain_unstored(self, published: Published, stream_id: bytes, sink: Sink, size: int) -> None:
        self._count += 1
        try:
            await self._retained.keep(published, stamp(stream_id, self._count), by_clock=True)
        except RsmqError as error:
            sink.fail(error)
        finally:
            self.unconfirmed -= 1
            self.wait_for(-size)


def size_of(packet: Publish) -> int:
    """The bytes of the messages of a packet."""
    return max(sum(map(len, packet.payloads)), USUAL_BYTES * len(packet.payloads))


def encoder_for(packet: Publish, client: str) -> EntryEncoder:
    """Encodes the messages of a packet. Raises ConfigError for too large headers."""
    pairs = packet.properties.get(Property.USER_PROPERTY, ()) if packet.properties else ()
    return EntryEncoder(client, content_type_of(packet), from_packet(packet, client).headers(pairs))


@lru_cache(maxsize=20_000)
def plain_encoder(client: str, topic: str) -> EntryEncoder:
    """The encoder of messages of QoS 1 without properties and retain flag, as nearly all of a device are."""
    return encoder_for(Publish(topic, b"", 1), client)


class Change(NamedTuple):
    """One change of the open packet ids, and what follows when the server has it."""

    packet_id: int
    value: str
    then: Callable[[], None] | None


class ReceivedIds:
    """The QoS 2 messages of one client that it has not released: packet id -> topic and token, also on the server.

    An id is noted before its message is stored, so that a repetition finds its token, at any gateway. It is forgotten
    before PUBCOMP leaves, so that the client can use it for another message. Changes are written in order.
    """

    __slots__ = (
        "_batcher", "_epoch", "_failed", "_in_flight", "_is_scheduled", "_keys", "_life_ms", "_waiting", "known",
    )  # fmt: skip

    def __init__(
        self, batcher: ScriptBatcher, keys: tuple[str, str], epoch: str, life_ms: int,
        known: dict[int, str], failed: Callable[[Exception], None],
    ) -> None:  # fmt: skip
        self._batcher = batcher
        self._keys = keys
        self._epoch = epoch
        self._life_ms = life_ms
        self.known, self._failed = known, failed
        self._waiting: list[Change] = []
        self._in_flight: list[Change] = []
        self._is_scheduled = False

    def note(self, packet_id: int, value: str, then: Callable[[], None] | None = None) -> None:
        """Note the value of an id, or forget the id if the value is empty; `then` is called when the server has it."""
        if value:
            self.known[packet_id] = value
        else:
            self.known.pop(packet_id, None)
        self._waiting.append(Change(packet_id, value, then))
        if not self._in_flight and not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._is_scheduled = False
        if self._in_flight or not self._waiting:
            return
        self._in_flight = self._waiting
        self._waiting = []
        pairs = [part for each in self._in_flight for part in (each.packet_id, each.value)]
        call = self._batcher.submit(NOTE_RECEIVED, self._keys, (self._epoch, self._life_ms, *pairs))
        call.add_done_callback(self._noted)

    def _noted(self, call: asyncio.Future[Any]) -> None:
        done, self._in_flight = self._in_flight, []
        error = None if call.cancelled() else call.exception()
        if call.cancelled() or error is not None:
            self._failed(error if isinstance(error, Exception) else BrokerError("the gateway is closing"))
            return
        if call.result() != scripts.OK:
            self._failed(SessionTaken(""))
            return
        for each in done:
            if each.then is not None:
                each.then()
        self._flush()
