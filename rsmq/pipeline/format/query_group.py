"""A query that names itself: a group on the server, which keeps what the query has not read.

Its position in each partition is that of the last batch that Spark has committed. It has no deliveries of its own:
Spark's checkpoint says what is read, and the group follows. Its member is the query that runs; it is gone when the
query ends, and 15 minutes after its process has died. It reads the layout of a topic at each trigger, so a band that
is added need not wait for it: the group is made there before anything is stored.
"""

from __future__ import annotations

import os
import platform
import uuid
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

from pydantic_core import to_json

from rsmq.errors import BrokerError, ConfigError, GroupMissing, RsmqError
from rsmq.model.clock import now_ms
from rsmq.model.layout import EVERY_VERSION, WITH_BANDS, plain_distribution
from rsmq.model.record import text
from rsmq.pipeline.format.offsets import Offsets, Position, Stream
from rsmq.pipeline.format.task_connection import TaskConnection
from rsmq.redis.streams import QUERY, as_dict

ALIVE_MS: Final = 15 * 60_000
"""For how long a query counts as running after its last trigger."""


class QueryGroup:
    """One query as a group of each of its topics. `name`: of the group."""

    def __init__(self, connection: TaskConnection, name: str) -> None:
        self._connection = connection
        self._name = name
        self._member = f"spark-{platform.node()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._at: dict[Stream, str] = {}
        self._topics: set[str] = set()

    def join(self, starts: Mapping[Stream, Position]) -> None:
        """Exist in each of these partitions, from there on, and say that the query runs. Raises ConfigError if the
        group belongs to workers or to another program."""
        topics = {topic for topic, _ in starts}
        for topic in topics - self._topics:
            self._check(topic)
        for stream, position in starts.items():
            if stream not in self._at:
                self._create(stream, position)
        for topic in topics:
            self._say(topic)

    def move(self, upto: Offsets) -> None:
        """Everything up to these offsets is read."""
        for stream, position in upto.positions.items():
            if self._at.get(stream, position.id) != position.id:  # not of a topic that was deleted
                self._at[stream] = position.id
                self._set(stream, position)

    def leave(self) -> None:
        """The query has ended. The group stays. A server that is away forgets the member by itself."""
        keys = self._connection.keys
        with suppress(RsmqError):
            for topic in self._topics:
                self._connection.ask("DEL", keys.alive(topic, self._name, self._member))
                self._connection.ask("SREM", keys.members(topic, self._name), self._member)

    def _check(self, topic: str) -> None:
        """Raise ConfigError if the group is not that of a query."""
        found = self._connection.ask("HGET", self._connection.keys.group(topic, self._name), "distribution")
        distribution = QUERY if found is None else plain_distribution(text(found))
        if distribution not in ("", QUERY):
            raise self._taken(topic, f"workers (distribution {distribution!r})")

    def _taken(self, topic: str, owner: str) -> ConfigError:
        return ConfigError(
            f"group {self._name!r} of topic {topic!r} belongs to {owner}, whose messages the query would skip: give "
            f"the query another name"
        )

    def _say(self, topic: str) -> None:
        """Say that the group is that of a query, which runs."""
        keys = self._connection.keys
        if topic not in self._topics:
            self._connection.ask("HSETNX", keys.group(topic, self._name), "created_ms", now_ms())
            has_layout = self._connection.ask("HGET", keys.topic(topic), "layout") is not None
            stored = QUERY + WITH_BANDS if has_layout else QUERY
            about = keys.group(topic, self._name)
            is_first = self._connection.ask("HSETNX", about, "distribution", stored)
            if not is_first and self._connection.ask("HGET", about, "distribution") == WITH_BANDS.encode():
                self._connection.ask("HSET", about, "distribution", stored)  # it was reset
            self._topics.add(topic)
        about = to_json({"handler": "a query of Spark", "concurrency": 1, "layout": EVERY_VERSION}).decode()
        self._connection.ask("SET", keys.alive(topic, self._name, self._member), about, "PX", ALIVE_MS)
        self._connection.ask("SADD", keys.members(topic, self._name), self._member)

    def _create(self, stream: Stream, after: Position) -> None:
        """Create the group in a partition. It may be there, from an earlier run, and is then where that one ended."""
        try:
            self._ask_group("CREATE", stream, after.id, "MKSTREAM", "ENTRIESREAD", after.added)
        except BrokerError as error:
            if "BUSYGROUP" not in str(error):
                raise
            rows = self._connection.ask("XINFO", "GROUPS", self._connection.keys.stream(*stream))
            known = {row["name"]: row["consumers"] for row in map(as_dict, rows)}
            if known.get(self._name.encode()):
                raise self._taken(stream[0], "other consumers") from None
        self._at[stream] = ""

    def _set(self, stream: Stream, upto: Position) -> None:
        """Move the group in a partition. It is made again if it was deleted, but not a stream that was."""
        try:
            self._ask_group("SETID", stream, upto.id, "ENTRIESREAD", upto.added)
        except GroupMissing:
            self._topics.discard(stream[0])
            self._create(stream, upto)
            self._at[stream] = upto.id
            self._say(stream[0])
        except BrokerError as error:
            if "requires the key to exist" not in str(error):
                raise
            del self._at[stream]

    def _ask_group(self, verb: str, stream: Stream, at: str, *rest: Any) -> None:
        key = self._connection.keys.stream(*stream)
        self._connection.ask("XGROUP", verb, key, self._name, at, *rest)
