"""A long outage in a moment: a port that refuses connections, and a back-off that has failed a thousand times."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from rsmq.model.backoff import Backoff


@contextmanager
def refused() -> Iterator[str]:
    """The URL of a port that refuses connections. It is taken, so no server of another test gets it meanwhile."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"redis://127.0.0.1:{taken.getsockname()[1]}"


class LongBackoff(Backoff):
    """Counts a thousand failures with the first one: 2.0**1024 is too large for a float."""

    def next(self) -> float:
        self.failures = max(1000, self.failures)
        return Backoff.next(self)
