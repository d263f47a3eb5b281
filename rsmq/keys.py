"""Every Redis key that rsmq uses, spelled here and nowhere else (the catalogue for people is `docs/keys.md`).

The braces are hash tags: all keys of one partition live in one cluster slot, so that one script can move a message
between them atomically.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from rsmq.errors import ConfigError

NAME: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
RESERVED_GROUPS: Final = ("delayed", "dedup", "marks")
"""A group named so would share keys with its partition: group `dedup` has its lease where message id `lease` goes."""


def check_name(kind: str, name: str) -> str:
    """Return `name`, or raise ConfigError when it could break a key."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ConfigError(
            f"{kind} name {name!r} is not allowed: use 1 to 128 of A-Z a-z 0-9 . _ - and do not start with a dot"
        )
    if kind == "group" and name in RESERVED_GROUPS:
        raise ConfigError(f"group name {name!r} is reserved, as are {', '.join(RESERVED_GROUPS)}: choose another")
    return name


@dataclass(frozen=True, slots=True)
class Keys:
    """The key catalogue under one prefix."""

    prefix: str = "rsmq"

    @property
    def topics(self) -> str:
        """Set: topic names."""
        return f"{self.prefix}:topics"

    def topic(self, topic: str) -> str:
        """Hash: partitions, limits, retention, created_ms."""
        return f"{self.prefix}:topic:{{{topic}}}"

    def stream(self, topic: str, partition: int) -> str:
        """Stream: one partition."""
        return f"{self.prefix}:{{{topic}.{partition}}}"

    def delayed(self, topic: str, partition: int) -> str:
        """ZSET: due_ms -> packed entry."""
        return f"{self.stream(topic, partition)}:delayed"

    def dedup(self, topic: str, partition: int, message_id: str) -> str:
        """String with TTL: the stream id under which a message id was stored."""
        return f"{self.stream(topic, partition)}:dedup:{message_id}"

    def marks(self, topic: str, partition: int) -> str:
        """ZSET: entries ever added -> stream id, so that retention can count without reading bodies."""
        return f"{self.stream(topic, partition)}:marks"

    def lease(self, topic: str, partition: int, group: str) -> str:
        """Hash: owner, epoch, until_ms, reader."""
        return f"{self.stream(topic, partition)}:{group}:lease"

    def retry(self, topic: str, partition: int, group: str) -> str:
        """ZSET: due_ms -> `id|attempt`."""
        return f"{self.stream(topic, partition)}:{group}:retry"

    def dlq(self, topic: str, partition: int, group: str) -> str:
        """Stream: dead letters."""
        return f"{self.stream(topic, partition)}:{group}:dlq"

    def group(self, topic: str, group: str) -> str:
        """Hash: distribution, paused, created_ms."""
        return f"{self.prefix}:{{{topic}}}:{group}"

    def members(self, topic: str, group: str) -> str:
        """Set: member ids."""
        return f"{self.prefix}:{{{topic}}}:{group}:alive:nodes:set"

    def alive(self, topic: str, group: str, member: str) -> str:
        """String with TTL: a member's heartbeat, its info as JSON."""
        return f"{self.prefix}:{{{topic}}}:{group}:alive:nodes:{member}"

    def presence(self, member: str) -> str:
        """Channel: only this member listens, so nobody listening means that its process is gone."""
        return f"{self.prefix}:presence:{member}"

    def changes(self, topic: str, group: str) -> str:
        """Channel: joins, leaves, releases, pauses and resets of a group. Messages carry no data."""
        return f"{self.prefix}:{{{topic}}}:{group}:changes"

    def scratch(self, name: str) -> str:
        """A key of the preflight's trial, gone when the trial ends. `%` is in no name, so it can meet no other key."""
        return f"{self.prefix}:{{%preflight}}:{name}"
