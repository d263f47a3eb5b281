"""Reads the inbox of one connected client, without a task: the doorbell or an ack starts the next page."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

from rsmq.errors import BrokerUnavailable, OwnershipError, SessionLost, SessionTaken
from rsmq.gateway.fleet.client_acks import ClientAcks
from rsmq.gateway.fleet.history import Delivered, LetterHistory
from rsmq.gateway.fleet.scripts import BEGIN_MQTT_SESSION
from rsmq.model.log_names import name_in_log
from rsmq.model.record import text
from rsmq.persistence.ack_queue import AckQueue
from rsmq.persistence.inbox_cursor import InboxCursor, read_pushed
from rsmq.persistence.inbox_writer import mark_ttl_ms
from rsmq.persistence.letter import packet_id_of
from rsmq.persistence.session import CHUNK, Inboxes
from rsmq.redis import scripts
from rsmq.redis.scripts import Script, Value

log = logging.getLogger("rsmq.gateway")

PRESENT: Final = 1
"""What `open_session` says of a session that goes on."""
EXPIRED: Final = 2
"""What it says of one that has expired: this start is clean."""
MARGIN: Final = 0.003
"""Seconds: longer than the margin of `begin_mqtt_session`."""

OnLetters = Callable[[list[int], list[bytes], int], int]
"""Seqs, envelopes (empty: received before), and the seq up to which letters were sent before. Returns how many it has
taken: the first one that it has not, and those behind it, come again."""


class InboxReader:
    """One connection of a client to its inbox: the steps of `persistence.Session`, with callbacks instead of a task.

    `on_letters` gets every letter once, in order, while fewer than `window` are unacknowledged. `on_received` gets the
    packet ids whose receipt (QoS 2) is stored. `on_end` gets the error that ends it, once: another connection has taken
    the inbox, or the server has lost it.
    """

    __slots__ = (
        "_acks", "_acks_of_all", "_channel", "_cursor", "_delivered", "_history", "_inboxes", "_is_ended", "_is_paging",
        "_is_rewinding", "_is_started", "_keys", "_named", "_on_end", "_on_letters", "_on_received", "_page_bytes",
        "_receipts", "_received_key", "_rewinds", "before", "client", "epoch", "is_new", "leftover", "life_ms",
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
        acks: ClientAcks,
    ) -> None:
        self.client = client
        self.epoch = ""
        """Empty until it is open."""
        self.before = ""
        """The epoch of the connection before this one, if it is known."""
        self.is_new = False
        """No session goes on: a new one begins."""
        self.life_ms = 0
        """How long the session is kept without a sign of its client."""
        self._cursor = InboxCursor(window)
        self._page_bytes = page_bytes
        """A page ends when it has so many. While the client does not read, at most two pages wait for it here."""
        *keys, self._channel = inboxes.keys.device(client)
        self._keys = tuple(keys)
        self._received_key = inboxes.keys.received(client)
        self._inboxes = inboxes
        self._on_letters = on_letters
        self._on_received = on_received
        self._on_end = on_end
        self._history = history
        self._delivered: Delivered | None = None
        self._is_started = False
        self._is_paging = False
        self._is_ended = False
        self._rewinds = 0
        """How often the server has lost letters: a page that was asked for before counts no more."""
        self._is_rewinding = False
        self._named = ""
        """The letter that the acks in flight name: it was taken from a ring."""
        self._acks = AckQueue(self, scripts.ACK_LETTERS)
        self._acks_of_all = acks
        self.leftover = 0
        """Letters of an earlier session that were there when this connection began."""
        self._receipts = AckQueue(self, scripts.RECEIVE_LETTERS)

    @property
    def out(self) -> Mapping[int, int]:
        """Seqs of letters that are out, by packet id."""
        return self._cursor.out

    def pause(self, *, is_paused: bool) -> None:
        """Whether the client does not read: then no further page is asked for."""
        self._cursor.is_paused = is_paused
        self.turn()

    # -- opening and closing ---------------------------------------------------------------------------------------

    async def open(self, *, clean: bool, life_ms: int) -> bool:
        """Take the inbox over: the connection before this one can do nothing any more. Returns whether to start clean.

        A session that has expired has ended, also if nothing has removed it yet. `is_new`: one begins in any case.
        """
        self.life_ms = life_ms
        inboxes = self._inboxes
        inboxes.doorbell.listen(self._channel, self.ring, self.push)
        args = (inboxes.gateway, int(clean), life_ms, *inboxes.next_connect(), mark_ttl_ms(inboxes.settings), 1)
        reply = await inboxes.batcher.submit(scripts.OPEN_SESSION, (*self._keys, self._channel), args)
        if reply[0] != scripts.OK:
            raise self.refused(reply[0])
        self.epoch, self.leftover = reply[1].decode(), int(reply[5])
        self._cursor.open(int(reply[3]), reply[4])
        self.before = "" if clean or not reply[6:] else (reply[6] or b"").decode()
        self.is_new = clean or reply[2] != PRESENT
        return clean or reply[2] == EXPIRED

    async def begin(
        self, *, clean: bool, expiry: int, has_removed: bool, will: bytes
    ) -> tuple[bool, dict[int, str], dict[str, bytes]]:
        """Begin the session when its subscriptions are right.

        Returns whether it is resumed, its open QoS 2 ids, and older wills that are to be published now, by epoch.
        `has_removed`: subscriptions of an older one are removed just now. Then this waits until no message that met
        them can be taken for a new one.
        """
        keys = (self._keys[1], self._received_key, self._keys[0], self._inboxes.keys.will(self.client))
        batcher, cursor, rings = self._inboxes.batcher, self._cursor, self._cursor.rings
        args = (self.epoch, int(clean), expiry, int(has_removed), will)
        reply = await batcher.submit(BEGIN_MQTT_SESSION, keys, args)
        if reply[0] != scripts.OK:
            raise self.refused(reply[0])
        if has_removed:
            await asyncio.sleep(MARGIN)
        cursor.open(cursor.sent, reply[2])
        cursor.is_drained = bool(reply[4]) and cursor.rings == rings
        left = reply[3]
        while left:
            left = (await batcher.submit(scripts.CLEAR_INBOX, self._keys, (0, CHUNK)))[2]
        received = {int(each): text(value) for each, value in zip(reply[6::2], reply[7::2], strict=True)}
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
        self._cursor.ring()
        self.turn(is_rung=True)

    def push(self, raw: bytes) -> bool:
        """Pass on a letter that has come along with a ring. False: it is as any other ring, and a page follows."""
        if self._is_paging or self._is_ended or self._is_rewinding or not self._is_started:
            return False
        pushed = read_pushed(raw, self._inboxes.gateway, self.epoch)
        taken = pushed and self._cursor.take_pushed(pushed, self._recognizer())
        if not taken:
            return False
        self._pass_on(*taken)
        return True

    def turn(self, *, is_rung: bool = False) -> None:
        """Ask for the next page, if there is room for it. A ring is followed up in any case: see `ring`."""
        if self._is_paging or self._is_ended or not self._is_started:
            return
        if self._is_rewinding:  # an ack that is on its way must not meet a letter that has its seq now
            if self._acks.is_in_flight or self._receipts.is_in_flight:
                return
            self._is_rewinding = False
        cursor = self._cursor
        if (cursor.room <= 0 or cursor.is_drained) and not is_rung:
            return
        self._is_paging = True
        rings, rewinds = cursor.rings, self._rewinds
        size = self._inboxes.batcher.page_limit.of(self._page_bytes)
        named = cursor.named
        args = (self.epoch, cursor.at, cursor.page_size, size, self.life_ms, named)
        page = self._inboxes.batcher.submit_page(scripts.PAGE_LETTERS, self._keys, args)
        page.add_done_callback(lambda done: self._paged(done, rings, rewinds, size, named))

    def _paged(self, page: asyncio.Future[Any], rings: int, rewinds: int, size: int, named: str) -> None:
        if not self._is_ended and is_too_large(page) and size > 1:
            self._is_paging = False
            self.turn(is_rung=True)  # a smaller one
            return
        if not self._is_ended and rewinds == self._rewinds:
            self._read_page(page, rings, named)
        self._is_paging = False  # not before: a letter that is acknowledged at once asks for the next page
        self.turn(is_rung=self._cursor.rings != rings)

    def _read_page(self, page: asyncio.Future[Any], rings: int, named: str) -> None:
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
        self._cursor.knows(named)
        if reply[3:]:
            self._pass_on(*self._cursor.take(reply, rings, self._recognizer()))
        else:
            if self._cursor.is_held:  # what could not be passed on has expired
                self._on_letters([], [], self._cursor.sent)
            self._cursor.take(reply, rings)

    def _recognizer(self) -> Callable[[int, bytes], bool] | None:
        """Knows letters again that the client was sent before the server lost them."""
        return self._is_known if self._delivered is not None and self._delivered.lost else None

    def _pass_on(self, seqs: list[int], envelopes: list[bytes]) -> None:
        """Pass on letters that the cursor has taken."""
        delivered = self._delivered
        if delivered is None:
            delivered = self._delivered = Delivered(self._history)
        if not seqs:
            return
        passed = self._on_letters(seqs, envelopes, self._cursor.sent)
        if passed < len(seqs):
            self._cursor.put_back(seqs[passed:])
            seqs, envelopes = seqs[:passed], envelopes[:passed]
        if not seqs:
            return
        if b"" in envelopes:  # those were received before: there is nothing to know again
            fresh = [(seq, each) for seq, each in zip(seqs, envelopes, strict=True) if each]
            if fresh:
                delivered.note([seq for seq, _ in fresh], [each for _, each in fresh])
        else:
            delivered.note(seqs, envelopes)

    # -- settling --------------------------------------------------------------------------------------------------

    def ack(self, *packet_ids: int) -> None:
        """The client has these letters: remove them. An id that is not out is late: of an earlier connection."""
        self._acks.add(*self._cursor.free(packet_ids))
        self.turn()

    def receive(self, packet_id: int) -> None:
        """The client has the letter, and will confirm again (QoS 2). `on_received` follows."""
        self._receipts.add(self.out[packet_id])

    def call(self, script: Script, *args: Value) -> asyncio.Future[Any]:
        """Call a script of this inbox, which checks the epoch first."""
        if script is scripts.ACK_LETTERS:
            self._named = self._cursor.named
            return self._acks_of_all.add(self._keys, self.epoch, self._named, map(int, args))
        return self._inboxes.batcher.submit(script, self._keys, (self.epoch, *args))

    def confirmed(self, script: Script, seqs: list[int]) -> None:
        """The server has these acks: PUBRELs follow those of RECEIVE_LETTERS."""
        if script is scripts.ACK_LETTERS:
            self._cursor.knows(self._named)
            self._named = ""
        elif not self._is_ended:
            self._on_received([self._packet_id(seq) for seq in seqs])

    def _packet_id(self, seq: int) -> int:
        if seq < 0:
            return -seq
        return packet_id_of(seq) if self._delivered is None else self._delivered.moved.get(seq) or packet_id_of(seq)

    def unconfirmed(self, error: BaseException | None, word: bytes) -> None:
        """A call of acks has failed, or was refused."""
        if word:
            self.end(self.refused(word))
        else:
            self.end(error if isinstance(error, Exception) else SessionLost(self.client))

    def answered(self) -> None:
        """A call of acks has ended, for which a rewind may have waited."""
        if self._is_rewinding:
            self.turn()

    # -- a server that has lost letters ----------------------------------------------------------------------------

    def rewind(self, kept: int) -> bool:
        """The server has lost every letter above `kept`, though it had confirmed them: go on behind that one.

        What the client was sent stays out until it is acknowledged. `Delivered` knows again what comes again.
        """
        if self._is_rewinding:
            return True
        client = name_in_log(self.client)
        log.warning("client %s: the server has lost letters that it had confirmed, those after %d", client, kept)
        self._is_rewinding = True
        self._rewinds += 1
        if self._delivered is not None:
            self._delivered.rewind(kept, self._cursor.out)
        self._acks.rewind(kept, lambda _: 0)
        self._receipts.rewind(kept, lambda seq: -self._packet_id(seq))
        self._cursor.rewind(kept)
        self.turn()
        return True

    def _is_known(self, seq: int, envelope: bytes) -> bool:
        """Whether the client was sent this letter before the server lost it. Then it is out again under its old id."""
        assert self._delivered is not None
        out, packet_id = self._cursor.out, self._delivered.find(seq, envelope)
        if packet_id is None:
            return False
        if packet_id and out.get(packet_id) == -packet_id:
            out[packet_id] = seq
            if packet_id_of(seq) != packet_id:
                self._delivered.moved[seq] = packet_id
        else:
            self._acks.add(seq)
        return True

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


def is_too_large(page: asyncio.Future[Any]) -> bool:
    """Whether the connection broke at this answer: the server or a proxy may allow only smaller ones."""
    error = None if page.cancelled() else page.exception()
    return isinstance(error, BrokerUnavailable) and error.is_broken
