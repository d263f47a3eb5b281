"""The rules of the doctor: pure. Each finding says what is wrong and what to do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Final

from rsmq.heartbeat.circles import circle_through
from rsmq.inspector.doctor.facts import QueueFacts
from rsmq.inspector.doctor.mqtt import check_mqtt
from rsmq.inspector.obstacles import behind_one_name, not_reading, outgrown, stalled, title
from rsmq.inspector.state import left_before
from rsmq.inspector.text import describe_left, timestamp, untold
from rsmq.inspector.trend import GroupTrend
from rsmq.model.encoding import STORE
from rsmq.model.settings import longest_read
from rsmq.model.words import count, duration
from rsmq.redis.preflight import Finding
from rsmq.redis.streams import QUERY
from rsmq.redis.topics import Topic

LATE: Final = timedelta(seconds=0.5)
LONG: Final = timedelta(minutes=10)
"""Pending for so long: its handler hangs."""
WAITING_LONG: Final = timedelta(minutes=1)
NEARLY_FULL: Final = 0.8
GROWTH: Final = 10.0
"""Messages a second that a backlog may grow by chance."""
COMMON: Final = 0.5
BUSY: Final = 500
"""Messages a second of a group, from which on the garbage collector of its members matters."""
SELDOM: Final = 5000
"""New objects between two runs of the garbage collector: with so many it costs next to nothing."""
MOST_NAMED: Final = 5


def judge(facts: QueueFacts) -> list[Finding]:
    """The findings of all rules, or a single `ok`."""
    found = [Finding("warn", topic, text) for rule, topic in RULES.items() for text in rule(facts)]
    return found or [Finding("ok", "queues", f"{count(len(facts.board.groups), 'group')} checked, no problems found")]


def check_timeouts(facts: QueueFacts) -> Iterator[str]:
    """The server keeps idle connections, and notices half-open ones."""
    idle, block = int(facts.config.get("timeout") or 0), longest_read(facts.settings)
    if idle and timedelta(seconds=idle) <= 2 * block:
        yield (
            f"the server closes connections that are idle for {duration(timedelta(seconds=idle))}, a worker's "
            f"read blocks for {duration(block)}: CONFIG SET timeout 0, or shorten RSMQ_BLOCK"
        )
    if facts.config.get("tcp-keepalive") == "0":
        yield "the server never notices half-open connections (tcp-keepalive is 0): CONFIG SET tcp-keepalive 60"


def check_records(facts: QueueFacts) -> Iterator[str]:
    """Every topic can be read."""
    for why in facts.unreadable:
        yield f"{why}. Another client has written it: correct it, or delete the key"


def check_groups(facts: QueueFacts) -> Iterator[str]:
    """Every topic has a group, and every group exists in all partitions."""
    for topic in facts.board.topics:
        if topic.messages and not topic.groups:
            yield (
                f"topic {topic.name} has {count(topic.messages, 'message')} and no group: start a worker with a "
                f"handler for it, or `rsmq topic delete {topic.name}`"
            )
    for group in facts.board.groups:
        known = facts.topics.get(group.topic)
        numbers = set() if known is None else set(known.numbers)
        lacking = sorted(numbers - {share.partition for share in group.shares})
        if lacking:
            yield (
                f"{title(group)} does not exist in partition {listed(lacking)}: its worker creates it there, "
                f"from the earliest message; to skip existing messages: `rsmq group reset {words(group)} --to latest`"
            )


def check_served(facts: QueueFacts) -> Iterator[str]:
    """A group with messages has a live member and is not paused."""
    for group in facts.board.groups:
        if group.is_paused:
            yield f"{title(group)} is paused: `rsmq group resume {words(group)}`"
        elif group.is_unserved and (group.unread or group.work.total):
            known = group.backlog
            many = "messages wait"
            waiting = f"an unknown number of {many}" if known is None else count(known, "message waits", many)
            if group.distribution == QUERY:
                yield (
                    f"{title(group)} is a query of Spark that does not run, {waiting} for it and cannot be trimmed: "
                    f"start the query, or give it up with `rsmq group delete {words(group)}`"
                )
                continue
            yield (
                f"{title(group)} has no live member, {waiting}: start `rsmq worker`, or if it is not "
                f"needed any more `rsmq group delete {words(group)}`"
            )


def check_trend(facts: QueueFacts) -> Iterator[str]:
    """No backlog grows."""
    for group in facts.board.groups:
        if group.growth is not None and group.growth > GROWTH and not group.is_paused and group.distribution != QUERY:
            live = sum(member.heard_ago is not None for member in group.members)
            if group.distribution == "hash" and live >= group.most_owners:
                remedy = (
                    f"as many members as can own a partition ({live}) do not keep up. Raise concurrency, or let the "
                    f"topic grow and start more workers: `rsmq topic resize {group.topic} {2 * group.most_owners}`"
                )
            else:
                remedy = (
                    f"start more workers (`rsmq worker --processes N`, at most {group.most_owners}), or raise "
                    f"concurrency"
                )
            yield f"the backlog of {title(group)} grows by {group.growth:,.0f} messages a second: {remedy}"


def check_holds(facts: QueueFacts) -> Iterator[str]:
    """No breaker is open, and nothing is held for long."""
    for group in facts.board.groups:
        for each in group.holds:
            name = f" --name {each.name}" if each.name else ""
            end = f"rsmq hold end {group.topic}{name} --group {group.name}"
            if each.kind == "breaker":
                yield (
                    f"{each.words} of {title(group)} is held by a breaker: its calls have failed, and one message "
                    f"tries it from time to time. If its provider works again: `{end}`"
                )
            elif timedelta(milliseconds=each.until_ms - each.since_ms) > LONG:
                yield f"{each.words} of {title(group)} is held until {timestamp(each.until)}: `{end}`"


def check_missing_keys(facts: QueueFacts) -> Iterator[str]:
    """Every member has the keys that its messages need."""
    for group in facts.board.groups:
        missing = dict[str, list[tuple[str, int]]]()
        for member in group.members:
            for needs, seconds in member.missing_keys if member.heard_ago is not None else ():
                missing.setdefault(needs, []).append((member.id, seconds))
        for needs, found in sorted(missing.items())[:MOST_NAMED]:
            longest = duration(timedelta(seconds=max(seconds for _, seconds in found)))
            if needs.startswith("store ") and needs != STORE:
                yield (
                    f"messages of {title(group)} wait for their bodies: {count(len(found), 'member')} of it cannot "
                    f"read the {needs} ({found[0][0]}), for {longest} now. They go on by themselves when it answers"
                )
                continue
            yield (
                f"messages of {title(group)} need the {needs}, which {count(len(found), 'member')} of it "
                f"{'does' if len(found) == 1 else 'do'} not have ({found[0][0]}), for {longest} now: add it to their "
                f"keyring, such as RSMQ_KEYS, and start them again. `rsmq keys status {group.topic}` counts the "
                f"messages; after RSMQ_KEY_PATIENCE they become dead letters (no-key)"
            )


def check_read_ahead(facts: QueueFacts) -> Iterator[str]:
    """What waits for a time leaves room to read on."""
    for group in facts.board.groups:
        used = max((member.read_ahead_used for member in group.members), default=0)
        if used:
            yield (
                f"what waits for a time in {title(group)} takes {used} % of RSMQ_READ_AHEAD in a partition: at 100 % "
                f"nothing more is read there, and messages that may start wait, too. Publish with at=quiet.next(zone) "
                f"instead, or raise RSMQ_READ_AHEAD"
            )


def check_overdue(facts: QueueFacts) -> Iterator[str]:
    """What has waited for a time starts when that has come."""
    for group in facts.board.groups:
        late = max((each.overdue for each in group.shares if each.overdue is not None), default=timedelta(0))
        if late > WAITING_LONG and not group.is_paused:
            yield (
                f"a message of {title(group)} should have started {duration(late)} ago: the time that it waits for is "
                f"over. Its partition has no owner, or its owner has no room to read: `rsmq group show {group.topic} "
                f"{group.name}` names it"
            )


def check_obstacles(facts: QueueFacts) -> Iterator[str]:
    """No group is stalled, no name stands in front of most of a backlog, and every member reads what it owns."""
    for group in facts.board.groups:
        yield from (*stalled(group), *not_reading(group), *behind_one_name(group))
        if group.untold and group.work.ready:
            yield (
                f"{untold(group)}: of {title(group)}. Its heartbeats are late, or the server has no memory for what it "
                f"tells"
            )


def check_members(facts: QueueFacts) -> Iterator[str]:
    """Every member can own a partition."""
    for group in facts.board.groups:
        yield from outgrown(group)


def check_nodes(facts: QueueFacts) -> Iterator[str]:
    """On a cluster every member can read and settle at all nodes."""
    for group in facts.board.groups:
        for member in group.members:
            if member.heard_ago is not None and member.unreadable:
                yield (
                    f"{member.id} of {title(group)} cannot read or settle partition {listed(list(member.unreadable))}: "
                    f"a node of the cluster does not serve it, and other members have them. Its log and /readyz say "
                    f"why: its rights there, the node's maxclients, or the network between them"
                )


def check_leases(facts: QueueFacts) -> Iterator[str]:
    """All members of a group have the same lease: a member with a shorter one judges the others by its own."""
    for group in facts.board.groups:
        live = [member for member in group.members if member.heard_ago is not None and member.lease_ttl is not None]
        leases = sorted({member.lease_ttl for member in live if member.lease_ttl is not None})
        if len(leases) > 1:
            some = next(member.id for member in live if member.lease_ttl == leases[0])
            yield (
                f"the members of {title(group)} have different leases, from {duration(leases[0])} ({some}) to "
                f"{duration(leases[-1])}: give all of them the same RSMQ_LEASE_TTL"
            )


def check_ids(facts: QueueFacts) -> Iterator[str]:
    """Messages have an id of their publisher."""
    for name in facts.without_ids:
        yield (
            f"the newest messages of {name} have no id: a publisher that repeats one after a lost reply makes two "
            f"messages. Publish with rsmq, or add the field `id` and use the script of the wire format"
        )


def check_loops(facts: QueueFacts) -> Iterator[str]:
    """The event loop of every live member runs."""
    for member in facts.board.members:
        if member.heard_ago is not None and member.loop_lag is not None and member.loop_lag > LATE:
            yield (
                f"the event loop of {member.id} is {duration(member.loop_lag)} late: its handler "
                f"{member.handler} blocks it. Make it a plain `def`, or give it execution='process'"
            )


def check_collectors(facts: QueueFacts) -> Iterator[str]:
    """The garbage collector of a busy member does not run all the time."""
    for group in facts.board.groups:
        for member in group.members if (group.rate_out or 0) >= BUSY else ():
            if member.heard_ago is not None and 0 < (member.gc_every or 0) < SELDOM:
                yield (
                    f"the garbage collector of {member.id} runs every {member.gc_every} new objects, which costs a "
                    f"busy worker a tenth of its CPU or more: call rsmq.tune_garbage_collector() in that process, "
                    f"when all its modules are loaded"
                )


def check_consumers(facts: QueueFacts) -> Iterator[str]:
    """No dead consumer has pending messages for longer than two leases."""
    live = {(m.topic, m.group, m.id) for m in facts.board.members if m.heard_ago is not None}
    patience = 2 * facts.settings.lease_ttl
    for each in facts.consumers:
        if (each.topic, each.group, each.name) in live or not each.pending or each.idle <= patience:
            continue
        group_partition = f"{each.topic}.{each.partition}/{each.group}"
        found = count(each.pending, f"message of {group_partition} is", f"messages of {group_partition} are")
        yield (
            f"{found} pending for {each.name}, which is dead: the next owner of the partition takes over. "
            f"Start `rsmq worker`; see `rsmq group show {each.topic} {each.group}`"
        )


def check_pending(facts: QueueFacts) -> Iterator[str]:
    """Every pending message still exists, and no handler hangs on one."""
    live = {(m.topic, m.group, m.id) for m in facts.board.members if m.heard_ago is not None}
    for each in facts.oldest:
        if each.is_gone:
            yield (
                f"{each.id} of {each.topic}.{each.partition} is pending in {each.group}, but the stream does not have "
                f"it any more: another client deleted or trimmed it. The partition's next owner drops it; restart "
                f"{each.consumer}"
            )
        elif each.may_run and each.idle > LONG and (each.topic, each.group, each.consumer) in live:
            yield (
                f"{each.id} of {each.topic}.{each.partition}/{each.group} has been pending for {each.consumer} for "
                f"{duration(each.idle)}: its handler hangs. Give it `timeout=`, or restart that worker"
            )


def check_retention(facts: QueueFacts) -> Iterator[str]:
    """No group keeps a topic from being trimmed, and no topic is nearly full."""
    for group in facts.board.groups:
        topic = facts.topics.get(group.topic)
        if topic is not None and group.oldest is not None and group.oldest > topic.retention_age:
            yield (
                f"{title(group)} holds messages of {group.topic} that are {duration(group.oldest)} old, longer than "
                f"its retention: see `rsmq topic why-not-trimmed {group.topic}`"
            )
    for row in facts.board.topics:
        topic = facts.topics.get(row.name)
        if topic is not None and topic.max_length and row.messages > NEARLY_FULL * topic.max_length * row.partitions:
            yield (
                f"topic {row.name} is nearly full, {row.messages} of {topic.max_length * row.partitions} messages: "
                f"`rsmq topic why-not-trimmed {row.name}`, or `rsmq topic set {row.name} --max-length N`"
            )


def check_keys(facts: QueueFacts) -> Iterator[str]:
    """No single key dominates a partition."""
    for (topic, partition), (key, part) in facts.common_keys.items():
        if part >= COMMON:
            yield (
                f"{part:.0%} of the newest messages of {topic}.{partition} have the key {key!r}, and far more "
                f"is unread there than in the others: a key is handled one message at a time. Use a finer key, or "
                f"ordering='none'"
            )
        else:
            text = f"far more is unread in {topic}.{partition} than in the others, and no single key explains it"
            yield f"{text}: see `rsmq tail {topic}`, and `rsmq member list {topic}` for its owner"


def check_dead_letters(facts: QueueFacts) -> Iterator[str]:
    """There are no dead letters."""
    for group in facts.board.groups:
        if group.dead_letters:
            more = f", {group.new_dead_letters} just now" if group.new_dead_letters else ""
            yield (
                f"{title(group)} has {count(group.dead_letters, 'dead letter')}{more}: "
                f"`rsmq dlq list {words(group)}`, then `rsmq dlq replay {words(group)} --all --dry-run`"
            )


def check_outputs(facts: QueueFacts) -> Iterator[str]:
    """Outputs reach their targets soon."""
    for each in facts.outputs:
        if each.age > WAITING_LONG:
            yield (
                f"{count(each.count, 'output')} of {each.topic}.{each.partition}/{each.group} "
                f"{'waits' if each.count == 1 else 'wait'} for {duration(each.age)} in the out-stream: a target is "
                f"full, or no worker owns the partition. See rsmq.relay in the workers' log, or start `rsmq worker`"
            )


def check_circles(facts: QueueFacts) -> Iterator[str]:
    """No topics wait for each other."""
    waits, named = dict[str, set[str]](), set[frozenset[str]]()
    for member in facts.board.members:
        if member.heard_ago is not None:
            waits.setdefault(member.topic, set()).update(member.outputs_wait_for)
    for topic in sorted(waits):
        circle = circle_through(topic, waits)
        if circle and frozenset(circle) not in named:
            named.add(frozenset(circle))
            yield (
                f"handlers publish into full topics that wait for each other: {' -> '.join([*circle, circle[0]])}. "
                f"Raise the limit of one of them: `rsmq topic set {circle[0]} --max-length N`"
            )


def check_fallbacks(facts: QueueFacts) -> Iterator[str]:
    """Every fallback topic has a group that handles what comes there."""
    groups = {(group.topic, group.name) for group in facts.board.groups}
    ways = {(each.topic, each.group, *each.fallback) for each in facts.board.members if each.fallback is not None}
    for topic, name, target, wanted in sorted(ways):
        there = sorted(group for of, group in groups if of == target)
        if wanted and wanted not in there:
            yield (
                f"what fails in group {name} of {topic} goes to the fallback topic {target}, which has no group "
                f"{wanted}{' but ' + ', '.join(there) if there else ''}: start a worker with its handler"
            )
        elif not there:
            yield (
                f"what fails in group {name} of {topic} goes to the fallback topic {target}, which has no group: it "
                f"is kept for the first one; start a worker with a handler for {target}"
            )


def check_callbacks(facts: QueueFacts) -> Iterator[str]:
    """Every topic that a batch will call has a group that handles its callback."""
    served = {group.topic for group in facts.board.groups}
    waiting = Counter(each.topic for each in facts.callbacks if each.topic not in served)
    names = {each.topic: each.batch for each in facts.callbacks}
    for topic, number in sorted(waiting.items()):
        yield (
            f"{count(number, 'batch', 'batches')}, such as {names[topic]!r}, will call topic {topic}, which has no "
            f"group: the callback is kept for the first one; start a worker with a handler for {topic}"
        )


def check_gateways(facts: QueueFacts) -> Iterator[str]:
    """MQTT gateways and their clients, where there are some."""
    if facts.mqtt is not None:
        groups = frozenset(group.topic for group in facts.board.groups)
        yield from check_mqtt(facts.mqtt, facts.settings.inbox_limit, groups)


def check_bands(facts: QueueFacts) -> Iterator[str]:
    """Every band is open: live members keep one closed that they do not know. One that starts while a band is opened
    may be too late for that, and gets no partitions."""
    for name, topic in sorted(facts.topics.items()):
        if topic.layout.waits and topic.layout.following is None:
            added = [block.band for block in topic.layout.blocks if block.state == "added"]
            yield (
                f"topic {name} has bands that are not open yet ({', '.join(added)}): their messages go to normal until "
                f"all its members know them. `rsmq topic set {name} --bands {','.join(topic.layout.bands)}` says which "
                f"members must be started again"
            )
    for group in facts.board.groups:
        known = facts.topics.get(group.topic)
        old = [each.id for each in group.members if each.heard_ago is not None and each.layout is None]
        if known is not None and known.layout.has_bands and not known.layout.waits and old:
            yield (
                f"{title(group)} has {count(len(old), 'member')} of an older version that knows no bands "
                f"({', '.join(old[:MOST_NAMED])}): the others leave it no partitions. Start it again with this version "
                f"of rsmq"
            )


def check_resizes(facts: QueueFacts) -> Iterator[str]:
    """No topic is in the middle of a resize, and each group that has messages of before handles them."""
    for name, topic in sorted(facts.topics.items()):
        groups = [group for group in facts.board.groups if group.topic == name]
        added = topic.layout.following
        if added is not None:
            waits_for = what_a_resize_waits_for(topic, groups, facts.gone)
            yield f"topic {name} is to have {added.count} partitions, {waits_for}"
        for group in groups:
            left, live = (
                left_before(topic.layout, group.shares),
                any(each.heard_ago is not None for each in group.members),
            )
            if left and (group.is_paused or not live):
                remedy = f"`rsmq group resume {words(group)}`" if group.is_paused else "start its worker"
                yield (
                    f"{title(group)} has {describe_left(left)} of before the resize of its topic, and what came later "
                    f"waits behind it: {remedy}"
                )


def what_a_resize_waits_for(topic: Topic, groups: Sequence[GroupTrend], gone: Collection[str]) -> str:
    """Of one that has begun and not ended: the state that it is in, and what to do. `gone`: killed members."""
    heard = [member for group in groups for member in group.members if member.heard_ago is not None]
    members = [member for member in heard if member.id not in gone]
    unaware = [each.id for each in members if each.layout is None or each.layout < topic.layout.version]
    left = {group.name: left_before(topic.layout, group.shares) for group in groups}
    behind = [f"{name} ({describe_left(some)})" for name, some in left.items() if some]
    added = topic.layout.all_following[0].count
    again = f"`rsmq topic resize {topic.name} {added}`"
    if topic.layout.is_opening:
        who = "a worker goes on by itself" if members else f"no worker is there to go on: start one, or repeat {again}"
        return f"and the old ones are being sealed, one after the other; their publishers wait meanwhile: {who}"
    if unaware:
        return (
            f"which are not used before all live members know them: {listed(unaware)} "
            f"{'does' if len(unaware) == 1 else 'do'} not. If this stays, start them again with this version of rsmq, "
            f"or give it up: `rsmq topic resize {topic.name} --abort`"
        )
    if behind:
        return (
            f"which are not used before each group has handled what was published before the last resize: wait for "
            f"{', '.join(behind)}, or give it up: `rsmq topic resize {topic.name} --abort`"
        )
    if not members:
        return f"which are not used yet: the process that has begun it has ended, and no worker goes on. Repeat {again}"
    return f"which are about to be used. If this stays, `rsmq topic resize {topic.name} --status` says why"


def check_schedules(facts: QueueFacts) -> Iterator[str]:
    """Every schedule works, and a worker leads it."""
    failing = [each for each in facts.schedules if each.failures and not each.paused]
    for state in failing[:MOST_NAMED]:
        error = state.newest.error if state.newest is not None else "no report"
        yield (
            f"schedule {state.name} of {state.topic} has failed {count(state.failures, 'time')} in a row ({error}): "
            f"`rsmq schedule show {state.topic} {state.name}` has the traceback"
        )
    if len(failing) > MOST_NAMED:
        yield f"{len(failing) - MOST_NAMED} more schedules fail: `rsmq schedule list`"
    alone = [each for each in facts.schedules if not (each.leader or each.is_added or each.paused)]
    for state in alone[:MOST_NAMED]:
        yield (
            f"schedule {state.name} of {state.topic} has no leader, so nothing is published: start a worker that has "
            f"it, or if its code is gone `rsmq schedule remove {state.topic} {state.name}`"
        )


def check_outbox(backlog: int, age: timedelta, refused: int, error: str | None) -> Iterator[Finding]:
    """The rows of an outbox reach their topics soon. Not one of RULES: another server has it, so it is asked for."""
    if backlog and age > WAITING_LONG:
        yield Finding(
            "warn", "outbox", f"{count(backlog, 'row')} of the outbox "
            f"{'waits' if backlog == 1 else 'wait'}, the oldest for {duration(age)}: start a worker that includes the "
            f"outbox, or see rsmq.outbox in the workers' log",
        )  # fmt: skip
    if refused:
        yield Finding(
            "warn", "outbox", f"{count(refused, 'row')} of the outbox cannot be published ({error}): correct or delete "
            f"them in rsmq_outbox, and set their column error to NULL",
        )  # fmt: skip


RULES: Final[Mapping[Callable[[QueueFacts], Iterator[str]], str]] = {
    check_timeouts: "timeouts", check_records: "records",
    check_groups: "group", check_served: "group", check_trend: "backlog",
    check_holds: "holds", check_missing_keys: "keys", check_read_ahead: "waiting", check_overdue: "waiting",
    check_obstacles: "backlog", check_members: "partitions", check_nodes: "partitions",
    check_leases: "leases", check_ids: "ids", check_loops: "loop",
    check_collectors: "garbage collector",
    check_consumers: "consumer", check_pending: "pending", check_retention: "retention", check_keys: "hot key",
    check_dead_letters: "dead letters", check_outputs: "outputs", check_circles: "outputs", check_fallbacks: "fallback",
    check_callbacks: "batch",
    check_gateways: "mqtt", check_bands: "bands", check_resizes: "partitions", check_schedules: "schedule",
}  # fmt: skip
"""Each with the topic of its findings. None of them keeps a worker from starting: most need a worker to be solved."""


def words(group: GroupTrend) -> str:
    """The group as arguments of a command."""
    return f"{group.topic} {group.name}"


def listed(numbers: Sequence[int | str]) -> str:
    """The first few, and how many more."""
    more = f" and {len(numbers) - MOST_NAMED} more" if len(numbers) > MOST_NAMED else ""
    return ", ".join(map(str, numbers[:MOST_NAMED])) + more
