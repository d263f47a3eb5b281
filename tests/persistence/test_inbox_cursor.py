"""The position of a reader in its inbox, against a model: an inbox as the server keeps it, without a server."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsmq.persistence.inbox_cursor import MOST_PER_PAGE, Blocked, InboxCursor, read_pushed
from rsmq.persistence.letter import PACKET_IDS, packet_id_of


class ModelInbox:
    """Stored letters by seq, and pages of them as `page_letters` answers."""

    def __init__(self, newest: int = 0) -> None:
        self.newest = newest
        self.stored: list[int] = []
        self.received: set[int] = set()

    def add(self, count: int) -> None:
        for _ in range(count):
            self.newest += 1
            self.stored.append(self.newest)

    def page(self, cursor: InboxCursor) -> list[Any]:
        """The reply: its last element of three is whether the inbox is drained, then seqs and envelopes."""
        rest = [seq for seq in self.stored if seq > int(cursor.at)]
        found = rest[: cursor.page_size]
        at = found[-1] if found else int(cursor.at)
        reply: list[Any] = [b"OK", b"%d" % at, b"%d" % (len(found) == len(rest))]
        for seq in found:
            reply += [b"%d" % seq, b"" if seq in self.received else b"letter %d" % seq]
        return reply


@given(
    window=st.integers(1, 5),
    steps=st.lists(
        st.tuples(st.sampled_from(["add", "page", "hold", "free", "ring", "drop", "receive"]), st.integers(0, 6))
    ),
    first=st.sampled_from([0, PACKET_IDS - 3]),
)
def test_a_cursor_passes_on_each_letter_once_in_order_within_its_window(
    window: int, steps: list[tuple[str, int]], first: int
) -> None:
    """What is stored, dropped for room, held or acknowledged in between; also where packet ids begin again."""
    inbox, cursor = ModelInbox(first), InboxCursor(window)
    cursor.open(0, b"%d" % first)
    passed, dropped = list[int](), set[int]()

    def page(most: int = MOST_PER_PAGE) -> None:
        reply = inbox.page(cursor)
        seqs, envelopes = cursor.take(reply, cursor.rings)
        passed.extend(seqs[:most])
        if seqs[most:]:
            cursor.put_back(seqs[most:])
            assert cursor.room == 0
        assert [not each for each in envelopes] == [seq in inbox.received for seq in seqs]
        assert len(cursor.out) <= window

    for step, number in steps:
        if step == "add":
            inbox.add(number)
            cursor.ring()
        elif step == "page" and cursor.room > 0 and not cursor.is_drained:
            page()
        elif step == "hold" and cursor.page_size > 0 and not cursor.is_drained:
            page(number)
        elif step == "free" and cursor.out:
            packet_id = list(cursor.out)[number % len(cursor.out)]
            seq = cursor.out[packet_id]
            assert cursor.free([packet_id]) == [seq]
            inbox.stored = [each for each in inbox.stored if each != seq]
        elif step == "ring":
            cursor.ring()
        elif step == "drop" and inbox.stored:
            dropped.add(inbox.stored.pop(0))
        elif step == "receive" and inbox.stored:
            inbox.received.add(inbox.stored[number % len(inbox.stored)])
    while not cursor.is_drained:
        cursor.free(list(cursor.out))
        page()
    assert passed == sorted(set(passed))
    assert set(range(first + 1, inbox.newest + 1)) - dropped <= set(passed)
    assert not [seq for seq in inbox.stored if seq > int(cursor.at)]


def test_a_letter_whose_packet_id_is_out_waits_and_none_behind_it_is_passed_on() -> None:
    """An older letter, gone from the inbox, keeps its id until it is acknowledged."""
    inbox, cursor = ModelInbox(), InboxCursor(10)
    inbox.add(1)
    assert cursor.take(inbox.page(cursor), 0)[0] == [1]
    inbox.stored = [PACKET_IDS, PACKET_IDS + 1, PACKET_IDS + 2]
    cursor.ring()
    assert cursor.take(inbox.page(cursor), 1)[0] == [PACKET_IDS]
    assert cursor.blocked == Blocked(PACKET_IDS + 1, packet_id_of(1))
    assert cursor.room == 0
    assert not cursor.is_drained
    cursor.free([packet_id_of(PACKET_IDS)])
    assert cursor.blocked is not None
    assert cursor.free([packet_id_of(1)]) == [1]
    assert cursor.take(inbox.page(cursor), 1)[0] == [PACKET_IDS + 1, PACKET_IDS + 2]


def test_a_ring_while_a_page_is_under_way_keeps_the_inbox_from_being_drained() -> None:
    """Its letter may be stored behind the page."""
    inbox, cursor = ModelInbox(), InboxCursor(MOST_PER_PAGE)
    inbox.add(2)
    reply, rings = inbox.page(cursor), cursor.rings
    cursor.ring()
    assert cursor.take(reply, rings)[0] == [1, 2]
    assert not cursor.is_drained


def test_a_letter_that_is_known_is_not_passed_on_again() -> None:
    """The server had lost it; the cursor is behind it."""
    inbox, cursor = ModelInbox(), InboxCursor(10)
    inbox.add(3)
    assert cursor.take(inbox.page(cursor), 0, lambda seq, _: seq != 2)[0] == [2]
    assert cursor.at == "3"
    cursor.rewind(1)
    assert cursor.take(inbox.page(cursor), 0, lambda *_: True)[0] == []
    assert cursor.is_drained


def test_a_paused_reader_takes_no_letters() -> None:
    """It still asks whether another connection has taken over: for a page of none."""
    cursor = InboxCursor(10)
    cursor.is_paused = True
    assert (cursor.room, cursor.page_size) == (0, 0)


PUSHED = b"g 7:3:4:c1:letter"


def test_a_letter_that_comes_along_with_a_ring_is_taken_behind_the_cursor_only() -> None:
    """It is named until the server knows it. A cursor that has read less, or has no room, leaves it to a page."""
    cursor, pushed = InboxCursor(1), read_pushed(PUSHED, "g", "7")
    assert pushed is not None
    assert cursor.take_pushed(pushed) is None  # it may not have read all
    cursor.at, cursor.is_drained = "2", True
    assert cursor.take_pushed(pushed) is None
    cursor.at = "3"
    assert cursor.take_pushed(pushed) == ([4], [b"letter"])
    assert (cursor.at, cursor.named, cursor.is_drained) == ("4", "4:c1", True)
    after = read_pushed(b"g 7:4:5:c2:letter", "g", "7")
    assert after is not None
    assert cursor.take_pushed(after) is None  # the window is full
    cursor.knows("3:c0")
    assert cursor.named == "4:c1"
    cursor.knows("4:c1")
    assert cursor.named == ""


@pytest.mark.parametrize(
    "raw",
    [b"x", b"g 7:", b"g 7:3:4:c1", b"g 7:4:4:c1:x", b"g 7:3:x:c1:x", b"g 7:3:4:c1:", b"g 7:3:4:\xff:x"],
)
def test_what_is_no_letter_for_this_connection_is_a_plain_ring(raw: bytes) -> None:
    """Any client may publish to the channel."""
    assert read_pushed(raw, "g", "7") is None
    assert read_pushed(PUSHED, "g", "8") is None
    assert read_pushed(PUSHED, "h", "7") is None


@given(
    out=st.sets(st.integers(1, PACKET_IDS), max_size=4),
    seqs=st.sets(st.one_of(st.integers(1, 6), st.integers(PACKET_IDS - 2, PACKET_IDS + 6)), min_size=1),
)
def test_page_that_is_taken_whole_leaves_what_letter_by_letter_leaves(out: set[int], seqs: set[int]) -> None:
    """Letters whose packet ids are out, or that share one, are taken up to the first of these."""
    page: list[Any] = [b"OK", b"%d" % max(seqs), 1]
    for seq in sorted(seqs):
        page += [b"%d" % seq, b"letter %d" % seq]
    cursors = [InboxCursor(1000), InboxCursor(1000)]
    for each in cursors:
        each.out |= {packet_id: packet_id for packet_id in out}
    whole = cursors[0].take(page, 0)
    one_by_one = cursors[1].take(page, 0, lambda _seq, _envelope: False)
    assert whole == one_by_one
    assert cursors[0].out == cursors[1].out
    assert (repr(cursors[0]), cursors[0].is_drained) == (repr(cursors[1]), cursors[1].is_drained)
