"""Histories of clients that subscribe while routers look: the package's registry, on a real server.

Every command waits until the history executes it, so calls of gateways and routers meet in any order. Calls come late
and twice, of taken-over connections, too; a failover loses writes, or all is lost; a router is killed in the middle of
a read. A history follows from its seed.

What a client has subscribed to is its list on the server. A look that returns must have met each client as its list was
at one moment since the look began: so a message that was read before it misses no subscription, also of a client that
goes from a topic name to a wildcard and back, and none that has ended is met.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final, cast

import redis

from rsmq.errors import BrokerUnavailable, SessionTaken
from rsmq.gateway.fleet import registry as module
from rsmq.gateway.fleet.registry import Registry
from rsmq.gateway.protocol.topic_filter import matches, split_share
from rsmq.model.keys import Keys
from rsmq.model.mqtt_subscription import Subscription, shard_of, unpack
from rsmq.redis.client.connector import Client
from rsmq.redis.client.script_batcher import ScriptBatcher
from rsmq.redis.scripts import SCRIPTS, Script
from rsmq.testing.server import ThrowawayServer
from tests.interleavings.bands import BandScenario, Edit

KEYS: Final = Keys("l")
NAMES: Final = ("t/1", "t/2")
FILTERS: Final = ("t/1", "t/2", "t/+", "#", "$share/g/t/1")
MANY: Final = "#others >= 64"
"""From how many subscribers on a topic name is followed. In a history it is two."""
Lists = dict[str, frozenset[tuple[str, int]]]
"""By client, its filters with their QoS."""


def clients_of(count: int) -> list[str]:
    """So many clients in two shards."""
    found = [f"c{number}" for number in range(200)]
    return [each for each in found if shard_of(each) in (0, 3)][:count]


class Broken(AssertionError):
    """A promise is broken."""


@dataclass(eq=False)
class Pending:
    """A command of a gateway or router that the server has not got yet."""

    commands: Sequence[tuple[Any, ...]]
    reply: asyncio.Future[Any]
    is_write: bool
    text: str


class SteppedClient:
    """A client whose commands wait for the history."""

    def __init__(self, history: History, *, is_cluster: bool) -> None:
        self._history, self.is_cluster = history, is_cluster

    async def execute_command(self, *command: Any) -> Any:
        """The reply, or the error as an exception."""
        (reply,) = await self._history.wait([command], is_write=False)
        if isinstance(reply, Exception):
            raise reply
        return reply

    async def pipelined(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """The replies, errors among them. On a cluster other commands may come in between."""
        if not self.is_cluster:
            return list(await self._history.wait(commands, is_write=False))
        each = await asyncio.gather(*(self._history.wait([command], is_write=False) for command in commands))
        return [reply for (reply,) in each]


class SteppedBatcher:
    """A gateway's connection for its writes."""

    def __init__(self, history: History) -> None:
        self._history = history

    async def submit(self, script: Script, keys: Sequence[str], args: Sequence[Any]) -> Any:
        """The reply to a call, which the server may get once more later."""
        (reply,) = await self._history.wait([script.full_command(keys, args)], is_write=True)
        if isinstance(reply, Exception):
            raise reply
        return reply


