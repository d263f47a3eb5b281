"""Puts the bodies of large messages into their store before the entries that name them, in the order of the calls."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from rsmq.errors import LostBody
from rsmq.model.body import Body, BodyFolder, Offloading
from rsmq.model.clock import monotonic
from rsmq.model.keys import Keys
from rsmq.redis.client.connector import Client
from rsmq.redis.identity import deployment_id

KNOWN_FOR: Final = 10.0
"""Seconds for which the id of the server counts: after FLUSHALL it may have another one."""

Turn = tuple[str, str]
"""A topic and an ordering key."""


class BodyWriter:
    """The store of a producer.

    A message that is large takes longer to publish than one that is not. So that messages with one key are stored in
    the order of the calls, each waits for those of its key that have yet to put their bodies.
    """

    def __init__(self, bodies: Offloading, client: Client, keys: Keys, limit: int) -> None:
        """`limit`: what is larger goes to the store in any case."""
        self._bodies = bodies
        self.above = min(bodies.above, limit)
        self._client = client
        self._keys = keys
        self._deployment = ""
        self._known_until = float("-inf")
        self._learning: asyncio.Task[None] | None = None
        self._turns: dict[Turn, asyncio.Future[None]] = {}

    async def folder(self, topic: str) -> BodyFolder:
        """Where large payloads of a topic go. The folder of a server has the name of its deployment: no other one
        deletes what is in there. Raises BrokerUnavailable. Asks the server once: later calls must not overtake."""
        if not self._deployment:
            if self._learning is None:  # all of them wait for one answer, and go on in the order of their calls
                self._learning = asyncio.ensure_future(self._learn())
            try:
                await asyncio.shield(self._learning)
            finally:
                if self._learning is not None and self._learning.done():
                    self._learning = None
        return BodyFolder(topic, self._deployment, self.above, self._bodies.largest)

    async def _learn(self) -> None:
        self._deployment = await deployment_id(self._client, self._keys, self._deployment)
        self._known_until = monotonic() + KNOWN_FOR

    async def put(self, bodies: Sequence[Body]) -> None:
        """Store bodies under their names. Raises StoreUnavailable: then some of them may be there, for the sweep."""
        if bodies and monotonic() > self._known_until:
            await self._learn()  # what has another id by now is kept, and counts for later ones
        for body in bodies:
            await self._put(body)

    async def put_in_turn(self, topic: str, key: str | None, bodies: Sequence[Body]) -> None:
        """`put`, and wait for earlier calls of the key. The caller goes on without another await, so the next one of
        the key comes after it."""
        if key is None:
            await self.put(bodies)
            return
        turn = topic, key
        before = self._turns.get(turn)
        if before is None and not bodies:
            return
        mine = self._turns[turn] = asyncio.get_running_loop().create_future()
        try:
            await self.put(bodies)
            if before is not None and not before.done():
                await asyncio.wait([before])
        finally:
            if before is None or before.done():
                self._end(turn, mine)
            else:  # this call has failed: the next one waits for what this one has waited for
                before.add_done_callback(lambda _: self._end(turn, mine))

    def _end(self, turn: Turn, mine: asyncio.Future[None]) -> None:
        if not mine.done():
            mine.set_result(None)
        if self._turns.get(turn) is mine:
            del self._turns[turn]

    async def keep(self, bodies: Sequence[Body]) -> None:
        """After the entries are stored: what was put too long before is looked for, and put again if it was swept."""
        for body in bodies:
            if not body.is_fresh:
                try:
                    await self._bodies.fetch(body.name)
                except LostBody:
                    await self._put(body)

    async def renewed(self, body: Body) -> Body | None:
        """The body under a new name, if its put is too old for an entry that has yet to be stored."""
        if body.is_fresh:
            return None
        other = body.again()
        await self._put(other)
        return other

    async def _put(self, body: Body) -> None:
        began = monotonic()
        await self._bodies.put(body.name, body.data)
        body.note_put(began)

    def __repr__(self) -> str:
        return f"<BodyWriter {self._bodies!r} turns={len(self._turns)}>"
