"""Every order in which a band is added, opened and used: the package's own coroutines, on a real server.

A process is a program that waits for the reply to one command: the code of the package, with a client that hands each
command over to the search. Its state is what it knows and the replies so far, from which it is played again, so a
state can be copied and compared. A worker of an older version, which knows no bands, is written down here.

What the server holds is a value. Time stands still: a heartbeat ends, and a layout is read again, by a step.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import itertools
import json
import sys
import textwrap
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import redis

from rsmq.errors import BrokerUnavailable, ConfigError, RsmqError
from rsmq.heartbeat.assignment import eligible
from rsmq.model.keys import Keys
from rsmq.model.layout import NORMAL, Layout, read_layout, single
from rsmq.model.settings import Settings
from rsmq.redis import layouts, topics
from rsmq.redis.client.connector import translate
from rsmq.redis.scripts import SCRIPTS, Script
from rsmq.redis.streams import delete_group, ensure_groups, join_group, reset_group, trim
from rsmq.redis.topics import Topic, Topics, complete_groups, newer_topic
from rsmq.testing.server import ThrowawayServer
from tests.interleavings.moves import Broken, Move
from tests.interleavings.search import Result, Search

NAME: Final = "t"
KEYS: Final = Keys("b")
SETTINGS: Final = Settings(prefix="b", partitions=1, url="redis://nowhere")
MOST: Final = 5
"""Partitions of the search: one of `normal`, and one for each of two bands; twice that many after a lost layout."""
PIPELINE: Final = "PIPELINE"
FAILED: Final = "FAILED"
LOST: Final = "LOST"
LATEST_TIME: Final = 10**6
"""Larger numbers in replies are times, which are no part of a state."""

Reply = Any
Command = tuple[Any, ...]


class Asked(Awaitable[Any]):
    """A command that a program waits for. Errors that the server answers are raised, as by the real client."""

    def __init__(self, command: Command) -> None:
        self._command = command

    def __await__(self) -> Generator[Command, Reply, Any]:
        return (yield self._command)


class SearchedClient:
    """The part of a client that the code under search uses. The commands of a pipeline are one step."""

    is_cluster = False

    async def execute_command(self, *command: Any) -> Any:
        """The reply, or the error as an exception."""
        reply = opened(await Asked(without_time(command)))
        if isinstance(reply, Exception):
            raise reply
        return reply

    def mark_stale(self) -> None:
        """No slot moves."""

    async def pipelined(self, commands: Sequence[Command]) -> list[Any]:
        """The replies, errors among them. A connection that is lost is one error for all."""
        if not commands:
            return []
        replies = opened(await Asked((PIPELINE, *map(without_time, commands))))
        if isinstance(replies, Exception):
            raise replies
        return list(replies)


def without_time(command: Sequence[Any]) -> Command:
    """The same at any time."""
    return tuple(0 if isinstance(each, int) and each > LATEST_TIME else each for each in command)


def closed(reply: Any) -> Reply:
    """A reply as a part of a state."""
    if isinstance(reply, list | tuple):
        return tuple(map(closed, reply))
    if isinstance(reply, Exception):
        return (FAILED, str(reply))
    return LATEST_TIME if isinstance(reply, int) and reply > LATEST_TIME else reply


def opened(reply: Reply) -> Any:
    """The reply as the client gives it."""
    if isinstance(reply, tuple):
        if reply[:1] == (FAILED,):
            return translate(redis.ResponseError(reply[1]))
        if reply == (LOST,):
            return BrokerUnavailable("the connection was lost")
        return [opened(each) for each in reply]
    return reply


# -- the server -------------------------------------------------------------------------------------------------------

Content = Any
"""What a key holds, comparable."""


class BandStore:
    """Executes commands on states. The same command in the same state is executed once."""

    def __init__(self, client: redis.Redis, names: Sequence[str]) -> None:
        self._client, self._names = client, names
        self._dumps: dict[tuple[str, Content], bytes] = {}
        self._known: dict[Any, tuple[Reply, tuple[Content, ...]]] = {}
        for script in SCRIPTS.values():
            client.script_load(script.source)

    def begin(self, commands: Sequence[Command]) -> tuple[Content, ...]:
        """The state after these commands on an empty server."""
        return self.execute((None,) * len(self._names), (PIPELINE, *commands))[1]

    def execute(self, server: tuple[Content, ...], command: Command) -> tuple[Reply, tuple[Content, ...]]:
        """The reply, and the state after it."""
        asked = server, command
        if asked not in self._known:
            commands = command[1:] if command[0] == PIPELINE else (command,)
            held = [(name, each) for name, each in zip(self._names, server, strict=True) if each is not None]
            with self._client.pipeline(transaction=False) as exchange:
                exchange.execute_command("FLUSHDB")
                for name, content in held:
                    exchange.execute_command("RESTORE", name, 0, self._dumps[name, content])
                for each in commands:
                    exchange.execute_command(*each)
                for name in self._names:
                    exchange.execute_command("DUMP", name)
                    for look in LOOKS[kind_of(name)]:
                        exchange.execute_command(*(name if word is KEY else word for word in look))
                found = iter(exchange.execute(raise_on_error=False)[1 + len(held) :])
            replies = [next(found) for _ in commands]
            after = tuple(self._read(name, found) for name in self._names)
            self._known[asked] = closed(replies if command[0] == PIPELINE else replies[0]), after
        return self._known[asked]

    def _read(self, name: str, found: Iterator[Any]) -> Content:
        dump, looks = next(found), [closed(next(found)) for _ in LOOKS[kind_of(name)]]
        if dump is None:
            return None
        content = contents(kind_of(name), looks)
        self._dumps.setdefault((name, content), dump)
        return content


KEY: Final = object()
LOOKS: Final[dict[str, tuple[Command, ...]]] = {
    "hash": (("HGETALL", KEY),), "set": (("SMEMBERS", KEY),), "string": (("GET", KEY),),
    "stream": (("XRANGE", KEY, "-", "+"), ("XINFO", "GROUPS", KEY), ("XINFO", "STREAM", KEY)),
}  # fmt: skip


def kind_of(name: str) -> str:
    """The type of one of the keys."""
    if name.startswith(KEYS.stream(NAME, 0).removesuffix("0}")):
        return "stream"
    return "string" if ":nodes:" in name and not name.endswith(":set") else "set" if "set" in name[-3:] else "hash"


def contents(kind: str, looks: list[Any]) -> Content:
    """What a key holds, in one order."""
    if kind == "hash":
        flat = looks[0]
        return tuple(sorted(zip(flat[::2], flat[1::2], strict=True)))
    if kind == "set":
        return tuple(sorted(looks[0]))
    if kind == "string":
        return looks[0]
    entries, groups, stream = looks
    rows = [dict(zip(row[::2], row[1::2], strict=True)) for row in groups]
    about = dict(zip(stream[::2], stream[1::2], strict=True))
    positions = tuple(sorted((row[b"name"].decode(), int(row[b"last-delivered-id"].split(b"-")[0])) for row in rows))
    return tuple(int(entry_id.split(b"-")[0]) for entry_id, _ in entries), positions, about[b"last-generated-id"]


# -- processes --------------------------------------------------------------------------------------------------------


class Process(NamedTuple):
    """`role`: what it is; `group`: of a worker. `topic`: as far as it knows it. `program`: what it does, with the
    replies so far. `left`: how often it may still act. `told`: the layout that its heartbeat tells. `is_up`: a worker
    that has started."""

    name: str
    role: str
    group: str = ""
    topic: Topic | None = None
    program: str = ""
    replies: tuple[Reply, ...] = ()
    left: int = 1
    told: Layout | None = None
    is_up: bool = False
    is_alive: bool = True


Program = Callable[[Any, Process], Coroutine[Any, Any, Process]]


async def add_bands(client: Any, process: Process, bands: tuple[str, ...] = ("urgent", "normal")) -> Process:
    """`rsmq topic set --bands`."""
    await Topics(client, KEYS, SETTINGS).set_bands(NAME, bands)
    return process._replace(left=0)


async def add_other(client: Any, process: Process) -> Process:
    """Another operator, with another band."""
    return await add_bands(client, process, ("normal", "bulk"))


async def start(client: Any, process: Process) -> Process:
    """A worker prepares its handlers; then it tells, and looks at the layout again."""
    topic = await Topics(client, KEYS, SETTINGS).ensure(NAME)
    await ensure_groups(client, KEYS, topic, process.group, "0")
    await join_group(client, KEYS, topic, process.group, "hash")
    return process._replace(topic=topic)


async def tell(client: Any, process: Process) -> Process:
    """The heartbeat of a worker says what it knows."""
    assert process.topic is not None
    await beat(client, process, process.topic.layout.known_as)
    return process._replace(told=process.topic.layout)


async def beat(client: Any, process: Process, about: Mapping[str, object]) -> None:
    """The heartbeat, with what the member says of the layout that it knows."""
    await client.pipelined(
        [
            ("SET", KEYS.alive(NAME, process.group, process.name), json.dumps(about)),
            ("SADD", KEYS.members(NAME, process.group), process.name),
        ]
    )


async def look(client: Any, process: Process) -> Process:
    """A worker follows the layout."""
    assert process.topic is not None
    found = await newer_topic(Topics(client, KEYS, SETTINGS), process.topic, process.group)
    return process._replace(topic=found or process.topic, is_up=True)


async def open_bands(client: Any, process: Process) -> Process:
    """A worker opens what waits."""
    await Topics(client, KEYS, SETTINGS).open_bands(NAME)
    return await look(client, process)


async def tidy(client: Any, process: Process) -> Process:
    """Retention, which keeps nothing: each partition that the worker knows is trimmed."""
    topics = Topics(client, KEYS, SETTINGS)
    topic = await topics.find(NAME)
    if topic is not None and process.topic is not None:
        await complete_groups(client, KEYS, topic)
        for number in process.topic.numbers:
            await trim(client, KEYS, NAME, number, keep_age_ms=0, keep_length=0, exact=True)
    return process


async def mend(client: Any, process: Process) -> Process:
    """A read has found no group: topic and groups are made again."""
    assert process.topic is not None
    await Topics(client, KEYS, SETTINGS, known=process.topic).ensure(NAME, process.topic.partitions)
    await ensure_groups(client, KEYS, process.topic, process.group, "0")
    return process


async def start_old(client: Any, process: Process) -> Process:
    """A worker of a version without bands starts: it makes the group in the partitions that it knows, and looks at the
    distribution of the group."""
    topic = await Topics(client, KEYS, SETTINGS).find(NAME)
    await client.pipelined([("XGROUP", "CREATE", KEYS.stream(NAME, 0), process.group, "0", "MKSTREAM")])
    if not await client.execute_command("HSETNX", KEYS.group(NAME, process.group), "distribution", "hash"):
        found = await client.execute_command("HGET", KEYS.group(NAME, process.group), "distribution")
        if found not in (None, b"hash"):
            raise ConfigError(f"group {process.group!r} has distribution {found!r}, not 'hash'")
    await beat(client, process, {})
    known = None if topic is None else replace(topic, layout=single(topic.partitions))
    return process._replace(topic=known, is_up=True)


async def find(client: Any, process: Process) -> Process:
    """A publisher reads the topic."""
    return process._replace(topic=await Topics(client, KEYS, SETTINGS).find(NAME))


async def delete(client: Any, process: Process) -> Process:
    """`rsmq group delete`: its members have stopped."""
    topic = await Topics(client, KEYS, SETTINGS).existing(NAME)
    await delete_group(client, KEYS, topic, process.group)
    return process._replace(left=0)


async def reset(client: Any, process: Process) -> Process:
    """`rsmq group reset --to earliest`."""
    topic = await Topics(client, KEYS, SETTINGS).existing(NAME)
    await reset_group(client, KEYS, topic, process.group, "earliest")
    return process._replace(left=0)


PROGRAMS: Final[dict[str, Program]] = {
    "add": add_bands, "add other": add_other, "start": start, "look": look, "open": open_bands, "tidy": tidy,
    "mend": mend, "tell": tell, "start old": start_old, "find": find, "delete": delete, "reset": reset,
}  # fmt: skip
WORKERS: Final = ("worker", "old worker")


class Faults(NamedTuple):
    """How often each may still happen. `losses`: the server forgets the layout."""

    crashes: int = 0
    lost: int = 0
    losses: int = 0


NO_FAULTS: Final = Faults()


class Truth(NamedTuple):
    """What no process knows. `stored`: each message, its partition, and the groups that must get it. `delivered`: which
    group has got which message. `groups`: those whose worker is up. `bands`: each number, and its band."""

    stored: tuple[tuple[int, int, frozenset[str]], ...] = ()
    delivered: frozenset[tuple[int, str]] = frozenset()
    groups: frozenset[str] = frozenset()
    bands: frozenset[tuple[int, str]] = frozenset({(0, NORMAL)})


class BandWorld(NamedTuple):
    """One state. The search reads these names."""

    server: tuple[Content, ...]
    members: tuple[Process, ...]
    late: tuple[Command, ...]
    left: Faults
    truth: Truth


class BandMoves:
    """All orders of one scenario. `programs`: what processes do, by name; `client` is theirs."""

    programs = PROGRAMS
    client = SearchedClient()

    def __init__(self, store: BandStore, names: Sequence[str], scenario: BandScenario) -> None:
        self._store, self._names, self._scenario = store, names, scenario
        self._at = {name: at for at, name in enumerate(names)}
        self._steps: dict[Any, Any] = {}

    def begin(self) -> BandWorld:
        """The topic is there, and the workers that are up from the beginning have started one after the other."""
        topic = KEYS.topic(NAME)
        server = self._store.begin([("SADD", KEYS.topics, NAME), ("HSET", topic, "created_ms", 0, "partitions", 1)])
        processes = tuple(each._replace(is_up=False) for each in self._scenario.processes)
        world = BandWorld(server, processes, (), self._scenario.faults, Truth())
        for at, process in enumerate(self._scenario.processes):
            if process.is_up or not process.left:
                before = {"worker": ("start", "tell", "look"), "old worker": ("start old",)}
                for program in before.get(process.role, (process.role,)):
                    world = with_process(world, at, world.members[at]._replace(program=program))
                    while world.members[at].program:
                        _, world, _ = next(self._step(world, at, world.members[at]))
            if not process.left and process.role == "worker":  # it has stopped, and its group is there
                stopped = process._replace(is_up=False, is_alive=False)
                world = self._done(
                    with_process(world, at, stopped), ("DEL", KEYS.alive(NAME, process.group, process.name))
                )
        return world

    def is_done(self, world: BandWorld) -> bool:
        """All that was to be published has been handled, the bands are open, and each group is complete."""
        layout = self._layout(world)
        if layout is None or layout.waits or world.late or (self._scenario.adds and not layout.has_bands):
            return False
        idle = all(not each.program for each in world.members if each.is_alive)
        acted = all(not each.left for each in world.members if each.is_alive and each.role not in WORKERS)
        owed = all((n, group) in world.truth.delivered for n, _, groups in world.truth.stored for group in groups)
        made = [self._groups(world, number).keys() for number in layout.numbers]
        known = all(each.topic.layout == layout for each in world.members if each.role == "worker" and each.topic)
        return idle and acted and owed and known and all(each == made[0] for each in made)

    def after(self, world: BandWorld) -> list[Move]:
        """All that can happen next."""
        moves = list[Move]()
        found = self._each(world)
        while True:
            try:
                text, after, is_fault = next(found)
            except StopIteration:
                break
            except Broken as broken:
                moves.append(Move("a publisher publishes", world, broken=str(broken)))  # type: ignore[arg-type]
                break
            layout = self._layout(after)
            if layout is not None:
                used = [block for block in layout.blocks if block.state == "open"]  # nothing is stored in the others
                named = {(number, block.band) for block in used for number in block.numbers}
                after = after._replace(truth=after.truth._replace(bands=after.truth.bands | named))
            moves.append(Move(text, after, is_fault, self._broken(after, layout)))  # type: ignore[arg-type]
        return moves

    # -- what must hold -----------------------------------------------------------------------------------------------

    def _broken(self, world: BandWorld, layout: Layout | None) -> str:
        truth = world.truth
        if len({number for number, _ in truth.bands}) < len(truth.bands):
            return f"a partition has two bands: {sorted(truth.bands)}"
        for number, partition, groups in truth.stored:
            entries, positions, _ = self._stream(world, partition)
            for group in groups:
                is_past = dict(positions).get(group, 0) >= number
                if (number, group) not in truth.delivered and (is_past or number not in entries):
                    return f"message {number} of partition {partition} is lost for group {group}"
        if layout is not None and self._scenario.is_strict:
            for block in layout.blocks[1:]:
                missing = [g for g in truth.groups for n in block.numbers if g not in self._groups(world, n)]
                if block.state == "open" and missing:
                    return f"band {block.band} is open, and group {missing[0]} is not there"
            for each in world.members if self._scenario.refuses_all and not layout.waits else ():
                if each.is_up and each.topic is not None and each.topic.layout.numbers != layout.numbers:
                    return f"the bands are open, and {each.name} does not know them"
        return ""

    # -- what can happen ----------------------------------------------------------------------------------------------

    def _each(self, world: BandWorld) -> Iterator[tuple[str, BandWorld, bool]]:
        for at, process in enumerate(world.members):
            key = KEYS.alive(NAME, process.group, process.name) if process.role in WORKERS else ""
            if not process.is_alive:
                if key and world.server[self._at[key]] is not None:
                    yield f"the heartbeat of {process.name} ends", self._done(world, ("DEL", key)), False
                elif process.role == "worker" and not process.is_up and process.left:
                    again = process._replace(is_alive=True, left=1)
                    yield f"{process.name} is started again", with_process(world, at, again), False
            elif process.program:
                yield from self._step(world, at, process)
            else:
                yield from self._idle(world, at, process)
            if process.is_alive and world.left.crashes and process.role != "old worker" and process.left:
                dead = Process(process.name, process.role, process.group, left=process.left, is_alive=False)
                left = world.left._replace(crashes=world.left.crashes - 1)
                yield f"{process.name} dies", with_process(world, at, dead)._replace(left=left), True
        for place, command in enumerate(world.late):
            rest = world.late[:place] + world.late[place + 1 :]
            yield f"a late {shown(command)} is executed", self._done(world, command)._replace(late=rest), False
        if world.left.losses and (layout := self._layout(world)) is not None and layout.has_bands:
            left = world.left._replace(losses=world.left.losses - 1)
            lost = self._done(world, ("HDEL", KEYS.topic(NAME), "layout"))
            yield "the server loses the layout", lost._replace(left=left), True
            workers = [each for each in world.members if each.role == "worker" and each.is_alive]
            is_remembered = any(each.topic is not None and each.topic.layout.has_bands for each in workers)
            if is_remembered and not any(partition for _, partition, _ in world.truth.stored):
                all_lost = self._done(lost, ("DEL", *(KEYS.stream(NAME, number) for number in range(1, MOST))))
                yield "the server loses the layout, and the partitions of bands", all_lost._replace(left=left), True

    def _step(self, world: BandWorld, at: int, process: Process) -> Iterator[tuple[str, BandWorld, bool]]:
        """The command of a program is executed, or its reply is lost."""
        command = self._next(process)
        reply, server = self._execute(world, command)
        text = f"{process.name} ({process.program}): {shown(command)}"
        yield text, self._heard(world._replace(server=server), at, process, reply), False
        if world.left.lost:
            left = world.left._replace(lost=world.left.lost - 1)
            late = world._replace(left=left, late=(*world.late, command))
            yield f"{text}, its reply is lost", self._heard(late, at, process, (LOST,)), True

    def _execute(self, world: BandWorld, command: Command) -> tuple[Reply, tuple[Content, ...]]:
        """The reply, and the state after it. A process that lives has its subscription."""
        asked = command[1:] if command[0] == PIPELINE else (command,)
        if asked[0][0] != "PUBSUB":
            return self._store.execute(world.server, command)
        live = {KEYS.presence(each.name) for each in world.members if each.is_alive}
        counts = [(channel, int(channel in live)) for each in asked for channel in each[2:]]
        return tuple(counts) if command[0] == PIPELINE else tuple(itertools.chain(*counts)), world.server

    def _heard(self, world: BandWorld, at: int, process: Process, reply: Reply) -> BandWorld:
        """A program goes on to its next command, or ends."""
        replies = (*process.replies, reply)
        going = process._replace(replies=replies)
        ended = self._next(going)
        while not isinstance(ended, Process) and is_unseen(ended):
            reply, server = self._execute(world, ended)
            world, going = world._replace(server=server), going._replace(replies=(*going.replies, reply))
            ended = self._next(going)
        if not isinstance(ended, Process):
            return with_process(world, at, going)
        return self._ended(world, at, ended)

    @staticmethod
    def _ended(world: BandWorld, at: int, process: Process) -> BandWorld:
        after = with_process(world, at, process)
        if process.role == "worker" and process.is_up:
            return after._replace(truth=after.truth._replace(groups=after.truth.groups | {process.group}))
        return after

    def _idle(self, world: BandWorld, at: int, process: Process) -> Iterator[tuple[str, BandWorld, bool]]:
        """What a process begins."""
        role = process.role
        if role == "worker" and (process.topic is None or process.told != process.topic.layout):
            yield from self._begun(world, at, process, "start" if process.topic is None else "tell")
        elif role in WORKERS and not process.is_up:
            if process.left and (role == "worker" or not self._scenario.is_late or self._is_open(world)):
                yield from self._begun(world, at, process, "look" if role == "worker" else "start old")
        elif role == "worker":
            for program in self._scenario.upkeep:
                if self._has_work(world, process, program):
                    yield from self._begun(world, at, process, program)
            yield from self._reads(world, at, process)
        elif role == "old worker":
            yield from self._reads(world, at, process)
            if not self._scenario.stays or not self._is_open(world):
                stopped = with_process(world, at, process._replace(is_alive=False, is_up=False, topic=None))
                yield f"{process.name} is stopped", stopped, False
        elif role == "publisher":
            if self._has_work(world, process, "look"):
                yield from self._begun(world, at, process, "find")
            if process.topic is not None and process.left:
                yield from self._publishes(world, at, process)
        elif process.left:
            if role == "delete":  # from now on it is gone for its users
                world = world._replace(truth=world.truth._replace(groups=world.truth.groups - {process.group}))
            yield from self._begun(world, at, process, role)

    def _has_work(self, world: BandWorld, process: Process, program: str) -> bool:
        """Whether a program could do anything: what only reads makes states, and no difference."""
        known, layout = process.topic, self._layout(world)
        if program == "look":
            return known is None or layout is None or known.layout != layout
        if program == "open":
            is_alone = self._scenario.is_crowded or all(
                each.role in (*WORKERS, "publisher") or not (each.is_alive and each.left) for each in world.members
            )
            return known is not None and known.layout.waits and is_alone
        return True

    def _begun(self, world: BandWorld, at: int, process: Process, name: str) -> Iterator[tuple[str, BandWorld, bool]]:
        """A program as far as its first command, which is executed at once: before it, nothing can be seen of it. What
        changes nothing is no step."""
        begun = process._replace(program=name)
        if not isinstance(self._next(begun), Process):
            yield from self._step(world, at, begun)

    def _publishes(self, world: BandWorld, at: int, process: Process) -> Iterator[tuple[str, BandWorld, bool]]:
        topic, number = process.topic, len(world.truth.stored) + 1
        assert topic is not None
        block = topic.open_block("urgent" if "urgent" in topic.layout.bands else None)
        missing = world.truth.groups - self._groups(world, block.first).keys()
        if missing and self._scenario.is_strict:
            raise Broken(
                f"message {number} is stored in partition {block.first}, where group {min(missing)} is unknown"
            )
        command = ("XADD", KEYS.stream(NAME, block.first), f"{number}-1", "data", number)
        stored = (*world.truth.stored, (number, block.first, world.truth.groups))
        after = self._done(world, command)
        after = after._replace(truth=after.truth._replace(stored=stored))
        after = with_process(after, at, process._replace(left=process.left - 1))
        yield f"{process.name} publishes {number} to partition {block.first}", after, False

    def _reads(self, world: BandWorld, at: int, process: Process) -> Iterator[tuple[str, BandWorld, bool]]:
        """A message is read and settled. The partitions of a band belong to one of the members that may own some: while
        one of these does not know the band, it may be that one."""
        assert process.topic is not None
        of_group = [each for each in world.members if each.role in WORKERS and each.group == process.group]
        infos = {each.name: world.server[self._at[KEYS.alive(NAME, each.group, each.name)]] for each in of_group}
        live = [each for each in infos if infos[each] is not None]
        may_own = eligible(live, {each for each in live if b'"layout"' not in infos[each]})
        is_mixed = any(each.role == "old worker" and each.name in may_own for each in of_group)
        numbers = (0,) if process.role == "old worker" else process.topic.numbers
        for number in numbers:
            if number and is_mixed:
                continue
            entries, _, _ = self._stream(world, number)
            position = self._groups(world, number).get(process.group)
            if position is None:
                yield from self._begun(world, at, process, "mend")
                continue
            new = [each for each in entries if each > position]
            if new:
                key = KEYS.stream(NAME, number)
                read = ("XREADGROUP", "GROUP", process.group, "c", "COUNT", 1, "NOACK", "STREAMS", key, ">")
                after = self._done(world, (PIPELINE, read, ("XGROUP", "DELCONSUMER", key, process.group, "c")))
                delivered = after.truth.delivered | {(new[0], process.group)}
                after = after._replace(truth=after.truth._replace(delivered=delivered))
                yield f"{process.name} handles {new[0]} of partition {number}", after, False

    # -- helpers ------------------------------------------------------------------------------------------------------

    def _next(self, process: Process) -> Any:
        """The command that a program waits for, or the process after its end. An error ends a program: a worker that
        is refused ends, and all others try again."""
        if process not in self._steps:
            self._steps[process] = self._play(process)
        return self._steps[process]

    def _play(self, process: Process) -> Any:
        running = self.programs[process.program](self.client, process._replace(program="", replies=()))
        try:
            command = running.send(None)
            for reply in process.replies:
                command = running.send(reply)
        except StopIteration as ended:
            return ended.value
        except ConfigError:
            if process.role in WORKERS and not process.is_up:
                return process._replace(program="", replies=(), is_alive=False, left=0)
            return process._replace(program="", replies=())
        except RsmqError:
            return process._replace(program="", replies=())
        running.close()
        return command

    def _done(self, world: BandWorld, command: Command) -> BandWorld:
        return world._replace(server=self._store.execute(world.server, command)[1])

    def _is_open(self, world: BandWorld) -> bool:
        layout = self._layout(world)
        return layout is not None and layout.has_bands and not layout.waits

    def _layout(self, world: BandWorld) -> Layout | None:
        found = world.server[self._at[KEYS.topic(NAME)]]
        fields = dict(found or ())
        return read_layout(NAME, fields[b"partitions"], fields.get(b"layout")) if fields else None

    def _stream(self, world: BandWorld, number: int) -> Any:
        return world.server[self._at[KEYS.stream(NAME, number)]] or ((), (), b"")

    def _groups(self, world: BandWorld, number: int) -> dict[str, int]:
        return dict(self._stream(world, number)[1])


def with_process(world: BandWorld, at: int, process: Process) -> BandWorld:
    """The world with another state of a process."""
    members = list(world.members)
    members[at] = process
    return world._replace(members=tuple(members))


def is_unseen(command: Command) -> bool:
    """Whether no other process can see a command: then it makes no step of its own."""
    return command[0] == "PUBLISH" or (command[0] == "HSETNX" and command[2] == "created_ms")


def shown(command: Command) -> str:
    """A command in a story."""
    if command[0] == PIPELINE:
        return " + ".join(map(shown, command[1:]))
    script = next((each.name for sha, each in SCRIPTS.items() if sha == command[1]), None)
    rest = [script, *command[3:]] if script else [*command]
    return " ".join(str(each) for each in rest)[:150]


# -- scenarios --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BandScenario:
    """Who takes part, and the faults that may happen.

    `upkeep`: what workers do besides. `is_strict`: without a lost layout, an open band has every group. `is_crowded`:
    workers open bands also while an operator does; else only when that command has ended or died. `refuses_all`: no
    worker that knows no bands gets in; `is_late`: it comes when the bands are open; `stays`: it is not stopped any more
    when they are. `is_short`: searched in `make test`, too.
    """

    name: str
    processes: tuple[Process, ...]
    faults: Faults = NO_FAULTS
    upkeep: tuple[str, ...] = ("look", "open")
    is_strict: bool = True
    adds: bool = True
    is_crowded: bool = False
    refuses_all: bool = True
    is_late: bool = False
    stays: bool = False
    is_short: bool = False

    def search(self, edit: Edit | None = None, show: Callable[[Result], None] = lambda _: None) -> Result:
        """What the search finds, on a server of its own."""
        groups = sorted({each.group for each in self.processes if each.group})
        names = [KEYS.topics, KEYS.topic(NAME), *(KEYS.stream(NAME, number) for number in range(MOST))]
        for group in groups:
            names += [KEYS.group(NAME, group), KEYS.members(NAME, group)]
        names += [KEYS.alive(NAME, each.group, each.name) for each in self.processes if each.role in WORKERS]
        with (
            nullcontext() if edit is None else edit.applied(),
            ThrowawayServer() as server,
            redis.Redis.from_url(server.url, protocol=2) as client,
        ):
            client.response_callbacks.clear()
            moves: Any = BandMoves(BandStore(client, names), names, self)
            return Search(moves, progress=show).run()


def worker(name: str, group: str = "g", *, is_up: bool = True, left: int = 1) -> Process:
    """A worker that knows bands. With `left` 0 it has stopped, and its group is there."""
    return Process(name, "worker", group, is_up=is_up, left=left)


def old(group: str = "g", *, is_up: bool = False) -> Process:
    """A worker that knows no bands."""
    return Process("old", "old worker", group, is_up=is_up)


ADDS: Final = Process("operator", "add")
ADDED: Final = ADDS._replace(left=0)
"""The bands are there from the beginning."""
ADDS_OTHER: Final = Process("other operator", "add other")
PUBLISHES: Final = Process("publisher", "publisher")
RESETS: Final = Process("reset", "reset", "g")
DELETES: Final = Process("deletion", "delete", "h")
TIDIES: Final = ("look", "open", "tidy")

ONE_GROUP: Final = BandScenario("bands: a worker and a publisher", (ADDS, worker("m1"), PUBLISHES), is_short=True)
CRASH: Final = BandScenario("bands: a process dies", (ADDS, worker("m1")), Faults(crashes=1), adds=False, is_short=True)
LOST_REPLY: Final = BandScenario("bands: a reply is lost", (ADDS, worker("m1")), Faults(lost=1), is_short=True)
TWO_GROUPS: Final = BandScenario("bands: two groups", (ADDS, worker("m1"), worker("m2", "h")), is_short=True)
SECOND_GROUP: Final = BandScenario("bands: a second group starts", (ADDS, worker("m1"), worker("m2", "h", is_up=False)))
OLD: Final = BandScenario("bands: an older worker runs", (ADDS, worker("m1"), old(is_up=True)), is_short=True)
LATE_OLD: Final = BandScenario(
    "bands: an older worker comes later", (ADDS, worker("m1"), old()), is_late=True, is_short=True
)
OLD_STARTS: Final = BandScenario(
    "bands: an older worker starts", (ADDS, worker("m1"), old()), refuses_all=False, is_short=True
)
OLD_STAYS: Final = BandScenario(
    "bands: an older worker starts and stays", (ADDS, worker("m1"), old(), PUBLISHES), refuses_all=False, stays=True,
)  # fmt: skip
OLD_GROUP: Final = BandScenario(
    "bands: an older worker makes a group", (ADDED, worker("m1"), old("h")), upkeep=TIDIES, refuses_all=False,
    is_late=True, is_short=True,
)  # fmt: skip
TWO_GROUPS_PUBLISH: Final = BandScenario(
    "bands: two groups and a publisher", (ADDS, worker("m1"), worker("m2", "h"), PUBLISHES)
)
TWO_OPERATORS: Final = BandScenario("bands: two operators", (ADDS, ADDS_OTHER), is_short=True)
OPERATORS_AND_GROUP: Final = BandScenario(
    "bands: two operators and a group without workers", (ADDS, ADDS_OTHER, worker("m2", "h", left=0))
)
RESET: Final = BandScenario(
    "bands: an older worker comes, and a group is reset",
    (ADDED, worker("m1"), RESETS, old()),
    is_late=True,
    is_short=True,
)
STOPPED_GROUP: Final = BandScenario("bands: a group without workers", (ADDS, worker("m2", "h", left=0)), is_short=True)
LOST_LAYOUT: Final = BandScenario(
    "bands: the layout of open bands is lost", (ADDED, worker("m1"), PUBLISHES), Faults(losses=1), is_strict=False,
    adds=False, is_short=True,
)  # fmt: skip
DELETION: Final = BandScenario("bands: a group is deleted", (ADDS, DELETES, worker("m2", "h", left=0)), is_short=True)
LOSS: Final = BandScenario(
    "bands: the layout is lost", (ADDS, worker("m1")), Faults(losses=1), is_strict=False, adds=False, is_short=True
)
LOST_AND_ADDED: Final = BandScenario(
    "bands: the layout is lost, and another band is added", (ADDED, worker("m1"), ADDS_OTHER), Faults(losses=1),
    is_strict=False, is_short=True,
)  # fmt: skip
LOST_WHILE_STOPPED: Final = BandScenario(
    "bands: the layout is lost while no worker runs, and another band is added",
    (ADDED, worker("m2", left=0), ADDS_OTHER), Faults(losses=1), is_strict=False, adds=False, is_short=True,
)  # fmt: skip
BAND_SCENARIOS: Final = (
    ONE_GROUP, CRASH, LOST_REPLY, TWO_GROUPS, SECOND_GROUP, OLD, LATE_OLD, OLD_STARTS, OLD_STAYS, OLD_GROUP,
    TWO_OPERATORS, OPERATORS_AND_GROUP, RESET, DELETION, STOPPED_GROUP, LOSS, LOST_LAYOUT, LOST_AND_ADDED,
    LOST_WHILE_STOPPED,
    BandScenario("bands: a worker starts", (ADDS, worker("m1", is_up=False), PUBLISHES)),
    BandScenario("bands: a publisher, and a death", (ADDS, worker("m1"), PUBLISHES), Faults(crashes=1), adds=False),
    BandScenario(
        "bands: a publisher, and a lost layout", (ADDS, worker("m1"), PUBLISHES), Faults(losses=1), is_strict=False,
        adds=False,
    ),
    BandScenario("bands: a worker opens beside the operator", (ADDS, worker("m1"), PUBLISHES), is_crowded=True),
    BandScenario("bands: retention keeps nothing", (ADDS, worker("m1"), PUBLISHES), upkeep=TIDIES),
    BandScenario("bands: two operators and a worker", (ADDS, ADDS_OTHER, worker("m1"))),
    BandScenario(
        "bands: the layout is lost, another band is added, and a publisher",
        (ADDED, worker("m1"), ADDS_OTHER, PUBLISHES), Faults(losses=1), is_strict=False,
    ),
    BandScenario("bands: a reply is lost, and a publisher", (ADDS, worker("m1"), PUBLISHES), Faults(lost=1)),
)  # fmt: skip


@dataclass(frozen=True)
class Edit:
    """Some text of a function, or of a script, replaced; and a scenario that shows what it was good for."""

    what: str
    scenario: BandScenario
    owner: Any
    function: str
    old: str
    new: str

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The code is changed as long as the block lasts."""
        whole = getattr(self.owner, self.function)
        if isinstance(whole, Script):
            edited = copy.copy(whole)
            edited.source = self._edited(whole.source)
            edited.sha = hashlib.sha1(edited.source.encode(), usedforsecurity=False).hexdigest()
            SCRIPTS[edited.sha] = edited
        else:
            found = dict[str, Any]()
            source = f"from __future__ import annotations\n{self._edited(textwrap.dedent(inspect.getsource(whole)))}"
            exec(source, whole.__globals__, found)
            edited = found[self.function]
        setattr(self.owner, self.function, edited)
        try:
            yield
        finally:
            setattr(self.owner, self.function, whole)
            if isinstance(edited, Script):
                del SCRIPTS[edited.sha]

    def _edited(self, source: str) -> str:
        if source.count(self.old) != 1:
            raise ValueError(f"{self.function} has this text {source.count(self.old)} times: {self.old}")
        return source.replace(self.old, self.new)


