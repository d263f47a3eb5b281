"""Commands for schedules while workers run: publish now, pause, another rule; schedules that no code has."""

from __future__ import annotations

from base64 import b64encode
from datetime import datetime
from typing import Any, Final, Unpack

from pydantic_core import from_json, to_json

from rsmq.errors import ConfigError
from rsmq.handler.schedule import TickOptions, build_schedule, rule_json, schedule_binding, trigger_of
from rsmq.model.clock import from_epoch_ms, to_ms
from rsmq.model.duration import Duration
from rsmq.model.encoding import NO_CODECS, Encoding
from rsmq.model.keys import Keys, check_name, plain_text
from rsmq.model.message import encode_payload
from rsmq.model.publish_options import check_size
from rsmq.model.record import whole
from rsmq.model.settings import Settings
from rsmq.redis.client.connector import Client
from rsmq.redis.streams import as_dict, ask_all, server_now_ms
from rsmq.redis.topics import Topic, Topics, lookup_topic

KINDS: Final = (
    "last", "rule", "served", "set", "paused", "run", "failures", "trace", "history", "owner", "until", "added"
)  # fmt: skip
"""The fields of a schedule in the hash of its partition, before its name."""


CARRIED: Final = tuple(kind for kind in KINDS if kind not in ("rule", "added", "owner", "until"))
"""What an added schedule keeps when its key changes, so that it is stored in another partition."""


def number_of(topic: Topic, name: str, key: str | None, band: str | None = None) -> int:
    """The partition whose hash has an added schedule. An empty key is a key."""
    return topic.layout.root_of(topic.open_block(band).partition_for(name if key is None else key))


def numbers_of(topic: Topic, name: str, key: str | None) -> list[int]:
    """The partitions whose hashes may have an added schedule: one in each band, `normal` first."""
    route = name if key is None else key
    return [block.partition_for(route) for block in topic.layout.blocks if block.parent is None]


def refuse_closed_band(topic: Topic, name: str, band: str) -> None:
    """Raises ConfigError for a band that the topic does not have, or that is not open: until then its messages go to
    `normal`, so the schedule would have its records there, and begin anew when the band opens."""
    if topic.open_block(band).band != band:
        raise ConfigError(
            f"schedule {name}: the band {band!r} of topic {topic.name!r} is not open yet, as some members do not know "
            f"it: add the schedule when it is (`rsmq topic show {topic.name}`)"
        )


def stored_key(definition: bytes) -> str | None:
    """The key of an added schedule; None without one, or if another client has spoiled its record."""
    try:
        key = from_json(definition).get("key")
    except (ValueError, AttributeError):
        return None
    return key if isinstance(key, str) else None


def entry_of(topic: str, name: str, key: str | None) -> str:
    """The entry of an added schedule in the index: what it takes to find its partition."""
    return f"{topic}|{name}|{key or ''}"


