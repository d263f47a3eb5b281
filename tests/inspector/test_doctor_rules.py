"""The rules of the doctor: each finds its problem, says what to do, and is silent otherwise."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from rsmq.inspector.doctor import QueueFacts, judge
from rsmq.inspector.doctor.facts import ConsumerState, OldestPending, OpenCallback, WaitingOutputs
from rsmq.inspector.doctor.mqtt import MqttFacts
from rsmq.inspector.state import MemberState
from rsmq.inspector.text import describe_left
from rsmq.inspector.trend import Board, GroupTrend, TopicTrend
from rsmq.model.held_name import HeldName
from rsmq.model.layout import Layout, single
from rsmq.model.settings import Settings
from rsmq.model.work import Work
from rsmq.persistence.mqtt_clients import MqttClient, MqttGateway
from rsmq.redis.topics import Topic
from tests.inspector.states import LIMITS, MEMBER, PART

PARTITION = ("orders", "billing", 0)
GROUP = GroupTrend(
    "orders", "billing", "hash", False, 0.0, 0, 0.0, None, None, Work(), 0, 0, 0, 1, (PART,), (MEMBER,)
)  # fmt: skip
TOPIC = TopicTrend("orders", 1, 10, 0, 0.0, 1)
HOUR = timedelta(hours=1)


def facts(
    group: GroupTrend | None = GROUP, topic: TopicTrend = TOPIC, limits: Topic = LIMITS, **more: Any
) -> QueueFacts:
    """Of a queue without problems, except for what a test changes."""
    board = Board(timedelta(seconds=1), (topic,), () if group is None else (group,))
    known: dict[str, Any] = {"consumers": [], "oldest": [], "config": {}, "common_keys": {}} | more
    return QueueFacts(settings=Settings(url="redis://localhost"), board=board, topics={"orders": limits}, **known)


def test_queue_without_problems_is_one_ok_finding() -> None:
    """The doctor says so."""
    (finding,) = judge(facts())
    assert (finding.level, finding.text) == ("ok", "1 group checked, no problems found")


def resizing(
    layout: Layout, members: tuple[MemberState, ...] = (), unread: int = 0, gone: frozenset[str] = frozenset(),
    **changes: Any,
) -> str:  # fmt: skip
    """What is said of a topic with this layout."""
    shares = tuple(replace(PART, partition=number, unread=unread, pending=0) for number in layout.numbers)
    group = replace(GROUP, shares=shares, members=members, follows=layout.current.count, **changes)
    found = judge(facts(group, limits=replace(LIMITS, layout=layout), gone=gone))
    return "\n".join(finding.text for finding in found if "resize" in finding.text or "to have" in finding.text)


def test_each_state_of_a_resize_is_explained() -> None:
    """It waits for members, for groups, for a process that goes on; a group that stands still is named."""
    added = single(1).with_partitions(2)
    aware, unaware = replace(MEMBER, layout=added.version), replace(MEMBER, id="w2", layout=0)
    said = {
        "all live members know them: w2 does not": resizing(added, (aware, unaware)),
        "the process that has begun it has ended, and no worker goes on. Repeat `rsmq topic resize orders 2`": resizing(
            added
        ),
        "are about to be used": resizing(added, (aware,)),
        "no worker goes on. Repeat": resizing(added, (unaware,), gone=frozenset({"w2"})),
        "being sealed, one after the other; their publishers wait meanwhile: a worker goes on": resizing(
            added.opening(), (aware,)
        ),
        "no worker is there to go on: start one, or repeat `rsmq topic resize orders 2`": resizing(added.opening()),
        "the last resize: wait for billing (3 messages in partition 0), or give it up": resizing(
            added.sealed().with_partitions(4), (replace(MEMBER, layout=9),), unread=3
        ),
        "partition 0 of before the resize of its topic, and what came later waits behind it: `rsmq group resume": (
            resizing(added.sealed(), (replace(MEMBER, layout=9),), unread=3, is_paused=True)
        ),
        "waits behind it: start its worker": resizing(added.sealed(), unread=3),
    }
    assert [text for text, found in said.items() if text not in found] == []
    assert not resizing(added.sealed(), (replace(MEMBER, layout=9),), unread=3)
    assert not resizing(single(1), (MEMBER,))


def test_what_is_left_of_before_a_resize_names_ten_partitions_at_most() -> None:
    """With how many messages wait in each."""
    assert describe_left({3: 5, 4: 2}) == "7 messages in partitions 3 (5) and 4 (2)"
    assert describe_left(dict.fromkeys(range(12), 1)).endswith(" 8 (1), 9 (1) and 2 more")


def test_a_backlog_that_grows_under_all_members_that_can_be_says_so() -> None:
    """More workers would not help: the topic has outgrown its partitions."""
    (finding,) = judge(facts(replace(GROUP, growth=100.0)))
    assert "as many members as can own a partition (1) do not keep up" in finding.text
    assert "`rsmq topic resize orders 2`" in finding.text


NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
GATEWAY = MqttGateway("g1", 7, NOON, False, ("mqtts://0.0.0.0:8883",), False, NOON + timedelta(days=90))
CLIENT = MqttClient("sensor", "g1", NOON, NOON, 60, 10, 0, False, ())


def mqtt(gateway: MqttGateway | None = GATEWAY, client: MqttClient = CLIENT, **changes: Any) -> QueueFacts:
    """Of a gateway and a client without problems, except for what a test changes."""
    gateways = [] if gateway is None else [replace(gateway, **changes)]
    return facts(mqtt=MqttFacts(NOON, gateways, [client]))


def test_gateway_without_problems_is_no_finding() -> None:
    """Nor is one that anybody of this machine may connect to."""
    for changes in ({}, {"is_anonymous": True, "listen": ("mqtt://127.0.0.1:1883",)}):
        assert [each.level for each in judge(mqtt(**changes))] == ["ok"]


DEAD = replace(MEMBER, heard_ago=None)
OPEN = HeldName("twilio", 1_900_000_000_000, 1_899_999_999_000, "breaker")
STUCK = replace(MEMBER, waiting_for_key_by=(("c-1", 90), ("c-2", 5)), settled_nothing_for=HOUR)
CASES = {
    "stalled": (
        facts(replace(GROUP, stalled=HOUR, work=Work(ready=3, waiting_for_key=29, waiting_for_retry=4), backlog=36)),
        "group billing of orders has settled nothing for 1 h: 3 ready, 0 running, 33 waiting (29 for a key, 4 for a "
        "retry). `rsmq message find orders --group billing --state waiting_for_retry` names those in front",
    ),
    "a slow handler in front of others": (
        facts(replace(GROUP, stalled=HOUR, work=Work(1, 3), members=(replace(MEMBER, longest=HOUR),), backlog=4)),
        "1 running (the longest for 1 h), 0 waiting. `rsmq message find orders --group billing --state running`",
    ),
    "one key in front": (
        facts(replace(GROUP, work=Work(waiting_for_key=150), members=(STUCK, replace(STUCK, heard_ago=None)))),
        "90 of 150 messages of group billing of orders wait behind the key 'c-1': a key is handled one",
    ),
    "the rate of one name": (
        facts(
            replace(
                GROUP,
                work=Work(waiting_for_rate=150),
                members=(
                    replace(
                        MEMBER, waiting_for_rate_by=(("twilio", 80), ("", 70)), waiting_by_tenant=(("twilio", 80),)
                    ),
                ),
            )
        ),
        "80 of 150 messages of group billing of orders wait for the rate of 'twilio'",
    ),
    "the rate of the handler": (
        facts(replace(GROUP, work=Work(waiting_for_rate=150))),
        "150 of 150 messages of group billing of orders wait for their handler's rate",
    ),
    "one tenant": (
        facts(replace(GROUP, work=Work(ready=150), members=(replace(MEMBER, waiting_by_tenant=(("acme", 149),)),))),
        "149 of 150 messages of group billing of orders are those of tenant 'acme'",
    ),
    "a member that does not read": (
        facts(replace(GROUP, members=(replace(MEMBER, read_nothing_for=HOUR),))),
        "w1 of group billing of orders owns 1 partition and has read nothing for 1 h",
    ),
    "a member that does not tell": (
        facts(replace(GROUP, work=Work(ready=8), untold=("w1",))),
        "w1 has not told lately what becomes of its messages: they count as ready: of group billing of orders",
    ),
    "open breaker": (
        facts(replace(GROUP, holds=(OPEN,))),
        "'twilio' of group billing of orders is held by a breaker",
    ),
    "open breaker in front of a backlog": (
        facts(replace(GROUP, work=Work(waiting_for_rate=150), holds=(replace(OPEN, name=""),))),
        "everything of group billing of orders is held by a breaker",
    ),
    "open breaker in front of one name": (
        facts(
            replace(
                GROUP,
                work=Work(waiting_for_rate=150),
                members=(replace(MEMBER, waiting_for_rate_by=(("twilio", 150),)),),
                holds=(OPEN,),
            )
        ),
        "'twilio' of group billing of orders is held by a breaker",
    ),
    "a node that does not serve a member": (
        facts(replace(GROUP, members=(replace(MEMBER, unreadable=(3, 17)),))),
        "w1 of group billing of orders cannot read or settle partition 3, 17",
    ),
    "held for long": (
        facts(replace(GROUP, holds=(replace(OPEN, name="", since_ms=0, kind="command"),))),
        "`rsmq hold end orders --group billing`",
    ),
    "no gateway": (mqtt(None), "no gateway runs: start `rsmq gateway`"),
    "silent gateway": (mqtt(is_late=True, until=NOON - HOUR), "g1 has not renewed its lease for 1 h"),
    "anonymous": (mqtt(is_anonymous=True), "from other machines (mqtts://0.0.0.0:8883)"),
    "certificate ends": (mqtt(certificate_until=NOON + HOUR), "certificate of gateway g1 ends in 1 h"),
    "certificate has ended": (mqtt(certificate_until=NOON - HOUR), "has ended: clients refuse it"),
    "route leads nowhere": (mqtt(routes=(("a/#", "logs", False),)), "messages of a/# are stored in topic logs"),
    "routes differ": (
        facts(mqtt=MqttFacts(NOON, [GATEWAY, replace(GATEWAY, name="g2", routes=(("#", "orders", True),))])),
        "the routes of gateways g1 and g2 differ",
    ),
    "inbox nearly full": (
        mqtt(client=replace(CLIENT, waiting=9_000)),
        "'sensor' with 9000 of 10000 letters: it reads more slowly than it gets messages. Its publishers wait",
    ),
    "inbox of an absent client nearly full": (
        mqtt(client=replace(CLIENT, waiting=9_000, gateway=None, dropped=7)),
        "it is not connected. The oldest letters are dropped next, and 7 letters were dropped before",
    ),
    "idle connections are cut": (facts(config={"timeout": "3"}), "CONFIG SET timeout 0"),
    "half-open connections stay": (facts(config={"tcp-keepalive": "0"}), "CONFIG SET tcp-keepalive 60"),
    "no group": (facts(None, replace(TOPIC, groups=0)), "has 10 messages and no group"),
    "group lacks partitions": (facts(limits=replace(LIMITS, layout=single(9))), "partition 1, 2, 3, 4, 5 and 3 more"),
    "paused": (facts(replace(GROUP, is_paused=True)), "rsmq group resume orders billing"),
    "unserved": (
        facts(replace(GROUP, members=(DEAD,), unread=7, work=Work(waiting_for_retry=1), backlog=8)),
        "8 messages wait: start `rsmq worker`",
    ),
    "unserved, unread unknown": (
        facts(replace(GROUP, members=(), unread=None, work=Work(ready=1), backlog=None)),
        "an unknown number of messages",
    ),
    "growing": (facts(replace(GROUP, growth=250.0)), "grows by 250 messages a second"),
    "more members than partitions": (
        facts(replace(GROUP, members=(MEMBER, replace(MEMBER, id="w2")))),
        "2 members and 1 partition: 1 member is idle",
    ),
    "different leases": (
        facts(
            replace(
                GROUP,
                shares=(PART, PART),
                members=(
                    replace(MEMBER, lease_ttl=timedelta(seconds=6)),
                    replace(MEMBER, id="w2", lease_ttl=timedelta(seconds=2)),
                ),
            )
        ),
        "have different leases, from 2 s (w2) to 6 s: give all of them the same RSMQ_LEASE_TTL",
    ),
    "no ids": (facts(without_ids=["orders"]), "the newest messages of orders have no id"),
    "late loop": (
        facts(replace(GROUP, members=(replace(MEMBER, loop_lag=timedelta(seconds=3)),))),
        "the event loop of w1 is 3 s late: its handler bill blocks it",
    ),
    "eager garbage collector": (
        facts(replace(GROUP, rate_out=900.0, members=(replace(MEMBER, gc_every=700),))),
        "the garbage collector of w1 runs every 700 new objects",
    ),
    "dead consumer": (
        facts(consumers=[ConsumerState(*PARTITION, "gone", 5, HOUR)]),
        "5 messages of orders.0/billing are pending for gone",
    ),
    "phantom": (
        facts(oldest=[OldestPending(*PARTITION, "1-1", "w1", timedelta(0), True)]),
        "the stream does not have it any more",
    ),
    "hanging handler": (
        facts(oldest=[OldestPending(*PARTITION, "1-1", "w1", HOUR, False)]),
        "has been pending for w1 for 1 h",
    ),
    "pinned": (facts(replace(GROUP, oldest=timedelta(days=3))), "rsmq topic why-not-trimmed orders"),
    "nearly full": (facts(limits=replace(LIMITS, max_length=11)), "nearly full, 10 of 11 messages"),
    "hot key": (facts(common_keys={("orders", 0): ("c-1", 0.9)}), "90% of the newest messages of orders.0"),
    "lagging partition": (facts(common_keys={("orders", 0): ("c-1", 0.1)}), "no single key explains it"),
    "dead letters": (
        facts(replace(GROUP, dead_letters=3, new_dead_letters=2)),
        "has 3 dead letters, 2 just now: `rsmq dlq list",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_problem_is_found_with_what_to_do(name: str) -> None:
    """Exactly this one finding."""
    case, text = CASES[name]
    (finding,) = judge(case)
    assert text in finding.text
    assert finding.level == "warn"
    assert str(case.settings.lease_ttl) not in finding.text


QUIET = {
    "a small backlog behind one key": facts(
        replace(GROUP, work=Work(waiting_for_key=95), members=(STUCK,)),
    ),
    "a large backlog behind many keys": facts(replace(GROUP, work=Work(waiting_for_key=200), members=(STUCK,))),
    "a dead member does not read": facts(
        replace(GROUP, members=(MEMBER, replace(DEAD, read_nothing_for=HOUR, layout=0)))
    ),
    "the server waits long enough": facts(config={"timeout": "300", "tcp-keepalive": "300"}),
    "an empty topic without a group": facts(None, replace(TOPIC, messages=0, groups=0)),
    "a group without messages needs no member": facts(replace(GROUP, members=(DEAD,))),
    "a paused group grows": facts(replace(GROUP, growth=0.5)),
    "a shared group may have more members": facts(
        replace(GROUP, distribution="shared", members=(MEMBER, replace(MEMBER, id="w2")))
    ),
    "an idle member's garbage collector": facts(replace(GROUP, rate_out=3.0, members=(replace(MEMBER, gc_every=700),))),
    "a garbage collector that runs seldom": facts(
        replace(GROUP, rate_out=900.0, members=(replace(MEMBER, gc_every=10_000),))
    ),
    "a garbage collector that is off": facts(replace(GROUP, rate_out=900.0, members=(replace(MEMBER, gc_every=0),))),
    "a dead member had another lease, and one does not say": facts(
        replace(
            GROUP,
            shares=(PART, PART, PART),
            members=(
                replace(MEMBER, lease_ttl=timedelta(seconds=6)),
                replace(DEAD, lease_ttl=timedelta(seconds=2)),
                MEMBER,
            ),
        )
    ),
    "a live consumer": facts(consumers=[ConsumerState(*PARTITION, "w1", 5, HOUR)]),
    "a dead consumer with nothing": facts(consumers=[ConsumerState(*PARTITION, "gone", 0, HOUR)]),
    "one that died just now": facts(consumers=[ConsumerState(*PARTITION, "gone", 5, timedelta(seconds=7))]),
    "work that takes its time": facts(oldest=[OldestPending(*PARTITION, "1-1", "w1", timedelta(minutes=5), False)]),
}


@pytest.mark.parametrize("name", QUIET)
def test_healthy_queue_has_no_warning(name: str) -> None:
    """A doctor that warns of healthy queues is soon ignored."""
    (finding,) = judge(QUIET[name])
    assert finding.level == "ok", finding


def test_out_stream_that_does_not_drain_is_named() -> None:
    """A minute is long for a relay."""
    young, old = (WaitingOutputs("orders", "billing", 0, 3, timedelta(seconds=n)) for n in (5, 90))
    assert judge(facts(outputs=[young]))[0].level == "ok"
    (finding,) = judge(facts(outputs=[old]))
    assert finding.topic == "outputs"
    assert "3 outputs of orders.0/billing wait for 90 s" in finding.text


def test_topics_that_wait_for_each_other_are_named() -> None:
    """A chain of full topics is a slow consumer at its end, and no circle."""
    chain = [replace(MEMBER, topic="orders", outputs_wait_for=("bills",)), replace(MEMBER, topic="bills")]
    circle = [chain[0], replace(chain[1], outputs_wait_for=("orders",))]
    found = [
        [each.text for each in judge(facts(replace(GROUP, members=tuple(members)))) if "each other" in each.text]
        for members in (chain, circle)
    ]
    assert found[0] == []
    (text,) = found[1]
    assert "bills -> orders -> bills" in text


def test_a_fallback_topic_without_its_group_is_named() -> None:
    """What goes there waits for the first group, or for the one that the handler names."""

    def texts(fallback: tuple[str, str]) -> list[str]:
        groups = replace(GROUP, members=(replace(MEMBER, fallback=fallback),))
        return [each.text for each in judge(facts(groups)) if each.topic == "fallback"]

    (missing,) = texts(("sms", ""))
    assert "goes to the fallback topic sms, which has no group: it is kept for the first one" in missing
    (other,) = texts((GROUP.topic, "provider"))
    assert f"which has no group provider but {GROUP.name}: start a worker" in other
    assert texts((GROUP.topic, "")) == texts((GROUP.topic, GROUP.name)) == []


def test_read_ahead_that_is_nearly_used_up_by_what_waits_for_a_time_is_named() -> None:
    """A member reports it from 80 % on."""
    full = replace(MEMBER, read_ahead_used=85)
    texts = [each.text for each in judge(facts(replace(GROUP, members=(MEMBER, full))))]
    assert any("takes 85 % of RSMQ_READ_AHEAD" in each and "quiet.next(zone)" in each for each in texts)
    assert not any("RSMQ_READ_AHEAD" in each.text for each in judge(facts()))


def test_message_that_is_past_the_time_it_waits_for_is_named() -> None:
    """After a minute, and not while the group is paused."""
    late, soon = (replace(PART, overdue=timedelta(seconds=seconds)) for seconds in (90, 30))

    def texts(**changes: Any) -> list[str]:
        return [each.text for each in judge(facts(replace(GROUP, **changes))) if "should have started" in each.text]

    assert "should have started 90 s ago" in texts(shares=(soon, late))[0]
    assert texts(shares=(soon,)) == texts(shares=(late,), is_paused=True) == []


def test_a_band_that_is_not_open_is_named() -> None:
    """A member that is too old keeps it closed: the command that names it is in the text."""
    limits = replace(LIMITS, layout=single(1).with_bands(("urgent", "normal")))
    assert any("not open yet (urgent)" in each.text for each in judge(facts(limits=limits)))


def test_a_member_that_does_not_read_open_bands_is_named() -> None:
    """It started while they were opened, with a version that knows none."""
    limits = replace(LIMITS, layout=single(1).with_bands(("urgent", "normal")).opened())
    assert not any("no bands" in each.text for each in judge(facts(limits=limits)))
    older = replace(GROUP, members=(MEMBER, replace(MEMBER, id="w2", layout=None)))
    (text,) = (each.text for each in judge(facts(older, limits=limits)) if "no bands" in each.text)
    assert "1 member of an older version that knows no bands (w2)" in text


def test_a_callback_topic_without_a_group_is_named() -> None:
    """Its callback would be kept, and no handler called."""

    def texts(topic: str) -> list[str]:
        about = facts(callbacks=[OpenCallback("campaign", topic)])
        return [each.text for each in judge(about) if each.topic == "batch"]

    (missing,) = texts("reports")
    assert "such as 'campaign', will call topic reports, which has no group" in missing
    assert texts(GROUP.topic) == []
