"""Every order of the scripts that count a batch: a publisher, members that end, and a relay, on a real server.

A state has the batch as the server holds it, what has become of each member, what the publisher knows, the records of
members that wait to be relayed, and calls that come late. `search.py` walks through all of it.
"""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import redis

from rsmq.model.keys import Keys
from rsmq.redis.scripts import COUNT_MEMBERS, END_BATCHES, OPEN_BATCH, SETTLE_MEMBERS, Script
from rsmq.testing.server import ThrowawayServer
from tests.interleavings.moves import Move
from tests.interleavings.search import Result, Search

KEYS: Final = Keys()
HOME: Final = "0.b"
GROUP: Final = "g"
STATE, MEMBERS = KEYS.batch_state(HOME), KEYS.batch_members(HOME)
DUE, NAMES, REPORTS = KEYS.batch_due(0), KEYS.batch_names(0), KEYS.stream("reports", 0)
STREAM, LEASE, RETRY = KEYS.stream("sms", 0), KEYS.lease("sms", 0, GROUP), KEYS.retry("sms", 0, GROUP)
TIMES: Final = ("opened_ms", "expires_ms", "ended_ms", "succeeded_ms", "cancelled_ms")
ENDED: Final = ("done", "failed", "cancelled")
COUNTS: Final = ("total", "done", "failed", "cancelled", "missing")


class BatchRow(NamedTuple):
    """What the server holds: the fields of the state, the members, and what the callbacks have said."""

    fields: tuple[tuple[str, str], ...] = ()
    members: bytes = b""
    callbacks: tuple[tuple[Any, ...], ...] = ()


class Call(NamedTuple):
    """A call about members: of the publisher, an operator, a relay (`left`) or a settlement (`settle`)."""

    word: str
    told: str = ""
    changes: tuple[Any, ...] = ()


class BatchFaults(NamedTuple):
    """How often each may still happen."""

    lost: int = 0
    replays: int = 0
    cancels: int = 0
    failovers: int = 0
    expiries: int = 0


class Truth(NamedTuple):
    """What else is true: `ended` are members that have ended at least once.

    The publisher has told of so many members, `sent` a call, has read its answer, and closed. `records` wait to be
    relayed. `before`: the row before the last call, which a failover brings back.
    """

    ended: frozenset[int] = frozenset()
    told: int = 0
    sent: Call | None = None
    is_answered: bool = False
    is_closed: bool = False
    records: tuple[Call, ...] = ()
    before: BatchRow | None = None
    has_lost: bool = False
    is_cancelled: bool = False


class BatchWorld(NamedTuple):
    """One state. `members`: of each, or of the child, what has become of it: empty before its publish, `ready`, or how
    it has ended. `late`: calls whose caller has gone. The search reads these names."""

    server: BatchRow
    members: tuple[str, ...]
    late: tuple[Call, ...]
    left: BatchFaults
    truth: Truth = Truth()

    def knowing(self, **changed: Any) -> BatchWorld:
        """The same with another truth."""
        return self._replace(truth=self.truth._replace(**changed))


