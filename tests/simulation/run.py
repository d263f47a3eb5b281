"""One run: workers and a publisher in simulated processes, and the verdict of the chaos suite over what they did."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import anyio
from tenacity import wait_fixed

from rsmq import Broker, Message, Retry, RetryPolicy, Settings
from rsmq.errors import RsmqError
from rsmq.heartbeat.lease import Lease
from tests.chaos.checker import History, Name, check
from tests.chaos.ledger import Event, What
from tests.simulation.faults import Fates
from tests.simulation.network import Network
from tests.simulation.plan import Plan
from tests.simulation.process import Process
from tests.simulation.world import World

TOPIC: Final = "orders"
GROUP: Final = "billing"


@dataclass
class Member:
    """A worker process. `number` is its pid in the ledger."""

    number: int
    process: Process
    broker: Broker
    is_stopping: bool = False

    @property
    def is_available(self) -> bool:
        """Whether a fault can strike it."""
        return self.process.runs and not self.is_stopping and not self.process.is_over

    def leases(self) -> Iterator[Lease]:
        """Those that it believes in while its code runs."""
        worker = self.broker.worker if self.process.runs else None
        for consumer in worker.consumers if worker is not None else ():
            for lane in consumer.lanes.values():
                if lane.lease.epoch and lane.lease.is_held():
                    yield lane.lease


class Run:
    """The processes of a run, and its ledger."""

    def __init__(self, plan: Plan, world: World, network: Network) -> None:
        self.plan, self.world, self.network = plan, world, network
        self.members: list[Member] = []
        self.fates = Fates(self)
        self.violations: list[str] = []
        self._events: list[Event] = []
        self._stored, self._unknown = set[Name](), set[Name]()
        self._is_published = False
        self._asked_at = 0.0
        network.after_command = self._check_leases

    def play(self) -> None:
        """From the start of all processes until everything is settled."""
        for _ in range(self.plan.members):
            self.start_member()
        publisher = Process(self.world, self.network, "p")
        publisher.start(self._publish())
        self.fates.plan()
        self.world.run(self.plan.seconds + self.plan.patience, self._is_over)
        for process in (*(member.process for member in self.members), publisher):
            self.violations += [f"{process.name} ended with {process.error!r}"] if process.error else []

    def findings(self) -> list[str]:
        """Every broken promise."""
        history = History(
            stored=self._stored, unknown=self._unknown, events=self._events, excused=self.fates.excused,
            holds=self._holds(), is_ordered=self.plan.ordering != "none",
        )  # fmt: skip
        return [*map(str, check(history).faults), *dict.fromkeys([*self.violations, *self.network.fences.violations])]

    @property
    def summary(self) -> str:
        """What was done."""
        handled = {(event.key, event.n) for event in self._events if event.what == "commit"}
        return f"{len(self._stored)} published, {len(handled)} handled"

    def _note(self, what: What, name: Name, member: int = 0, attempt: int = 0) -> None:
        self._events.append(Event(what, member, self.world.now, *name, attempt))
        self.world.note(f"   {what} {name[0]}/{name[1]} in m{member}, attempt {attempt}")

    # -- the processes ----------------------------------------------------------------------------------------------

    def _settings(self) -> Settings:
        plan = self.plan
        return Settings(
            url="unix:///simulated", prefix="sim", partitions=plan.partitions, preflight="warn",
            lease_ttl=timedelta(seconds=plan.lease), stop_grace=timedelta(seconds=5), prefetch=plan.prefetch,
            retention_age=timedelta(seconds=plan.retention), retention_length=60,
            retention_interval=timedelta(seconds=0.5),
        )  # fmt: skip

    def start_member(self) -> None:
        """Start a worker in a process of its own."""
        number = len(self.members) + 1
        process = Process(self.world, self.network, f"m{number}")
        member = Member(number, process, Broker(self._settings()))
        self.members.append(member)
        self._register(member)
        process.start(self._serve(member))

    async def _serve(self, member: Member) -> None:
        await member.broker.run()
        self.world.note(f"m{member.number} has ended")

    def _register(self, member: Member) -> None:
        plan, choices, counts = self.plan, self.world.choices, Counter[Name]()

        async def handle_one(payload: Any, message: Message) -> None:
            name = (payload["key"], payload["n"])
            counts[name] += 1
            label = f"m{member.number} {name[0]}/{name[1]} {counts[name]}"
            self._note("start", name, member.number, message.attempt)
            if not plan.batch and not message.origin.lease.is_held():
                self.violations.append(f"m{member.number} starts {name} after its lease")
            if plan.busy:
                await anyio.sleep(choices.between(0, plan.busy, f"work: {label}"))
            if choices.unit(f"fails: {label}") < plan.failing:
                self._note("fail", name, member.number, message.attempt)
                raise Retry("once more")
            self._note("commit", name, member.number, message.attempt)

        async def handle(order: dict[str, Any], message: Message) -> None:
            await handle_one(order, message)

        async def handle_batch(orders: list[dict[str, Any]], messages: list[Message]) -> list[Exception | None]:
            """One after the other; what follows a failed message of the same key (or partition) is left for later."""
            outcomes, failed = list[Exception | None](), set[str]()
            for order, message in zip(orders, messages, strict=True):
                lane = order["key"] if plan.ordering == "key" else "all" if plan.ordering == "partition" else ""
                outcome: Exception | None = Retry("after the one before") if lane in failed else None
                if outcome is None:
                    try:
                        await handle_one(order, message)
                    except Retry as error:
                        outcome = error
                        failed |= {lane} - {""}
                outcomes.append(outcome)
            return outcomes

        options: dict[str, Any] = {"batch": plan.batch} if plan.batch else {"concurrency": plan.concurrency}
        member.broker.handler(
            TOPIC, group=GROUP, ordering=plan.ordering, distribution=plan.distribution,
            retry=RetryPolicy(max_attempts=50, wait=wait_fixed(0.3)), **options,
        )(handle_batch if plan.batch else handle)  # fmt: skip

    async def _publish(self) -> None:
        choices, plan, numbers = self.world.choices, self.plan, defaultdict[str, int](int)
        async with Broker(self._settings()) as broker, anyio.create_task_group() as tasks:
            for n in range(plan.messages):
                key = f"k{int(choices.unit(f'key {n}') * plan.keys)}"
                name = (key, numbers[key])
                numbers[key] += 1
                tasks.start_soon(self._publish_one, broker, name)
                if n % plan.burst == 0:
                    span = 2 * plan.seconds * plan.burst / plan.messages
                    await anyio.sleep(choices.between(0, span, f"pause {n}"))
        self._is_published = True

    async def _publish_one(self, broker: Broker, name: Name) -> None:
        choices, options = self.world.choices, dict[str, Any]()
        if choices.unit(f"delayed {name}") < self.plan.delayed:
            options["delay"] = timedelta(seconds=choices.between(0.1, 3, f"delay {name}"))
        try:
            await broker.publish(TOPIC, {"key": name[0], "n": name[1]}, key=name[0], **options)
            self._stored.add(name)
        except RsmqError as error:
            self.world.note(f"   publishing {name} failed: {error!r}")
            self._unknown.add(name)

    # -- what must hold ---------------------------------------------------------------------------------------------

    def _check_leases(self) -> None:
        """Two members never believe in the same lease at the same moment."""
        owners: dict[int, str] = {}
        for member in self.members:
            for lease in member.leases():
                other = owners.setdefault(lease.partition, member.process.name)
                if other != member.process.name:
                    self.violations.append(f"{other} and {member.process.name} both hold partition {lease.partition}")

    def _is_over(self) -> bool:
        if not self._is_published or self.world.now < max(self.plan.seconds, self._asked_at):
            return False
        self._asked_at = self.world.now + 0.25
        return not self._holds()

    def _holds(self) -> list[str]:
        """What the server still holds for the group."""
        found, ask = [], self.network.ask
        keys = self.members[0].broker.keys
        for partition in range(self.plan.partitions):
            stream = keys.stream(TOPIC, partition)
            pending = ask("XPENDING", stream, GROUP)
            if isinstance(pending, Exception):
                found.append(f"{stream}: {pending}")
                continue
            rows = ask("XINFO", "GROUPS", stream)
            about = dict(zip(rows[0][::2], rows[0][1::2], strict=True))
            behind = ask("XRANGE", stream, b"(" + about[b"last-delivered-id"], "+", "COUNT", 1)
            parked, delayed = (
                ask("ZCARD", keys.retry(TOPIC, partition, GROUP)),
                ask("ZCARD", keys.delayed(TOPIC, partition)),
            )
            if pending[0] or parked or delayed or behind:
                found.append(
                    f"{stream}: {pending[0]} pending, {parked} parked, {delayed} delayed"
                    f"{', more to deliver' if behind else ''}"
                )
        return found


class TraceLog(logging.Handler):
    """Puts what the package logs into the trace."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world
        self.setFormatter(logging.Formatter("%(name)s %(levelname)s %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        name = self._world.current.name if self._world.current else "-"
        self._world.note(f"   log of {name}: {self.format(record)}")
