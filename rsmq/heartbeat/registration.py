"""The entries of this member that others read: heartbeat key, group membership, loop lag. Renewed by the heartbeat."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from rsmq.model.clock import awake
from rsmq.model.keys import Keys
from rsmq.model.member import CHANGED, JOINED, LEFT, news_of, read_info
from rsmq.redis.client.connector import BlockingClient, Client
from rsmq.redis.layouts import members_of

LONGEST_LEASE_MS: Final = 86_400_000
"""What is more was not written by a member."""


OnNews = Callable[[str, tuple[str, ...]], None]
"""Gets what is said about members of a group: a word of `model.member`, and the members."""


@dataclass(slots=True)
class GroupMembership:
    """One group that this member belongs to. `confirmed` is done when the other members can see this one.

    `vitals` says what its messages do; it may be called from any thread. `on_question` is called in the loop with what
    is asked of all members of the group, `on_news` with a word and the members that it is about, and `on_change` for
    what is announced without data. The word is MISSED, about none, if announcements may have been missed.
    """

    topic: str
    group: str
    info: str
    on_change: Callable[[], None]
    vitals: Callable[[], Mapping[str, object]] = dict
    on_question: Callable[[bytes], None] = lambda _question: None
    on_news: OnNews = lambda _word, _members: None
    works_since: float | None = None
    """`awake` at the first renewal since the last one that had no answer. Read by other threads."""
    confirmed: Future[None] = field(default_factory=Future)
    written: str = ""
    """What this member has written last: its `info` on the server."""
    joined_as: str = ""
    """What this member wrote when it joined."""

    def tell(self, **about: object) -> None:
        """Say something else about this member, from the next heartbeat on."""
        self.info = json.dumps({**json.loads(self.info), **about})

    @property
    def has_changed(self) -> bool:
        """Whether this member has written something else since it joined: a failover may bring the first back."""
        return self.written != self.joined_as


class Registration:
    """For each group: a heartbeat key that lives `ttl` ms, an entry in the set of members, and the loop lag.

    Invariant: a heartbeat that began before `withdraw` does not write again what `withdraw` has deleted.
    """

    def __init__(self, keys: Keys, member: str, ttl: int) -> None:
        self._keys = keys
        self._member = member
        self._ttl = ttl  # in ms
        self._lock = threading.Lock()
        self._writing = threading.Lock()  # held during calls to the server: the loop must never wait for it
        self._memberships: dict[tuple[str, str], GroupMembership] = {}

    @property
    def memberships(self) -> list[GroupMembership]:
        """The groups to renew now."""
        with self._lock:
            return list(self._memberships.values())

    def add(self, membership: GroupMembership) -> None:
        """Renew it from the next heartbeat on."""
        with self._lock:
            self._memberships[membership.topic, membership.group] = membership

    def remove(self, topic: str, group: str) -> bool:
        """Stop renewing it; `withdraw` deletes its keys. False if it was not being renewed."""
        with self._lock:
            return self._memberships.pop((topic, group), None) is not None

    # -- in the thread --------------------------------------------------------------------------------------------

    def renewals(self, memberships: Sequence[GroupMembership]) -> list[tuple[Any, ...]]:
        """Two commands for each: renew the heartbeat key, and ask whether the set of members still has this one. A
        third one reads what it says, if that has changed."""
        commands: list[tuple[Any, ...]] = []
        for each in memberships:
            commands.append(("PEXPIRE", self._alive(each), self._ttl))
            commands.append(("SISMEMBER", self._keys.members(each.topic, each.group), self._member))
            if each.has_changed:
                commands.append(("GET", self._alive(each)))
        return commands

    def confirm(self, client: BlockingClient, memberships: Sequence[GroupMembership], replies: Sequence[Any]) -> None:
        """Write again what the replies to `renewals` show to be missing, and what a failover may have set back.

        Nothing else is written: PEXPIRE also works when the server is out of memory. A reply may be an error: on a
        cluster the nodes of some groups answer, and those of others do not.
        """
        left = iter(replies)
        for each in memberships:
            is_there = [next(left), next(left)]
            if each.has_changed:
                is_there.append(next(left))
            if any(isinstance(one, Exception) for one in is_there):
                each.works_since = None
                continue
            if each.works_since is None:
                each.works_since = awake()
            is_lost = not all(is_there) or is_there[2:] not in ([], [each.written.encode()])
            if is_lost or each.written != each.info:
                self.write(client, each)
            with suppress(InvalidStateError):  # the waiting task was cancelled
                each.confirmed.set_result(None)

    def missed(self) -> None:
        """No group was renewed."""
        for each in self.memberships:
            each.works_since = None

    def works_since(self, topic: str, group: str) -> float | None:
        """`awake` since when a group is renewed without failure; None: it is not. From any thread."""
        with self._lock:
            found = self._memberships.get((topic, group))
        return None if found is None else found.works_since

    def write(self, client: BlockingClient, membership: GroupMembership) -> None:
        """The key goes first: a member of the set without a key counts as dead."""
        with self._writing:
            if self._is_current(membership):
                info = membership.info
                client.execute_command("SET", self._alive(membership), info, "PX", self._ttl)
                client.execute_command("SADD", self._keys.members(membership.topic, membership.group), self._member)
                is_new = membership.written in ("", info)  # or the server has lost it
                news = news_of(JOINED if is_new else CHANGED, [self._member])
                client.execute_command("PUBLISH", self._keys.changes(membership.topic, membership.group), news)
                membership.written, membership.joined_as = info, membership.joined_as or info

    def write_vitals(
        self, client: BlockingClient, memberships: Sequence[GroupMembership], own: Mapping[str, float]
    ) -> None:
        """`own` holds for the whole process. Only operators read it: a server out of memory refuses the write, and
        nothing depends on it."""
        with self._writing:
            current = [each for each in memberships if self._is_current(each)]
            texts = [json.dumps({**own, **each.vitals()}) for each in current]
            names = [self._keys.vitals(each.topic, each.group, self._member) for each in current]
            client.pipelined([("SET", *pair, "PX", self._ttl) for pair in zip(names, texts, strict=True)])

    def withdraw(self, client: BlockingClient, topic: str, group: str) -> None:
        """Delete the keys of a group and announce it, so that the other members rebalance at once."""
        with self._writing:
            client.execute_command("SREM", self._keys.members(topic, group), self._member)
            written = self._keys.alive(topic, group, self._member), self._keys.vitals(topic, group, self._member)
            client.execute_command("DEL", *written)
            client.execute_command("PUBLISH", self._keys.changes(topic, group), news_of(LEFT, [self._member]))

    def _is_current(self, membership: GroupMembership) -> bool:
        return self._memberships.get((membership.topic, membership.group)) is membership

    def _alive(self, membership: GroupMembership) -> str:
        return self._keys.alive(membership.topic, membership.group, self._member)

    def __repr__(self) -> str:
        return f"<Registration {self._member} groups={len(self._memberships)}>"


async def longer_leases(client: Client, keys: Keys, topic: str, group: str, own_ms: int) -> dict[str, int]:
    """The lease in ms of each live member of a group whose lease is longer than `own_ms`."""
    infos = await read_members(client, keys, topic, group)
    leases = {member: info.get("lease_ttl_ms") for member, info in infos.items()}  # older versions do not say it
    return {member: ms for member, ms in leases.items() if isinstance(ms, int) and own_ms < ms < LONGEST_LEASE_MS}


async def read_members(client: Client, keys: Keys, topic: str, group: str) -> dict[str, dict[str, Any]]:
    """The own description of each member of a group that has a heartbeat key."""
    return {name: read_info(info) for name, (info, _) in (await members_of(client, keys, topic, group)).items()}
