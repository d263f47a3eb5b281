"""What waits in one lane, and for what: behind a message of its key, for a retry, for a rate, for its tenant's turn.

`README.md` beside this file says what may wait, where and until when.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Set
from itertools import chain, takewhile
from typing import Final, NamedTuple

from rsmq.consumer.waiting.ids import Ids
from rsmq.consumer.waiting.named_flows import FlowName, NamedFlows
from rsmq.consumer.waiting.open_calls import CallPlan, OpenCalls
from rsmq.consumer.waiting.resting import ALONE, Resting
from rsmq.model.message import Message, without_body
from rsmq.model.stream_id import parse_stream_id

FEW: Final = 64
"""Messages of a key in memory, with more as ids, at which the next ones are read again."""
PAGE: Final = 500
"""Ids in one call: to put aside, or to read again."""
SHARE: Final = 128
FEWEST: Final = 8
"""Ids of one key in a call; the second one while memory is full."""


class KeyFlow(deque[Message]):
    """What waits behind one key: messages in memory, and after them only the ids of others, as long as there are."""

    ids: Ids | None = None  # of the class until there are some: a flow is made for every second message


NONE: Final = KeyFlow(maxlen=0)
"""What waits behind most keys: a flow for each of them would cost more than all else here."""


class IdPage(NamedTuple):
    """Ids that are read again in one call: of each key, or named flow, some from the front of its flow.

    `lost` are those that became dead letters meanwhile: they are not asked for.
    """

    by_key: dict[bytes | FlowName, list[bytes]]
    lost: frozenset[bytes]
    of: int
    """The filling of the flows that they are from: after `clear` they are forgotten."""


class Flows:
    """The keys of one lane that are taken. `Queue` decides what may start; this is its memory for one partition.

    `waiting` has an entry for each key that is taken, with the messages behind it; a key in `parked` waits for its
    retry, one in `held` for its rate (a message without a key by its id). Parked messages in `emptied` have left their
    bodies, because memory is full; those in `bodies_wanted` are due, with what starts once the body is there.
    Those in `seam_keys` wait for messages of partitions before this one, so nothing of them starts.
    `raw_entries` counts the lane's `RawEntries` in the queue; there are some only while no key is taken. `untimed` are
    parked messages whose timers wait for the server.

    Read ahead: `far` counts the ids without a message, and `newest` is the newest id that ever was one of them. Those
    in `aside` are first deliveries of which the server does not know yet that they have not started; those in `gone`
    were deleted, and have their dead letter. `thin` are the keys and names whose flow is to be read again; a key in
    `dry` has no message in memory, not even one that runs. `named` are the flows of tenants and of names of rates.
    `resting` is what waits for a time, with only ids behind it. `calls` are those whose messages are of one key.
    Invariant: all that waits as an id above `kept_until` is a first delivery.
    """

    __slots__ = (
        "_answered", "_asked", "_calls", "_fillings", "_known", "aside", "bodies_wanted", "calls", "dry", "emptied",
        "far", "gone", "held", "kept_until", "named", "newest", "parked", "raw_entries", "resting", "seam_keys", "thin",
        "untimed", "waiting",
    )  # fmt: skip

    def __init__(self) -> None:
        self.far = 0
        self.aside: dict[bytes, None] = {}
        self.gone: set[bytes] = set()
        self.named = NamedFlows()
        self.resting = Resting()
        self.calls = OpenCalls()
        self.thin: dict[bytes | FlowName, None] = {}
        self.dry: set[bytes] = set()
        self.newest = (0, 0)
        self.kept_until = (0, 0)
        self._asked: list[tuple[bytes, int]] = []  # with the attempts that were charged before
        self._answered = 0
        self._calls = 0
        self._fillings = 0
        self._known: tuple[int, set[bytes]] | None = None
        self.waiting: dict[bytes, KeyFlow] = {}
        self.parked: dict[bytes, Message] = {}
        self.held: dict[bytes | str, Message] = {}
        self.seam_keys: set[bytes] = set()
        self.emptied: set[bytes] = set()
        self.bodies_wanted: dict[bytes, tuple[Message, Message]] = {}
        self.untimed: set[bytes] = set()
        self.raw_entries = 0

    # -- keys -----------------------------------------------------------------------------------------------------

    def take(self, key: bytes) -> bool:
        """Take a key for a message that starts. False: it is taken."""
        if key in self.waiting:
            return False
        self.waiting[key] = NONE
        return True

    def put_behind(self, key: bytes, message: Message) -> None:
        """A message waits behind its key, last."""
        flow = self.waiting[key]
        if flow is NONE:
            flow = self.waiting[key] = KeyFlow()
        flow.append(message)

    def put_first(self, key: bytes, messages: Sequence[Message]) -> None:
        """Messages that were taken together with the one that holds their key wait behind it again, first."""
        flow = self.waiting.get(key, NONE)
        if flow is NONE:
            flow = self.waiting[key] = KeyFlow()
        flow.extendleft(reversed(messages))

    def next(self, key: bytes) -> Message | None:
        """A key is done with a message: the next one of it. None: the key is free, or its next one is only an id."""
        flow = self.waiting.get(key)
        if flow:
            message = flow.popleft()
            if flow.ids:
                self._look_at(key, flow)
            return message
        if flow is not None and flow.ids:
            self.dry.add(key)
            self.thin[key] = None
        elif flow is not None:
            del self.waiting[key]
        return None

    def take_behind(self, key: bytes, most: int) -> list[Message]:
        """The next messages of a key, to be handled together with the one that holds it."""
        flow, taken = self.waiting.get(key, NONE), list[Message]()
        while flow and len(taken) < most and not flow[0].is_suspect:
            taken.append(flow.popleft())
        if taken and flow.ids:
            self._look_at(key, flow)
        return taken

    def behind(self, key: bytes | None) -> int:
        """How many messages wait behind a key."""
        return 0 if key is None else len(self.waiting.get(key, NONE))

    def number_before(self, entry_id: bytes) -> tuple[int, Message | None] | None:
        """How many messages of its key are before one that waits behind it, and that message unless only its id is
        kept. None: it does not wait so."""
        for flow in self.waiting.values():
            for at, message in enumerate(flow):
                if message.entry_id == entry_id:
                    return 1 + at, message
            at_id = flow.ids.position(entry_id) if flow.ids else None
            if at_id is not None:
                return 1 + len(flow) + at_id, None
        return None

    def remove_behind(self, key: bytes, ids: Collection[bytes]) -> set[bytes]:
        """Remove messages behind a key. Returns their ids."""
        behind = self.waiting[key]
        gone = {message.entry_id for message in behind if message.entry_id in ids}
        if gone:
            kept = [message for message in behind if message.entry_id not in gone]
            behind.clear()
            behind.extend(kept)
            self._look_at(key, behind)
        return gone

    # -- read ahead -----------------------------------------------------------------------------------------------

    def keep_id(self, key: bytes, message: Message) -> None:
        """Keep only the id of a message behind a key."""
        flow = self.waiting[key]
        if flow is NONE:
            flow = self.waiting[key] = KeyFlow()
        if flow.ids is None:
            flow.ids = Ids()
        self._note_far(message, flow.ids.append(message.entry_id))
        if len(flow) <= FEW:
            self._look_at(key, flow)

    def keep_in(self, name: FlowName, message: Message, key: bytes | None, low: int) -> None:
        """Keep only the id of a message, at the end of a named flow. It is thin with up to `low` in memory."""
        self._note_far(message, self.named.append(name, message, key))
        if self.named.near.get(name, 0) <= low:
            self.thin[name] = None

    def _note_far(self, message: Message, at: tuple[int, int]) -> None:
        self.far += 1
        if self._known is not None:
            self._known[1].add(message.entry_id)
        if at > self.newest:
            self.newest = at
        if not message.is_redelivered:
            self.aside[message.entry_id] = None
        elif at > self.kept_until:
            self.kept_until = at

    def _look_at(self, key: bytes, flow: KeyFlow) -> None:
        """Read more of a flow before it runs dry, unless its key cannot start soon."""
        if flow.ids and len(flow) <= FEW and not self._cannot_start(key):
            self.thin[key] = None

    def _cannot_start(self, key: bytes) -> bool:
        """Whether what is next of a key waits for something else than a message of this lane that is done soon."""
        return key in self.parked or key in self.held or key in self.resting or key in self.seam_keys

    @property
    def is_wanting(self) -> bool:
        """Whether there is something to put aside, or to read again."""
        return bool(self.aside or self.thin or self.bodies_wanted)

    @property
    def without_body(self) -> int:
        """How many messages are kept without their bodies: these have a bound, `RSMQ_READ_AHEAD`."""
        return self.far + len(self.emptied)

    @property
    def filling(self) -> int:
        """Changes when all that waits is forgotten."""
        return self._fillings

    def number(self) -> int:
        """Of the next call: one that comes after a later one does nothing."""
        self._calls += 1
        return self._calls

    def note_answer(self, number: int) -> None:
        """The call with this number has its answer, so those before it are over."""
        self._answered = max(self._answered, number)

    @property
    def is_asking(self) -> bool:
        """Whether a call has no answer yet, or never got one: it may still come to the server."""
        return self._calls > self._answered

    def is_first(self, entry_id: bytes) -> bool:
        """Whether what waits under an id is a first delivery."""
        return parse_stream_id(entry_id) > self.kept_until

    def is_aside(self, ids: Sequence[bytes]) -> None:
        """The server knows that these have not started."""
        for entry_id in ids:
            self.aside.pop(entry_id, None)

    def lose(self, ids: Iterable[bytes]) -> None:
        """Their entries were deleted, and they are settled: they leave their flow without another question."""
        self.gone.update(ids)

    def page(self, *, is_full: bool, share_of: Callable[[FlowName], int] | None = None) -> IdPage | None:
        """What to read again next: first what is dry. `is_full`: only that, and little. `share_of`: how many of a named
        flow; None: nothing of them. What is not put aside yet is not asked for. `filled` must follow. None: nothing."""
        by_key, count = dict[bytes | FlowName, list[bytes]](), 0
        for key in [*(self.dry & self.thin.keys()), *[key for key in self.thin if key not in self.dry]]:
            if count >= PAGE:
                break
            if isinstance(key, bytes):
                flow = self.waiting.get(key, NONE)
                is_over = not flow.ids or self._cannot_start(key)
                most = 0 if is_full and key not in self.dry else FEWEST if is_full else SHARE
                ids = flow.ids.first(min(most, PAGE - count)) if flow.ids else []
            else:
                is_over = key not in self.named
                ids = [] if share_of is None else self.named.first(key, min(share_of(key), PAGE - count))
            if is_over:
                del self.thin[key]
            elif ids := list(takewhile(lambda each: each not in self.aside, ids)):
                by_key[key] = ids
                count += len(ids)
        lost = frozenset(self.gone and self.gone.intersection(chain.from_iterable(by_key.values())))
        asked = [entry_id for ids in by_key.values() for entry_id in ids if entry_id not in lost]
        self._asked = [(entry_id, 0) for entry_id in asked if self.is_first(entry_id)]
        return IdPage(by_key, lost, self._fillings) if by_key else None

    def filled(self, page: IdPage | CallPlan, key: bytes | FlowName, ids: Sequence[bytes]) -> bool:
        """These are read, or settled: the first ones of a flow. False: all was forgotten meanwhile."""
        if page.of != self._fillings:
            return False
        self.gone.difference_update(ids)
        self.far -= len(ids)
        if not isinstance(key, bytes):
            self.named.drop(key, len(ids))
            if key not in self.named:
                self.thin.pop(key, None)
            return True
        flow = self.waiting[key]
        assert flow.ids is not None, "ids leave a flow only here"
        flow.ids.drop(len(ids))
        if not flow.ids:
            flow.ids = None
            self.thin.pop(key, None)
        return True

    def becomes_thin(self, name: FlowName, low: int) -> bool:
        """Whether a named flow has too little in memory now, and had not before: it is to be read again."""
        if name not in self.named or name in self.thin or self.named.near.get(name, 0) > low:
            return False
        self.thin[name] = None
        return True

    def is_supplied(self, name: FlowName, low: int) -> None:
        """Whether a named flow has enough in memory now."""
        if self.named.near.get(name, 0) > low:
            self.thin.pop(name, None)

    def end_drought(self, key: bytes) -> bool:
        """Whether a key has waited for its next message to be read. It does not any more: one is there, or none is
        left."""
        was_dry = key in self.dry and (bool(self.waiting[key]) or not self.waiting[key].ids)
        if was_dry:
            self.dry.discard(key)
        return was_dry

    def look_again(self, key: bytes) -> None:
        """Whether a flow has enough in memory now."""
        if len(self.waiting.get(key, ())) > FEW:
            self.thin.pop(key, None)

    def answered(self, page: IdPage | CallPlan) -> None:
        """The page has its answer."""
        if page.of == self._fillings:
            self._asked = []

    def unsure(self) -> list[tuple[bytes, int]]:
        """Messages that have not started, of which the server may believe it: what is not put aside for certain, and
        what a call on its way asks for. Each with the attempts that are charged to it."""
        return [*[(entry_id, 0) for entry_id in self.aside], *self._asked]

    @property
    def blocked(self) -> int:
        """How many messages in memory wait for a retry, a rate or a partition before, with those behind their keys."""
        names = [*self.parked, *self.held]
        behind = sum(self.behind(name) for name in (*names, *self.seam_keys) if isinstance(name, bytes))
        return len(names) - len(self.emptied) + behind

    def far_behind(self, keys: Iterable[bytes | str]) -> int:
        """How many wait as ids behind some keys. May be called from any thread."""
        flows = [self.waiting.get(key) for key in list(keys) if isinstance(key, bytes)]
        return sum(len(ids) for flow in flows if flow is not None and (ids := flow.ids))

    def lengths(self) -> list[tuple[bytes, int]]:
        """How many messages wait behind each key that has some. May be called from any thread."""
        flows = list(self.waiting.items())
        return [(k, n) for k, flow in flows if flow is not NONE and (n := len(flow) + len(flow.ids or ()))]

    def far_ids(self) -> Iterator[bytes]:
        """The ids of all that waits without a message."""
        ids = chain.from_iterable(flow.ids for flow in self.waiting.values() if flow.ids)
        return chain(ids, self.named.ids(), self.resting.ids)

    def known(self, recovery: int) -> Set[bytes]:
        """The same since the begin of the recovery with this number, also what has left memory meanwhile."""
        if self._known is None or self._known[0] != recovery:
            self._known = recovery, set(self.far_ids())
        return self._known[1]

    def recovered(self) -> None:
        """The recovery is over."""
        self._known = None

    # -- a partition before ----------------------------------------------------------------------------------------

    def take_before(self, key: bytes) -> None:
        """A key is taken in a partition before this one: what comes of it waits."""
        self.take(key)
        self.seam_keys.add(key)

    def free_before(self, key: bytes) -> int:
        """It is free there. Returns how many messages in memory have waited for that; the first of them comes next."""
        self.seam_keys.discard(key)
        flow = self.waiting.get(key, NONE)
        self._look_at(key, flow)
        return len(flow)

    # -- a retry, a rate ------------------------------------------------------------------------------------------

    def park(self, key: bytes, message: Message) -> int:
        """A key waits for the retry of its message. Returns how many wait now."""
        self.parked[key] = message
        return 1 + len(self.waiting.setdefault(key, NONE))

    def unpark(self, key: bytes | None, message: Message) -> int:
        """The retry is due. Returns how many waited; 0: this message is not parked any more."""
        if key is None or self.parked.get(key) is not message:
            return 0
        del self.parked[key]
        flow = self.waiting[key]
        self._look_at(key, flow)
        return 1 + len(flow)

    def empty(self, key: bytes, message: Message) -> Message:
        """A parked message leaves its body. Returns what is parked in its place."""
        emptied = self.parked[key] = without_body(message)
        self.emptied.add(message.entry_id)
        return emptied

    def wants_body(self, message: Message, following: Message) -> bool:
        """Whether the body of a parked message that is due is to be read before `following` starts."""
        if message.entry_id not in self.emptied or self.parked.get(message.routing_key or b"") is not message:
            return False
        self.bodies_wanted[message.entry_id] = message, following
        return True

    def fill_body(self, entry_id: bytes) -> tuple[Message, Message] | None:
        """The body of a message is read, or not needed any more. Returns what was parked, and what starts now."""
        self.emptied.discard(entry_id)
        return self.bodies_wanted.pop(entry_id, None)

    def hold(self, name: bytes | str, message: Message) -> None:
        """A message waits for its rate."""
        self.held[name] = message

    def let_go(self, name: bytes | str) -> None:
        """It does not wait any more."""
        del self.held[name]
        if isinstance(name, bytes):
            self._look_at(name, self.waiting.get(name, NONE))

    # -- a time ---------------------------------------------------------------------------------------------------

    def rest(self, key: bytes | None, message: Message) -> list[Message]:
        """A message that holds its key waits for a time: only its id is kept, and those of the messages behind it.

        Returns all that have left memory. Behind it there must be no ids: some of them may be on their way.
        """
        name = ALONE + message.entry_id if key is None else key
        flow = self.waiting.setdefault(name, NONE)
        behind = list(flow)
        flow.clear()
        self.resting.add(name, message.entry_id, is_retry=message.is_redelivered and message.attempt > 1)
        self._note_far(message, parse_stream_id(message.entry_id))
        for each in behind:
            self.keep_id(name, each)
        self.thin.pop(name, None)
        return [message, *behind]

    def wake(self, entry_id: bytes, *, is_rescheduled: bool) -> bool:
        """Its time has come: it is read again. False: it does not wait here as an id."""
        key = self.resting.wake(entry_id, is_rescheduled=is_rescheduled)
        if key is None:
            return False
        self._ids_of(key).put_first(entry_id)
        self.dry.add(key)
        self.thin[key] = None
        return True

    # -- calls with the messages of one key -----------------------------------------------------------------------

    def wait_as_id(self, key: bytes, message: Message) -> None:
        """Keep only the id of a message, behind all of its key."""
        self._note_far(message, self._ids_of(key).append(message.entry_id))

    def wait_again(self, key: bytes, ids: Sequence[bytes]) -> None:
        """Messages of a call that was not settled wait as ids again, before all others of their key."""
        own = self._ids_of(key)
        for entry_id in reversed(ids):
            own.put_first(entry_id)
        self.far += len(ids)
        if self._known is not None:
            self._known[1].update(ids)

    def _ids_of(self, key: bytes) -> Ids:
        """Those that wait behind a key, of which there may be none so far."""
        flow = self.waiting.setdefault(key, NONE)
        if flow is NONE:
            flow = self.waiting[key] = KeyFlow()
        if flow.ids is None:
            flow.ids = Ids()
        return flow.ids

    def put_aside(self, entry_id: bytes) -> None:
        """The server is to be told that a message has not started."""
        self.aside[entry_id] = None

    def first_id(self, key: bytes) -> bytes | None:
        """The first of the ids that wait for a key."""
        flow = self.waiting.get(key, NONE)
        return flow.ids.first(1)[0] if flow.ids else None

    def size(self, key: bytes) -> int:
        """How many messages of a key wait as ids, with the one that waits for a time."""
        flow = self.waiting.get(key, NONE)
        return (key in self.resting) + (len(flow.ids) if flow.ids else 0)

    def rest_first(self, key: bytes) -> bytes:
        """The first of the ids of a key waits for a time, with the others behind it."""
        flow = self.waiting[key]
        assert flow.ids, "there is one"
        (entry_id,) = flow.ids.first(1)
        flow.ids.drop(1)
        if not flow.ids:
            flow.ids = None
        self.resting.add(key, entry_id, is_retry=False)
        self.dry.discard(key)
        return entry_id

    def make_due(self, key: bytes) -> None:
        """A call with the first ids of a key may begin."""
        self.dry.add(key)
        self.thin[key] = None

    def due_keys(self) -> list[bytes]:
        """The keys of which a call may begin, those first that have waited longest."""
        for key in [each for each in self.thin if each not in self.dry]:
            del self.thin[key]
        return [key for key in self.thin if isinstance(key, bytes)]

    def ids_of_call(self, key: bytes, most: int) -> list[bytes]:
        """The messages of the next call of a key: those of its open call, or else the first ones. None while the
        server is still to be told that one of them has not started."""
        flow, call = self.waiting.get(key, NONE), self.calls.of(key)
        if not flow.ids:
            return []
        if call is None:
            ids = flow.ids.first(most)
        else:
            ids = list(takewhile(lambda each: parse_stream_id(each) <= call.last, flow.ids))
        return [] if self.aside and any(each in self.aside for each in ids) else ids

    def ask(self, plan: CallPlan) -> list[bytes]:
        """A call for these begins. Returns those that are not lost."""
        asked = [entry_id for entry_id in plan.ids if entry_id not in self.gone]
        self._asked = [(entry_id, plan.attempts) for entry_id in asked]
        return asked

    def began(self, key: bytes) -> None:
        """The messages of a call are in memory, or settled."""
        self.dry.discard(key)
        self.thin.pop(key, None)

    def leave_alone(self, key: bytes) -> None:
        """A message without a key does not wait any more: nothing else is behind it."""
        if key.startswith(ALONE):
            self.waiting.pop(key, None)

    def stop_timers(self, ids: Collection[bytes]) -> list[Message]:
        """Parked messages that get another due time: copies take their place, so their timers do nothing any more.

        Returns the copies, with those that were stopped before and have no timer yet.
        """
        self.untimed.update(ids)
        stopped = list[Message]()
        for key, message in self.parked.items():
            if message.entry_id in self.untimed:
                stopped.append(message.again())
                self.bodies_wanted.pop(message.entry_id, None)
                self.parked[key] = stopped[-1]
        self.untimed = {message.entry_id for message in stopped}
        return stopped

    def timed(self, entry_id: bytes) -> None:
        """A parked message has a timer again."""
        self.untimed.discard(entry_id)

    # -- raw entries ----------------------------------------------------------------------------------------------

    def count_raw(self, change: int) -> None:
        """So many more `RawEntries` of the lane are in the queue."""
        self.raw_entries += change

    def unpacked(self) -> None:
        """None of them is in the queue."""
        self.raw_entries = 0

    # -- all ------------------------------------------------------------------------------------------------------

    def clear(self, heads: Iterable[Message]) -> None:
        """Forget all that waits. `heads` were ready; the keys that are left belong to running messages."""
        free = {each.routing_key for each in (*heads, *self.held.values()) if each.routing_key is not None}
        for flow in self.waiting.values():
            flow.clear()
            if flow is not NONE:
                flow.ids = None
        for key in free | self.parked.keys() | self.dry | set(self.resting.keys):
            self.waiting.pop(key, None)
        self.far = 0
        self.aside = {}
        self.gone.clear()
        self.named.clear()
        self.resting.clear()
        self.calls.clear(self.waiting)
        self.thin.clear()
        self.dry.clear()
        self._asked = []
        self._fillings += 1
        self._known = None
        self.parked.clear()
        self.emptied.clear()
        self.bodies_wanted.clear()
        self.held.clear()

    def __repr__(self) -> str:
        return f"<Flows keys={len(self.waiting)} parked={len(self.parked)} held={len(self.held)} far={self.far}>"
