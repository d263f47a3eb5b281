"""A run with MQTT gateways: clients publish and subscribe through any of them, and remember what they sent and got.

The clients live in the process of the test, outside the gateways and the server: they are the ledger.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any, ClassVar

from rsmq import BrokerError
from tests.chaos.checker import Finding, History, Name, Verdict, check
from tests.chaos.ledger import Event
from tests.chaos.release import NEW, Release
from tests.chaos.scenario_run import ScenarioRun
from tests.chaos.worker import TOPIC
from tests.gateway.ledger import Publisher, Roamer, Subscriber
from tests.gateway.process import GatewayProcess

QOS = (1, 2)
AT_LEAST_ONCE = "at least once"
LEASE = 2
"""Seconds that a gateway may be paused or cut off before the others end its connections."""
SECONDS = 120.0
"""No run needs as long after its last fault."""


class LedgerSubscriber(Subscriber):
    """Notes when each message came. `number` stands for a process id."""

    def __init__(self, ports: list[int], client_id: str, number: int) -> None:
        super().__init__(ports, client_id, number)
        self.ports, self.number = ports, number
        self.events: list[Event] = []

    def received(self, payload: bytes) -> None:
        super().received(payload)
        found = json.loads(payload)
        self.events.append(Event("commit", self.number, time.monotonic(), found["key"], found["n"]))


class GatewayRun(ScenarioRun):
    """Gateways on one server. Each client publishes in order, at QoS 1 or 2, to a topic with a handler.

    One subscriber for each QoS gets all of it, too. `ports` are those of the gateways that run, for all clients.
    """

    has_till: ClassVar[bool] = False

    def __init__(self, *args: Any, gateway_url: str = "", **job: Any) -> None:
        super().__init__(*args, **job)
        self._gateway_url = gateway_url or self.job.url
        self.gateways: list[GatewayProcess] = []
        self.ports: list[int] = []
        self.subscribers = {qos: LedgerSubscriber(self.ports, f"reader-{qos}", qos) for qos in QOS}
        self._names: dict[int, set[Name]] = {qos: set() for qos in QOS}
        self._tasks: list[asyncio.Task[None]] = []
        self.clients: list[Roamer] = list(self.subscribers.values())
        self.is_watched = False  # a gateway that is killed leaves the sessions of its clients, as it must

    # -- gateways --------------------------------------------------------------------------------------------------

    async def start_gateways(self, count: int, release: Release = NEW) -> list[GatewayProcess]:
        """Start gateways of a release, and let clients connect to them."""
        environment = None if release is NEW else release.environment
        new = [
            GatewayProcess(
                self._gateway_url, self.job.prefix, routes={"work/#": TOPIC}, lease=LEASE,
                settings={"lease_ttl": "PT2S", "presence_grace": "PT0.5S", "presence_interval": "PT0.1S"},
                environment=environment,
            )
            for _ in range(count)
        ]  # fmt: skip
        self.gateways += new
        for each in new:
            self.ports.append(await asyncio.to_thread(lambda each=each: each.port))
        return new

    async def kill(self, victim: GatewayProcess) -> None:
        """SIGKILL. Its clients go elsewhere."""
        self._leaves(victim)
        await asyncio.to_thread(victim.kill)

    async def stop(self, leaver: GatewayProcess) -> None:
        """SIGTERM, and wait for its end. Its clients go elsewhere."""
        self._leaves(leaver)
        assert await asyncio.to_thread(leaver.stop) == 0, leaver.log()

    def _leaves(self, one: GatewayProcess) -> None:
        self.ports.remove(one.port)
        self.gateways.remove(one)

    def holding(self, client_id: str) -> GatewayProcess:
        """The gateway that a client is connected to; any one if it is connecting."""
        port = next((each.port_now for each in self.clients if each.client_id == client_id), 0)
        return next((each for each in self.gateways if each.port == port), self.gateways[0])

    async def routing(self) -> GatewayProcess:
        """The gateway whose router owns the most partitions."""
        keys = [self.broker.keys.lease(TOPIC, n, "mqtt") for n in range((await self._found_topic()).partitions)]
        try:
            owners = [await self.broker.client.execute_command("HGET", key, "owner") or b"" for key in keys]
        except BrokerError:  # the master has just been replaced
            owners = []
        counts = {each: sum(b"-%d-" % each.pid in owner for owner in owners) for each in self.gateways}
        return max(self.gateways, key=lambda each: counts[each])

    # -- clients ---------------------------------------------------------------------------------------------------

    async def publish_all(self, count: int, publishers: int = 2) -> None:
        """Subscribe, and publish so many messages from each of some clients of each QoS."""
        total = count * publishers * len(QOS)
        for subscriber in self.subscribers.values():
            self._tasks.append(asyncio.create_task(subscriber.collect("work/#", total, subscriber.number)))
            await subscriber.ready.wait()
        for qos in QOS:
            for number in range(publishers):
                key = f"q{qos}-{number}"
                publisher = Publisher(self.ports, key, number)
                publisher.ports = self.ports
                self.clients.append(publisher)
                payloads = [json.dumps({"key": key, "n": n}).encode() for n in range(count)]
                self._names[qos] |= {(key, n) for n in range(count)}
                self._tasks.append(asyncio.create_task(publisher.publish(f"work/{key}", payloads, qos)))

    @property
    def received(self) -> int:
        """How many messages the slowest receiver has."""
        return min(len(self.ledger.commits()), *(len(set(each.got)) for each in self.subscribers.values()))

    async def reaches(self, count: int) -> None:
        """Wait until every receiver has so many different messages."""
        await self.until(lambda: self._is_broken() or self.received >= count, f"{count} messages are received", SECONDS)
        if self._is_broken():
            await asyncio.gather(*self._tasks)

    def _is_broken(self) -> bool:
        return any(task.done() and task.exception() is not None for task in self._tasks)

    async def recovers(self, seconds: float = SECONDS) -> None:
        """After a fault, wait until every receiver has got something new, and record how long that took."""
        since, seen = time.monotonic(), [len(each.events) for each in self.subscribers.values()]
        handled = len(self.ledger.commits())

        def is_over() -> bool:
            news = [len(each.events) for each in self.subscribers.values()]
            done = all(task.done() for task in self._tasks)
            return (
                self._is_broken()
                or done
                or (
                    all(new > old for new, old in zip(news, seen, strict=True)) and len(self.ledger.commits()) > handled
                )
            )

        await self.until(is_over, "messages are received again", seconds)
        self.recovered = max(self.recovered, time.monotonic() - since)

    async def published(self) -> None:
        """Wait until everything is acknowledged."""
        await asyncio.gather(*self._tasks[len(self.subscribers) :])

    async def stored(self) -> tuple[set[Name], set[Name]]:
        """The messages that the topic has, and those that the server has lost."""
        found = set[Name]()
        for number in range((await self._found_topic()).partitions):
            for _, fields in await self.broker.client.execute_command(
                "XRANGE", self.broker.keys.stream(TOPIC, number), "-", "+"
            ):
                order = json.loads(dict(zip(fields[::2], fields[1::2], strict=True))[b"data"])
                found.add((order["key"], order["n"]))
        return found, set[Name]().union(*self._names.values()) - found

    # -- the end ---------------------------------------------------------------------------------------------------

    async def judge(self) -> Verdict:
        """Wait until all clients are done, and everything is settled. Each receiver is judged by itself."""
        async with asyncio.timeout(SECONDS):
            await asyncio.gather(*self._tasks)
        await self.until(lambda: len(self.ledger.commits()) >= sum(map(len, self._names.values())), "all is handled")
        await self.until_settled()
        dead = await self.dead()
        handled = list(self.ledger.events())
        findings, number = list[Finding](), 0
        for events, once in (
            (handled, False),
            *((each.events, each.number == 2) for each in self.subscribers.values()),
        ):
            for qos, names in self._names.items():
                history = History(stored=names, events=[each for each in events if (each.key, each.n) in names])
                if qos == 1:  # its publisher may have stored it twice, under two stream ids
                    history.rewound = AT_LEAST_ONCE
                if not (once and qos == 2):
                    history.excused = {each.pid: AT_LEAST_ONCE for each in history.events}
                if events is handled:
                    history.dead, history.holds = dead, self.history.holds
                verdict = check(history)
                findings += verdict.findings
                number += verdict.handled
        verdict = Verdict(findings, number)
        if verdict.faults:
            print(*(each.log() for each in self.gateways), self.processes.log(20_000), sep="\n")
        return verdict

    async def __aexit__(self, *error: Any) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for each in self.gateways:
            if error[0] is not None:
                print(each.log()[-10_000:])
            await asyncio.to_thread(each.kill)
        await super().__aexit__(*error)
