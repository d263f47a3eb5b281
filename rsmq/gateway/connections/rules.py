"""The rules of a gateway for its clients."""

from __future__ import annotations

from dataclasses import dataclass

from rsmq.gateway.connections.auth import Gatekeeper
from rsmq.gateway.connections.peer import Network
from rsmq.gateway.fleet.routes import Routes
from rsmq.gateway.options import GatewayOptions
from rsmq.gateway.protocol.machine import ClientLimits


@dataclass(frozen=True, slots=True)
class GatewayRules:
    """The options of a gateway, and what was made of them. Nothing here changes while it runs but by its own hand:
    the gatekeeper reads its files again, the routes look their topics up."""

    options: GatewayOptions
    limits: ClientLimits
    gatekeeper: Gatekeeper
    routes: Routes
    proxies: tuple[Network, ...]
    """Load balancers that send the header of the PROXY protocol."""