class History:
    """One history. `moments`: the lists of all clients after each write."""

    def __init__(self, server: redis.Redis, seed: int) -> None:
        self._server, self.random = server, random.Random(seed)
        self.log = list[str]()
        self._pending = list[Pending]()
        self._late = list[tuple[tuple[Any, ...], str]]()
        self._kept: dict[bytes, bytes] | None = None
        self.moments: list[Lists] = []
        self.looks = 0
        self._is_cluster = self.random.random() < 0.5
        self._clients = clients_of(self.random.randint(1, 4))
        self._epochs = dict.fromkeys(self._clients, 1)
        self._routers = list[asyncio.Task[None]]()

    async def wait(self, commands: Sequence[tuple[Any, ...]], *, is_write: bool) -> Sequence[Any]:
        """The replies to these commands, when it is their turn."""
        text = " ".join(str(part)[:40] for part in commands[0][:1] + commands[0][3:12] if len(str(part)) < 400)
        pending = Pending(commands, asyncio.get_running_loop().create_future(), is_write, text)
        self._pending.append(pending)
        found: Sequence[Any] = await pending.reply
        return found

    async def play(self, steps: int) -> None:
        """So many steps, and then what is under way to its end."""
        self._server.flushall()
        self._note()
        async with asyncio.TaskGroup() as tasks:
            self._start_router(tasks)
            for _ in range(steps):
                await self._step(tasks)
            while self._pending or any(not each.done() for each in self._routers):
                await self._execute(tasks)
        self._compare_index()

    async def _step(self, tasks: asyncio.TaskGroup) -> None:
        chance = self.random.random()
        if self._pending and chance < 0.7:
            await self._execute(tasks)
        elif chance < 0.88:
            tasks.create_task(self._change())
        elif chance < 0.9:
            self._start_router(tasks)
        elif chance < 0.93 and self._late:
            command, text = self._late.pop(self.random.randrange(len(self._late)))
            self.log.append(f"late, or again: {text}")
            self._call(command)
        elif chance < 0.95:
            self._kept = {name: self._server.dump(name) for name in self._names()}
            self.log.append("the replica has everything")
        elif chance < 0.96 and self._kept is not None:
            self._server.flushall()
            for name, dump in self._kept.items():
                self._server.restore(name, 0, dump)
            self._break("failover: what the replica did not have is lost")
        elif chance < 0.965:
            self._server.flushall()
            self._break("FLUSHALL")
        elif chance < 0.975:
            router = self.random.choice(self._routers)
            router.cancel()
            self.log.append("a router is killed")
        self._note()
        await settle()

    async def _execute(self, tasks: asyncio.TaskGroup) -> None:
        """The server gets what a gateway or router has sent; or a connection breaks, and perhaps it gets it later."""
        if not self._pending:
            await settle()
            return
        pending = self._pending.pop(self.random.randrange(len(self._pending)))
        if pending.reply.cancelled():
            return
        chance = self.random.random()
        if chance < 0.03:
            self.log.append(f"lost: {pending.text}")
            pending.reply.set_exception(BrokerUnavailable("the connection was lost"))
            if pending.is_write:
                self._late.append((pending.commands[0], pending.text))
        else:
            pending.reply.set_result([self._call(command) for command in pending.commands])
            self.log.append(pending.text)
            if pending.is_write and chance < 0.15:
                self._late.append((pending.commands[0], pending.text))
        self._note()
        await settle()

    def _break(self, text: str) -> None:
        """All connections end, as at a failover. Without that, a router that reads everything anew while all is lost,
        written and lost again may take what it has read for what is there, until the next change."""
        self.log.append(text)
        for pending in self._pending:
            if not pending.reply.done():
                pending.reply.set_exception(BrokerUnavailable("the connection was lost"))
            if pending.is_write:
                self._late.append((pending.commands[0], pending.text))
        self._pending.clear()

    def _call(self, command: tuple[Any, ...]) -> Any:
        try:
            return self._server.execute_command(*command)
        except redis.ResponseError as error:
            return error

    def _note(self) -> None:
        """Note the lists as they are now."""
        lists: Lists = {}
        for client in self._clients:
            raw = cast("bytes | None", self._server.hget(KEYS.mqtt(shard_of(client), "subscriptions"), client))
            found = unpack(raw.partition(b"|")[2])[0] if raw else []
            lists[client] = frozenset((each.filter, each.qos) for each in found)
        self.moments.append(lists)

    def _names(self) -> list[bytes]:
        return cast("list[bytes]", self._server.keys())

    def _hash(self, name: str) -> Iterator[tuple[bytes, bytes]]:
        flat = cast("list[bytes]", self._server.hgetall(name))
        return zip(flat[::2], flat[1::2], strict=True)

    # -- what gateways and routers do ---------------------------------------------------------------------------------

    def _registry(self) -> Registry:
        client = SteppedClient(self, is_cluster=self._is_cluster)
        return Registry(cast("Client", client), KEYS, cast("ScriptBatcher", SteppedBatcher(self)))

    async def _change(self) -> None:
        """A gateway writes the list of a client: of the connection of now, of a newer one, or of one taken over."""
        client = self.random.choice(self._clients)
        if self.random.random() < 0.2:
            self._epochs[client] += 1
        epoch = max(1, self._epochs[client] - (self.random.random() < 0.1))
        if self.random.random() < 0.5 and (had := self.moments[-1][client]):  # to and fro between two filters
            one = self.random.choice(sorted(had))
            other = self.random.choice(FILTERS)
            wanted = dict([*sorted(had - {one}), (other, self.random.randint(0, 1))])
        else:
            wanted = {each: self.random.randint(0, 1) for each in FILTERS if self.random.random() < 0.3}
        is_online, before = self.random.random() < 0.9, {"mqtt.0": "5-0"} if self.random.random() < 0.3 else None
        found = [Subscription(name, qos) for name, qos in wanted.items()]
        try:
            await self._registry().write(client, str(epoch), found, is_online=is_online, before=before)
        except (SessionTaken, BrokerUnavailable):
            return

    def _start_router(self, tasks: asyncio.TaskGroup) -> None:
        """A gateway process begins: two partitions share its registry."""
        registry = self._registry()
        for _ in range(2):
            self._routers.append(tasks.create_task(self._route(registry)))

    async def _route(self, registry: Registry) -> None:
        for _ in range(self.random.randint(2, 6)):
            names = [name for name in NAMES if self.random.random() < 0.7]
            begun = len(self.moments) - 1
            try:
                await registry.look(names)
            except BrokerUnavailable:
                continue
            self._judge(registry, names, begun)

    def _judge(self, registry: Registry, names: Sequence[str], begun: int) -> None:
        """Each client is met as it was at one moment of the look."""
        self.looks += 1
        for client in self._clients:
            met = frozenset(each for name in names for each in met_by(registry, client, name))
            possible = {
                frozenset(each for each in lists[client] if any(is_met(each[0], name) for name in names))
                for lists in self.moments[begun:]
            }
            if met not in possible:
                raise Broken(f"{client} is met by {sorted(met)}, not by one of {sorted(map(sorted, possible))}")

    def _compare_index(self) -> None:
        """At the end what is looked up and what is followed say the same as the lists."""
        for client, wanted in self.moments[-1].items():
            found = set[str]()
            shard = shard_of(client)
            for name, value in self._hash(KEYS.mqtt(shard, "names")):
                if client.encode() in value.split(b"\0")[:-1:2]:
                    found.add(name.decode())
            for field, value in self._hash(KEYS.mqtt(shard, "followed")):
                if field.partition(b"\0")[0] == client.encode():
                    found |= {each.filter for each in unpack(value)[0]}
            if found != {name for name, _ in wanted}:
                raise Broken(f"{client} has {sorted(wanted)}, and is found under {sorted(found)}")


