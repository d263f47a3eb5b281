"""Permits that a handler takes itself, just before a call: `async with message.permit("twilio")`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

from anyio import from_thread

from rsmq.consumer.waiting.borrower import Borrower
from rsmq.consumer.waiting.group_rate import GroupRate
from rsmq.consumer.waiting.holds import Holds
from rsmq.consumer.waiting.loan import InUse, Loan
from rsmq.errors import ConfigError
from rsmq.handler.retry import Hold
from rsmq.model.in_loop import is_in_loop
from rsmq.model.message import Message


class NamedCalls:
    """The calls of one name at once, over the group, as far as this member has permits for them."""

    def __init__(self, name: str, limit: int, borrower: Borrower) -> None:
        self._name = name
        self._limit = limit
        self._borrower = borrower
        self._in_use = InUse()
        self._waiting = 0
        self._opened = asyncio.Event()
        self._own: Loan | None = None

    def _loan(self) -> Loan:
        """Its permits. The borrower forgets those of a name that is not in use."""
        loan = self._borrower.loan(self._name)
        if loan is None or loan is not self._own:
            waiting: Callable[[], int] = lambda: self._waiting  # noqa: E731
            loan = self._own = self._borrower.lend(self._name, self._limit, self._in_use, waiting, self._opened.set)
        return loan

    async def take(self, check: Callable[[], None]) -> None:
        """Wait until there is a permit, and use it. `check` raises what ends the waiting."""
        self._waiting += 1
        try:
            while True:
                check()
                loan = self._loan()
                if self._borrower.room(loan):
                    break
                self._borrower.is_short(loan)
                self._opened.clear()
                await self._opened.wait()
            self._in_use.enter()
        finally:
            self._waiting -= 1

    def give_back(self) -> None:
        """Its call has ended."""
        self._in_use.leave()
        self._opened.set()
        if self._own is not None:
            self._borrower.is_free(self._own)

    def look_again(self) -> None:
        """Something has changed for those that wait."""
        self._opened.set()


class HandlerPermits:
    """The limits by name that a handler declares with `permits`, and what it says of its costs."""

    def __init__(
        self,
        rates: Mapping[str, GroupRate],
        calls: Mapping[str, NamedCalls],
        spending: GroupRate | None,
        holds: Holds | None,
        runs: Callable[[Message], bool],
    ) -> None:
        self._rates = rates
        self._calls = calls
        self._spending = spending
        self._holds, self._runs = holds, runs
        self._waiting: dict[Message, str] = {}
        self._held = set[tuple[object, str]]()
        """Who is inside a block of which name: a task, or a thread by its number."""
        if holds is not None:
            holds.on_change(self._look_again)

    @property
    def rates(self) -> Collection[GroupRate]:
        """Those that the server counts."""
        return self._rates.values()

    def wait_for_a_time(self, running: int) -> bool:
        """Whether all handlers that run, so many, wait here: for a rate, or for the permits of those that do."""
        is_timed = any(rate.waiting_callers for rate in self._rates.values())
        return is_timed and running == len(self._waiting)

    def roles(self) -> Iterator[Callable[[], Coroutine[Any, Any, None]]]:
        """What must run beside the handler."""
        return (rate.run for rate in self._rates.values())

    def _look_again(self) -> None:
        for each in self._calls.values():
            each.look_again()

    def permit(self, message: Message, name: str) -> Permit:
        """A permit of a name, for a message whose handler runs."""
        known = sorted({*self._rates, *self._calls})
        if name not in known:
            raise ConfigError(
                f"there is no permit {name!r}: the handler declares {', '.join(known) or 'none'}. Write "
                f"@broker.handler(..., permits={{{name!r}: Rate(100, per='1s')}})"
            )
        return Permit(self, message, name)

    def spent(self, message: Message, number: int) -> None:
        """A message that runs has cost so many."""
        if not isinstance(number, int) or isinstance(number, bool) or number < 0:
            raise ConfigError(f"message.spent({number!r}) is not possible: give a whole number of 0 or more")
        if self._spending is None or not self._spending.spent(message, number):
            raise ConfigError(
                f"{message} is not counted by a cost: write rate=Rate(..., cost=...) on its handler, and call "
                f"message.spent while it runs"
            )

    async def take(self, message: Message, name: str, caller: object) -> None:
        """Wait until a call may start, and count it. What ends the waiting: the end of the handler, or a hold.

        Raises ConfigError for a caller that has a permit of this name, and would wait for itself.
        """
        if (caller, name) in self._held:
            raise ConfigError(
                f"the permit {name!r} is taken inside its own block: calls that each have one would wait for each "
                f"other. Leave the block first, or make both calls in one block"
            )

        def check() -> None:
            if not self._runs(message):
                raise ConfigError(f"the handler of {message} has ended: take permits inside it")
            left = timedelta(0) if self._holds is None else self._holds.time_left(name)
            if left > timedelta(0):
                raise Hold(left, name)

        calls = self._calls.get(name)
        self._waiting[message] = name
        try:
            if calls is not None:
                await calls.take(check)
            try:
                if name in self._rates:
                    await self._rates[name].acquire(name, check)
                check()
            except BaseException:
                self.give_back(name, caller)
                raise
            if calls is not None:
                self._held.add((caller, name))
        finally:
            self._waiting.pop(message, None)

    def waited_for(self, message: Message) -> str | None:
        """The permit that the handler of a message waits for now; None: for none."""
        return self._waiting.get(message)

    def give_back(self, name: str, caller: object) -> None:
        """The call has ended."""
        self._held.discard((caller, name))
        if name in self._calls:
            self._calls[name].give_back()

    def __repr__(self) -> str:
        return f"<HandlerPermits {sorted({*self._rates, *self._calls})}>"


class Permit:
    """Lets one call start, and counts as one that runs as long as the block lasts: `async with`, or `with` in a handler
    that is a plain function."""

    def __init__(self, permits: HandlerPermits, message: Message, name: str) -> None:
        self._permits = permits
        self._message = message
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._caller: object = None

    async def __aenter__(self) -> Self:
        if not is_in_loop():
            raise ConfigError(f"a plain function writes `with message.permit({self._name!r}):`")
        self._caller = asyncio.current_task()
        await self._permits.take(self._message, self._name, self._caller)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._permits.give_back(self._name, self._caller)

    async def _take(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self._permits.take(self._message, self._name, self._caller)

    def __enter__(self) -> Self:
        if is_in_loop():
            raise ConfigError(f"an async function writes `async with message.permit({self._name!r}):`")
        self._caller = threading.get_ident()
        from_thread.run(self._take)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Also in a thread that runs on after its message was cancelled: its call holds the permit so long."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._permits.give_back, self._name, self._caller)

    def __repr__(self) -> str:
        return f"<Permit {self._name}>"
