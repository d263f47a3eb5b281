"""The subscriptions of all clients: written to the server before they are acknowledged, and read by every gateway.

A router reads messages first, and then what has changed here. So a message that was published after a SUBACK meets
that subscription, whichever gateways were asked. Filters with wildcards, shares, and topic names with many subscribers
are held by every gateway. All others are topic names, which a router looks up for its messages.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from typing import Any, Final, NamedTuple

import anyio
from pydantic_core import from_json, to_json

from rsmq.errors import SessionTaken
from rsmq.gateway.fleet.filter_tree import FilterTree
from rsmq.gateway.fleet.scripts import CLAIM_SUBSCRIPTIONS, LOOK_AT_SUBSCRIPTIONS, SUBSCRIBE_CLIENT
from rsmq.gateway.fleet.subscribers import NEW_MS, NO_SUBSCRIBERS, Subscribers
from rsmq.gateway.protocol.packet import MalformedPacket
from rsmq.gateway.protocol.topic_filter import SHARE, check_filter, split_share
from rsmq.model.keys import Keys
from rsmq.model.log_names import name_in_log
from rsmq.model.mqtt_subscription import SHARDS, Subscription, pack, shard_of, unpack
from rsmq.model.record import device_id, exact_text, whole
from rsmq.model.stream_id import is_stream_id, sortable
from rsmq.redis.client.connector import Client
from rsmq.redis.client.script_batcher import ScriptBatcher
from rsmq.redis.scripts import STALE_EPOCH
from rsmq.redis.streams import NOTHING, ask_all

log = logging.getLogger("rsmq.gateway")

KEPT_CHANGES: Final = 10_000
PAGE: Final = 1000
MOST_NEW: Final = 1000
"""New subscriptions that are remembered for a partition which no router of this gateway reads."""
MOST_NAMES: Final = 50_000
"""Topic names whose subscribers are remembered."""

EMPTY: Final = b"[]"
"""A list without subscriptions, of a session that goes on."""
LOST: Final = b"LOST"
"""The answer to a change by a connection whose list is not there."""
UNREAD: Final = b"unread"
"""In the place of a mark: what was read is not of one moment yet."""

Marks = tuple[bytes | None, ...]
"""Of each shard: as long as its mark is the same, so are the subscriptions there. None: there were none yet."""

States = tuple[bytes, ...]
"""Of each shard: the state of its names."""


EVERYWHERE: Final = frozenset(range(SHARDS))
Unknown = tuple[list[str], Set[int]]
"""Topic names, and the shards in which they are to be looked up."""


class ShardAnswer(NamedTuple):
    """The answer of a shard. `changes`: of what all routers follow. `texts`: the subscribers of a name as the server
    has them, by its number among those that were looked up."""

    shard: int
    changes: Sequence[Any]
    mark: bytes | None
    texts: Mapping[int, bytes]


class ListHolder(NamedTuple):
    """The holder of a list that all routers follow: a client, with its wildcards and shares, or a client as one
    of the many subscribers of a topic name."""

    client: str
    name: str = ""

    @classmethod
    def read(cls, raw: bytes) -> ListHolder | None:
        """A field of the server; None if another client has written it."""
        client, separator, name = raw.partition(b"\0")
        if separator and not name:  # it would stand for the list of the client itself
            return None
        found, topic_name = device_id(client), exact_text(name) if name else ""
        return None if found is None or topic_name is None else cls(found, topic_name)


class Registry:
    """Which client has subscribed to what. As of the end of a `look`, what it was asked for is as of one moment in each
    shard, and a client has one shard: `tree` has the filters that all routers follow, `subscribers` the topic names."""

    def __init__(self, client: Client, keys: Keys, batcher: ScriptBatcher) -> None:
        self._client, self._batcher = client, batcher
        self._keys = keys
        self._hashes = [keys.mqtt(shard, "subscriptions") for shard in range(SHARDS)]
        self._streams = [keys.mqtt(shard, "changes") for shard in range(SHARDS)]
        self._followed = [keys.mqtt(shard, "followed") for shard in range(SHARDS)]
        self._names = [keys.mqtt(shard, "names") for shard in range(SHARDS)]
        self._mark_keys = [keys.mqtt(shard, "mark") for shard in range(SHARDS)]
        self._token, self._calls = secrets.token_hex(4), 0
        self._positions: list[bytes] = []
        self._numbers = [0] * SHARDS
        self._lists: dict[ListHolder, list[Subscription]] = {}
        self._marks: Marks = (UNREAD,) * SHARDS
        self._names_at: States = (b"",) * SHARDS
        self._followed_at: list[bytes] = [UNREAD] * SHARDS
        self._looked_up: dict[str, Subscribers] = {}
        self._asked: list[Collection[str]] = []
        """The topic names of each `look` that has not returned: every read reads them, so that none of them is older
        than the tree."""
        self._lock = anyio.Lock()
        self._started = 0
        self._finished = 0
        self.lookups = 0
        """Topic names that were looked up in a shard."""
        self.version = 0
        """Grows with every change of the tree."""
        self.tree: FilterTree[str, Subscription] = FilterTree()
        """A share is in it once, under its own filter; its members are in `shares`."""
        self.shares: dict[str, dict[str, Subscription]] = {}
        self.offline: set[str] = set()
        """Clients with shared subscriptions that are not connected."""
        self.new: dict[str, list[tuple[str, frozenset[tuple[str, str]]]]] = {}
        """By partition: the position up to which messages do not meet new subscriptions (client and filter)."""

    @property
    def subscriptions(self) -> int:
        """How many there are, as of the last `look`."""
        by_name = [whole(mark.partition(b":")[0]) or 0 for mark in self._marks if mark is not None]
        return sum(map(len, self._lists.values())) + sum(by_name)

    # -- writing ---------------------------------------------------------------------------------------------------

    async def write(
        self, client: str, epoch: str, subscriptions: Iterable[Subscription], *, is_online: bool = True,
        before: Mapping[str, str] | None = None,
    ) -> bytes:  # fmt: skip
        """Replace the subscriptions of a client; by none, if its session ends. Raises SessionTaken if a newer
        connection has.

        `before`: by partition, the newest message that new ones do not meet.
        Returns OK, NONE if there were none and are to be none, or SHARED if its session has had shared ones.
        """
        return await self._write(client, epoch, pack(subscriptions, is_online=is_online), before)

    async def begin(self, client: str, epoch: str) -> bytes:
        """Remove the subscriptions of a client whose session begins. Older connections cannot change them any more."""
        return await self._write(client, epoch, EMPTY)

    async def change(
        self, client: str, epoch: str, subscriptions: Iterable[Subscription], before: Mapping[str, str] | None = None
    ) -> None:
        """Replace the subscriptions of a client that is connected. Raises SessionTaken also if its session has ended.

        A gateway that was paused may be late: what it writes then would stay without a session, or be of a later one.
        """
        packed = pack(subscriptions) or EMPTY
        if await self._write(client, epoch, packed, before, is_own=True) != LOST:
            return
        if await self._client.execute_command("HGET", self._keys.session(client), "epoch") != epoch.encode():
            raise SessionTaken(client)
        await self._write(client, epoch, packed, before)  # the server has lost what its connect has written

    async def _write(
        self, client: str, epoch: str, packed: bytes, before: Mapping[str, str] | None = None, *, is_own: bool = False
    ) -> bytes:
        shard = shard_of(client)
        older = to_json(before) if before else b""
        self._calls += 1
        token = f"{self._token}{self._calls:x}"
        keys = (
            self._hashes[shard], self._streams[shard], self._names[shard], self._followed[shard],
            self._mark_keys[shard], self._new_key(shard, token),
        )  # fmt: skip
        args = (client, epoch, packed, KEPT_CHANGES, older, token, NEW_MS, int(is_own))
        reply = await self._batcher.submit(SUBSCRIBE_CLIENT, keys, args)
        if reply == STALE_EPOCH:
            raise SessionTaken(client)
        return bytes(reply)

    async def with_shares(self, clients: Sequence[tuple[str, str]]) -> list[tuple[str, str, list[Subscription]]]:
        """Those of these clients (with their epochs) that have shared subscriptions, and their whole lists."""
        asked = [("HGET", self._hashes[shard_of(client)], client) for client, _ in clients]
        values = await ask_all(self._client, asked) if asked else []
        return [
            (client, epoch, self._read_list(client, value.partition(b"|")[2])[0])
            for (client, epoch), value in zip(clients, values, strict=True)
            if value is not None and value.startswith(b"%b|" % epoch.encode()) and b'"$share/' in value
        ]

    async def claim(self, client: str, epoch: str) -> list[Subscription]:
        """The subscriptions of a client whose session goes on. Older connections cannot change them any more."""
        reply = await self._batcher.submit(CLAIM_SUBSCRIPTIONS, (self._hashes[shard_of(client)],), (client, epoch))
        if reply == STALE_EPOCH:
            raise SessionTaken(client)
        return self._read_list(client, reply)[0]

    def _read_list(self, client: str, raw: bytes) -> tuple[list[Subscription], bool]:
        """The list of a client, and whether it is connected. What another client has written is as none: it is named,
        and replaced when its client subscribes again."""
        try:
            found, is_online = unpack(raw)
            for each in found:
                check_filter(each.filter)
        except (ValueError, MalformedPacket) as error:
            shown = name_in_log(client)
            log.warning("the subscriptions of client %s cannot be read, and count as none: %s", shown, error)
            return [], True
        return found, is_online

    # -- reading ---------------------------------------------------------------------------------------------------

    async def catch_up(self) -> None:
        """Read all changes of the tree that were written before this call."""
        await self.look(())

    async def look(self, names: Collection[str]) -> None:
        """Read all that was written before this call: for the tree, and for these topic names.

        Until the caller awaits anything else, the tree and the `subscribers` of these names are as of one moment in
        each shard. Calls made during a read share the next one.
        """
        wanted = self._started + 1
        self._asked.append(names)
        try:
            async with self._lock:
                if self._finished < wanted:
                    self._started += 1
                    number = self._started
                    try:
                        await self._read()
                    except BaseException:
                        if UNREAD in self._marks:  # the server may lose what was read here, and be again as before
                            self._positions = []
                        raise
                    self._finished = number
        finally:
            self._asked.remove(names)

    def subscribers(self, name: str) -> Subscribers | None:
        """The subscribers of a topic name by that name, after a `look` that was asked for it."""
        return self._looked_up.get(name)

    async def _read(self) -> None:
        if not self._positions:
            await self._name_older_lists()
            await self._snapshot()
        if len(self._looked_up) > MOST_NAMES:
            asked = set[str]().union(*self._asked)
            self._looked_up = {name: each for name, each in self._looked_up.items() if name in asked}
        while True:
            unknown = self._unknown(self._names_at)
            if not unknown[0]:
                marks = await self._ask()
                if marks == self._marks:
                    return
                unknown = self._unknown(tuple(map(state_of_names, marks)))
            answers = await self._look_up(unknown)
            followed = [self._follow(each) for each in answers]
            if all(followed):
                await self._note(answers, *unknown)
                if not self._unknown(self._names_at)[0]:
                    return
            elif not self._positions:
                await self._snapshot()

    def _unknown(self, at: States) -> Unknown:
        """The topic names that are asked for and whose subscribers in this state are not known, and where."""
        names, shards = list[str](), frozenset[int]()
        for name in self._asked[0] if len(self._asked) == 1 else set[str]().union(*self._asked):
            found = self._looked_up.get(name)
            if found is None:
                names.append(name)
                shards = EVERYWHERE
            elif found.at is not at:
                if found.at == at:
                    found.at = at
                    continue
                names.append(name)
                if shards is not EVERYWHERE:  # while many clients subscribe, every name has changed shards
                    shards = shards | {shard for shard in range(SHARDS) if found.at[shard] != at[shard]}
                    if len(shards) == SHARDS:
                        shards = EVERYWHERE
        return names, shards

    async def _look_up(self, unknown: Unknown) -> list[ShardAnswer]:
        """The next changes and the mark of each shard, and the subscribers of names, as of one moment."""
        each, every = [(shard,) for shard in range(SHARDS)], [tuple(range(SHARDS))]
        groups: Sequence[tuple[int, ...]] = each if self._client.is_cluster else every
        replies = await asyncio.gather(*(self._look_up_in(group, *unknown) for group in groups))
        self.lookups += len(unknown[0]) * len(unknown[1])
        return [answer for group in replies for answer in group]

    async def _look_up_in(self, group: Sequence[int], names: Sequence[str], shards: Set[int]) -> list[ShardAnswer]:
        keys, args = list[str](), list[str | bytes | int]([PAGE])
        for shard in group:
            keys += (self._streams[shard], self._mark_keys[shard], self._names[shard])
            args += (self._positions[shard], int(shard in shards))
        if not shards.isdisjoint(group):
            args += names
        replies = await LOOK_AT_SUBSCRIPTIONS(self._client, keys, args)
        return [
            ShardAnswer(shard, changes or (), mark, dict(zip(found[::2], found[1::2], strict=True)))
            for shard, (changes, mark, *found) in zip(group, replies, strict=True)
        ]

    async def _ask(self) -> Marks:
        """The marks of all shards: while they are those of the last read, nothing has changed since."""
        if self._client.is_cluster:
            return tuple(await ask_all(self._client, [("GET", each) for each in self._mark_keys]))
        return tuple(await self._client.execute_command("MGET", *self._mark_keys))

    def _follow(self, answer: ShardAnswer) -> bool:
        """Apply the changes of a shard. Returns whether these are all; without positions everything is to be read."""
        if not self._positions:
            return False
        shard, state = answer.shard, state_of_changes(answer.mark)
        if not answer.changes and self._followed_at[shard] not in (state, UNREAD):
            self._positions = []  # the server has lost changes that were read here
            return False
        is_last = len(answer.changes) < PAGE
        self._followed_at[shard] = state if is_last else UNREAD
        if answer.changes:
            self._marks = (UNREAD,) * SHARDS  # until names and changes are of one moment again
        for entry_id, fields in answer.changes:
            change = dict(zip(fields[::2], fields[1::2], strict=True))
            number, holder = whole(change.get(b"n")), ListHolder.read(change.get(b"c", b""))
            # some were trimmed, the server lost them, or another client has written this one
            if number is None or holder is None or number != self._numbers[shard] + 1:
                self._positions = []
                return False
            self._numbers[shard], self._positions[shard] = number, entry_id
            found, is_online = self._read_list(holder.client, change.get(b"v", b""))
            if b"b" in change:
                self._note_new(holder, found, read_newest(change[b"b"]))
            self._apply(holder, found, is_online)
        return is_last

    async def _note(self, answers: Sequence[ShardAnswer], names: Sequence[str], shards: Set[int]) -> None:
        """Note the marks of all shards, and the subscribers of these names there, as of the moment of the changes."""
        marks = tuple(each.mark for each in answers)
        states = tuple(map(state_of_names, marks))
        at = self._names_at if states == self._names_at else states
        texts = [answers[shard].texts for shard in range(SHARDS)]
        changed = list[tuple[str, Subscribers]]()
        for number, name in enumerate(names, 1):
            known = self._looked_up.get(name, NO_SUBSCRIBERS)
            if shards is EVERYWHERE:
                values, each_at = [text.get(number) for text in texts], at
            else:
                values = [
                    texts[shard].get(number) if shard in shards else known.values[shard] for shard in range(SHARDS)
                ]
                each_at = tuple([at[shard] if shard in shards else known.at[shard] for shard in range(SHARDS)])
            if known is not NO_SUBSCRIBERS and known.values == values:
                known.at = each_at
            else:
                changed.append((name, Subscribers(name, values, each_at)))
        if some_new := [found for _, found in changed if found.tokens]:
            await self._read_older(some_new)
        self._looked_up.update(changed)
        self._marks, self._names_at = marks, at

    async def _read_older(self, some_new: Sequence[Subscribers]) -> None:
        """Read which messages are older than these subscriptions. The server forgets it after a minute."""
        asked = [(found, *each) for found in some_new for each in found.tokens]
        replies = await ask_all(self._client, [("GET", self._new_key(shard, token)) for _, shard, _, token in asked])
        for (found, _, client, _), raw in zip(asked, replies, strict=True):
            if raw is not None:
                found.older[client] = {name: sortable(at.encode()) for name, at in read_newest(raw).items()}

    def _new_key(self, shard: int, token: str) -> str:
        return self._keys.mqtt(shard, f"new:{token}")

    async def _snapshot(self) -> None:
        """Read all that routers follow. What changes meanwhile comes again with the changes, which is harmless."""
        ends = await ask_all(self._client, [("XREVRANGE", each, "+", "-", "COUNT", 1) for each in self._streams])
        marks = await self._ask()
        lists = dict[ListHolder, tuple[list[Subscription], bool]]()
        for name in self._followed:
            cursor = b"0"
            while True:
                cursor, flat = await self._client.execute_command("HSCAN", name, cursor, "COUNT", PAGE)
                for raw, value in zip(flat[::2], flat[1::2], strict=True):
                    if (holder := ListHolder.read(raw)) is not None:
                        lists[holder] = self._read_list(holder.client, value)
                if cursor == b"0":
                    break
        for holder in self._lists.keys() - lists.keys():
            self._apply(holder, [], True)
        for holder, found in lists.items():
            self._apply(holder, *found)
        self._marks, self._followed_at = (UNREAD,) * SHARDS, list(map(state_of_changes, marks))
        self._positions = [end[0][0] if end else NOTHING for end in ends]
        self._numbers = [whole(end[0][1][1]) or 0 if end else 0 for end in ends]

    async def _name_older_lists(self) -> None:
        """Warn if there are lists of a version that did not write them for lookups: no router would meet them."""
        lists = await ask_all(self._client, [("HSCAN", each, 0, "COUNT", PAGE) for each in self._hashes])
        marks = await self._ask()
        some = [any(b"|[" in value for value in flat[1::2]) for _, flat in lists]
        names = zip(self._hashes, some, marks, strict=True)
        if found := [name for name, has_some, mark in names if has_some and mark is None]:
            log.warning(
                "the subscriptions in %s were written by an earlier version and meet no message: delete these keys "
                "and let the clients subscribe again",
                ", ".join(found),
            )

    def _note_new(self, holder: ListHolder, found: list[Subscription], before: Mapping[str, str]) -> None:
        """Note which messages are older than the new subscriptions of a client."""
        old = {each.filter for each in self._lists.get(holder, ())}
        if new := frozenset((holder.client, each.filter) for each in found if each.filter not in old):
            for partition, newest in before.items():
                noted = self.new.setdefault(partition, [])
                noted.append((sortable(newest.encode()), new))
                del noted[:-MOST_NEW]

    def _apply(self, holder: ListHolder, found: list[Subscription], is_online: bool) -> None:
        """Replace what the tree has for a client, or for a client and a name."""
        self.version += 1
        client, old = holder.client, self._lists.pop(holder, [])
        wanted = {each.filter for each in found}
        for each in old:
            if each.filter not in wanted:
                self._remove(client, each)
        for each in found:
            if each.filter.startswith(SHARE):
                self.shares.setdefault(each.filter, {})[client] = each
                self.tree.put(split_share(each.filter)[1], f"\0{each.filter}", each)
            else:
                self.tree.put(each.filter, client, each)
        if found:
            self._lists[holder] = found
        if holder.name:
            return
        if is_online:
            self.offline.discard(client)
        else:
            self.offline.add(client)

    def _remove(self, client: str, subscription: Subscription) -> None:
        name = subscription.filter
        if not name.startswith(SHARE):
            self.tree.remove(name, client)
            return
        members = self.shares[name]
        del members[client]
        if not members:
            del self.shares[name]
            self.tree.remove(split_share(name)[1], f"\0{name}")

    def __repr__(self) -> str:
        return f"<Registry clients={len(self._lists)} {self.tree!r}>"


def state_of_names(mark: bytes | None) -> bytes:
    """While it is the same, so are the subscribers of all topic names of a shard. Empty: there have been none."""
    parts = (mark or b"").split(b":")
    return parts[1] if len(parts) == 4 else b":".join(parts)


def state_of_changes(mark: bytes | None) -> bytes:
    """While it is the same, so is what all routers follow of a shard. Empty: there has been nothing."""
    parts = (mark or b"").split(b":")
    return parts[3] if len(parts) == 4 else b":".join(parts)


def read_newest(raw: bytes) -> dict[str, str]:
    """By partition, the newest message that new subscriptions do not meet; what is none is left out."""
    try:
        found = from_json(raw)
    except ValueError:
        return {}
    pairs = found.items() if isinstance(found, dict) else ()
    return {name: newest for name, newest in pairs if isinstance(newest, str) and is_stream_id(newest.encode())}