def is_met(pattern: str, name: str) -> bool:
    """Whether a filter, perhaps a shared one, matches a name."""
    return matches(split_share(pattern)[1] if pattern.startswith("$share/") else pattern, name)


def met_by(registry: Registry, client: str, name: str) -> Iterator[tuple[str, int]]:
    """The subscriptions by which a router meets a client."""
    by_name = registry.subscribers(name)
    if by_name is None:
        raise Broken(f"{name} is not looked up")
    for key, each in (*by_name.found, *registry.tree.match(name)):
        if key == client:
            yield each.filter, each.qos
        elif each.filter.startswith("$share/") and client in registry.shares[each.filter]:
            yield each.filter, registry.shares[each.filter][client].qos


async def settle() -> None:
    """Everything goes on that can."""
    for _ in range(30):
        await asyncio.sleep(0)


@contextmanager
def histories(edit: Edit | None = None) -> Iterator[Callable[[int], History]]:
    """Plays the history of a seed. Topic names with more than two subscribers count as those of many."""
    with ThrowawayServer() as server, ExitStack() as stack:
        if edit is not None:
            stack.enter_context(edit.applied())
        stack.enter_context(Edit("", NONE, module, "SUBSCRIBE_CLIENT", MANY, "#others >= 2").applied())
        client = redis.Redis.from_url(server.url, protocol=2)
        for script in SCRIPTS.values():
            client.script_load(script.source)
        client.response_callbacks.clear()  # raw replies, as those of the package's client

        def play(seed: int) -> History:
            history = History(client, seed)
            try:
                asyncio.run(history.play(120))
            except* Broken as found:
                story = "\n".join(history.log[-60:])
                raise Broken(f"seed {seed}: {found.exceptions[0]}\n{story}") from None
            return history

        yield play
        client.close()


NONE: Final = cast("BandScenario", None)


def edit(what: str, owner: object, function: str, old: str, new: str) -> Edit:
    """Some text of the package replaced."""
    return Edit(what, NONE, owner, function, old, new)


LOOKUP_EDITS: Final = (
    edit("a name is not written", module, "SUBSCRIBE_CLIENT", "if had[name] ~= options then", "if false then"),
    edit("a name that has ended stays", module, "SUBSCRIBE_CLIENT", "if not wanted[name] then", "if false then"),
    edit("the state of the names does not change", module, "SUBSCRIBE_CLIENT", "if grown then names = now end", ""),
    edit(
        "a state after a failover is called as one before it", module, "SUBSCRIBE_CLIENT",
        "time[1] .. '.' .. time[2] .. '.' .. ARGV[6]", "(whole(number) or 0) + #changes",
    ),
    edit(
        "the first of many subscribers are not followed", module, "SUBSCRIBE_CLIENT",
        "for _, each in ipairs(others) do follow", "for _, each in ipairs({}) do follow",
    ),
    edit("what was looked up holds for ever", Registry, "_unknown", "if found.at == at:", "if True:"),
    edit("a look reads its own names only", Registry, "_unknown", "set[str]().union(*self._asked)", "self._asked[-1]"),
    edit(
        "changes that the server has lost stay", Registry, "_follow",
        "self._followed_at[shard] not in (state, UNREAD)", "False",
    ),
    edit(
        "names and tree are not of one moment", Registry, "_read",
        "if not self._unknown(self._names_at)[0]:", "if True:",
    ),
)  # fmt: skip
