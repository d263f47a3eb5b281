"""Slots of a Redis Cluster: which key a command is about, and who serves its slot as far as we were told. No I/O."""

from __future__ import annotations

from binascii import crc_hqx
from collections.abc import Iterable, Sequence
from typing import Any, Final

Key = str | bytes
Address = tuple[str, int]

SLOTS: Final = 16384
FIRST_KEY: Final = {"EVAL": 3, "EVALSHA": 3, "EVAL_RO": 3, "EVALSHA_RO": 3, "XINFO": 2, "XGROUP": 2, "OBJECT": 2}
"""Where the first key of a command stands, if not right behind its name."""
KEYLESS: Final = frozenset([
    "PING", "ECHO", "TIME", "INFO", "CONFIG", "CLIENT", "SCRIPT", "CLUSTER", "COMMAND", "ACL", "WAIT", "WAITAOF",
    "SCAN", "DBSIZE", "PUBLISH", "ROLE",
])  # fmt: skip


def slot_of(key: Key) -> int:
    """The slot of a key: of what stands between its first braces, if there is something."""
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
        place = 1 + next(at for at, word in enumerate(words) if word in ("STREAMS", b"STREAMS"))
    elif name == "PUBSUB":
        place = 2 if word_of(words[1]).startswith("SHARD") else len(words)
    elif name in KEYLESS or (name in ("EVAL", "EVALSHA") and int(words[2]) == 0):
        return None
    else:
        place = FIRST_KEY.get(name, 1)
    key = words[place] if place < len(words) else None
    return key if isinstance(key, str | bytes) else None


def word_of(part: Any) -> str:
    """A command's name as it is compared."""
    return (part.decode() if isinstance(part, bytes) else str(part)).upper()


class SlotMap:
    """Slot -> address of its master. `is_stale` asks for another look before the next use.

    Never empty-handed: a slot that nobody is known for is asked of a seed, which answers with MOVED.
    """

    def __init__(self, seeds: Sequence[Address]) -> None:
        self.seeds = tuple(seeds)
        self.is_stale = True
        self._owners: list[Address | None] = [None] * SLOTS
        self._silent: set[Address] = set()

    def owner(self, key: Key) -> Address:
        """Who serves a key."""
        return self._owners[slot_of(key)] or self.seeds[0]

    def anybody(self) -> Address:
        """Whom to ask what everybody knows."""
        return min(self.masters, key=self.is_silent)

    @property
    def masters(self) -> list[Address]:
        """Everybody who serves a slot, sorted; the seeds while nothing is known."""
        return sorted({owner for owner in self._owners if owner is not None}) or list(self.seeds)

    def is_silent(self, address: Address) -> bool:
        """Whether it did not answer when it was last asked."""
        return address in self._silent

    def asked_first(self) -> list[Address]:
        """Whom to ask for the map: those last who did not answer lately."""
        everybody = dict.fromkeys([*self.masters, *self.seeds])
        return sorted(everybody, key=self.is_silent)

    def learn(self, slot: int, address: Address) -> None:
        """A node said who serves a slot now: later news than the whole map."""
        self._owners[slot] = address

    def doubt(self, address: Address) -> None:
        """This node did not answer as it should."""
        self._silent.add(address)
        self.is_stale = True

    def replace(self, ranges: Iterable[Sequence[Any]], asked: Address) -> None:
        """Take over what CLUSTER SLOTS said; `asked` is who said it. Whoever answers is trusted again."""
        self._owners = [None] * SLOTS
        for first, last, (host, port, *_), *_ in ranges:
            # a node that does not know its own name leaves it out: it is where we reached it
            address = ((host or b"").decode() or asked[0], int(port))
            self._owners[first : last + 1] = [address] * (last + 1 - first)
        self._silent.discard(asked)
        self.is_stale = False
