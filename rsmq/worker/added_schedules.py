"""Publishes the schedules that no code has: `broker.schedules.upsert` has added them."""

from __future__ import annotations

import logging
from base64 import b64decode
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any, Final

import anyio
from pydantic_core import from_json

from rsmq.control.schedules import entry_of, numbers_of, stored_key
from rsmq.errors import BrokerError, BrokerUnavailable, CannotDecode, ConfigError, MessageError, StoreUnavailable
from rsmq.handler.failure import describe
from rsmq.handler.schedule import EncodedPayload, Schedule, build_schedule, read_rule, schedule_binding
from rsmq.model.encoding import NO_CODECS, Binding, Encoding
from rsmq.model.log_throttle import ThrottledLog
from rsmq.redis.leadership import RENEW, TTL, Leadership
from rsmq.redis.server_context import ServerContext
from rsmq.redis.streams import server_now_ms

log = logging.getLogger("rsmq.schedule")

LOOK_EVERY: Final = 5.0
"""Seconds between two looks for added schedules while there are none: a command for each worker."""
FAILED_FOR: Final = 60.0
"""Seconds until one that has failed is looked at again."""
LEAVE_FOR: Final = 2 * TTL
"""Seconds in which another worker takes over, if there is one."""
MOST: Final = 100
"""Schedules of one turn."""
UNREADABLE: Final = (ValueError, TypeError, KeyError, AttributeError, OverflowError)
"""What it raises to read a record that another client has written."""
AUDIT_EVERY: Final = 300.0
"""Seconds between two comparisons of the index with the schedules, which are in other slots of a cluster."""

Check = Callable[[Schedule], Awaitable[float]]
"""Publishes what is due, and returns the seconds until the next look."""


