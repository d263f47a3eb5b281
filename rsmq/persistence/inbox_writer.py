"""Writes letters into inboxes: in order per source and device, each stored once."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice
from typing import Any, Final

from rsmq.errors import BrokerError, BrokerUnavailable, ConfigError
from rsmq.model.clock import to_ms
from rsmq.model.duration import Duration, checked_duration
from rsmq.model.encoding import NO_CODECS, Encoding
from rsmq.model.keys import Keys
from rsmq.model.log_names import name_in_log
from rsmq.model.log_throttle import ThrottledLog
from rsmq.model.settings import Settings
from rsmq.persistence.letter import pack_letter, pack_letters, seal_payload
from rsmq.redis.client.script_batcher import Call, ScriptBatcher
from rsmq.redis.scripts import ADD_LETTERS, Value

log = logging.getLogger("rsmq.inbox")


class Receipt:
    """Complete when all its batches have ended. One task waits for it."""

    __slots__ = ("_waiter", "error", "missing", "refused")

    def __init__(self) -> None:
        self.refused: tuple[tuple[str, str, bytes], ...] = ()
        """Letters that came after the MQTT session they were meant for had ended: device, source and letter."""
        self.missing = 0
        self.error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def batch_ended(self, error: Exception | None) -> None:
        """A batch was stored, or failed with an error."""
        self.missing -= 1
        if error is not None and self.error is None:
            self.error = error
        if self.missing == 0 and self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def complete(self) -> None:
        """Wait until all batches have ended; then raise the first error, if any."""
        if self.missing:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self.error is not None:
            raise self.error

    def __repr__(self) -> str:
        return f"<Receipt missing={self.missing}{f' {self.error!r}' if self.error else ''}>"


OWN, RETAINED = "source:~", "source:&~"
"""What the sources begin with of letters that a process sends itself, and of retained messages for a subscription. The
latter wait for room in an inbox, as all letters of a subscription do."""
MOST_LETTERS: Final = 500
"""Letters in one script call: about 2 ms of the server's time."""
MOST_DEVICES: Final = 64
"""Devices in one script call: about 0.8 ms of the server's time."""
MOST_BYTES: Final = 1 << 20
MOST_PER_ROUND: Final = 500
LONGEST_EXPIRY: Final = timedelta(seconds=2**32 - 1)
REFUSED, NO_ROOM, DROPPED = b"REFUSED", b"NO_ROOM", b"DROPPED"
"""What `add_letters` says of letters for MQTT sessions."""
RETRY: Final = 0.1
"""Seconds until it is tried again whether a full inbox has room."""
GIVEN_UP: Final = 60.0
"""Seconds in which a full inbox is not waited for again, after its client has taken nothing for too long. They end when
it takes a letter."""


class DeviceQueue:
    """The waiting letters of one source for one device: a linked list of batches.

    Few objects per letter: under load the garbage collector has to visit each of them.
    """

    __slots__ = ("device", "first", "keys", "last", "source")

    def __init__(self, device: str, source: str, keys: tuple[str, ...]) -> None:
        self.device = device
        self.source = source
        self.keys = keys
        self.first: LetterBatch | None = None
        self.last: LetterBatch | None = None

    @property
    def is_topic(self) -> bool:
        """Whether its letters come from a partition, and come again until its group has settled them."""
        return not self.source.startswith((OWN, RETAINED))

    def add_batch(self, server: int) -> LetterBatch:
        """A new batch behind the others, which the next letter joins."""
        last = self.last
        batch = self.last = LetterBatch(self, server)
        if last is None:
            self.first = batch
        else:
            last.after = batch
        return batch

    def take(self) -> LetterBatch | None:
        """Remove and return the oldest batch."""
        batch = self.first
        if batch is not None:
            self.first = batch.after
            if self.first is None:
                self.last = None
        return batch


@dataclass(frozen=True, slots=True)
class WaitForRoom:
    """What a batch knows of the full inbox that it waits for: at `since` its client had taken `taken` letters.

    `taken` is a count of the server. Only its growth says something, and not even that a letter came at all.
    """

    since: float
    taken: int

    def after(self, now: float, stored: int, taken: int) -> WaitForRoom:
        """After another try, which has stored so many letters: it starts anew if the client takes letters.

        Both are looked at. Others may have filled the room at once, and an expired letter makes room, too.
        """
        return WaitForRoom(now, taken) if stored or taken > self.taken else self


