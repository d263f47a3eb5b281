"""Which members count as alive, judged from observations only."""

from __future__ import annotations

from math import inf

from rsmq.heartbeat.liveness import MOST_DOUBTS, Liveness

TTL, GRACE = 6.0, 1.0


def observer() -> Liveness:
    """One that has observed for two leases without a gap, with `a` and `b` alive."""
    liveness = Liveness("me", ttl=TTL, grace=GRACE)
    for tick in range(49):
        see(liveness, tick * 0.25)
    return liveness


def see(liveness: Liveness, now: float, *, alive: str = "ab", listening: str = "ab", members: str = "ab") -> None:
    """One observation of everything."""
    liveness.saw_members(now, list(members), list(alive))
    liveness.saw_listeners(now, {member: int(member in listening) for member in members})


def test_live_members_include_the_observer() -> None:
    """All members with a heartbeat are live, and so is the observer."""
    assert observer().live(12.0) == ("a", "b", "me")


def test_member_without_subscriber_is_absent_after_the_grace() -> None:
    """Not at once: a live member may have lost only its subscription."""
    liveness = observer()
    for tick in range(1, 5):
        see(liveness, 12 + tick * 0.25, listening="b")
        assert liveness.absent(12 + tick * 0.25) == frozenset()
    see(liveness, 13.25, listening="b")
    assert liveness.absent(13.25) == {"a"}
    assert liveness.live(13.25) == ("b", "me")


def test_member_that_subscribes_again_restarts_the_grace() -> None:
    """It is not absent although it was silent twice."""
    liveness = observer()
    see(liveness, 12.25, listening="b")
    see(liveness, 12.5)
    see(liveness, 12.75, listening="b")
    see(liveness, 13.5, listening="b")
    assert liveness.absent(13.5) == frozenset()


def test_member_without_heartbeat_key_is_dead() -> None:
    """The server has already waited for the ttl, so the observer does not wait again."""
    liveness = observer()
    see(liveness, 12.25, alive="b")
    assert liveness.dead(12.25) == {"a"}


def test_members_after_an_outage_are_not_dead_for_a_lease() -> None:
    """All keys expired while the server was away: live members need a moment to renew."""
    liveness = observer()
    liveness.failed()
    see(liveness, 20.0, alive="", listening="")
    assert liveness.live(20.0) == ("a", "b", "me")
    see(liveness, 20.9, alive="", listening="")
    assert liveness.absent(20.9) == frozenset()
    for tick in range(1, 25):
        see(liveness, 20.9 + tick * 0.25, alive="b", listening="ab")
    assert liveness.live(26.9) == ("b", "me")


def test_gap_between_observations_counts_as_an_outage() -> None:
    """After a paused observer or a stalled server, the first observation is not trusted."""
    liveness = observer()
    see(liveness, 30.0, alive="", listening="")
    assert liveness.dead(30.0) == liveness.absent(30.0) == frozenset()


def test_observer_never_counts_itself_as_dead() -> None:
    """Its own heartbeat thread takes care of its key."""
    liveness = observer()
    see(liveness, 12.25, members="ab", alive="ab")
    assert "me" in liveness.live(12.25)
    assert "me" not in liveness.dead(12.25)


def test_presence_without_a_grace_is_ignored() -> None:
    """`RSMQ_PRESENCE_GRACE=PT0S` turns it off."""
    liveness = Liveness("me", ttl=TTL, grace=0)
    for tick in range(100):
        see(liveness, tick * 0.25, listening="")
    assert liveness.absent(25.0) == frozenset()


def test_jump_of_the_server_clock_makes_no_member_dead() -> None:
    """When the clock jumps an hour forward, every key expires at once; then live members renew."""
    liveness = observer()
    liveness.saw_clock(12.0, 1_000_012.0)
    liveness.saw_clock(12.25, 1_003_612.25)
    see(liveness, 12.25, alive="")
    assert liveness.live(12.25) == ("a", "b", "me")
    for tick in range(1, 30):
        liveness.saw_clock(12.25 + tick * 0.25, 1_003_612.25 + tick * 0.25)
        see(liveness, 12.25 + tick * 0.25, alive="b")
    assert liveness.live(19.5) == ("b", "me")


