"""What `publish` returns: the message id, which also knows where the message is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol


class Home(Protocol):
    """What a message was published with: it knows the topic and the partition."""

    @property
    def topic_name(self) -> str: ...
    @property
    def partition(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Location:
    """A home as a value, for a ref that leaves its process."""

    topic_name: str
    partition: int


class MessageRef(str):
    """The id of a message, as text, with its `topic`, `partition` and `key`: `broker.look` and `broker.cancel` take it.

    It can be stored and compared like any text. Text alone has no topic: then pass `topic` (and `key`) again.
    """

    __slots__ = ("home", "key")

    home: Home
    key: str | None
    """The ordering key, or None."""

    @classmethod
    def of(cls, message_id: str, home: Home, key: str | None) -> MessageRef:
        """A ref. `Producer.publish` writes this out, because it runs for each message."""
        ref = cls(message_id)
        ref.home, ref.key = home, key
        return ref

    @property
    def topic(self) -> str:
        """The topic's name."""
        return self.home.topic_name

    @property
    def partition_number(self) -> int:
        """The partition's number, from 0. (`partition` is a method of every text.)"""
        return self.home.partition

    def __reduce__(self) -> tuple[Any, ...]:
        return MessageRef.of, (str(self), Location(self.topic, self.partition_number), self.key)
