"""The gateway: what runs in one process, how it starts, and how it ends."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import anyio
import anyio.abc

from rsmq.broker.broker import Broker
from rsmq.broker.connection import Connection, connection
from rsmq.errors import BrokerError, ConfigError
from rsmq.gateway.about import about
from rsmq.gateway.connections.auth import Authenticate, Authorize, Gatekeeper
from rsmq.gateway.connections.client import ClientConnection
from rsmq.gateway.connections.context import Context, connection_tasks
from rsmq.gateway.connections.ingest import Ingest
from rsmq.gateway.connections.listener import listen
from rsmq.gateway.connections.peer import networks
from rsmq.gateway.connections.pressure import PRESSURE_TURN, Pressure
from rsmq.gateway.connections.proxied import ProxiedServer
from rsmq.gateway.connections.publishing import publish_will
from rsmq.gateway.fleet.broadcast import Broadcast
from rsmq.gateway.fleet.message import Published, Timings, combine
from rsmq.gateway.fleet.registry import Registry
from rsmq.gateway.fleet.retained import Retained
from rsmq.gateway.fleet.router import MqttRouter
from rsmq.gateway.fleet.routes import Routes
from rsmq.gateway.fleet.sessions import Sessions
from rsmq.gateway.fleet.shares import Shares, choose
from rsmq.gateway.fleet.wills import Wills
from rsmq.gateway.lease import GatewayLease
from rsmq.gateway.options import GatewayOptions, split_listen, tls_context
from rsmq.gateway.protocol.machine import ClientLimits
from rsmq.gateway.protocol.packet import ReasonCode, Subscription
from rsmq.gateway.sys_topics import SysTopics, totals
from rsmq.model.clock import monotonic
from rsmq.model.own_tasks import own_tasks
from rsmq.persistence.mqtt_clients import KICK
from rsmq.producer import Producer
from rsmq.worker.worker import Worker

log = logging.getLogger("rsmq.gateway")

HOLD: Final = "mqtt-hold"
"""The header of a call for back-pressure, with partitions."""
TURN: Final = 1.0
SWEEP_TURNS: Final = 5
PACKET_SLACK: Final = 4096
"""Bytes of a packet besides its payload: headers of the message."""
ABOUT_SECONDS: Final = 60
"""How long it is known what a gateway that has died was."""
END_SECONDS: Final = 5.0
"""How long the sessions of a gateway that stops may take to be stored."""


class Gateway:
    """Connects MQTT clients to the topics and inboxes of a broker.

    Any number of gateways may run. Each also routes: it takes its share of the partitions as a member of the group
    `mqtt`. `listen`: addresses such as mqtt://0.0.0.0:1883, or mqtts:// with TLS.
    """

    def __init__(
        self,
        broker: Broker,
        *,
        listen: Sequence[str] = ("mqtt://127.0.0.1:1883",),
        options: GatewayOptions | None = None,
    ) -> None:
        if not isinstance(broker, Broker):
            raise ConfigError(f"{broker!r} is not a Broker: pass the one whose settings name the server")
        self._broker = broker
        self.listen = tuple(listen)
        self.options = GatewayOptions() if options is None else options
        self.routes = Routes()
        self.gatekeeper: Gatekeeper | None = None
        self._authenticate: Authenticate | None = None
        self._authorize: Authorize | None = None
        self.context: Context | None = None
        self.ports: list[int] = []
        """The ports it listens on, once it runs."""
        self.is_ended = False
        self.timings: Timings | None = None
        """Gets durations, if something measures them. To be set before `run`."""
        self.router: MqttRouter | None = None
        self._stopping = anyio.Event()
        self._lease: GatewayLease | None = None
        self._passed_on = self._started_ms = 0

    # -- registering -----------------------------------------------------------------------------------------------

    def route(self, pattern: str, *, topic: str, subscribers: bool = True) -> None:
        """Store the messages whose topic name matches in a topic of rsmq; the first route that matches counts.

        With `subscribers=False` handlers get them, but no MQTT client. Everything else goes to the topic `mqtt`.
        """
        self.routes.add(pattern, topic, subscribers=subscribers)

    def authenticate(self, function: Authenticate) -> Authenticate:
        """Register `async def (client_id, user, password) -> bool`: whether a client may connect."""
        self._authenticate = function
        return function

    def authorize(self, function: Authorize) -> Authorize:
        """Register `def (client_id, user, "read" or "write", topic name or filter) -> bool`."""
        self._authorize = function
        return function

    # -- running ---------------------------------------------------------------------------------------------------

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Serve until `stop` or cancellation."""
        addresses = [split_listen(each) for each in self.listen]
        gatekeeper = self.gatekeeper = Gatekeeper(self.options)
        gatekeeper.authenticate, gatekeeper.authorize = self._authenticate, self._authorize
        gatekeeper.require_some()
        networks(self.options.proxies)
        if any(each.is_encrypted for each in addresses):
            tls_context(self.options)  # a wrong certificate ends the start before anything is connected
        settings = self._broker.settings
        async with connection(
            settings, self._broker.keys, declared=self._broker.declared, make_producer=Producer, publishes_only=False
        ) as opened, own_tasks() as tasks, connection_tasks() as spawn:  # fmt: skip
            context = self.context = self._build(opened, gatekeeper, lambda work: spawn(guarded(work, context)))
            tasks.start_soon(self._others.run)
            await self.routes.look_up(opened.topics)
            lease = self._lease = GatewayLease(context)
            await lease.begin()
            if self.options.most_sessions:
                await context.sessions.count()
            await context.registry.catch_up()  # from here on the router knows which subscriptions are new
            async with self._routing(opened, context):
                servers = [await listen(context, address) for address in addresses]
                self.ports = [each.getsockname()[1] for server in servers for each in server.sockets]
                log.info("gateway %s listens on %s", context.sessions.gateway, ", ".join(self.listen))
                await self._tell_about(context, opened)
                task_status.started()
                async with anyio.create_task_group() as upkeep:
                    upkeep.start_soon(lease.keep)
                    for role in (self._turn, self._keep_routes, self._keep_pressure):
                        upkeep.start_soon(role, context, opened)
                    if self.options.sys_interval:
                        told = SysTopics(opened.client, self._broker.keys, self._deliver_locally)
                        upkeep.start_soon(told.run, context)
                    await self._stopping.wait()
                    upkeep.cancel_scope.cancel()
                await self._end(context, servers)
            tasks.cancel_scope.cancel()
        self.is_ended = True

    def _build(
        self, opened: Connection, gatekeeper: Gatekeeper, spawn: Callable[[Coroutine[Any, Any, None]], object]
    ) -> Context:
        """All parts of this gateway."""
        client, inboxes, keys = opened.client, opened.inboxes, self._broker.keys
        batcher = inboxes.batcher
        gateway = inboxes.gateway  # the same name as in the sessions of its clients
        registry = Registry(client, keys, batcher)
        shares = Shares(client, keys, registry, inboxes.writer)
        wills = Wills(client, keys, batcher, lambda *will: publish_will(context, *will))
        retained = Retained(client, keys, batcher, self.options.most_retained)
        ingest = Ingest(opened.producer, client, keys, batcher, retained, spawn, self.now_ms, self.timings)
        largest = int(self._broker.settings.payload_limit) + PACKET_SLACK
        limits = ClientLimits(
            min(self.options.most_packet_bytes or largest, largest), self.options.receive_maximum,
            self.options.topic_aliases,
        )  # fmt: skip
        context = Context(
            self.options, limits, gatekeeper, inboxes, registry, retained, ingest,
            Sessions(client, keys, batcher, registry, shares, wills, gateway), shares, self.routes, spawn,
            self._broadcast, self.now_ms, self.timings, proxies=networks(self.options.proxies),
        )  # fmt: skip
        self.router = MqttRouter(registry, lambda: inboxes.writer)
        inboxes.writer.patience = self.options.full_inbox_wait.total_seconds()
        inboxes.writer.on_dropped = lambda _client, number: context.counts.update({"dropped: full inbox": number})
        pressure = ingest.pressure = Pressure(
            self.router, lambda names: self._others.order(HOLD, " ".join(names)), asyncio.get_running_loop().time
        )
        orders = {KICK: self._kick, HOLD: lambda names: pressure.hold(names.split())}
        self._others = Broadcast(
            client, keys.broadcast, keys.gateway_alive(gateway), batcher, gateway, self._deliver_locally, orders,
            lambda: context.counts.update({"dropped: other gateways, QoS 0": 1}),
        )  # fmt: skip
        return context

    @asynccontextmanager
    async def _routing(self, opened: Connection, context: Context) -> AsyncIterator[None]:
        """A worker whose handlers are routers, beside the listeners."""
        topics = self.routes.topics()
        assert self.router is not None
        handlers = [self.router.handler(topic) for topic in topics]
        worker = Worker(opened.connector, opened.client, self._broker.keys, handlers, (), ())
        async with own_tasks() as tasks:
            await tasks.start(worker.run)
            try:
                yield
            finally:
                worker.stop(END_SECONDS)

    async def _end(self, context: Context, servers: Sequence[asyncio.Server | ProxiedServer]) -> None:
        """Close the listeners and all connections. Their sessions are kept for the next gateway."""
        for server in servers:
            server.close()
        connections: list[ClientConnection] = list(context.connections.values())
        for each in connections:
            each.close(ReasonCode.SERVER_SHUTTING_DOWN)
        with anyio.move_on_after(END_SECONDS, shield=True):
            while context.ending:
                await anyio.sleep(0.01)
            try:
                await context.sessions.beat(0)
            except BrokerError as error:
                log.info("this gateway could not leave: %s", error)

    def stop(self) -> None:
        """Stop: close the connections, and leave the fleet."""
        self._stopping.set()

    def reload(self) -> None:
        """Read the files again: passwords, rights, keys of tokens, certificates. Connections stay.

        Rights count at once. Clients whose user is gone, or has another password, are disconnected. Raises ConfigError
        for a wrong file: then what was read before stays.
        """
        if self.gatekeeper is None or self.context is None:
            return
        gone = self.gatekeeper.load()
        for each in list(self.context.connections.values()):
            each.rights.clear()
            if each.user in gone:
                each.close(ReasonCode.NOT_AUTHORIZED, "its user is gone, or has another password")
        log.info("the files are read again")

    # -- QoS 0 -----------------------------------------------------------------------------------------------------

    def _broadcast(self, message: Published) -> None:
        chosen = self._choose(message)
        self._deliver_locally(message, chosen)
        self._others.send(message, chosen)

    def _choose(self, message: Published) -> dict[str, str]:
        """The member of each share that gets a message of QoS 0. Only connected ones can."""
        assert self.context is not None
        registry, chosen = self.context.registry, dict[str, str]()
        if registry.shares:
            self._passed_on += 1
            for _, subscription in registry.tree.match(message.topic):
                if (share := subscription.filter) in registry.shares:
                    chosen[share] = choose(str(self._passed_on), registry.shares[share], registry.offline)
        return chosen

    def _deliver_locally(self, message: Published, chosen: Mapping[str, str]) -> None:
        """Pass a message of QoS 0 to the clients that are connected here. `chosen`: the member of each share."""
        assert self.context is not None
        for share, member in chosen.items():
            client = self.context.connections.get(member)
            if client is not None and (subscription := client.subscriptions.get(share)) is not None:
                client.direct(
                    message, retain=subscription.retain_as_published and message.retain,
                    identifiers=(subscription.identifier,) if subscription.identifier else (),
                )  # fmt: skip
        found = defaultdict[Any, list[Subscription]](list)
        for client, subscription in self.context.local.match(message.topic):
            if not (subscription.no_local and client.client_id == message.client):
                found[client].append(subscription)
        for client, subscriptions in found.items():
            copy = combine(message, subscriptions)
            assert copy is not None, "a subscriber has a subscription"
            client.direct(message, retain=copy.retain, identifiers=copy.identifiers)

    def _kick(self, client_id: str) -> None:
        """An operator ends the connection of a client."""
        assert self.context is not None
        client = self.context.connections.get(client_id)
        if client is not None:
            self.context.counts["kicked"] += 1
            client.close(ReasonCode.ADMINISTRATIVE_ACTION, "an operator has ended the connection")

    # -- upkeep ----------------------------------------------------------------------------------------------------

    def now_ms(self) -> int:
        """The server's clock, as of the last beat."""
        assert self.context is not None
        return self.context.sessions.now_ms

    async def _turn(self, context: Context, _opened: Connection) -> None:
        """Deadlines, polls of inboxes, wills that are due, and sessions that expire."""
        poll = self._broker.settings.inbox_poll.total_seconds()
        polled, turns = monotonic(), 0
        while True:
            await anyio.sleep(TURN)
            context.wheel.turn(context.loop_time)
            if monotonic() - polled >= poll:
                polled = monotonic()
                for each in list(context.connections.values()):
                    each.poll()
            turns += 1
            try:
                await context.sessions.wills.fire()
                await context.registry.catch_up()
                if turns % SWEEP_TURNS == 0:
                    await context.sessions.sweep()
            except BrokerError as error:
                log.info("wills and expired sessions wait for the server: %s", error)

    async def _keep_pressure(self, context: Context, _opened: Connection) -> None:
        """Slow publishers down where the router lags."""
        while context.ingest.pressure is not None:
            await anyio.sleep(PRESSURE_TURN)
            context.ingest.pressure.turn(self.now_ms())

    async def _tell_about(self, context: Context, opened: Connection) -> None:
        """Say what this gateway does, for the doctor."""
        key = self._broker.keys.gateway_about(context.sessions.gateway)
        self._started_ms = self._started_ms or self.now_ms()
        assert self._lease is not None
        await self._lease.look_up()
        said = about(
            self.options, self.listen, list(self.routes), totals(context.counts), self._started_ms, self._lease.server
        )
        await opened.client.execute_command("SET", key, said, "EX", ABOUT_SECONDS)

    async def _keep_routes(self, context: Context, opened: Connection) -> None:
        """Look the topics up again: their limits may change."""
        while True:
            await anyio.sleep(SWEEP_TURNS * TURN)
            try:
                await self.routes.look_up(opened.topics)
                await self._tell_about(context, opened)
                if self.options.most_sessions:
                    await context.sessions.count()
            except BrokerError as error:
                log.info("topics wait for the server: %s", error)

    def __repr__(self) -> str:
        number = len(self.context.connections) if self.context else 0
        return f"<Gateway {', '.join(self.listen)} connections={number}>"


async def guarded(work: Coroutine[Any, Any, None], context: Context) -> None:
    """Work for one connection: whatever goes wrong there ends neither the gateway nor other connections."""
    context.ending += 1
    try:
        await work
    except Exception:
        context.counts["failed: unexpected"] += 1
        log.exception("a connection's task failed")
    finally:
        context.ending -= 1
