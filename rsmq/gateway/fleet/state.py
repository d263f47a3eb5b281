"""The state that all gateways share on the server."""

from __future__ import annotations

from dataclasses import dataclass

from rsmq.gateway.fleet.client_acks import ClientAcks
from rsmq.gateway.fleet.registry import Registry
from rsmq.gateway.fleet.retained import Retained
from rsmq.gateway.fleet.sessions import Sessions
from rsmq.gateway.fleet.shares import Shares
from rsmq.gateway.fleet.wills import Wills
from rsmq.model.clock import ServerClock
from rsmq.persistence.session import Inboxes


@dataclass(frozen=True, slots=True)
class FleetState:
    """The parts of a gateway that read and write it."""

    clock: ServerClock
    inboxes: Inboxes
    acks: ClientAcks
    registry: Registry
    retained: Retained
    shares: Shares
    wills: Wills
    sessions: Sessions
