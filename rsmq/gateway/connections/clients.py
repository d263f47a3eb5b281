"""The clients that are connected to one gateway."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping
from typing import Final

from rsmq.gateway.connections.client_link import ClientLink
from rsmq.gateway.connections.counts import Counts
from rsmq.gateway.connections.limits import Arrivals
from rsmq.gateway.connections.tracing import Watches
from rsmq.gateway.fleet.filter_tree import FilterTree
from rsmq.gateway.fleet.history import LetterHistory
from rsmq.gateway.fleet.message import Published, combine
from rsmq.gateway.options import GatewayOptions
from rsmq.gateway.protocol.packet import ReasonCode, RefusedPacket, Subscription
from rsmq.gateway.protocol.topic_filter import SHARE
from rsmq.persistence.mqtt_bans import BanList

RECHECK: Final = 10.0
"""Seconds after which a connection with a later deadline is looked at: a closed one is forgotten then."""


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

    def add_after(self, seconds: float, look: Callable[[float], float | None]) -> None:
        """Call `look` in so many seconds."""
        self.add(self.now + seconds, look)

    @property
    def now(self) -> float:
        """The clock of all deadlines."""
        return asyncio.get_running_loop().time()

    def turn(self) -> None:
        """Look at everything whose bucket has come."""
        now = self.now
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


class Clients:
    """The newest connection of each client, and how many there are of each address and user.

    Invariant: each subscription of a connection that is listed here, and of no other, is in the tree.
    """

    def __init__(self, options: GatewayOptions, counts: Counts, watches: Watches) -> None:
        self._options = options
        self._counts = counts
        self.connections: dict[str, ClientLink] = {}
        """By client id, from CONNACK on."""
        self.wheel = Wheel()
        self.history = LetterHistory()
        self.arrivals = Arrivals(options.most_connects, options.connect_timeout.total_seconds() / 2)
        self._tree = FilterTree[ClientLink, Subscription]()
        """Subscriptions, for messages of QoS 0."""
        self._sockets = 0
        """Connections, also those whose CONNECT is not answered yet."""
        self._addresses = Tally()
        self._users = Tally()
        self._bans = BanList()
        self.watches = watches
        """Operators who watch clients."""

    # -- how many --------------------------------------------------------------------------------------------------

    def open_socket(self, address: str) -> bool:
        """Count a new connection of an address. False: it is refused, because there are too many."""
        most = self._options.most_per_address
        if most and self._addresses[address] >= most:
            self._counts.refused("most_per_address", f"{address} has its most connections")
            return False
        opening = self._sockets - len(self.connections)
        if opening >= self._options.most_opening:
            text = f"{opening} connections have sent no CONNECT yet, the next one comes from {address}"
            self._counts.refused("most_opening", text)
            return False
        self._addresses.add(address)
        self._sockets += 1
        return True

    def close_socket(self, address: str) -> None:
        """A connection that was counted is closed."""
        self._addresses.remove(address)
        self._sockets -= 1

    def require_room(self) -> None:
        """Raise RefusedPacket if one more client would be too many."""
        if len(self.connections) >= self._options.most_connections:
            raise RefusedPacket(ReasonCode.QUOTA_EXCEEDED, "this gateway has its most connections", "most_connections")

    def add_user(self, client: ClientLink, user: str) -> None:
        """Count a connection of a user, and note who the client is. Raises RefusedPacket if there are too many.

        A client that takes over its own connection is not one more.
        """
        most, older = self._options.most_per_user, self.connections.get(client.client_id)
        if most and self._users[user] >= most and (older is None or older.user != user):
            raise RefusedPacket(ReasonCode.QUOTA_EXCEEDED, f"user {user!r} has its most connections", "most_per_user")
        client.user = user
        self._users.add(user)

    def require_not_banned(self, now_ms: int, client_id: str | None, user: str | None, address: str) -> None:
        """Raise RefusedPacket for a client id, user or address that an operator has banned."""
        ban = self._bans.find(now_ms, client_id, user, address)
        if ban is not None:
            raise RefusedPacket(ReasonCode.BANNED, f"{ban.kind} {ban.name!r} is banned", "banned")

    # -- who -------------------------------------------------------------------------------------------------------

    def enter(self, client: ClientLink) -> None:
        """A client is connected: an older connection of it is closed."""
        if (older := self.connections.get(client.client_id)) is not None:
            older.close(ReasonCode.SESSION_TAKEN_OVER, "the client has connected again")
        self.connections[client.client_id] = client
        for each in client.subscriptions.values():
            self.subscribe(client, each)

    def leave(self, client: ClientLink) -> None:
        """A connection has ended, also one that has not entered."""
        if client.user is not None:
            self._users.remove(client.user)
        if self.connections.get(client.client_id) is client:
            del self.connections[client.client_id]
        for each in client.subscriptions.values():
            self.unsubscribe(client, each.filter)

    def subscribe(self, client: ClientLink, subscription: Subscription) -> None:
        """Note a subscription of a client that is connected here. A shared one is found by its member instead."""
        if not subscription.filter.startswith(SHARE):
            self._tree.put(subscription.filter, client, subscription)

    def unsubscribe(self, client: ClientLink, pattern: str) -> None:
        """Forget a subscription."""
        self._tree.remove(pattern, client)

    def has_subscribers(self, topic: str) -> bool:
        """Whether a client that is connected here reads messages of a topic name."""
        return bool(self._tree.match(topic))

    # -- for all ---------------------------------------------------------------------------------------------------

    def deliver(self, message: Published, chosen: Mapping[str, str]) -> None:
        """Pass a message of QoS 0 to the clients that are connected here. `chosen`: the member of each share."""
        for share, member in chosen.items():
            client = self.connections.get(member)
            if client is not None and (subscription := client.subscriptions.get(share)) is not None:
                client.direct(
                    message, retain=subscription.retain_as_published and message.retain,
                    identifiers=(subscription.identifier,) if subscription.identifier else (),
                )  # fmt: skip
        found = defaultdict[ClientLink, list[Subscription]](list)
        for client, subscription in self._tree.match(message.topic):
            if not (subscription.no_local and client.client_id == message.client):
                found[client].append(subscription)
        for client, subscriptions in found.items():
            copy = combine(message, subscriptions)
            assert copy is not None, "a subscriber has a subscription"
            client.direct(message, retain=copy.retain, identifiers=copy.identifiers)

    def poll(self) -> None:
        """Look into all inboxes, in case a ring was lost; this renews the sessions, too."""
        for each in list(self.connections.values()):
            each.poll()

    def close(self, reason: ReasonCode) -> None:
        """End all connections."""
        for each in list(self.connections.values()):
            each.close(reason)

    def kick(self, client_id: str) -> None:
        """An operator ends the connection of a client."""
        client = self.connections.get(client_id)
        if client is not None:
            self._counts["kicked"] += 1
            client.close(ReasonCode.ADMINISTRATIVE_ACTION, "an operator has ended the connection")

    def trace(self, request: str) -> None:
        """An operator asks for the packets of a client, which may connect later."""
        client_id = self.watches.obey(request)
        if client_id is not None and (client := self.connections.get(client_id)) is not None:
            client.watch(self.watches.of(client_id))

    def ban(self, bans: BanList, now_ms: int) -> None:
        """These bans are in force from now on: end the connections that fall under one."""
        self._bans = bans
        for each in list(self.connections.values()):
            if bans.find(now_ms, each.client_id, each.user, each.address) is not None:
                self._counts["kicked"] += 1
                each.close(ReasonCode.ADMINISTRATIVE_ACTION, "an operator has banned it")

    def rights_changed(self, gone: Collection[str]) -> None:
        """Look rights up again, and end the connections of users that are gone or have another password."""
        for each in list(self.connections.values()):
            each.rights.clear()
            if each.user in gone:
                each.close(ReasonCode.NOT_AUTHORIZED, "its user is gone, or has another password")

    def __repr__(self) -> str:
        return f"<Clients {len(self.connections)} sockets={self._sockets}>"
