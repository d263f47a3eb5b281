"""Every order of the script that lends permits: two members with the package's own `Loan`, on a real server.

A state has the two keys as the server holds them, each member's loan and lease, and the calls on their way. Time stands
still between two steps: a token runs out by a step. `search.py` walks through all of it.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import redis

from rsmq.consumer.waiting.loan import InUse, Loan, PermitWish
from rsmq.redis.scripts import TAKE_PERMITS, Script
from rsmq.testing.server import ThrowawayServer
from tests.interleavings.moves import Move
from tests.interleavings.search import Result, Search

KEYS: Final = ("permits", "holders")
DAY: Final = 86_400_000
START: Final = 1_000_000_000_000


class Row(NamedTuple):
    """What the server holds of a member: its token (0: none) and whether that counts; permits, of which token, the
    last call; what it waits for and its place."""

    token: int = 0
    is_alive: bool = False
    held: int = 0
    held_token: int = 0
    call: int = 0
    wanted: int = 0
    place: int = 0


class Sent(NamedTuple):
    """A call on its way, or its reply. `is_first`: nothing was held under its token."""

    token: int
    number: int
    kept: int
    wanted: int
    is_first: bool
    reply: tuple[Any, ...] | None = None


class Borrowing(NamedTuple):
    """A member: `left` calls to run, `used` of them run now. `has_lease`: the server has confirmed its token."""

    name: str
    left: int
    used: int = 0
    is_alive: bool = True
    is_asleep: bool = False
    token: int = 1
    has_lease: bool = False
    held: int = 0
    most: int = 0
    others: int = 0
    is_short: bool = False
    calls: int = 0
    sent: Sent | None = None


class Faults(NamedTuple):
    """How often each may still happen."""

    crashes: int = 0
    pauses: int = 0
    lost: int = 0
    losses: int = 0


class PermitWorld(NamedTuple):
    """One state. `late`: calls whose sender waits no more. `truth`: bits of the members that have heard nothing since
    the server has lost its data: so long there may be too many calls. The search reads these names."""

    server: tuple[Row, ...]
    members: tuple[Borrowing, ...]
    late: tuple[tuple[int, Sent], ...]
    left: Faults
    truth: int = 0


class PermitStore:
    """The two keys on a real server. The same call in the same state is executed once."""

    def __init__(self, client: redis.Redis, script: Script = TAKE_PERMITS) -> None:
        self._client, self._script = client, script
        self._known: dict[Any, tuple[tuple[Row, ...], tuple[Any, ...]]] = {}

    def execute(self, rows: tuple[Row, ...], member: int, limit: int, sent: Sent) -> Any:
        """The state after a call, and its reply."""
        asked = rows, member, sent
        if asked not in self._known:
            self._write(rows)
            args = (
                f"m{member}", sent.token, sent.number, int(sent.is_first), limit, DAY, 60_000, sent.kept, sent.wanted,
            )  # fmt: skip
            reply = self._client.execute_command(*self._script.full_command(KEYS, args))
            self._known[asked] = self._read(len(rows)), tuple(reply)
        return self._known[asked]

    def _write(self, rows: tuple[Row, ...]) -> None:
        held = {f"m{at}": [row.held, row.held_token, row.call] for at, row in enumerate(rows) if row.call}
        now = int(self._client.time()[0]) * 1000
        waits = {f"m{at}": [row.wanted, START + row.place, now + 30_000] for at, row in enumerate(rows) if row.wanted}
        ends = {True: now + DAY, False: now - 1}
        tokens = {f"m{at}": f"{row.token}|{ends[row.is_alive]}|{DAY}" for at, row in enumerate(rows) if row.token}
        pipeline = self._client.pipeline()
        pipeline.delete(*KEYS)
        pipeline.set(KEYS[0], json.dumps({"held": held, "waits": waits}))
        if tokens:
            pipeline.hset(KEYS[1], mapping=tokens)
        pipeline.execute()

    def _read(self, count: int) -> tuple[Row, ...]:
        state: Any = json.loads(self._client.get(KEYS[0]) or '{"held": {}, "waits": {}}')
        tokens = {name.decode(): text.decode().split("|") for name, text in self._client.hgetall(KEYS[1]).items()}
        now = int(self._client.time()[0]) * 1000
        places = sorted({since for _, since, _ in dict(state["waits"]).values()})
        rows = []
        for at in range(count):
            held, held_token, call = dict(state["held"]).get(f"m{at}", (0, 0, 0))
            wanted, since, _ = dict(state["waits"]).get(f"m{at}", (0, 0, 0))
            token, ends, _ = tokens.get(f"m{at}", (0, 0, 0))
            place = places.index(since) if wanted else 0
            rows.append(Row(int(token), int(ends) > now, held, held_token, call, wanted, place))
        return tuple(rows)


class PermitMoves:
    """What can happen: calls start and end, the member asks, and faults. `limit` permits for `work` calls each."""

    def __init__(self, store: PermitStore, limit: int, work: tuple[int, ...], faults: Faults) -> None:
        self._store, self._limit, self._work, self._faults = store, limit, work, faults

    def begin(self) -> PermitWorld:
        """Nothing has happened."""
        members = tuple(Borrowing(f"m{at}", left, most=self._limit) for at, left in enumerate(self._work))
        return PermitWorld(tuple(Row() for _ in self._work), members, (), self._faults)

    def is_done(self, world: PermitWorld) -> bool:
        """Whether all that can run has run."""
        return all(not each.left or not each.is_alive for each in world.members)

    def after(self, world: PermitWorld) -> list[Move]:
        """All that can happen next."""
        return [
            Move(text, numbered(after), is_fault, self._broken(after))  # type: ignore[arg-type]
            for text, after, is_fault in self._each(world)
        ]

    def _broken(self, world: PermitWorld) -> str:
        if world.truth:
            return ""
        running = sum(each.used for each in world.members if each.is_alive and not each.is_asleep)
        return f"{running} calls run, and the limit is {self._limit}" if running > self._limit else ""

    def _each(self, world: PermitWorld) -> Iterator[tuple[str, PermitWorld, bool]]:
        for at, member in enumerate(world.members):
            if not member.is_alive:
                if world.server[at].is_alive or world.server[at].wanted:
                    yield f"the token of {member.name} runs out", with_row(world, at, is_alive=False, wanted=0), False
            elif member.is_asleep:
                yield f"{member.name} wakes up", with_member(world, at, is_asleep=False, **lost(member)), False
            else:
                yield from self._awake(world, at, member)
        if world.left.losses:
            yield "the server loses its data", self._loss(world, tuple(Row() for _ in world.server)), True
            rows = tuple(Row(row.token, row.is_alive) for row in world.server)
            yield "the server loses what it has granted", self._loss(world, rows), True
        for place, (at, sent) in enumerate(world.late):
            rows, _ = self._store.execute(world.server, at, self._limit, sent)
            rest = world.late[:place] + world.late[place + 1 :]
            yield f"a late call of m{at} is executed", world._replace(server=rows, late=rest), False

    @staticmethod
    def _loss(world: PermitWorld, rows: tuple[Row, ...]) -> PermitWorld:
        """All connections end with it. Who has a call on its way does not know what became of it."""
        unsure, left = 0, world.left._replace(losses=world.left.losses - 1)
        after = world._replace(server=rows, left=left)
        for at, member in enumerate(world.members):
            unsure |= (1 << at) if member.is_alive and member.has_lease and not member.is_asleep else 0
            if member.sent is not None:
                after = late(with_member(after, at, sent=None, is_short=True), at, member)
        return after._replace(truth=unsure)

    def _awake(self, world: PermitWorld, at: int, member: Borrowing) -> Iterator[tuple[str, PermitWorld, bool]]:
        loan, left = loan_of(member, self._limit), world.left
        if member.has_lease and loan.room and member.left > member.used:
            yield f"{member.name} starts a call", with_member(world, at, used=member.used + 1), False
        if member.used:
            yield (
                f"{member.name} ends a call",
                with_member(world, at, used=member.used - 1, left=member.left - 1),
                False,
            )
        has_news = world.truth >> at & 1 or loan.waiting() or loan.is_short or member.held > member.used
        if member.sent is None and has_news:
            claim = loan.ask(member.calls + 1, 2)
            sent = Sent(member.token, claim.number, claim.kept, claim.wanted, not member.has_lease)
            yield f"{member.name} asks", with_member(world, at, sent=sent, held=loan.held, calls=claim.number), False
        elif member.sent is not None and member.sent.reply is None:
            rows, reply = self._store.execute(world.server, at, self._limit, member.sent)
            changed = with_member(world, at, sent=member.sent._replace(reply=reply))
            yield f"the call of {member.name} is executed: {reply}", changed._replace(server=rows), False
        elif member.sent is not None:
            heard = world._replace(truth=world.truth & ~(1 << at))
            yield f"{member.name} reads its reply", with_member(heard, at, **read(member, self._limit)), False
        if member.sent is not None and left.lost:
            given_up = with_member(world, at, sent=None, is_short=True)._replace(left=left._replace(lost=left.lost - 1))
            yield f"the reply to {member.name} is lost", late(given_up, at, member), True
        if left.crashes:
            crashed = with_member(world, at, is_alive=False, used=0, sent=None)
            crashed = crashed._replace(left=left._replace(crashes=left.crashes - 1), truth=world.truth & ~(1 << at))
            yield f"{member.name} dies", late(crashed, at, member), True
        if left.pauses and member.has_lease:
            asleep = with_row(with_member(world, at, is_asleep=True, sent=None), at, is_alive=False)
            asleep = asleep._replace(left=left._replace(pauses=left.pauses - 1), truth=world.truth & ~(1 << at))
            yield f"{member.name} is paused until its token has run out", late(asleep, at, member), True


def late(world: PermitWorld, at: int, member: Borrowing) -> PermitWorld:
    """Its call, if it was not executed, may be later."""
    if member.sent is None or member.sent.reply is not None:
        return world
    return world._replace(late=(*world.late, (at, member.sent)))


def with_member(world: PermitWorld, at: int, **changed: Any) -> PermitWorld:
    """The world with another state of a member."""
    members = list(world.members)
    members[at] = members[at]._replace(**changed)
    return world._replace(members=tuple(members))


def with_row(world: PermitWorld, at: int, **changed: Any) -> PermitWorld:
    """The world with another record of a member."""
    rows = list(world.server)
    rows[at] = rows[at]._replace(**changed)
    return world._replace(server=tuple(rows))


def lost(member: Borrowing) -> dict[str, Any]:
    """What a member does whose permits are lost: its calls are cancelled, and run again."""
    return {"used": 0, "token": member.token + 1, "has_lease": False, "held": 0, "is_short": False, "sent": None}


def loan_of(member: Borrowing, limit: int) -> Loan:
    """The package's loan in the state of a member."""
    in_use = InUse()
    for _ in range(member.used):
        in_use.enter()
    loan = Loan("", limit, in_use, lambda: member.left - member.used, lambda: None)
    loan.held, loan.most = member.held, member.most
    loan.others, loan.is_short = member.others, member.is_short
    return loan


