"""The result of `publish`: the message id, which also knows where the message is."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any


@dataclass(frozen=True, slots=True)
class Location:
    """Topic and partition of a message. All refs of a partition share one: a program may keep very many refs."""

    topic_name: str
    partition: int


location = lru_cache(maxsize=4096)(Location)
"""The location that is shared."""


class MessageRef(str):
    """The id of a message, as text, with its `topic`, `partition` and `key`: `broker.look` and `broker.cancel` take it.

    It can be stored and compared like any text. Text alone has no topic: then pass `topic` (and `key`) again. With a
    `message_id` of your own it also says whether there was a message of that id: `is_new` and `is_same`.
    """

    __slots__ = ("home", "is_new", "is_same", "key")

    home: Location
    key: str | None
    """The ordering key, or None."""
    is_new: bool | None
    """Whether this call has stored it. False: a message of its id was there. None: it is stored, but a reply was lost,
    so this call or an earlier one may have done it; or a message with another key may have the id where that cannot be
    seen (on a cluster; with `unique` and an id of your own); or it is decided later (outputs: when their message is
    settled)."""
    is_same: bool | None
    """Whether the stored message has this payload and key. False: the id was used for something else, which counts, and
    this is not stored. None: not known, such as after the other one has been trimmed."""

    def __getattr__(self, name: str) -> bool:
        """Without an id of the publisher's it is new. Not stored in each ref: that would cost each message."""
        if name in ("is_new", "is_same"):
            return True
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @classmethod
    def of(cls, message_id: str, home: Location, key: str | None) -> MessageRef:
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
        told = {"is_new": self.is_new, "is_same": self.is_same}
        return MessageRef.of, (str(self), self.home, self.key), (None, told)
