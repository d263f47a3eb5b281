"""Messages of QoS 0 that no topic stores."""

from __future__ import annotations

from rsmq.gateway.connections.clients import Clients
from rsmq.gateway.fleet.broadcast import Broadcast
from rsmq.gateway.fleet.message import Published
from rsmq.gateway.fleet.registry import Registry
from rsmq.gateway.fleet.shares import choose


class Unstored:
    """Passes them on to the clients that are connected here, and to all other gateways."""

    def __init__(self, clients: Clients, registry: Registry, others: Broadcast) -> None:
        self._clients = clients
        self._registry = registry
        self._others = others
        self._passed_on = 0

    def publish(self, message: Published) -> None:
        """Pass a message on."""
        chosen = self._choose(message)
        self._clients.deliver(message, chosen)
        self._others.send(message, chosen)

    def _choose(self, message: Published) -> dict[str, str]:
        """The member of each share that gets it. Only connected ones can."""
        registry, chosen = self._registry, dict[str, str]()
        if registry.shares:
            self._passed_on += 1
            for _, subscription in registry.tree.match(message.topic):
                if (share := subscription.filter) in registry.shares:
                    chosen[share] = choose(str(self._passed_on), registry.shares[share], registry.offline)
        return chosen

    def __repr__(self) -> str:
        return f"<Unstored passed_on={self._passed_on}>"
