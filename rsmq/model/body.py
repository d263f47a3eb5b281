"""Bodies that lie outside of the server, in a store: their names, and what an entry says of one. No I/O.

The body is put before its entry is stored, under a name of its own for each put: by content alone, a sweep could delete
what a repetition has just put again. The entry has the digest of the body as `data` and the name as `ref`.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Callable, Iterator
from copy import copy
from datetime import timedelta
from typing import Final, Protocol, TypeVar, runtime_checkable

from rsmq.errors import Malformed, WrongBody
from rsmq.model.clock import monotonic

T = TypeVar("T")

CLOCK: Final = "clock"
"""An object that a sweep puts: when the store says that was, it is now by the store's clock."""
REF: Final = "ref"
"""The last word of `enc` of a message whose body is in the store, and the field with its name."""
NAME: Final = re.compile(
    r"([A-Za-z0-9_-]{1,64})/([A-Za-z0-9_-][A-Za-z0-9._-]{0,127})/([0-9a-f]{64})\.[0-9a-f]{32}", re.ASCII
)
UNFINISHED: Final = re.compile(r".+\.[0-9a-f]{16}\.part", re.ASCII | re.DOTALL)
"""What a process that is killed in the middle of a put leaves in a folder: no entry can name it."""
FRESH_SECONDS: Final = 3600.0
"""A put that is older is done again, under a new name, before its entry is stored: a stopped process wakes up."""


@runtime_checkable
class BodyStore(Protocol):
    """Where bodies lie. Each method may block, and is called from several threads at once.

    A name is text such as `3f2a/orders/<64 hex digits>.<32 hex digits>`. Errors of any class mean that the store is
    away, but for FileNotFoundError.
    """

    def put(self, name: str, data: bytes) -> None:
        """Store a body. When this returns, `get` finds it, also after a power failure as far as the store has one."""

    def get(self, name: str) -> bytes:
        """A body. Raises FileNotFoundError if there is none of that name."""

    def delete(self, name: str) -> None:
        """Delete a body; nothing happens if there is none."""

    def list(self, folder: str) -> Iterator[tuple[str, float, int]]:
        """The names that begin with `folder` and a slash, each with the seconds since 1970 of its last put, by the
        clock of the store, and its size in bytes. None for a folder that is not there."""


@runtime_checkable
class Offloading(Protocol):
    """The store of a broker for large payloads: `Offload` of `rsmq.codecs`."""

    above: int
    """A payload whose stored form has more bytes goes to the store."""
    largest: int
    """A payload with more bytes, before it is encoded, is refused."""
    keep: timedelta
    """How long a body is kept in any case, from its put."""

    async def put(self, name: str, data: bytes) -> None:
        """Store a body. Raises StoreUnavailable."""

    async def fetch(self, name: str) -> bytes:
        """A body. Raises LostBody, and BodyUnavailable while the store is away."""

    def read(self, name: str) -> bytes:
        """The same, for code that may block."""

    async def delete(self, name: str) -> None:
        """Delete a body, if it is there. Raises StoreUnavailable."""

    async def survey(self, folder: str, take: Callable[[Iterator[tuple[str, float, int]]], T]) -> T:
        """What `take` makes, in a thread, of all names in a folder with their times and sizes. Raises
        StoreUnavailable."""


class Body:
    """One body on its way to the store: its bytes, its name, and when it was put."""

    __slots__ = ("data", "digest", "name", "put_at", "topic")

    def __init__(self, topic: str, message_id: bytes, data: bytes) -> None:
        self.topic = topic
        self.data = data
        self.digest = digest_of(message_id, data)
        self.name = ""
        self.put_at = float("-inf")

    def call(self, deployment: str) -> None:
        """Give it a name of its own, for one put."""
        self.name = f"{deployment}/{self.topic}/{self.digest.hex()}.{secrets.token_hex(16)}"

    def fields(self, enc: str) -> tuple[str, ...]:
        """What its entry says of it. `enc`: how the body itself is encoded; may be empty."""
        return "enc", f"{enc};{REF}" if enc else REF, REF, self.name

    def again(self) -> Body:
        """The same for another put, under a new name."""
        other = copy(self)
        other.put_at = float("-inf")
        other.call(self.name.partition("/")[0])
        return other

    def holding(self, data: bytes) -> Body:
        """The same body under the same name with its bytes, or without them where they are not needed now."""
        other = copy(self)
        other.data = data
        return other

    def note_put(self, began: float) -> None:
        """It is in the store under its name; its put has begun at a moment of `monotonic`."""
        self.put_at = began

    @property
    def is_fresh(self) -> bool:
        """Whether its put is so recent that an entry may name it."""
        return monotonic() - self.put_at < FRESH_SECONDS


class BodyFolder:
    """Names and keeps the bodies of messages that are being encoded, all of one topic.

    `above`: a payload whose stored form has more bytes goes to the store. `largest`: more than this, before it is
    encoded, is refused.
    """

    __slots__ = ("above", "bodies", "deployment", "largest", "topic")

    def __init__(self, topic: str, deployment: str, above: int, largest: int) -> None:
        self.topic = topic
        self.deployment = deployment
        self.above = above
        self.largest = largest
        self.bodies: list[Body] = []

    def take(self, message_id: str, data: bytes) -> Body:
        """The body for a message; its put comes before its entry."""
        body = Body(self.topic, message_id.encode(), data)
        body.call(self.deployment)
        self.bodies.append(body)
        return body

    def take_all(self) -> list[Body]:
        """The bodies that were named since the last call."""
        found, self.bodies = self.bodies, []
        return found


def digest_of(message_id: bytes, data: bytes) -> bytes:
    """The SHA-256 of the id, after its length as 4 bytes, and the body: the `data` of its entry."""
    return hashlib.sha256(len(message_id).to_bytes(4, "big") + message_id + data).digest()


def check_ref(ref: bytes | None, topic: str) -> str:
    """The name of a body of this topic. Raises Malformed: a reader gets no other name from the store."""
    name = "" if ref is None else ref.decode("latin-1")
    found = NAME.fullmatch(name)
    if found is None:
        raise Malformed("its field ref is no name of a body")
    if found[2] != topic:
        raise Malformed(f"its field ref names a body of another topic than {topic!r}")
    return name


def check_body(body: bytes, digest: bytes, message_id: bytes) -> None:
    """Raise WrongBody for a body that is not the one that the entry was stored with."""
    if digest_of(message_id, body) != digest:
        raise WrongBody("")


def is_outside(enc: bytes) -> bool:
    """Whether a field `enc` says that the body is in a store."""
    return enc == b"ref" or enc.endswith(b";ref")


def without_ref(enc: bytes) -> bytes:
    """The field `enc` of the body in the store; empty if that is the payload as it was published."""
    return enc[:-4] if enc != b"ref" else b""
