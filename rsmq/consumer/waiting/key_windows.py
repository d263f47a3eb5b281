"""When the messages of each key have started, as far as that counts for a rate by key. No I/O."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

FEWEST_KEYS: Final = 1000
"""Keys whose starts are kept before the first look for those that are over."""


class KeyWindows:
    """The last starts of each key: no more than `limit` of them in any time of `seconds`.

    Most keys have one start in that time. It is kept as a number, because a deque takes ten times the memory.
    """

    def __init__(self, limit: int, seconds: float) -> None:
        self._limit, self._seconds = limit, seconds
        self._starts: dict[bytes, float | deque[float]] = {}
        self._most = FEWEST_KEYS

    def __len__(self) -> int:
        return len(self._starts)

    def admit(self, keys: Iterable[bytes | None], now: float, at: float) -> int:
        """How many of the keys, from the first, may start now. They count as started `at`, not earlier than they do.

        No key: nothing to count. This runs for each message, so it is one loop without calls.
        """
        if len(self._starts) >= self._most:
            self._forget(now)
        starts, limit, over, count = self._starts, self._limit, now - self._seconds, 0
        for key in keys:
            window = starts.get(key)  # type: ignore[arg-type]
            if window is None:
                if key is not None:
                    starts[key] = at
            elif isinstance(window, deque):
                if len(window) == limit and window[0] > over:
                    return count
                window.append(at)  # the oldest of `limit` starts leaves
            elif limit > 1:
                starts[key] = deque((window, at), limit)  # type: ignore[index]
            elif window > over:
                return count
            else:
                starts[key] = at  # type: ignore[index]
            count += 1
        return count

    def is_full(self, key: bytes, now: float) -> bool:
        """Whether a key may start none now. May be called from any thread."""
        times = self._of(key)
        return len(times) == self._limit and times[0] > now - self._seconds

    def wait(self, key: bytes, now: float) -> float:
        """Seconds until a key may start that may not now."""
        window = self._starts[key]
        return (window if isinstance(window, float) else window[0]) + self._seconds - now

    def give_back(self, keys: Sequence[bytes | None]) -> None:
        """The last ones that were admitted, in this order, have not started."""
        for key in reversed(keys):
            if key is None:
                continue
            window = self._starts[key]
            if isinstance(window, deque) and len(window) > 1:
                window.pop()
            else:
                del self._starts[key]

    def move_last(self, key: bytes, now: float) -> None:
        """The last start of a key is now: its message had to wait for the server."""
        if key in self._starts:  # otherwise it was forgotten meanwhile
            self.give_back((key,))
        self.restore({key: [*self._of(key), now]})

    def open_ones(self, now: float, keys: Iterable[bytes] | None = None) -> dict[bytes, list[float]]:
        """The keys, or those of these, that have started within the last time, with their starts."""
        times = {key: self._of(key) for key in (self._starts if keys is None else keys)}
        return {key: each for key, each in times.items() if each and each[-1] > now - self._seconds}

    def add(self, starts: Mapping[bytes, Sequence[float]]) -> None:
        """Keys have started elsewhere, too. Some of these starts may be known already."""
        both = {key: Counter(self._of(key)) | Counter(times) for key, times in starts.items()}
        self.restore({key: sorted(times.elements()) for key, times in both.items()})

    def restore(self, starts: Mapping[bytes, Sequence[float]]) -> None:
        """Take over when keys have started."""
        for key, times in starts.items():
            self._starts[key] = times[0] if len(times) == 1 else deque(times, self._limit)

    def advance(self, seconds: float) -> None:
        """All have started so much longer ago."""
        self.restore({key: [at - seconds for at in self._of(key)] for key in self._starts})

    def _of(self, key: bytes) -> list[float]:
        window = self._starts.get(key, ())
        return [window] if isinstance(window, float) else list(window)

    def _forget(self, now: float) -> None:
        """Forget the keys whose last start is over: what is kept grows with the keys of one time only."""
        over, pairs = now - self._seconds, self._starts.items()
        self._starts = {key: each for key, each in pairs if (each if isinstance(each, float) else each[-1]) > over}
        self._most = max(FEWEST_KEYS, 2 * len(self._starts))

    def __repr__(self) -> str:
        return f"<KeyWindows {self._limit} in {self._seconds:g} s, {len(self)} keys>"
