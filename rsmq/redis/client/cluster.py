"""Redis Cluster: every command goes to the node that serves its slot, and follows a slot that has moved.

A node that answers MOVED, ASK or TRYAGAIN has executed nothing, so following is safe even for an XADD. A node that does
not answer is an error, as on a single server; the next command then reads the slot map from the other nodes.

A script does not follow ASK, it waits until its slot has moved. It may use keys besides those that it names, which can
still be at the old node: the new one would answer that they are not there, and make them anew. (Those of the threads,
which `BlockingCluster` sends, name all their keys.)
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import redis
import redis.asyncio
from redis.exceptions import AskError, MovedError

from rsmq.errors import BrokerError, BrokerUnavailable, ConfigError, SlotMoved, SlotMoving
from rsmq.redis.client.client import BlockingClient, Client, Command, Send
from rsmq.redis.client.refusals import Refusals
from rsmq.redis.wire.slots import Address, Key, SlotMap, is_script, key_of
from rsmq.redis.wire.url import node_url, split_cluster

PAUSES: Final = (0.0, 0.0, 0.01, 0.03, 0.1, 0.2, 0.4, 0.8)
"""Seconds before each attempt of a command to follow its slot. Around the end of a move each of two nodes may name the
other one as its owner, until they have heard of each other: on a machine with much to do for tenths of a second."""
MOST_HOPS: Final = 5
"""How often a thread follows: what it sends is repeated, and a pause would delay what it sends to other nodes."""

C = TypeVar("C")


class Node(Client):
    """One master of a cluster. Its redirects, and its failures to answer, update the slot map."""

    is_node = True
    slots: SlotMap
    address: Address

    def note_error(self, error: BrokerError | ConfigError) -> None:
        if isinstance(error, SlotMoved):
            error.address = (error.address[0] or self.address[0], error.address[1])
            if not error.is_ask:
                self.slots.learn(error.slot, error.address)
        elif isinstance(error, BrokerUnavailable) and not isinstance(error, SlotMoving):
            self.slots.mark_silent(self.address)

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        try:
            return await super().execute_command(*args, **options)
        except BrokerError as error:
            self.note_error(error)
            raise

    async def pipelined(self, commands: Sequence[Command], *, asking: bool = False) -> list[Any]:
        try:
            replies = await super().pipelined(commands, asking=asking)
        except BrokerError as error:
            self.note_error(error)
            raise
        for reply in replies:
            if isinstance(reply, SlotMoved):
                self.note_error(reply)
        return replies


class ClusterClient(Client):
    """A `Client` with a pool for each node. Commands without a key go to any node."""

    is_cluster = True

    def __init__(self, url: str, timeout: float, options: Mapping[str, Any], refusals: Refusals) -> None:
        self._slots = SlotMap(split_cluster(url))
        self._options = dict(options)
        self._nodes: dict[Address, Node] = {}
        self._refreshing = asyncio.Lock()
        self._failures = 0
        """How often the slot map could not be read."""
        self._trouble = ""
        """Why, the last time."""
        pool = redis.asyncio.ConnectionPool.from_url(node_url(url, self._slots.seeds[0]), **options)
        super().__init__(connection_pool=pool)  # for what is not a command: `pubsub()`
        self.prepare(url, timeout, refusals)

    # -- nodes -----------------------------------------------------------------------------------------

    @property
    def nodes(self) -> Sequence[Client]:
        return [self._node_at(address) for address in self._slots.masters]

    def node_for(self, key: Key) -> Client:
        return self._node_at(self._slots.owner(key))

    def _node_at(self, address: Address) -> Node:
        node = self._nodes.get(address)
        if node is None:
            url = node_url(self.url, address)
            made = Node.from_url(url, **self._options)
            assert isinstance(made, Node)
            node = self._nodes[address] = made.prepare(url, self.timeout, self.refusals)
            node.slots = self._slots
            node.address = address
        return node

    async def refresh(self) -> None:
        """Ask one node after the other for the slot map, if it is stale. Raises BrokerUnavailable when none answers."""
        if not self._slots.is_stale:
            return
        failures = self._failures
        async with self._refreshing:
            if self._slots.is_stale and self._failures > failures:  # while this call waited: it need not try as long
                raise BrokerUnavailable(self._trouble)
            troubles: list[BrokerError] = []
            for address in self._slots.by_reachability() if self._slots.is_stale else ():
                try:
                    info, ranges = await self._node_at(address).pipelined([("CLUSTER", "INFO"), ("CLUSTER", "SLOTS")])
                    self._slots.replace(checked(info, ranges), address)
                except BrokerError as error:
                    troubles.append(error)
                else:
                    break
            if self._slots.is_stale:
                if isinstance(troubles[0], BrokerUnavailable):
                    self._failures += 1
                    self._trouble = str(troubles[0])
                raise troubles[0]
            await self._disconnect_former_masters()

    def watch_slots(self, call: Callable[[], None]) -> None:
        self._slots.watchers.append(call)

    def mark_stale(self) -> None:
        self._slots.is_stale = True

    async def _disconnect_former_masters(self) -> None:
        """Close the connections to nodes without slots. The nodes stay known: one may come back."""
        masters = set(self._slots.masters)
        for address, node in list(self._nodes.items()):  # a copy: concurrent commands add nodes
            if address not in masters:
                await node.connection_pool.disconnect(inuse_connections=False)

    # -- commands ---------------------------------------------------------------------------------------------------

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        """One command, which follows its slot."""
        key = key_of(args)
        moved = SlotMoved(0, ("", 0), is_ask=False)
        for pause in PAUSES:
            if pause:
                await asyncio.sleep(pause)
            await self.refresh()
            address = self._slots.any_master() if key is None else self._slots.owner(key)
            try:
                return await self._node_at(address).execute_command(*args, **options)
            except SlotMoved as error:
                moved = error
            if moved.is_ask:
                if is_script(args):
                    raise moved
                (reply,) = await self._node_at(moved.address).pipelined([args], asking=True)
                if not isinstance(reply, Exception):
                    return reply
                if not isinstance(reply, SlotMoved):
                    raise reply
        raise moved

    async def pipelined(self, commands: Sequence[Command], *, asking: bool = False) -> list[Any]:
        """As `Client.pipelined`, to all nodes at once; in order for each slot only. The error of a lost connection is
        returned in place of each of its replies, so that the replies of the other nodes are not lost."""

        async def send(node: Client, some: list[Command], *, asking: bool) -> list[Any]:
            try:
                return await node.pipelined(some, asking=asking)
            except BrokerError as error:
                return [error] * len(some)

        return await self.spread([(key_of(command) or "", command) for command in commands], send)

    async def spread(self, commands: Sequence[tuple[Key, C]], send: Send) -> list[Any]:
        replies: list[Any] = [None] * len(commands)

        async def deliver(node: Client, plain: list[int], asking: list[int]) -> None:
            # not at the same time: `send` may have only one connection to a node
            for indexes in filter(None, (plain, asking)):
                answers = await send(node, [commands[index][1] for index in indexes], asking=indexes is asking)
                for index, answer in zip(indexes, answers, strict=True):
                    replies[index] = answer

        left: Sequence[int] = range(len(commands))
        for hop, pause in enumerate(PAUSES):
            if left:
                if pause:
                    await asyncio.sleep(pause)
                try:
                    await self.refresh()
                except BrokerUnavailable as error:
                    return replies if hop else [error] * len(commands)
                by_node = defaultdict[Client, tuple[list[int], list[int]]](lambda: ([], []))
                for index in left:
                    node, is_asking = self._target(commands[index][0], replies[index])
                    by_node[node][is_asking].append(index)
                await asyncio.gather(*(deliver(node, *both) for node, both in by_node.items()))
                left = [index for index in left if follows(replies[index], commands[index][1])]
        return replies

    def _target(self, key: Key, answer: Any) -> tuple[Client, bool]:
        """The node for a command, and whether ASKING must precede it."""
        if isinstance(answer, SlotMoved) and answer.is_ask:
            return self._node_at(answer.address), True
        return self.node_for(key), False

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        nodes, self._nodes = self._nodes, {}
        for node in nodes.values():
            await node.aclose(close_connection_pool)
        await super().aclose(True)

    def __repr__(self) -> str:
        return f"<ClusterClient nodes={len(self._nodes)}>"


class BlockingCluster(BlockingClient):
    """A cluster for a thread. A node that has not answered is asked last from then on, so the others do not wait."""

    is_cluster = True

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        self._url = url
        self._options = dict(options)
        self._slots = SlotMap(split_cluster(url))
        self._nodes: dict[Address, BlockingClient] = {}
        pool = redis.ConnectionPool.from_url(node_url(url, self._slots.seeds[0]), **options)
        super().__init__(connection_pool=pool)
        self.prepare()

    def node_for(self, key: Key) -> BlockingClient:
        self._refresh()
        return self._node_at(self._slots.owner(key))

    def _node_at(self, address: Address) -> BlockingClient:
        node = self._nodes.get(address)
        if node is None:
            made = BlockingClient.from_url(node_url(self._url, address), **self._options)
            assert isinstance(made, BlockingClient)
            node = self._nodes[address] = made.prepare()
        return node

    def mark_stale(self) -> None:
        self._slots.is_stale = True

    def _refresh(self) -> None:
        troubles: list[Exception] = []
        for address in self._slots.by_reachability() if self._slots.is_stale else ():
            try:
                info, ranges = self._node_at(address).pipelined([("CLUSTER", "INFO"), ("CLUSTER", "SLOTS")])
                self._slots.replace(checked(info, ranges), address)
                return
            except (redis.RedisError, OSError) as error:
                self._slots.mark_silent(address)
                troubles.append(error)
            except BrokerError as error:
                troubles.append(redis.ConnectionError(str(error)))
        if self._slots.is_stale:
            raise troubles[0]

    def execute_command(self, *args: Any, **options: Any) -> Any:
        """One command. Raises an error reply."""
        (reply,) = self.pipelined([args])
        if isinstance(reply, Exception):
            raise reply
        return reply

    def pipelined(self, commands: Sequence[Command], *, asking: bool = False) -> list[Any]:
        """Node after node. The error of an unreachable node is returned in place of each of its replies."""
        replies: list[Any] = [None] * len(commands)
        left: Sequence[int] = range(len(commands))
        for hop in range(MOST_HOPS):
            if left:
                try:
                    self._refresh()
                except (redis.RedisError, OSError):
                    if hop:
                        return replies
                    raise
                targets: dict[tuple[Address, bool], list[int]] = {}
                for index in left:
                    targets.setdefault(self._target(commands[index], replies[index]), []).append(index)
                for target in sorted(targets, key=lambda target: self._slots.is_silent(target[0])):
                    self._deliver(target, targets[target], commands, replies)
                left = [index for index in left if isinstance(replies[index], AskError)]
        return replies

    def _target(self, command: Command, answer: Any) -> tuple[Address, bool]:
        """The node for a command, and whether ASKING must precede it."""
        if isinstance(answer, AskError) and not isinstance(answer, MovedError):
            return answer.node_addr, True
        return self._slots.owner(key_of(command) or ""), False

    def _deliver(
        self, target: tuple[Address, bool], indexes: list[int], commands: Sequence[Command], replies: list[Any]
    ) -> None:
        address, asking = target
        try:
            answers = self._node_at(address).pipelined([commands[index] for index in indexes], asking=asking)
        except (redis.RedisError, OSError) as error:
            self._slots.mark_silent(address)
            answers = [error] * len(indexes)
        for index, answer in zip(indexes, answers, strict=True):
            replies[index] = answer
            if isinstance(answer, AskError):
                answer.node_addr = (answer.host or address[0], answer.port)
                if isinstance(answer, MovedError):
                    self._slots.learn(answer.slot_id, answer.node_addr)

    def disconnect(self) -> None:
        for node in self._nodes.values():
            node.disconnect()
        super().disconnect()

    def close(self) -> None:
        for node in self._nodes.values():
            node.close()
        self.connection_pool.disconnect()
        super().close()

    def __repr__(self) -> str:
        return f"<BlockingCluster nodes={len(self._nodes)}>"


def follows(reply: Any, command: object) -> bool:
    """Whether a command with this reply is sent again, to where its slot is."""
    return isinstance(reply, SlotMoved) and not (reply.is_ask and is_script(command))


def checked(info: Any, ranges: Any) -> list[Any]:
    """The slot map of a node that sees a working cluster; a node that does not may be cut off from the others."""
    for reply in (info, ranges):
        if isinstance(reply, Exception):
            if "cluster support disabled" in str(reply):
                raise ConfigError("this server is not part of a cluster: use redis:// instead of redis+cluster://")
            raise reply
    if b"cluster_state:ok" not in info:
        raise BrokerUnavailable("the cluster is down: a master is missing, or some slots have no node")
    return list(ranges)
