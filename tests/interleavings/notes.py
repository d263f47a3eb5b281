"""Every order of the scripts of steps and results: a handler that copies pages, its next owner, and a real server.

The step is a cursor: the last page that was copied. A state has what the server holds of the message, what each owner
knows, and calls of an owner that has gone. `search.py` walks through all of it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import redis

from rsmq.model.keys import Keys
from rsmq.redis.scripts import BURY_MESSAGE, KEEP_NOTE, OK, REPLAY_DEAD_LETTER, SETTLE_OUTPUTS, Script
from rsmq.testing.server import ThrowawayServer
from tests.interleavings.batch_counts import weakened
from tests.interleavings.moves import Move
from tests.interleavings.search import Result, Search

KEYS: Final = Keys()
AT: Final = ("copies", 0, "lake")
STREAM, LEASE, RETRY, DLQ = KEYS.stream(*AT[:2]), KEYS.lease(*AT), KEYS.retry(*AT), KEYS.dlq(*AT)
STEPS, PROGRESS, RESULT = KEYS.steps(*AT), KEYS.progress(*AT), KEYS.result(*AT, "x")
GROUP: Final = AT[2]
STEP: Final = "rows"
PAGES: Final = 2
SCRIPTS: Final = {each.name: each for each in (KEEP_NOTE, SETTLE_OUTPUTS, BURY_MESSAGE, REPLAY_DEAD_LETTER)}


class Row(NamedTuple):
    """What the server holds: who may handle the message, its entry (2: its replay), where it is, the page of its step
    (0: none), the steps of its dead letter, and its result."""

    owner: int = 1
    entry: int = 1
    state: str = "pending"
    page: int = 0
    letter: bytes = b""
    result: str = ""


class Call(NamedTuple):
    """A call of an owner: `keep` a page, `settle`, `bury`, or `replay` of an operator. `again`: sent before."""

    word: str
    owner: int = 0
    entry: int = 1
    page: int = 0
    again: int = 0


class Owner(NamedTuple):
    """What an owner knows: whether its handler runs, since which entry, and the page that it has read or kept."""

    runs: bool = False
    entry: int = 0
    page: int = 0
    sent: Call | None = None
    reply: str = ""
    is_asleep: bool = False
    is_gone: bool = False


class NoteFaults(NamedTuple):
    """How often each may still happen."""

    crashes: int = 0
    pauses: int = 0
    lost: int = 0
    failures: int = 0
    deaths: int = 0
    replays: int = 0


class Truth(NamedTuple):
    """What has really happened: the last page of which the owner has heard that it is kept."""

    kept: int = 0


class NoteWorld(NamedTuple):
    """One state. `late`: calls whose owner has gone. The search reads these names."""

    server: Row
    members: tuple[Owner, ...]
    late: tuple[Call, ...]
    left: NoteFaults
    truth: Truth = Truth()


def page_of(packed: bytes) -> int:
    """The page in the steps of a dead letter."""
    if not packed:
        return 0
    (size,) = struct.unpack_from(">I", packed)
    return int(packed[8 + size :])


class NoteStore:
    """The keys on a real server. The same call in the same state is executed once."""

    def __init__(self, client: redis.Redis, scripts: dict[str, Script], *, is_shared: bool) -> None:
        self._client, self._scripts, self._is_shared = client, scripts, is_shared
        self._known: dict[Any, tuple[Row, str]] = {}

    def execute(self, row: Row, call: Call) -> tuple[Row, str]:
        """The state after a call, and the word that it is answered with."""
        if (row, call) not in self._known:
            self._write(row)
            reply = self._client.execute_command(*self._command(call))
            self._known[row, call] = self._read(row, call), reply[0].decode()
        return self._known[row, call]

    def _command(self, call: Call) -> list[Any]:
        fenced = (f"m{call.owner}", "" if self._is_shared else call.owner, GROUP)
        entry, keys = f"{call.entry}-1", (STREAM, LEASE, RETRY)
        if call.word == "keep":
            names, args = (STREAM, LEASE, STEPS, PROGRESS), (*fenced, entry, STEP, call.page, 100, 1000)
            return self._scripts[KEEP_NOTE.name].full_command(names, args)
        if call.word == "settle":
            told = (*fenced, call.again, 0, 0, 0, entry, "1n", 4, "", 2, "copied", 60_000)
            return self._scripts[SETTLE_OUTPUTS.name].full_command((*keys, RESULT), told)
        if call.word == "bury":
            told = (*fenced, entry, 1, 100, call.again, "dlq.reason", "failed", "dlq.error", "no room")
            return self._scripts[BURY_MESSAGE.name].full_command((*keys, DLQ), told)
        return self._scripts[REPLAY_DEAD_LETTER.name].full_command((STREAM, DLQ), ("5-1", GROUP, 0, "reject"))

    def _write(self, row: Row) -> None:
        message, member = {"data": "d", "id": "x", "keep_result": "60000"}, f"m{row.owner}"
        pipeline = self._client.pipeline(transaction=False)
        pipeline.flushall()
        pipeline.xgroup_create(STREAM, GROUP, "0", mkstream=True)
        pipeline.xadd(STREAM, message, f"{row.entry}-1")
        pipeline.xreadgroup(GROUP, member, {STREAM: ">"})
        pipeline.hset(LEASE, mapping={"owner": member, "epoch": row.owner})
        if row.state != "pending":
            pipeline.xack(STREAM, GROUP, f"{row.entry}-1")
        if row.state == "dead":
            pipeline.xadd(DLQ, {**message, **({"dlq.steps": row.letter} if row.letter else {})}, "5-1")
        if row.page:
            pipeline.hset(STEPS, mapping={f"{row.entry}-1": STEP, f"{row.entry}-1|{STEP}": row.page})
        if row.result:
            pipeline.set(RESULT, row.result)
        pipeline.execute()

    def _read(self, row: Row, call: Call) -> Row:
        letters, result = self._client.xrange(DLQ), self._client.get(RESULT) or b""
        entry_id = self._client.xrevrange(STREAM, count=1)[0][0].decode()
        is_pending = self._client.xpending(STREAM, GROUP)["pending"] > 0
        is_replayed = call.word == "replay" and not letters
        left = self._client.hgetall(STEPS)
        page = left.pop(f"{entry_id}|{STEP}".encode(), 0)
        left.pop(entry_id.encode(), None)
        return row._replace(
            entry=2 if is_replayed else row.entry,
            state="pending" if is_pending or is_replayed else "dead" if letters else "settled",
            page=int(page) or len(left),
            letter=letters[-1][1].get(b"dlq.steps", b"") if letters else b"",
            result="failed" if b'"reason"' in result else result.decode(),
        )


class NoteMoves:
    """What can happen: the handler copies pages, ends, fails, and faults. The second owner takes over from the first
    while that is asleep or has gone."""

    def __init__(self, store: NoteStore, faults: NoteFaults) -> None:
        self.store, self._faults = store, faults

    def begin(self) -> NoteWorld:
        """The message was delivered."""
        return NoteWorld(Row(), (Owner(), Owner()), (), self._faults)

    def is_done(self, world: NoteWorld) -> bool:
        """Whether it has ended, and no owner waits for an answer."""
        is_quiet = all(each.is_gone or each.is_asleep or not each.runs for each in world.members)
        return is_quiet and world.server.state != "pending"

    def after(self, world: NoteWorld) -> list[Move]:
        """All that can happen next."""
        return [
            Move(text, after, is_fault, broken or self._broken(after))  # type: ignore[arg-type]
            for text, after, is_fault, broken in self._each(world)
        ]

    def _broken(self, world: NoteWorld) -> str:
        row, kept = world.server, world.truth.kept
        if row.state == "pending":
            if row.page < kept:
                return f"page {kept} was kept, and the step says {row.page}"
            return "there is a result, and no attempt has ended" if row.result == "copied" else ""
        if row.page:
            return f"the steps of a message that is {row.state} stay"
        if row.state == "dead" and page_of(row.letter) < kept:
            return f"page {kept} was kept, and the dead letter says {page_of(row.letter)}"
        wanted = "copied" if row.state == "settled" else "failed"
        return "" if row.result == wanted else f"it is {row.state}, and its result is {row.result!r}"

    def _each(self, world: NoteWorld) -> Iterator[tuple[str, NoteWorld, bool, str]]:
        row, left = world.server, world.left
        for at, owner in enumerate(world.members):
            if owner.is_asleep:
                yield f"m{at + 1} wakes up", with_owner(world, at, is_asleep=False), False, ""
            elif not owner.is_gone:
                yield from self._awake(world, at, owner)
        first = world.members[0]
        if row.owner == 1 and row.state == "pending" and (first.is_asleep or first.is_gone):
            yield "m2 takes over", world._replace(server=row._replace(owner=2)), False, ""
        if row.state == "dead" and left.replays:
            after = self.store.execute(row, Call("replay"))[0]
            yield "the dead letter is replayed", one_less(world, "replays")._replace(server=after), True, ""
        for place, call in enumerate(world.late):
            rest = world.late[:place] + world.late[place + 1 :]
            after = self.store.execute(row, call)[0]
            yield f"a late call is executed: {call}", world._replace(server=after, late=rest), False, ""

    def _awake(self, world: NoteWorld, at: int, owner: Owner) -> Iterator[tuple[str, NoteWorld, bool, str]]:
        row, left, name = world.server, world.left, f"m{at + 1}"
        if left.crashes and at == 0:
            gone = one_less(late(world, owner), "crashes")
            yield f"{name} is killed", with_owner(gone, at, is_gone=True, sent=None), True, ""
        if left.pauses and at == 0 and owner.runs:
            yield f"{name} falls asleep", with_owner(one_less(world, "pauses"), at, is_asleep=True), True, ""
        if not owner.runs:
            if row.owner == at + 1 and row.state == "pending":
                started = with_owner(world, at, runs=True, entry=row.entry, page=row.page)
                yield f"the handler starts in {name} at page {row.page}", started, False, ""
        elif owner.sent is None:
            yield from self._running(world, at, owner)
        elif not owner.reply:
            after, word = self.store.execute(row, owner.sent)
            yield (
                f"{owner.sent} is executed: {word}",
                with_owner(world, at, reply=word)._replace(server=after),
                False,
                "",
            )
        else:
            yield f"{name} has the answer", self._answered(world, at, owner), False, ""
            if left.lost:
                again = with_owner(one_less(world, "lost"), at, reply="", sent=owner.sent._replace(again=1))
                yield f"the answer to {name} is lost, and it sends the call again", again, True, ""

    def _running(self, world: NoteWorld, at: int, owner: Owner) -> Iterator[tuple[str, NoteWorld, bool, str]]:
        about, left = (at + 1, owner.entry), world.left
        if owner.page < PAGES:
            page = owner.page + 1
            is_again = world.server.owner == at + 1 and page <= world.truth.kept
            broken = f"page {page} was kept, and is copied again" if is_again else ""
            yield f"m{at + 1} copies page {page}", with_owner(world, at, sent=Call("keep", *about, page)), False, broken
        else:
            yield f"m{at + 1} has copied all", with_owner(world, at, sent=Call("settle", *about)), False, ""
        if left.failures:
            yield f"the attempt fails in m{at + 1}", with_owner(one_less(world, "failures"), at, runs=False), True, ""
        if left.deaths:
            dying = with_owner(one_less(world, "deaths"), at, sent=Call("bury", *about))
            yield f"the handler in m{at + 1} fails for the last time", dying, True, ""

    @staticmethod
    def _answered(world: NoteWorld, at: int, owner: Owner) -> NoteWorld:
        assert owner.sent is not None
        if owner.reply != OK.decode() and (owner.sent.word == "keep" or owner.reply == "STALE_EPOCH"):
            return with_owner(world, at, is_gone=True, sent=None, reply="")
        if owner.sent.word != "keep":
            return with_owner(world, at, runs=False, sent=None, reply="")
        known = with_owner(world, at, page=owner.sent.page, sent=None, reply="")
        return known._replace(truth=Truth(max(world.truth.kept, owner.sent.page)))


def with_owner(world: NoteWorld, at: int, **changed: Any) -> NoteWorld:
    """The world with a changed owner."""
    members = list(world.members)
    members[at] = members[at]._replace(**changed)
    return world._replace(members=tuple(members))


def one_less(world: NoteWorld, fault: str) -> NoteWorld:
    """A fault has happened."""
    return world._replace(left=world.left._replace(**{fault: getattr(world.left, fault) - 1}))


def late(world: NoteWorld, owner: Owner) -> NoteWorld:
    """What an owner has sent may be executed after it has gone."""
    return world if owner.sent is None or owner.reply else world._replace(late=(*world.late, owner.sent))


@dataclass(frozen=True)
class NoteScenario:
    """Faults that may happen, under a lease or in shared distribution."""

    faults: NoteFaults
    is_shared: bool = False

    @property
    def name(self) -> str:
        """For people."""
        faults = ", ".join(f"{number} {kind}" for kind, number in self.faults._asdict().items() if number)
        return f"steps: {'shared, ' if self.is_shared else ''}{faults}"

    def search(self, old: str = "", new: str = "") -> Result:
        """What the search finds, with a text of the scripts replaced, on a server of its own."""
        scripts = {name: weakened(each, old, new) if old else each for name, each in SCRIPTS.items()}
        with ThrowawayServer(tcp=True) as server, redis.Redis.from_url(server.url) as client:
            moves: Any = NoteMoves(NoteStore(client, scripts, is_shared=self.is_shared), self.faults)
            return Search(moves).run()


PAUSED: Final = NoteScenario(NoteFaults(pauses=1, crashes=1, failures=1, lost=1))
SHARED: Final = NoteScenario(NoteFaults(pauses=1, lost=1), is_shared=True)
DEAD: Final = NoteScenario(NoteFaults(deaths=1, replays=1, pauses=1, lost=1))
NOTE_SCENARIOS: Final = (PAUSED, SHARED, DEAD)


@dataclass(frozen=True)
class NoteWeakening:
    """The scripts with some of their text replaced, and a scenario that shows what the text was good for."""

    what: str
    scenario: NoteScenario
    script: Script
    old: str
    new: str = ""

    def search(self) -> Result:
        """What the search finds. The text is in the script once."""
        assert self.script.source.count(self.old) == 1, self.old
        return self.scenario.search(self.old, self.new)


NOTE_WEAKENINGS: Final = (
    NoteWeakening(
        "a former owner writes over a step", PAUSED, KEEP_NOTE,
        "if lease[1] ~= ARGV[1] or lease[2] ~= ARGV[2] then return { 'STALE_EPOCH' } end",
    ),
    NoteWeakening(
        "who has lost a message writes over its step", SHARED, KEEP_NOTE,
        "if not row or row[2] ~= ARGV[1] then return { 'NOT_PENDING' } end",
    ),
    NoteWeakening(
        "a settlement keeps steps", PAUSED, SETTLE_OUTPUTS,
        "mark ~= '' and take_notes(KEYS[1], ARGV[3], ARGV[at])", "{}",
    ),
    NoteWeakening(
        "a former owner settles", PAUSED, SETTLE_OUTPUTS,
        "if lease[1] ~= ARGV[1] or lease[2] ~= ARGV[2] then return { 'STALE_EPOCH' } end",
    ),
    NoteWeakening(
        "a settlement has no result", PAUSED, SETTLE_OUTPUTS,
        "redis.call('SET', KEYS[target], ARGV[at + 3], 'PX', ARGV[last])",
    ),
    NoteWeakening(
        "a result is stored by who is not the owner any more", SHARED, SETTLE_OUTPUTS,
        "ARGV[4] == '0', retry) then", "ARGV[4] == '0', retry) or true then",
    ),
    NoteWeakening(
        "a dead letter has no steps", DEAD, BURY_MESSAGE,
        "for _, part in ipairs(take_notes(KEYS[1], ARGV[3], ARGV[4])) do fields[#fields + 1] = part end",
        "take_notes(KEYS[1], ARGV[3], ARGV[4])",
    ),
    NoteWeakening(
        "a dead letter has no result", DEAD, BURY_MESSAGE,
        "if body then keep_failure(KEYS[1], ARGV[3], body[2], reason, error) end",
    ),
    NoteWeakening(
        "a replay forgets steps", DEAD, REPLAY_DEAD_LETTER,
        "if steps then lay_steps(KEYS[1], ARGV[2], id, steps) end",
    ),
)  # fmt: skip
