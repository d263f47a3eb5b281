"""Read-only questions about topics, groups, members and the server, answered with plain dataclasses.

Nothing here consumes, claims or writes. A question costs a few exchanges, so it may be asked during an incident.
"""

from __future__ import annotations

import platform
from collections.abc import Collection
from dataclasses import replace
from datetime import timedelta
from typing import Final

from rsmq.inspector.observer import Observer
from rsmq.inspector.state import GroupState, MemberState, ServerState, Snapshot, TopicState
from rsmq.model.clock import monotonic
from rsmq.model.keys import Keys
from rsmq.model.settings import Settings
from rsmq.model.words import installed
from rsmq.redis.client.connector import Client, redact
from rsmq.redis.embedded.server import EmbeddedServer
from rsmq.redis.preflight import gather, judge
from rsmq.redis.preflight.facts import newer_commands
from rsmq.redis.pubsub import listeners

PINGS: Final = 5


class Inspector:
    """Answers questions. Errors of the connection are raised; what does not exist is None or an empty list."""

    def __init__(self, client: Client, keys: Keys, settings: Settings) -> None:
        self._client = client
        self._keys = keys
        self._settings = settings
        self._observer = Observer(client, keys, settings)

    async def snapshot(self, topics: Collection[str] | None = None) -> Snapshot:
        """Topics, groups and members at one time. Cheap enough to be asked every second."""
        return await self._observer.snapshot(topics)

    async def topics(self) -> list[TopicState]:
        """All topics, by name."""
        return list((await self.snapshot()).topics)

    async def topic(self, name: str) -> TopicState | None:
        """One topic, or None."""
        return next(iter((await self.snapshot([name])).topics), None)

    async def groups(self, topic: str | None = None) -> list[GroupState]:
        """The groups of one topic, or of all."""
        return list((await self.snapshot(None if topic is None else [topic])).groups)

    async def group(self, topic: str, group: str) -> GroupState | None:
        """One group of one topic, or None."""
        return next((state for state in await self.groups(topic) if state.name == group), None)

    async def members(self, topic: str | None = None, group: str | None = None) -> list[MemberState]:
        """The members of one group, one topic, or all, with whether each is present."""
        states = (await self.snapshot(None if topic is None else [topic])).members
        found = [state for state in states if group in (None, state.group)]
        counts = await listeners(self._client, [self._keys.presence(state.id) for state in found])
        return [replace(state, is_present=count > 0) for state, count in zip(found, counts, strict=True)]

    async def server(self) -> ServerState:
        """The facts of `rsmq doctor` about the server, and the libraries here."""
        facts, state = await gather(self._client, self._keys), await self.snapshot()
        parser = type(getattr(self._client.nodes[0].connection_pool.make_connection(), "_parser", None)).__name__
        return ServerState(
            url=redact(self._client.url),
            server=", ".join(sorted({each.server for each in facts})),
            round_trip=min([await self._round_trip() for _ in range(PINGS)]),
            topics=len(state.topics),
            groups=len(state.groups),
            python=platform.python_version(),
            redis_py=installed("redis"),
            hiredis=installed("hiredis"),
            is_hiredis_used="hiredis" in parser.lower(),
            embedded_directory=str(EmbeddedServer().directory) if self._settings.url is None else None,
            findings=tuple(judge(facts)),
            newer=await newer_commands(self._client),
        )

    async def _round_trip(self) -> timedelta:
        started = monotonic()
        await self._client.execute_command("PING")
        return timedelta(seconds=monotonic() - started)

    def __repr__(self) -> str:
        return f"<Inspector of {self._keys.prefix} at {redact(self._client.url)}>"
