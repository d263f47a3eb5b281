"""Borrows permits from the server: the limits of a group on calls at once, of all its messages or of each name."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from itertools import count
from math import inf

import anyio

from rsmq.consumer.waiting.context import ConsumerContext
from rsmq.consumer.waiting.loan import CALM, InUse, Loan
from rsmq.errors import BrokerError
from rsmq.heartbeat.heartbeat import Heartbeat
from rsmq.heartbeat.lease import Lease, PermitLease
from rsmq.model.clock import monotonic, to_ms
from rsmq.model.log_names import name_in_log
from rsmq.model.log_throttle import ThrottledLog
from rsmq.model.settings import lease_margin
from rsmq.redis.scripts import LOST, OK, TAKE_PERMITS, Ask

log = logging.getLogger("rsmq.concurrency")

PATIENCE_MS = 1000
"""So long a wish counts that is not repeated: of a member that has died meanwhile."""


class Borrower:
    """The permits of one member in one group. One call every quarter of a second, while there is anything to say about
    a name; at once when a call could start and has no permit, or others wait for one that is free.

    All permits end together: with the lease that the heartbeat renews. Once that is over `on_lost` is called, and
    nothing starts until the server has lent new ones.
    """

    def __init__(self, context: ConsumerContext, ask: Ask, heartbeat: Heartbeat, on_lost: Callable[[], None]) -> None:
        self._context, self._ask = context, ask
        self._heartbeat, self._on_lost = heartbeat, on_lost
        settings = context.settings
        self._ttl, self._span = to_ms(settings.lease_ttl), (settings.lease_ttl - lease_margin(settings)).total_seconds()
        self._holders = context.keys.holders(context.topic.name, context.handler.group)
        self._lease: Lease | None = None
        self._token = 1
        self._numbers = count(1)  # of the calls for all names
        self._loans: dict[str | None, Loan] = {}
        self._changed = asyncio.Event()
        self._throttled = ThrottledLog(log)

    def lend(
        self, name: str | None, limit: int, in_use: InUse, waiting: Callable[[], int], opened: Callable[[], None]
    ) -> Loan:
        """The permits of a name, or of the whole group. `waiting` says how many calls could start if there were some;
        `opened` is called when there may be."""
        key = self._context.keys.permits(self._context.topic.name, self._context.handler.group, name)
        loan = self._loans[name] = Loan(key, limit, in_use, waiting, opened)
        return loan

    def loan(self, name: str | None) -> Loan | None:
        """The permits of a name that is in use."""
        return self._loans.get(name)

    def quota(self, loan: Loan) -> int:
        """How many calls may run at once now."""
        return loan.quota if self._is_held() else 0

    def room(self, loan: Loan) -> int:
        """How many more may start now."""
        return loan.room if self._is_held() else 0

    def _is_held(self) -> bool:
        return self._lease is not None and monotonic() < self._lease.deadline

    def is_short(self, loan: Loan) -> None:
        """A call could start if there were a permit: ask now, unless the server had too few at the last call."""
        loan.want_more()
        self._changed.set()

    def is_free(self, loan: Loan) -> None:
        """A call has ended. If others wait for its permit, give it back now."""
        if loan.is_to_give_back:
            loan.call_at(0.0)
            self._changed.set()

    @property
    def is_undecided(self) -> bool:
        """Whether calls wait for an answer of the server. Who holds all permits waits for its own calls."""
        loans = [loan for loan in self._loans.values() if loan.waiting() and loan.quota < loan.limit]
        return any(not loan.is_short and not loan.room for loan in loans)

    # -- calls ----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Call for each name in use, until cancelled."""
        while True:
            now = monotonic()
            if self._lease is not None and now >= self._lease.deadline:
                self._lose()
            due = [(name, loan) for name, loan in self._loans.items() if loan.next_call <= now]
            if due:
                await asyncio.gather(*[self._exchange(name, loan) for name, loan in due])
                continue
            later = min([loan.next_call for loan in self._loans.values()], default=inf)
            if self._lease is not None:
                later = min(later, self._lease.deadline)
            self._changed.clear()
            with anyio.move_on_after(later - now):
                await self._changed.wait()

    async def _exchange(self, name: str | None, loan: Loan) -> None:
        """Say what is kept, give back the rest, and get what is wanted."""
        calls = self._context.handler.concurrency
        if loan.is_clean and not loan.in_use.count and not loan.waiting():
            loan.call_at(inf)
            if name is not None:
                del self._loans[name]
            return
        claim, token, is_first = loan.ask(next(self._numbers), calls), self._token, self._lease is None
        loan.call_at(inf)  # until the answer
        args = (
            self._context.member, token, claim.number, int(is_first), loan.limit, self._ttl, PATIENCE_MS,
            claim.kept, claim.wanted,
        )  # fmt: skip
        sent = monotonic()
        try:
            reply = await self._ask(TAKE_PERMITS, (loan.key, self._holders), args)
        except BrokerError as error:
            self._throttled.warn("a limit on calls at once waits for the server", error)
            reply = [b"NO_REPLY"]
        if token != self._token:  # all was lost meanwhile
            loan.call_at(0.0)
        elif reply[0] == LOST:
            self._lose()
        elif reply[0] != OK:
            loan.failed()
            loan.call_at(sent + CALM)
        else:
            if len(reply) > 5:
                whose = "the group" if name is None else name_in_log(name)
                log.warning("%s: the permits of %s cannot be read: they begin anew", self._context.name, whose)
            if self._lease is None:
                self._begin_lease(sent)
            if not loan.answered(claim, *reply[1:5]):
                self._lose()
                return
            wants_more = loan.wants_more and not loan.is_short and loan.waiting() > loan.room
            loan.call_at(0.0 if wants_more or loan.is_to_give_back else sent + loan.pause())
            if loan.room:
                loan.opened()

    def _begin_lease(self, sent: float) -> None:
        context = self._context
        about = (context.topic.name, context.handler.group, self._holders, context.member)
        self._lease = PermitLease(*about, self._token, sent + self._span)
        self._heartbeat.renew(self._lease, self._was_refused)

    def _was_refused(self, lease: Lease) -> None:
        if lease is self._lease:
            self._lose()

    def _lose(self) -> None:
        """The lease is over: no permit counts any more."""
        if self._lease is not None:
            self._lease.lose()
            self._heartbeat.forget(self._lease)
        self._lease = None
        self._token += 1
        used = sum(loan.in_use.count for loan in self._loans.values())
        for loan in self._loans.values():
            loan.lose()
            loan.call_at(0.0)
        if used:
            log.warning("%s: the permits of %d running calls are lost: they are cancelled", self._context.name, used)
            self._on_lost()
        self._changed.set()

    async def leave(self) -> None:
        """Give back everything: nothing runs any more."""
        if self._lease is not None:
            self._heartbeat.forget(self._lease)
            await self._context.client.execute_command("HDEL", self._holders, self._context.member)
            self._lease = None

    def __repr__(self) -> str:
        return f"<Borrower {len(self._loans)} names, token {self._token}>"
