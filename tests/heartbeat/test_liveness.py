"""Who is believed to be alive, judged from observations only."""

from __future__ import annotations

from rsmq.heartbeat.liveness import Liveness

TTL, GRACE = 6.0, 1.0


def observer() -> Liveness:
    """One that has watched steadily for two leases, with `a` and `b` alive."""
    liveness = Liveness("me", ttl=TTL, grace=GRACE)
    for tick in range(49):
        see(liveness, tick * 0.25)
    return liveness


def see(liveness: Liveness, now: float, *, alive: str = "ab", listening: str = "ab", members: str = "ab") -> None:
    """One look at everything."""
    liveness.saw_members(now, list(members), list(alive))
    liveness.saw_listeners(now, {member: int(member in listening) for member in members})


def test_all_who_beat_are_live() -> None:
    """The observer is always among them."""
    assert observer().live(12.0) == ("a", "b", "me")


def test_a_closed_socket_is_absence_after_the_grace() -> None:
    """Not at once: a live member may have lost only its subscription."""
    liveness = observer()
    for tick in range(1, 5):
        see(liveness, 12 + tick * 0.25, listening="b")
        assert liveness.absent(12 + tick * 0.25) == frozenset()
    see(liveness, 13.25, listening="b")
    assert liveness.absent(13.25) == {"a"}
    assert liveness.live(13.25) == ("b", "me")


def test_whoever_listens_again_is_not_absent() -> None:
    """The grace starts over."""
    liveness = observer()
    see(liveness, 12.25, listening="b")
    see(liveness, 12.5)
    see(liveness, 12.75, listening="b")
    see(liveness, 13.5, listening="b")
    assert liveness.absent(13.5) == frozenset()


def test_a_missing_heartbeat_is_death() -> None:
    """The ttl is over on the server already, so there is nothing more to wait for."""
    liveness = observer()
    see(liveness, 12.25, alive="b")
    assert liveness.dead(12.25) == {"a"}


def test_after_an_outage_nobody_is_dead_for_a_lease() -> None:
    """All heartbeats ran out while the server was away: the living need a moment to renew."""
    liveness = observer()
    liveness.failed()
    see(liveness, 20.0, alive="", listening="")
    assert liveness.live(20.0) == ("a", "b", "me")
    see(liveness, 20.9, alive="", listening="")
    assert liveness.absent(20.9) == frozenset()
    for tick in range(1, 25):
        see(liveness, 20.9 + tick * 0.25, alive="b", listening="ab")
    assert liveness.live(26.9) == ("b", "me")


def test_a_gap_in_watching_is_an_outage() -> None:
    """A paused observer, a stalled server: what it sees first is not to be trusted."""
    liveness = observer()
    see(liveness, 30.0, alive="", listening="")
    assert liveness.dead(30.0) == liveness.absent(30.0) == frozenset()


def test_the_observer_never_doubts_itself() -> None:
    """Its own heartbeat is its own thread's business."""
    liveness = observer()
    see(liveness, 12.25, members="ab", alive="ab")
    assert "me" in liveness.live(12.25)
    assert "me" not in liveness.dead(12.25)


def test_without_a_grace_presence_counts_for_nothing() -> None:
    """`RSMQ_PRESENCE_GRACE=PT0S` turns it off."""
    liveness = Liveness("me", ttl=TTL, grace=0)
    for tick in range(100):
        see(liveness, tick * 0.25, listening="")
    assert liveness.absent(25.0) == frozenset()


def test_a_jump_of_the_servers_clock_kills_nobody() -> None:
    """An hour forward, every time to live is over at once; then the living renew."""
    liveness = observer()
    liveness.saw_clock(12.0, 1_000_012.0)
    liveness.saw_clock(12.25, 1_003_612.25)
    see(liveness, 12.25, alive="")
    assert liveness.live(12.25) == ("a", "b", "me")
    for tick in range(1, 30):
        liveness.saw_clock(12.25 + tick * 0.25, 1_003_612.25 + tick * 0.25)
        see(liveness, 12.25 + tick * 0.25, alive="b")
    assert liveness.live(19.5) == ("b", "me")


def test_silence_counts_only_while_it_is_watched() -> None:
    """A stall longer than the grace: whoever was silent before and after may have listened in between."""
    liveness = observer()
    see(liveness, 12.25, listening="b")
    see(liveness, 14.25, listening="b")
    assert liveness.absent(14.25) == frozenset()
    see(liveness, 15.25, listening="b")
    assert liveness.absent(15.25) == {"a"}


def test_who_left_is_forgotten() -> None:
    """With a goodbye there is nothing to wait for; neither death nor absence remembers it."""
    liveness = observer()
    see(liveness, 12.25, listening="b", alive="b")
    see(liveness, 12.5, members="b")
    assert liveness.live(12.5) == ("b", "me")
    assert liveness.dead(13.5) == liveness.absent(13.5) == frozenset()
