"""A session: one connection of a device, which reads its inbox by cursor, in order, in a window."""

from __future__ import annotations

import asyncio
from collections import deque
from types import TracebackType
from typing import Final, Self

import anyio

from rsmq.clock import to_ms
from rsmq.errors import BrokerError, BrokerUnavailable, ConfigError, SessionTaken
from rsmq.keys import Keys
from rsmq.persistence.courier import Courier
from rsmq.persistence.doorbell import Doorbell
from rsmq.persistence.letter import Letter
from rsmq.persistence.settlement import Settlement
from rsmq.script import (
    ACK_LETTERS,
    CLEAR_INBOX,
    CLOSE_SESSION,
    OPEN_SESSION,
    PAGE_LETTERS,
    RECEIVE_LETTERS,
    Script,
)
from rsmq.settings import Settings

LARGEST_WINDOW: Final = 32_767
"""Half of all packet ids: however many letters are held, new ones find a free one."""
MOST_PER_PAGE: Final = 200
PAGE_BYTES: Final = 1 << 20
"""A page ends when it has so many bytes: about 2 ms of the server's time."""
CHUNK: Final = 1000


class Session:
    """`async with broker.connect(...) as session: async for letter in session: ...; await session.ack(letter)`.

    One letter after the other, in the order of storing; at most `window` are out at a time, neither acknowledged nor
    waiting here. What an earlier connection left unacknowledged comes again first. Iterate from one task; `ack` and
    `receive` may be called from any. When the device connects elsewhere, every further step raises SessionTaken.
    """

    def __init__(
        self,
        courier: Courier,
        doorbell: Doorbell,
        keys: Keys,
        settings: Settings,
        device: str,
        *,
        gateway: str,
        clean: bool,
        window: int,
        auto_ack: bool,
    ) -> None:
        if type(window) is not int or not 1 <= window <= LARGEST_WINDOW:
            raise ConfigError(f"window={window!r} is not possible: use 1 to {LARGEST_WINDOW} letters")
        self.device, self.window = device, window
        self.epoch = ""
        self.is_present = False
        self._inbox, self._state, self._expiry, self._channel = keys.device(device)
        self._courier, self._doorbell, self._gateway = courier, doorbell, gateway
        self._ttl_ms, self._poll = to_ms(settings.inbox_ttl), poll_seconds(settings)
        self._patience = settings.command_timeout.total_seconds()
        self._clean, self._auto_ack = clean, auto_ack
        self._cursor, self._sent = "0", 0
        self._letters: deque[Letter] = deque()
        self._out: set[int] = set()
        self._is_drained = False
        self._wake = asyncio.Event()
        self._rings = self._heard = 0
        self._acks, self._receipts = self._settlement(ACK_LETTERS), self._settlement(RECEIVE_LETTERS)
        self._trouble: BaseException | None = None
        self._is_told = False
        self._last: Letter | None = None

    # -- opening and closing --------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        if self.epoch:
            raise ConfigError("a session is opened once: call broker.connect again for another connection")
        self._doorbell.listen(self._channel, self._ring)
        try:
            reply = await self._courier.ask(
                OPEN_SESSION,
                (self._inbox, self._state, self._expiry, self._channel),
                (self._gateway, int(self._clean), self._ttl_ms),
            )
            self.epoch = reply[1].decode()
            self.is_present = bool(reply[2]) and not self._clean
            self._sent, self._cursor = int(reply[3]), reply[4].decode()
            await clear(self._courier, (self._inbox, self._state, self._expiry), reply[5])
        except BaseException:
            self._doorbell.forget(self._channel, self._ring)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._doorbell.forget(self._channel, self._ring)
        if self._auto_ack and kind is None:
            self._ack_last()
        if not isinstance(self._trouble, SessionTaken):
            await self._close()
        if kind is None and not self._is_told:
            self._raise_trouble()

    async def _close(self) -> None:
        """Tell the server, also while this task is being cancelled. That it could not be told is trouble, no error."""
        try:
            with anyio.fail_after(self._patience, shield=True):
                await self._receipts.settled()
                await self._acks.settled()
                await self._courier.ask(CLOSE_SESSION, (self._state,), (self.epoch,))
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
            await self._look()
        self._raise_trouble()
        letter = self._last = self._letters.popleft()
        return letter

    async def _look(self) -> None:
        """One step towards a letter: read a page, or wait until there is a reason to."""
        self._receipts.flush()
        self._acks.flush()
        self._raise_trouble()
        room = self.window - len(self._out)
        if room > 0 and not self._is_drained:
            await self._page(min(room, MOST_PER_PAGE))
        elif room <= 0 and self._rings != self._heard:
            await self._page(0)  # nothing can be read now, but somebody may have taken the session over
        else:
            self._wake.clear()  # nothing has been awaited since the flags were read
            with anyio.move_on_after(self._poll) as waited:
                await self._wake.wait()
            if waited.cancelled_caught:
                self._ring()

    async def _page(self, count: int) -> None:
        """Read what comes next; only here does a letter leave its inbox for the device."""
        heard = self._rings
        reply = await self._courier.ask(
            PAGE_LETTERS,
            (self._inbox, self._state, self._expiry),
            (self.epoch, self._cursor, count, PAGE_BYTES, self._ttl_ms),
        )
        if reply[0] != b"OK":
            self._end(SessionTaken(self.device))
            return
        self._heard = heard
        self._cursor, self._is_drained = reply[1].decode(), bool(int(reply[2])) and self._rings == heard
        for ref, envelope in zip(reply[3::2], reply[4::2], strict=True):
            seq = int(ref)
            self._letters.append(Letter(seq, envelope, device=self.device, is_redelivered=seq <= self._sent))
            self._out.add(seq)

    # -- settling -------------------------------------------------------------------------------------------------

    async def ack(self, letter: Letter) -> None:
        """The device has this letter: remove it. Goes out with the other acks of the moment; `flush` waits for them.

        A letter whose ack has not reached the server comes again in the next session. Raises SessionTaken.
        """
        self._check(letter)
        self._acks.add(letter.seq)
        self._free(letter)

    async def receive(self, letter: Letter) -> None:
        """The device has this letter, and will confirm once more with `ack` (QoS 2): until then its packet id is kept,
        whatever expires or overflows, and it comes again only as `is_received`. It still counts in the window."""
        self._check(letter)
        self._receipts.add(letter.seq)

    async def flush(self) -> None:
        """Wait until the server has all acks. Raises SessionTaken or BrokerUnavailable where it has not."""
        await self._receipts.settled()
        await self._acks.settled()
        self._raise_trouble()

    def _check(self, letter: Letter) -> None:
        self._raise_trouble()
        if not isinstance(letter, Letter):
            raise ConfigError(f"{letter!r} is no letter: pass what the session has yielded")
        if letter.device != self.device:
            raise ConfigError(f"{letter!r} is for device {letter.device!r}, this is the session of {self.device!r}")

    def _ack_last(self) -> None:
        if self._last is not None and self._trouble is None:
            self._acks.add(self._last.seq)
            self._free(self._last)

    def _free(self, letter: Letter) -> None:
        """There is room for another one."""
        self._out.discard(letter.seq)
        if letter is self._last:
            self._last = None
        self._wake.set()

    def _settlement(self, script: Script) -> Settlement:
        keys = (self._inbox, self._state, self._expiry)
        return Settlement(lambda seqs: self._courier.ask(script, keys, (self.epoch, *seqs)), self.device, self._end)

    # -- waking and ending ----------------------------------------------------------------------------------------

    def _ring(self) -> None:
        """There may be something new: a letter, or another session of this device."""
        self._rings += 1
        self._is_drained = False
        self._wake.set()

    def _end(self, trouble: BaseException) -> None:
        """No further step is possible."""
        self._trouble = self._trouble or trouble
        self._letters.clear()
        self._wake.set()

    def _raise_trouble(self) -> None:
        if self._trouble is not None:
            self._is_told = True
            raise self._trouble

    def __repr__(self) -> str:
        state = type(self._trouble).__name__ if self._trouble else "open" if self.epoch else "not open"
        return f"<Session {self.device} {state} out={len(self._out)}>"


async def clear(courier: Courier, keys: tuple[str, str, str], left: int) -> None:
    """Remove what lies under the floor of an inbox, in bounded steps."""
    while left:
        left = (await courier.ask(CLEAR_INBOX, keys, (0, CHUNK)))[2]


def poll_seconds(settings: Settings) -> float:
    """How often an idle session looks: often enough that its device is not forgotten meanwhile."""
    return min(settings.inbox_poll, settings.inbox_ttl / 3).total_seconds()
