"""Reads the inbox of one connected client, without a task: the doorbell or an ack starts the next page."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final

from rsmq.errors import OwnershipError, SessionLost, SessionTaken
from rsmq.gateway.fleet.history import Delivered, LetterHistory
from rsmq.gateway.fleet.scripts import BEGIN_MQTT_SESSION
from rsmq.persistence.inbox_writer import mark_ttl_ms
from rsmq.persistence.letter import PACKET_IDS, packet_id_of
from rsmq.persistence.session import CHUNK, MOST_ACKS, MOST_PER_PAGE, Inboxes
from rsmq.redis import scripts
from rsmq.redis.scripts import Script, Value

log = logging.getLogger("rsmq.gateway")

EXPIRED: Final = 2
"""What `open_session` says of a session that has expired: this start is clean."""
MARGIN: Final = 0.003
"""Seconds: longer than the margin of `begin_mqtt_session`."""

OnLetters = Callable[[list[int], list[bytes], int], None]
"""Seqs, envelopes (empty: received before), and the seq up to which letters were sent before."""


class InboxReader:
    """One connection of a client to its inbox: the steps of `persistence.Session`, with callbacks instead of a task.

    `on_letters` gets every letter once, in order, while fewer than `window` are unacknowledged. `on_received` gets the
    packet ids whose receipt (QoS 2) is stored. `on_end` gets the error that ends it, once: another connection has taken
    the inbox, or the server has lost it.
    """

    __slots__ = (
        "_acks", "_blocked", "_channel", "_cursor", "_delivered", "_history", "_inboxes", "_is_drained", "_is_ended",
        "_is_paging", "_is_started", "_keys", "_on_end", "_on_letters", "_on_received", "_page_bytes", "_receipts",
        "_received_key",
        "_rewinds", "_rings", "_sent", "before", "client", "epoch", "is_paused", "is_rewinding", "life_ms", "out",
        "window",
    )  # fmt: skip

    def __init__(
        self,
        inboxes: Inboxes,
        client: str,
        window: int,
        *,
        page_bytes: int,
        on_letters: OnLetters,
        on_received: Callable[[list[int]], None],
        on_end: Callable[[Exception], None],
        history: LetterHistory,
    ) -> None:
        self.client, self.window, self.epoch, self.life_ms = client, window, "", 0
        self._page_bytes = page_bytes
        """A page ends when it has so many. While the client does not read, at most two pages wait for it here."""
        *keys, self._channel = inboxes.keys.device(client)
        self._keys, self._received_key = tuple(keys), inboxes.keys.received(client)
        self._inboxes, self._on_letters, self._on_received, self._on_end = inboxes, on_letters, on_received, on_end
        self._cursor, self._sent = "0", 0
        self.before = ""
        """The epoch of the connection before this one, if it is known."""
        self.out: dict[int, int] = {}
        """Seqs by packet id. A negative packet id: the server has lost the letter."""
        self._history, self._delivered = history, None  # type: LetterHistory, Delivered | None
        self._rewinds, self.is_rewinding = 0, False
        self._blocked = 0
        self._is_paging = self._is_drained = self._is_ended = False
        self._is_started = False
        self.is_paused = False
        self._rings = 0
        self._acks = AckQueue(self, scripts.ACK_LETTERS)
        self._receipts = AckQueue(self, scripts.RECEIVE_LETTERS)

    # -- opening and closing ---------------------------------------------------------------------------------------

    async def open(self, *, clean: bool, life_ms: int) -> bool:
        """Take the inbox over: the connection before this one can do nothing any more. Returns whether to start clean.

        A session that has expired has ended, also if nothing has removed it yet.
        """
        self.life_ms = life_ms
        inboxes = self._inboxes
        inboxes.doorbell.listen(self._channel, self.ring)
        args = (inboxes.gateway, int(clean), life_ms, *inboxes.next_connect(), mark_ttl_ms(inboxes.settings), 1)
        reply = await inboxes.batcher.submit(scripts.OPEN_SESSION, (*self._keys, self._channel), args)
        if reply[0] != scripts.OK:
            raise self.refused(reply[0])
        self.epoch, self._sent, self._cursor = reply[1].decode(), int(reply[3]), reply[4].decode()
        self.before = "" if clean or not reply[6:] else (reply[6] or b"").decode()
        return clean or reply[2] == EXPIRED

    async def begin(
        self, *, clean: bool, expiry: int, has_removed: bool, will: bytes
    ) -> tuple[bool, dict[int, str], dict[str, bytes]]:
        """Begin the session when its subscriptions are right.

        Returns whether it is resumed, its open QoS 2 ids, and older wills that are to be published now, by epoch.
        `has_removed`: a clean start has removed subscriptions just now. Then this waits until no message that met them
        can be taken for a new one.
        """
        keys = (self._keys[1], self._received_key, self._keys[0], self._inboxes.keys.will(self.client))
        batcher, rings = self._inboxes.batcher, self._rings
        args = (self.epoch, int(clean), expiry, int(has_removed), will)
        reply = await batcher.submit(BEGIN_MQTT_SESSION, keys, args)
        if reply[0] != scripts.OK:
            raise self.refused(reply[0])
        if has_removed:
            await asyncio.sleep(MARGIN)
        self._cursor, left = reply[2].decode(), reply[3]
        self._is_drained = bool(reply[4]) and self._rings == rings
        while left:
            left = (await batcher.submit(scripts.CLEAR_INBOX, self._keys, (0, CHUNK)))[2]
        received = {int(each): value.decode() for each, value in zip(reply[6::2], reply[7::2], strict=True)}
        wills = {epoch.decode(): raw for epoch, raw in zip(reply[5][::2], reply[5][1::2], strict=True)}
        return bool(reply[1]), received, wills

    def start(self) -> None:
        """Begin to read."""
        self._is_started = True
        self.turn()

    def close(self) -> None:
        """Stop reading; acks that are under way arrive."""
        self._inboxes.doorbell.forget(self._channel, self.ring)
        self._is_ended = True

    async def settled(self) -> None:
        """Wait until the server has all acks."""
        await self._receipts.settled()
        await self._acks.settled()

    # -- reading ---------------------------------------------------------------------------------------------------

    def ring(self) -> None:
        """There may be a new letter, or another connection of this client."""
        self._rings += 1
        self._is_drained = False
        self.turn(is_rung=True)

    def turn(self, *, is_rung: bool = False) -> None:
        """Ask for the next page, if there is room for it. A ring is followed up in any case: see `ring`."""
        if self._is_paging or self._is_ended or not self._is_started:
            return
        if self.is_rewinding:  # an ack that is on its way must not meet a letter that has its seq now
            if self._acks.is_in_flight or self._receipts.is_in_flight:
                return
            self.is_rewinding = False
        room = 0 if self._blocked or self.is_paused else self.window - len(self.out)
        if (room <= 0 or self._is_drained) and not is_rung:
            return
        self._is_paging = True
        rings, rewinds = self._rings, self._rewinds
        args = (self._cursor, min(max(room, 0), MOST_PER_PAGE), self._page_bytes, self.life_ms)
        page = self.call(scripts.PAGE_LETTERS, *args)
        page.add_done_callback(lambda done: self._paged(done, rings, rewinds))

    def _paged(self, page: asyncio.Future[Any], rings: int, rewinds: int) -> None:
        if not self._is_ended and rewinds == self._rewinds:
            self._read_page(page, rings)
        self._is_paging = False  # not before: a letter that is acknowledged at once asks for the next page
        self.turn(is_rung=self._rings != rings)

    def _read_page(self, page: asyncio.Future[Any], rings: int) -> None:
        error = None if page.cancelled() else page.exception()
        if page.cancelled() or error is not None:
            self.end(error if isinstance(error, Exception) else SessionLost(self.client))
            return
        reply = page.result()
        if reply[0] == scripts.BEHIND:
            self.rewind(reply[1])
            return
        if reply[0] != scripts.OK:
            self.end(self.refused(reply[0]))
            return
        cursor, is_drained = reply[1].decode(), bool(int(reply[2])) and self._rings == rings
        refs, envelopes = reply[3::2], reply[4::2]
        if refs and not self._take(refs, envelopes):
            return
        self._cursor, self._is_drained = cursor, is_drained

    def _take(self, refs: list[bytes], envelopes: list[bytes]) -> bool:
        """Pass on the letters of a page. False if one cannot be passed on now."""
        delivered, out, seqs, taken = self._delivered, self.out, list[int](), list[bytes]()
        if delivered is None:
            delivered = self._delivered = Delivered(self._history)
        is_searching, blocked, cursor = bool(delivered.lost), 0, b""
        for ref, envelope in zip(refs, envelopes, strict=True):
            seq = int(ref)
            if is_searching and (known := delivered.find(seq, envelope)) is not None:
                self._found(seq, known)
            else:
                packet_id = (seq - 1) % PACKET_IDS + 1  # packet_id_of, which takes twice as long
                if packet_id in out:  # an older letter has the id until the client acknowledges it
                    blocked = packet_id
                    break
                out[packet_id] = seq
                seqs.append(seq)
                taken.append(envelope)
            cursor = ref
        if cursor:
            self._cursor = cursor.decode()
        if seqs:
            if b"" in taken:
                fresh = [(seq, each) for seq, each in zip(seqs, taken, strict=True) if each]
                if fresh:
                    delivered.note([seq for seq, _ in fresh], [each for _, each in fresh])
            else:
                delivered.note(seqs, taken)
            self._on_letters(seqs, taken, self._sent)
        if blocked:
            self._blocked, self._is_drained = blocked, False
        return not blocked and not self._is_ended

    # -- settling --------------------------------------------------------------------------------------------------

    def ack(self, *packet_ids: int) -> None:
        """The client has these letters: remove them. An id that is not out is late: of an earlier connection."""
        pop = self.out.pop
        self._acks.add(*[seq for packet_id in packet_ids if (seq := pop(packet_id, 0)) > 0])
        if self._blocked in packet_ids:
            self._blocked = 0
        self.turn()

    def receive(self, packet_id: int) -> None:
        """The client has the letter, and will confirm again (QoS 2). `on_received` follows."""
        self._receipts.add(self.out[packet_id])

    def call(self, script: Script, *args: Value) -> asyncio.Future[Any]:
        """Call a script of this inbox, which checks the epoch first."""
        return self._inboxes.batcher.submit(script, self._keys, (self.epoch, *args))

    def replied(self, script: Script, seqs: list[int]) -> None:
        """The server has these acks, as far as it has the letters."""
        if script is scripts.RECEIVE_LETTERS and not self._is_ended:
            self._on_received([self._packet_id(seq) for seq in seqs])

    def _packet_id(self, seq: int) -> int:
        if seq < 0:
            return -seq
        return packet_id_of(seq) if self._delivered is None else self._delivered.moved.get(seq) or packet_id_of(seq)

    # -- a server that has lost letters ----------------------------------------------------------------------------

    def rewind(self, kept: int) -> None:
        """The server has lost every letter above `kept`, though it had confirmed them: go on behind that one.

        What the client was sent stays out until it is acknowledged. `Delivered` knows again what comes again.
        """
        if self.is_rewinding:
            return
        log.warning("client %r: the server has lost letters that it had confirmed, those after %d", self.client, kept)
        self.is_rewinding = True
        self._rewinds += 1
        if self._delivered is not None:
            self._delivered.rewind(kept, self.out)
        self._acks.rewind(kept, lambda _: 0)
        self._receipts.rewind(kept, lambda seq: -self._packet_id(seq))
        self._cursor, self._is_drained = str(kept), False
        self.turn()

    def _found(self, seq: int, packet_id: int) -> None:
        """A letter that was lost has come again."""
        if packet_id and self.out.get(packet_id) == -packet_id:
            self.out[packet_id] = seq
            if packet_id_of(seq) != packet_id:
                assert self._delivered is not None
                self._delivered.moved[seq] = packet_id
        else:
            self._acks.add(seq)

    def refused(self, word: bytes) -> OwnershipError:
        """The error for the word with which a script refuses this connection."""
        return SessionLost(self.client) if word == scripts.NO_SESSION else SessionTaken(self.client)

    def end(self, error: Exception) -> None:
        """End with an error."""
        if not self._is_ended:
            self.close()
            self._on_end(error)

    def __repr__(self) -> str:
        return f"<InboxReader {self.client!r} out={len(self.out)}{' ended' if self._is_ended else ''}>"


class AckQueue:
    """Seqs for one script. One call is in flight; later seqs go with the next one, in order.

    A negative packet id stands for a letter that the server has lost: there is nothing to call for it.
    """

    __slots__ = ("_in_flight", "_is_scheduled", "_pending", "_reader", "_script", "_taken")

    def __init__(self, reader: InboxReader, script: Script) -> None:
        self._reader, self._script = reader, script
        self._pending: list[int] = []
        self._taken: list[int] = []
        self._in_flight: asyncio.Future[Any] | None = None
        self._is_scheduled = False

    def add(self, *seqs: int) -> None:
        """Add seqs, to be sent with all others of this turn of the loop."""
        self._pending += seqs
        if seqs and not self._is_scheduled and self._in_flight is None:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    @property
    def is_in_flight(self) -> bool:
        """Whether a call is on its way."""
        return self._in_flight is not None

    def rewind(self, kept: int, lost: Callable[[int], int]) -> None:
        """The server has lost the letters above `kept`. `lost` is what stands for such a seq; 0 is nothing."""
        self._pending = [new for each in self._pending if (new := each if each <= kept else lost(each))]
        self._taken = [each if each <= kept else lost(each) for each in self._taken]

    def _flush(self) -> None:
        self._is_scheduled = False
        while self._pending and self._in_flight is None:
            self._taken, self._pending = self._pending[:MOST_ACKS], self._pending[MOST_ACKS:]
            seqs = self._taken if min(self._taken) > 0 else [each for each in self._taken if each > 0]
            if not seqs:
                self._reader.replied(self._script, self._taken)
                continue
            self._in_flight = self._reader.call(self._script, *seqs)
            self._in_flight.add_done_callback(self._replied)

    def _replied(self, answer: asyncio.Future[Any]) -> None:
        self._in_flight = None
        error = None if answer.cancelled() else answer.exception()
        if answer.cancelled() or error is not None:
            self._pending.clear()
            self._reader.end(error if isinstance(error, Exception) else SessionLost(self._reader.client))
        elif answer.result()[0] == scripts.BEHIND:
            self._reader.rewind(answer.result()[1])
            self._pending[:0] = filter(None, self._taken)
        elif answer.result()[0] != scripts.OK:
            self._pending.clear()
            self._reader.end(self._reader.refused(answer.result()[0]))
        else:
            self._reader.replied(self._script, self._taken)
        self._flush()
        if self._reader.is_rewinding:
            self._reader.turn()

    async def settled(self) -> None:
        """Wait until nothing is pending or in flight."""
        self._flush()
        while self._in_flight is not None:
            await asyncio.wait([self._in_flight])
