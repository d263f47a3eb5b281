"""The parts of a gateway that its connections share."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from rsmq.gateway.connections.clients import Clients
from rsmq.gateway.connections.counts import Counts
from rsmq.gateway.connections.ingest import Ingest
from rsmq.gateway.connections.rules import GatewayRules
from rsmq.gateway.connections.unstored import Unstored
from rsmq.gateway.fleet.message import Timings
from rsmq.gateway.fleet.state import FleetState


@dataclass(frozen=True, slots=True)
class Context:
    """The parts of a running gateway: each has its own state, which only its methods change."""

    rules: GatewayRules
    """What clients may do."""
    fleet: FleetState
    """What all gateways share on the server."""
    clients: Clients
    """The clients that are connected here."""
    ingest: Ingest
    """Messages on their way into topics."""
    unstored: Unstored
    """Messages of QoS 0 that no topic stores."""
    counts: Counts
    """What happened, by name."""
    spawn: Callable[[Coroutine[Any, Any, None]], None]
    """Starts a task of a connection."""
    timings: Timings | None = None
    """Gets durations, if something measures them."""
