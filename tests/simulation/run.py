"""One run: workers and a publisher in simulated processes, and the verdict of the chaos suite over what they did."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any
from zlib import crc32

import anyio
from tenacity import wait_fixed

from rsmq import Broker, Hold, Message, MessageRef, Rate, Reject, Retry, RetryPolicy, Settings
from rsmq.errors import BrokerUnavailable, RsmqError, StoreUnavailable
from rsmq.heartbeat.lease import Lease
from rsmq.model.layout import Layout, read_layout
from tests.chaos.checker import History, Name, check
from tests.chaos.ledger import Event, What
from tests.simulation.batches import Batches
from tests.simulation.cancels import Cancels
from tests.simulation.digests import Digests
from tests.simulation.encoded import TRIED, Encoded
from tests.simulation.endings import BURIED, FALLBACK, Burials, Expiries, HandedOn
from tests.simulation.faults import Fates
from tests.simulation.inbox import Devices
from tests.simulation.limits import Limits
from tests.simulation.moves import Moves
from tests.simulation.mqtt import Gateways
from tests.simulation.network import Network
from tests.simulation.notes import Notes
from tests.simulation.plan import GROUP, TOPIC, Plan
from tests.simulation.process import Process
from tests.simulation.quiet import Quiet
from tests.simulation.rates import Rates
from tests.simulation.resizes import OUTPUTS, Resizes
from tests.simulation.uniques import Uniques
from tests.simulation.world import EPOCH, World


@dataclass
class Member:
    """A worker process, or that of a `device`. `number` is its pid in the ledger.

    `is_disturbed`: a fault has struck it that may keep it from tidying up when it ends.
    """

    number: int
    process: Process
    broker: Broker
    device: str = ""
    is_stopping: bool = False
    is_disturbed: bool = False

    @property
    def is_available(self) -> bool:
        """Whether a fault can strike it."""
        return self.process.runs and not self.is_stopping and not self.process.is_over

    def leases(self) -> Iterator[Lease]:
        """Those that it believes in while its code runs."""
        worker = self.broker.worker if self.process.runs and not self.device else None
        for consumer in worker.consumers if worker is not None else ():
            for lane in consumer.lanes.values():
                if lane.lease.epoch and lane.lease.is_held():
                    yield lane.lease


def name_of(message: Message) -> str:
    """What a rate of the group counts by: keys of any partition."""
    return "odd" if message.key in ("k1", "k3", "k5") else "even"


def tenant_of(message: Message) -> str:
    """Of three: messages of a key are of several. Of what is encoded the payload is not known when this is asked."""
    return f"t{crc32(message.data if message.encoding is None else message.id.encode()) % 3}"


class Run:
    """The processes of a run, and its ledger."""

    def __init__(self, plan: Plan, world: World, network: Network) -> None:
        self.plan, self.world, self.network = plan, world, network
        self.members: list[Member] = []
        self.fates = Fates(self)
        self.devices = Devices(self, self._note_letter)
        self.gateways = Gateways(self, self.devices)
        self.cancels, self.moves = Cancels(self), Moves(self)
        self.expiries, self.burials, self.rates = Expiries(self), Burials(self), Rates(self)
        self.limits, self.quiet, self.digests = Limits(self), Quiet(self), Digests(self)
        self.handed_on = HandedOn(self)
        self.uniques = Uniques(self)
        self.batches = Batches(self)
        self.notes = Notes(self)
        self.encoded = Encoded(self)
        self.resizes = Resizes(self)
        self.violations: list[str] = []
        self._events: list[Event] = []
        self._stored, self._unknown, self._poison = dict[Name, float](), set[Name](), set[Name]()
        self._lost = set[Name]()
        self._tried, self._perhaps_twice, self._ticks = dict[Name, float](), set[Name](), dict[int, float]()
        self._stream_ids = dict[Name, str]()
        self._settings_by_lease = dict[float, Settings]()
        self._is_published = False
        self._asked_at = 0.0
        self.was_reset = self.has_lost_writes = self.was_wiped = False
        self.wiped_at = -1.0
        self.unsure_until = 0.0
        """Leases have ended early (the server's clock, a reset, a failover): until the owners have found out."""
        network.after_command, network.fences.violate = self._check_leases, self.violate

    def play(self) -> None:
        """From the start of all processes until everything is settled."""
        for _ in range(self.plan.members):
            self.start_member()
        devices = [f"k{key}" for key in range(self.plan.keys if self.plan.is_inbox else 0)]
        for device in (" ".join(devices[::2]), " ".join(devices[1::2])) if self.plan.is_mqtt else devices:
            if device:
                self.start_device(device)
        publisher = Process(self.world, self.network, "p")
        publisher.start(self._publish())
        if self.plan.encoded == "stored":
            Process(self.world, self.network, "s").start(self.encoded.sweep())
        if self.plan.bands_after:
            operator = Process(self.world, self.network, "o")
            operator.start(self._add_bands())
        self.resizes.start()
        self.fates.plan()
        self.world.run(self.plan.seconds + self.plan.work + self.plan.limited + self.plan.patience, self._is_over)
        for process in (*(member.process for member in self.members), publisher):
            self.violations += [f"{process.name} ended with {process.error!r}"] if process.error else []

    def findings(self) -> list[str]:
        """Every broken promise."""
        letters = self._dead_letters()
        dead = [*self.expiries.sort(letters), *self.handed_on.read()]
        if self.was_reset:  # a dead letter of the time before counts once
            dead = list(dict(dead).items())
        free = self.cancels.open | self.cancels.done.keys() | self.expiries.ended
        stored = self._stored.keys() - free
        poison = self._poison & (stored | {name for name, _ in dead})
        history = History(
            stored=set(stored), unknown=self._unknown | free, events=self._events, excused=self.fates.excused,
            holds=self._holds(), poison=poison, dead=dead, is_ordered=self.plan.ordering != "none",
            # a worker that was struck may end a cancelled or expired message late
            given_up=dict.fromkeys(free | self._handled_after_a_loss(), "cancelled, expired or lost"),
        )  # fmt: skip
        return [
            *map(str, check(history).faults),
            *self._wrong_outputs(poison),
            *self.cancels.wrong(self._events, self.fates.excused, [name for name, _ in dead]),
            *self.expiries.wrong(self._events, [name for name, _ in dead], self.cancels.done),
            *self.burials.wrong([name for name, _ in letters], Counter(self._outputs(BURIED))),
            *self.handed_on.wrong(letters),
            *self.batches.wrong(letters),
            *self.notes.wrong({name for name, _ in letters}),
            *self.violations,
            *([] if self._is_published else ["the publisher is not done"]),
            *self._skipped_ticks(),
        ]

    def _handled_after_a_loss(self) -> set[Name]:
        """Messages that the server has lost, and that a worker was handling, which then slept: the next owner does not
        know of them, and does not wait."""
        slept = {member.number for member in self.members if member.process.was_frozen}
        return {(each.key, each.n) for each in self._events if each.what == "commit" and each.pid in slept} & self._lost

    def _skipped_ticks(self) -> list[str]:
        """A schedule leaves out no tick, unless no worker served it for two leases, or the server has lost which tick
        was the last one."""
        if self.was_wiped:
            return []
        longest, ticks = 2 * min(self.plan.leases), self._ticks
        return [
            f"ticks between {before} and {after} left out"
            for before, after in pairwise(sorted(ticks))
            if after - before > 1 and ticks[after] - (before - 1) * self.plan.schedule < longest
        ]

    def forget(self, since: float) -> None:
        """The server has lost its last writes: what was confirmed since then may be lost."""
        lost = {name for name, confirmed in self._stored.items() if confirmed >= since}
        self._unknown |= lost
        self._lost |= lost
        self._stored = {name: at for name, at in self._stored.items() if name not in lost}
        self.has_lost_writes = True
        self.cancels.forget(since)
        self.moves.forget()
        self.rates.forget()
        self.limits.forget()
        self.digests.forget()
        self.devices.forget(since)
        begun = {(event.key, event.n) for event in self._events if event.at < since}
        self._perhaps_twice |= self._tried.keys() - begun  # stored, or moved into the stream, lost, and again
        latest = {(event.key, event.n): event.what for event in self._events if event.at < since}
        parked = {name for name, what in latest.items() if what == "fail"}
        # the start of a retry is lost: the retry is due again, also after the settlement
        self._perhaps_twice |= parked & {(event.key, event.n) for event in self._events if event.at >= since}
        self.unsure_until = self.world.now + self.plan.lease

    @property
    def numbers(self) -> Sequence[int]:
        """The partitions of the topic now."""
        return self.layout.numbers

    @property
    def layout(self) -> Layout:
        """That of the topic now."""
        return self._layout_of(TOPIC)

    def _layout_of(self, topic: str) -> Layout:
        may_have_one = self.plan.bands or self.plan.growth
        layout = self.network.ask("HGET", self.members[0].broker.keys.topic(topic), "layout") if may_have_one else None
        return read_layout(topic, b"%d" % self.plan.partitions, layout)

    @property
    def events(self) -> Sequence[Event]:
        """What handlers have done so far."""
        return self._events

    @property
    def stored(self) -> Mapping[Name, float]:
        """When the publish of each message was confirmed."""
        return self._stored

    @property
    def poison(self) -> AbstractSet[Name]:
        """Messages that handlers reject."""
        return self._poison

    @property
    def begun(self) -> set[Name]:
        """Messages whose handler was called."""
        return {(event.key, event.n) for event in self._events}

    def is_perhaps_twice(self, name: Name) -> bool:
        """Whether a message may be stored twice: writes were lost, or its publisher had no answer for longer than
        messages are kept, so that it could not find the first one."""
        now = self.world.now
        if self._stored.get(name, now) - self._tried.get(name, now) >= self.plan.retention:
            self._perhaps_twice.add(name)
        return name in self._perhaps_twice

    def skip_time(self) -> None:
        """The server's clock is set forward: retention may remove what a publisher has no answer for."""
        if self.plan.retention < 60:
            self._perhaps_twice |= self._tried.keys() - self._stored.keys()

    def _wrong_outputs(self, poison: set[Name]) -> list[str]:
        """The outputs of each settled message are stored exactly once, those of others never, per key in order."""
        if not self.plan.has_outputs or self.was_reset:  # after a reset all is handled, and published, again
            return []
        found, stored, last = [], Counter[Name](), dict[str, int]()
        # a message whose settlement was lost comes again, after those whose settlement was not
        is_ordered = self.plan.ordering != "none" and not self.has_lost_writes
        for key, n in self._outputs(OUTPUTS):
            stored[key, n] += 1
            if is_ordered and n < last.get(key, -1):
                found.append(f"the output of {key}/{n} comes after that of a later message")
            last[key] = n
        handled = {(event.key, event.n) for event in self._events if event.what == "commit"}
        for name in sorted(self._stored.keys() | self._unknown | stored.keys()):
            least, most = int(name in self._stored and name not in poison), int(name not in poison)
            if name in self.cancels.done or name in self.cancels.open:
                least, most = 0, int(name in self.cancels.open and name not in poison)
            if name in self.expiries.ended:
                least, most = 0, int(name in handled)
            if not least <= stored[name] <= most and name not in self._perhaps_twice:
                found.append(f"{stored[name]} outputs of {name[0]}/{name[1]}, not {most}")
        return found

    def _outputs(self, topic: str) -> Iterator[Name]:
        """The outputs in a topic, those of a key in their order."""
        for partition in self._layout_of(topic).numbers:
            stream = self.members[0].broker.keys.stream(topic, partition)
            for _, fields in self.network.ask("XRANGE", stream, "-", "+"):
                order = self.encoded.order(dict(zip(fields[::2], fields[1::2], strict=True)))
                yield order["key"], order["n"]

    @property
    def summary(self) -> str:
        """What was done."""
        handled = {(event.key, event.n) for event in self._events if event.what == "commit"}
        counts = f"{len(self._stored)} published, {len(handled)} handled, {len(self.cancels.done)} cancelled"
        counts += f", {self.moves.done} moved" if self.plan.moves else ""
        counts += f", {self.resizes.done} of {len(self.plan.growth)} resizes" if self.plan.growth else ""
        counts += f", {self.plan.encoded}" if self.plan.encoded else ""
        return f"{counts}, {len(self.expiries.ended)} expired" if self.plan.expires else counts

    def name_in(self, message: Message) -> Name:
        """Which message it is, also before its payload is decoded."""
        order = self.encoded.order_of(message)
        return order["key"], order["n"]

    def violate(self, what: str) -> None:
        """A promise is broken."""
        if what not in self.violations:
            self.violations.append(what)
            self.world.note(f"   BROKEN {what}")

    def _note(self, what: What, name: Name, member: int = 0, attempt: int = 0) -> None:
        self._events.append(Event(what, member, self.world.now, *name, attempt))
        self.world.note(f"   {what} {name[0]}/{name[1]} in m{member}, attempt {attempt}")

    # -- the processes ----------------------------------------------------------------------------------------------

    def settings(self, number: int = 0) -> Settings:
        """Those of a member: they differ in the lease."""
        plan = self.plan
        lease = plan.leases[number % len(plan.leases)]
        if lease not in self._settings_by_lease:
            self._settings_by_lease[lease] = self._settings_of(plan, lease)
        return self._settings_by_lease[lease]

    def _settings_of(self, plan: Plan, lease: float) -> Settings:
        return Settings(
            url="unix:///simulated", prefix="sim", partitions=plan.partitions, preflight="warn",
            lease_ttl=timedelta(seconds=lease), stop_grace=timedelta(seconds=5), prefetch=plan.prefetch,
            read_ahead=plan.read_ahead,
            retention_age=timedelta(seconds=plan.retention), retention_length=60,
            retention_interval=timedelta(seconds=0.5 if plan.retention < 60 else 3),
            command_timeout=timedelta(seconds=plan.timeout),
            **({"unavailable_timeout": TRIED} if plan.encoded == "stored" else {}),
        )  # fmt: skip

    def start_member(self) -> Member:
        """Start a worker in a process of its own."""
        number = len(self.members) + 1
        process = Process(self.world, self.network, f"m{number}")
        member = Member(number, process, self.encoded.broker(number))
        self.members.append(member)
        self._register(member)
        process.start(self._serve(member))
        return member

    def start_device(self, device: str) -> Member:
        """Start a device in a process of its own, or a gateway with its clients; it takes over from an earlier one."""
        number = len(self.members) + 1
        process = Process(self.world, self.network, f"d{number}")
        member = Member(number, process, self.members[0].broker, device)
        self.members.append(member)
        serve = self.gateways.serve if self.plan.is_mqtt else self.devices.serve
        process.start(serve(member, device))
        return member

    def replace(self, member: Member) -> Member:
        """Start another one of its kind."""
        return self.start_device(member.device) if member.device else self.start_member()

    def _note_letter(self, name: Name, number: int) -> None:
        if all((event.key, event.n) != name for event in self._events):
            self._note("start", name, number)
            self._note("commit", name, number)

    async def _serve(self, member: Member) -> None:
        try:
            await member.broker.run()
        except BrokerUnavailable as error:
            may_be_away = member.is_disturbed or self.plan.encoded == "stored"  # then it waits for `TRIED` only
            if not may_be_away or member.broker.worker is not None:
                raise
            self.world.note(f"m{member.number} cannot start: {error}")  # its supervisor would start it again
            self.replace(member)
            return
        self.world.note(f"m{member.number} has ended")
        if member.is_disturbed:
            return
        for partition in self.numbers:
            if self.network.ask("HGET", self.lease_key(partition), "owner") == member.process.name.encode():
                self.violate(f"m{member.number} has ended and left its lease")

    async def _add_bands(self) -> None:
        """An operator adds the bands while all goes on; it tries again as long as the server is away."""
        await anyio.sleep(self.plan.bands_after)
        async with Broker(self.settings()) as broker:
            while True:
                try:
                    await broker.topics.ensure(TOPIC)
                    await broker.topics.set_bands(TOPIC, self.plan.bands)
                    return
                except RsmqError as error:
                    self.world.note(f"   bands cannot be added: {error!r}")
                    await anyio.sleep(0.5)

    def _check_bands(self, member: Member, message: Message, name: Name) -> None:
        """Strict: no message starts while one of a higher band is ready in the same member."""
        origin: Any = message.origin
        consumers = member.broker.worker.consumers if member.broker.worker is not None else ()
        for consumer in consumers:
            bands = consumer.queue.bands
            if bands is None or consumer.lanes.get(origin.partition) is not origin:
                continue
            for band, ready in bands.lengths():
                if band == origin.band:
                    break
                if ready:
                    self.violate(f"m{member.number} starts {name} of {origin.band} while {ready} of {band} are ready")

    def _register(self, member: Member) -> None:
        plan, choices, counts = self.plan, self.world.choices, Counter[Name]()

        def begin(message: Message) -> None:
            """The handler is called with a message."""
            origin: Any = message.origin
            lease, name = origin.lease, (message.payload["key"], message.payload["n"])
            if not lease.is_held():
                self.violate(f"m{member.number} starts {name} after its lease")
            if member.process.thawed_at < self.world.now:  # as it wakes up, it cannot know yet that it was replaced
                self._check_start(member, (origin.stream, message.stream_id), name)
                self.cancels.starts(name, member.number)
            if plan.bands and not plan.batch and not message.is_redelivered and plan.encoded != "stored":
                self._check_bands(member, message, name)
            if not plan.linger:  # enough messages end a window that was moved
                self.moves.starts(name, member.number)
            self.quiet.starts(name, message, member.number)
            self.expiries.starts(member, message)
            self.rates.starts(name[0], lease.partition, member.number, lease.epoch)
            self.rates.starts_of_name(name_of(message))
            self.batches.starts(name)
            self.handed_on.starts(name, message)
            self.limits.starts(member, message, name_of(message))

        async def handle_one(payload: Any, message: Message) -> None:
            with self.limits.running(member, name_of(message)):
                await handle_now(payload, message)

        async def handle_now(payload: Any, message: Message) -> None:
            name = (payload["key"], payload["n"])
            counts[name] += 1
            label = f"m{member.number} {name[0]}/{name[1]} {counts[name]}"
            self._note("start", name, member.number, message.attempt)
            if not plan.batch:
                begin(message)
            is_moved = self._stream_ids.setdefault(name, message.stream_id) != message.stream_id
            if is_moved and not self.is_perhaps_twice(name):
                self.violate(f"{name} was stored as {self._stream_ids[name]} and as {message.stream_id}")
            if plan.has_outputs:
                try:
                    await message.publish(OUTPUTS, {"key": name[0], "n": name[1]}, key=name[0])
                except StoreUnavailable:
                    self._note("fail", name, member.number, message.attempt)
                    raise
            if plan.busy:
                await anyio.sleep(choices.between(0, plan.busy, f"work: {label}"))
            await self.notes.work(member, name, message)
            if name in self._poison:
                self._note("fail", name, member.number, message.attempt)
                self.handed_on.rejects(name, message)
                raise Reject("poison")
            if choices.unit(f"holds: {label}") < plan.holding:
                self._note("fail", name, member.number, message.attempt)
                raise Hold(timedelta(seconds=0.3))
            if choices.unit(f"fails: {label}") < plan.failing:
                self._note("fail", name, member.number, message.attempt)
                raise Retry("once more", counts=choices.unit(f"counts: {label}") < 0.5)
            self._note("commit", name, member.number, message.attempt)

        def recipient(order: dict[str, Any]) -> str:
            name = (order["key"], order["n"])
            counts[name] += 1
            if choices.unit(f"fails: m{member.number} {name} {counts[name]}") < plan.failing:
                raise Retry("once more")
            return str(order["key"])

        async def handle(order: dict[str, Any], message: Message) -> list[Any] | None:
            await handle_one(order, message)
            return [order["key"], order["n"]] if plan.has_notes else None

        async def handle_batch(orders: list[dict[str, Any]], messages: list[Message]) -> list[Exception | None]:
            """One after the other; what follows a failed message of the same key (or partition) is left for later."""
            outcomes, failed = list[Exception | None](), set[str]()
            for message in messages:
                begin(message)
            self.digests.starts(member, messages)
            for order, message in zip(orders, messages, strict=True):
                lane = (message.key or "") if plan.ordering == "key" else "all" if plan.ordering == "partition" else ""
                outcome: Exception | None = Retry("after the one before") if lane in failed else None
                if outcome is None:
                    try:
                        await handle_one(order, message)
                    except Reject as error:
                        outcome = error
                    except (Retry, Hold) as error:
                        outcome = error
                        failed |= {lane} - {""}
                outcomes.append(outcome)
            return outcomes

        def tick(at: datetime) -> dict[str, Any] | None:
            if self.world.now > plan.seconds:
                return None
            n = round((at.timestamp() - EPOCH) / plan.schedule)
            self._ticks.setdefault(n, self.world.now)
            self._unknown.add(("tick", n))
            self._tried.setdefault(("tick", n), self.world.now)
            return {"key": "tick", "n": n}

        if plan.schedule:
            member.broker.every(timedelta(seconds=plan.schedule), TOPIC, key="tick")(tick)
        if plan.is_inbox:
            policy = RetryPolicy(max_attempts=50, wait=wait_fixed(0.3))
            if plan.is_mqtt:
                self.gateways.route(member, TOPIC, GROUP, plan.batch, policy)
                return
            member.broker.deliver(TOPIC, to=recipient, group=GROUP, batch=plan.batch, retry=policy)
            return
        options: dict[str, Any] = {"batch": plan.batch} if plan.batch else {"concurrency": plan.concurrency}
        if plan.bands:
            options["aging"] = None
            if not plan.bands_after:
                member.broker.topic(TOPIC, dict, bands=plan.bands)
        options["rate"] = rates = list[Rate]()
        if plan.rate[0]:
            rates.append(Rate(plan.rate[0], timedelta(seconds=plan.rate[1]), by="key"))
        if plan.group_rate[0]:
            rates.append(Rate(plan.group_rate[0], timedelta(seconds=plan.group_rate[1]), by=name_of))
        options |= self.limits.options(name_of) | self.quiet.options() | self.digests.options()
        if plan.has_fallback:
            options["fallback"] = FALLBACK
        if plan.has_tenants:
            options |= {"tenant": tenant_of, "weights": {"t0": 2}}
        member.broker.handler(
            TOPIC, group=GROUP, ordering=plan.ordering, distribution=plan.distribution,
            retry=RetryPolicy(max_attempts=50, wait=wait_fixed(0.3)), **options,
        )(handle_batch if plan.batch else handle)  # fmt: skip
        if plan.has_hook:
            self.burials.register(member, TOPIC, GROUP)

    async def _publish(self) -> None:
        choices, plan, numbers = self.world.choices, self.plan, defaultdict[str, int](int)
        publisher = self.encoded.broker()
        if plan.bands and not plan.bands_after:
            publisher.topic(TOPIC, dict, bands=plan.bands)
        async with publisher as broker, self.batches.opened(broker), anyio.create_task_group() as tasks:
            for n in range(plan.uniques):
                for publisher in "ab":
                    tasks.start_soon(self.uniques.publish, broker, f"u{n}", publisher)
            if plan.is_mqtt:
                await self.gateways.wait_for_sessions(plan.keys)
            for n in range(plan.messages):
                key = f"k{int(choices.unit(f'key {n}') ** (4 if plan.is_hot else 1) * plan.keys)}"
                band = await self._band(broker, f"band of {key}") if plan.bands else None
                name = (f"{key}{band[0] if band else ''}", numbers[key])
                numbers[key] += 1
                tasks.start_soon(self._publish_one, broker, name, band)
                if n % plan.burst == 0:
                    span = 2 * plan.seconds * plan.burst / plan.messages
                    await anyio.sleep(choices.between(0, span, f"pause {n}"))
        self._is_published = True

    async def _band(self, broker: Broker, label: str) -> str | None:
        """A band for all messages of a key, if it is open by now: they have another key than those before."""
        try:
            topic = await broker.topics.find(TOPIC)
        except RsmqError:
            return None
        band = self.world.choices.among(self.plan.bands, label)
        block = None if topic is None else topic.layout.block_of(band)
        return band if block is not None and block.state == "open" else None

    async def _publish_one(self, broker: Broker, name: Name, band: str | None = None) -> None:
        choices, options = self.world.choices, dict[str, Any]()
        if band is not None:
            options["band"] = band
        if choices.unit(f"delayed {name}") < self.plan.delayed:
            options["delay"] = timedelta(seconds=choices.between(0.1, 3, f"delay {name}"))
        options |= self.expiries.options(name, options.get("delay"))
        ref = await self.store(broker, name, **options)
        if ref is not None and choices.unit(f"move {name}") < self.plan.moves:
            await self.moves.move(broker, ref, name)
        if ref is not None and choices.unit(f"cancel {name}") < self.plan.cancels:
            await self.cancels.cancel(broker, ref, name)

    async def store(self, broker: Broker, name: Name, **options: Any) -> MessageRef | None:
        """Publish a message. None: it may be stored, or not."""
        if self.world.choices.unit(f"poison {name}") < self.plan.poison:
            self._poison.add(name)
        self._tried[name] = self.world.now
        try:
            publish = self.batches.publisher or broker.publish
            ref = await publish(
                TOPIC, {"key": name[0], "n": name[1]}, **({"key": name[0]} | self.notes.options | options)
            )
        except RsmqError as error:
            self.world.note(f"   publishing {name} failed: {error!r}")
            self._unknown.add(name)
            return None
        if self._tried[name] <= self.wiped_at:  # what was stored may be gone, though the answer came after that
            self._unknown.add(name)
        elif ref.is_new is not False:
            self._stored[name] = self.world.now
            self.expiries.published(name)
            self.notes.published(name, ref)
        return ref

    # -- what must hold ---------------------------------------------------------------------------------------------

    def _check_start(self, member: Member, entry: tuple[str, str], name: Name) -> None:
        """No handler starts with a message that was settled, except where the server forgets that."""
        forgets = self.was_reset or self.has_lost_writes or "unconsume" in self.plan.faults
        if not forgets and entry in self.network.fences.settled:
            self.violate(f"{name} starts in m{member.number} after it was settled")

    def _check_leases(self) -> None:
        """Two members never believe in the same lease at the same moment."""
        owners: dict[int, str] = {}
        for member in self.members if self.world.now >= self.unsure_until else ():
            for lease in member.leases():
                self.rates.owns(lease.partition, member.number, lease.epoch)
                other = owners.setdefault(lease.partition, member.process.name)
                if other != member.process.name:
                    self.violate(f"{other} and {member.process.name} both hold partition {lease.partition}")

    def last_until(self, moment: float) -> None:
        """Do not end before: what is in flight is not pending until then."""
        self._asked_at = max(self._asked_at, moment)

    def lease_key(self, partition: int) -> str:
        """The record of a partition's lease."""
        return self.members[0].broker.keys.lease(TOPIC, partition, GROUP)

    def _is_over(self) -> bool:
        is_done = self._is_published and self.resizes.is_over
        if not is_done or self.world.now < max(self.plan.seconds, self._asked_at):
            return False
        self._asked_at = self.world.now + 0.25
        return not self._holds()

    def _dead_letters(self) -> list[tuple[Name, str]]:
        found, keys = [], self.members[0].broker.keys
        for partition in self.numbers:
            for _, fields in self.network.ask("XRANGE", keys.dlq(TOPIC, partition, GROUP), "-", "+"):
                about = dict(zip(fields[::2], fields[1::2], strict=True))
                if b"data" not in about and self._perhaps_twice:
                    continue  # a worker still had a message that the server has lost
                order = self.encoded.order(about)
                found.append(((order["key"], order["n"]), about[b"dlq.reason"].decode()))
        return found

    def _holds(self) -> list[str]:
        """What the server still holds for the group."""
        found, ask = self.resizes.holds(), self.network.ask
        keys = self.members[0].broker.keys
        for partition in self.numbers:
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
        for key in range(self.plan.keys if self.plan.is_inbox else 0):
            left = self.devices.unread(f"k{key}")
            found += [f"{len(left)} letters for k{key}"] if left else []
        return found


class TraceLog(logging.Handler):
    """Puts what the package logs into the trace."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world
        self.setFormatter(logging.Formatter("%(name)s %(levelname)s %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        name = self._world.current.name if self._world.current else "-"
        if record.exc_info:  # a traceback depends on the version of Python and on the folder
            record.exc_text = repr(record.exc_info[1])
        self._world.note(f"   log of {name}: {self.format(record)}")