def read(member: Borrowing, limit: int) -> dict[str, Any]:
    """What a member makes of its reply."""
    assert member.sent is not None
    assert member.sent.reply is not None
    word, *numbers = member.sent.reply
    if word == b"LOST":
        return lost(member)
    if word == b"LATE":
        return {"sent": None, "is_short": True}
    loan = loan_of(member, limit)
    claim = PermitWish(member.sent.number, member.sent.kept, member.sent.wanted)
    if not loan.answered(claim, *numbers):
        return lost(member)
    changed = {"held": loan.held, "most": loan.most, "others": loan.others, "is_short": loan.is_short}
    return {**changed, "has_lease": True, "sent": None}


def numbered(world: PermitWorld) -> PermitWorld:
    """The world with the numbers of each member's calls counted anew in their order: only that matters."""
    members, rows, calls = list(world.members), list(world.server), list(world.late)
    for at, member in enumerate(members):
        own = [sent for other, sent in calls if other == at] + ([member.sent] if member.sent else [])
        found = sorted({member.calls, rows[at].call, *(sent.number for sent in own)} - {0})
        new = {0: 0} | {number: place for place, number in enumerate(found, 1)}
        sent = member.sent and member.sent._replace(number=new[member.sent.number])
        members[at] = member._replace(calls=new[member.calls], sent=sent)
        rows[at] = rows[at]._replace(call=new[rows[at].call])
        calls = [(other, each._replace(number=new[each.number]) if other == at else each) for other, each in calls]
    return world._replace(members=tuple(members), server=tuple(rows), late=tuple(sorted(calls)))


