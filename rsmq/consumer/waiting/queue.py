"""What may start now and what must wait: order per key, retries that block their key, suspects one at a time, limits.

Pure bookkeeping without I/O. The runner takes from `ready`; everything else is decided here.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from math import inf
from typing import Any, Final, cast

from rsmq.consumer.waiting.flow_names import FlowNames
from rsmq.consumer.waiting.flows import FEW, FEWEST, NONE, SHARE, Flows, IdPage, KeyFlow
from rsmq.consumer.waiting.lane import Lane
from rsmq.consumer.waiting.limits import ConcurrencyLimit, MessageRate, RateLimit
from rsmq.consumer.waiting.named_flows import FlowName
from rsmq.consumer.waiting.raw_entries import RawEntries
from rsmq.consumer.waiting.ready_bands import ReadyBands, TurnsOfBands
from rsmq.consumer.waiting.start_times import StartTimes
from rsmq.consumer.waiting.turns import Turns
from rsmq.handler.bands import BandRules
from rsmq.model.delivery_state import DeliveryState
from rsmq.model.message import Message, RawEntry
from rsmq.model.work import Work

WHOLE: Final = b""
"""The one key of all messages of a partition, with order per partition."""


class Queue:
    """Messages between fetching and handling.

    `in_flight` counts what is ready, waiting behind a running message, or running: the prefetch bound applies to it.
    `blocked` counts what waits behind a key that waits for its retry, for its rate (`held` counts these), or for a
    message of a partition before (`behind_seam`). It has a bound of its own, so one stuck key does not stop the others,
    and what waits for a partition before takes no room from that.
    """

    def __init__(self, *, is_ordered: bool, is_serial: bool = False, prefetch: int = 2000) -> None:
        self._prefetch = prefetch
        self.is_ordered = is_ordered
        self._is_serial = is_serial
        self.ready: deque[Any] = deque()  # messages, and RawEntries if the runner takes them
        self.takes_raw = False  # whether the runner takes RawEntries
        self.rate_limit: RateLimit | None = None
        self.group_limit: ConcurrencyLimit | None = None
        self.message_rate: MessageRate | None = None
        self._times: StartTimes | None = None
        self._on_rest: Callable[[], None] = lambda: None
        self.held = 0
        self.in_flight = 0
        self.behind_seam = 0
        self.blocked = 0
        self.behind = 0
        self._slots = 0
        self._read_ahead = 0
        self._memory = 0
        self._thirsty_above = inf  # so many messages behind keys: slots may soon have nothing to do
        self._most_slots = 0
        self._on_thin: Callable[[], None] = lambda: None
        self._names: FlowNames | None = None
        self._turns: Turns | TurnsOfBands | None = None
        self.bands: ReadyBands | None = None
        """What is ready, if the topic has bands."""
        self._held_names: Counter[FlowName] = Counter()
        self._weights = 0.0  # of all named flows of all lanes
        self._suspects: deque[Message] = deque()
        self._suspect: Message | None = None

    # -- from the fetcher -----------------------------------------------------------------------------------------

    def offer(self, lane: Lane, messages: Sequence[Message], *, is_ahead: bool = False) -> None:
        """Take fetched messages of one lane, in stream order. `is_ahead`: of those behind a key keep only the ids."""
        if lane.flows.raw_entries:
            self.unpack(lane)
        self._add(lane, messages, self.ready, is_ahead=is_ahead and self._read_ahead > 0)
        if lane.flows.is_wanting:
            self._on_thin()

    def _add(self, lane: Lane, messages: Sequence[Message], ready: deque[Any], *, is_ahead: bool = False) -> None:
        if self._names is not None and self._read_ahead:
            self._add_named(lane, messages, ready, self._names, is_ahead=is_ahead)
            return
        flows, is_ordered, is_serial = lane.flows, self.is_ordered, self._is_serial
        waiting = flows.waiting
        is_usual = not (is_ahead or flows.parked or flows.held or flows.resting or flows.seam_keys)
        self.in_flight += len(messages)
        for message in messages:
            if is_serial:
                message.routing_key = WHOLE
            key = message.routing_key
            if is_ordered and key is not None:
                behind = waiting.get(key)
                if behind is None:
                    waiting[key] = NONE  # taken, and nothing behind it: one object for all such keys
                elif is_usual and behind.ids is None:  # without the call
                    if behind is NONE:
                        waiting[key] = KeyFlow((message,))
                    else:
                        behind.append(message)
                    self.behind += 1
                    continue
                else:
                    self._add_behind(lane, message, key, behind, is_ahead=is_ahead)
                    continue
            if message.is_suspect:
                self._admit(message)
            else:
                ready.append(message)

    def _add_behind(self, lane: Lane, message: Message, key: bytes, behind: KeyFlow, *, is_ahead: bool) -> None:
        """A message whose key is taken."""
        flows = lane.flows
        # behind ids there are ids only: their order
        if behind.ids or key in flows.resting or (is_ahead and self._is_far(flows, key, behind)):
            flows.keep_id(key, message)
            lane.in_flight.discard(message.entry_id)
            self.in_flight -= 1
            return
        flows.put_behind(key, message)
        self._wait_behind(flows, key, 1)

    def _wait_behind(self, flows: Flows, key: bytes, count: int) -> None:
        """So many messages wait behind a key in memory."""
        if key in flows.parked:
            self._block(count)
        elif key in flows.held:
            self._hold(count)
        elif key in flows.seam_keys:
            self._wait_for_seam(count)
        else:
            self.behind += count

    def _add_named(
        self, lane: Lane, messages: Sequence[Message], ready: deque[Any], names: FlowNames, *, is_ahead: bool
    ) -> None:
        """The same where messages have a tenant, or a rate by name: one may also wait in the flow of these.

        The last message of a key is behind all others of it: in a named flow, or else behind the key itself.
        """
        flows, named = lane.flows, lane.flows.named
        self.in_flight += len(messages)
        for message in messages:
            key = message.routing_key if self.is_ordered else None
            name = None if key is None or not named else named.flow_of(key)
            behind = None if key is None or name is not None else flows.waiting.get(key)
            if key is not None and behind is not None:
                self._add_behind(lane, message, key, behind, is_ahead=is_ahead)
                continue
            if name is None and (is_ahead or named):
                own = names.of(message)
                name = own if own in named or (is_ahead and self._is_crowded(flows, own)) else None
            if name is not None:
                was_there = named.has(name)
                flows.keep_in(name, message, key, self._low(name))
                self._weigh(flows, name, was_there)
                lane.in_flight.discard(message.entry_id)
                self.in_flight -= 1
                continue
            if key is not None:
                flows.take(key)
            if self._turns is not None:
                self._arrived(flows, names.of(message), message)
            if message.is_suspect:
                self._admit(message)
            else:
                ready.append(message)

    def offer_raw(self, lane: Lane, entries: list[RawEntry], made: dict[int, Message]) -> bool:
        """Take fetched entries, and messages only of those that are not plain. False: a key of the lane is taken, so
        a message is needed for each."""
        if lane.flows.waiting or lane.flows.named or (self._names is not None and self.blocked >= self._memory):
            return False
        self.ready.append(RawEntries(lane, entries, made))
        self.in_flight += len(entries)
        lane.flows.count_raw(1)
        return True

    # -- bands ----------------------------------------------------------------------------------------------------

    def serve_bands(self, order: Sequence[str], rules: BandRules, now_ms: Callable[[], int]) -> ReadyBands:
        """The topic has these bands. Tasks that hold the deque of before find it empty. Tenants take turns in each."""
        names, turns = self._names, self._turns
        if names is None or turns is None:
            bands = ReadyBands(order, rules, now_ms)
        else:
            bands = ReadyBands(order, rules, now_ms, lambda: cast("deque[Any]", Turns(names.of, names.weight)))
            self._turns = TurnsOfBands(bands, turns)
        bands.extend(list(self.ready))
        self.ready.clear()
        self.bands = bands
        self.ready = cast("deque[Any]", bands)  # it looks like one
        return bands

    def load(self, lanes: Iterable[Lane], band: str) -> tuple[int, int]:
        """What counts against the prefetch bound of a band, and what waits for a retry or a rate. `lanes`: all of them.

        Each band has a bound of its own: a full one must not keep the others from being read.
        """
        if self.bands is None:
            return self.in_flight, self.blocked
        own = [lane for lane in lanes if lane.band == band]
        return sum(lane.startable for lane in own), sum(lane.flows.blocked for lane in own)

    # -- read ahead -----------------------------------------------------------------------------------------------

    def read_ahead(self, most: int, memory: int, slots: int, on_thin: Callable[[], None]) -> None:
        """Keep up to `most` ids a lane of messages that wait behind their keys, while fewer are ready than `slots` can
        start, and memory holds more than a quarter of `memory` that waits so. `on_thin` is called when there is
        something to put aside, or to read again."""
        self._read_ahead = most
        self._fit(memory)
        self._most_slots = slots
        self._slots = min(slots, memory // 4)
        self._on_thin = on_thin

    def fit(self, memory: int) -> None:
        """Memory has room for so many messages of the sizes that come now."""
        if self._read_ahead and memory != self._memory:
            self._fit(memory)
            self._slots = min(self._most_slots, memory // 4)

    def _fit(self, memory: int) -> None:
        self._memory = memory
        if self._read_ahead:
            self._thirsty_above = -1 if self._turns is not None else memory // 4

    def may_block_more(self, blocked: int, size: int, most: int) -> bool:
        """Whether more may be read although so many messages wait for a retry or a rate: of this mean size, and most
        bytes."""
        return blocked < 10 * self._prefetch or (blocked * size < most and blocked < self._read_ahead)

    @property
    def is_thirsty(self) -> bool:
        """Whether slots may soon have nothing to do, because what is in memory waits behind keys. With tenants always:
        another one may come next."""
        if self.behind <= self._thirsty_above:
            return False
        return self._turns is not None or len(self.ready) <= self._slots

    @property
    def always_reads_ahead(self) -> bool:
        """Whether what is read may become ids although memory has room."""
        return self._turns is not None and self._read_ahead > 0

    @property
    def room_ahead(self) -> int:
        """How many messages to read although memory is full."""
        if not self.is_thirsty:
            return 0
        if self.always_reads_ahead:
            return max(1, self._memory // 2)
        ready = sum(len(each.entries) if type(each) is RawEntries else 1 for each in self.ready)
        return self._memory // 2 - ready if ready <= self._slots else 0

    def has_room(self, lane: Lane, lanes: Collection[Lane], *, is_taking_over: bool = False) -> bool:
        """Whether a lane may read more: it is below its bound, and all of them below theirs, or it below its share.
        `is_taking_over`: what the last owner had, who may have kept more, has twice the room. While any of it is left,
        the partitions that follow this one wait."""
        most, own = (2 if is_taking_over else 1) * self._read_ahead, lane.flows.without_body
        if not own:
            return True
        is_below = sum(each.flows.without_body for each in lanes) < 10 * most
        return own < most and (is_below or own < 10 * most // max(1, len(lanes)))

    def _is_far(self, flows: Flows, key: bytes, flow: KeyFlow) -> bool:
        """Whether one more message behind a key is kept only as an id."""
        is_stuck = key in flows.parked or key in flows.held or key in flows.seam_keys
        return is_stuck or len(flow) >= FEW or self.behind >= self._memory

    @staticmethod
    def far(lanes: Iterable[Lane]) -> int:
        """How many messages wait of which only the id is kept. May be called from any thread."""
        return sum(lane.flows.far for lane in list(lanes))

    # -- named flows: tenants, and names of rates -----------------------------------------------------------------

    def sort(self, names: FlowNames, *, by_tenant: bool) -> None:
        """Messages have a tenant (`by_tenant`), or a rate by name: what waits for these waits in named flows. Before
        the runner runs."""
        self._names = names
        if by_tenant:
            self._turns = Turns(names.of, names.weight)
            self._fit(self._memory)
            self.ready = cast("deque[Any]", self._turns)  # it looks like one

    @property
    def is_sorted(self) -> bool:
        """Whether messages have a tenant, or a rate by name."""
        return self._names is not None

    def _share(self, name: FlowName) -> int:
        """How many messages of a named flow may be in memory: the flows of all lanes share half of it by weight."""
        assert self._names is not None
        weight = self._names.weight(name[0])
        return max(1, int(min(SHARE * weight, self._memory / 2 * weight / max(weight, self._weights))))

    def _low(self, name: FlowName) -> int:
        """So few in memory, and the next ones of a named flow are read again."""
        return self._share(name) // 2

    def _is_crowded(self, flows: Flows, name: FlowName) -> bool:
        """Whether one more message of a flow is kept only as an id: its rate is used up, or it has its share."""
        if self._turns is None:
            return self._held_names[name] > 0 or self.blocked >= 5 * self._memory
        is_full = 2 * (self.in_flight + self.blocked) >= self._memory
        return is_full and flows.named.near.get(name, 0) >= self._share(name)

    def _arrived(self, flows: Flows, name: FlowName, message: Message) -> None:
        """A message of a named flow is in memory."""
        was_there = flows.named.has(name)
        flows.named.arrived(name, message)
        self._weigh(flows, name, was_there)

    def _weight(self, name: FlowName) -> float:
        return 1.0 if self._names is None else self._names.weight(name[0])

    def _weigh(self, flows: Flows, name: FlowName, was_there: bool) -> None:
        """A flow may have begun, or ended."""
        is_there = flows.named.has(name)
        if is_there != was_there:
            self._weights += self._weight(name) if is_there else -self._weight(name)

    def _started(self, message: Message, lane: Lane) -> None:
        """A message leaves its named flow for good."""
        flows = lane.flows
        name = flows.named.left(message)
        if name is not None:
            self._weigh(flows, name, was_there=True)
        is_thin = name is not None and flows.becomes_thin(name, self._low(name))
        if is_thin or (flows.thin and self.in_flight - self.behind <= self._memory // 2):
            self._on_thin()

    def page(self, lane: Lane) -> IdPage | None:
        """What to read again next in a lane. None: nothing, or memory is full."""
        is_full = self.blocked >= 5 * self._memory or self.in_flight - self.behind >= self._memory
        return lane.flows.page(is_full=self.behind >= self._memory, share_of=None if is_full else self._share)

    def _fill_named(self, lane: Lane, name: FlowName, messages: Sequence[Message]) -> None:
        """They leave their flow, each for its key if that is taken."""
        flows = lane.flows
        for message in messages:
            key = message.routing_key if self.is_ordered else None
            behind = None if key is None else flows.waiting.get(key)
            if key is not None and behind is not None:
                self._add_behind(lane, message, key, behind, is_ahead=True)
                continue
            if key is not None:
                flows.take(key)
            self._arrived(flows, name, message)
            self._admit(message)
        flows.is_supplied(name, self._low(name))

    def fill(
        self, lane: Lane, page: IdPage, key: bytes | FlowName, ids: Sequence[bytes], messages: Sequence[Message]
    ) -> bool:
        """Take messages of a flow that were read again; its first `ids` are not needed any more. False: all was
        forgotten."""
        flows = lane.flows
        was_there = not isinstance(key, bytes) and flows.named.has(key)
        if not flows.filled(page, key, ids):
            return False
        if not isinstance(key, bytes):
            self._weigh(flows, key, was_there)
            lane.in_flight.update([message.entry_id for message in messages])
            self.in_flight += len(messages)
            self._fill_named(lane, key, messages)
            return True
        flow = flows.waiting[key]
        flow.extend(messages)
        lane.in_flight.update([message.entry_id for message in messages])
        self.in_flight += len(messages)
        self._wait_behind(flows, key, len(messages))
        if flows.end_drought(key):
            self.release(lane, key)
            flows.leave_alone(key)
        flows.look_again(key)
        return True

    def wait_for_retry(self, message: Message, lane: Lane, *, is_ahead: bool = False) -> Message | None:
        """Take over a pending message whose retry is not due yet. Returns what is parked; None: its key has earlier
        messages, so it needs no timer until these are done."""
        if lane.flows.raw_entries:
            self.unpack(lane)
        if self._is_serial:
            message.routing_key = WHOLE
        key = message.routing_key
        assert key is not None, "a message without a key blocks nothing"
        if key in lane.flows.waiting or (lane.flows.named and lane.flows.named.flow_of(key)):
            lane.recovery.wait_untimed(message.entry_id)
            self.offer(lane, (message,), is_ahead=is_ahead)
            return None
        self.in_flight += 1
        return self.park(message, lane)

    def ask_again(self, lane: Lane, ids: Collection[bytes]) -> None:
        """Retries without a timer have another due time. A message asks for it before it starts."""

    # -- to the runner --------------------------------------------------------------------------------------------

    def serve_raw(self) -> None:
        """The runner takes RawEntries."""
        self.takes_raw = True

    def limit(
        self,
        *,
        rate: RateLimit | None = None,
        message_rate: MessageRate | None = None,
        group: ConcurrencyLimit | None = None,
    ) -> None:
        """Limits to ask before a message starts: before the runner runs."""
        self.rate_limit = rate
        self.message_rate = message_rate
        self.group_limit = group

    def limit_messages(self, limit: MessageRate | None) -> None:
        """Another limit to ask for each message, from now on."""
        self.message_rate = limit

    @property
    def waits_for_a_call(self) -> int:
        """How many messages are ready: each may be a call. Those of a closed rate are not."""
        if self.rate_limit is not None and self.rate_limit.is_closed:
            return 0
        return sum(len(each.entries) if type(each) is RawEntries else 1 for each in self.ready)

    @property
    def is_limited(self) -> bool:
        """Whether ready messages must be taken with `take`."""
        return (
            self.rate_limit is not None
            or self.group_limit is not None
            or self.message_rate is not None
            or self._turns is not None
            or self._times is not None
        )

    @property
    def _is_closed(self) -> bool:
        """Whether the rate of the whole handler is used up."""
        return self.rate_limit is not None and self.rate_limit.is_closed

    @property
    def limited(self) -> int:
        """How many messages in memory only wait for a rate, with those behind their keys. May be called from any
        thread."""
        if not self._is_closed:
            return self.held + (0 if self._turns is None else sum(self._turns.waiting().values()))
        raw, single = RawEntries, list(self.ready)
        return self.held + sum(len(e.entries) if type(e) is raw else 1 + self.waits_behind(e, e.origin) for e in single)

    def waits(self, lanes: Iterable[Lane]) -> dict[str, int]:
        """How many messages wait, and for what: `key` (behind one that runs or is ready), `retry`, `rate` or `time`,
        with those behind. May be called from any thread."""
        flows = [lane.flows for lane in list(lanes)]
        for_retry, for_rate = (sum(each.far_behind(held) for each, held in of) for of in (
            [(each, each.parked) for each in flows], [(each, each.held) for each in flows],
        ))  # fmt: skip
        for_time = sum(len(each.resting) + each.far_behind(each.resting.keys) for each in flows)
        far = sum(each.far - each.named.count for each in flows) - for_retry - for_rate - for_time
        return {
            "key": max(0, self.behind) + max(0, self.behind_seam) + max(0, far),
            "retry": max(0, self.blocked - self.held - self.behind_seam)
            + for_retry
            + sum(len(each.emptied) for each in flows),
            "rate": self.limited + for_rate + sum(count for name, count in self.far_in(flows) if self._waits_for(name)),
            "time": for_time,
        }

    @staticmethod
    def far_in(flows: Iterable[Flows]) -> list[tuple[FlowName, int]]:
        """How many wait as ids in each named flow."""
        return [pair for each in flows for pair in each.named.counts()]

    def _waits_for(self, name: FlowName) -> bool:
        """Whether a named flow waits for a rate. If not, only for the turn of its tenant: it is ready."""
        return self._turns is None or self._is_closed or self._turns.is_closed(name)

    def tenants(self, lanes: Iterable[Lane]) -> Counter[str]:
        """How many messages of which tenant have not started: ready, or waiting for a rate. Those behind a key are not
        counted. May be called from any thread."""
        found = Counter[str]()
        if self._turns is not None:
            for tenant, count in self._turns.ready().items():
                found[tenant or ""] += count
            for (tenant, _), count in self.far_in([lane.flows for lane in list(lanes)]):
                found[tenant or ""] += count
        return found

    def behind_keys(self, lanes: Iterable[Lane]) -> Counter[str]:
        """How many messages wait behind which key. May be called from any thread."""
        found = Counter[str]()
        for lane in list(lanes):
            for key, number in lane.flows.lengths():
                found[key.decode(errors="backslashreplace")] += number
        return found

    def far_by_rate(self, lanes: Iterable[Lane]) -> Counter[str]:
        """How many messages wait as ids for the rate of which name. May be called from any thread."""
        found = Counter[str]()
        for flow, count in self.far_in([lane.flows for lane in list(lanes)]):
            if flow[1] is not None and self._waits_for(flow):
                found[flow[1]] += count
        if self._turns is not None:
            for (_, name), count in self._turns.waiting().items():
                found[name or ""] += count
        return found

    def work(self, running: int, lanes: Collection[Lane]) -> Work:
        """What all messages do now, of which so many are running. May be called from any thread."""
        raw, single, waits = RawEntries, [*self.ready, *self._suspects], self.waits(lanes)
        in_memory = sum(len(each.entries) if type(each) is raw else 1 for each in single)
        parked = sum(len(lane.flows.parked) for lane in lanes)
        behind_closed = max(0, self.limited - self.held - in_memory) if self._is_closed else 0
        for_key = waits["key"] - behind_closed + waits["retry"] - parked
        if self._is_closed:
            in_memory = 0
        elif self._turns is not None:
            in_memory -= sum(self._turns.waiting().values())
        far = sum(count for name, count in self.far_in([lane.flows for lane in lanes]) if not self._waits_for(name))
        return Work(running, max(0, in_memory) + far, max(0, for_key), waits["rate"], parked, waits["time"])

    def state_of(self, lane: Lane, entry_id: bytes) -> tuple[DeliveryState, Message | None] | None:
        """What a message of a lane waits for, with the message unless only its id is kept.

        None: it does not wait here, so it runs, waits for its retry, or is not in this member.
        """
        flows = lane.flows
        if (found := flows.named.before(entry_id)) is not None:
            return self._state_in(*found), None
        if (behind := flows.number_before(entry_id)) is not None:
            return DeliveryState("waiting_for_key", behind[0]), behind[1]
        held = next((each for each in list(flows.held.values()) if each.entry_id == entry_id), None)
        if held is not None:
            state = None if self.message_rate is None else self.message_rate.state_of(held, lane)
            tenant = None if self._names is None else self._names.of(held)[0]
            return replace(state or DeliveryState("waiting_for_rate"), tenant=tenant), held
        return self._state_of_ready(lane, entry_id)

    def _state_in(self, name: FlowName, before: int) -> DeliveryState:
        """The state of what waits in a named flow."""
        if self._waits_for(name):
            return DeliveryState("waiting_for_rate", before, name[1], name[0])
        return DeliveryState("waiting_for_turn", before, None, name[0])

    def _state_of_ready(self, lane: Lane, entry_id: bytes) -> tuple[DeliveryState, Message | None] | None:
        before = 0
        for each in [*self.ready, *self._suspects]:
            if type(each) is RawEntries:
                ids = [raw_id for raw_id, _ in each.entries] if each.origin is lane else []
                if entry_id in ids:
                    at = ids.index(entry_id)
                    return self._state_if_ready(before + at), each.message(at)
                before += len(each.entries)
            elif each.origin is lane and each.entry_id == entry_id:
                flow = lane.flows.named.near_before(each) if self._turns is not None else None
                return (self._state_if_ready(before) if flow is None else self._state_in(*flow)), each
            else:
                before += 1
        return None

    def _state_if_ready(self, before: int) -> DeliveryState:
        """The state of a ready message: it may wait for a limit of the whole handler."""
        if self._is_closed:
            return DeliveryState("waiting_for_rate", before)
        if self.group_limit is not None and self.group_limit.is_full:
            return DeliveryState("waiting_for_permit", before)
        return DeliveryState("ready", before)

    def taker(self) -> Callable[[], Any]:
        """What takes the next ready message: `take`, or less where there is no limit."""
        return self.take if self.is_limited else self.ready.popleft

    def can_take(self) -> bool:
        """Whether the calling task may start a ready message now."""
        return (
            bool(self.ready)
            and (self.rate_limit is None or self.rate_limit.room() > 0)
            and (self.group_limit is None or self.group_limit.admits())
        )

    def take(self) -> Message | RawEntries | None:
        """The next ready message, which the calling task starts now. None: there is none, or a limit is reached.

        Those whose key, or name, may start none now are held. Raw entries are not counted: `RawCalls` asks for each.
        """
        ready, rate, whole, group = self.ready, self.message_rate, self.rate_limit, self.group_limit
        times = self._times
        while ready and (whole is None or whole.room()) and (group is None or group.admits()):
            message = ready.popleft()
            is_raw = type(message) is RawEntries
            if times is not None and self._rests(times, message, message.origin):
                continue
            if is_raw or rate is None or rate.starts(message, message.origin):
                if whole is not None and not is_raw:
                    whole.start()
                if group is not None:
                    group.enter()
                if self._names is not None and not is_raw:
                    self._started(message, message.origin)
                if times is not None and not is_raw:
                    message.origin.flows.resting.excused.discard(message.entry_id)
                return message  # type: ignore[no-any-return]
            self.hold(message, message.origin)
        return None

    # -- a time ---------------------------------------------------------------------------------------------------

    def start_by(self, times: StartTimes, on_rest: Callable[[], None]) -> None:
        """A rule says when a message may start: before the runner runs. `on_rest` is called when one has to wait."""
        self._times = times
        self._on_rest = on_rest

    def recovered(self, lane: Lane) -> None:
        """Everything that was pending in a lane is here."""
        lane.flows.calls.recovered()
        if lane.flows.thin:
            self._on_thin()

    def load_times(self, lane: Lane, recovery: int, dues: Mapping[bytes, float]) -> None:
        """Until when messages of a lane wait, as the server knows it at the begin of a recovery."""
        lane.flows.resting.load(recovery, dues)
        self._on_rest()

    def _rests(self, times: StartTimes, message: Message, lane: Lane) -> bool:
        """Whether a message that was taken may not start yet: then it waits."""
        resting, entry_id = lane.flows.resting, message.entry_id
        due = resting.due_of(entry_id) if resting.known else None
        is_known = due is not None
        if entry_id in resting.excused:
            return False
        if due is None:
            due = times.due_ms(message)
        if due is None:
            return False
        self._rest(message, lane)
        if is_known:
            resting.look_in(0)
        else:
            resting.note(entry_id, due)
        self._on_rest()
        return True

    def _rest(self, message: Message, lane: Lane) -> None:
        key, flows = message.routing_key if self.is_ordered else None, lane.flows
        flow = None if key is None else flows.waiting.get(key)
        if flow is not None and flow.ids:  # some of these may be on their way, so nothing can be put before them
            self.hold(message, lane)
            return
        self._next_suspect(message)
        if self._names is not None:
            self._started(message, lane)
        left = flows.rest(key, message)
        lane.forget([each.entry_id for each in left])
        self.in_flight -= len(left)
        self.behind -= len(left) - 1
        self._on_thin()

    def wake(self, lane: Lane, entry_id: bytes, *, is_rescheduled: bool, is_cancelled: bool = False) -> None:
        """The time of a message has come, if it waits here for one. One that is cancelled leaves when it is read."""
        if lane.flows.wake(entry_id, is_rescheduled=is_rescheduled):
            self._on_thin()
            return
        message = next((each for each in lane.flows.held.values() if each.entry_id == entry_id), None)
        if message is not None:
            if is_rescheduled:
                lane.flows.resting.excused.add(entry_id)
            self.let_go(message, lane)

    def hold(self, message: Message, lane: Lane) -> None:
        """The rate of a ready message is used up: it and what is behind its key wait for `let_go`."""
        self._next_suspect(message)
        lane.flows.hold(self._held_as(message), message)
        if self._names is not None:
            self._held_names[self._names.of(message)] += 1
        if self._turns is not None:
            self._turns.hold(message)
        behind = self.waits_behind(message, lane)
        self.behind -= behind
        self._hold(1 + behind)

    def _held_as(self, message: Message) -> bytes | str:
        """Its key, or its id where no key waits behind it."""
        key = message.routing_key if self.is_ordered else None
        return message.entry_id.decode() if key is None else key

    def waits_behind(self, message: Message, lane: Lane) -> int:
        """How many messages wait behind the key of a message."""
        return lane.flows.behind(message.routing_key)

    def holds(self, message: Message, lane: Lane) -> bool:
        """Whether a message still waits for its rate: its lane was not dropped meanwhile, and it is not cancelled."""
        return lane.flows.held.get(self._held_as(message)) is message

    def let_go(self, message: Message, lane: Lane) -> None:
        """Its rate has room again. It is the next one to start, so no other message can use that up."""
        if self.holds(message, lane):
            self._end_hold(lane, self._held_as(message), message)
            self._admit(message, is_first=True)
            if lane.flows.thin:
                self._on_thin()

    def _end_hold(self, lane: Lane, name: bytes | str, message: Message) -> None:
        lane.flows.let_go(name)
        self._forget_hold(message)
        behind = self.waits_behind(message, lane)
        self.behind += behind
        self._hold(-1 - behind)

    def _forget_hold(self, message: Message) -> None:
        """A message is not held any more."""
        if self._names is not None:
            name = self._names.of(message)
            self._held_names[name] -= 1
            if self._held_names[name] <= 0:
                del self._held_names[name]
        if self._turns is not None:
            self._turns.let_go(message)

    def startable(self) -> int:
        """How many ready messages other tasks may start now."""
        count = len(self.ready)
        for limit in (self.rate_limit, self.group_limit):
            if count and limit is not None:
                count = min(count, limit.room())
        return count

    def take_raw(self, limit: int) -> list[RawEntries]:
        """Up to `limit` entries from the front of what is ready, as far as there are no messages among them."""
        taken, ready = list[RawEntries](), self.ready
        while limit > 0 and ready and type(ready[0]) is RawEntries:
            raw = ready[0]
            if len(raw.entries) > limit:
                taken.append(raw.part(0, limit))
                ready[0] = raw.part(limit)
                break
            taken.append(ready.popleft())
            raw.origin.flows.count_raw(-1)
            limit -= len(raw.entries)
        if taken and self.group_limit is not None:
            self.group_limit.enter()
        return taken

    def put_back_raw(self, raw: RawEntries, *, is_held: bool = False) -> None:
        """The entries that were not handled are ready again, first. `is_held`: the rate of the first is used up, so the
        lane's become messages, which can be held by their keys."""
        if len(raw.done) < len(raw.entries):
            self.ready.appendleft(raw.part(len(raw.done)))
            raw.origin.flows.count_raw(1)
            if is_held:
                self.unpack(raw.origin)

    def split_raw(self, raw: RawEntries) -> Message:
        """The entry after those done is running, so its key is taken. The lane's other entries become messages."""
        lane, first = raw.origin, deque[Message]()
        message, *later = raw.part(len(raw.done)).messages()
        self.take_keys(lane, [message])
        self.in_flight -= len(later)
        self._add(lane, later, first)
        self.ready.extendleft(reversed(first))
        if lane.flows.raw_entries:
            self.unpack(lane)
        return message

    def leave_raw(self, count: int) -> None:
        """So many raw entries were handled."""
        self.in_flight -= count

    def take_keys(self, lane: Lane, messages: Iterable[Message]) -> list[Message]:
        """Take the keys of running messages that were raw. Returns the first of each key, and those without a key."""
        heads = []
        for message in messages:
            if self._is_serial:
                message.routing_key = WHOLE
            key = message.routing_key
            if not self.is_ordered or key is None or lane.flows.take(key):
                heads.append(message)
        return heads

    def unpack(self, lane: Lane) -> None:
        """Replace a lane's raw entries by messages, in the same order."""
        before = list(self.ready)
        self.ready.clear()
        for each in before:
            if type(each) is RawEntries and each.origin is lane:
                self.in_flight -= len(each.entries)
                self._add(lane, each.messages(), self.ready)
            else:
                self.ready.append(each)
        lane.flows.unpacked()

    # -- after a handler ------------------------------------------------------------------------------------------

    def finish(self, message: Message, lane: Lane) -> None:
        """A message has left the handler for good (settled, dead-lettered, lost): the next of its key may start."""
        self.in_flight -= 1  # `leave`, without the call
        if message.is_suspect:
            self._next_suspect(message)
        key = message.routing_key
        if key is not None and self.is_ordered:
            waiting = lane.flows.waiting
            if waiting.get(key) is NONE:
                del waiting[key]  # nearly always: without the call
            else:
                self.release(lane, key)

    def leave(self, message: Message) -> None:
        """A message is not in flight any more; its key stays taken."""
        self.in_flight -= 1
        self._next_suspect(message)

    def release(self, lane: Lane, key: bytes) -> None:
        """Let the next message of a key start."""
        flows = lane.flows
        waiting = flows.waiting
        behind = waiting.get(key)
        if behind is not None and behind.ids is None:  # nearly always: without the call
            if not behind:
                del waiting[key]
                return
            following: Message | None = behind.popleft()
        else:
            following = flows.next(key)
        if following is not None:
            self.behind -= 1
            if following.is_suspect:
                self._admit(following)
            else:
                self.ready.append(following)
        if flows.thin:
            self._on_thin()

    def let_key_go(self, lane: Lane, key: bytes) -> None:
        """A key is free in the partitions before: the first message that has waited for that starts."""
        waited = lane.flows.free_before(key)
        self.behind += waited
        self._wait_for_seam(-waited)
        self.release(lane, key)

    def take_behind(self, lane: Lane, key: bytes, most: int) -> list[Message]:
        """Up to so many next messages of a key, to be handled with the one that holds it."""
        taken = lane.flows.take_behind(key, most)
        self.behind -= len(taken)
        if lane.flows.thin:
            self._on_thin()
        return taken

    def blocks_its_key(self, message: Message) -> bool:
        """Whether a parked message stays pending, with the later messages of its key waiting behind it."""
        return self.is_ordered and (self._is_serial or message.routing_key is not None)

    def restart(self, message: Message, following: Message) -> None:
        """A message that is in flight and holds its key starts once more, as `following`."""
        if self._suspect is message:
            self._suspect = following
        self._admit(following)

    def put_back(self, lane: Lane, later: Sequence[Message]) -> None:
        """Messages of one key that were taken together with the one that holds it wait behind it again, first."""
        if later:
            key = later[0].routing_key
            assert key is not None, "only messages with a key wait"
            lane.flows.put_first(key, later)
            self.behind += len(later)

    def park(self, message: Message, lane: Lane) -> Message:
        """Keep a failed message and its key out of the way until `resume`. Returns what is parked: while memory is full
        of what waits, a message without its body."""
        key = message.routing_key
        assert key is not None, "a message without a key blocks nothing"
        self._next_suspect(message)
        waiting = lane.flows.park(key, message)
        self.behind -= waiting - 1
        self._block(waiting)
        if not self._read_ahead or self.blocked <= self._memory:
            return message
        self.blocked -= 1
        return lane.flows.empty(key, message)

    def resume(self, message: Message, lane: Lane, following: Message) -> None:
        """A parked message is due, for its `following` attempt; its body may have to be read first."""
        if lane.flows.wants_body(message, following):
            self._on_thin()
            return
        waited = lane.flows.unpark(message.routing_key, message)
        if waited:  # otherwise the lane was dropped meanwhile
            self.behind += waited - 1
            self._block(-waited)
            self._admit(following)
            if lane.flows.thin:
                self._on_thin()

    def due(self, lane: Lane, most: int) -> list[bytes]:
        """Up to so many parked messages that are due and whose bodies are to be read now."""
        room = 0 if self.in_flight >= 2 * self._memory else max(FEWEST, self._memory - self.in_flight)
        return list(islice(lane.flows.bodies_wanted, min(most, room)))

    def fill_body(self, lane: Lane, entry_id: bytes, fields: list[bytes] | None) -> None:
        """The body of a parked message that is due was read. None: it was deleted, which its start finds out."""
        if entry_id not in lane.flows.bodies_wanted:  # it was rescheduled meanwhile, and has no body yet
            return
        pair = self._end_emptied(lane, entry_id)
        if pair is None:
            return
        message, following = pair
        if fields is not None:
            full = Message(lane, entry_id, fields, following.attempt)
            full.is_redelivered, full.is_suspect = following.is_redelivered, following.is_suspect
            full.routing_key = following.routing_key
            following = full
        self.resume(message, lane, following)

    def _end_emptied(self, lane: Lane, entry_id: bytes) -> tuple[Message, Message] | None:
        """A parked message counts as one in memory again."""
        if entry_id in lane.flows.emptied:
            self.blocked += 1
        return lane.flows.fill_body(entry_id)

    def withdraw(self, lane: Lane) -> list[Message]:
        """Remove and return the lane's messages that have not started, and forget its parked ones.

        Running messages stay, and finish or are cancelled. The server knows when a parked message is due.
        """
        flows = lane.flows
        if flows.raw_entries:
            self.unpack(lane)
        heads = [message for message in (*self.ready, *self._suspects) if message.origin is lane]
        for waiting in (self.ready, self._suspects):
            kept = [message for message in waiting if message.origin is not lane]
            waiting.clear()
            waiting.extend(kept)
        if self._suspect in heads:
            self._next_suspect(self._suspect)
        self.in_flight -= len(heads)
        withdrawn = [*heads, *flows.held.values()]
        for message in flows.held.values():
            self._forget_hold(message)
        self._weights -= sum(map(self._weight, {*flows.named, *flows.named.near}))
        for key, behind in flows.waiting.items():
            self._forget_behind(lane, key, len(behind))
            withdrawn.extend(behind)
        self.blocked -= len(flows.parked) - len(flows.emptied) + len(flows.held)
        self.held -= len(flows.held)
        lane.forget([message.entry_id for message in flows.parked.values()])
        flows.clear(heads)
        return withdrawn

    def cancel(self, lane: Lane, ids: Collection[bytes]) -> set[bytes]:
        """Remove messages that have not started, wherever they wait: also parked and held ones. Returns their ids."""
        gone, flows = set[bytes](), lane.flows
        if not ids:
            return gone
        if flows.raw_entries:
            self.unpack(lane)
        for key in flows.waiting:
            removed = flows.remove_behind(key, ids)
            self._forget_behind(lane, key, len(removed))
            gone |= removed
        for waiting in (self.ready, self._suspects):
            for message in [each for each in waiting if each.origin is lane and each.entry_id in ids]:
                waiting.remove(message)
                if self._names is not None:
                    self._started(message, lane)
                gone.add(message.entry_id)
                self.finish(message, lane)
        for message in [each for each in flows.parked.values() if each.entry_id in ids]:
            self._end_emptied(lane, message.entry_id)
            waited = flows.unpark(message.routing_key, message)
            self.behind += waited - 1
            self._block(-waited)
            gone.add(message.entry_id)
            self.finish(message, lane)
        for name, message in [pair for pair in flows.held.items() if pair[1].entry_id in ids]:
            self._end_hold(lane, name, message)
            if self._names is not None:
                self._started(message, lane)
            gone.add(message.entry_id)
            self.finish(message, lane)
        if flows.thin:
            self._on_thin()
        return gone

    def _forget_behind(self, lane: Lane, key: bytes, count: int) -> None:
        """So many messages that waited behind a key are gone."""
        if key in lane.flows.parked:
            self.blocked -= count
        elif key in lane.flows.held:
            self.blocked -= count
            self.held -= count
        elif key in lane.flows.seam_keys:
            self.blocked -= count
            self.behind_seam -= count
        else:
            self.in_flight -= count
            self.behind -= count

    def _admit(self, message: Message, *, is_first: bool = False) -> None:
        """To `ready`, unless it is a suspect and another one is out. One that has not started gives way to the first:
        it may be of a tenant whose turn is closed, and the first is what its limit waits for."""
        if message.is_suspect:
            if self._suspect not in (None, message) and not (is_first and self._takes_back(self._suspect)):
                self._suspects.appendleft(message) if is_first else self._suspects.append(message)
                return
            self._suspect = message
        self.ready.appendleft(message) if is_first else self.ready.append(message)

    def _takes_back(self, message: Message) -> bool:
        """Whether the suspect that is out has not started: it is the next one again."""
        try:
            self.ready.remove(message)
        except ValueError:
            return False
        self._suspects.appendleft(message)
        return True

    def _next_suspect(self, message: Message | None) -> None:
        """If a message is the suspect that is out, the next one may start."""
        if self._suspect is not message:
            return
        self._suspect = None
        if self._suspects:
            self._admit(self._suspects.popleft())

    def _hold(self, count: int) -> None:
        self.held += count
        self._block(count)

    def _wait_for_seam(self, count: int) -> None:
        self.behind_seam += count
        self._block(count)

    def _block(self, count: int) -> None:
        self.blocked += count
        self.in_flight -= count

    def __repr__(self) -> str:
        return f"<Queue ready={len(self.ready)} in_flight={self.in_flight} blocked={self.blocked}>"