class BatchStore:
    """The batch on a real server. The same call in the same state is executed once."""

    def __init__(self, client: redis.Redis, scripts: dict[str, Script]) -> None:
        self._client, self._scripts = client, scripts
        self._known: dict[Any, BatchRow] = {}

    def opened(self) -> BatchRow:
        """A batch that has just been opened."""
        self._client.flushall()
        about = ("n", HOME, 0, 86_400_000, 86_400_000, "group", GROUP)
        topics = ("on_complete", f"d{REPORTS}", "on_success", f"d{REPORTS}")
        self._client.execute_command(*OPEN_BATCH.full_command((NAMES, STATE, DUE), (*about, *topics)))
        return self._read()

    def execute(self, row: BatchRow, call: Call) -> BatchRow:
        """The state after a call."""
        if (row, call) not in self._known:
            self._write(row)
            if call.word == "settle":
                keys, args = (STREAM, LEASE, RETRY), self._pending(call)
                reply = self._client.execute_command(*self._scripts["settle_members"].full_command(keys, args))
                assert reply == [[b"OK", 1]], reply
            elif call.word == "expire":
                self._client.zadd(DUE, {HOME: 1})
                self._client.execute_command(*self._scripts["end_batches"].full_command((DUE, NAMES), (10,)))
            else:
                args = (HOME, call.word, call.told, *call.changes)
                self._client.execute_command(*self._scripts["count_members"].full_command((STATE,), args))
            self._known[row, call] = self._read()
        return self._known[row, call]

    def _pending(self, call: Call) -> tuple[Any, ...]:
        """A member that its owner has handled."""
        self._client.xgroup_create(STREAM, GROUP, "0", mkstream=True)
        entry = self._client.xadd(STREAM, {"data": "x"})
        self._client.xreadgroup(GROUP, "m", {STREAM: ">"})
        self._client.hset(LEASE, mapping={"owner": "m", "epoch": "1"})
        block, number = call.changes[:2]
        return ("m", GROUP, "1", 1, 0, 1, entry, f"d{HOME} {GROUP} {block} {number}")

    def _write(self, row: BatchRow) -> None:
        self._client.flushall()
        self._client.hset(STATE, mapping=dict(row.fields))
        if row.members:
            self._client.set(MEMBERS, row.members)
        for said in row.callbacks:
            self._client.xadd(REPORTS, {"data": json.dumps(said)})

    def _read(self) -> BatchRow:
        fields = {name.decode(): value.decode() for name, value in self._client.hgetall(STATE).items()}
        fields |= {name: "1" for name in TIMES if name in fields}
        said = [json.loads(entry[b"data"]) for _, entry in self._client.xrange(REPORTS)]
        callbacks = [
            (each["state"], *(each[name] for name in COUNTS)) if isinstance(each, dict) else tuple(each)
            for each in said
        ]
        return BatchRow(tuple(sorted(fields.items())), self._client.get(MEMBERS) or b"", tuple(callbacks))


