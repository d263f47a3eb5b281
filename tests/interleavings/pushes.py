"""Every order of a letter that comes along with its ring: a router, a reader with the package's own cursor, a server.

A state has the inbox as the server holds it and as a replica does, what is on its way over each connection, and what
the reader knows. `search.py` walks through all of it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import redis

from rsmq.gateway.fleet.scripts import ACK_CLIENTS
from rsmq.model.packing import pack_array, pack_values
from rsmq.persistence.inbox_cursor import InboxCursor, read_pushed
from rsmq.persistence.letter import pack_letter, pack_letters, seal_mqtt
from rsmq.redis.scripts import ADD_LETTERS, BEHIND, OPEN_SESSION, PAGE_LETTERS, STALE_EPOCH, Script
from rsmq.testing.server import ThrowawayServer
from tests.interleavings.moves import Move
from tests.interleavings.search import Result, Search

INBOX, SESSION, EXPIRY, WAKE = (f"{{phone}}_{each}" for each in ("messages", "session", "expiry", "wake"))
KEYS: Final = (INBOX, SESSION, EXPIRY)
SOURCE: Final = "source:&chat.0/mqtt"
LIFE: Final = 86_400_000
FAR: Final = 10**13
WINDOW: Final = 2
SCRIPTS: Final = {each.name: each for each in (ADD_LETTERS, PAGE_LETTERS, ACK_CLIENTS, OPEN_SESSION)}


class Inbox(NamedTuple):
    """What the server holds. `letters`: their seqs and which they are; `mark`: the last one of the router."""

    epoch: int = 1
    seq: int = 0
    sent: int = 0
    is_idle: bool = True
    pushed: str = ""
    mark: int = 0
    letters: tuple[tuple[int, int], ...] = ()


class Servers(NamedTuple):
    """`kept`: what the replica has that takes over."""

    now: Inbox
    kept: Inbox | None = None


class Call(NamedTuple):
    """A call of the reader. `reply`: it was executed. `has_rung`: something has rung since a page was asked for."""

    epoch: int
    named: str
    at: int = 0
    room: int = 0
    seqs: tuple[int, ...] = ()
    has_rung: bool = False
    is_void: bool = False
    reply: tuple[Any, ...] | None = None


class Reader(NamedTuple):
    """The reader of one connection. `line`: what its doorbell brings. `out`: packet ids and seqs. `lost`: letters that
    it has delivered and the server has lost, with packet ids. `unacked`: packet ids that its client acknowledges."""

    epoch: int = 1
    at: int = 0
    sent: int = 0
    out: tuple[tuple[int, int], ...] = ()
    is_drained: bool = True
    named: str = ""
    line: tuple[bytes, ...] = ()
    page: Call | None = None
    ack: Call | None = None
    pending: tuple[int, ...] = ()
    is_rewinding: bool = False
    have: tuple[tuple[int, int], ...] = ()
    lost: tuple[tuple[int, int], ...] = ()
    unacked: tuple[int, ...] = ()


class Faults(NamedTuple):
    """How often each may still happen."""

    failovers: int = 0
    crashes: int = 0
    breaks: int = 0
    replies: int = 0


class Truth(NamedTuple):
    """`next`: the letter that the router stores next. `got`: what the client has received, over all connections."""

    next: int = 1
    round: int = 0
    got: frozenset[int] = frozenset()


class PushWorld(NamedTuple):
    """One state. The search reads these names."""

    server: Servers
    members: tuple[Reader, ...]
    late: tuple[Call, ...]
    left: Faults
    truth: Truth


class PushStore:
    """The inbox on a real server. The same call in the same state is executed once."""

    def __init__(self, client: redis.Redis, scripts: dict[str, Script]) -> None:
        self._client, self._scripts = client, {**SCRIPTS, **scripts}
        self._ear = client.pubsub()
        self._ear.execute_command("SSUBSCRIBE", WAKE)
        self._ear.parse_response()
        self._known: dict[Any, tuple[Inbox, Any, tuple[bytes, ...]]] = {}

    def execute(
        self, inbox: Inbox, name: str, keys: tuple[str, ...], *args: Any
    ) -> tuple[Inbox, Any, tuple[bytes, ...]]:
        """The state after a call, its reply, and what it has rung with."""
        asked = inbox, name, args
        if asked not in self._known:
            self._write(inbox)
            reply = self._client.execute_command(*self._scripts[name].full_command(keys, args))
            self._known[asked] = self._read(inbox), frozen(reply), self._rings()
        return self._known[asked]

    def _write(self, inbox: Inbox) -> None:
        self._client.flushall()
        fields = {
            "epoch": inbox.epoch, "seq": inbox.seq, "sent": inbox.sent, "idle": int(inbox.is_idle),
            "pushed": inbox.pushed, "mqtt": 3600, "gateway": "g", "until_ms": FAR, "floor": 0,
        }  # fmt: skip
        if inbox.mark:
            fields[SOURCE] = f"{inbox.mark:016d}@1"
        self._client.hset(SESSION, mapping=fields)
        for seq, which in inbox.letters:
            self._client.zadd(INBOX, {str(seq): seq})
            self._client.set(f"{INBOX}_{seq}", bytes(13) + sealed(which))

    def _read(self, before: Inbox) -> Inbox:
        fields = self._client.hgetall(SESSION)
        refs = [int(each) for each in self._client.zrange(INBOX, 0, -1)]
        letters = tuple((seq, which_of(self._client.get(f"{INBOX}_{seq}") or b"")) for seq in refs)
        changed = int(fields[b"epoch"]) != before.epoch
        return Inbox(
            before.epoch + changed, int(fields[b"seq"]), int(fields[b"sent"]), fields[b"idle"] == b"1",
            fields[b"pushed"].decode(), int(fields.get(SOURCE.encode(), b"0@").split(b"@")[0]), letters,
        )  # fmt: skip

    def _rings(self) -> tuple[bytes, ...]:
        self._ear.execute_command("PING", "here")
        found = list[bytes]()
        while (said := self._ear.parse_response())[0] != b"pong":
            found.append(said[2])
        return tuple(found)


def sealed(which: int) -> bytes:
    """A letter, without its stamp."""
    return seal_mqtt(1, b"chat", b"", b"%d" % which)


def which_of(envelope: bytes) -> int:
    """Which letter it is."""
    return int(envelope[-1:] or 0)


def frozen(reply: Any) -> Any:
    """A reply that can be compared."""
    return tuple(map(frozen, reply)) if isinstance(reply, list) else reply


class PushMoves:
    """All orders of one scenario."""

    def __init__(self, store: PushStore, letters: int, faults: Faults, cursor: type[InboxCursor]) -> None:
        self._store, self._letters, self._faults, self._cursor = store, letters, faults, cursor

    def begin(self) -> PushWorld:
        """A connected client that has read everything."""
        return PushWorld(Servers(Inbox()), (Reader(),), (), self._faults, Truth())

    def is_done(self, world: PushWorld) -> bool:
        """Every letter is stored, received and removed, and nothing is on its way. A letter whose removal was lost in a
        failover may stay until the client connects again."""
        (reader,), server = world.members, world.server.now
        is_still = not (reader.line or reader.page or reader.ack or reader.pending or reader.unacked)
        stays = {which for _, which in server.letters} - (world.truth.got if world.truth.round else frozenset())
        return world.truth.next > self._letters and not stays and is_still

    def after(self, world: PushWorld) -> list[Move]:
        """Every step from here."""
        moves = list[Any]()
        for text, after, is_fault, broken in self._each(world, world.members[0]):
            moves.append(Move(text, after, is_fault, broken))
        return moves

    def _each(self, world: PushWorld, reader: Reader) -> Iterator[tuple[str, Any, bool, str]]:
        server, left, truth = world.server.now, world.left, world.truth
        if truth.next <= self._letters:
            which = truth.next
            letter = pack_letter(b"%016d" % which, b"", b"", sealed(which))
            args = (LIFE, 100, 600_000, pack_letters([(SOURCE, [letter])]), 1, f"c{which}.{truth.round}")
            inbox, _, rings = self._store.execute(server, "add_letters", KEYS, *args)
            after = world._replace(server=world.server._replace(now=inbox), truth=truth._replace(next=which + 1))
            yield f"the router stores {which}", with_reader(after, reader._replace(line=reader.line + rings)), False, ""
        if reader.line:
            yield "the doorbell rings", *self._rung(world, reader)
        if reader.page is not None:
            yield from self._page(world, reader, reader.page)
        if reader.ack is not None:
            yield from self._ack(world, reader, reader.ack)
        if reader.unacked:
            yield "the client acknowledges", *self._acked(world, reader)
        for at, call in enumerate(world.late):
            inbox, broken = self._acknowledge(world, call)[:2]
            late = world.late[:at] + world.late[at + 1 :]
            yield (
                "a late ack arrives",
                world._replace(late=late, server=world.server._replace(now=inbox)),
                False,
                broken,
            )
        if left.failovers and world.server.kept is None:
            yield "the replica is as the master", world._replace(server=Servers(server, server)), True, ""
        if left.failovers and world.server.kept is not None:
            yield from self._failover(world, reader, world.server.kept)
        if left.breaks:
            fewer = world._replace(left=left._replace(breaks=left.breaks - 1))
            yield "the doorbell breaks", with_reader(fewer, reader._replace(line=(b"",))), True, ""
        if left.crashes:
            yield self._crash(world, reader)

    # -- the server --------------------------------------------------------------------------------------------------

    def _page(self, world: PushWorld, reader: Reader, page: Call) -> Iterator[tuple[str, Any, bool, str]]:
        if page.reply is None:
            args = (page.epoch, page.at, page.room, 65536, LIFE, page.named)
            inbox, reply, _ = self._store.execute(world.server.now, "page_letters", KEYS, *args)
            after = world._replace(server=world.server._replace(now=inbox))
            yield "a page is read", with_reader(after, reader._replace(page=page._replace(reply=reply))), False, ""
            return
        yield "a page arrives", *self._paged(world, reader, page)
        if world.left.replies:
            yield self._lose_reply(world, reader._replace(page=page._replace(reply=None)))

    def _ack(self, world: PushWorld, reader: Reader, ack: Call) -> Iterator[tuple[str, Any, bool, str]]:
        if ack.reply is None:
            inbox, broken, reply = self._acknowledge(world, ack)
            after = world._replace(server=world.server._replace(now=inbox))
            yield (
                "an ack is executed",
                with_reader(after, reader._replace(ack=ack._replace(reply=reply))),
                False,
                broken,
            )
            return
        yield "the reply to an ack arrives", *self._ack_replied(world, reader, ack)
        if world.left.replies:
            yield self._lose_reply(world, reader._replace(ack=ack._replace(reply=None)))

    @staticmethod
    def _lose_reply(world: PushWorld, reader: Reader) -> tuple[str, Any, bool, str]:
        left = world.left._replace(replies=world.left.replies - 1)
        return "a reply is lost, and its call repeated", with_reader(world._replace(left=left), reader), True, ""

    def _acknowledge(self, world: PushWorld, call: Call) -> tuple[Inbox, str, tuple[Any, ...]]:
        """The inbox afterwards, the promise that this breaks, and the reply."""
        values = (str(call.epoch), call.named, ",".join(map(str, call.seqs)))
        packed = pack_array(len(values), [pack_values(values)])
        inbox, reply, _ = self._store.execute(world.server.now, "ack_clients", KEYS, packed)
        removed = {which for _, which in world.server.now.letters} - {which for _, which in inbox.letters}
        lost = removed - world.truth.got
        return inbox, f"letter {min(lost)} is removed, and its client has not got it" if lost else "", reply[0]

    def _failover(self, world: PushWorld, reader: Reader, kept: Inbox) -> Iterator[tuple[str, Any, bool, str]]:
        """What the replica did not have is lost. The router may have to store it again, or not."""
        left = world.left._replace(failovers=world.left.failovers - 1)
        for following in sorted({world.truth.next, kept.mark + 1}):
            truth = world.truth._replace(next=following, round=world.truth.round + 1)
            after = world._replace(server=Servers(kept), left=left, truth=truth)
            text = f"the replica takes over, and the router goes on with {following}"
            yield text, with_reader(after, reader._replace(line=(b"",))), True, ""

    def _crash(self, world: PushWorld, reader: Reader) -> tuple[str, Any, bool, str]:
        left = world.left._replace(crashes=world.left.crashes - 1)
        after = self._connected_again(world._replace(left=left), reader)
        return "its gateway dies, and the client connects again", after, True, ""

    def _connected_again(self, world: PushWorld, reader: Reader) -> PushWorld:
        """The client connects to another gateway. Acks of the old one may come late."""
        args = ("g", 0, LIFE, "source:!g", f"{reader.epoch:016d}", 600_000, 1)
        inbox, reply, _ = self._store.execute(world.server.now, "open_session", (*KEYS, WAKE), *args)
        sent, floor = int(reply[3]), int(reply[4])
        late = world.late if reader.ack is None else (*world.late, reader.ack._replace(reply=None))
        inbox = inbox._replace(epoch=max(reader.epoch, inbox.epoch) + 1)  # by the clock: none comes twice
        after = world._replace(server=world.server._replace(now=inbox), late=late)
        return with_reader(after, Reader(inbox.epoch, floor, sent, is_drained=False, line=(b"",)))

    # -- the reader: the steps of `InboxReader` ------------------------------------------------------------------------

    def _opened(self, reader: Reader) -> InboxCursor:
        cursor = self._cursor(WINDOW)
        cursor.at, cursor.sent, cursor.out = str(reader.at), reader.sent, dict(reader.out)
        cursor.is_drained, cursor.named = reader.is_drained, reader.named
        return cursor

    def _kept(self, reader: Reader, cursor: InboxCursor, **changed: Any) -> Reader:
        return reader._replace(
            at=int(cursor.at), out=tuple(sorted(cursor.out.items())), is_drained=cursor.is_drained, named=cursor.named,
            **changed,
        )  # fmt: skip

    def _turn(self, reader: Reader, *, is_rung: bool = False) -> Reader:
        if reader.page is not None:
            return reader
        if reader.is_rewinding:
            if reader.ack is not None:
                return reader
            reader = reader._replace(is_rewinding=False)
        cursor = self._opened(reader)
        if (cursor.room <= 0 or cursor.is_drained) and not is_rung:
            return reader
        return reader._replace(page=Call(reader.epoch, reader.named, reader.at, cursor.page_size))

    def _rung(self, world: PushWorld, reader: Reader) -> tuple[Any, bool, str]:
        raw, line = reader.line[0], reader.line[1:]
        reader = reader._replace(line=line)
        pushed = read_pushed(raw, "g", str(reader.epoch)) if raw else None
        if pushed is not None and reader.page is None and not reader.is_rewinding:
            cursor, known = self._opened(reader), Known(reader)
            taken = cursor.take_pushed(pushed, known.find)
            if taken:
                return self._passed(world, self._kept(known.reader, cursor), *taken)
        page = reader.page and reader.page._replace(has_rung=True)
        reader = self._turn(reader._replace(is_drained=False, page=page), is_rung=True)
        return with_reader(world, reader), False, ""

    def _paged(self, world: PushWorld, reader: Reader, page: Call) -> tuple[Any, bool, str]:
        assert page.reply is not None
        reader, broken = reader._replace(page=None), ""
        if page.reply[0] == STALE_EPOCH:
            return self._connected_again(world, reader), False, ""
        if page.is_void:
            return with_reader(world, self._turn(reader, is_rung=page.has_rung)), False, ""
        if page.reply[0] == BEHIND:
            reader = self._rewound(reader, page.reply[1])
        else:
            cursor, known = self._opened(reader), Known(reader)
            cursor.knows(page.named)
            taken = cursor.take(page.reply, -1 if page.has_rung else cursor.rings, known.find)
            world, _, broken = self._passed(world, self._kept(known.reader, cursor), *taken)
            reader = self._sent(world.members[0])
        return with_reader(world, self._turn(reader, is_rung=page.has_rung)), False, broken

    def _passed(
        self, world: PushWorld, reader: Reader, seqs: list[int], envelopes: list[bytes]
    ) -> tuple[Any, bool, str]:
        """The client gets these letters."""
        truth, broken = world.truth, ""
        for seq, envelope in zip(seqs, envelopes, strict=True):
            which, have = which_of(envelope), {each for _, each in reader.have}
            if which in have:
                broken = f"letter {which} comes twice in a connection"
            elif not truth.round and have and which < max(have):
                broken = f"letter {which} comes after {max(have)}"
            elif not truth.round and which in truth.got and seq > reader.sent:
                broken = f"letter {which} comes again, and is not marked as sent before"
            reader = reader._replace(have=(*reader.have, (seq, which)), unacked=(*reader.unacked, seq))
            truth = truth._replace(got=truth.got | {which})
        return with_reader(world._replace(truth=truth), self._sent(reader)), False, broken

    def _acked(self, world: PushWorld, reader: Reader) -> tuple[Any, bool, str]:
        cursor = self._opened(reader)
        freed = cursor.free((reader.unacked[0],))
        reader = self._kept(reader, cursor, unacked=reader.unacked[1:], pending=(*reader.pending, *freed))
        return with_reader(world, self._turn(self._sent(reader))), False, ""

    def _sent(self, reader: Reader) -> Reader:
        """With the pending acks on their way, unless a call is in flight."""
        if reader.ack is not None or not reader.pending:
            return reader
        return reader._replace(ack=Call(reader.epoch, reader.named, seqs=reader.pending), pending=())

    def _ack_replied(self, world: PushWorld, reader: Reader, ack: Call) -> tuple[Any, bool, str]:
        assert ack.reply is not None
        reader = reader._replace(ack=None)
        if ack.reply[0] == STALE_EPOCH:
            return self._connected_again(world, reader), False, ""
        if ack.reply[0] == BEHIND:
            kept = ack.reply[1]
            reader = self._rewound(reader, kept)
            reader = reader._replace(pending=(*[each for each in ack.seqs if each <= kept], *reader.pending))
        else:
            cursor = self._opened(reader)
            cursor.knows(ack.named)
            reader = self._kept(reader, cursor)
        reader = self._sent(reader)
        return with_reader(world, self._turn(reader) if reader.is_rewinding else reader), False, ""

    def _rewound(self, reader: Reader, kept: int) -> Reader:
        if reader.is_rewinding:
            return reader
        cursor = self._opened(reader)
        ids = {seq: packet_id for packet_id, seq in reader.out if seq > kept}
        lost = tuple((which, ids.get(seq, 0)) for seq, which in reader.have if seq > kept)
        for packet_id in ids.values():
            cursor.out[packet_id] = -packet_id
        cursor.rewind(kept)
        return self._kept(
            reader, cursor, is_rewinding=True, lost=reader.lost + lost,
            have=tuple(each for each in reader.have if each[0] <= kept),
            pending=tuple(each for each in reader.pending if each <= kept),
            page=reader.page and reader.page._replace(is_void=True),
        )  # fmt: skip


class Known:
    """Knows letters again that the client was sent before the server lost them."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self._out = dict(reader.out)

    def find(self, seq: int, envelope: bytes) -> bool:
        """As `InboxReader` does. Its packet id stays; this model has no other letter with that id."""
        which = which_of(envelope)
        found = next((each for each in self.reader.lost if each[0] == which), None)
        if found is None:
            return False
        lost = tuple(each for each in self.reader.lost if each is not found)
        self.reader = self.reader._replace(lost=lost, have=(*self.reader.have, (seq, which)))
        self.reader = self.reader._replace(pending=(*self.reader.pending, seq), unacked=tuple(
            each for each in self.reader.unacked if each != found[1]
        ))  # fmt: skip
        return True


