"""Messages of clients on their way into topics: each is confirmed, in order, when the server has it."""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Callable
from typing import Any, Final, NamedTuple, Protocol

from rsmq.errors import BrokerError, ConfigError, RsmqError, SessionTaken, TooLarge, TopicFull
from rsmq.gateway.message import Published, Timings, content_type_of, from_packet
from rsmq.gateway.packet import PendingAck, Publish, Reason
from rsmq.gateway.pressure import Pressure
from rsmq.gateway.properties import Property
from rsmq.gateway.retained import Retained
from rsmq.gateway.scripts import NOTE_RECEIVED
from rsmq.model.clock import monotonic
from rsmq.model.keys import Keys
from rsmq.producer.batch import Batch
from rsmq.producer.producer import Producer
from rsmq.redis import scripts
from rsmq.redis.connector import Client
from rsmq.redis.script_batcher import ScriptBatcher
from rsmq.redis.topics import Topic

STORED: Final = "!"
"""In front of the value of a packet id: the message is stored."""


class Sink(Protocol):
    """The connection that a message came from."""

    def confirm(self, pending: PendingAck, reason: int = 0) -> None: ...
    def fail(self, error: Exception) -> None: ...


class Stored:
    """Waits for one message, as a future would, without a task."""

    __slots__ = ("_failed", "_is_done", "_then", "batch")

    def __init__(self, then: Callable[[Batch | None], None], failed: Callable[[Exception], None]) -> None:
        self._then, self._failed = then, failed
        self.batch: Batch | None = None
        self._is_done = False

    def done(self) -> bool:
        """Whether it has its result."""
        return self._is_done

    def set_result(self, _result: None, /) -> None:
        """The server has the message."""
        self._is_done = True
        self._then(self.batch)

    def set_exception(self, exception: Exception, /) -> None:
        """The message is not stored, or it is not known whether it is."""
        self._is_done = True
        self._failed(exception)


class Ingest:
    """Stores the messages of all clients of a gateway. `spawn` starts a task that the gateway ends."""

    def __init__(
        self, producer: Producer, client: Client, keys: Keys, batcher: ScriptBatcher, retained: Retained,
        spawn: Callable[[Any], object], now_ms: Callable[[], int], timings: Timings | None = None,
    ) -> None:  # fmt: skip
        self._producer, self._client, self._keys, self._batcher = producer, client, keys, batcher
        self._retained, self._spawn, self._now_ms, self._timings = retained, spawn, now_ms, timings
        self._token, self._count = secrets.token_hex(8), 0
        self.unconfirmed = 0
        self.pressure: Pressure | None = None

    def next_token(self) -> str:
        """A token that no other message has."""
        self._count += 1
        return f"{self._token}{self._count:x}"

    def store(
        self, packet: Publish, client: str, target: Topic, sink: Sink, token: str | None = None,
        stored: Callable[[int], None] | None = None,
    ) -> None:  # fmt: skip
        """Store a message, and then confirm it. `token`: it is stored once, however often it comes with this token."""
        published, pending = from_packet(packet, client), packet.pending
        timings = self._timings
        came = 0.0 if timings is None else monotonic()

        def failed(error: Exception) -> None:
            self.unconfirmed -= 1
            if pending is not None and isinstance(error, TopicFull):
                if stored is not None:
                    stored(Reason.QUOTA_EXCEEDED)
                sink.confirm(pending, Reason.QUOTA_EXCEEDED)
            else:
                sink.fail(error)

        def then(batch: Batch | None) -> None:
            self.unconfirmed -= 1
            if timings is not None and packet.qos:
                timings.stored(monotonic() - came)
            if stored is not None:
                stored(0)
            if published.retain:
                self._spawn(self._retain(published, batch, sink, pending))
            elif pending is not None:
                self._confirm(pending, target.name, batch, sink)

        waiter = Stored(then, failed)
        pairs = packet.properties.get(Property.USER_PROPERTY, ()) if packet.properties else ()
        try:
            waiter.batch = self._producer.enqueue(
                target, packet.payload, waiter, key=client, content_type=content_type_of(packet),
                headers=published.headers(pairs), message_id=None if token is None else f"mqtt:{token}",
            )  # fmt: skip
        except (TooLarge, ConfigError):
            if stored is not None:
                stored(Reason.QUOTA_EXCEEDED)
            if pending is not None:
                sink.confirm(pending, Reason.QUOTA_EXCEEDED)
            return
        self.unconfirmed += 1

    def _confirm(self, pending: PendingAck, topic: str, batch: Batch | None, sink: Sink) -> None:
        """Acknowledge a message that is stored. A will has no packet id, and no client that could wait."""
        pressure = self.pressure
        if pressure is not None and pressure.is_on and pending.packet_id and batch is not None:
            pressure.after(f"{topic}.{batch.partition}", lambda: sink.confirm(pending))
        else:
            sink.confirm(pending)

    async def _retain(self, published: Published, batch: Batch | None, sink: Sink, pending: PendingAck | None) -> None:
        """Keep a retained message before its acknowledgement: its client finds it from then on."""
        self._count += 1
        place = self._count
        try:
            newest = b"" if batch is None else batch.newest
            if batch is not None and not newest:  # its reply was lost, so the id of the message is not known
                last = await self._client.execute_command("XREVRANGE", batch.stream, "+", "-", "COUNT", 1)
                newest = last[0][0] if last else b""
            reply = await self._retained.keep(published, stamp(newest, place))
        except RsmqError as error:
            sink.fail(error)
            return
        if pending is not None:
            sink.confirm(pending, Reason.QUOTA_EXCEEDED if reply == b"FULL" else 0)

    def retain_unstored(self, published: Published, sink: Sink) -> None:
        """Keep a retained message of QoS 0, which is in no stream: its stamp is the server's clock."""
        self._spawn(self._retain_unstored(published, sink))

    async def _retain_unstored(self, published: Published, sink: Sink) -> None:
        self._count += 1
        try:
            await self._retained.keep(published, stamp(f"{self._now_ms()}-0".encode(), self._count))
        except RsmqError as error:
            sink.fail(error)


def stamp(stream_id: bytes, place: int) -> str:
    """The position of a message: the stream id of its batch, and its place in this process."""
    milliseconds, _, number = stream_id.decode().partition("-")
    return f"{milliseconds:0>20}{number:0>20}{place:020d}"


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

    def __init__(
        self, batcher: ScriptBatcher, keys: tuple[str, str], epoch: str, life_ms: int,
        known: dict[int, str], failed: Callable[[Exception], None],
    ) -> None:  # fmt: skip
        self._batcher, self._keys, self._epoch, self._life_ms = batcher, keys, epoch, life_ms
        self.known, self._failed = known, failed
        self._waiting: deque[Change] = deque()
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
        self._in_flight = list(self._waiting)
        self._waiting.clear()
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
