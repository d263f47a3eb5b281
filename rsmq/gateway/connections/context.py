"""What all connections of a gateway share."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import anyio

from rsmq.errors import BrokerError
from rsmq.gateway.connections.auth import Gatekeeper
from rsmq.gateway.connections.ingest import Ingest
from rsmq.gateway.connections.limits import Arrivals
from rsmq.gateway.connections.peer import Network
from rsmq.gateway.fleet.filter_tree import FilterTree
from rsmq.gateway.fleet.history import LetterHistory
from rsmq.gateway.fleet.message import Published, Timings
from rsmq.gateway.fleet.registry import Registry
from rsmq.gateway.fleet.retained import Retained
from rsmq.gateway.fleet.routes import Routes
from rsmq.gateway.fleet.sessions import Ended, Sessions
from rsmq.gateway.fleet.shares import Shares
from rsmq.gateway.options import GatewayOptions
from rsmq.gateway.protocol.machine import ClientLimits
from rsmq.gateway.protocol.packet import ReasonCode, Subscription
from rsmq.gateway.protocol.topic_filter import SHARE
from rsmq.model.log_throttle import ThrottledLog
from rsmq.persistence.session import Inboxes

log = logging.getLogger("rsmq.gateway")

QUICK: Final = 1.5
"""A client is given up after so many keep-alives."""
RECHECK: Final = 10.0
"""Seconds after which a connection with a later deadline is looked at: a closed one is forgotten then."""
LINGER: Final = 2.0
"""Seconds in which a client may read why its connection ends."""


class Transport(Protocol):
    """What a connection needs of its socket."""

    def write(self, data: bytes, /) -> None: ...
    def close(self) -> None: ...
    def abort(self) -> None: ...
    def can_write_eof(self) -> bool: ...
    def write_eof(self) -> None: ...
    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...
    def get_write_buffer_size(self) -> int: ...


class Connected(Protocol):
    """A connection, as others see it."""

    heard: float

    def direct(self, message: Published, *, retain: bool, identifiers: tuple[int, ...]) -> None: ...
    def close(self, reason: ReasonCode, text: str = "") -> None: ...


def hang_up(transport: Transport, *, lingers: bool) -> None:
    """Close a connection. One that `lingers`, because its last packet says why, when the client has closed its side,
    or soon: bytes of the client that are not read would reset the connection, and it would lose that packet."""
    if not lingers or not transport.can_write_eof():
        transport.close()
        return
    try:
        transport.write_eof()
    except OSError:  # the client has reset the connection, which the event loop has not seen yet
        transport.abort()
    else:
        asyncio.get_running_loop().call_later(LINGER, transport.abort)


@asynccontextmanager
async def connection_tasks() -> AsyncIterator[Callable[[Coroutine[Any, Any, None]], object]]:
    """Starts tasks of connections; those that are left at the end are cancelled.

    A plain task costs a fifth of one in a task group, and a client that connects and subscribes needs two.
    """
    loop, tasks = asyncio.get_running_loop(), set[asyncio.Task[None]]()

    def spawn(work: Coroutine[Any, Any, None]) -> None:
        task = loop.create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    try:
        yield spawn
    finally:
        for each in tasks:
            each.cancel()
        if tasks:
            with anyio.CancelScope(shield=True):
                await asyncio.wait(tasks)


class Wheel:
    """Deadlines of many connections: one bucket a second, and an entry moves only when its bucket comes.

    An entry keeps its connection in memory, so one with a deadline far away asks to be looked at after RECHECK.
    """

    def __init__(self) -> None:
        self._buckets: dict[int, dict[int, Callable[[float], float | None]]] = {}
        self._last = 0
        self._count = 0

    def add(self, at: float, look: Callable[[float], float | None]) -> None:
        """Call `look` with the time, at or soon after `at`. It returns when to look again, or None."""
        self._count += 1
        self._buckets.setdefault(max(int(at) + 1, self._last + 1), {})[self._count] = look

    def turn(self, now: float) -> None:
        """Look at everything whose bucket has come."""
        for second in range(self._last or min(self._buckets, default=int(now)), int(now) + 1):
            for look in self._buckets.pop(second, {}).values():
                again = look(now)
                if again is not None:
                    self._buckets.setdefault(max(int(again) + 1, int(now) + 1), {})[id(look)] = look
        self._last = int(now)


class Tally(Counter[str]):
    """How many there are of each name. A name that has none is forgotten."""

    def add(self, name: str) -> None:
        """One more."""
        self[name] += 1

    def remove(self, name: str) -> None:
        """One less."""
        self[name] -= 1
        if not self[name]:
            del self[name]


@dataclass(slots=True)
class Context:
    """The parts of a running gateway. `counts`: what happened, by name; every drop and refusal is in it."""

    options: GatewayOptions
    limits: ClientLimits
    gatekeeper: Gatekeeper
    inboxes: Inboxes
    registry: Registry
    retained: Retained
    ingest: Ingest
    sessions: Sessions
    shares: Shares
    routes: Routes
    spawn: Callable[[Coroutine[Any, Any, None]], object]
    broadcast: Callable[[Published], None]
    now_ms: Callable[[], int]
    timings: Timings | None = None
    wheel: Wheel = field(default_factory=Wheel)
    local: FilterTree[Any, Subscription] = field(default_factory=FilterTree)
    """The subscriptions of the clients that are connected here, for messages of QoS 0."""
    connections: dict[str, Any] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    leaving: dict[str, asyncio.Event] = field(default_factory=dict)
    """Clients whose last connection is not stored as ended yet: the next one waits for that."""
    sockets: int = 0
    """Connections, also those whose CONNECT is not answered yet."""
    addresses: Tally = field(default_factory=Tally)
    """Connections of each address."""
    users: Tally = field(default_factory=Tally)
    """Connections of each user name."""
    refusals: ThrottledLog = field(default_factory=lambda: ThrottledLog(log))
    proxies: tuple[Network, ...] = ()
    """Load balancers that send the header of the PROXY protocol."""
    history: LetterHistory = field(default_factory=LetterHistory)
    ending: int = 0
    """Tasks of connections that have not ended."""
    arrivals: Arrivals = field(init=False)
    """The clients that connect."""

    def __post_init__(self) -> None:
        options = self.options
        self.arrivals = Arrivals(options.most_connects, options.connect_timeout.total_seconds() / 2)

    def exceeded(self, address: str) -> tuple[str, str] | None:
        """The limit that a further connection of an address exceeds, and what to log, if there is one."""
        most = self.options.most_per_address
        if most and self.addresses[address] >= most:
            return "most_per_address", f"{address} has its most connections"
        opening = self.sockets - len(self.connections)
        if opening >= self.options.most_opening:
            return "most_opening", f"{opening} connections have sent no CONNECT yet, the next one comes from {address}"
        return None

    def leave(self, ended: Ended, settled: Callable[[], Awaitable[None]]) -> None:
        """Store that a connection has ended, when the server knows all that its client has acknowledged."""
        self.leaving[ended.client] = left = asyncio.Event()
        self.spawn(self._leave(ended, settled, left))

    async def _leave(self, ended: Ended, settled: Callable[[], Awaitable[None]], left: asyncio.Event) -> None:
        try:
            await settled()
            await self.sessions.closed(ended)
        except BrokerError as error:
            log.warning("the end of client %r waits for the server: %s", ended.client, error)
            self.sessions.close_later(ended)
        finally:
            left.set()
            if self.leaving.get(ended.client) is left:
                del self.leaving[ended.client]

    def dropped(self, reason: str) -> None:
        """Count a message that a client does not get."""
        self.counts[f"dropped: {reason}"] += 1

    def subscribe_locally(self, connection: Any, subscription: Subscription) -> None:
        """Note a subscription of a client that is connected here. A shared one is found by its member instead."""
        if not subscription.filter.startswith(SHARE):
            self.local.put(subscription.filter, connection, subscription)

    @property
    def loop_time(self) -> float:
        """The clock of all deadlines."""
        return asyncio.get_running_loop().time()