@dataclass(frozen=True)
class BatchMoves:
    """What can happen. `count` members are published; with `has_child`, the first one adds another when it is done.

    `is_cluster`: what members have done is relayed, in any order. `fails`: the last member becomes a dead letter.
    """

    store: BatchStore
    count: int
    is_cluster: bool
    has_child: bool
    fails: bool
    faults: BatchFaults

    def begin(self) -> BatchWorld:
        """The batch is open."""
        return BatchWorld(self.store.opened(), ("",) * (self.count + self.has_child), (), self.faults)

    def is_done(self, world: BatchWorld) -> bool:
        """Whether the publisher has closed, and all members have ended and are counted."""
        if world.truth.has_lost and not world.server.callbacks:  # what the server has lost, nothing brings back
            return False
        return world.truth.is_closed and not world.truth.records and "ready" not in world.members

    def after(self, world: BatchWorld) -> list[Move]:
        """All that can happen next."""
        return [Move(text, after, is_fault, self._broken(world, after)) for text, after, is_fault in self._each(world)]  # type: ignore[arg-type]

    def _broken(self, before: BatchWorld, world: BatchWorld) -> str:
        said = world.server.callbacks
        completes = [each for each in said if each[0] != "success"]
        if len(completes) > 1 or len(said) - len(completes) > 1:
            return f"callbacks come twice: {said}"
        for each in said[len(before.server.callbacks) :]:
            stored = [number for number, end in enumerate(world.members) if end]
            if each[0] == "success" and world.truth.is_cancelled and dict(world.server.fields).get("closed") == "":
                return f"the callback {each} comes of a batch that was cancelled before its close"
            if world.truth.is_cancelled:  # what its publisher had not told of is none of its members any more
                continue
            if each[0] == "complete" and (not world.truth.ended.issuperset(stored) or each[1] < len(stored)):
                return f"the callback {each} comes before the last of {world.members} has ended"
            if each[0] == "success" and set(world.members) - {"done", ""}:
                return f"the callback {each} comes for {world.members}"
        if self.is_done(world):
            counts, known = Counter(world.members), dict(world.server.fields)
            if len(completes) != 1:
                return "there is no callback"
            is_exact = not (world.truth.has_lost or world.truth.is_cancelled)
            if is_exact and any(int(known.get(name, 0)) != counts[name] for name in ENDED):
                return f"the counts are {known}, and the members {world.members}"
        return ""

    def _each(self, world: BatchWorld) -> Iterator[tuple[str, BatchWorld, bool]]:
        yield from self._publisher(world)
        for number, end in enumerate(world.members):
            if end == "ready":
                outcome = (
                    "failed" if self.fails and number == self.count - 1 and number not in world.truth.ended else "done"
                )
                yield f"member {number} is {outcome}", self._ended(world, number, outcome), False
                if world.left.cancels and "cancelled_ms" in dict(world.server.fields):
                    yield f"member {number} is cancelled", self._ended(world, number, "cancelled"), False
            if end == "failed" and world.left.replays:
                left = world.left._replace(replays=world.left.replays - 1)
                yield f"member {number} is replayed", with_end(world, number, "ready")._replace(left=left), True
        for at, record in enumerate(world.truth.records):
            rest = world.truth.records[:at] + world.truth.records[at + 1 :]
            counted = self._executed(world, record)
            yield f"{record.changes} is relayed", counted.knowing(records=rest), False
            if world.left.lost:
                yield f"the reply to the relay of {record.changes} is lost", one_less(counted, "lost"), True
        for at, call in enumerate(world.late):
            rest = world.late[:at] + world.late[at + 1 :]
            yield f"{call} comes late", self._executed(world, call)._replace(late=rest), False
        if world.left.cancels and "cancelled_ms" not in dict(world.server.fields):
            yield "the batch is cancelled", self._executed(world, Call("cancelled")).knowing(is_cancelled=True), True
        if world.left.failovers and world.truth.before is not None:
            lost = one_less(world, "failovers")._replace(server=world.truth.before)
            lost = lost.knowing(before=None, has_lost=True)
            yield "the server loses its last write", lost, True
        if (world.left.expiries or world.truth.has_lost) and "ended_ms" not in dict(world.server.fields):
            over = self._executed(world, Call("expire"))
            yield "the batch expires", over, not world.truth.has_lost

    def _publisher(self, world: BatchWorld) -> Iterator[tuple[str, BatchWorld, bool]]:
        stored = sum(1 for end in world.members[: self.count] if end)
        if world.truth.sent is None and not world.truth.is_closed:
            if stored < self.count:
                yield f"member {stored} is stored", with_end(world, stored, "ready"), False
            if world.truth.told < stored:
                call = Call("added", "", ("x", world.truth.told, stored - 1, "counted"))
                yield f"the publisher tells {call.changes}", world.knowing(sent=call), False
            elif stored == self.count:
                yield "the publisher closes", world.knowing(sent=Call("closed", f"x={stored}")), False
        elif world.truth.sent is not None and not world.truth.is_answered:
            executed = self._executed(world, world.truth.sent).knowing(is_answered=True)
            yield f"{world.truth.sent} is executed", executed, False
            if world.left.lost:
                yield f"{world.truth.sent} is given up, and sent again", one_less(late(world), "lost"), True
        elif world.truth.sent is not None:
            is_close, told = world.truth.sent.word == "closed", world.truth.told
            told = told if is_close else world.truth.sent.changes[2] + 1
            known = world.knowing(sent=None, is_answered=False, told=told, is_closed=is_close)
            yield f"the publisher has the answer to {world.truth.sent}", known, False
            if world.left.lost:
                again = one_less(world, "lost").knowing(is_answered=False)
                yield f"the answer to {world.truth.sent} is lost, and it is sent again", again, True

    def _ended(self, world: BatchWorld, number: int, outcome: str) -> BatchWorld:
        is_child = number == self.count
        changes: tuple[Any, ...] = (
            "c" if is_child else "x",
            0 if is_child else number,
            0 if is_child else number,
            outcome,
        )
        ended = with_end(world, number, outcome).knowing(ended=world.truth.ended | {number})
        adds = self.has_child and number == 0 and outcome == "done" and not world.members[self.count]
        if adds:
            ended, changes = with_end(ended, self.count, "ready"), (*changes, "c", 0, 0, "counted")
        if self.is_cluster:
            return ended.knowing(records=(*ended.truth.records, Call("left", "", changes)))
        is_settled = outcome == "done" and not adds
        return self._executed(ended, Call("settle" if is_settled else "left", "", changes))

    def _executed(self, world: BatchWorld, call: Call) -> BatchWorld:
        before = world.server if world.left.failovers else None
        return world._replace(server=self.store.execute(world.server, call)).knowing(before=before)


def with_end(world: BatchWorld, number: int, end: str) -> BatchWorld:
    """The world with another end of a member."""
    return world._replace(members=(*world.members[:number], end, *world.members[number + 1 :]))


def one_less(world: BatchWorld, fault: str) -> BatchWorld:
    """A fault has happened."""
    return world._replace(left=world.left._replace(**{fault: getattr(world.left, fault) - 1}))


