"""The rules of the checkup: each finds what it is for, names the place and says what to do, and is quiet otherwise."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from rsmq.checkup import Facts, judge
from rsmq.checkup.facts import Hand, Oldest
from rsmq.settings import Settings
from rsmq.topic import Topic
from rsmq.trend import Board, GroupRow, MemberRow, ShareRow, TopicRow

PLACE = ("orders", "billing", 0)
MEMBER = MemberRow("orders", "billing", "w1", "bill", 64, timedelta(seconds=1), timedelta(0), 0, (0,))
SHARE = ShareRow(0, "w1", 1, 0, 0, 0, 0, None)
GROUP = GroupRow(
    "orders", "billing", "hash", False, 0.0, 0, 0.0, None, None, 0, 0, 0, 0, 1, (SHARE,), (MEMBER,)
)  # fmt: skip
TOPIC = TopicRow("orders", 1, 10, 0, 0.0, 1)
LIMITS = Topic("orders", 1, 0, "reject", timedelta(days=1), 100_000, 0)
HOUR = timedelta(hours=1)


def facts(group: GroupRow | None = GROUP, topic: TopicRow = TOPIC, limits: Topic = LIMITS, **more: Any) -> Facts:
    """Of a queue that is well, but for what a test says."""
    board = Board(timedelta(seconds=1), (topic,), () if group is None else (group,))
    known: dict[str, Any] = {"hands": [], "oldest": [], "config": {}, "common_keys": {}} | more
    return Facts(settings=Settings(url="redis://localhost"), board=board, topics={"orders": limits}, **known)


def test_a_queue_that_is_well() -> None:
    """One line that says so."""
    (finding,) = judge(facts())
    assert (finding.level, finding.text) == ("ok", "1 groups looked at, nothing is wrong")


DEAD = replace(MEMBER, heard_ago=None)
CASES = {
    "idle connections are cut": (facts(config={"timeout": "3"}), "CONFIG SET timeout 0"),
    "half-open connections stay": (facts(config={"tcp-keepalive": "0"}), "CONFIG SET tcp-keepalive 60"),
    "no group": (facts(None, replace(TOPIC, groups=0)), "has 10 messages and no group"),
    "group lacks partitions": (facts(topic=replace(TOPIC, partitions=9)), "partition 1, 2, 3, 4, 5 and 3 more"),
    "paused": (facts(replace(GROUP, is_paused=True)), "rsmq group resume orders billing"),
    "unserved": (facts(replace(GROUP, members=(DEAD,), lag=7, parked=1)), "8 messages wait: start `rsmq worker`"),
    "unserved, lag unknown": (facts(replace(GROUP, members=(), lag=None, in_hand=1)), "an unknown number of messages"),
    "growing": (facts(replace(GROUP, growth=250.0)), "grows by 250 messages a second"),
    "more members than partitions": (
        facts(replace(GROUP, members=(MEMBER, replace(MEMBER, id="w2")))),
        "2 members and 1 partitions",
    ),
    "late loop": (
        facts(replace(GROUP, members=(replace(MEMBER, loop_lag=timedelta(seconds=3)),))),
        "the event loop of w1 is 3.0 s late: its handler bill blocks it",
    ),
    "dead consumer": (facts(hands=[Hand(PLACE, "gone", 5, HOUR)]), "5 messages of orders.0/billing are in the hands"),
    "phantom": (facts(oldest=[Oldest(PLACE, "1-1", "w1", timedelta(0), True)]), "the stream has it no more"),
    "hanging handler": (facts(oldest=[Oldest(PLACE, "1-1", "w1", HOUR, False)]), "is with w1 for 60 minutes"),
    "pinned": (facts(replace(GROUP, oldest=timedelta(days=3))), "rsmq topic why-not-trimmed orders"),
    "nearly full": (facts(limits=replace(LIMITS, max_length=11)), "nearly full, 10 of 11 messages"),
    "hot key": (facts(common_keys={("orders", 0): ("c-1", 0.9)}), "90% of the newest messages of orders.0"),
    "lagging partition": (facts(common_keys={("orders", 0): ("c-1", 0.1)}), "no key of its own explains it"),
    "dead letters": (facts(replace(GROUP, dead_letters=3, new_dead_letters=2)), "has 3, 2 just now: `rsmq dlq list"),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_wrong_is_found_with_what_to_do(name: str) -> None:
    """Exactly this one thing."""
    case, text = CASES[name]
    (finding,) = judge(case)
    assert text in finding.text
    assert finding.level == "warn"
    assert str(case.settings.lease_ttl) not in finding.text


QUIET = {
    "the server waits long enough": facts(config={"timeout": "300", "tcp-keepalive": "300"}),
    "an empty topic without a group": facts(None, replace(TOPIC, messages=0, groups=0)),
    "nobody serves what is done": facts(replace(GROUP, members=(DEAD,))),
    "a paused group grows": facts(replace(GROUP, growth=0.5)),
    "a shared group may have more members": facts(
        replace(GROUP, distribution="shared", members=(MEMBER, replace(MEMBER, id="w2")))
    ),
    "a live consumer": facts(hands=[Hand(PLACE, "w1", 5, HOUR)]),
    "a dead consumer with nothing": facts(hands=[Hand(PLACE, "gone", 0, HOUR)]),
    "one that died just now": facts(hands=[Hand(PLACE, "gone", 5, timedelta(seconds=7))]),
    "work that takes its time": facts(oldest=[Oldest(PLACE, "1-1", "w1", timedelta(minutes=5), False)]),
}


@pytest.mark.parametrize("name", QUIET)
def test_what_is_in_order_is_not_told(name: str) -> None:
    """A doctor who warns of health is not listened to."""
    (finding,) = judge(QUIET[name])
    assert finding.level == "ok", finding
