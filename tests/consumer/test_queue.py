"""The queue decides what may start: checked against everything that must never happen, over random histories."""

from __future__ import annotations

from collections import defaultdict
from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rsmq.consumer.waiting.context import ConsumerContext
from rsmq.consumer.waiting.flow_names import FlowNames
from rsmq.consumer.waiting.flows import IdPage
from rsmq.consumer.waiting.gathering_queue import GatheringQueue
from rsmq.consumer.waiting.lane import Lane
from rsmq.consumer.waiting.limits import RateLimit
from rsmq.consumer.waiting.queue import Queue
from rsmq.handler.handler import build_handler
from rsmq.handler.rate_limit import Rate
from rsmq.handler.tenants import Tenants
from rsmq.heartbeat.lease import Lease
from rsmq.model.keys import Keys
from rsmq.model.message import Message
from rsmq.model.settings import Settings
from rsmq.model.work import Work
from rsmq.redis.client.connector import Client
from rsmq.redis.topics import Topic

STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            [
                "offer",
                "offer",
                "start",
                "finish",
                "park",
                "resume",
                "ask_bodies",
                "answer_bodies",
                "move",
                "hold",
                "let_go",
                "withdraw",
                "cancel",
                "put_aside",
                "ask",
                "answer",
            ]
        ),
        st.integers(0, 3),
        st.booleans(),
    ),
    max_size=120,
)


def make_lane(partition: int = 0, prefix: str = "t") -> Lane:
    """A lane whose lease never ends."""
    lease = Lease("topic", "group", partition, "", "me", "1", float("inf"))
    return Lane(Keys(prefix), "topic", partition, "group", lease)


def make_context(client: Client, settings: Settings, lanes: dict[int, Lane] | None = None) -> ConsumerContext:
    """What the roles of a member `me` share that serves the group `group`."""

    async def handle(_data: bytes) -> None:
        """Never called."""

    topic = Topic("topic", 8, 0, "reject", timedelta(0), 0, 0)
    handler = build_handler(handle, "topic", group="group")
    return ConsumerContext(client, Keys(settings.prefix), settings, "me", topic, handler, lanes or {})


def make_message(lane: Lane, number: int, key: int | None, *, is_suspect: bool = False) -> Message:
    """A message of a lane; key 0 stands for no key."""
    entry = [b"data", b"x"] + ([b"key", str(key).encode()] if key else [])
    message = Message(lane, f"{number}-0".encode(), entry)
    message.is_suspect = is_suspect
    return message