class AddedSchedules:
    """One worker publishes them all. The index has them by the time of their next tick, so that those that are not due
    cost nothing."""

    def __init__(self, context: ServerContext, check: Check, encoding: Encoding = NO_CODECS) -> None:
        """`encoding` undoes payloads that are compressed or encrypted."""
        self._encoding = encoding
        self._context = context
        self._client = context.client
        self._index = context.keys.schedules
        self._check = check
        self._said = set[bytes]()
        self._throttled = ThrottledLog(log)
        self._left = dict[bytes, float]()
        """When a schedule was left to another worker, because it needs a key that this one does not have."""
        self._is_leaving = False
        self._audited = 0.0

    async def run(self) -> None:
        """Until cancelled."""
        leadership = Leadership(self._context, "schedules")
        try:
            while True:
                try:
                    seconds = await self._turn(leadership)
                except BrokerError as error:
                    log.warning("added schedules wait: %s", error)
                    seconds = LOOK_EVERY
                await anyio.sleep(seconds)
        finally:
            with anyio.CancelScope(shield=True), anyio.move_on_after(2):
                await leadership.release()

    async def _turn(self, leadership: Leadership) -> float:
        if not leadership.epoch and not await self._client.execute_command("ZCARD", self._index):
            return LOOK_EVERY
        if seconds := await leadership.bid():
            return seconds
        if anyio.current_time() - self._audited > AUDIT_EVERY:
            await self._audit()
            self._audited = anyio.current_time()
        now_ms = await server_now_ms(self._client)
        due = await self._client.execute_command("ZRANGEBYSCORE", self._index, "-inf", now_ms, "LIMIT", 0, MOST)
        for member in due:
            pause = await self._serve(member)
            if pause is None:
                await self._client.execute_command("ZREM", self._index, member)
            else:
                at = now_ms + max(1, round(pause * 1000))
                await self._client.execute_command("ZADD", self._index, "XX", at, member)
        if self._is_leaving:
            self._is_leaving = False
            await leadership.release()
            return LEAVE_FOR
        return 0.0 if len(due) == MOST else RENEW

    async def _serve(self, member: bytes) -> float | None:
        """Seconds until the next look; None for one that is not there any more.

        A schedule that cannot be read or published costs itself. One that needs a key of another worker is due at once
        for the next leader, at most once a minute. While the store of its body is away it alone waits. Raises
        BrokerUnavailable: the others wait as well.
        """
        topic, name, key = [*member.decode(errors="replace").split("|", 2), "", ""][:3]
        try:
            schedule = await self._schedule(topic, name, key)
            pause = None if schedule is None else await self._check(schedule)
        except StoreUnavailable as error:
            self._throttled.warn("schedules that were added wait for the store of their bodies", error)
            return LOOK_EVERY
        except BrokerUnavailable:
            raise
        except (BrokerError, ConfigError, MessageError, *UNREADABLE) as error:
            if member not in self._said:
                self._said.add(member)
                log.error("schedule %s of %s, which was added, cannot be published: %s", name, topic, describe(error))
            return self._leave(member) if isinstance(error, CannotDecode) else FAILED_FOR
        self._said.discard(member)
        self._left.pop(member, None)
        return pause

    def _leave(self, member: bytes) -> float:
        """Let another worker lead, which may have the key. All that are due are served before."""
        now = anyio.current_time()
        if now - self._left.get(member, float("-inf")) < FAILED_FOR:
            return FAILED_FOR
        self._left[member] = now
        self._is_leaving = True
        return 0.0

    async def _schedule(self, topic: str, name: str, key: str) -> Schedule | None:
        """The schedule as it was added. The entry of one without a key is that of one whose key is empty."""
        found = await self._context.topics.find(topic)
        for route in (key,) if key else (None, ""):
            for number in [] if found is None else numbers_of(found, name, route):
                fields = (f"added|{name}", f"rule|{name}")
                every = self._context.keys.every(topic, number)
                definition, rule = await self._client.execute_command("HMGET", every, *fields)
                if definition and rule and is_under(route, definition):
                    return read_schedule(topic, name, route, definition, rule, self._encoding)
        return None

    async def _audit(self) -> None:
        """Add to the index what it has lost: in a failover, or because a process died between two writes."""
        topics = self._context.topics
        for topic in await topics.find_all(await topics.names()):
            for number in topic.numbers:
                fields = await self._client.execute_command("HGETALL", self._context.keys.every(topic.name, number))
                flat = [part for pair in fields.items() for part in pair] if isinstance(fields, dict) else fields
                for field, value in zip(flat[::2], flat[1::2], strict=True):
                    kind, _, name = field.decode(errors="replace").partition("|")
                    if kind == "added":
                        await self._index_again(topic.name, name, value)

    async def _index_again(self, topic: str, name: str, definition: bytes) -> None:
        await self._client.execute_command("ZADD", self._index, "NX", 0, entry_of(topic, name, stored_key(definition)))

    def __repr__(self) -> str:
        return "<AddedSchedules>"


def is_under(key: str | None, definition: bytes) -> bool:
    """Whether a record has this key. Also if it cannot be read: then it is named."""
    try:
        stored = from_json(definition).get("key")
    except (ValueError, AttributeError):
        return True
    return stored == key or not isinstance(stored, str | None)


def read_schedule(
    topic: str, name: str, key: str | None, definition: bytes, rule: bytes, encoding: Encoding = NO_CODECS
) -> Schedule:
    """A schedule from its records. Raises ConfigError, CannotDecode where a key or a codec is missing, and Malformed or
    one of UNREADABLE for what rsmq has not written."""
    given: dict[str, Any] = from_json(definition)
    when = read_rule(rule.decode())
    span = given.get("expires_ms")
    data, kind = b64decode(given["payload"], validate=True), str(given["type"])
    if enc := given.get("enc"):
        identity, stored = schedule_binding(topic, name).encode(), given.get("key")
        route = None if stored is None else str(stored).encode()
        data = encoding.undo(data, Binding(identity, route, kind.encode(), str(enc).encode()))
    payload = EncodedPayload(data, kind, is_plain=not enc)  # of another broker, perhaps, whose readers have no key
    schedule = build_schedule(
        lambda: payload,
        when.cron or timedelta(milliseconds=when.every_ms or 0),
        topic,
        name=name,
        key=key,
        band=given.get("band"),
        headers=given.get("headers"),
        missed=given.get("missed", "latest"),
        timezone=when.timezone or "UTC",
        expires=None if span is None else timedelta(milliseconds=span),
        on_expiry=given.get("on_expiry"),
    )
    return replace(schedule, is_added=True)