def with_reader(world: PushWorld, reader: Reader) -> PushWorld:
    """The world with another state of the reader."""
    return world._replace(members=(reader,))


@dataclass(frozen=True)
class PushScenario:
    """So many letters, and the faults that happen meanwhile."""

    letters: int
    faults: Faults
    is_short: bool = False

    @property
    def name(self) -> str:
        """For people."""
        found = ", ".join(f"{number} {kind}" for kind, number in self.faults._asdict().items() if number)
        return f"{self.letters} letters that come along with rings: {found or 'no faults'}"

    def search(self, scripts: dict[str, Script] | None = None, cursor: type[InboxCursor] = InboxCursor) -> Result:
        """What the search finds, on a server of its own."""
        with ThrowawayServer(tcp=True) as server, redis.Redis.from_url(server.url, protocol=2) as client:
            moves: Any = PushMoves(PushStore(client, scripts or {}), self.letters, self.faults, cursor)
            return Search(moves).run()


LOSS: Final = PushScenario(2, Faults(failovers=1), is_short=True)
CRASH: Final = PushScenario(2, Faults(crashes=1, breaks=1), is_short=True)
PUSH_SCENARIOS: Final = (
    LOSS,
    CRASH,
    PushScenario(2, Faults(breaks=1, replies=1)),
    PushScenario(3, Faults(failovers=1)),
    PushScenario(3, Faults(crashes=1, breaks=1, replies=1)),
    PushScenario(3, Faults(failovers=1, crashes=1)),
    PushScenario(3, Faults(failovers=1, replies=1)),
)


