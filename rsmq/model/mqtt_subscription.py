"""A subscription of an MQTT client as the server keeps it, and the shard of the client that it belongs to."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Final, NamedTuple

from pydantic_core import from_json, to_json

SHARDS: Final = 8
"""Fixed by decision 61: with another number, clients would be looked for in other shards."""


class Subscription(NamedTuple):
    """A topic filter and its options. `identifier` 0: none."""

    filter: str
    qos: int
    no_local: bool = False
    retain_as_published: bool = False
    retain_handling: int = 0
    identifier: int = 0

    @property
    def options(self) -> str:
        """Its options besides its QoS, for people."""
        words = {
            "no local": self.no_local, "retain as published": self.retain_as_published,
            f"retain handling {self.retain_handling}": self.retain_handling, f"id {self.identifier}": self.identifier,
        }  # fmt: skip
        return ", ".join(word for word, is_set in words.items() if is_set)


def shard_of(client: str) -> int:
    """The shard of a client: on a cluster the shards lie on different nodes."""
    return zlib.crc32(client.encode()) % SHARDS


def pack(subscriptions: Iterable[Subscription], *, is_online: bool = True) -> bytes:
    """A list of subscriptions for the server; nothing for an empty one. That of a client which is away ends with 0."""
    found: list[Any] = [tuple(each) for each in subscriptions]
    return to_json(found if is_online else [*found, 0]) if found else b""


def unpack(raw: bytes) -> tuple[list[Subscription], bool]:
    """The inverse of `pack`: the list, and whether the client is connected. Raises ValueError for anything else."""
    found = from_json(raw) if raw else []
    if not isinstance(found, list):
        raise ValueError("the subscriptions are no list")
    try:
        subscriptions = [Subscription(*each) for each in found if each != 0]
    except TypeError as error:
        raise ValueError(f"a subscription has other fields: {error}") from None
    for each in subscriptions:
        numbers = (each.qos, each.retain_handling, each.identifier)
        if type(each.filter) is not str or not all(type(number) is int and number >= 0 for number in numbers):
            raise ValueError("a subscription has fields of another type")
    return subscriptions, 0 not in found


def unpack_subscribers(name: str, raw: bytes) -> list[tuple[str, Subscription, str]]:
    """The subscribers of a topic name in a shard: client, subscription, and the call whose older messages it does not
    meet ('' = none).

    `raw` is a client and its options in turn, each before a NUL. The options are digits: QoS, no local, retain as
    published, retain handling, identifier; and `!` and the call. What another client has written is left out.
    """
    found, parts = list[tuple[str, Subscription, str]](), raw.split(b"\0")
    for client, options in zip(parts[:-1:2], parts[1::2], strict=False):
        digits, _, token = options.partition(b"!")
        if not client or len(digits) < 4 or not digits.isdigit() or len(digits) > 13:
            continue
        flags, identifier = [int(digits[at : at + 1]) for at in range(4)], int(digits[4:] or 0)
        with suppress(ValueError):
            about = Subscription(name, flags[0], flags[1] == 1, flags[2] == 1, flags[3], identifier)
            found.append((client.decode(), about, token.decode("ascii")))
    return found