SELF: Final = sys.modules[__name__]
BAND_EDITS: Final = (
    Edit(
        "a band is opened without its groups", STOPPED_GROUP, topics, "prepare_groups",
        "topic.layout.added_numbers, group", "[], group",
    ),
    Edit(
        "a band is opened though a live member does not know it", ONE_GROUP, Topics, "open_bands", "if unaware:",
        "if False:",
    ),
    Edit(
        "a member that says nothing of layouts counts as one that knows them", OLD, Layout, "is_known_by",
        "isinstance(version, int) and version", "version is None or version",
    ),
    Edit(
        "a member that says nothing of layouts may own partitions", OLD_STAYS, SELF, "eligible",
        "if member not in outdated", "",
    ),
    Edit(
        "a member that knows another band under these numbers counts as one that knows this one", LOST_AND_ADDED,
        Layout, "is_known_by", "info.get(\"blocks\", self._starts) == self._starts", "True",
    ),
    Edit(
        "a lost band gets back its numbers, also those that another one has", LOST_AND_ADDED, Layout, "with_lost",
        "if block.first in numbers_of(blocks):", "if False:",
    ),
    Edit(
        "a layout that has changed meanwhile is not read again", LOST_AND_ADDED, Topics, "_restore",
        "_change_layout(topic, wanted)", "_change_layout(topic, wanted)\n        return await self.find(topic.name)",
    ),
    Edit(
        "numbers that had a band before are given to another one", LOST_WHILE_STOPPED, Topics, "_used",
        "if is_there", "if False",
    ),
    Edit(
        "the distribution does not say that there are bands", LATE_OLD, topics, "prepare_groups",
        'await ask_all(client, [("HSET", name', '([("HSET", name',
    ),
    Edit(
        "a member follows without making its group", SECOND_GROUP, SELF, "newer_topic",
        'await ensure_groups(topics._client, topics._keys, found, group, "0")', "pass",
    ),
    Edit(
        "a publisher uses a band before it is open", TWO_GROUPS_PUBLISH, Topic, "open_block",
        'if block.state == "open"', "if True",
    ),
    Edit(
        "a layout is changed without a look at what is stored", TWO_OPERATORS, layouts, "CHANGE_LAYOUT",
        "if (found[2] or '') ~= ARGV[1] then", "if false then",
    ),
    Edit(
        "another layout is opened than that whose members were asked", OPERATORS_AND_GROUP, Topics, "open_bands",
        "await change_layout(", "topic = await self.existing(name)\n    await change_layout(",
    ),
    Edit(
        "a lost layout is not written again", LOST_LAYOUT, Topics, "_restore", "if wanted is topic.layout", "if True",
    ),
    Edit(
        "a reset forgets that the topic has bands", RESET, SELF, "reset_group", "topic.layout.has_bands", "False",
    ),
    Edit(
        "the group of an older worker is not completed", OLD_GROUP, SELF, "complete_groups",
        "not set(made_first) <= set(made_last)", "False",
    ),
)  # fmt: skip