class Schedules:
    """The schedules of all topics, as operators change them. A worker follows within a third of a lease (2 s)."""

    def __init__(
        self,
        client: Client,
        keys: Keys,
        topics: Topics,
        encoding: Encoding = NO_CODECS,
        payload_limit: int = Settings.payload_limit,
    ) -> None:
        """`encoding` compresses and encrypts the payloads of schedules that are added."""
        self._limit = payload_limit
        self._client = client
        self._encoding = encoding
        self._keys = keys
        self._topics = topics

    async def run(self, topic: str, name: str) -> datetime:
        """Publish it once now, beside its ticks; returns the time of that run. Raises ConfigError for an unknown one.

        Its leader publishes it: the payload comes from the function in its code. A run that was asked for before and is
        not published yet is that run.
        """
        found = await self._topics.existing(topic)
        name = plain_text(name)
        key = await self._key_of(found, name)
        now_ms = await server_now_ms(self._client)
        await self._client.execute_command("HSETNX", key, f"run|{name}", now_ms)
        at = int(await self._client.execute_command("HGET", key, f"run|{name}") or now_ms)
        await self._wake(key, found, name)
        return from_epoch_ms(at)

    async def pause(self, topic: str, name: str) -> None:
        """Publish no tick until `resume`, also over restarts and deployments."""
        name = plain_text(name)
        key = await self._key_of(await self._topics.existing(topic), name)
        await self._client.execute_command("HSETNX", key, f"paused|{name}", await server_now_ms(self._client))

    async def resume(self, topic: str, name: str) -> None:
        """Go on with the next tick: none of those in between is published."""
        found = await self._topics.existing(topic)
        name = plain_text(name)
        key = await self._key_of(found, name)
        now_ms = await server_now_ms(self._client)
        replies = await self._client.pipelined([("HSET", key, f"last|{name}", now_ms), ("HDEL", key, f"paused|{name}")])
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply
        await self._wake(key, found, name)

    async def set(self, topic: str, name: str, schedule: Duration, *, timezone: str = "UTC") -> None:
        """Another rule in place of that of the code: an interval or a cron expression. It begins now.

        It stays over restarts and deployments, until `reset`. Both rules are shown.
        """
        found = await self._topics.existing(topic)
        name = plain_text(name)
        key = await self._key_of(found, name)
        rule = rule_json(trigger_of(name, schedule, timezone))
        await self._client.execute_command("HSET", key, f"set|{name}", rule)
        await self._wake(key, found, name)

    async def reset(self, topic: str, name: str) -> None:
        """Back to the rule of the code."""
        found = await self._topics.existing(topic)
        name = plain_text(name)
        key = await self._key_of(found, name)
        await self._client.execute_command("HDEL", key, f"set|{name}")
        await self._wake(key, found, name)

    async def upsert(
        self, name: str, schedule: Duration, topic: str, payload: Any, **options: Unpack[TickOptions]
    ) -> None:
        """Add a schedule that no code has, such as one for a customer, or change it: `payload` at each tick.

        Options and rules are those of `every`. Any worker under this prefix publishes it. With another rule it begins
        now. The payload is stored as the codecs of this broker encode it: a worker that has its key decodes it at each
        tick, and publishes as its own broker does. Raises ConfigError if the code of a worker has a schedule with this
        name, or the topic has no such band, and TooLarge.
        """
        wanted = build_schedule(lambda: payload, schedule, topic, name=name, **options)
        data, kind = encode_payload(payload)
        data, enc = self._encoding.encode(data, schedule_binding(wanted.topic, wanted.name), wanted.key, kind)
        if self._encoding.bodies is None:  # a store takes what is larger
            check_size(data, wanted.key, wanted.headers, self._limit)
        found = await lookup_topic(self._topics, topic)
        if wanted.band is not None:
            found = await self._topics.existing(topic)  # it may have got the band meanwhile
            refuse_closed_band(found, name, wanted.band)
        name = wanted.name
        key = self._keys.every(found.name, number_of(found, name, wanted.key, wanted.band))
        is_known, is_added = await self._client.execute_command("HMGET", key, f"rule|{name}", f"added|{name}")
        if is_known and not is_added:
            raise ConfigError(
                f"topic {topic!r} has a schedule {name!r} in the code of a worker: use another name, or "
                f"broker.schedules.set for another rule"
            )
        definition = {
            "key": wanted.key, "band": wanted.band, "headers": wanted.headers, "missed": wanted.missed, "type": kind,
            "enc": enc or None, "payload": b64encode(data).decode(), "on_expiry": wanted.on_expiry,
            "expires_ms": None if wanted.expires is None else to_ms(wanted.expires),
        }  # fmt: skip
        rule = rule_json(wanted.trigger)
        earlier = await self._earlier(found, key, name)
        for fields in earlier.values():
            for field in (f"{kind}|{name}" for kind in CARRIED):
                if field in fields:
                    await self._client.execute_command("HSETNX", key, field, fields[field])
        await self._client.execute_command(
            "HSET", key, f"rule|{name}", rule, f"added|{name}", to_json(definition, exclude_none=True)
        )
        entry = entry_of(found.name, name, wanted.key)
        await self._client.execute_command("ZADD", self._keys.schedules, 0, entry)
        definitions = [*([is_added] if is_added else []), *(fields[f"added|{name}"] for fields in earlier.values())]
        gone = {entry_of(found.name, name, stored_key(each)) for each in definitions} - {entry}
        if gone:
            await self._client.execute_command("ZREM", self._keys.schedules, *gone)
        for other in earlier:
            await self._client.execute_command("HDEL", other, *(f"{kind}|{name}" for kind in KINDS))

    async def remove(self, topic: str, name: str) -> None:
        """Delete a schedule that was added, or one whose code is gone: it has no leader.

        Raises ConfigError for one that a worker has in its code.
        """
        found = await self._topics.existing(topic)
        name = plain_text(name)
        key = await self._key_of(found, name)
        added, until = await self._client.execute_command("HMGET", key, f"added|{name}", f"until|{name}")
        if not added and (whole(until) or 0) > await server_now_ms(self._client):
            raise ConfigError(f"schedule {name!r} of {topic} is in the code of a worker: pause it, or change the code")
        entry = await self._entry(key, found, name)
        if entry is not None:
            await self._client.execute_command("ZREM", self._keys.schedules, entry)
        await self._client.execute_command("HDEL", key, *(f"{kind}|{name}" for kind in KINDS))

    # -- internal -------------------------------------------------------------------------------------------------

    async def _earlier(self, topic: Topic, key: str, name: str) -> dict[str, dict[str, Any]]:
        """The fields of an added schedule in hashes of other partitions: it had another key before."""
        others = [other for number in topic.numbers if (other := self._keys.every(topic.name, number)) != key]
        replies = await ask_all(self._client, [("HEXISTS", other, f"added|{name}") for other in others])
        there = [other for other, is_there in zip(others, replies, strict=True) if is_there]
        found = await ask_all(self._client, [("HGETALL", other) for other in there])
        return {other: as_dict(each) for other, each in zip(there, found, strict=True)}

    async def _key_of(self, topic: Topic, name: str) -> str:
        """The hash that has a schedule. Raises ConfigError."""
        keys = [self._keys.every(topic.name, number) for number in topic.numbers]
        replies = [as_dict(each) for each in await ask_all(self._client, [("HGETALL", key) for key in keys])]
        for key, fields in zip(keys, replies, strict=True):
            if f"rule|{name}" in fields:
                return key
        names = sorted({field.partition("|")[2] for fields in replies for field in fields if field.startswith("rule|")})
        some = f"its schedules are {', '.join(names[:5])}" if names else "it has no schedules"
        raise ConfigError(f"topic {topic.name!r} has no schedule {check_name('schedule', name)!r}: {some}")

    async def _entry(self, key: str, topic: Topic, name: str) -> str | None:
        """The entry of an added schedule in the index; None of one that is in the code."""
        definition = await self._client.execute_command("HGET", key, f"added|{name}")
        return None if not definition else entry_of(topic.name, name, stored_key(definition))

    async def _wake(self, key: str, topic: Topic, name: str) -> None:
        """An added schedule is looked at now."""
        entry = await self._entry(key, topic, name)
        if entry is not None:
            await self._client.execute_command("ZADD", self._keys.schedules, 0, entry)
