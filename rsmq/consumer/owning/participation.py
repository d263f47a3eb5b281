"""Whether this member takes part in its group: it joins when it can read and settle, and leaves when it cannot."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
from collections.abc import Callable, Mapping
from typing import Final

import anyio

from rsmq.consumer.owning.node_watch import NodeWatch
from rsmq.consumer.reading.fetchers import Fetchers
from rsmq.consumer.settling.settler import Settler
from rsmq.consumer.waiting.context import ConsumerContext
from rsmq.errors import BrokerError, BrokerUnavailable
from rsmq.heartbeat.heartbeat import Heartbeat
from rsmq.heartbeat.membership import UNREADABLE, Membership, refuse_mixed_ordering, write_numbers
from rsmq.model.backoff import Backoff
from rsmq.model.clock import awake, to_ms
from rsmq.model.log_throttle import ThrottledLog

log = logging.getLogger("rsmq.membership")

CHECK_SECONDS: Final = 0.25
"""Between two looks at the connections."""
LEAST_PATIENCE: Final = 3.0
"""Seconds to open all connections at the first attempt, however short the lease: the machine may be busy."""
LONGEST_REST: Final = 600.0
"""Seconds before a member that has left for the same trouble again and again joins once more."""


class Participation:
    """Joins the group and leaves it, as the connections of this member allow.

    A member owns partitions, and the others leave them to it. So one that cannot read them would stop them for good,
    with its heartbeat alive: the server has no connection left for it, the process no descriptor, its user may not
    read. It joins when its reading connection is open and has been allowed to read, and the settling one answers. One
    whose reads, or settlements, fail for a lease while its heartbeat works gives its partitions back and leaves; it
    goes on trying, and joins again. An outage of the server fails the heartbeat as well: then no member leaves.

    On a cluster this holds for each node: a member gives back the partitions of the nodes that it cannot read, or at
    which it cannot settle, tells the others which these are, and keeps the rest. It leaves when it has none.
    """

    def __init__(
        self,
        context: ConsumerContext,
        heartbeat: Heartbeat,
        membership: Membership,
        fetchers: Fetchers,
        settler: Settler,
        vitals: Callable[[], Mapping[str, object]],
        on_question: Callable[[bytes], None],
    ) -> None:
        self._context = context
        self._heartbeat = heartbeat
        self._membership = membership
        self._fetchers = fetchers
        self._settler = settler
        self._vitals, self._on_question = vitals, on_question
        self._lease_seconds = context.settings.lease_ttl.total_seconds()
        self._rest = Backoff(self._lease_seconds / 2, LONGEST_REST)
        self._throttled = ThrottledLog(log)
        self._joined_at = 0.0
        is_split = context.handler.distribution == "hash"
        self._nodes = NodeWatch(context, fetchers, settler.nodes) if is_split and settler.nodes is not None else None
        self.trouble = ""
        """Why this member takes no part in its group; empty while it does."""

    # -- joining --------------------------------------------------------------------------------------------------

    async def begin(self, stopping: asyncio.Event) -> bool:
        """Join for the first time, however long that takes. False: stopped before that, so there is nothing to end."""
        is_member = False
        async with anyio.create_task_group() as tasks:

            async def cancel_when_stopping() -> None:
                await stopping.wait()
                tasks.cancel_scope.cancel()

            tasks.start_soon(cancel_when_stopping)
            await self._join()
            await self._refuse_mixed_ordering()
            is_member = True
            tasks.cancel_scope.cancel()
        return is_member

    async def _join(self) -> None:
        """Become a member. If not all connections can be had in about a lease, those of this member are closed for a
        while: otherwise several processes, each with some of its connections, would wait for each other for ever. Each
        attempt has more time than the one before: on a slow network its twenty round trips may take more than a lease.
        """
        least = max(self._lease_seconds, LEAST_PATIENCE)
        patience = Backoff(least, 8 * least)
        while True:
            with anyio.move_on_after(patience.next() * random.uniform(0.75, 1.5)) as scope:
                await self._open()
                await self._register()
            if not scope.cancelled_caught:
                self.trouble = ""
                self._joined_at = awake()
                return
            self.trouble = self._fetchers.trouble or self._settler.trouble or self.trouble or "no connection"
            self._warn("does not join")
            await self._heartbeat.leave(self._context.topic.name, self._context.handler.group)
            await self._rest_for(self._lease_seconds * random.uniform(0.1, 1))

    async def _rest_for(self, seconds: float) -> None:
        await self._fetchers.rest(seconds)
        await self._settler.disconnect()
        self._heartbeat.rest()
        await self._context.client.close_idle()
        await asyncio.sleep(seconds)

    async def _open(self) -> None:
        """Until the connections that read and settle are open."""
        await self._fetchers.wait_until_reading(self._probes())
        if self._nodes is not None and self._settler.nodes is not None:
            await self._settler.nodes.open(self._nodes.one_of_each())
            self._nodes.begin()
            self._membership.exclude(self._nodes.partitions)
        while True:
            try:
                return await self._settler.check()
            except BrokerError as error:
                self.trouble = str(error)
                await asyncio.sleep(CHECK_SECONDS)

    def _probes(self) -> list[int]:
        """The partitions whose readers are to be open before this member joins."""
        if self._nodes is not None:
            return self._nodes.one_of_each()
        return list(self._context.topic.numbers) if self._context.client.is_cluster else []

    async def _register(self) -> None:
        handler = self._context.handler
        info: dict[str, object] = {
            "handler": handler.name,
            "concurrency": handler.concurrency,
            "lease_ttl_ms": to_ms(self._context.settings.lease_ttl),
            "ordering": handler.ordering,
            **self._context.topic.layout.known_as,
            "gc_every": gc.get_threshold()[0] if gc.isenabled() else 0,
            "attempts": handler.retry.max_attempts,
            "timeout_ms": None if handler.timeout is None else to_ms(handler.timeout),
            "limits": handler.limit_texts,
        }
        if handler.bands.reserve:
            info["reserve"] = dict(handler.bands.reserve)
        if weights := handler.known_weights:
            info["weights"] = weights
        if self._nodes is not None:
            info[UNREADABLE] = write_numbers(self._nodes.partitions)
        if handler.fallback is not None:
            info["fallback"] = handler.fallback.target
        if handler.fallback is not None and handler.fallback.group is not None:
            info["fallback_group"] = handler.fallback.group
        view = self._membership
        about = (self._context.topic.name, handler.group, info)
        await self._heartbeat.join(*about, view.refresh, self._vitals, self._on_question, view.hear)
        known = self._context.topic.layout.known_as
        if any(info.get(name) != value for name, value in known.items()):
            self._heartbeat.tell(self._context.topic.name, handler.group, **known)  # it was changed meanwhile

    async def _refuse_mixed_ordering(self) -> None:
        """Again, now that the others see this member: one of two that start together must give way."""
        context = self._context
        about = (context.topic.name, context.handler.group, context.member, context.handler.ordering)
        while True:
            try:
                return await refuse_mixed_ordering(context.client, context.keys, *about)
            except BrokerUnavailable:
                await asyncio.sleep(0.2)

    # -- leaving and joining again --------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until cancelled: leave when this member cannot do its work, and join again when it can."""
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            self._look_at_nodes()
            trouble = await self._lasting_trouble()
            if trouble is None:
                if awake() - self._joined_at > 2 * self._lease_seconds:
                    self._rest.reset()
                continue
            self.trouble = trouble
            self._warn("gives its partitions back")
            self._membership.take_part(is_member=False)
            await self._heartbeat.leave(self._context.topic.name, self._context.handler.group)
            await asyncio.sleep(self._rest.next())
            await self._join()
            log.info("%s takes part in %s again", self._context.member, self._context.name)
            self._membership.take_part(is_member=True)

    @property
    def _works_since(self) -> float | None:
        """`awake` since when this member could have done its work: it has joined, and its heartbeat works."""
        since = self._heartbeat.works_since(self._context.topic.name, self._context.handler.group)
        return None if since is None else max(since, self._joined_at)

    def _look_at_nodes(self) -> None:
        """Give back the partitions of nodes that cannot be read, or take part there again."""
        works_since = self._works_since
        if self._nodes is None or works_since is None or not self._nodes.look(works_since):
            return
        partitions, name = self._nodes.partitions, self._context.name
        if partitions:
            self._throttled.warn(
                f"{self._context.member} cannot read or settle partitions {write_numbers(partitions)} of {name} and "
                f"leaves them to other members, it goes on trying", self._nodes.trouble,
            )  # fmt: skip
        else:
            log.info("%s can read and settle all partitions of %s again", self._context.member, name)
        self._heartbeat.tell(
            self._context.topic.name, self._context.handler.group, **{UNREADABLE: write_numbers(partitions)}
        )
        self._membership.exclude(partitions)

    @property
    def unreadable(self) -> str:
        """On a cluster: which partitions this member cannot read or settle, and why; empty if it can all. May be read
        by any thread."""
        if self._nodes is None or not (partitions := self._nodes.partitions):
            return ""
        return f"{write_numbers(partitions)} cannot be read or settled: {self._nodes.trouble}"

    async def _lasting_trouble(self) -> str | None:
        """What has kept this member from reading or settling for a lease, while its heartbeat worked."""
        works_since = self._works_since
        if works_since is None:
            return None
        if self._nodes is not None:
            return self._nodes.trouble if self._nodes.partitions.issuperset(self._context.topic.numbers) else None
        for each in (self._fetchers, self._settler):
            since = each.failing_since
            if since is not None and awake() - max(since, works_since) >= self._lease_seconds:
                if each is self._settler and await self._settles():
                    continue
                return each.trouble
        return None

    async def _settles(self) -> bool:
        """The last call has failed. Since then there may have been none."""
        try:
            await self._settler.check()
        except BrokerError:
            return False
        return True

    def _warn(self, what: str) -> None:
        self._throttled.warn(f"{self._context.member} {what} of {self._context.name}, it goes on trying", self.trouble)

    def __repr__(self) -> str:
        return f"<Participation {self._context.name}{' ' + self.trouble if self.trouble else ''}>"
