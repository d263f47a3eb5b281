"""The subscriptions of all clients: written to the server before they are acknowledged, and followed by every gateway.

A router reads messages first, and then what has changed here. So a message that was published after a SUBACK meets
that subscription, whichever gateways were asked.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import anyio
from pydantic_core import from_json, to_json

from rsmq.errors import SessionTaken
from rsmq.gateway.fleet.filter_tree import FilterTree
from rsmq.gateway.fleet.scripts import CLAIM_SUBSCRIPTIONS, SUBSCRIBE_CLIENT
from rsmq.gateway.protocol.packet import MalformedPacket
from rsmq.gateway.protocol.topic_filter import SHARE, check_filter, split_share
from rsmq.model.keys import Keys
from rsmq.model.log_names import name_in_log
from rsmq.model.mqtt_subscription import SHARDS, Subscription, pack, shard_of, unpack
from rsmq.model.record import device_id, whole
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


class Registry:
    """Which client has subscribed to what. `tree` is complete as of the last `catch_up`."""

    def __init__(self, client: Client, keys: Keys, batcher: ScriptBatcher) -> None:
        self._client, self._batcher = client, batcher
        self._hashes = [keys.mqtt(shard, "subscriptions") for shard in range(SHARDS)]
        self._streams = [keys.mqtt(shard, "changes") for shard in range(SHARDS)]
        self._positions: list[bytes] = []
        self._numbers = [0] * SHARDS
        self._lists: dict[str, list[Subscription]] = {}
        self._lock = anyio.Lock()
        self._started = 0
        self._finished = 0
        self.version = 0
        """Grows with every change."""
        self.tree: FilterTree[str, Subscription] = FilterTree()
        """A share is in it once, under its own filter; its members are in `shares`."""
        self.shares: dict[str, dict[str, Subscription]] = {}
        self.offline: set[str] = set()
        """Clients with shared subscriptions that are not connected."""
        self.new: dict[str, list[tuple[str, frozenset[tuple[str, str]]]]] = {}
        """By partition: the position up to which messages do not meet new subscriptions (client and filter)."""

    @property
    def subscriptions(self) -> int:
        """How many there are, as of the last `catch_up`."""
        return sum(map(len, self._lists.values()))

    # -- writing ---------------------------------------------------------------------------------------------------

    async def write(
        self, client: str, epoch: str, subscriptions: Iterable[Subscription], *, is_online: bool = True,
        before: Mapping[str, str] | None = None,
    ) -> bytes:  # fmt: skip
        """Replace the subscriptions of a client. Raises SessionTaken if a newer connection has.

        `before`: by partition, the newest message that new ones do not meet.
        Returns OK, NONE if there were none and are to be none, or SHARED if some of the old ones were shared.
        """
        shard = shard_of(client)
        older = to_json(before) if before else b""
        args = (client, epoch, pack(subscriptions, is_online=is_online), KEPT_CHANGES, older)
        reply = await self._batcher.submit(SUBSCRIBE_CLIENT, (self._hashes[shard], self._streams[shard]), args)
        if reply == STALE_EPOCH:
            raise SessionTaken(client)
        return bytes(reply)

    async def with_shares(self, clients: Sequence[tuple[str, str]]) -> list[tuple[str, str, list[Subscription]]]:
        """Those of these clients (with their epochs) that have shared subscriptions, and their whole lists."""
        asked = [("HGET", self._hashes[shard_of(client)], client) for client, _ in clients]
        values = await ask_all(self._client, asked) if asked else []
        return [
            (client, epoch, self._read(client, value.partition(b"|")[2])[0])
            for (client, epoch), value in zip(clients, values, strict=True)
            if value is not None and value.startswith(b"%b|" % epoch.encode()) and b'"$share/' in value
        ]

    async def claim(self, client: str, epoch: str) -> list[Subscription]:
        """The subscriptions of a client whose session goes on. Older connections cannot change them any more."""
        reply = await self._batcher.submit(CLAIM_SUBSCRIPTIONS, (self._hashes[shard_of(client)],), (client, epoch))
        if reply == STALE_EPOCH:
            raise SessionTaken(client)
        return self._read(client, reply)[0]

    def _read(self, client: str, raw: bytes) -> tuple[list[Subscription], bool]:
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

    # -- following -------------------------------------------------------------------------------------------------

    async def catch_up(self) -> None:
        """Read all changes that were written before this call. Calls made during a read share the next one."""
        wanted = self._started + 1
        async with self._lock:
            if self._finished >= wanted:
                return
            self._started += 1
            number = self._started
            if not self._positions:
                await self._snapshot()
            else:
                await self._follow()
            self._finished = number

    async def _follow(self) -> None:
        is_complete = False
        while not is_complete:
            is_complete = True
            for shard, entries in await self._changes():
                is_complete = is_complete and len(entries) < PAGE
                for entry_id, fields in entries:
                    change = dict(zip(fields[::2], fields[1::2], strict=True))
                    number, client = whole(change.get(b"n")), device_id(change.get(b"c", b""))
                    # some were trimmed, the server lost them, or another client has written this one
                    if number is None or client is None or number != self._numbers[shard] + 1:
                        await self._snapshot()
                        return
                    self._numbers[shard], self._positions[shard] = number, entry_id
                    found, is_online = self._read(client, change.get(b"v", b""))
                    if b"b" in change:
                        self._note_new(client, found, read_newest(change[b"b"]))
                    self._apply(client, found, is_online)

    async def _changes(self) -> list[tuple[int, list[Any]]]:
        """The next changes of each shard that has some."""
        if self._client.is_cluster:
            commands = [
                ("XREAD", "COUNT", PAGE, "STREAMS", stream, position)
                for stream, position in zip(self._streams, self._positions, strict=True)
            ]
            replies = await ask_all(self._client, commands)
            return [(shard, reply[0][1]) for shard, reply in enumerate(replies) if reply]
        reply = await self._client.execute_command("XREAD", "COUNT", PAGE, "STREAMS", *self._streams, *self._positions)
        return [(self._streams.index(stream.decode()), entries) for stream, entries in reply or ()]

    async def _snapshot(self) -> None:
        """Read everything. What changes meanwhile comes again with the changes, which is harmless."""
        ends = await ask_all(self._client, [("XREVRANGE", each, "+", "-", "COUNT", 1) for each in self._streams])
        lists = dict[str, tuple[list[Subscription], bool]]()
        for name in self._hashes:
            cursor = b"0"
            while True:
                cursor, flat = await self._client.execute_command("HSCAN", name, cursor, "COUNT", PAGE)
                for raw, value in zip(flat[::2], flat[1::2], strict=True):
                    if (client := device_id(raw)) is not None:
                        lists[client] = self._read(client, value.partition(b"|")[2])
                if cursor == b"0":
                    break
        for client in self._lists.keys() - lists.keys():
            self._apply(client, [], True)
        for client, found in lists.items():
            self._apply(client, *found)
        self._positions = [end[0][0] if end else NOTHING for end in ends]
        self._numbers = [whole(end[0][1][1]) or 0 if end else 0 for end in ends]

    def _note_new(self, client: str, found: list[Subscription], before: Mapping[str, str]) -> None:
        """Note which messages are older than the new subscriptions of a client."""
        old = {each.filter for each in self._lists.get(client, ())}
        if new := frozenset((client, each.filter) for each in found if each.filter not in old):
            for partition, newest in before.items():
                noted = self.new.setdefault(partition, [])
                noted.append((sortable(newest.encode()), new))
                del noted[:-MOST_NEW]

    def _apply(self, client: str, found: list[Subscription], is_online: bool) -> None:
        """Replace what the tree has for a client."""
        self.version += 1
        old = self._lists.pop(client, [])
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
            self._lists[client] = found
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


def read_newest(raw: bytes) -> dict[str, str]:
    """By partition, the newest message that new subscriptions do not meet; what is none is left out."""
    try:
        found = from_json(raw)
    except ValueError:
        return {}
    pairs = found.items() if isinstance(found, dict) else ()
    return {name: newest for name, newest in pairs if isinstance(newest, str) and is_stream_id(newest.encode())}