class History:
    """Drives a queue as the runner would, and notes what started in which order."""

    def __init__(self) -> None:
        self.queue, self.lane = Queue(is_ordered=True), make_lane()
        self.queue.read_ahead(100, 2, 1, lambda: None)
        self.stored: dict[bytes, Message] = {}
        self.aside = set[bytes]()
        self.cancelled = set[bytes]()
        self.page: IdPage | None = None
        self.running: list[Message] = []
        self.parked: list[Message] = []
        self.bodies: list[bytes] = []
        self.held: list[Message] = []
        self.offered: dict[bytes, list[Message]] = defaultdict(list)
        self.number = 0

    def offer(self, choice: int, is_suspect: bool) -> None:
        """A new message comes in."""
        self.number += 1
        message = make_message(self.lane, self.number, choice, is_suspect=is_suspect)
        if message.routing_key is not None:
            self.offered[message.routing_key].append(message)
        self.stored[message.entry_id] = message
        self.lane.in_flight.add(message.entry_id)
        self.queue.offer(self.lane, [message], is_ahead=True)

    def put_aside(self, choice: int) -> None:
        """The server knows that some have not started."""
        ids = list(self.lane.flows.aside)[: 1 + choice]
        self.aside.update(ids)
        self.lane.flows.is_aside(ids)

    def cancel(self, choice: int) -> None:
        """Messages are cancelled: those in memory at once, the others when they are read again."""
        ids = [each for row in self.offered.values() for each in row[choice : choice + 1]]
        started = {each.entry_id for each in (*self.running, *self.lane.flows.parked.values(), *self.held)}
        wanted = {message.entry_id for message in ids if message.entry_id not in started}
        for entry_id in self.queue.cancel(self.lane, wanted):
            self.lane.in_flight.discard(entry_id)
            self._gone(self.stored[entry_id])
        self.cancelled |= wanted & set(self.lane.flows.far_ids())

    def ask(self, _: int) -> None:
        """Bodies are asked for."""
        if self.page is None:
            self.page = self.queue.page(self.lane)
            for ids in self.page.by_key.values() if self.page else ():
                assert self.aside.issuperset(ids), "the server may believe that it has started"

    def answer(self, choice: int) -> None:
        """They are there, up to a budget."""
        page, self.page = self.page, None
        for key, ids in page.by_key.items() if page else ():
            got = ids[: 1 + choice]
            messages = [self.stored[each] for each in got if each not in self.cancelled]
            assert page is not None
            if self.queue.fill(self.lane, page, key, got, messages):
                for each in self.cancelled.intersection(got):
                    self._gone(self.stored[each])
        if page:
            self.lane.flows.answered(page)

    def start(self) -> None:
        """A worker takes the next one; it must be the oldest of its key that is not finished."""
        if not self.queue.ready:
            return
        self._started(self.queue.ready.popleft())

    def _started(self, message: Message) -> None:
        self.running.append(message)
        key = message.routing_key
        assert message.data == b"x", "it started without its body"
        if key is not None:
            assert self.offered[key][0].entry_id == message.entry_id, "a later message of a key started first"
            assert sum(other.routing_key == key for other in self.running) == 1, "two of one key run at once"
        assert sum(other.is_suspect for other in self.running) <= 1, "two suspects run at once"

    def finish(self, choice: int) -> None:
        """A handler is done."""
        if self.running:
            message = self.running.pop(choice % len(self.running))
            self._gone(message)
            self.queue.finish(message, self.lane)

    def park(self, choice: int) -> None:
        """A handler failed, its message waits for a retry."""
        keyed = [message for message in self.running if message.routing_key is not None]
        if keyed:
            message = keyed[choice % len(keyed)]
            self.running.remove(message)
            self.parked.append(self.queue.park(message, self.lane))

    def resume(self, choice: int) -> None:
        """A retry is due. If its message has left its body, that is to be read first."""
        if self.parked:
            parked = self.parked.pop(choice % len(self.parked))
            self.queue.resume(parked, self.lane, parked.again())

    def ask_bodies(self, choice: int) -> None:
        """Bodies of retries are asked for."""
        self.bodies = self.bodies or self.queue.due(self.lane, 1 + choice)

    def answer_bodies(self, _: int) -> None:
        """They are there, also of those that were rescheduled meanwhile."""
        for entry_id in self.bodies:
            key = self.stored[entry_id].routing_key or b""
            self.queue.fill_body(self.lane, entry_id, [b"data", b"x", b"key", key])
        self.bodies.clear()

    def move(self, choice: int) -> None:
        """A retry is rescheduled, also one that is due and whose body is being read."""
        ids = {each.entry_id for each in list(self.lane.flows.parked.values())[choice : choice + 1]}
        copies = self.lane.flows.stop_timers(ids)
        self.parked = [each for each in self.parked if each.entry_id not in ids] + copies
        for each in copies:
            self.lane.flows.timed(each.entry_id)

    def hold(self, _: int) -> None:
        """The key of the next one has used up its rate."""
        if self.queue.ready and self.queue.ready[0].routing_key is not None:
            message = self.queue.ready.popleft()
            self.held.append(message)
            self.queue.hold(message, self.lane)

    def let_go(self, choice: int) -> None:
        """Its rate has room again."""
        if self.held:
            self.queue.let_go(self.held.pop(choice % len(self.held)), self.lane)

    def withdraw(self) -> None:
        """The lane is handed over: only what runs remains."""
        far = set(self.lane.flows.far_ids())
        assert far >= {entry_id for entry_id, _ in self.lane.flows.unsure()}
        for message in list(self.lane.flows.parked.values()):
            self._gone(message)
        for message in [*self.queue.withdraw(self.lane), *map(self.stored.__getitem__, far)]:
            self._gone(message)
        self.parked.clear()
        self.bodies.clear()
        for message in self.held:
            self.queue.let_go(message, self.lane)  # a timer that comes late changes nothing
        self.held.clear()

    def _gone(self, message: Message) -> None:
        if message.routing_key is not None:
            self.offered[message.routing_key].remove(self.stored[message.entry_id])

    def check(self) -> None:
        """What is counted is what is there."""
        behind = {key: len(messages) for key, messages in self.lane.flows.waiting.items()}
        blocked = sum(count for key, count in behind.items() if key in self.lane.flows.parked) + len(
            self.lane.flows.parked
        )
        held = sum(count for key, count in behind.items() if key in self.lane.flows.held) + len(self.lane.flows.held)
        waiting = sum(behind.values()) - (blocked - len(self.lane.flows.parked)) - (held - len(self.lane.flows.held))
        assert self.queue.held == self.queue.limited == held
        assert self.queue.blocked == blocked + held - len(self.lane.flows.emptied)
        suspects = len(self.queue._suspects)
        assert self.queue.behind == waiting
        assert self.lane.flows.far == len(list(self.lane.flows.far_ids()))
        assert self.queue.in_flight == len(self.running) + len(self.queue.ready) + waiting + suspects
        parked = len(self.lane.flows.parked)
        far, far_held = self.lane.flows.far, self.lane.flows.far_behind(self.lane.flows.held)
        assert self.queue.work(len(self.running), [self.lane]) == Work(
            running=len(self.running),
            ready=len(self.queue.ready) + suspects,
            waiting_for_key=waiting + blocked - parked + far - far_held,
            waiting_for_rate=held + far_held,
            waiting_for_retry=parked,
        )


