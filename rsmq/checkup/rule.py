"""The rules of the checkup: pure, one sentence of what is wrong and what to do, each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Final

from rsmq.checkup.facts import Facts
from rsmq.preflight import Finding
from rsmq.trend import GroupRow

LATE: Final = timedelta(seconds=0.5)
LONG: Final = timedelta(minutes=10)
"""In hand for so long: a handler that hangs, or nobody has it."""
NEARLY_FULL: Final = 0.8
GROWTH: Final = 10.0
"""Messages a second: less may be chance."""
COMMON: Final = 0.5
MOST_NAMED: Final = 5


def judge(facts: Facts) -> list[Finding]:
    """All that is wrong; one line that says so when nothing is."""
    found = [finding for rule in RULES for finding in rule(facts)]
    return found or [Finding("ok", "queues", f"{len(facts.board.groups)} groups looked at, nothing is wrong")]


def check_timeouts(facts: Facts) -> Iterator[Finding]:
    """The server does not cut connections that only wait, and notices those that are half-open."""
    idle, block = int(facts.config.get("timeout") or 0), facts.settings.longest_read
    if idle and timedelta(seconds=idle) <= 2 * block:
        yield warn(
            "timeouts",
            f"the server closes connections that are idle for {idle} s, a worker's read blocks for "
            f"{block.total_seconds():g} s: CONFIG SET timeout 0, or shorten RSMQ_BLOCK",
        )
    if facts.config.get("tcp-keepalive") == "0":
        text = "the server never notices half-open connections (tcp-keepalive is 0): CONFIG SET tcp-keepalive 60"
        yield warn("timeouts", text)


def check_groups(facts: Facts) -> Iterator[Finding]:
    """Every topic is read, by groups that exist in each of its partitions."""
    for topic in facts.board.topics:
        if topic.messages and not topic.groups:
            yield warn(
                "group",
                f"topic {topic.name} has {topic.messages} messages and no group: start a worker with a handler for it, "
                f"or `rsmq topic delete {topic.name}`",
            )
    sizes = {topic.name: topic.partitions for topic in facts.board.topics}
    for group in facts.board.groups:
        lacking = sorted(set(range(sizes[group.topic])) - {share.partition for share in group.shares})
        if lacking:
            yield warn(
                "group",
                f"{title(group)} does not exist in partition {listed(lacking)}: a worker that serves it makes it, "
                f"from the earliest message; to skip what is there: `rsmq group reset {words(group)} --to latest`",
            )


def check_served(facts: Facts) -> Iterator[Finding]:
    """Where something waits, somebody works."""
    for group in facts.board.groups:
        if group.is_paused:
            yield warn("group", f"{title(group)} is paused: `rsmq group resume {words(group)}`")
        elif group.is_unserved and (group.lag or group.in_hand or group.parked):
            waiting = "an unknown number of" if group.lag is None else group.lag + group.in_hand + group.parked
            yield warn(
                "group",
                f"nobody serves {title(group)}, {waiting} messages wait: start `rsmq worker`, or if it is not needed "
                f"any more `rsmq group delete {words(group)}`",
            )


def check_trend(facts: Facts) -> Iterator[Finding]:
    """No backlog grows."""
    for group in facts.board.groups:
        if group.growth is not None and group.growth > GROWTH and not group.is_paused:
            yield warn(
                "lag",
                f"the backlog of {title(group)} grows by {group.growth:,.0f} messages a second (lag {group.lag}): "
                f"start more workers (`rsmq worker --processes N`, at most {len(group.shares)}), or raise concurrency",
            )


def check_members(facts: Facts) -> Iterator[Finding]:
    """Every member has work it may do, and a loop that runs."""
    for group in facts.board.groups:
        live = [member for member in group.members if member.heard_ago is not None]
        if group.distribution == "hash" and len(live) > len(group.shares):
            yield warn(
                "partitions",
                f"{title(group)} has {len(live)} members and {len(group.shares)} partitions: {len(live)} - "
                f"{len(group.shares)} of them are idle. Stop them, give the handler distribution='shared', or publish "
                f"to a topic with more partitions (their number never changes)",
            )
        for member in live:
            if member.loop_lag is not None and member.loop_lag > LATE:
                yield warn(
                    "loop",
                    f"the event loop of {member.id} is {member.loop_lag.total_seconds():.1f} s late: its handler "
                    f"{member.handler} blocks it. Make it a plain `def`, or give it execution='process'",
                )


def check_consumers(facts: Facts) -> Iterator[Finding]:
    """Nothing is in the hands of the dead for longer than a lease."""
    live = {(m.topic, m.group, m.id) for m in facts.board.members if m.heard_ago is not None}
    patience = 2 * facts.settings.lease_ttl
    for hand in facts.hands:
        topic, group, partition = hand.place
        if (topic, group, hand.name) in live or not hand.pending or hand.idle <= patience:
            continue
        yield warn(
            "consumer",
            f"{hand.pending} messages of {topic}.{partition}/{group} are in the hands of {hand.name}, which is dead: "
            f"the next owner of the partition takes them. Start `rsmq worker`; see `rsmq group show {topic} {group}`",
        )


def check_pending(facts: Facts) -> Iterator[Finding]:
    """What is in hand exists, and is not there for ever."""
    live = {(m.topic, m.group, m.id) for m in facts.board.members if m.heard_ago is not None}
    for each in facts.oldest:
        topic, group, partition = each.place
        if each.is_gone:
            yield warn(
                "pending",
                f"{each.id} of {topic}.{partition} is pending in {group}, but the stream has it no more: "
                f"somebody has deleted or trimmed it. The partition's next owner drops it; restart {each.consumer}",
            )
        elif each.idle > LONG and (topic, group, each.consumer) in live:
            yield warn(
                "pending",
                f"{each.id} of {topic}.{partition}/{group} is with {each.consumer} for {minutes(each.idle)}: "
                f"its handler hangs. Give it `timeout=`, or restart that worker",
            )


def check_retention(facts: Facts) -> Iterator[Finding]:
    """No group keeps a topic from being trimmed, and no topic is about to be full."""
    for group in facts.board.groups:
        topic = facts.topics.get(group.topic)
        if topic is not None and group.oldest is not None and group.oldest > topic.retention_age:
            yield warn(
                "retention",
                f"{title(group)} keeps messages of {group.topic} that are {minutes(group.oldest)} old, longer than its "
                f"retention: see `rsmq topic why-not-trimmed {group.topic}`",
            )
    for row in facts.board.topics:
        topic = facts.topics.get(row.name)
        if topic is not None and topic.max_length and row.messages > NEARLY_FULL * topic.max_length * row.partitions:
            yield warn(
                "retention",
                f"topic {row.name} is nearly full, {row.messages} of {topic.max_length * row.partitions} messages: "
                f"`rsmq topic why-not-trimmed {row.name}`, or `rsmq topic set {row.name} --max-length N`",
            )


def check_keys(facts: Facts) -> Iterator[Finding]:
    """No key has a partition for itself and more."""
    for (topic, partition), (key, part) in facts.common_keys.items():
        if part >= COMMON:
            yield warn(
                "hot key",
                f"{part:.0%} of the newest messages of {topic}.{partition} have the key {key!r}, and it lags "
                f"far behind the others: one key is handled by one at a time. Use a finer key, or ordering='none'",
            )
        else:
            text = f"{topic}.{partition} lags far behind the other partitions, and no key of its own explains it"
            yield warn("hot key", f"{text}: see `rsmq tail {topic}`, and `rsmq member list {topic}` for its owner")


def check_dead_letters(facts: Facts) -> Iterator[Finding]:
    """What has died is looked at."""
    for group in facts.board.groups:
        if group.dead_letters:
            more = f", {group.new_dead_letters} just now" if group.new_dead_letters else ""
            yield warn(
                "dead letters",
                f"{title(group)} has {group.dead_letters}{more}: `rsmq dlq list {words(group)}`, then "
                f"`rsmq dlq replay {words(group)} --dry-run`",
            )


RULES: Final[tuple[Callable[[Facts], Iterator[Finding]], ...]] = (
    check_timeouts, check_groups, check_served, check_trend, check_members, check_consumers, check_pending,
    check_retention, check_keys, check_dead_letters,
)  # fmt: skip


def warn(topic: str, text: str) -> Finding:
    """None of these keeps a worker from starting: a worker is what most of them need."""
    return Finding("warn", topic, text)


def title(group: GroupRow) -> str:
    """For a sentence."""
    return f"group {group.name} of {group.topic}"


def words(group: GroupRow) -> str:
    """For a command."""
    return f"{group.topic} {group.name}"


def listed(numbers: list[int]) -> str:
    """The first few."""
    more = f" and {len(numbers) - MOST_NAMED} more" if len(numbers) > MOST_NAMED else ""
    return ", ".join(map(str, numbers[:MOST_NAMED])) + more


def minutes(value: timedelta) -> str:
    """A long time."""
    hours = value.total_seconds() / 3600
    return (
        f"{hours * 60:.0f} minutes" if hours < 2 else f"{hours:.0f} hours" if hours < 48 else f"{hours / 24:.0f} days"
    )