def test_silence_across_a_gap_does_not_count() -> None:
    """After a stall longer than the grace: a member silent before and after may have been subscribed in between."""
    liveness = observer()
    see(liveness, 12.25, listening="b")
    see(liveness, 14.25, listening="b")
    assert liveness.absent(14.25) == frozenset()
    see(liveness, 15.25, listening="b")
    assert liveness.absent(15.25) == {"a"}


def test_member_that_left_is_neither_dead_nor_absent() -> None:
    """A member that withdraws is forgotten at once."""
    liveness = observer()
    see(liveness, 12.25, listening="b", alive="b")
    see(liveness, 12.5, members="b")
    assert liveness.live(12.5) == ("b", "me")
    assert liveness.dead(13.5) == liveness.absent(13.5) == frozenset()


def test_member_whose_process_has_ended_is_absent_without_a_grace() -> None:
    """Its parent process has seen the end, and the server has no subscriber of it: nothing is left to wait for."""
    liveness = observer()
    liveness.ended("a")
    assert liveness.absent(12.0) == frozenset(), "the server has not said so yet"
    assert liveness.awaits_silence
    see(liveness, 12.25, listening="")
    assert liveness.absent(12.25) == {"a"}
    assert not liveness.awaits_silence
    see(liveness, 13.25, listening="")
    assert liveness.absent(13.25) == {"a", "b"}


def test_member_that_is_wrongly_said_to_have_ended_stays_live() -> None:
    """The server has a subscriber of it. After some checks that counts more, and a later silence needs its grace."""
    liveness = observer()
    liveness.ended("a")
    for look in range(1, MOST_DOUBTS + 1):
        assert liveness.awaits_silence
        see(liveness, 12 + look / 100)
        assert liveness.absent(12 + look / 100) == frozenset()
    assert not liveness.awaits_silence
    see(liveness, 12.75, listening="b")
    assert liveness.absent(12.75) == frozenset()
    see(liveness, 13.75, listening="b")
    assert liveness.absent(13.75) == {"a"}


def test_end_of_a_process_says_nothing_about_another_one_with_the_same_pid_or_host() -> None:
    """Pids are used again, and containers share host names: only the whole name counts."""
    liveness = Liveness("me", ttl=TTL, grace=GRACE)
    names = {"host-7-aaaaaaaa", "host-7-bbbbbbbb"}
    liveness.saw_members(0.0, names, names)
    liveness.saw_listeners(0.0, dict.fromkeys(names, 1))
    liveness.ended("host-7-aaaaaaaa")
    liveness.saw_listeners(0.25, dict.fromkeys(names, 0))
    assert liveness.absent(0.25) == {"host-7-aaaaaaaa"}


def test_end_of_unknown_members_of_this_one_and_without_a_grace_is_ignored() -> None:
    """Another group's member, a wrong word about the observer, and presence that is turned off: no check is hurried."""
    liveness = observer()
    liveness.ended("another")
    liveness.ended("me")
    assert not liveness.awaits_silence
    see(liveness, 12.25)
    assert not liveness.has_ended("another")
    assert not liveness.has_ended("me")
    off = Liveness("me", ttl=TTL, grace=0)
    off.saw_members(0.0, "a", "a")
    off.ended("a")
    assert not off.awaits_silence


def test_next_absence_is_the_end_of_the_grace_that_ends_first() -> None:
    """The next check need not come later than that; members that are absent already do not count."""
    liveness = observer()
    assert liveness.next_absence(12.0) == inf
    see(liveness, 12.25, listening="b")
    see(liveness, 12.5, listening="")
    assert liveness.next_absence(12.5) == 13.25
    assert liveness.next_absence(13.25) == 13.5
    assert liveness.next_absence(13.5) == inf
