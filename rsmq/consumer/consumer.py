"""One member of one group: the roles that serve one handler, and the order in which they start and stop."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from heapq import nsmallest
from typing import Final

import anyio

from rsmq.consumer.owning.lane_lifecycle import LaneLifecycle
from rsmq.consumer.owning.participation import Participation
from rsmq.consumer.owning.rebalancer import Rebalancer
from rsmq.consumer.owning.shared import SharedDistribution
from rsmq.consumer.reading.call_starter import CallStarter
from rsmq.consumer.reading.fetchers import Fetchers
from rsmq.consumer.reading.questions import Questions
from rsmq.consumer.reading.read_ahead import ReadAhead
from rsmq.consumer.reading.reclaimer import Reclaimer
from rsmq.consumer.reading.retry_poller import RetryPoller
from rsmq.consumer.reading.wait_poller import WaitPoller
from rsmq.consumer.running.execution import build_runner
from rsmq.consumer.running.pool import Pool
from rsmq.consumer.running.task_slot import TaskSlot
from rsmq.consumer.settling.settler import Settler
from rsmq.consumer.waiting.borrower import Borrower
from rsmq.consumer.waiting.context import ConsumerContext
from rsmq.consumer.waiting.flow_names import FlowNames
from rsmq.consumer.waiting.gathering_queue import GatheringQueue
from rsmq.consumer.waiting.group_rate import GroupRate
from rsmq.consumer.waiting.handler_permits import HandlerPermits, NamedCalls
from rsmq.consumer.waiting.holds import Holds
from rsmq.consumer.waiting.lane import Lane
from rsmq.consumer.waiting.limits import ConcurrencyLimit, FirstLimit, KeyRate, RateLimit, all_of, call_quotas
from rsmq.consumer.waiting.loan import InUse
from rsmq.consumer.waiting.name_permits import CountedQueue, NamePermits
from rsmq.consumer.waiting.naming import Naming
from rsmq.consumer.waiting.queue import Queue
from rsmq.consumer.waiting.ready_bands import ReadyBands, ReservedSlots
from rsmq.consumer.waiting.start_times import StartTimes
from rsmq.errors import BrokerError, ConfigError
from rsmq.handler.concurrency import Concurrency
from rsmq.handler.middleware import Middleware
from rsmq.handler.rate_limit import Rate
from rsmq.heartbeat.circles import WAITS_FOR
from rsmq.heartbeat.heartbeat import Heartbeat
from rsmq.heartbeat.lease import Leases
from rsmq.heartbeat.membership import Membership
from rsmq.model.call_counts import told
from rsmq.model.clock import awake, monotonic
from rsmq.model.message import Message
from rsmq.model.settings import longest_read
from rsmq.model.standstill import Standstill
from rsmq.model.words import count
from rsmq.model.work import READ_AHEAD_USED, Work
from rsmq.redis.scripts import Ask
from rsmq.redis.topics import Topic, Topics, newer_topic

log = logging.getLogger("rsmq.consumer")

PERMIT: Final = "permit:"
"""Before the names that a handler takes itself, in their keys."""
MOST_NAMES: Final = 3
"""Keys, names or tenants of which a member tells how many messages wait."""
LONGEST_NAME: Final = 60
MOST_CALLS: Final = 5
"""Calls that run longest, of which a member tells the message."""
MANY: Final = 100
"""Messages that wait for keys, from which on a member tells behind which keys."""
NOT_READ: Final = 10.0
"""Seconds since a read without an error, from which on a member tells it."""
MUCH_USED: Final = 80
"""Percent of RSMQ_READ_AHEAD from which a member reports it."""
GROUP_SECONDS: Final = 5.0
"""Between two checks whether the group is paused, if no change is announced."""


def largest(counts: Counter[str]) -> dict[str, int]:
    """The names with most messages."""
    return {name[:LONGEST_NAME]: number for name, number in counts.most_common(MOST_NAMES)}


class Consumer:
    """Serves one handler. Nesting is the shutdown order: leases and settling outlive fetching and running."""

    def __init__(
        self, context: ConsumerContext, middlewares: Sequence[Middleware], heartbeat: Heartbeat, ask: Ask | None = None
    ) -> None:
        self._context = context
        self._settings = context.settings
        self._heartbeat = heartbeat
        self.handler = context.handler
        self.member = context.member
        self.lanes, self.stats = context.lanes, context.stats
        client, keys, settings, handler = context.client, context.keys, context.settings, context.handler
        self._leases = Leases(client, keys, settings, self.member)
        self.membership = Membership(
            client, keys, settings, self.member, self.topic.name, handler.group, ask, context.clock,
            context.worker_log.members,
        )  # fmt: skip
        self.queue = self._make_queue()
        self.settler = Settler(context, self._drop)
        times = None if handler.when is None else StartTimes(handler.when, context.clock)
        self._runner = build_runner(
            handler, middlewares, self.queue, self.settler, self.stats, context.encoding, settings.key_patience, times
        )
        self._group_rate: GroupRate | None = None
        self._borrower: Borrower | None = None
        self._names_of: list[Callable[[Message], str | None]] = []  # by which limits count
        self._reserved: ReservedSlots | None = None
        self.holds: Holds | None = None
        self._permits: HandlerPermits | None = None
        self._use(handler.rates)
        self._reclaimer = Reclaimer(context, self._runner, self.settler)
        self.fetchers = Fetchers(context, self._runner, self.settler, self._reclaimer)
        self._read_ahead = self._make_read_ahead()
        self._wait_poller: WaitPoller | None = None
        self._read_on()
        if times is not None or handler.by is not None:
            self._wait_by(times)
        self._use_layout()
        self.lifecycle = LaneLifecycle(context, self._runner, self.settler, self.fetchers, self._leases, heartbeat)
        self._questions = Questions(context, self._runner, self.holds, self._permits)
        self.participation = Participation(
            context, heartbeat, self.membership, self.fetchers, self.settler, self._vitals, self._questions.ask
        )
        self._standstill = Standstill()
        self._stopping = asyncio.Event()
        self._deadline = float("inf")
        self.started = asyncio.Event()

    def _make_queue(self) -> Queue:
        """What may start now, by the order and the limits of the handler."""
        handler, prefetch = self.handler, self._settings.prefetch
        if handler.by is not None:
            return GatheringQueue(batch=handler.batch or 1, linger=handler.linger, prefetch=prefetch)
        kind = CountedQueue if handler.counts_messages else Queue
        return kind(is_ordered=handler.ordering != "none", is_serial=handler.ordering == "partition", prefetch=prefetch)

    def _make_read_ahead(self) -> ReadAhead:
        if isinstance(self.queue, GatheringQueue):
            return CallStarter(self._context, self._runner, self.settler, self.fetchers, self.queue)
        return ReadAhead(self._context, self._runner, self.settler, self.fetchers)

    def _read_on(self) -> None:
        """What waits behind a key, for the rate of a name or for the turn of a tenant is kept as ids."""
        handler, settings = self.handler, self._settings
        if handler.tenants is not None or self._names_of:
            self.queue.sort(FlowNames(handler.tenants, self._names_of), by_tenant=handler.tenants is not None)
        has_flows = self.queue.is_sorted or handler.when is not None
        may_wait = handler.ordering == "key" or (handler.ordering == "none" and has_flows)
        if (handler.when is not None or handler.by is not None) and not settings.read_ahead:
            option = "by=" if handler.when is None else "when="
            raise ConfigError(
                f"handler {handler.name}: {option} keeps messages waiting as ids, and RSMQ_READ_AHEAD=0 allows none: "
                f"set it to 100000, the default"
            )
        if settings.read_ahead and may_wait and handler.distribution == "hash":
            slots = handler.concurrency * (handler.batch or 1)
            self.queue.read_ahead(settings.read_ahead, settings.prefetch, slots, self._read_ahead.wanted.set)

    def _wait_by(self, times: StartTimes | None) -> None:
        """Messages wait until the rule lets them start, or until the window of their key is over, as ids."""
        self._wait_poller = WaitPoller(self._context, self._runner, self.settler, self.fetchers)
        if times is not None:
            self.queue.start_by(times, self._wait_poller.wanted.set)
        elif isinstance(self.queue, GatheringQueue):
            self.queue.wait_by(self._wait_poller.wanted.set)

    def _use(self, rates: Sequence[Rate]) -> None:
        """Limit the queue."""
        wake, first, whole, calls = self._runner.wake_soon, list[FirstLimit](), None, None
        for limit in self.handler.group_concurrency:
            if limit.by is None:
                calls = self._limit_calls(limit.limit, self._lender())
            elif isinstance(self.queue, CountedQueue):
                permits = NamePermits(limit, self._lender(), self.queue, wake)
                self.queue.count(permits.finish)
                self._names_of.append(permits.name_of)
                first.append(permits)
        for rate in rates:
            if rate.by == "key":
                first.append(KeyRate(rate, self._context.clock, self._let_go))
            elif rate.name_of is not None:
                self._group_rate = GroupRate(rate, self._context, self.settler.ask, self.queue, wake)
                self._names_of.append(self._group_rate.name_of)
                if rate.cost is not None and isinstance(self.queue, CountedQueue):
                    self.queue.count(self._group_rate.left)
            else:
                whole = RateLimit(rate, lambda: len(self.membership.live), wake)
        self.queue.limit(rate=whole, message_rate=all_of(first, self._group_rate), group=calls)
        if self.handler.has_limits:
            self._hold(first)
        if self.handler.permits or (self._group_rate is not None and self._group_rate.has_cost):
            self._permits = self._make_permits()
            self._runner.limit_by(self._permits)

    def _make_permits(self) -> HandlerPermits:
        """What the handler takes itself."""
        rates, calls = dict[str, GroupRate](), dict[str, NamedCalls]()
        for name, limits in self.handler.permits.items():
            for limit in limits:
                if isinstance(limit, Concurrency):
                    calls[name] = NamedCalls(f"{PERMIT}{name}", limit.limit, self._lender())
                else:
                    about = (limit, self._context, self.settler.ask, self.queue, self._runner.wake_soon)
                    rates[name] = GroupRate(*about, lambda _message: None, prefix=PERMIT)
        return HandlerPermits(rates, calls, self._group_rate, self.holds, self._runner.runs)

    def _lender(self) -> Borrower:
        """All limits on calls at once share one."""
        if self._borrower is None:
            self._borrower = Borrower(self._context, self.settler.ask, self._heartbeat, self._cancel_all)
        return self._borrower

    def _hold(self, first: Sequence[FirstLimit]) -> None:
        """What waits because its name is held."""
        handler, function = self.handler, self.handler.name_of
        naming = None if function is None else Naming(function, log)
        if naming is not None and handler.breaker is not None and handler.breaker.by is not None:
            self._names_of.append(naming.name)
        self.holds = Holds(self._context, self.queue, naming, handler.breaker, self._runner.wake_soon)
        self._runner.hold_by(self.holds)
        if handler.breaker is not None and isinstance(self.queue, CountedQueue):
            self.queue.count(self.holds.left)
        self.holds.limit_by(first, self._group_rate)

    def _limit_calls(self, limit: int, borrower: Borrower) -> ConcurrencyLimit:
        """The calls of all members together, as far as the server lends this one permits."""
        in_use = InUse()
        loan = borrower.lend(None, limit, in_use, self._wanted_calls, self._runner.wake_soon)
        return ConcurrencyLimit(
            lambda: borrower.quota(loan), in_use, lambda: borrower.is_short(loan), lambda: borrower.is_free(loan)
        )

    def _cancel_all(self) -> None:
        """The permits are lost: what runs is cancelled, and its partitions are taken anew, as when a lease is lost."""
        self._give_up([lane for lane in self.lanes.values() if self._runner.running_of(lane)])

    def _server_changed(self) -> None:
        """Another server process answers, which may have lost letters that this member has stored, and their
        settlement. Before any later letter is sent there all is taken anew, in order: see `AddLettersCall`."""
        if self.lanes:
            log.warning("%s: another server process answers, so its partitions are taken anew", self._context.name)
        self._give_up(list(self.lanes.values()))

    def _give_up(self, lanes: Iterable[Lane]) -> None:
        for lane in lanes:
            lane.lease.lose()
            self._drop(lane)
            self._heartbeat.forget(lane.lease)
        self.membership.wake()

    # -- bands ----------------------------------------------------------------------------------------------------

    @property
    def topic(self) -> Topic:
        """The topic, as far as this member has followed it."""
        return self._context.topic

    def _use_layout(self) -> None:
        """Serve the topic as it is now. Raises ConfigError as `_serve_bands` does."""
        if self.topic.layout.has_more:
            self.membership.ask_for_layouts()
        self._serve_bands()

    def _serve_bands(self) -> None:
        """Take from the bands that the topic has now, by the rules of the handler. Raises ConfigError for a rule about
        a band that it does not have."""
        layout, rules, queue = self.topic.layout, self.handler.bands, self.queue
        if unknown := sorted(rules.named - set(layout.order)):
            raise ConfigError(
                f"handler {self.handler.name}: topic {self.topic.name!r} has no band {unknown[0]!r}: its bands are "
                f"{', '.join(layout.order)}. Declare it, broker.topic({self.topic.name!r}, ..., bands=(...)), or run "
                f"`rsmq topic set {self.topic.name} --bands ...`"
            )
        if not layout.has_bands or (queue.bands is not None and queue.bands.order == layout.order):
            return
        bands = queue.serve_bands(layout.order, rules, self._context.clock.now_ms)
        if rules.reserve and self._reserved is None:
            self._reserved = ReservedSlots(rules.reserve, self._unreserved, self._bands, queue.group_limit)
            queue.limit(rate=queue.rate_limit, message_rate=queue.message_rate, group=self._reserved)
        if self._reserved is not None:
            bands.reserve(self._reserved.admits_band)

    def _bands(self) -> ReadyBands:
        assert self.queue.bands is not None, "slots are reserved only where the topic has bands"
        return self.queue.bands

    def _unreserved(self) -> int:
        """How many slots are kept for no band: of this process, and of its share of a limit over the group."""
        handler, kept = self.handler, self.handler.bands.reserved
        own = handler.concurrency - kept
        if handler.most_calls is None:
            return own
        shares = call_quotas(handler.most_calls - kept, self.membership.live, self._context.name)
        return min(own, shares.get(self.member, 0))

    def _wanted_calls(self) -> int:
        """How many messages could start if the group had permits for them."""
        return self.queue.waits_for_a_call if self._reserved is None else self._reserved.startable()

    async def _look_at_bands(self) -> None:
        """The others see this member now: who adds a band waits for it, or this member sees the band."""
        with suppress(BrokerError, ConfigError):  # the next look finds it
            await self.follow()

    async def follow(self, found: Topic | None = None) -> None:
        """Take over what has changed in the topic, and say so if that is its layout. Raises BrokerError.

        `found`: the topic, if it was just read. A layout that the server has lost is written again.
        """
        context, group = self._context, self.handler.group
        changed = await newer_topic(Topics(context.client, context.keys, self._settings), self.topic, group, found)
        if changed is None:
            if found is not None and found.layout.stored == self.topic.layout.stored:
                context.follow(found)  # other limits
            return
        context.follow(changed)
        self._use_layout()
        bands = f" in the bands {', '.join(changed.layout.order)}" if changed.layout.has_bands else ""
        log.info("%s has %s%s", context.name, count(len(changed.numbers), "partition"), bands)
        self._heartbeat.tell(changed.name, group, **changed.layout.known_as)
        self._runner.wake_soon()
        self.membership.wake()

    # -- what it does ---------------------------------------------------------------------------------------------

    @property
    def work(self) -> Work:
        """What its messages do now. May be called from any thread: a number may be a message old."""
        running = sum(len(task_slot.messages) for task_slot in self.task_slots)
        return self.queue.work(running, list(self.lanes.values()))

    @property
    def read_age(self) -> float:
        """Seconds since the last read without an error, of its slowest read loop; 0 if it reads nothing. May be called
        from any thread."""
        turned = [fetcher.last_success for fetcher in self.fetchers.active]
        return awake() - min(turned) if turned else 0.0

    def _vitals(self) -> dict[str, object]:
        """What its messages do, how its calls have gone, and behind what they wait. Called from another thread."""
        work, rate, lanes = self.work, self.queue.message_rate, list(self.lanes.values())
        vitals: dict[str, object] = {**work.known}
        if calls := told(self.stats, self._runner.times):
            vitals["calls"] = calls
        running, now = [each for each in self.task_slots if each.messages], monotonic()
        if longest := nsmallest(MOST_CALLS, running, key=lambda each: each.started):
            vitals["longest_ms"] = max(0, round((now - longest[0].started) * 1000))
            vitals["longest_calls"] = {each.named: max(0, round((now - each.started) * 1000)) for each in longest}
        if (quiet := self._standstill.seconds(self.stats, work, monotonic())) is not None:
            vitals["settled_nothing_ms"] = round(quiet * 1000)
        if (not_read := self.read_age) > NOT_READ:
            vitals["not_read_ms"] = round(not_read * 1000)
        if self._wait_poller is not None and lanes:
            used = 100 * max(lane.flows.far for lane in lanes) // self._settings.read_ahead
            if used >= MUCH_USED:
                vitals[READ_AHEAD_USED] = used
        if targets := sorted({lane.outgoing.waits_for for lane in lanes} - {""}):
            vitals[WAITS_FOR] = targets
        if work.waiting_for_key >= MANY:
            vitals["waiting_for_key_by"] = largest(self.queue.behind_keys(lanes))
        if work.waiting_for_rate and rate is not None:
            vitals["waiting_for_rate_by"] = largest(rate.waiting(lanes) + self.queue.far_by_rate(lanes))
        if tenants := self.queue.tenants(lanes):
            vitals["waiting_by_tenant"] = largest(tenants)
        if missing := self.missing_keys:
            vitals["missing_keys"] = largest(Counter(missing))
        return vitals

    @property
    def missing_keys(self) -> dict[str, int]:
        """The keys and codings that messages need and this member does not have, each with the seconds since the first
        such message. May be called from any thread."""
        return self._runner.missing_keys.standing()

    @property
    def tenants(self) -> list[int]:
        """How many messages of each tenant have not started, the largest first. May be called from any thread."""
        return sorted(self.queue.tenants(list(self.lanes.values())).values(), reverse=True)

    def _drop(self, lane: Lane) -> None:
        self.lifecycle.drop(lane)

    def _let_go(self, message: Message, lane: Lane) -> None:
        self.queue.let_go(message, lane)
        self._runner.wake_soon()

    def _distribution(self) -> Rebalancer | SharedDistribution:
        """The role that decides which lanes are ours."""
        if self.handler.distribution == "shared":
            return SharedDistribution(
                self._context, self._runner, self._reclaimer, self.fetchers, self.lifecycle, self._heartbeat,
                self.membership,
            )  # fmt: skip
        return Rebalancer(
            self._context, self.fetchers, self.lifecycle, self._leases, self._heartbeat, self.membership,
            self.settler.nodes,
        )  # fmt: skip

    # -- life -----------------------------------------------------------------------------------------------------

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Serve until `stop`, then drain, release, leave."""
        watch = self._context.client.watching_server
        with watch(self._server_changed) if self.handler.stores_letters else nullcontext():
            try:
                await self._serve(task_status)
            finally:
                with anyio.CancelScope(shield=True):
                    with anyio.move_on_after(2):
                        await self._release_after_cancel()
                    if self._borrower is not None:
                        with anyio.move_on_after(2), suppress(BrokerError):
                            await self._borrower.leave()
                    with anyio.move_on_after(2):
                        await self._heartbeat.leave(self.topic.name, self.handler.group)

    async def _serve(self, task_status: anyio.abc.TaskStatus[None]) -> None:
        async with anyio.create_task_group() as outer:
            await outer.start(self.settler.run)
            await outer.start(self._runner.run)
            async with anyio.create_task_group() as inner:
                await inner.start(self.fetchers.run)
                if await self.participation.begin(self._stopping):
                    await self._look_at_bands()
                    await outer.start(self.membership.run)
                    self._start_watchers(outer)
                    await inner.start(self._distribution().run)
                    await inner.start(RetryPoller(self._context, self._reclaimer, self._runner).run)
                    inner.start_soon(self.participation.run)
                    self.started.set()
                    task_status.started()
                    await self._stopping.wait()
                    await self._end_fetching()
                self.started.set()
                inner.cancel_scope.cancel()
            await self._drain()
            outer.cancel_scope.cancel()

    def _start_watchers(self, tasks: anyio.abc.TaskGroup) -> None:
        tasks.start_soon(self._watch_group)
        for limit in (self._group_rate, self._borrower, self.holds):
            if limit is not None:
                tasks.start_soon(limit.run)
        for role in self._permits.roles() if self._permits is not None else ():
            tasks.start_soon(role)
        tasks.start_soon(self._reclaimer.cancellations.run)
        tasks.start_soon(self._read_ahead.run)
        tasks.start_soon(self._questions.run)
        if self._wait_poller is not None:
            tasks.start_soon(self._wait_poller.run)

    async def _watch_group(self) -> None:
        """Follow the membership: pause or resume reading, and use a quota of calls that has grown."""
        seen = seen_by_looks = 0
        while True:
            await self.membership.wait(GROUP_SECONDS, seen)
            if self.holds is not None:
                self.holds.saw(self.membership.holds, self.membership.asked)
            by_looks = self.membership.changes - self.membership.news
            is_news_only = seen != self.membership.changes and seen_by_looks == by_looks
            if seen_by_looks != by_looks:  # who comes and goes in a large group is no reason to ask the server
                self._reclaimer.look_for_retries()
                if self._wait_poller is not None:
                    self._wait_poller.look()
                await self._look_at_bands()
            seen, seen_by_looks = self.membership.changes, by_looks
            if not is_news_only:
                self._reclaimer.cancellations.wanted.set()
            if self.queue.group_limit is not None:
                self._runner.wake_soon()
            if self.membership.paused != self.fetchers.is_paused:
                log.info("%s is %s", self._context.name, "paused" if self.membership.paused else "running")
                await self.fetchers.pause(self.membership.paused)
                self._read_ahead.wanted.set()

    # -- for metrics and probes, from any thread ------------------------------------------------------------------

    @property
    def max_calls(self) -> int:
        """How many calls of the handler may run here at once, if the server lends it all permits."""
        handler = self.handler
        return min(handler.concurrency, handler.most_calls or handler.concurrency)

    @property
    def pool(self) -> Pool:
        """The tasks that run the handler, and what keeps them from it."""
        return self._runner

    @property
    def task_slots(self) -> tuple[TaskSlot, ...]:
        """The tasks that run the handler; each knows what it runs and since when."""
        return self._runner.task_slots

    # -- for a clock that a test moves ----------------------------------------------------------------------------

    @property
    def running(self) -> int:
        """How many messages its handlers work on."""
        return sum(len(task_slot.messages) for task_slot in self.task_slots)

    @property
    def limits_undecided(self) -> bool:
        """Whether messages wait for an answer of the server to a limit, and not for a time."""
        others = [each for each in (self._borrower, self.holds) if each is not None]
        return any(each.is_undecided for each in (*self.named_rates, *others))

    @property
    def named_rates(self) -> tuple[GroupRate, ...]:
        """The rates whose starts the server counts: of messages, and of permits."""
        own = () if self._group_rate is None else (self._group_rate,)
        return own if self._permits is None else (*own, *self._permits.rates)

    @property
    def waits_for_permits(self) -> bool:
        """Whether nothing goes on until the rate of a permit opens: all handlers that run wait for one, and no other
        message can start beside them."""
        running, group = self.running, self.queue.group_limit
        if self._permits is None or not self._permits.wait_for_a_time(running) or self._runner.begun != running:
            return False  # where more have begun, a redelivered one is just about to run, or one to be settled
        is_full = running >= self.handler.concurrency or (group is not None and group.is_full)
        return is_full or not self.queue.waits_for_a_call

    async def advance_limits(self, seconds: float) -> None:
        """What has started counts as so much longer ago."""
        if self.queue.rate_limit is not None:
            self.queue.rate_limit.advance(seconds)
        for lane in self.lanes.values():
            if lane.windows is not None:
                lane.windows.advance(seconds)
        for rate in self.named_rates:
            rate.advance(seconds + rate.coarseness)

    # -- stopping -------------------------------------------------------------------------------------------------

    def stop(self, grace: float) -> None:
        """Take nothing new; give what runs `grace` seconds. A second call may shorten the grace. Infinite: quiet."""
        self._deadline = min(self._deadline, monotonic() + grace)
        self._stopping.set()

    async def _end_fetching(self) -> None:
        for lane in self.lanes.values():
            lane.quiet()
        with anyio.move_on_after(longest_read(self._settings).total_seconds() + 1):
            try:
                await self.fetchers.exclude()
            except BrokerError as error:
                log.warning("stopping while the server is away: %s", error)

    async def _drain(self) -> None:
        """Hand back what has not started, wait for what runs, settle, release."""
        lanes = list(self.lanes.values())
        await self.lifecycle.hand_back_unstarted(lanes)
        while any(self._runner.running_of(lane) for lane in lanes):
            if monotonic() >= self._deadline:
                for lane in lanes:
                    self._runner.cancel_lane(lane, "stop")
            await asyncio.sleep(0.02)
            if monotonic() >= self._deadline + self._settings.lease_ttl.total_seconds():
                log.error("%r ignores its cancellation: its messages are redelivered to other members", self._runner)
                break
        await self.lifecycle.hand_back_unstarted(lanes)
        with anyio.move_on_after(self._settings.command_timeout.total_seconds()):
            await self.settler.wait_until_settled(lanes)
            await self.lifecycle.hand_back_held(lanes)
            try:
                await self.lifecycle.release(lanes)
            except BrokerError as error:
                log.warning("cannot give back leases, they end by themselves: %s", error)

    async def _release_after_cancel(self) -> None:
        """Cancelled instead of stopped: settle what is done and give leases back, so other members need not wait."""
        lanes = [lane for lane in self.lanes.values() if lane.lease.is_held()]
        if lanes:
            with suppress(BrokerError):
                await self.settler.flush(lanes)
            await self.lifecycle.hand_back_unstarted(lanes)
            for lane in lanes:
                self._runner.forget_running(lane)
            with suppress(BrokerError):
                await self.lifecycle.release(lanes)

    def __repr__(self) -> str:
        return f"<Consumer {self.handler.name} {self._context.name} lanes={sorted(self.lanes)}>"