class LetterBatch:
    """Letters of one queue that are sent together. `server`: how often the server had changed when they came."""

    __slots__ = ("after", "letters", "others", "queue", "receipt", "server", "size", "wait")

    def __init__(self, queue: DeviceQueue, server: int) -> None:
        self.queue = queue
        self.server = server
        self.after: LetterBatch | None = None
        self.wait: WaitForRoom | None = None
        self.letters: list[bytes] = []
        self.size = 0
        self.receipt: Receipt | None = None
        self.others: list[Receipt] | None = None

    def add_receipt(self, receipt: Receipt) -> None:
        """Let a receipt wait for this batch; adding it again changes nothing."""
        if receipt is self.receipt or (self.others is not None and receipt is self.others[-1]):
            return
        receipt.missing += 1
        if self.receipt is None:
            self.receipt = receipt
        elif self.others is None:
            self.others = [receipt]
        else:
            self.others.append(receipt)

    def refused(self, first: int, last: int) -> None:
        """These letters, by their numbers from 1, are not for the session that their client has now: tell the receipts.

        Those before them are stored.
        """
        found = tuple((self.queue.device, self.queue.source, each) for each in self.letters[first - 1 : last])
        del self.letters[:last]
        for receipt in (self.receipt, *(self.others or ())):
            if receipt is not None:
                receipt.refused += found

    def ended(self, error: Exception | None) -> None:
        """The batch was stored, or failed with an error: tell its receipts."""
        if self.receipt is not None:
            self.receipt.batch_ended(error)
        if self.others is not None:
            for receipt in self.others:
                receipt.batch_ended(error)


class AddLettersCall(Call):
    """One script call with several batches: for several devices on one server, for one device on a cluster.

    A server that has replaced another one may have lost the letters of a partition that came before these, and their
    settlement. With the position of a later one stored, they would count as stored when they come again. So letters of
    a partition are not sent to it: all that is not settled comes again, in order. What this process sends is repeated.
    """

    __slots__ = ("batches", "server", "writer")

    def __init__(
        self, writer: InboxWriter, batches: list[LetterBatch], options: tuple[Value, ...], *, waits: bool
    ) -> None:
        keys = [key for batch in batches for key in batch.queue.keys]
        letters = pack_letters([(batch.queue.source, batch.letters) for batch in batches])
        name = (writer.next_call(),) if waits else ()
        super().__init__(ADD_LETTERS, keys, (*options, letters, int(waits), *name))
        self.writer, self.batches = writer, batches
        self.server = min(batch.server for batch in batches)

    @property
    def is_outdated(self) -> bool:
        return self.server != self.writer.server

    def done(self, reply: Any) -> None:
        error = reply if isinstance(reply, Exception) else None
        if isinstance(error, BrokerUnavailable) and self.is_outdated:
            self._end_outdated(error)
            return
        if error is None and reply[0] != b"OK":
            error = BrokerError(f"unexpected reply of a script: {reply!r}")
        if isinstance(error, BrokerError) and not isinstance(error, BrokerUnavailable) and len(self.batches) > 1:
            # one batch has met a key of another type: sent alone, the others succeed (or have done so already)
            for batch in self.batches:
                self.writer.submit([batch])
            return
        batches = self.batches if error is not None or len(reply) == 5 else self._stored(reply[5:])
        for batch in batches:
            batch.ended(error)
            self.writer.batch_ended(batch.queue, error)

    def _end_outdated(self, error: BrokerUnavailable) -> None:
        """Another server process answers by now."""
        for batch in self.batches:
            if batch.queue.is_topic and batch.server != self.writer.server:
                batch.ended(error)
                self.writer.batch_ended(batch.queue, error)
            else:
                batch.server = self.writer.server
                self.writer.submit([batch])

    def _stored(self, notes: Sequence[bytes]) -> list[LetterBatch]:
        """Act on what is not as it was asked for. Returns the batches that have ended: all letters of the others that
        are left are sent again, at once or when there may be room."""
        left = set[LetterBatch]()
        for note in notes:
            word, *numbers = note.split(b":")
            number, *counts = map(int, numbers)
            batch = self.batches[number - 1]
            if word == DROPPED:
                self.writer.dropped(*counts)
                continue
            if word == NO_ROOM:
                self.writer.wait(batch, *counts)
            else:
                batch.refused(*counts)
                if not batch.letters:
                    continue
                self.writer.submit([batch])
            left.add(batch)
        return [each for each in self.batches if each not in left]


