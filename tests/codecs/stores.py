"""A store of bodies that a test can take away, slow down and look into. It is one that a user could write."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator


class MemoryStore:
    """Bodies in this process. `is_away`: each call fails; `gate`: a put waits for it; `waiting`: how many do;
    `refused`: how many calls have failed; `gets`: how many have asked for a body."""

    def __init__(self) -> None:
        self.bodies: dict[str, bytes] = {}
        self.times: dict[str, float] = {}
        self.is_away = False
        self.waiting = self.refused = self.gets = 0
        self.gate = threading.Event()
        self.gate.set()

    def put(self, name: str, data: bytes) -> None:
        self.waiting += 1
        self.gate.wait(20)
        self.waiting -= 1
        self._reach()
        self.bodies[name] = data
        self.times[name] = time.time()

    def get(self, name: str) -> bytes:
        self.gets += 1
        self._reach()
        try:
            return self.bodies[name]
        except KeyError:
            raise FileNotFoundError(name) from None

    def delete(self, name: str) -> None:
        self._reach()
        self.bodies.pop(name, None)

    def list(self, folder: str) -> Iterator[tuple[str, float, int]]:
        self._reach()
        for name, data in list(self.bodies.items()):
            if name.startswith(f"{folder}/"):
                yield name, self.times[name], len(data)

    @property
    def names(self) -> set[str]:
        """Those of bodies, without what marks the folder."""
        return {name for name in self.bodies if name.count("/") == 2}

    def _reach(self) -> None:
        if self.is_away:
            self.refused += 1
            raise ConnectionError("the network is down")