class TakesAnyLetter(InboxCursor):
    """A cursor that takes what comes along with a ring, also behind letters that it has not read."""

    def take_pushed(self, pushed: Any, is_known: Any = None) -> Any:
        self.named = pushed.name
        return self.take((b"OK", pushed.seq, 1, pushed.seq, pushed.envelope), self.rings, is_known)


@dataclass(frozen=True)
class PushWeakening:
    """A script with some of its text replaced, or another cursor, and a scenario that shows what it was good for."""

    what: str
    scenario: PushScenario
    old: str = ""
    new: str = ""
    cursor: type[InboxCursor] = InboxCursor

    def search(self) -> Result:
        """What the search finds."""
        scripts = dict[str, Script]()
        for name, script in SCRIPTS.items():
            if self.old and self.old in script.source:
                scripts[name] = copy.copy(script)
                scripts[name].source = script.source.replace(self.old, self.new)
        if self.old and not scripts:
            raise ValueError(f"no script has this text: {self.old}")
        return self.scenario.search(scripts, self.cursor)


NAMED: Final = "return pushed ~= '' and pushed == named and seq_of_push(pushed) or 0"
PUSH_WEAKENINGS: Final = (
    PushWeakening("a letter counts as sent when it is pushed", LOSS, NAMED, "return seq_of_push(pushed)"),
    PushWeakening(
        "a reader names the seq alone", LOSS, NAMED,
        "return named and pushed:match('^%d+') == named:match('^%d+') and seq_of_push(pushed) or 0",
    ),
    PushWeakening(
        "a new connection does not count it as sent", CRASH, "math.max(tonumber(sent), seq_of_push(state[9]))",
        "tonumber(sent)",
    ),
    PushWeakening("a reader takes a letter behind others", CRASH, cursor=TakesAnyLetter),
)  # fmt: skip
