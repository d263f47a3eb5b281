"""The signboard: what the others can read of this member, in each of its groups. The heartbeat keeps it up."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from rsmq.connect import BlockingClient
from rsmq.keys import Keys


@dataclass(slots=True)
class Sign:
    """One group that this member belongs to. `confirmed` when the others can see it."""

    topic: str
    group: str
    info: str
    on_change: Callable[[], None]
    confirmed: Future[None] = field(default_factory=Future)


class Signboard:
    """In each group a key that lives `ttl` ms unless it is renewed, a place in the set of members, and vitals.

    Invariant: a beat in the air brings nothing back that was taken down meanwhile.
    """

    def __init__(self, keys: Keys, member: str, ttl: int) -> None:
        self._keys, self._member, self._ttl = keys, member, ttl
        self._lock = threading.Lock()
        self._writing = threading.Lock()  # held while the server is asked: never waited for in the loop
        self._signs: dict[tuple[str, str], Sign] = {}

    @property
    def signs(self) -> list[Sign]:
        """Those that are to be kept up now."""
        with self._lock:
            return list(self._signs.values())

    def add(self, sign: Sign) -> None:
        """Keep it up from the next beat on."""
        with self._lock:
            self._signs[sign.topic, sign.group] = sign

    def remove(self, topic: str, group: str) -> bool:
        """Keep it up no more; `take_down` what is there. False: it was not kept up."""
        with self._lock:
            return self._signs.pop((topic, group), None) is not None

    # -- in the thread --------------------------------------------------------------------------------------------

    def questions(self, signs: Sequence[Sign]) -> list[tuple[Any, ...]]:
        """Two for each: to renew its key, and whether its place in the set is still there."""
        questions: list[tuple[Any, ...]] = []
        for each in signs:
            questions.append(("PEXPIRE", self._alive(each), self._ttl))
            questions.append(("SISMEMBER", self._keys.members(each.topic, each.group), self._member))
        return questions

    def answer(self, client: BlockingClient, signs: Sequence[Sign], replies: Sequence[Any]) -> None:
        """Put up again what the replies to the questions show to be missing.

        Only that is written: PEXPIRE works when the server is out of memory.
        """
        for each, *is_there in zip(signs, replies[0::2], replies[1::2], strict=True):
            if not all(is_there):
                self.put_up(client, each)
            with suppress(InvalidStateError):  # whoever waited was cancelled
                each.confirmed.set_result(None)

    def put_up(self, client: BlockingClient, sign: Sign) -> None:
        """The key before the set: whoever is in the set without a key is dead to the others."""
        with self._writing:
            if self._is_kept(sign):
                client.execute_command("SET", self._alive(sign), sign.info, "PX", self._ttl)
                client.execute_command("SADD", self._keys.members(sign.topic, sign.group), self._member)
                client.execute_command("PUBLISH", self._keys.changes(sign.topic, sign.group), "")

    def tell(self, client: BlockingClient, signs: Sequence[Sign], vitals: str) -> None:
        """For people only: a server that is out of memory refuses it, and nothing depends on it."""
        with self._writing:
            names = [self._keys.vitals(one.topic, one.group, self._member) for one in signs if self._is_kept(one)]
            client.pipelined([("SET", name, vitals, "PX", self._ttl) for name in names])

    def take_down(self, client: BlockingClient, topic: str, group: str) -> None:
        """Gone, and announced, so that the others rebalance at once."""
        with self._writing:
            client.execute_command("SREM", self._keys.members(topic, group), self._member)
            shown = self._keys.alive(topic, group, self._member), self._keys.vitals(topic, group, self._member)
            client.execute_command("DEL", *shown)
            client.execute_command("PUBLISH", self._keys.changes(topic, group), "")

    def _is_kept(self, sign: Sign) -> bool:
        return self._signs.get((sign.topic, sign.group)) is sign

    def _alive(self, sign: Sign) -> str:
        return self._keys.alive(sign.topic, sign.group, self._member)

    def __repr__(self) -> str:
        return f"<Signboard {self._member} groups={len(self._signs)}>"