class InboxWriter:
    """Stores letters in inboxes.

    Invariant: at most one batch per source and device is in flight. The positions of a source only grow, and the
    server skips letters at or below the last position it has stored: a batch can be sent again, but not overtaken.
    """

    def __init__(
        self,
        batcher: ScriptBatcher,
        keys: Keys,
        settings: Settings,
        *,
        is_cluster: bool,
        encoding: Encoding = NO_CODECS,
    ) -> None:
        self._batcher, self._keys = batcher, keys
        self._encoding = encoding
        self._most_devices = 1 if is_cluster else MOST_DEVICES
        self._limit = int(settings.payload_limit)
        self._options = (to_ms(settings.inbox_ttl), settings.inbox_limit, mark_ttl_ms(settings))
        self._sender = f"{OWN}{secrets.token_hex(5)}"
        self._retained = self._sender.replace(OWN, RETAINED)
        self._count = 0
        self._calls = 0
        self.server = 0
        """How often another server process has answered than before."""
        self._queues: dict[str, dict[str, DeviceQueue]] = {}
        self._ready: list[DeviceQueue] = []
        self._patience = 0.0
        """In seconds; 0: letters do not wait for readers."""
        self._on_dropped: Callable[[int], None] = lambda _count: None
        self._given_up: dict[str, WaitForRoom] = {}
        self._throttled = ThrottledLog(log)

    def wait_for_readers(self, patience: float, on_dropped: Callable[[int], None]) -> None:
        """Let letters of MQTT sessions wait for room in a full inbox, as a gateway needs it.

        A letter whose client is connected waits as long as the client takes letters, and for so many seconds more.
        Otherwise the oldest letter is dropped. `on_dropped` gets how many.
        """
        self._patience = patience
        self._on_dropped = on_dropped

    def server_changed(self) -> None:
        """Another server process answers by now."""
        self.server += 1

    def next_call(self) -> str:
        """A name for a call that may send a letter along with a ring: no other call of any process has it."""
        self._calls += 1
        return f"{self._sender.removeprefix(OWN)}.{self._calls}"

    def dropped(self, count: int) -> None:
        """The server has dropped so many letters to make room."""
        self._on_dropped(count)

    # -- from this process ----------------------------------------------------------------------------------------

    async def send(
        self, device: str, payload: Any, topic: str, headers: Mapping[str, str] | None, expires: Duration | None
    ) -> None:
        """Store one letter. Concurrent calls share a write."""
        envelope, receipt = seal_payload(payload, topic, headers, self._limit, self._encoding), Receipt()
        self._put(device, envelope, expiry_ms(expires), receipt)
        await receipt.complete()

    async def retain(self, device: str, envelope: bytes, ttl: Value) -> None:
        """Store a retained message for a new subscription. `ttl` is in milliseconds, or empty for none of its own."""
        receipt = Receipt()
        self._put(device, envelope, ttl, receipt, self._retained)
        await receipt.complete()

    async def send_many(
        self,
        letters: Iterable[tuple[str, Any]],
        topic: str,
        headers: Mapping[str, str] | None,
        expires: Duration | None,
    ) -> None:
        """Store many, in the order given per device. The next round is encoded while one is in flight."""
        ttl, before = expiry_ms(expires), Receipt()
        sealed = self._sealed(letters, topic, headers)
        while True:
            receipt = None if before.error else self._round(sealed, ttl)
            await before.complete()
            if receipt is None:
                return
            before = receipt

    def _sealed(
        self, letters: Iterable[tuple[str, Any]], topic: str, headers: Mapping[str, str] | None
    ) -> Iterator[tuple[str, bytes]]:
        if isinstance(letters, str | bytes | Mapping) or not isinstance(letters, Iterable):
            raise ConfigError(f"{letters!r} are not letters: give (client id, payload) pairs")
        for pair in letters:
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                raise ConfigError(f"{pair!r} is not a pair: give (client id, payload) for each letter")
            yield pair[0], seal_payload(pair[1], topic, headers, self._limit, self._encoding)

    def _round(self, letters: Iterator[tuple[str, bytes]], ttl: Value) -> Receipt | None:
        """Queue the next round, bounded in letters and bytes; None when no letter is left."""
        size, receipt = 0, Receipt()
        for device, envelope in islice(letters, MOST_PER_ROUND):
            self._put(device, envelope, ttl, receipt)
            size += len(envelope)
            if size >= MOST_BYTES:
                break
        return receipt if size else None  # `receipt.missing` may be 0 again: stored already

    def _put(self, device: str, envelope: bytes, ttl: Value, receipt: Receipt, source: str = "") -> None:
        self._count += 1
        self.put((device,), source or self._sender, pack_letter(b"%016d" % self._count, b"", ttl, envelope), receipt)

    # -- from any source ------------------------------------------------------------------------------------------

    def put(self, devices: Sequence[str], source: str, letter: bytes, receipt: Receipt) -> None:
        """Queue one letter of a source, as `pack_letter` makes it. Positions of a source have one width and grow."""
        queues, size, server = self._queues.get(source), len(letter), self.server
        if queues is None:
            queues = self._queues[source] = {}
        for device in devices:
            queue = queues.get(device)
            if queue is None:
                # a wrong id fails here, before it is queued
                queue = queues[device] = DeviceQueue(device, source, self._keys.device(device)[:3])
                self._make_ready(queue)
            batch = queue.last
            if (
                batch is None
                or len(batch.letters) >= MOST_LETTERS
                or batch.size >= MOST_BYTES
                or batch.server != server
            ):
                batch = queue.add_batch(server)
            batch.letters.append(letter)
            batch.size += size
            if batch.receipt is not receipt:
                batch.add_receipt(receipt)

    def _make_ready(self, queue: DeviceQueue) -> None:
        """Its next batch is sent in the next turn of the event loop, with those of other queues."""
        if not self._ready:
            asyncio.get_running_loop().call_soon(self._submit_ready)
        self._ready.append(queue)

    def _submit_ready(self) -> None:
        """Send a batch of every ready queue, in calls of bounded size."""
        ready, self._ready = self._ready, []
        batches, letters, size = list[LetterBatch](), 0, 0
        for queue in ready:
            batch = queue.take()
            assert batch is not None, "a ready queue has a batch"
            if batches and (
                len(batches) >= self._most_devices
                or letters + len(batch.letters) > MOST_LETTERS
                or size + batch.size > MOST_BYTES
            ):
                self.submit(batches)
                batches, letters, size = [], 0, 0
            batches.append(batch)
            letters += len(batch.letters)
            size += batch.size
        if batches:
            self.submit(batches)

    def submit(self, batches: list[LetterBatch]) -> None:
        """Send batches in one call."""
        self._batcher.add(AddLettersCall(self, batches, self._options, waits=self._patience > 0))

    def wait(self, batch: LetterBatch, stored: int, taken: int) -> None:
        """Try the rest of a batch again when its inbox may have room, unless its client takes no letters.

        `stored`: how many of the batch had room. `taken`: how many letters the client has taken so far.
        """
        loop, device = asyncio.get_running_loop(), batch.queue.device
        now = loop.time()
        del batch.letters[:stored]
        batch.wait = WaitForRoom(now, taken) if batch.wait is None else batch.wait.after(now, stored, taken)
        if not self._is_given_up(device, now, stored, taken):
            if now - batch.wait.since < self._patience:
                self._throttled.warn("publishers wait", f"the inbox of {name_in_log(device)} is full")
                loop.call_later(RETRY, self.submit, [batch])
                return
            self._give_up(device, WaitForRoom(now, taken))
        self._batcher.add(AddLettersCall(self, [batch], self._options, waits=False))

    def _is_given_up(self, device: str, now: float, stored: int, taken: int) -> bool:
        before = self._given_up.get(device)
        if before is None:
            return False
        if now < before.since + GIVEN_UP and before.after(now, stored, taken) is before:
            return True
        del self._given_up[device]
        return False

    def _give_up(self, device: str, wait: WaitForRoom) -> None:
        """Wait for this inbox no more, until its client takes letters or some time has passed."""
        self._given_up = {each: its for each, its in self._given_up.items() if its.since + GIVEN_UP > wait.since}
        self._given_up[device] = wait
        self._throttled.warn(
            "letters are dropped",
            f"the inbox of {name_in_log(device)} is full, and it has taken none for {self._patience:g} s",
        )

    def batch_ended(self, queue: DeviceQueue, error: Exception | None) -> None:
        """A batch of a queue has ended: make the next one ready, or drop the empty queue."""
        if error is not None:
            while (batch := queue.take()) is not None:
                batch.ended(error)  # stored after a failed one, its higher position would exclude that one for ever
        if queue.first is not None:
            self._make_ready(queue)
        else:
            del self._queues[queue.source][queue.device]

    def __repr__(self) -> str:
        return f"<InboxWriter queues={sum(map(len, self._queues.values()))}>"


def mark_ttl_ms(settings: Settings) -> int:
    """How long the mark of a source is kept at least: longer than a call may be repeated."""
    return to_ms(max(settings.dedup_window, 2 * settings.unavailable_timeout))


def expiry_ms(expires: Duration | None) -> Value:
    """An expiry as milliseconds, empty for none. Raises ConfigError for an impossible duration."""
    if expires is None:
        return b""
    span = checked_duration("expires", expires)
    if not timedelta(0) < span <= LONGEST_EXPIRY:
        raise ConfigError(
            f"expires={expires!r} is not possible: use a duration above 0 and up to {LONGEST_EXPIRY.days} days"
        )
    return max(1, to_ms(span))
