"""The intake: the readers of one member. One on a single server; on a cluster one for each partition, because a
blocking read cannot name streams of different slots."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping

import anyio
import anyio.abc

from rsmq.connect import Client
from rsmq.consumer.fetcher import Fetcher
from rsmq.consumer.lane import Lane
from rsmq.consumer.runner import Runner

REAP_SECONDS = 1.0
"""A reader whose partition is not ours any more keeps its connection this long, for the lease may come back."""

Lanes = Mapping[int, Lane]


class Single(Mapping[int, Lane]):
    """The lanes of one partition, out of all: one or none."""

    def __init__(self, lanes: Lanes, partition: int) -> None:
        self._lanes, self._partition = lanes, partition

    def __getitem__(self, partition: int) -> Lane:
        if partition != self._partition:
            raise KeyError(partition)
        return self._lanes[partition]

    def __iter__(self) -> Iterator[int]:
        return iter((self._partition,) if self._partition in self._lanes else ())

    def __len__(self) -> int:
        return int(self._partition in self._lanes)


class Intake:
    """Has a reader for every lane, made when it is first asked for and let go when its partition is ours no more.

    Invariant: a partition is read by one reader only.
    """

    def __init__(
        self, client: Client, lanes: Lanes, runner: Runner, make: Callable[[Lanes, int | None, Intake], Fetcher]
    ) -> None:
        self._lanes, self._runner, self._make = lanes, runner, make
        self._is_split = client.is_cluster
        self._readers: dict[int | None, Fetcher] = {}
        self._scopes: dict[int | None, anyio.CancelScope] = {}
        self._tasks: anyio.abc.TaskGroup | None = None
        self._is_paused = False

    @property
    def shares(self) -> int:
        """Among how many readers the room in memory is shared."""
        return max(1, len(self._readers))

    @property
    def readers(self) -> tuple[Fetcher, ...]:
        """Those that read now."""
        return tuple(self._readers.values())

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Read until cancelled."""
        async with anyio.create_task_group() as tasks:
            self._tasks = tasks
            if not self._is_split:
                self._reader(0)
            task_status.started()
            idle = set[int | None]()
            while True:
                await anyio.sleep(REAP_SECONDS)
                if self._is_split:
                    idle = self._reap(idle)

    def _reap(self, idle: set[int | None]) -> set[int | None]:
        """End the readers that were idle at the last look, too; returns those that are now."""
        without = {partition for partition in self._readers if partition not in self._lanes}
        for partition in without & idle:
            self._readers.pop(partition)
            self._scopes.pop(partition).cancel()
        return without - idle

    def _reader(self, partition: int) -> Fetcher:
        place = partition if self._is_split else None
        reader = self._readers.get(place)
        if reader is None:
            assert self._tasks is not None, "asked for a reader before `run`"
            lanes = Single(self._lanes, partition) if self._is_split else self._lanes
            reader = self._readers[place] = self._make(lanes, place, self)
            reader.is_paused = self._is_paused
            self._scopes[place] = scope = anyio.CancelScope()
            self._tasks.start_soon(self._serve, reader, scope)
        return reader

    async def _serve(self, reader: Fetcher, scope: anyio.CancelScope) -> None:
        with scope:
            await reader.run()

    # -- which connection reads -----------------------------------------------------------------------------------

    def reader(self, partition: int) -> str:
        """The connection that reads, or would read, a partition; empty while there is none."""
        return self._reader(partition).reader

    async def wait_for_reader(self, partition: int) -> None:
        """Until there is one: a lease must name it."""
        await self._reader(partition).ready.wait()

    # -- for those who change the lanes ---------------------------------------------------------------------------

    @property
    def is_paused(self) -> bool:
        """Whether nothing new is read."""
        return self._is_paused

    @is_paused.setter
    def is_paused(self, is_paused: bool) -> None:
        self._is_paused = is_paused
        for reader in self._readers.values():
            reader.is_paused = is_paused

    async def interrupt(self) -> None:
        """The lanes have changed: let every reader look at them now."""
        self._runner.retries.set()
        if self._tasks is not None:
            for partition in self._lanes:
                self._reader(partition)
        await asyncio.gather(*(reader.interrupt() for reader in list(self._readers.values())))

    async def exclude(self, partition: int | None = None) -> None:
        """Wait until no read written before this call is on its way, of one partition or at all."""
        readers = [reader for place, reader in self._readers.items() if partition is None or place in (None, partition)]
        await asyncio.gather(*(reader.exclude() for reader in readers))

    async def kick(self) -> None:
        """Let the pool work on what others than a reader have queued."""
        await self._runner.kick()

    def __repr__(self) -> str:
        return f"<Intake {list(self._readers.values())}>"
