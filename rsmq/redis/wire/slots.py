"""Slots of a Redis Cluster: the key of a command, its slot, and the map from slots to masters. No I/O."""

from __future__ import annotations

from binascii import crc_hqx
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

Key = str | bytes
Address = tuple[str, int]

SLOTS: Final = 16384
FIRST_KEY: Final = {"EVAL": 3, "EVALSHA": 3, "EVAL_RO": 3, "EVALSHA_RO": 3, "XINFO": 2, "XGROUP": 2, "OBJECT": 2}
"""Position of the first key of a command, if it is not 1."""
KEYLESS: Final = frozenset([
    "PING", "ECHO", "TIME", "INFO", "CONFIG", "CLIENT", "SCRIPT", "CLUSTER", "COMMAND", "ACL", "WAIT", "WAITAOF",
    "SCAN", "DBSIZE", "PUBLISH", "ROLE",
])  # fmt: skip


def slot_of(key: Key) -> int:
    """The slot of a key: of the text between its first braces, unless that is empty."""
    raw = key.encode() if isinstance(key, str) else key
    start = raw.find(b"{")
    if start >= 0:
        end = raw.find(b"}", start + 1)
        if end > start + 1:
            raw = raw[start + 1 : end]
    return crc_hqx(raw, 0) % SLOTS


def key_of(command: Sequence[Any]) -> Key | None:
    """The first key of a command, or None for one that any node may answer."""
    words = [*word_of(command[0]).split(), *command[1:]]
    name = word_of(words[0])
    if name in ("XREAD", "XREADGROUP"):
        position = 1 + next(at for at, word in enumerate(words) if word in ("STREAMS", b"STREAMS"))
    elif name == "PUBSUB":
        position = 2 if word_of(words[1]).startswith("SHARD") else len(words)
    elif name in KEYLESS or (name in ("EVAL", "EVALSHA") and int(words[2]) == 0):
        return None
    else:
        position = FIRST_KEY.get(name, 1)
    key = words[position] if position < len(words) else None
    return key if isinstance(key, str | bytes) else None


def is_script(command: object) -> bool:
    """Whether a command, as its words or in the wire format, runs a script."""
    if isinstance(command, bytes):
        return b"EVAL" in command[:24]
    return isinstance(command, Sequence) and word_of(command[0]) in ("EVAL", "EVALSHA")


def word_of(part: Any) -> str:
    """A command's name as it is compared."""
    return (part.decode() if isinstance(part, bytes) else str(part)).upper()


class SlotMap:
    """Slot -> address of its master. When `is_stale`, it is read again before the next use.

    A slot without a known master belongs to a seed, which answers with MOVED. `watchers` are called when slots have
    another master than before.
    """

    def __init__(self, seeds: Sequence[Address]) -> None:
        self.seeds = tuple(seeds)
        self.is_stale = True
        self.watchers: list[Callable[[], None]] = []
        self._owners: list[Address | None] = [None] * SLOTS
        self._silent: set[Address] = set()

    def owner(self, key: Key) -> Address:
        """The master of a key."""
        return self._owners[slot_of(key)] or self.seeds[0]

    def any_master(self) -> Address:
        """A master for a command without a key, if possible one that answers."""
        return min(self.masters, key=self.is_silent)

    @property
    def masters(self) -> list[Address]:
        """Every node with slots, sorted; the seeds before the map was read."""
        return sorted({owner for owner in self._owners if owner is not None}) or list(self.seeds)

    def is_silent(self, address: Address) -> bool:
        """Whether its last command got no answer."""
        return address in self._silent

    def by_reachability(self) -> list[Address]:
        """The nodes to ask for the map, silent ones last."""
        return sorted(dict.fromkeys([*self.masters, *self.seeds]), key=self.is_silent)

    def learn(self, slot: int, address: Address) -> None:
        """Take over one slot from a redirect, which is newer than the map."""
        if self._owners[slot] != address:
            self._owners[slot] = address
            self._notify()

    def mark_silent(self, address: Address) -> None:
        """A node did not answer: read the map again."""
        self._silent.add(address)
        self.is_stale = True

    def replace(self, ranges: Iterable[Sequence[Any]], asked: Address) -> None:
        """Take over the reply to CLUSTER SLOTS of the node `asked`, which is not silent any more."""
        before, self._owners = self._owners, [None] * SLOTS
        for first, last, (host, port, *_), *_ in ranges:
            # a node that does not know its own name leaves it out: use the address that we asked
            address = ((host or b"").decode() or asked[0], int(port))
            self._owners[first : last + 1] = [address] * (last + 1 - first)
        self._silent.discard(asked)
        self.is_stale = False
        if self._owners != before:
            self._notify()

    def _notify(self) -> None:
        for each in self.watchers:
            each()
