"""Every order in which partitions that follow others go on before these are finished: the package's own `Queue`,
`Lane`, `SeamQuestion` and `Seam`, over a server that is reduced to what a group has been given and has settled.

All messages but one have the key `a`, so a later one must wait for each earlier one. A state is known by the steps that
lead to it, which are played again for each step that can follow: what the package holds is not copied.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from math import inf
from typing import Any, Final

from rsmq.consumer.waiting import following
from rsmq.consumer.waiting.following import SeamQuestion, follow, left_before, let_keys_go
from rsmq.consumer.waiting.lane import Lane
from rsmq.consumer.waiting.left_keys import LeftKeys
from rsmq.consumer.waiting.queue import Queue
from rsmq.consumer.waiting.seam import NOTHING, Left, Seam
from rsmq.heartbeat.lease import FollowingLease, Lease
from rsmq.model.keys import Keys
from rsmq.model.layout import Block, Layout
from rsmq.model.message import Message
from tests.interleavings.bands import Edit
from tests.interleavings.moves import Broken
from tests.interleavings.search import Result

KEYS: Final = Keys("t")
LAYOUT: Final = Layout((
    Block(0, 1, state="sealed"), Block(1, 1, state="sealed", parent=0), Block(2, 1, parent=1),
))  # fmt: skip
"""Partitions of which each follows the one before."""
Step = tuple[str, Callable[[], None]]


@dataclass
class Partition:
    """What the server knows of a partition: its messages, how many were given to the group, who has the lease."""

    messages: tuple[int, ...]
    parents: tuple[int, ...] = ()
    given: int = 0
    settled: set[int] = field(default_factory=set)
    owner: str = ""
    missing: set[int] = field(default_factory=set)
    """Deleted with their consumer: not pending, until the audit of their owner gives them back."""

    @property
    def pending(self) -> list[int]:
        return [each for each in self.messages[: self.given] if each not in self.settled | self.missing]

    @property
    def is_read(self) -> bool:
        return self.given == len(self.messages)


class Member:
    """One process: its queue and lanes, what its handlers run, and what is on its way to it."""

    def __init__(self, name: str, memory: int = 100) -> None:
        self.name = name
        self.memory = memory
        self.queue = Queue(is_ordered=True, prefetch=100)
        self.queue.read_ahead(100, memory, 1, lambda: None)
        self.lanes: dict[int, Lane] = {}
        self.running: list[Message] = []
        self.parked: list[Message] = []
        self.replies: dict[int, tuple[Lane, int]] = {}
        self.questions: dict[int, tuple[SeamQuestion, Left | None]] = {}
        self.found: dict[int, LeftKeys] = {}
        self.late: set[int] = set()  # partitions whose connection has ended, which was not seen yet


@dataclass(frozen=True)
class SeamScenario:
    """Partitions, each with its messages and those that it follows; members; and how often each fault may happen."""

    name: str
    partitions: dict[int, tuple[tuple[int, ...], tuple[int, ...]]]
    members: tuple[str, ...] = ("m1",)
    faults: dict[str, int] = field(default_factory=dict)
    others: frozenset[int] = frozenset()
    """Messages with another key."""
    is_short: bool = True
    """Searched in `make test`, too."""
    room: int = 100
    """So many messages of a partition are given before one of them is settled: what is beyond that is not read."""
    memory: int = 100
    """For how many messages there is room: while it is full, what waits for a retry leaves its body."""

    def search(self, edit: Edit | None = None) -> Result:
        """All states, or the first broken promise."""
        with nullcontext() if edit is None else edit.applied():
            return self._search()

    def _search(self) -> Result:
        result, first = Result(), SeamWorld(self)
        known, waiting = {first.key()}, deque([()])
        following_of: dict[Any, list[Any]] = {}
        done = set[Any]()
        while waiting and not result.broken:
            path: tuple[int, ...] = waiting.popleft()
            world = self._play(path)
            key = world.key()
            result.depth = len(path)
            if world.is_done:
                done.add(key)
            for choice, (text, _) in enumerate(world.steps()):
                result.steps += 1
                after = self._play(path)
                try:
                    after.steps()[choice][1]()
                except Broken as error:
                    result.broken, result.story = str(error), [*self._story(path), text]
                    break
                found = after.key()
                following_of.setdefault(found, []).append(key)
                if found not in known:
                    known.add(found)
                    waiting.append((*path, choice))
        result.states, result.done = len(known), len(done)
        good, ahead = set(done), list(done)
        while ahead:
            for each in following_of.get(ahead.pop(), ()):
                if each not in good:
                    good.add(each)
                    ahead.append(each)
        if not result.broken and len(good) < len(known):
            result.broken = "from here no order of steps settles everything"
        return result

    def _play(self, path: tuple[int, ...]) -> SeamWorld:
        world = SeamWorld(self)
        for choice in path:
            world.steps()[choice][1]()
        return world

    def _story(self, path: tuple[int, ...]) -> list[str]:
        world, story = SeamWorld(self), []
        for choice in path:
            text, act = world.steps()[choice]
            story.append(text)
            act()
        return story


class SeamWorld:
    """A state, and the steps that can follow."""

    def __init__(self, scenario: SeamScenario) -> None:
        self._scenario = scenario
        self._server = {
            number: Partition(messages, parents) for number, (messages, parents) in scenario.partitions.items()
        }
        self._members = [Member(name, scenario.memory) for name in scenario.members]
        self._left = dict(scenario.faults)
        self._handled = set[int]()
        self._lost = set[int]()
        self._unread = frozenset[int]()  # when the server lost something

    def key(self) -> Any:
        """What tells this state from others."""
        return (
            tuple(
                (each.given, frozenset(each.settled), each.owner, frozenset(each.missing))
                for each in self._server.values()
            ),
            tuple(map(self._known, self._members)),
            frozenset(self._handled), frozenset(self._lost), self._unread, tuple(self._left.values()),
        )  # fmt: skip

    def _known(self, member: Member) -> Any:
        lanes = {
            number: (
                lane.lease.is_held(), lane.recovery.is_over, lane.is_quiet, bool(lane.parents), lane.is_blocked,
                lane.seam is not None and (lane.seam.keys, lane.seam.settling, lane.seam.is_partial),
                frozenset(lane.in_flight),
                tuple(lane.done), str(lane.settling), bool(lane.followers),
                tuple((key, tuple(each.entry_id for each in flow)) for key, flow in lane.flows.waiting.items()),
                frozenset(lane.flows.emptied), frozenset(lane.flows.bodies_wanted),
            )
            for number, lane in member.lanes.items()
        }  # fmt: skip
        ready = tuple(self._named(each) for each in member.queue.ready)
        asked = tuple(
            (number, each.is_worth_asking(), left is not None and (left.keys, left.unread, str(left.given)))
            for number, (each, left) in member.questions.items()
        )
        found = tuple((number, each.given) for number, each in member.found.items() if each.counts)
        return (
            tuple(sorted(lanes.items())), ready, tuple(map(self._named, member.running)),
            tuple(map(self._named, member.parked)), tuple((n, i, lane.lease.is_held()) for n, (lane, i) in
            member.replies.items()), asked, found, frozenset(member.late),
        )  # fmt: skip

    @staticmethod
    def _named(message: Message) -> tuple[bytes, bool]:
        return message.entry_id, message.origin.lease.is_held()  # type: ignore[attr-defined]

    @property
    def is_done(self) -> bool:
        """Whether all is settled."""
        return all(each.is_read and not each.pending and not each.missing for each in self._server.values())

    def steps(self) -> list[Step]:
        """All that can happen next."""
        return [step for member in self._members for step in self._steps_of(member)]

    def _steps_of(self, member: Member) -> Iterator[Step]:
        for number, partition in self._server.items():
            lane = member.lanes.get(number)
            if lane is None:
                if not partition.owner:
                    yield f"{member.name} takes {number}", lambda n=number: self._take(member, n)
                continue
            yield from self._lane_steps(member, number, partition, lane)
        for number, (lane, message) in list(member.replies.items()):
            yield f"{message} arrives at {member.name}", lambda n=number: self._arrive(member, n)
            del lane
        for lane in member.lanes.values():
            for entry_id in member.queue.due(lane, 1):
                yield "the body of 1 is read", lambda lane=lane, e=entry_id: self._fill(member, lane, e)
        if member.queue.ready:
            yield f"{member.name} starts a message", lambda: self._start(member)
        for at, message in enumerate(member.running):
            number = int(message.entry_id.partition(b"-")[0])
            yield f"{number} is handled", lambda a=at: self._end(member, a)
            if self._left.get("retry") and number == 1:
                yield "1 waits for its retry", lambda a=at: self._park(member, a)
        for message in member.parked[:1]:
            yield "1 is due", lambda m=message: self._resume(member, m)
        if any(not lane.lease.is_held() for lane in member.lanes.values()):
            yield f"{member.name} drops what it has lost", lambda: self._drop_lost(member)
        if self._left.get("death") and member.lanes:
            yield f"{member.name} dies", lambda: self._die(member)

    def _lane_steps(self, member: Member, number: int, partition: Partition, lane: Lane) -> Iterator[Step]:
        name = member.name
        if not lane.lease.is_held():
            return
        if number in member.late:
            yield (
                f"{name} sees that its connection for {number} has ended",
                lambda: self._lose_connection(member, number),
            )
        elif lane.is_recovering:
            yield f"{name} takes over {number}", lambda: self._recover(member, partition, lane)
        elif lane.is_readable and not partition.is_read and number not in member.replies and self._has_room(partition):
            yield f"{name} reads {number}", lambda: self._read(member, number)
        if lane.parents:
            before = [self._server[each] for each in lane.parents]
            is_finished = all(each.is_read and not each.pending for each in before)
            if is_finished and following.is_settled(member.lanes, lane):
                yield f"{number} follows", lambda: self._follow(member, lane)
            is_partial = lane.seam is not None and lane.seam.is_partial and all(each.is_read for each in before)
            if (lane.is_blocked or is_partial) and number not in member.questions:
                yield f"{name} asks for {number}", lambda: self._ask(member, lane)
            if number in member.questions and not member.late.union(member.replies).intersection(lane.parents):
                # the fetchers of these have answered since the question
                yield f"{name} has the answer for {number}", lambda: self._answer(member, number)
            if lane.seam is not None and not lane.is_blocked and lane.seam.keys:
                yield f"{name} lets keys of {number} go", lambda: self._let_go(member, lane)
        if lane.done:
            yield f"{name} settles in {number}", lambda: self._settle(partition, lane, name)
        if lane.settling:
            yield f"the settlement of {number} is confirmed", lambda: self._confirm(lane)
        if self._left.get("lease") and not lane.parents:
            yield f"{name} loses {number}", lambda: self._lose(member, number)
        if self._left.get("connection"):
            yield f"the connection of {name} for {number} ends", lambda: self._cut(member, number)
        is_here = lane.in_flight.issuperset(b"%d-0" % each for each in partition.pending)
        if self._left.get("consumer") and partition.pending and is_here:  # else it is lost, as in any partition
            yield f"the consumer of {number} is deleted", lambda: self._delete_consumer(partition)
        if partition.missing:
            yield f"{name} gives back what is missing in {number}", partition.missing.clear
        if self._left.get("handover") and not lane.parents and not lane.is_quiet and number not in member.replies:
            yield f"{name} hands {number} back", lambda: self._hand_back(member, lane)
        if lane.is_quiet:
            yield f"{name} keeps {number}", lane.wake
        if self._left.get("loss") and partition.settled and self._is_behind(member):
            yield f"the server forgets what is settled in {number}", lambda: self._forget(number)
            if not lane.in_flight and number not in member.replies:
                yield f"the server forgets what was given of {number}", lambda: self._forget(number, given=0)

    def _has_room(self, partition: Partition) -> bool:
        return len(partition.pending) < self._scenario.room

    def _is_behind(self, member: Member) -> bool:
        """Whether a member has all partitions, and those that follow others do not count as finished: a failover with a
        loss is played only then. Otherwise the order of what it has lost is not kept, as the documents say."""
        lanes = [member.lanes.get(number) for number in self._server]
        return all(each is not None and bool(each.parents) == (each.partition > 0) for each in lanes)

    # -- steps ----------------------------------------------------------------------------------------------------

    def _take(self, member: Member, number: int) -> None:
        partition = self._server[number]
        partition.owner = member.name
        kind = FollowingLease if partition.parents else Lease
        lease = kind("t", "g", number, "", member.name, "1", inf)
        parents = tuple(LAYOUT.ancestors_of(number))
        member.lanes[number] = Lane(KEYS, "t", number, "g", lease, parents=parents)

    def _message(self, lane: Lane, number: int) -> Message:
        key = b"b" if number in self._scenario.others else b"a"
        return Message(lane, b"%d-0" % number, [b"data", b"x", b"key", key])

    def _recover(self, member: Member, partition: Partition, lane: Lane) -> None:
        ids = [b"%d-0" % each for each in partition.pending]
        new = [each for each in partition.pending if b"%d-0" % each not in lane.in_flight]
        number = lane.recovery.number
        if lane.followers and not lane.meets(ids):
            return
        lane.in_flight.update(b"%d-0" % each for each in new)
        messages = [self._message(lane, each) for each in new]
        for each in messages:
            each.is_redelivered = True
        member.queue.offer(lane, messages)
        lane.recovery.advance(None, number)

    def _read(self, member: Member, number: int) -> None:
        partition = self._server[number]
        member.replies[number] = member.lanes[number], partition.messages[partition.given]
        partition.given += 1

    def _arrive(self, member: Member, number: int) -> None:
        lane, message = member.replies.pop(number)
        if member.lanes.get(number) is lane and lane.receive([b"%d-0" % message]):
            member.queue.offer(lane, [self._message(lane, message)])

    def _cut(self, member: Member, number: int) -> None:
        self._left["connection"] -= 1
        member.late.add(number)
        member.replies.pop(number, None)

    def _lose_connection(self, member: Member, number: int) -> None:
        member.late.discard(number)
        member.lanes[number].recovery.restart(is_ours=True)

    def _delete_consumer(self, partition: Partition) -> None:
        self._left["consumer"] -= 1
        partition.missing |= {*partition.pending}

    def _forget(self, number: int, given: int | None = None) -> None:
        """A failover: the new master knows nothing of a settlement. Each connection is seen to end at another time."""
        self._left["loss"] -= 1
        self._unread = frozenset(each for of in self._server.values() for each in of.messages[of.given :])
        if given is not None:
            self._server[number].given = given
        self._lost |= self._server[number].settled
        self._server[number].settled.clear()
        for member in self._members:
            member.late.update(member.lanes)
            member.replies.clear()
            for lane in member.lanes.values():
                for ids in list(lane.settling):  # their answers are lost, too
                    lane.put_back_done(ids)

    def _ask(self, member: Member, lane: Lane) -> None:
        """The answer comes later. None of what is left: all that was not read is here by then."""
        question = SeamQuestion(member.queue, member.lanes, lane)
        if not question.is_worth_asking():
            return
        is_read = all(self._server[each].is_read for each in lane.parents)
        if not lane.is_blocked:
            member.questions[lane.partition] = question, None
            return
        if not is_read and not member.late.union(member.replies).intersection(lane.parents):
            for each in question.before:
                self._search_keys(member, each)
        left = NOTHING if is_read else left_before(lane, question.before, member.found.values(), LAYOUT, is_read=False)
        if left is not None:
            member.questions[lane.partition] = question, left

    def _search_keys(self, member: Member, lane: Lane) -> None:
        known, partition = member.found.get(lane.partition), self._server[lane.partition]
        if (known is None or known.lane is not lane or not known.counts) and not self._has_room(partition):
            given = partition.messages[partition.given - 1] if partition.given else 0
            found = member.found[lane.partition] = LeftKeys(lane, b"%d-0" % given, 100)
            unread = [self._message(lane, each) for each in partition.messages[partition.given :]]
            found.add([(each.entry_id, [b"data", b"x", b"key", each.routing_key or b""]) for each in unread])
            found.add([])

    def _answer(self, member: Member, number: int) -> None:
        question, left = member.questions.pop(number)
        if left is None:
            question.complete()
        else:
            question.answer(left)

    def _let_go(self, member: Member, lane: Lane) -> None:
        let_keys_go(member.queue, member.lanes, lane)

    def _follow(self, member: Member, lane: Lane) -> None:
        member.questions.pop(lane.partition, None)
        follow(member.queue, member.lanes, lane)

    def _start(self, member: Member) -> None:
        message: Any = member.queue.ready.popleft()
        if not message.origin.lease.is_held():
            return
        number = int(message.entry_id.partition(b"-")[0])
        of_key = [
            each for partition in self._server.values() for each in partition.messages
            if (each in self._scenario.others) == (number in self._scenario.others)
        ]  # fmt: skip
        settled = set().union(*(each.settled for each in self._server.values()))
        for each in of_key:
            if each < number and each not in self._handled:
                raise Broken(f"{number} starts before {each} was handled")
            if each > number and each in settled and number not in self._lost:
                raise Broken(f"{number} starts again after {each} was settled")
            if each > number and each in self._handled & self._unread and number in self._lost:
                raise Broken(f"{number} starts again after {each}, which was read later")
        for other in self._members:
            for each in other.running:
                if int(each.entry_id.partition(b"-")[0]) in of_key:
                    raise Broken(f"{number} starts while another message of its key runs")
        member.running.append(message)

    def _end(self, member: Member, at: int) -> None:
        message: Any = member.running.pop(at)
        self._handled.add(int(message.entry_id.partition(b"-")[0]))
        if message.origin.lease.is_held():
            message.origin.done.append(message.entry_id)
        member.queue.finish(message, message.origin)

    def _park(self, member: Member, at: int) -> None:
        self._left["retry"] -= 1
        message: Any = member.running.pop(at)
        member.parked.append(member.queue.park(message, message.origin))

    def _resume(self, member: Member, message: Any) -> None:
        member.parked.remove(message)
        member.queue.resume(message, message.origin, message.again())

    def _fill(self, member: Member, lane: Lane, entry_id: bytes) -> None:
        member.queue.fill_body(lane, entry_id, [b"data", b"x", b"key", b"a"])

    def _settle(self, partition: Partition, lane: Lane, name: str) -> None:
        ids = lane.take_done()
        if partition.owner == name:
            partition.settled.update(int(each.partition(b"-")[0]) for each in ids)
            partition.missing -= partition.settled

    def _confirm(self, lane: Lane) -> None:
        ids = lane.settling[0]
        lane.confirmed(ids)
        lane.forget(ids)

    def _hand_back(self, member: Member, lane: Lane) -> None:
        self._left["handover"] -= 1
        lane.quiet()
        lane.forget([each.entry_id for each in member.queue.withdraw(lane)])
        member.parked = [each for each in member.parked if each.origin is not lane]

    def _lose(self, member: Member, number: int) -> None:
        """The heartbeat drops a lane at once; what follows it is dropped with the next look."""
        self._left["lease"] -= 1
        self._drop(member, number)

    def _drop(self, member: Member, number: int) -> None:
        lane = member.lanes.pop(number)
        lane.lease.lose()
        lane.drop_done()
        member.queue.withdraw(lane)
        member.running = [each for each in member.running if each.origin is not lane]
        member.parked = [each for each in member.parked if each.origin is not lane]
        member.replies.pop(number, None)
        member.questions.pop(number, None)
        member.late.discard(number)
        self._server[number].owner = ""

    def _drop_lost(self, member: Member) -> None:
        for number in [number for number, lane in member.lanes.items() if not lane.lease.is_held()]:
            self._drop(member, number)

    def _die(self, member: Member) -> None:
        self._left["death"] -= 1
        self._members[self._members.index(member)] = Member(member.name, member.memory)
        for partition in self._server.values():
            if partition.owner == member.name:
                partition.owner = ""


TWO: Final = {0: ((1,), ()), 1: ((3,), (0,))}
FOLLOWS: Final = SeamScenario(
    "seam: a partition follows", {0: ((1, 2), ()), 1: ((3,), (0,))}, faults={"connection": 1}, is_short=False
)
PARKED: Final = SeamScenario(
    "seam: a message waits for its retry", TWO, faults={"retry": 1, "connection": 1}, is_short=False
)
FULL: Final = SeamScenario(
    "seam: memory is full of what waits for a partition before", {0: ((1, 2), ()), 1: ((3, 4), (0,))},
    faults={"retry": 1}, memory=1, is_short=False,
)  # fmt: skip
OTHERS: Final = SeamScenario(
    "seam: another key goes on", {0: ((1, 2), ()), 1: ((3, 4), (0,))}, others=frozenset({2, 4}), is_short=False
)
DIES: Final = SeamScenario("seam: a member dies", TWO, faults={"death": 1})
LOSES: Final = SeamScenario("seam: a member loses the lease before", TWO, ("m1", "m2"), {"lease": 1}, is_short=False)
GENERATIONS: Final = SeamScenario(
    "seam: three generations, as after a reset", {0: ((1,), ()), 1: ((2,), (0,)), 2: ((3,), (1, 0))}
)
EMPTY: Final = SeamScenario("seam: three generations, one is empty", {0: ((1,), ()), 1: ((), (0,)), 2: ((3,), (1, 0))})
HANDED_BACK: Final = SeamScenario("seam: what is before is handed back and kept", TWO, faults={"handover": 1})
DELETED: Final = SeamScenario("seam: the consumer of what is before is deleted", TWO, faults={"consumer": 1})
FORGETS: Final = SeamScenario("seam: a failover with a loss", TWO, faults={"loss": 1}, is_short=False)
UNREAD: Final = SeamScenario(
    "seam: what is before is not read to its end", {0: ((1, 2), ()), 1: ((3, 4), (0,))}, others=frozenset({2, 4}),
    room=1,
)  # fmt: skip
UNREAD_CUT: Final = SeamScenario(
    "seam: the same, and a connection is lost", {0: ((1, 2), ()), 1: ((4,), (0,))}, faults={"connection": 1},
    others=frozenset({2, 4}), room=1, is_short=False,
)  # fmt: skip
UNREAD_FORGOTTEN: Final = SeamScenario(
    "seam: the same, and a failover with a loss", {0: ((1, 2), ()), 1: ((4,), (0,))}, faults={"loss": 1},
    others=frozenset({2, 4}), room=1, is_short=False,
)  # fmt: skip
SEAM_SCENARIOS: Final = (
    FOLLOWS, PARKED, FULL, OTHERS, DIES, LOSES, GENERATIONS, EMPTY, HANDED_BACK, DELETED, FORGETS, UNREAD, UNREAD_CUT,
    UNREAD_FORGOTTEN,
)  # fmt: skip
SEAM_EDITS: Final = (
    Edit("only the partition before is asked", EMPTY, Layout, "ancestors_of", "block = parent", "block = None"),
    Edit(
        "the lease before is lost, and what follows goes on", LOSES, FollowingLease, "bind", "tuple(before)", "()",
    ),
    Edit(
        "a key is free though its last message is not settled", DIES, Seam, "free",
        "if not left:", "if True:",
    ),
    Edit(
        "what was handled when the keys were noted is not settled", DIES, Seam, "open",
        "if not self._first:", "if True:",
    ),
    Edit(
        "an answer counts after a connection was lost", FORGETS, SeamQuestion, "_stands",
        " or self._now() != self._numbers", "",
    ),
    Edit(
        "a message that comes back runs beside a later one", FORGETS, Lane, "meets",
        "self.lease.lose()\n    return False", "return True",
    ),
    Edit(
        "a key is free because what is before was handed back", HANDED_BACK, Seam, "is_open",
        " and not any(each.is_quiet for each in self._before)", "",
    ),
    Edit(
        "what is before is not taken over", DIES, following, "is_known",
        " and lane.recovery.is_over", "",
    ),
    Edit(
        "what the server has forgotten as pending, and runs here, counts as finished", DELETED, following, "is_settled",
        "before.in_flight or before.flows.far", "False",
    ),
    Edit(
        "a key that is not read yet counts as free", UNREAD, Seam, "_is_taken",
        "if key in self._unread:", "if False:",
    ),
    Edit("keys that are taken before it count as free", OTHERS, Lane, "go_on", "self.flows.take_before(key)", "pass"),
    Edit(
        "what waits for a partition before takes the room that this one needs", FULL, Queue, "_wait_behind",
        "elif key in flows.seam_keys:", "elif False:",
    ),
)  # fmt: skip