class NamedHistory(History):
    """The same with flows of names: tenants, or names of rates. A key may name several of them."""

    def __init__(self, *, by_tenant: bool) -> None:
        super().__init__()
        self.names: dict[bytes, str] = {}
        of = self._name
        names = FlowNames(Tenants(of, {"1": 2}) if by_tenant else None, [] if by_tenant else [of])
        self.by_tenant = by_tenant
        self.queue.sort(names, by_tenant=by_tenant)

    def _name(self, message: Message) -> str | None:
        return self.names[message.entry_id]

    def offer(self, choice: int, is_suspect: bool) -> None:
        """A new message comes in, of one of three names."""
        self.names[f"{self.number + 1}-0".encode()] = str((self.number * 7 // 3) % 3)
        super().offer(choice, is_suspect and choice == 1)

    def start(self) -> None:
        """A worker takes the next one; it must be the oldest of its key that is not finished."""
        before = len(self.queue.ready)
        message = self.queue.take()
        assert (message is not None) == (before > 0)
        if isinstance(message, Message):
            self._started(message)

    def hold(self, _: int) -> None:
        """The rate of the next one is used up."""
        if self.queue.ready:
            message = self.queue.ready.popleft()
            self.held.append(message)
            self.queue.hold(message, self.lane)

    def check(self) -> None:
        """What is counted is what is there."""
        flows, named = self.lane.flows, self.lane.flows.named
        far = list(flows.far_ids())
        assert (flows.far, named.count) == (len(far), sum(count for _, count in named.counts()))
        assert len(set(far)) == len(far)
        assert not set(far) & self.lane.in_flight
        behind = {key: len(messages) for key, messages in flows.waiting.items()}
        apart = sum(count for key, count in behind.items() if key in flows.parked or key in flows.held)
        assert self.queue.blocked == apart + len(flows.parked) + len(flows.held) - len(flows.emptied)
        assert self.queue.behind == sum(behind.values()) - apart
        every = [*self.queue.ready] if not self.by_tenant else list(iter(self.queue.ready))
        suspects = len(self.queue._suspects)
        assert self.queue.in_flight == len(self.running) + len(every) + self.queue.behind + suspects
        assert sum(named.near.values()) <= len(every) + suspects + len(flows.held)
        weights = [2 if self.by_tenant and name[0] == "1" else 1 for name in {*named, *named.near}]
        assert self.queue._weights == sum(weights)
        work = self.queue.work(len(self.running), [self.lane])
        assert work.total == len(self.running) + len(every) + suspects + len(far) + sum(behind.values()) + len(
            flows.held
        ) + len(flows.parked)


@pytest.mark.parametrize("by_tenant", [True, False])
@settings(max_examples=200, deadline=None)
@given(steps=STEPS)
def test_named_flows_keep_order_and_lose_nothing_in_any_history(
    steps: list[tuple[str, int, bool]], by_tenant: bool
) -> None:
    """The messages of a key may have any names: each starts after the one before it, and each starts."""
    history = NamedHistory(by_tenant=by_tenant)
    play(history, steps)
    named = history.lane.flows.named
    assert not history.queue._held_names
    assert [*named.near, *named._near_of, *named._last_of, *named] == []


@settings(max_examples=300, deadline=None)
@given(STEPS)
def test_queue_keeps_order_and_counts_in_any_history(steps: list[tuple[str, int, bool]]) -> None:
    """In any order of events: keys stay in order, suspects run alone, and the counts are true."""
    play(History(), steps)


def play(history: History, steps: list[tuple[str, int, bool]]) -> None:
    """A history, and then all that is left of it."""
    for step, choice, flag in steps:
        if step == "offer":
            history.offer(choice, flag and choice == 1)
        elif step in ("start", "withdraw"):
            getattr(history, step)()
        else:
            getattr(history, step)(choice)
        history.check()
    flows = history.lane.flows
    while flows.parked or history.held or history.running or history.queue.ready or flows.far:
        history.ask_bodies(3)
        history.answer_bodies(3)
        history.put_aside(3)
        history.ask(0)
        history.answer(3)
        history.resume(0)
        history.let_go(0)
        history.start()
        history.finish(0)
        history.check()
    assert history.queue.in_flight == history.queue.blocked == 0
    assert not history.lane.flows.waiting
    assert not any(history.offered.values()), "something never ran"


def test_a_retry_that_is_rescheduled_while_its_body_is_read_starts_with_its_body() -> None:
    """The body comes too late for the first due time. At the second one it is read again."""
    history = History()
    for key in (1, 2, 3):
        history.offer(key, False)
        history.start()
    for _ in range(3):
        history.park(0)  # memory has room for two: the third one leaves its body
    assert history.lane.flows.emptied == {b"3-0"}
    history.resume(2)
    history.ask_bodies(0)
    history.move(2)
    history.answer_bodies(0)
    history.resume(2)
    play(history, [])
    assert history.stored.keys() == {b"1-0", b"2-0", b"3-0"}


def test_what_leaves_memory_during_a_recovery_is_not_claimed_again() -> None:
    """It was in memory when the recovery began, and only its id is here when its page is claimed."""
    lane = make_lane()
    flows = lane.flows
    assert flows.known(1) == set()
    flows.wait_as_id(b"1", make_message(lane, 1, 1))
    flows.wait_again(b"2", [b"2-0", b"3-0"])
    assert flows.known(1) == {b"1-0", b"2-0", b"3-0"}
    flows.recovered()
    assert flows.known(2) == {b"1-0", b"2-0", b"3-0"}


async def test_messages_behind_the_key_of_a_limited_one_are_counted_as_limited() -> None:
    """It is what `rsmq top` shows: all that would start if the rate had room."""
    lane, queue = make_lane(), Queue(is_ordered=True)
    queue.rate_limit = RateLimit(Rate(1, per="1h"), lambda: 1, lambda: None)
    queue.offer(lane, [make_message(lane, number, key) for number, key in enumerate([1, 1, 1, 2, 2])])
    first = queue.take()
    assert isinstance(first, Message)
    assert queue.limited == 0, "nothing has been refused yet"
    queue.finish(first, lane)
    assert queue.take() is None
    assert queue.limited == 4


def test_messages_without_key_are_all_ready() -> None:
    """Without a key nothing waits."""
    lane, queue = make_lane(), Queue(is_ordered=True)
    queue.offer(lane, [make_message(lane, number, None) for number in range(5)])
    assert len(queue.ready) == 5


def test_messages_of_one_key_are_all_ready_without_key_order() -> None:
    """`ordering="none"` ignores the key."""
    lane, queue = make_lane(), Queue(is_ordered=False)
    queue.offer(lane, [make_message(lane, number, 1) for number in range(5)])
    assert len(queue.ready) == 5


def test_pending_message_that_waits_for_its_retry_blocks_only_its_key() -> None:
    """Taken over before its retry is due, it holds back the later messages of its key, and no others."""
    lane, queue = make_lane(), Queue(is_ordered=True)
    waiting, later, other = (make_message(lane, number, key) for number, key in ((1, 1), (2, 1), (3, 2)))
    assert queue.wait_for_retry(waiting, lane)
    queue.offer(lane, [later, other])
    assert list(queue.ready) == [other]
    queue.ready.clear()
    queue.resume(waiting, lane, waiting)
    assert list(queue.ready) == [waiting]


@pytest.mark.parametrize(
    "queue",
    [Queue(is_ordered=True), GatheringQueue(batch=10, linger=timedelta(seconds=1), prefetch=100)],
    ids=["single", "by-key"],
)
def test_retry_behind_an_earlier_message_is_asked_about(queue: Queue) -> None:
    """It has no timer. It, or the call that it belongs to, asks before it starts."""
    if isinstance(queue, GatheringQueue):
        queue.wait_by(lambda: None)
    lane = make_lane()
    first, retry = (make_message(lane, number, 1) for number in (1, 2))
    queue.offer(lane, [first])
    assert queue.wait_for_retry(retry, lane) is None
    assert lane.recovery.untimed == {retry.entry_id}


def test_withdrawing_one_lane_keeps_the_others() -> None:
    """A partition that is handed over takes nothing of another one with it."""
    mine, theirs, queue = make_lane(0), make_lane(1), Queue(is_ordered=True)
    queue.offer(mine, [make_message(mine, 1, 1)])
    queue.offer(theirs, [make_message(theirs, 1, 1), make_message(theirs, 2, 1)])
    assert len(queue.withdraw(theirs)) == 2
    assert [message.origin for message in queue.ready] == [mine]
    assert queue.in_flight == 1


def test_member_bound_leaves_only_partitions_below_their_share() -> None:
    """A lane is full at its bound. When all have ten times that together, those go on that have less than their share,
    so the sum stays below twenty times the bound."""
    queue = Queue(is_ordered=True)
    queue.read_ahead(10, 2, 1, lambda: None)
    lanes = [make_lane(number) for number in range(25)]

    def wait(lane: Lane, count: int) -> None:
        for number in range(count):
            lane.flows.keep_in(("a", None), make_message(lane, lane.flows.far + number + 1, None), None, 0)

    wait(lanes[0], 9)
    assert queue.has_room(lanes[0], lanes), "below its own bound"
    wait(lanes[0], 1)
    assert not queue.has_room(lanes[0], lanes), "at its bound; the others go on"
    assert all(queue.has_room(lane, lanes) for lane in lanes[1:])
    for lane in lanes[1:11]:
        wait(lane, 9)
    assert queue.far(lanes) == 100
    assert [queue.has_room(lane, lanes) for lane in lanes] == [False] * 11 + [True] * 14, "four each is their share"
    for lane in lanes[11:]:
        while queue.has_room(lane, lanes):
            wait(lane, 1)
    assert queue.far(lanes) == 100 + 14 * 4 <= 200