@dataclass(frozen=True)
class PermitScenario:
    """So many permits for so many calls of each member, and the faults that may happen. `is_short`: in `make test`."""

    limit: int
    work: tuple[int, ...]
    faults: Faults
    is_short: bool = False

    @property
    def name(self) -> str:
        """For people."""
        faults = ", ".join(f"{number} {kind}" for kind, number in self.faults._asdict().items() if number)
        return f"permits: {self.limit} for {' and '.join(map(str, self.work))} calls, {faults or 'no faults'}"

    def search(self, script: Script = TAKE_PERMITS) -> Result:
        """What the search finds with a script, on a server of its own."""
        with ThrowawayServer(tcp=True) as server, redis.Redis.from_url(server.url) as client:
            moves: Any = PermitMoves(PermitStore(client, script), self.limit, self.work, self.faults)
            return Search(moves).run()


LOST_REPLY: Final = PermitScenario(1, (2, 1), Faults(lost=1), is_short=True)
PAUSE: Final = PermitScenario(1, (1, 1), Faults(pauses=1), is_short=True)
CRASH: Final = PermitScenario(1, (1, 1), Faults(crashes=1), is_short=True)
LOSS: Final = PermitScenario(1, (1, 1), Faults(losses=1))
PERMIT_SCENARIOS: Final = (
    LOSS,
    LOST_REPLY,
    PAUSE,
    CRASH,
    PermitScenario(1, (1, 1), Faults(crashes=1, lost=1)),
    PermitScenario(2, (2, 2), Faults(lost=1)),
    PermitScenario(2, (2, 1), Faults(pauses=1, lost=1)),
)


