"""A session: one connection of a device, which reads its inbox by cursor, in order, within a window."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from types import TracebackType
from typing import Any, Final, Self

import anyio
import anyio.abc

from rsmq.errors import (
    BrokerError,
    BrokerUnavailable,
    ConfigError,
    OwnershipError,
    SessionLost,
    SessionTaken,
)
from rsmq.model.clock import to_ms
from rsmq.model.encoding import NO_CODECS, Encoding
from rsmq.model.keys import Keys
from rsmq.model.log_names import name_in_log
from rsmq.model.settings import Settings
from rsmq.persistence.ack_queue import AckQueue
from rsmq.persistence.doorbell import Doorbell
from rsmq.persistence.inbox_cursor import LARGEST_WINDOW, PAGE_BYTES, InboxCursor
from rsmq.persistence.inbox_writer import InboxWriter, mark_ttl_ms
from rsmq.persistence.letter import Letter
from rsmq.redis import scripts
from rsmq.redis.client.connector import Client
from rsmq.redis.client.script_batcher import ScriptBatcher
from rsmq.redis.scripts import Script, Value

log = logging.getLogger("rsmq.inbox")

CONNECTIONS: Final = 2
"""While the server works on one write, this process packs the next and reads the replies of the last."""
CHUNK: Final = 1000


class Inboxes:
    """Sessions and senders of one connection share this: the letter writer, a batcher of calls, a doorbell."""

    def __init__(
        self, client: Client, keys: Keys, settings: Settings, gateway: str, encoding: Encoding = NO_CODECS
    ) -> None:
        """`encoding` encodes what this process sends, and undoes what its sessions read."""
        self.client = client
        self.encoding = encoding
        self.keys = keys
        self.settings = settings
        self.gateway = gateway
        patience = settings.unavailable_timeout.total_seconds()
        self.batcher = ScriptBatcher(client, patience=patience, connections=CONNECTIONS, is_bound=True, log=log)
        self.doorbell = Doorbell(client)
        self.writer = InboxWriter(self.batcher, keys, settings, is_cluster=client.is_cluster, encoding=encoding)
        self._connects = f"source:!{secrets.token_hex(5)}"
        self._count = 0

    def next_connect(self) -> tuple[str, str]:
        """The field and the position that tell a connect from a repeat of it, and from older ones of this process."""
        self._count += 1
        return self._connects, f"{self._count:016d}"

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Run until cancelled."""
        with self.client.watching_server(self.writer.server_changed):
            async with anyio.create_task_group() as tasks:
                await tasks.start(self.batcher.run)
                await tasks.start(self.doorbell.run)
                task_status.started()

    def __repr__(self) -> str:
        return f"<Inboxes {self.writer!r} {self.batcher!r} {self.doorbell!r}>"


