"""An inbox compared with a model after each of many random steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import redis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from rsmq.model.keys import Keys
from rsmq.persistence.letter import STAMP, pack_letter, pack_letters, packet_id_of, read_envelope, seal
from rsmq.redis.scripts import (
    ACK_LETTERS,
    ADD_LETTERS,
    CLEAR_INBOX,
    CLOSE_SESSION,
    OPEN_SESSION,
    PAGE_LETTERS,
    RECEIVE_LETTERS,
)

LIFE = 3_600_000
HOUR = 3_000_000
LIMIT = 6
ROUND = 65_535
KINDS = st.sampled_from(["plain", "plain", "own", "own", "dead"])


@dataclass
class Stored:
    """One letter of the model."""

    text: str
    is_own: bool = False
    is_alive: bool = True


@dataclass
class Model:
    """An inbox in the simplest terms."""

    seq: int = 0
    letters: dict[int, Stored] = field(default_factory=dict)
    held: set[int] = field(default_factory=set)
    marks: dict[str, int] = field(default_factory=dict)
    sent: int = 0
    floor: int = 0
    dropped: int = 0
    expired: int = 0
    late: int = 0
    is_known: bool = False

    def add(self, source: str, batch: list[tuple[int, str, str]]) -> list[int]:
        """Store what is above the mark; returns stored, dropped, expired, late."""
        before, stored, news = (self.dropped, self.expired, self.late), 0, False
        for position, kind, text in batch:
            if position <= self.marks.get(source, 0):
                continue
            self.marks[source], news = position, True
            if kind == "late":
                self.late += 1
            elif kind == "dead":
                self.expired += 1
            else:
                self.seq += 1
                while packet_id_of(self.seq) in {packet_id_of(each) for each in self.letters}:
                    self.seq += 1
                self.letters[self.seq] = Stored(text, is_own=kind == "own")
                stored += 1
        self.is_known = self.is_known or news
        if stored:
            self._make_room()
        return [stored, self.dropped - before[0], self.expired - before[1], self.late - before[2]]

    def _make_room(self) -> None:
        if self._overflow() <= 0:
            return
        for seq in [seq for seq, each in self.letters.items() if each.is_own and not each.is_alive]:
            del self.letters[seq]
            self.expired += 1
        for seq in [seq for seq in self.letters if seq not in self.held][: max(self._overflow(), 0)]:
            if self.letters.pop(seq).is_alive:
                self.dropped += 1
            else:
                self.expired += 1

    def _overflow(self) -> int:
        """The number of letters beyond the limit."""
        return len(self.letters) - LIMIT

    def page(self, after: int, count: int) -> list[tuple[int, str]]:
        """The next letters; what has died goes on the way."""
        found, seen = [], [seq for seq in self.letters if seq > after][:count]
        for seq in seen:
            if seq in self.held:
                found.append((seq, ""))
            elif self.letters[seq].is_alive:
                found.append((seq, self.letters[seq].text))
            else:
                del self.letters[seq]
                self.expired += 1
        self.sent = max([self.sent, after, *seen])
        return found

    def ack(self, seqs: list[int]) -> int:
        """Remove; returns how many were there."""
        self.held -= set(seqs)
        return sum(self.letters.pop(seq, None) is not None for seq in set(seqs))

    def receive(self, seqs: list[int]) -> int:
        """Hold; returns how many are held now."""
        for seq in {seq for seq in seqs if seq in self.letters and seq > self.floor}:
            self.held.add(seq)
            self.letters[seq].is_own = False
        return len(self.held)

    def open(self, *, clean: bool) -> list[int]:
        """Connect; returns present, sent, floor, leftover."""
        was_known, self.is_known = self.is_known, True
        if clean:
            self.let_go()
        return [int(was_known), self.sent, self.floor, sum(seq <= self.floor for seq in self.letters)]

    def let_go(self) -> None:
        """A clean start: all letters are now below the floor, and received ones lose their content."""
        self.floor = self.seq
        for seq in self.held:
            self.letters[seq].is_alive = False
        self.held.clear()

    def clear(self, count: int) -> list[int]:
        """Remove from under the floor; returns removed and left."""
        under = [seq for seq in self.letters if seq <= self.floor]
        for seq in under[:count]:
            del self.letters[seq]
        return [len(under[:count]), len(under[count:])]


class InboxMachine(RuleBasedStateMachine):
    """Drives the scripts and the model with the same steps."""

    connect: ClassVar[Callable[[], tuple[Any, Keys]]]
    """A blocking client with raw replies, and keys of this run only."""

    def __init__(self) -> None:
        super().__init__()
        self.client, self.keys = type(self).connect()
        self.names = self.keys.device("phone")
        self.inbox, self.session, self.expiry, _ = self.names
        self.model = Model()
        self.epoch, self.old = "", "0"
        self.text = self.connects = 0
        self.opened: list[Any] = []

    def teardown(self) -> None:
        """Delete all keys."""
        self.client.execute_command("DEL", *self.names[:3], *map(self.letter, self.model.letters))

    # -- steps ----------------------------------------------------------------------------------------------------

    @initialize(
        seq=st.sampled_from([0, ROUND - 3, 2 * ROUND - 3, 2**52]),
        kinds=st.lists(KINDS, min_size=2, max_size=5),
        is_open=st.sampled_from([True, True, True, False]),
    )
    def start(self, seq: int, kinds: list[str], is_open: bool) -> None:
        """A device that has had so many letters before, and has some now."""
        if seq:
            self.go_on_at(seq)
        if is_open:
            self.open(clean=False)
        self.add("a", 0, kinds)

    @rule(
        source=st.sampled_from(["a", "b"]),
        back=st.integers(0, 3),
        kinds=st.lists(KINDS, min_size=1, max_size=5),
    )
    def add(self, source: str, back: int, kinds: list[str]) -> None:
        """A batch, the first of which may have been stored before."""
        first = max(1, self.model.marks.get(source, 0) + 1 - back)
        self.store(source, [(first + number, kind, self.next_text()) for number, kind in enumerate(kinds)])

    @precondition(lambda self: self.model.floor)
    @rule(source=st.sampled_from(["a", "b"]))
    def add_late(self, source: str) -> None:
        """What was published before the last clean start."""
        since = self.client.execute_command("HGET", self.session, "since_ms")
        kind = "late" if since else "plain"
        self.store(source, [(self.model.marks.get(source, 0) + 1, kind, self.next_text())])

    @precondition(lambda self: self.model.letters)
    @rule(jump=st.sampled_from([1, ROUND - 4, ROUND - 3, ROUND - 2, ROUND - 1]))
    def time_passes(self, jump: int) -> None:
        """Many letters come and are acknowledged: only the seq grows."""
        self.go_on_at(min(self.model.letters) + jump)

    @precondition(lambda self: self.model.letters)
    @rule(data=st.data())
    def expire(self, data: st.DataObject) -> None:
        """Some letters expire now: the server removes them."""
        for seq in data.draw(self.seqs()):
            if seq in self.model.held or seq not in self.model.letters:
                continue
            self.model.letters[seq].is_alive = False
            self.client.execute_command("ZADD", self.expiry, "XX", self.now() - 1, seq)
            self.client.execute_command("PEXPIREAT", self.letter(seq), self.now() - 1)

    @rule(clean=st.sampled_from([False, False, False, True]))
    def open(self, clean: bool) -> None:
        """The device connects, perhaps while it is connected elsewhere."""
        self.connects += 1
        reply = self.connect_as(self.connects, clean=clean)
        assert int(reply[1]) > int(self.epoch or 0)
        self.old, self.epoch = self.epoch or self.old, reply[1].decode()
        assert [*map(int, reply[2:])] == self.model.open(clean=clean)
        self.opened = reply

    @precondition(lambda self: self.opened)
    @rule(clean=st.booleans(), back=st.integers(0, 2))
    def open_again(self, clean: bool, back: int) -> None:
        """A connect is repeated: the newest changes nothing and gets its first answer, an older one is refused."""
        position = max(1, self.connects - back)
        reply = self.connect_as(position, clean=clean)
        if position == self.connects:
            under = sum(seq <= self.model.floor for seq in self.model.letters)
            state = [str(self.model.sent).encode(), str(self.model.floor).encode(), under]
            assert reply == [*self.opened[:3], *state]
        else:
            assert reply == [b"STALE_EPOCH"]

    @rule(after=st.integers(0, 4), count=st.integers(0, 7))
    def page(self, after: int, count: int) -> None:
        """Read after a stored letter, or from the floor."""
        cursors = [self.model.floor, *self.model.letters]
        cursor = cursors[after % len(cursors)]
        reply = self.ask(PAGE_LETTERS, (self.inbox, self.session, self.expiry), cursor, count, 1 << 20, LIFE)
        if reply is None:
            return
        seen = [seq for seq in self.model.letters if seq > cursor][:count]
        expected = self.model.page(cursor, count)
        found = [(int(seq), self.text_of(envelope)) for seq, envelope in zip(reply[3::2], reply[4::2], strict=True)]
        assert found == expected
        assert int(reply[1]) == (seen[-1] if seen else cursor)
        assert reply[2] == (len(seen) < count)

    @rule(data=st.data())
    def ack(self, data: st.DataObject) -> None:
        """Some of what is there, and something that is not."""
        seqs = data.draw(self.seqs())
        reply = self.ask(ACK_LETTERS, (self.inbox, self.session, self.expiry), *seqs)
        assert reply is None or reply[1] == self.model.ack(seqs)

    @rule(data=st.data())
    def receive(self, data: st.DataObject) -> None:
        """The first half of a handshake."""
        seqs = data.draw(self.seqs())
        reply = self.ask(RECEIVE_LETTERS, (self.inbox, self.session, self.expiry), *seqs)
        assert reply is None or reply[1] == self.model.receive(seqs)

    @rule()
    def close(self) -> None:
        """In order. The epoch stays, so that what was on its way may still arrive."""
        expected = b"OK" if self.epoch else b"STALE_EPOCH"
        assert CLOSE_SESSION.run(self.client, (self.session,), (self.epoch,)) == expected

    @rule(everything=st.sampled_from([False, False, False, True]), count=st.integers(1, 4))
    def clear(self, everything: bool, count: int) -> None:
        """A chunk of a purge, or of what a clean start has left."""
        keys = (self.inbox, self.session, self.expiry)
        reply = CLEAR_INBOX.run(self.client, keys, (self.model.seq if everything else 0, count))
        if everything and self.model.seq > self.model.floor:
            self.model.let_go()
        assert reply[1:] == self.model.clear(count)

    # -- comparison -----------------------------------------------------------------------------------------------

    @invariant()
    def is_the_same(self) -> None:
        """References, contents, handshakes and counters equal those of the model."""
        model, call = self.model, self.client.execute_command
        assert [int(ref) for ref in call("ZRANGE", self.inbox, 0, -1)] == list(model.letters)
        contents = {seq for seq in model.letters if call("EXISTS", self.letter(seq))}
        assert contents == {seq for seq, each in model.letters.items() if each.is_alive and seq not in model.held}
        assert {int(ref) for ref in call("ZRANGE", self.expiry, 0, -1)} == {
            seq for seq, each in model.letters.items() if each.is_own
        }
        flat = call("HGETALL", self.session)
        state = {name.decode(): value.decode() for name, value in zip(flat[::2], flat[1::2], strict=True)}
        assert {int(seq) for seq in state.get("held", "").split(",") if seq} == model.held
        for name in ("seq", "sent", "floor", "dropped", "expired", "late"):
            assert int(state.get(name, 0)) == getattr(model, name), name

    @invariant()
    def packet_ids_are_unique(self) -> None:
        """No two stored letters share one."""
        ids = [packet_id_of(seq) for seq in self.model.letters]
        assert len(ids) == len(set(ids))

    @invariant()
    def everything_expires(self) -> None:
        """Each key has a time to live."""
        for name in (*self.names[:3], *map(self.letter, self.model.letters)):
            assert self.client.execute_command("PTTL", name) != -1, name

    # -- parts ----------------------------------------------------------------------------------------------------

    def ask(self, script: Any, keys: tuple[str, ...], *args: Any) -> Any:
        """A call of the session, after one of a stale one that must change nothing. None without a session."""
        refusal = b"STALE_EPOCH" if self.epoch else b"NO_SESSION"
        assert script.run(self.client, keys, (self.old, *args)) == [refusal]
        if not self.epoch:
            return None
        reply = script.run(self.client, keys, (self.epoch, *args))
        sent = max(self.model.sent, self.model.floor)
        if max(args[:1] if script is PAGE_LETTERS else args) > sent:
            assert reply == [b"BEHIND", sent]
            return None
        assert reply[0] == b"OK"
        return reply

    def connect_as(self, position: int, *, clean: bool) -> Any:
        """Open a session under a position of one gateway."""
        args = ("gateway", int(clean), LIFE, "source:!g", f"{position:016d}", LIFE)
        return OPEN_SESSION.run(self.client, self.names, args)

    def store(self, source: str, batch: list[tuple[int, str, str]]) -> None:
        """Add letters like the inbox writer."""
        now, letters = self.now(), list[bytes]()
        for position, kind, text in batch:
            times: dict[str, tuple[str | int, str | int]]
            times = {"plain": ("", ""), "own": (now, HOUR), "dead": ("", 0), "late": (1, "")}
            letters.append(pack_letter(f"{position:016d}", *times[kind], seal(text.encode())))
        args = (LIFE, LIMIT, LIFE, pack_letters([(f"source:{source}", letters)]))
        assert ADD_LETTERS.run(self.client, self.names[:3], args) == [b"OK", *self.model.add(source, batch)]

    def seqs(self) -> st.SearchStrategy[list[int]]:
        """Seqs to settle, with a repeated one."""
        return st.lists(st.sampled_from([*self.model.letters, self.model.seq + 1]), min_size=1, max_size=4)

    def go_on_at(self, seq: int) -> None:
        self.model.seq, self.model.is_known = max(seq, self.model.seq), True
        self.client.execute_command("HSET", self.session, "seq", self.model.seq)
        self.client.execute_command("PEXPIRE", self.session, LIFE)

    def letter(self, seq: int) -> str:
        return self.keys.letter("phone", seq)

    def now(self) -> int:
        seconds, micros = self.client.execute_command("TIME")
        return int(seconds) * 1000 + int(micros) // 1000

    def next_text(self) -> str:
        self.text += 1
        return str(self.text)

    @staticmethod
    def text_of(envelope: bytes) -> str:
        return read_envelope(envelope)[3].decode() if len(envelope) > STAMP else ""


@pytest.fixture
def machine(server_url: str, prefix: str) -> Iterator[type[InboxMachine]]:
    """The machine on the shared server; each run has its own keys."""
    with redis.Redis.from_url(server_url, protocol=2) as plain:
        plain.response_callbacks.clear()
        runs = iter(range(1 << 30))
        InboxMachine.connect = lambda: (plain, Keys(f"{prefix}.{next(runs)}"))
        yield InboxMachine


def test_inbox_scripts_behave_like_the_model(machine: type[InboxMachine]) -> None:
    """Adding, retrying, expiring, reading, receiving, acknowledging, taking over and clearing, in any order."""
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