@dataclass(frozen=True)
class PermitWeakening:
    """The script with some of its text replaced, and a scenario that shows what the text was good for."""

    what: str
    scenario: PermitScenario
    old: str
    new: str

    @property
    def script(self) -> Script:
        """The weakened script."""
        if TAKE_PERMITS.source.count(self.old) != 1:
            raise ValueError(f"take_permits has this text {TAKE_PERMITS.source.count(self.old)} times: {self.old}")
        weak = copy.copy(TAKE_PERMITS)
        weak.source = TAKE_PERMITS.source.replace(self.old, self.new)
        return weak


PERMIT_WEAKENINGS: Final = (
    PermitWeakening("executes calls that come late", LOST_REPLY, "if mine and mine[3] >= number then", "if false then"),
    PermitWeakening("counts the permits of a token that has ended", CRASH, "if ends > now then", "if true then"),
    PermitWeakening("forgets what others hold", LOST_REPLY, "others = others + each[1]", ""),
    PermitWeakening(
        "grants what is held", LOST_REPLY,
        "granted = granted + math.min(wanted - granted, math.max(0, free - granted - all))", "granted = wanted",
    ),
    PermitWeakening(
        "believes what a member says it holds", LOSS,
        "kept = math.min(kept, math.max(mine and mine[1] or 0, limit - others))", "",
    ),
    PermitWeakening(
        "takes back at once what it grants", LOST_REPLY, "kept <= least or granted > 0 then",
        "kept + granted <= least then kept = kept + granted end if lacking <= 0 then",
    ),
)  # fmt: skip