class Session:
    """`async with broker.connect(...) as session: async for letter in session: ...; await session.ack(letter)`.

    Yields letters in the order in which they were stored; at most `window` are unacknowledged at a time. Letters that
    an earlier session left unacknowledged come again first. Iterate from one task; `ack` and `receive` may be called
    from any. When the device connects elsewhere, every further step raises SessionTaken. When the server has lost the
    session (it expired, or its data was deleted), every further step raises SessionLost.
    """

    def __init__(self, inboxes: Inboxes, device: str, *, clean: bool, window: int, auto_ack: bool) -> None:
        if type(window) is not int or not 1 <= window <= LARGEST_WINDOW:
            raise ConfigError(f"window={window!r} is not possible: use 1 to {LARGEST_WINDOW} letters")
        self.device = device
        self.window = window
        self.epoch = ""
        """Empty until it is open."""
        self.is_present = False
        """Whether the device had a session already."""
        *keys, self._channel = inboxes.keys.device(device)
        self._keys = tuple(keys)
        self._state = keys[1]
        self._batcher = inboxes.batcher
        self._doorbell = inboxes.doorbell
        self._inboxes = inboxes
        self._ttl_ms = to_ms(inboxes.settings.inbox_ttl)
        self._poll = poll_seconds(inboxes.settings)
        self._close_timeout = inboxes.settings.command_timeout.total_seconds()
        self._clean = clean
        self._auto_ack = auto_ack
        self._cursor = InboxCursor(window)
        self._letters: deque[Letter] = deque()
        """Read, and not yielded yet."""
        self._wake = asyncio.Event()
        self._heard = 0
        """The rings that a page has followed up."""
        confirmations = SessionConfirmations(self)
        self._acks = AckQueue(confirmations, scripts.ACK_LETTERS)
        self._receipts = AckQueue(confirmations, scripts.RECEIVE_LETTERS)
        self._error: BaseException | None = None
        self._is_raised = False
        self._last: Letter | None = None

    # -- opening and closing --------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        if self.epoch:
            raise ConfigError("a session is opened once: call broker.connect again for another connection")
        self._doorbell.listen(self._channel, self._ring)
        try:
            reply = await self._open()
            self.epoch = reply[1].decode()
            self.is_present = bool(reply[2]) and not self._clean
            self._cursor.open(int(reply[3]), reply[4])
            left = reply[5]
            while left:  # letters under the floor of the inbox are removed in bounded steps
                left = (await self._batcher.submit(scripts.CLEAR_INBOX, self._keys, (0, CHUNK)))[2]
        except BaseException:
            self._doorbell.forget(self._channel, self._ring)
            raise
        return self

    async def _open(self) -> Any:
        """Connect. Repeated if the answer is lost; raises SessionTaken if a newer connect was in between."""
        settings = self._inboxes.settings
        args = (self._inboxes.gateway, int(self._clean), self._ttl_ms, *self._inboxes.next_connect())
        keys = (*self._keys, self._channel)
        reply = await self._batcher.submit(scripts.OPEN_SESSION, keys, (*args, mark_ttl_ms(settings)))
        if reply[0] != scripts.OK:
            raise self._refused(reply[0])
        return reply

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._doorbell.forget(self._channel, self._ring)
        if self._auto_ack and kind is None:
            self._ack_last()
        if not isinstance(self._error, OwnershipError):
            await self._close()
        if kind is None and not self._is_raised:
            self._raise_error()

    async def _close(self) -> None:
        """Send the last acks and close, also while this task is being cancelled. Does not raise: see `__aexit__`."""
        try:
            with anyio.fail_after(self._close_timeout, shield=True):
                await self._receipts.settled()
                await self._acks.settled()
                await self._batcher.submit(scripts.CLOSE_SESSION, (self._state,), (self.epoch,))
        except TimeoutError:
            self._end(BrokerUnavailable(f"the server did not confirm the last acks of {self.device!r} in time"))
        except BrokerError as error:
            self._end(error)

    # -- reading --------------------------------------------------------------------------------------------------

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Letter:
        if not self.epoch:
            raise ConfigError("the session is not open: iterate inside `async with broker.connect(...) as session:`")
        if self._auto_ack:
            self._ack_last()
        while not self._letters:
            await self._step()
        self._raise_error()
        letter = self._last = self._letters.popleft()
        return letter

    async def _step(self) -> None:
        """Read a page, or wait until there may be one to read."""
        self._receipts.flush()
        self._acks.flush()
        self._raise_error()
        cursor = self._cursor
        if cursor.room > 0 and not cursor.is_drained:
            await self._page()
        elif cursor.room <= 0 and cursor.rings != self._heard:
            await self._page()  # of no letters: another session of the device may have taken over
        else:
            self._wake.clear()  # no await since the flags were read: no ring can be lost between
            with anyio.move_on_after(self._poll) as waited:
                await self._wake.wait()
            if waited.cancelled_caught:
                self._ring()

    async def _page(self) -> None:
        """Read the next letters. The only way for a letter from its inbox to the device."""
        cursor = self._cursor
        heard, before = cursor.rings, cursor.blocked
        reply = await self._read_page()
        if reply[0] != scripts.OK:
            self._end(self._refused(reply[0]))
            return
        self._heard = heard
        encoding = self._inboxes.encoding
        for seq, envelope in zip(*cursor.take(reply, heard), strict=True):
            is_redelivered = seq <= cursor.sent
            letter = Letter(seq, envelope, device=self.device, is_redelivered=is_redelivered, encoding=encoding)
            self._letters.append(letter)
        blocked = cursor.blocked
        if blocked is not None and blocked is not before:
            log.warning(
                "device %s: letter %d waits for its packet id %d, which is unacknowledged since letter %d",
                name_in_log(self.device), blocked.seq, blocked.packet_id, cursor.out[blocked.packet_id],
            )  # fmt: skip

    async def _read_page(self) -> Any:
        """The answer of `page_letters`, with a smaller page after each one that has broken the connection."""
        cursor, limit = self._cursor, self._batcher.page_limit
        while True:
            size = limit.of(PAGE_BYTES)
            args = (self.epoch, cursor.at, cursor.page_size, size, self._ttl_ms)
            try:
                return await self._batcher.submit_page(scripts.PAGE_LETTERS, self._keys, args)
            except BrokerUnavailable as error:
                if not error.is_broken or size == 1:
                    raise

    def _refused(self, word: bytes) -> OwnershipError:
        """The error for the word with which a script refuses this session."""
        lost = (scripts.NO_SESSION, scripts.BEHIND)
        return SessionLost(self.device) if word in lost else SessionTaken(self.device)

    # -- settling -------------------------------------------------------------------------------------------------

    async def ack(self, letter: Letter) -> None:
        """The device has this letter: remove it. Acks of one moment are sent together; `flush` waits for them.

        If the ack does not reach the server, the next session gets the letter again. Raises SessionTaken or
        SessionLost.
        """
        self._check(letter)
        self._acks.add(letter.seq)
        self._free(letter)

    async def receive(self, letter: Letter) -> None:
        """The device has this letter and will confirm again with `ack` (QoS 2). It still counts in the window.

        Until that `ack` its packet id is kept, also when the letter expires or the inbox overflows, and the letter is
        redelivered only as `is_received`.
        """
        self._check(letter)
        self._receipts.add(letter.seq)

    async def flush(self) -> None:
        """Wait until the server has confirmed all acks. Raises SessionTaken, SessionLost or BrokerUnavailable."""
        await self._receipts.settled()
        await self._acks.settled()
        self._raise_error()

    def _check(self, letter: Letter) -> None:
        self._raise_error()
        if not isinstance(letter, Letter):
            raise ConfigError(f"{letter!r} is not a letter: pass one that the session has yielded")
        if letter.device != self.device:
            raise ConfigError(f"{letter!r} is for device {letter.device!r}, this is the session of {self.device!r}")

    def _ack_last(self) -> None:
        if self._last is not None and self._error is None:
            self._acks.add(self._last.seq)
            self._free(self._last)

    def _free(self, letter: Letter) -> None:
        """Take a letter out of the window."""
        if self._cursor.out.get(letter.packet_id) == letter.seq:
            self._cursor.free((letter.packet_id,))
        if letter is self._last:
            self._last = None
        self._wake.set()

    def _call(self, script: Script, *args: Value) -> asyncio.Future[Any]:
        """Call a script of this inbox, which checks the epoch of the session first."""
        return self._batcher.submit(script, self._keys, (self.epoch, *args))

    # -- waking and ending ----------------------------------------------------------------------------------------

    def _ring(self) -> None:
        """The doorbell rang: there may be a new letter, or another session of this device."""
        self._cursor.ring()
        self._wake.set()

    def _end(self, error: BaseException) -> None:
        """End the session: every further step raises the first error."""
        self._error = self._error or error
        self._letters.clear()
        self._wake.set()

    def _raise_error(self) -> None:
        if self._error is not None:
            self._is_raised = True
            raise self._error

    def __repr__(self) -> str:
        state = type(self._error).__name__ if self._error else "open" if self.epoch else "not open"
        return f"<Session {self.device} {state} out={len(self._cursor.out)}>"


def poll_seconds(settings: Settings) -> float:
    """The poll interval of an idle session: short enough that its device is not forgotten in between."""
    return min(settings.inbox_poll, settings.inbox_ttl / 3).total_seconds()


class SessionConfirmations:
    """Follows the acknowledgements of one session to the server."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def call(self, script: Script, *args: Value) -> asyncio.Future[Any]:
        """Call a script of the inbox."""
        return self._session._call(script, *args)

    def confirmed(self, script: Script, seqs: list[int]) -> None:
        """The server has them: nothing follows."""

    def unconfirmed(self, error: BaseException | None, word: bytes) -> None:
        """A call has failed, or was refused: the session ends. If it was cancelled, the broker is being closed."""
        if error is not None:
            self._session._end(error)
        elif word:
            self._session._end(self._session._refused(word))

    def rewind(self, kept: int) -> bool:
        """The server has lost letters that it had confirmed: the session is lost with them."""
        return False

    def answered(self) -> None:
        """A call has ended: nothing waits for that."""