def late(world: BatchWorld) -> BatchWorld:
    """The call of the publisher may be executed later."""
    assert world.truth.sent is not None
    return world._replace(late=(*world.late, world.truth.sent))


@dataclass(frozen=True)
class BatchScenario:
    """Members, where they are, and the faults that may happen. `is_short`: in `make test`."""

    count: int
    faults: BatchFaults
    is_cluster: bool = False
    has_child: bool = False
    fails: bool = False
    is_short: bool = False

    @property
    def name(self) -> str:
        """For people."""
        faults = ", ".join(f"{number} {kind}" for kind, number in self.faults._asdict().items() if number)
        kinds = ", one fails" * self.fails + ", a child" * self.has_child + ", relayed" * self.is_cluster
        return f"batch: {self.count} members{kinds}, {faults or 'no faults'}"

    def search(self, old: str = "", new: str = "") -> Result:
        """What the search finds, with a text of the scripts replaced, on a server of its own."""
        scripts = {each.name.rpartition("/")[2]: each for each in (COUNT_MEMBERS, END_BATCHES, SETTLE_MEMBERS)}
        if old:
            scripts = {name: weakened(each, old, new) for name, each in scripts.items()}
        with ThrowawayServer(tcp=True) as server, redis.Redis.from_url(server.url) as client:
            moves: Any = BatchMoves(
                BatchStore(client, scripts), self.count, self.is_cluster, self.has_child, self.fails, self.faults
            )
            return Search(moves).run()


def weakened(script: Script, old: str, new: str) -> Script:
    """A script with some of its text replaced, if it has that."""
    weak = copy.copy(script)
    weak.source = script.source.replace(old, new)
    return weak


LOST: Final = BatchScenario(2, BatchFaults(lost=1), is_short=True)
CHILD: Final = BatchScenario(1, BatchFaults(lost=1), is_cluster=True, has_child=True, is_short=True)
FAILOVER: Final = BatchScenario(2, BatchFaults(failovers=1), is_cluster=True, is_short=True)
REPLAY: Final = BatchScenario(2, BatchFaults(replays=1, lost=1), fails=True, is_short=True)
CANCEL: Final = BatchScenario(2, BatchFaults(cancels=1), is_short=True)
BATCH_SCENARIOS: Final = (
    LOST,
    CHILD,
    FAILOVER,
    REPLAY,
    CANCEL,
    BatchScenario(2, BatchFaults(expiries=1, lost=1), fails=True),
    BatchScenario(3, BatchFaults(lost=2), is_cluster=True, has_child=True, fails=True),
    BatchScenario(2, BatchFaults(failovers=1, lost=1), is_cluster=True, has_child=True),
    BatchScenario(3, BatchFaults(cancels=1, replays=1, lost=1), fails=True, is_cluster=True),
)


@dataclass(frozen=True)
class BatchWeakening:
    """The scripts with some of their text replaced, and a scenario that shows what the text was good for."""

    what: str
    scenario: BatchScenario
    old: str
    new: str

    def search(self) -> Result:
        """What the search finds. The text is in the scripts, once in each."""
        assert COUNT_MEMBERS.source.count(self.old) == 1, self.old
        return self.scenario.search(self.old, self.new)


BATCH_WEAKENINGS: Final = (
    BatchWeakening("calls again", REPLAY, "(is_complete or is_over) and not found[7]", "(is_complete or is_over)"),
    BatchWeakening("calls success for what has failed", REPLAY, "is_complete and done == total and", "is_complete and"),
    BatchWeakening(
        "believes that it has heard of all members", FAILOVER,
        "is_complete = is_complete and counted >= tonumber(count)", "",
    ),
    BatchWeakening(
        "lets a lower outcome replace a higher one", CHILD, "if before < rank then", "if before ~= rank then"
    ),
    BatchWeakening("counts what comes twice", LOST, "if before < rank then", "if true then"),
    BatchWeakening("forgets who leaves before it was added", CHILD, "else total = total + 1 end", "end"),
    BatchWeakening(
        "is complete before it is closed", LOST, "if not found[1] and not is_over then return end",
        "found[1] = found[1] or ''",
    ),
    BatchWeakening("is complete while members are missing", LOST, "found[1] and missing == 0", "found[1]"),
)  # fmt: skip
