"""The gateway: what runs in one process, how it starts, and how it ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from inspect import iscoroutinefunction
from typing import Final

import anyio
import anyio.abc

from rsmq.broker.broker import Broker
from rsmq.broker.connection import Connection, connection
from rsmq.errors import BrokerError, ConfigError
from rsmq.gateway.about import about
from rsmq.gateway.connections.auth import Authenticate, Authorize, Gatekeeper
from rsmq.gateway.connections.clients import Clients
from rsmq.gateway.connections.context import Context
from rsmq.gateway.connections.counts import Counts
from rsmq.gateway.connections.ingest import Ingest
from rsmq.gateway.connections.listener import listen
from rsmq.gateway.connections.peer import networks
from rsmq.gateway.connections.pressure import PRESSURE_TURN, Pressure
from rsmq.gateway.connections.proxied import ProxiedServer
from rsmq.gateway.connections.publishing import WillPublisher
from rsmq.gateway.connections.rules import GatewayRules
from rsmq.gateway.connections.tasks import ConnectionTasks
from rsmq.gateway.connections.tracing import Watches
from rsmq.gateway.connections.unstored import Unstored
from rsmq.gateway.fleet.broadcast import Broadcast
from rsmq.gateway.fleet.client_acks import ClientAcks
from rsmq.gateway.fleet.message import Timings
from rsmq.gateway.fleet.registry import Registry
from rsmq.gateway.fleet.retained import Retained
from rsmq.gateway.fleet.router import MqttRouter
from rsmq.gateway.fleet.routes import Routes
from rsmq.gateway.fleet.sessions import Sessions
from rsmq.gateway.fleet.shares import KeptChoices, Shares
from rsmq.gateway.fleet.state import FleetState
from rsmq.gateway.fleet.wills import Wills
from rsmq.gateway.lease import GatewayLease
from rsmq.gateway.options import GatewayOptions, split_listen, tls_context
from rsmq.gateway.protocol.machine import ClientLimits
from rsmq.gateway.protocol.packet import ReasonCode
from rsmq.gateway.sys_topics import SysTopics, totals
from rsmq.model.clock import ServerClock, monotonic
from rsmq.model.encoding import NO_CODECS, Encoding
from rsmq.model.keys import Keys
from rsmq.model.own_tasks import own_tasks
from rsmq.persistence.mqtt_bans import BANS, BanList, MqttBans
from rsmq.persistence.mqtt_clients import BROADCAST, KICK
from rsmq.persistence.mqtt_traces import TRACE
from rsmq.producer import Producer
from rsmq.redis.client.refusals import Refusals
from rsmq.redis.client.script_batcher import ScriptBatcher
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
        self._authenticate: Authenticate | None = None
        self._authorize: Authorize | None = None
        self.context: Context | None = None
        self.ports: list[int] = []
        """The ports it listens on, once it runs."""
        self.is_ended = False
        self._timings: Timings | None = None
        self.router: MqttRouter | None = None
        self.pressure: Pressure | None = None
        self._stopping = anyio.Event()
        self._lease: GatewayLease | None = None
        self._refusals: Refusals | None = None
        self._started_ms = 0
        """By the server's clock; 0 before it runs."""

    # -- registering -----------------------------------------------------------------------------------------------

    def route(
        self, pattern: str, *, topic: str, subscribers: bool = True, band: str | None = None, plain: bool = False
    ) -> None:
        """Store the messages whose topic name matches in a topic of rsmq; the first route that matches counts.

        `band`: one that the topic has, such as `urgent`: they do not wait behind the others. With `subscribers=False`
        handlers get them, but no MQTT client. Everything else goes to the topic `mqtt`.

        Letters and retained messages are encoded by the codecs of the broker, as messages in topics are. With `plain`
        those of this topic lie in the server as they were published.
        """
        self.routes.add(pattern, topic, subscribers=subscribers, band=band, is_plain=plain)

    def authenticate(self, function: Authenticate) -> Authenticate:
        """Register `async def (client_id, user, password) -> bool`: whether a client may connect."""
        self._authenticate = function
        return function

    def authorize(self, function: Authorize) -> Authorize:
        """Register `def (client_id, user, "read" or "write", topic name or filter) -> bool`."""
        if iscoroutinefunction(function):
            name = getattr(function, "__name__", "it")
            raise ConfigError(f"{name} is async, and would allow everything: write def, not async def")
        self._authorize = function
        return function

    # -- running ---------------------------------------------------------------------------------------------------

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Serve until `stop` or cancellation."""
        addresses = [split_listen(each) for each in self.listen]
        gatekeeper = Gatekeeper(self.options, self._authenticate, self._authorize)
        gatekeeper.require_some()
        networks(self.options.proxies)
        if any(each.is_encrypted for each in addresses):
            tls_context(self.options)  # a wrong certificate ends the start before anything is connected
        settings, counts = self._broker.settings, Counts()
        make_producer = partial(Producer, encoding=self._broker.encoding or None)
        async with connection(
            settings, self._broker.keys, declared=self._broker.declared, make_producer=make_producer,
            publishes_only=False, encoding=self._broker.encoding,
        ) as opened, own_tasks() as tasks, ConnectionTasks(counts) as connection_tasks:  # fmt: skip
            self._refusals = opened.connector.refusals
            context = self.context = self._build(opened, gatekeeper, connection_tasks, counts)
            tasks.start_soon(self._others.run)
            await self.routes.look_up(opened.topics)
            lease = self._lease = GatewayLease(context)
            await lease.begin()
            if self.options.most_sessions:
                await context.fleet.sessions.count()
            await context.fleet.registry.catch_up()  # from here on the router knows which subscriptions are new
            await self._keep_bans(context.clients, MqttBans(opened.client, self._broker.keys), context.fleet.clock)
            async with self._routing(opened, context):
                servers = [await listen(context, address) for address in addresses]
                self.ports = [each.getsockname()[1] for server in servers for each in server.sockets]
                log.info("gateway %s listens on %s", context.fleet.sessions.gateway, ", ".join(self.listen))
                await self._tell_about(context, opened)
                task_status.started()
                async with anyio.create_task_group() as upkeep:
                    upkeep.start_soon(lease.keep)
                    for role in (self._turn, self._keep_routes, self._keep_pressure):
                        upkeep.start_soon(role, context, opened)
                    if self.options.sys_interval:
                        told = SysTopics(opened.client, self._broker.keys, context.clients.deliver)
                        upkeep.start_soon(told.run, context)
                    await self._stopping.wait()
                    upkeep.cancel_scope.cancel()
                await self._end(context, servers, connection_tasks)
            tasks.cancel_scope.cancel()
        self.is_ended = True

    def _build(self, opened: Connection, gatekeeper: Gatekeeper, tasks: ConnectionTasks, counts: Counts) -> Context:
        """All parts of this gateway, from the ground up: each gets what it needs, which is there already."""
        options, keys, client, inboxes = self.options, self._broker.keys, opened.client, opened.inboxes
        batcher, writer = inboxes.batcher, inboxes.writer
        gateway = inboxes.gateway  # the same name as in the sessions of its clients
        writer.wait_for_readers(options.full_inbox_wait.total_seconds(), partial(counts.dropped, "full inbox"))
        rules = self._rules(gatekeeper)
        clock = ServerClock()
        registry = Registry(client, keys, batcher)
        encoding = self._broker.encoding
        retained = Retained(
            client, keys, batcher, options.most_retained, self._encoding_of if encoding.names else None
        )  # fmt: skip
        shares = Shares(client, keys, registry, writer)
        clients = Clients(options, counts, Watches(clock.now_ms, partial(tell, batcher, keys)))

        others = self._others = Broadcast(
            client, keys.broadcast, keys.gateway_alive(gateway), batcher, gateway, clients.deliver,
            partial(counts.dropped, "other gateways, QoS 0"), encoding,
        )  # fmt: skip
        router = self.router = MqttRouter(
            registry, writer, retained, KeptChoices(keys, batcher), clock.now_ms,
            self._encoding_in if encoding.names else None,
        )  # fmt: skip
        pressure = self.pressure = Pressure(
            router, lambda names: others.order(HOLD, " ".join(names)), asyncio.get_running_loop().time
        )
        others.obey(KICK, clients.kick)
        others.obey(BANS, lambda _: tasks.spawn(self._keep_bans(clients, MqttBans(client, keys), clock)))
        others.obey(TRACE, clients.trace)
        others.obey(HOLD, lambda names: pressure.hold(names.split()))

        ingest = Ingest(opened.producer, client, keys, retained, pressure, tasks.spawn, clock.now_ms, self._timings)
        unstored = Unstored(clients, registry, others)
        wills = Wills(client, keys, batcher, WillPublisher(rules, counts, ingest).publish, encoding)
        sessions = Sessions(client, keys, batcher, registry, shares, wills, gateway, clock, tasks.spawn)
        acks = ClientAcks(inboxes.batcher, is_cluster=client.is_cluster)
        fleet = FleetState(clock, inboxes, acks, registry, retained, shares, wills, sessions)
        return Context(rules, fleet, clients, ingest, unstored, counts, tasks.spawn, self._timings)

    def _encoding_in(self, topic: str) -> Encoding:
        """What encodes the letters of a topic."""
        return NO_CODECS if self.routes.is_plain(topic) else self._broker.encoding

    def _encoding_of(self, name: str) -> Encoding:
        """What encodes the retained message of a topic name."""
        return NO_CODECS if self.routes.find(name).is_plain else self._broker.encoding

    def _rules(self, gatekeeper: Gatekeeper) -> GatewayRules:
        options = self.options
        largest = int(self._broker.settings.payload_limit) + PACKET_SLACK
        limits = ClientLimits(
            min(options.most_packet_bytes or largest, largest), options.receive_maximum, options.topic_aliases
        )
        return GatewayRules(options, limits, gatekeeper, self.routes, networks(options.proxies))

    @asynccontextmanager
    async def _routing(self, opened: Connection, context: Context) -> AsyncIterator[None]:
        """A worker whose handlers are routers, beside the listeners."""
        topics = self.routes.topics()
        assert self.router is not None
        handlers = [self.router.handler(topic) for topic in topics]
        worker = Worker(
            opened.connector, opened.client, self._broker.keys, handlers, (), (), encoding=self._broker.encoding
        )  # fmt: skip
        async with own_tasks() as tasks:
            await tasks.start(worker.run)
            try:
                yield
            finally:
                worker.stop(END_SECONDS)

    async def _end(
        self, context: Context, servers: Sequence[asyncio.Server | ProxiedServer], tasks: ConnectionTasks
    ) -> None:
        """Close the listeners and all connections. Their sessions are kept for the next gateway."""
        for server in servers:
            server.close()
        context.clients.close(ReasonCode.SERVER_SHUTTING_DOWN)
        with anyio.move_on_after(END_SECONDS, shield=True):
            while tasks.running:
                await anyio.sleep(0.01)
            try:
                await context.fleet.sessions.beat(0)
            except BrokerError as error:
                log.info("this gateway could not leave: %s", error)

    def troubles(self) -> list[str]:
        """Why it should get no new clients now; empty if it may. From any thread."""
        if self._lease is None or self._refusals is None or not self.ports or self.is_ended:
            return ["it does not listen"]
        if self._stopping.is_set():
            return ["it is stopping"]
        lease = self._lease.trouble
        return [*([lease] if lease else []), *self._refusals.standing(self.options.lease.total_seconds())]

    def stop(self) -> None:
        """Stop: close the connections, and leave the fleet."""
        self._stopping.set()

    def reload(self) -> None:
        """Read the files again: passwords, rights, keys of tokens, certificates. Connections stay.

        Rights count at once. Clients whose user is gone, or has another password, are disconnected. Raises ConfigError
        for a wrong file: then what was read before stays.
        """
        if self.context is None:
            return
        self.context.clients.rights_changed(self.context.rules.gatekeeper.load())
        log.info("the files are read again")

    # -- upkeep ----------------------------------------------------------------------------------------------------

    async def _turn(self, context: Context, _opened: Connection) -> None:
        """Deadlines, polls of inboxes, wills that are due, and sessions that expire."""
        poll = self._broker.settings.inbox_poll.total_seconds()
        polled, turns = monotonic(), 0
        while True:
            await anyio.sleep(TURN)
            context.clients.wheel.turn()
            if monotonic() - polled >= poll:
                polled = monotonic()
                context.clients.poll()
            turns += 1
            try:
                await context.fleet.wills.fire()
                await context.fleet.registry.catch_up()
                if turns % SWEEP_TURNS == 0:
                    await context.fleet.sessions.sweep()
            except BrokerError as error:
                log.info("wills and expired sessions wait for the server: %s", error)

    async def _keep_pressure(self, context: Context, _opened: Connection) -> None:
        """Slow publishers down where the router lags."""
        assert self.pressure is not None
        while True:
            await anyio.sleep(PRESSURE_TURN)
            self.pressure.turn(context.fleet.clock.now_ms())

    async def _tell_about(self, context: Context, opened: Connection) -> None:
        """Say what this gateway does, for the doctor."""
        key = self._broker.keys.gateway_about(context.fleet.sessions.gateway)
        self._started_ms = self._started_ms or context.fleet.clock.now_ms()
        said = about(
            self.options, self.listen, list(self.routes), totals(context.counts), self._started_ms,
            context.fleet.sessions.server, context.counts.held,
        )  # fmt: skip
        await opened.client.execute_command("SET", key, said, "EX", ABOUT_SECONDS)

    @staticmethod
    async def _keep_bans(clients: Clients, bans: MqttBans, clock: ServerClock) -> None:
        """Read the bans; while the server does not answer, those that were read last are in force."""
        try:
            clients.ban(BanList(await bans.in_force()), clock.now_ms())
        except BrokerError as error:
            log.info("bans wait for the server: %s", error)

    async def _keep_routes(self, context: Context, opened: Connection) -> None:
        """Look the topics up again: their limits may change."""
        while True:
            await anyio.sleep(SWEEP_TURNS * TURN)
            try:
                await self.routes.look_up(opened.topics)
                await self._tell_about(context, opened)
                await self._keep_bans(context.clients, MqttBans(opened.client, self._broker.keys), context.fleet.clock)
                if self.options.most_sessions:
                    await context.fleet.sessions.count()
            except BrokerError as error:
                log.info("topics wait for the server: %s", error)

    def __repr__(self) -> str:
        number = len(self.context.clients.connections) if self.context else 0
        return f"<Gateway {', '.join(self.listen)} connections={number}>"


def tell(batcher: ScriptBatcher, keys: Keys, token: str, lines: bytes) -> None:
    """Send lines to an operator who watches a client. They may get lost."""
    batcher.submit(BROADCAST, (keys.trace(token),), (lines,)).add_done_callback(asyncio.Future.exception)


def measure(gateway: Gateway, timings: Timings) -> None:
    """Give `timings` how long the messages of a gateway take to be stored and delivered. Before it runs."""
    gateway._timings = timings
