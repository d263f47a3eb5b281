"""The rates of single MQTT clients, while their pages are open: their gateways tell what passes."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final

import anyio
import anyio.abc

from rsmq.errors import BrokerError, ConfigError
from rsmq.model.clock import monotonic
from rsmq.persistence.mqtt_traces import MqttTraces

WINDOW: Final = 10.0
"""Seconds over which a rate counts."""
PATIENCE: Final = 10.0
"""Seconds after the last look at a client, from which on it is not watched any more."""
MOST_WATCHED: Final = 20
"""Each takes a connection, and its gateway describes each of its packets."""


@dataclass(frozen=True, slots=True)
class ClientRate:
    """What passes in one direction, in a second: packets, messages (PUBLISH) and bytes."""

    packets: float
    messages: float
    bytes: float


@dataclass(slots=True)
class WatchedClient:
    """What has passed of one client: time, direction, packets, messages, bytes."""

    since: float
    seen_at: float
    passed: deque[tuple[float, str, int, int, int]] = field(default_factory=deque)
    trouble: str = ""

    def saw(self, now: float, line: dict[str, Any]) -> None:
        """A packet, and those before it that were too many to be told. Another client may have sent anything."""
        size, left_out = line.get("bytes"), line.get("left_out")
        packets = 1 + (left_out if isinstance(left_out, int) else 0)
        is_message = line.get("packet") == "PUBLISH"
        self.trouble = ""
        self.passed.append((
            now, str(line.get("way")), packets, packets * is_message,
            packets * size if isinstance(size, int) else 0,
        ))  # fmt: skip
        self.forget(now)

    def forget(self, now: float) -> None:
        """What is older than the window."""
        while self.passed and self.passed[0][0] < now - WINDOW:
            self.passed.popleft()

    def rate(self, now: float, way: str) -> ClientRate | None:
        """In a direction (`in`: from the client); None in the first two seconds."""
        self.forget(now)
        span = min(WINDOW, now - self.since)
        if span < 2:
            return None
        some = [each[2:] for each in self.passed if each[1] == way]
        packets, messages, size = (sum(each[at] for each in some) / span for at in range(3))
        return ClientRate(packets, messages, size)


class WatchedClients:
    """Watches the clients whose pages are open. Other clients cost nothing, neither the server nor a gateway.

    A client that sends more than a thousand packets a second is counted by those that its gateway tells, and the number
    of the others, which are taken to be as large.
    """

    def __init__(self, traces: MqttTraces) -> None:
        self._traces = traces
        self._watched = dict[str, WatchedClient]()
        self._tasks: anyio.abc.TaskGroup | None = None

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Until cancelled."""
        async with anyio.create_task_group() as self._tasks:
            task_status.started()
            await anyio.sleep_forever()

    def watch(self, client_id: str) -> WatchedClient | None:
        """A page of the client is open. None: too many are."""
        found = self._watched.get(client_id)
        if found is None and len(self._watched) < MOST_WATCHED and self._tasks is not None:
            now = monotonic()
            found = self._watched[client_id] = WatchedClient(now, now)
            self._tasks.start_soon(self._follow, client_id, found)
        if found is not None:
            found.seen_at = monotonic()
        return found

    async def _follow(self, client_id: str, found: WatchedClient) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._trace, client_id, found)
            while monotonic() - found.seen_at < PATIENCE:
                await anyio.sleep(1)
            del self._watched[client_id]
            tasks.cancel_scope.cancel()

    async def _trace(self, client_id: str, found: WatchedClient) -> None:
        while True:
            try:
                await self._traces.follow(client_id, lambda line: found.saw(monotonic(), line))
            except (BrokerError, ConfigError) as error:
                found.trouble = str(error)
            found.since = monotonic()
            await anyio.sleep(1)

    def __repr__(self) -> str:
        return f"<WatchedClients {sorted(self._watched)}>"
