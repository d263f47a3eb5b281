"""The fetchers of one consumer: one for each band on a single server, so that a full band does not stop the others; one
for each partition on a cluster, because a blocking read cannot name streams of different slots."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Collection, Mapping

import anyio
import anyio.abc

from rsmq.consumer.reading.fetcher import Fetcher
from rsmq.consumer.reading.reclaimer import Reclaimer
from rsmq.consumer.running.runner import Runner
from rsmq.consumer.settling.settler import Settler
from rsmq.consumer.waiting.context import ConsumerContext
from rsmq.errors import BrokerError, ConfigError

log = logging.getLogger("rsmq.consumer")

FIRST_SECONDS = 1.0
"""On a cluster: how much longer than the first node the others may take for a reading connection."""
REAP_SECONDS = 1.0
"""A fetcher whose partition is not ours any more keeps its connection this long, because the lease may come back."""


class Fetchers:
    """Makes the fetcher of a partition when it is first needed, and ends it when the partition is not ours any more.

    Invariant: a partition is read by one fetcher only.
    """

    def __init__(self, context: ConsumerContext, runner: Runner, settler: Settler, reclaimer: Reclaimer) -> None:
        self._context, self._lanes = context, context.lanes
        self._runner = runner
        self._settler = settler
        self._reclaimer = reclaimer
        self._is_split = context.client.is_cluster
        self._fetchers: dict[int | str, Fetcher] = {}
        self._scopes: dict[int | str, anyio.CancelScope] = {}
        self._tasks: anyio.abc.TaskGroup | None = None
        self._assigned, self._probes = frozenset[int](), frozenset[int]()
        self.is_paused = False

    @property
    def active(self) -> tuple[Fetcher, ...]:
        """Those that read now. Each knows when it last did. May be called from any thread."""
        return tuple(self._fetchers.values())

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Read until cancelled."""
        async with anyio.create_task_group() as tasks:
            self._tasks = tasks
            if not self._is_split:
                self._fetcher(0)
            task_status.started()
            idle = set[int | str]()
            while True:
                await anyio.sleep(REAP_SECONDS)
                if self._is_split:
                    idle = self._reap(idle)

    def _reap(self, idle: set[int | str]) -> set[int | str]:
        """End the fetchers that were idle the last time, too; returns those that are idle now."""
        free = {partition for partition, fetcher in self._fetchers.items() if not fetcher.is_read_late}
        without = free - self._lanes.keys() - self._assigned - self._probes
        for partition in without & idle:
            self._fetchers.pop(partition)
            self._scopes.pop(partition).cancel()
        self._share_room()
        return without - idle

    def _fetcher(self, partition: int) -> Fetcher:
        key = self._key(partition)
        fetcher = self._fetchers.get(key)
        if fetcher is None:
            assert self._tasks is not None, "a fetcher is needed before `run`"
            band, only = self._context.topic.layout.band_of(partition), partition if self._is_split else None
            fetcher = Fetcher(self._context, self._runner, self._settler, self._reclaimer, only, band)
            fetcher.pause(self.is_paused)
            self._fetchers[key] = fetcher
            self._share_room()
            self._scopes[key] = scope = anyio.CancelScope()
            self._tasks.start_soon(self._serve, fetcher, scope)
        return fetcher

    def keep(self, assigned: Collection[int]) -> None:
        """These partitions are to be ours: their fetchers go on trying, however long that takes."""
        self._assigned = frozenset(assigned)

    def probe(self, partitions: Collection[int]) -> None:
        """The fetchers of these go on trying, too, to find out whether their nodes can be read."""
        self._probes = frozenset(partitions)
        if self._tasks is not None:
            for partition in partitions:
                self._fetcher(partition)

    def _key(self, partition: int) -> int | str:
        """The name of the fetcher that reads a partition: on a single server its band."""
        return partition if self._is_split else self._context.topic.layout.band_of(partition)

    def _share_room(self) -> None:
        """Those of one band share its prefetch bound."""
        counts = Counter(fetcher.band for fetcher in self._fetchers.values())
        for fetcher in self._fetchers.values():
            fetcher.share(counts[fetcher.band])

    async def _serve(self, fetcher: Fetcher, scope: anyio.CancelScope) -> None:
        with scope:
            await fetcher.run()

    # -- which connection reads -----------------------------------------------------------------------------------

    def reader(self, partition: int) -> str:
        """The connection that reads, or would read, a partition; empty while there is none."""
        return self._fetcher(partition).reader

    async def wait_for_reader(self, partition: int) -> None:
        """Until there is one: a lease must name it."""
        await self._fetcher(partition).connected.wait()

    def late_reader(self, partition: int) -> str:
        """The connection on which a read of this partition may be on its way, or empty. Also after `run`."""
        return "".join(fetcher.late_reader(partition) for fetcher in self.active)

    async def end_late_reads(self) -> None:
        """After `run`: end the connections with unanswered reads. Those that cannot be ended stay late readers."""
        for fetcher in self.active:
            try:
                await fetcher.end_late_read()
            except (BrokerError, ConfigError) as error:
                log.debug("cannot end a late read: %s", error)

    async def wait_until_reading(self, probes: Collection[int]) -> None:
        """Until a reading connection is open and has been allowed to read. On a cluster each partition has one of its
        own, which is opened before its lease is taken; here `probes` are asked, one partition of each node, and the
        nodes that are slower than the first one have a second more."""
        if not self._is_split:
            await self.wait_for_reader(0)
            return
        self.probe(probes)
        async with anyio.create_task_group() as tasks:
            is_first_open = asyncio.Event()

            async def wait(partition: int) -> None:
                await self.wait_for_reader(partition)
                is_first_open.set()

            for partition in probes:
                tasks.start_soon(wait, partition)
            await is_first_open.wait()
            tasks.cancel_scope.deadline = anyio.current_time() + FIRST_SECONDS

    async def rest(self, seconds: float) -> None:
        """Close the reading connections for so long."""
        for fetcher in self.active:
            fetcher.rest(seconds)

    @property
    def failing_since(self) -> float | None:
        """`awake` since when no fetcher can read; None if one can, or none is needed."""
        since = [fetcher.failing_since for fetcher in self.active]
        return None if not since or None in since else max(each for each in since if each is not None)

    def by_partition(self) -> Mapping[int, Fetcher]:
        """On a cluster: the fetcher of each partition that has one."""
        return {key: fetcher for key, fetcher in self._fetchers.items() if isinstance(key, int)}

    @property
    def trouble(self) -> str:
        """What has failed last, if something fails."""
        return next((each.trouble for each in self.active if each.failing_since is not None), "")

    # -- for roles that change the lanes --------------------------------------------------------------------------

    async def pause(self, is_paused: bool) -> None:
        """Read nothing new, or read again."""
        self.is_paused = is_paused
        for fetcher in self.active:
            fetcher.pause(is_paused)
        await self.interrupt()

    async def interrupt(self) -> None:
        """The lanes have changed: every fetcher reads the new ones now, or when its blocking read ends."""
        self._runner.retries.set()
        if self._tasks is not None:
            for partition in self._lanes:
                self._fetcher(partition)
        try:
            await asyncio.gather(*(fetcher.interrupt() for fetcher in self.active))
        except BrokerError as error:
            log.debug("cannot interrupt a blocking read: %s", error)

    async def exclude(self, partition: int | None = None) -> None:
        """Wait until no read written before this call is on its way, of one partition or at all."""
        fetchers = [each for key, each in self._fetchers.items() if partition is None or key == self._key(partition)]
        await asyncio.gather(*(fetcher.exclude() for fetcher in fetchers))

    def __repr__(self) -> str:
        return f"<Fetchers {list(self.active)}>"
