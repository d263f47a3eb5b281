"""Every order in which a topic is resized and used: the package's own coroutines, on a real server.

All messages have one key, so each partition of a topic has one that follows it with this key. A worker reads a
partition that follows others when the code says that these are finished. In each state, what a group gets next must be
the first message that it has not got; nothing may be lost, and there must be a way to the end.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Final

import redis

from rsmq.errors import BrokerError
from rsmq.model.layout import RESIZED, Layout
from rsmq.redis import layouts, topics
from rsmq.redis.topics import Topics
from rsmq.redis.wire.slots import is_script
from rsmq.testing.server import ThrowawayServer
from tests.interleavings.bands import (
    FAILED,
    KEYS,
    NAME,
    NO_FAULTS,
    PIPELINE,
    PROGRAMS,
    PUBLISHES,
    RESETS,
    SETTINGS,
    WORKERS,
    BandMoves,
    BandStore,
    BandWorld,
    Edit,
    Faults,
    Process,
    SearchedClient,
    Truth,
    look,
    with_process,
    worker,
)
from tests.interleavings.moves import Broken, Move
from tests.interleavings.search import Result, Search

KEY: Final = "k"
NUMBERS: Final = tuple(range(7))
"""One partition, the two that follow it, and the four that follow these."""


def numbers_on_a_cluster() -> tuple[int, ...]:
    """The same, with numbers in one slot."""
    beside = layouts.numbers_beside(KEYS, NAME)
    two = beside((0,), 2, 1)
    return (0, *two, *beside(two, 4, max(two) + 1))


async def grow(client: Any, process: Process) -> Process:
    """`rsmq topic resize`: twice as many partitions."""
    topics = Topics(client, KEYS, SETTINGS)
    topic = await topics.existing(NAME)
    added = topic.layout.following
    await topics.resize(NAME, 2 * topic.partitions if added is None else added.count)
    return process._replace(left=max(0, process.left - 1))


async def abort(client: Any, process: Process) -> Process:
    """`rsmq topic resize --abort`."""
    await Topics(client, KEYS, SETTINGS).abort_resize(NAME)
    return process._replace(left=0)


async def go_on(client: Any, process: Process) -> Process:
    """A worker finishes what was begun."""
    await Topics(client, KEYS, SETTINGS).go_on_with_resize(NAME)
    return await look(client, process)


class ClusterClient(SearchedClient):
    """Partitions are sealed one after the other, each in its slot: of scripts that are sent together each is a step."""

    is_cluster = True

    async def pipelined(self, commands: Sequence[Sequence[Any]]) -> list[Any]:
        """The replies of all nodes."""
        if not any(map(is_script, commands)):
            return await super().pipelined(commands)
        replies = list[Any]()
        for each in commands:
            try:
                replies.append(await self.execute_command(*each))
            except BrokerError as error:
                replies.append(error)
        return replies


class ResizeMoves(BandMoves):
    """All orders of one scenario."""

    programs = {**PROGRAMS, "grow": grow, "abort": abort, "open": go_on}
    _scenario: Any

    def begin(self) -> BandWorld:
        """The topic is there; those that have nothing left to do have done it, one after the other."""
        fields = ("created_ms", 0, "partitions", 1)
        server = self._store.begin([("SADD", KEYS.topics, NAME), ("HSET", KEYS.topic(NAME), *fields)])
        processes = tuple(each._replace(is_up=False) for each in self._scenario.processes)
        world = BandWorld(server, processes, (), self._scenario.faults, Truth())
        for at, process in enumerate(self._scenario.processes):
            if process.role == "seed":
                seed = process._replace(topic=None, left=1)
                world = with_process(world, at, seed._replace(program="find"))
                while world.members[at].program:
                    _, world, _ = next(self._step(world, at, world.members[at]))
                (_, world, _), *_ = self._publishes(world, at, world.members[at])
            elif process.is_up or not process.left:
                for program in ("start", "tell", "look") if process.role == "worker" else (process.role,):
                    world = with_process(world, at, world.members[at]._replace(program=program))
                    while world.members[at].program:
                        _, world, _ = next(self._step(world, at, world.members[at]))
                if process.role == "worker" and not process.left:  # it has stopped, and its group is there
                    stopped = process._replace(is_up=False, is_alive=False)
                    alive = KEYS.alive(NAME, process.group, process.name)
                    world = self._done(with_process(world, at, stopped), ("DEL", alive))
        return world

    def is_done(self, world: BandWorld) -> bool:
        """Each resize has ended, and each group has got all that was published."""
        layout = self._layout(world)
        if layout is None or layout.waits or world.late or (self._scenario.adds and not layout.is_resized):
            return False
        idle = all(not each.program for each in world.members if each.is_alive)
        acted = all(not each.left for each in world.members if each.is_alive and each.role not in WORKERS)
        known = all(each.topic.layout == layout for each in world.members if each.role == "worker" and each.topic)
        return idle and acted and known and not any(self._missing(world, group) for group in world.truth.groups)

    def after(self, world: BandWorld) -> list[Move]:
        """All that can happen next. No version of a layout has two texts."""
        if not self._scenario.has_versions:
            return super().after(world)
        moves = list[Move]()
        for move in super().after(world):
            after: Any = move.world
            layout = self._layout(after)
            if layout is not None:
                known = after.truth.bands | {(-layout.version, layout.stored)}
                texts = {text for version, text in known if version == -layout.version and version}
                move = move._replace(world=after._replace(truth=after.truth._replace(bands=known)))
                if len(texts) > 1:
                    move = move._replace(broken=f"version {layout.version} of the layout has two texts")
            moves.append(move)
        return moves

    def _missing(self, world: BandWorld, group: str) -> list[int]:
        """The messages that a group has not got, in the order in which they were published."""
        return [n for n, place, _ in world.truth.stored if self._groups(world, place).get(group, 0) < n]

    def _broken(self, world: BandWorld, layout: Layout | None) -> str:
        for number, place, _ in world.truth.stored:
            entries, _, _ = self._stream(world, place)
            lost = [group for group in world.truth.groups if number in self._missing(world, group)]
            if lost and number not in entries:
                return f"message {number} of partition {place} is lost for group {lost[0]}"
        if layout is not None and layout.is_resized:
            for each in world.members if self._scenario.all_know and not layout.waits else ():
                if each.is_up and each.topic is not None and each.topic.layout.numbers != layout.numbers:
                    return f"the partitions are used, and {each.name} does not know them"
        return ""

    def _has_work(self, world: BandWorld, process: Process, program: str) -> bool:
        known = process.topic
        if program == "open":
            is_alone = all(not (e.is_alive and e.left) for e in world.members if e.role in ("grow", "abort"))
            return known is not None and known.layout.following is not None and is_alone
        return super()._has_work(world, process, program)

    def _publishes(self, world: BandWorld, at: int, process: Process) -> Iterator[tuple[str, BandWorld, bool]]:
        topic, number = process.topic, len(world.truth.stored) + 1
        assert topic is not None
        place = topic.open_block().partition_for(KEY)
        command = ("XADD", KEYS.stream(NAME, place), f"{number}-1", "data", number)
        reply, server = self._store.execute(world.server, command)
        if isinstance(reply, tuple) and reply[:1] == (FAILED,):
            again = with_process(world, at, process._replace(topic=None))
            yield f"{process.name} is refused by partition {place}", again, False
            return
        layout = self._layout(world)
        later = [n for n, other, _ in world.truth.stored if layout and place in layout.ancestors_of(other)]
        if later:
            raise Broken(f"message {number} is stored before message {later[0]}, in partition {place}")
        stored = (*world.truth.stored, (number, place, world.truth.groups))
        after = world._replace(server=server, truth=world.truth._replace(stored=stored))
        after = with_process(after, at, process._replace(left=process.left - 1))
        yield f"{process.name} publishes {number} to partition {place}", after, False

    def _reads(self, world: BandWorld, at: int, process: Process) -> Iterator[tuple[str, BandWorld, bool]]:
        """A message is handled, if the partitions before its own are finished."""
        assert process.topic is not None
        for number in process.topic.numbers:
            entries, _, _ = self._stream(world, number)
            position = self._groups(world, number).get(process.group)
            if position is None:
                yield from self._begun(world, at, process, "mend")
                continue
            new = [each for each in entries if each > position]
            if not new:
                continue
            before = process.topic.layout.ancestors_of(number)
            if before:
                names = [KEYS.stream(NAME, each) for each in before]
                asked = [layouts.ARE_FINISHED.command([*names, KEYS.topic(NAME)], (process.group, RESIZED))]
                if self.client.is_cluster:
                    asked = [layouts.ARE_FINISHED.command([name], (process.group, "")) for name in names]
                is_sealed = all(map(process.topic.layout.is_sealed, before))
                if not is_sealed or any(self._store.execute(world.server, each)[0] for each in asked):
                    continue
            if missing := [each for each in self._missing(world, process.group) if each < new[0]]:
                raise Broken(f"group {process.group} gets message {new[0]} of partition {number} before {missing[0]}")
            key = KEYS.stream(NAME, number)
            read = ("XREADGROUP", "GROUP", process.group, "c", "COUNT", 1, "NOACK", "STREAMS", key, ">")
            after = self._done(world, (PIPELINE, read, ("XGROUP", "DELCONSUMER", key, process.group, "c")))
            yield f"{process.name} handles {new[0]} of partition {number}", after, False


class ClusterMoves(ResizeMoves):
    """The same on a cluster."""

    client = ClusterClient()


@dataclass(frozen=True)
class ResizeScenario:
    """Who takes part, and the faults that may happen. `all_know`: no worker starts while the topic is resized, so each
    knows the partitions before they are used. `has_versions`: the texts of layouts are compared. `is_short`: searched
    in `make test`, too. `is_cluster`: each partition is sealed in a step of its own."""

    name: str
    processes: tuple[Process, ...]
    faults: Faults = NO_FAULTS
    upkeep: tuple[str, ...] = ("look", "open")
    adds: bool = True
    all_know: bool = True
    has_versions: bool = False
    is_late: bool = False
    is_strict: bool = True
    is_short: bool = False
    is_cluster: bool = False

    def search(self, edit: Edit | None = None, show: Callable[[Result], None] = lambda _: None) -> Result:
        """What the search finds, on a server of its own."""
        groups = sorted({each.group for each in self.processes if each.group})
        numbers = numbers_on_a_cluster() if self.is_cluster else NUMBERS
        names = [KEYS.topics, KEYS.topic(NAME), *(KEYS.stream(NAME, number) for number in numbers)]
        for group in groups:
            names += [KEYS.group(NAME, group), KEYS.members(NAME, group)]
        names += [KEYS.alive(NAME, each.group, each.name) for each in self.processes if each.role in WORKERS]
        with (
            nullcontext() if edit is None else edit.applied(),
            ThrowawayServer() as server,
            redis.Redis.from_url(server.url, protocol=2) as client,
        ):
            client.response_callbacks.clear()
            kind = ClusterMoves if self.is_cluster else ResizeMoves
            moves: Any = kind(BandStore(client, names), names, self)
            return Search(moves, progress=show).run()


GROWS: Final = Process("operator", "grow")
GROWN: Final = GROWS._replace(left=0)
GROWS_TOO: Final = Process("other operator", "grow")
ABORTS: Final = Process("second thought", "abort")
SEED: Final = Process("seed", "seed", left=0)
PUBLISHES_TOO: Final = PUBLISHES._replace(name="other publisher")
PUBLISHES_TWO: Final = PUBLISHES._replace(left=2)

USED: Final = ResizeScenario(
    "resize: a worker and two publishers", (SEED, GROWS, worker("m1"), PUBLISHES, PUBLISHES_TOO)
)
REFUSED: Final = ResizeScenario("resize: two publishers", (GROWS, PUBLISHES, PUBLISHES_TOO), is_short=True)
KNOWN: Final = ResizeScenario("resize: a worker", (SEED, GROWS, worker("m1")), is_short=True)
DIES: Final = ResizeScenario(
    "resize: a process dies", (SEED, GROWS, worker("m1")), Faults(crashes=1), adds=False, all_know=False, is_short=True
)
LOST: Final = ResizeScenario("resize: a reply is lost", (SEED, GROWS, worker("m1")), Faults(lost=1), is_short=True)
TWICE: Final = ResizeScenario("resize: twice", (SEED, GROWS._replace(left=2), worker("m1"), PUBLISHES))
FOLLOWED: Final = ResizeScenario(
    "resize: three generations, and a reset",
    (SEED, GROWN, GROWN, SEED._replace(name="seed 2"), worker("m1"), RESETS, PUBLISHES),
    is_short=True,
)
SECOND_GROUP: Final = ResizeScenario(
    "resize: a second group starts", (SEED, GROWS, worker("m1"), worker("m2", "h", is_up=False)), all_know=False
)
ABORTED: Final = ResizeScenario(
    "resize: given up", (SEED, GROWS, ABORTS, worker("m1")), adds=False, has_versions=True, is_short=True
)
STOPPED: Final = ResizeScenario("resize: a group without workers", (worker("m2", "h", left=0), GROWS), is_short=True)
TIDIED: Final = ResizeScenario(
    "resize: retention keeps nothing", (SEED, GROWS, worker("m1"), PUBLISHES), upkeep=("look", "open", "tidy")
)
REFUSED_ON_CLUSTER: Final = replace(REFUSED, name="resize on a cluster: two publishers", is_cluster=True)
DIES_ON_CLUSTER: Final = replace(DIES, name="resize on a cluster: a process dies", is_cluster=True)
ABORTED_ON_CLUSTER: Final = ResizeScenario(
    "resize on a cluster: given up", (GROWS, ABORTS, PUBLISHES), adds=False, is_short=True, is_cluster=True
)
ON_CLUSTER: Final = (
    REFUSED_ON_CLUSTER, DIES_ON_CLUSTER, ABORTED_ON_CLUSTER,
    *[
        replace(each, name=each.name.replace("resize", "resize on a cluster"), is_cluster=True, is_short=False)
        for each in (USED, KNOWN, LOST, TWICE, FOLLOWED, SECOND_GROUP, STOPPED, TIDIED)
    ],
)  # fmt: skip
RESIZE_SCENARIOS: Final = (
    USED, REFUSED, KNOWN, DIES, LOST, TWICE, FOLLOWED, SECOND_GROUP, ABORTED, STOPPED, TIDIED, *ON_CLUSTER,
    ResizeScenario("resize: two operators", (SEED, GROWS, GROWS_TOO, worker("m1"))),
)  # fmt: skip
SELF: Final = sys.modules[__name__]
RESIZE_EDITS: Final = (
    Edit(
        "the layout changes without a seal", REFUSED, layouts, "RESIZE_TOPIC",
        "  redis.call('XSETID', KEYS[at], largest)\n", "",
    ),
    Edit(
        "what is unread counts as finished", FOLLOWED, layouts, "ARE_FINISHED",
        "== 'read') and not (last", "== 'read') or not (last",
    ),
    Edit("only the partition before is asked", FOLLOWED, Layout, "ancestors_of", "block = parent", "block = None"),
    Edit(
        "the partitions are used though a live member does not know them", KNOWN, Topics, "_waits_for",
        "if unaware := await self.unaware_of_resize(topic, groups):", "if False:",
    ),
    Edit(
        "a group is not made in the new partitions", STOPPED, topics, "prepare_groups",
        "topic.layout.added_numbers, group", "[], group",
    ),
    Edit(
        "a resize that was given up is sealed", ABORTED, layouts, "RESIZE_TOPIC",
        "if found[2] ~= ARGV[1] then return { 'CHANGED' } end", "",
    ),
    Edit(
        "messages go to partitions that follow others before these are sealed", REFUSED_ON_CLUSTER, topics,
        "seal_by_slot", "each_slot(layout.to_seal,", "each_slot((),",
    ),
    Edit(
        "a resize is given up while partitions are sealed", ABORTED_ON_CLUSTER, Topics, "abort_resize",
        " or topic.layout.is_opening:", ":",
    ),
    Edit(
        "no worker goes on while partitions are sealed", DIES_ON_CLUSTER, Topics, "go_on_with_resize",
        "if topic.layout.following is None:", "if topic.layout.following is None or topic.layout.is_opening:",
    ),
    Edit(
        "publishers stay where they were", REFUSED, Layout, "block_of",
        'for state in ("open", "added")', 'for state in ("sealed", "open", "added")',
    ),
)  # fmt: skip
