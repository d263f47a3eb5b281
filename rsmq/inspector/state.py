"""The state of topics, groups, members and the server as plain dataclasses, and how each is read from the replies.

Counters (`added`, `read`) only grow, so two snapshots make a rate.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from rsmq.heartbeat.circles import targets_of
from rsmq.heartbeat.membership import UNREADABLE, read_numbers
from rsmq.model.call_counts import CallCounts, is_count
from rsmq.model.clock import LATEST_MS, from_epoch_ms
from rsmq.model.held_name import HeldName, read_holds, still_held
from rsmq.model.layout import Layout, plain_distribution
from rsmq.model.member import read_info
from rsmq.model.record import text, whole
from rsmq.model.work import READ_AHEAD_USED, Work
from rsmq.redis.preflight import Finding
from rsmq.redis.topics import Topic

UNKNOWN: Final = -1
LARGEST_MS: Final = 10**12
LONGEST_TEXT: Final = 120
MOST_TEXTS: Final = 10
TOLD_WITHIN: Final = 2
"""The part of a lease: two of the four beats in it."""
NO_WORK: Final = Work()
NO_CALLS: Final = CallCounts()

Row = Sequence[Any]


@dataclass(frozen=True, slots=True)
class PartitionState:
    """One stream. The ids are None while it is empty.

    `delayed` counts messages that are not due yet, `added` all entries ever added.
    """

    partition: int
    length: int
    first_id: str | None
    last_id: str | None
    delayed: int
    added: int


@dataclass(frozen=True, slots=True)
class TopicState:
    """A topic, its groups, and what is in it."""

    topic: Topic
    length: int
    delayed: int
    groups: tuple[str, ...]
    partitions: tuple[PartitionState, ...]


@dataclass(frozen=True, slots=True)
class GroupPartition:
    """One partition as one group sees it.

    `owner` is empty if the partition has no lease (always, under shared distribution); `lease_left` is negative for a
    lease that ran out. `unread` counts messages that were never delivered; where the server does not know it (after a
    reset into the middle of a stream) it is the length of the stream, an upper bound, and `is_unread_exact` is False.
    `read` counts the entries ever read, None where the server does not know.

    `pending` counts what was delivered and is not settled, as XPENDING does; `pending_of` has those of each member.
    With key order a message that waits for its retry is pending, too: `pending_for_retry` counts those (of more than
    100 that wait, it is estimated by the 100 that are due next). `oldest` is the age of the oldest message that is
    pending, unread or waits for a retry (only the 100 that are due next are considered); what waits for a time is left
    out (while something does, so is all of the oldest 1000 that has not started). `oldest_in_stream` leaves out
    those that wait for a retry. `overdue`: how long the first message that waits for a time is past it, None if none
    is.
    """

    partition: int
    owner: str
    epoch: int
    lease_left: timedelta | None
    unread: int
    is_unread_exact: bool
    read: int | None
    pending: int
    waiting_for_retry: int
    pending_for_retry: int
    dead_letters: int
    consumers: int
    last_delivered_id: str
    oldest: timedelta | None
    oldest_in_stream: timedelta | None
    overdue: timedelta | None
    pending_of: Mapping[str, int]

    @property
    def is_owned(self) -> bool:
        """Whether a lease is running."""
        return bool(self.owner) and self.lease_left is not None and self.lease_left > timedelta(0)


@dataclass(frozen=True, slots=True)
class BandState:
    """What a group has in one band of its topic. `oldest`: the age of its oldest message that is not settled."""

    name: str
    partitions: int
    unread: int
    pending: int
    oldest: timedelta | None
    dead_letters: int


@dataclass(frozen=True, slots=True)
class GroupState:
    """A group over all partitions; the counts are sums over `shares`, its partitions. `bands`, the highest first, are
    those of its topic; empty for a topic without bands. `holds` are the
    names of which nothing starts now; one of a breaker whose end has passed waits for a message to try it.
    `follows`: after a resize, how many partitions there are to own: those before have the owners of the first ones; 0
    for a topic that was not resized. `left_before`: how many messages it has not settled in partitions that were
    sealed."""

    topic: str
    name: str
    distribution: str
    is_paused: bool
    members: tuple[str, ...]
    unread: int
    is_unread_exact: bool
    pending: int
    waiting_for_retry: int
    pending_for_retry: int
    dead_letters: int
    shares: tuple[GroupPartition, ...]
    bands: tuple[BandState, ...] = ()
    holds: tuple[HeldName, ...] = ()
    follows: int = 0
    left_before: int = 0

    @property
    def overdue(self) -> timedelta | None:
        """How long the first message that waits for a time is past it, over all partitions."""
        return max((each.overdue for each in self.shares if each.overdue is not None), default=None)


@dataclass(frozen=True, slots=True)
class ProcessState:
    """A process as it describes itself. Empty or None: it does not say, like those of older versions.

    `version` is that of rsmq, `app_version` that of its service (RSMQ_APP_VERSION). `memory`: bytes in main memory at
    its last heartbeat.
    """

    host: str = ""
    pid: int | None = None
    version: str = ""
    started: datetime | None = None
    memory: int | None = None
    app_version: str = ""

    @property
    def release(self) -> str:
        """What was deployed: the version of the service, or that of rsmq. Empty if neither is known."""
        return self.app_version or (f"rsmq {self.version}" if self.version else "")


NO_PROCESS: Final = ProcessState()


@dataclass(frozen=True, slots=True)
class MemberState:
    """One member of one group.

    `heard_ago` is None when its heartbeat has expired, `loop_lag` when the member does not report it. `partitions` are
    its leases. `is_present`: its process holds its presence connection; None in a snapshot, which does not ask.
    `gc_every`: new objects between two runs of its garbage collector, 0 if that is off, None if it does not say.
    `lease_ttl`: its RSMQ_LEASE_TTL, None if it does not say. `pending`: what the server has delivered to it and it has
    not settled. `work`: what it did with these messages at its last heartbeat. `waiting_for_rate_by`: the keys or names
    with most messages that wait for a rate, where the rate tells messages apart. `waiting_by_tenant`: the tenants with
    most messages that have not started and do not wait behind a key. `missing_keys`: the keys and codings that messages
    need and it does not have, each with the seconds since the first such message. `outputs_wait_for`: full topics
    into which its handlers have published. `fallback`: the topic, and perhaps the group there, that get what fails for
    good. `calls`: how its calls have gone. `longest`: how long its longest call runs,
    None if none does. `process`: what its process says of itself. `attempts`, `timeout` and `limits`: of its handler.
    `read_ahead_used`: percent of RSMQ_READ_AHEAD that wait in its fullest partition, from 80 on, where its handler has
    a rule `when`. `unreadable`: on a cluster, the partitions that it cannot read or settle, because their nodes do not
    serve it; other members own them. `layout`: the version of the topic's layout that it knows, None if it does not
    say: its version of rsmq knows no bands. `has_told`: it has told within two beats what its messages do.
    `waiting_for_key_by`: the keys with most messages behind them, if a hundred or more wait for keys.
    `settled_nothing_for`: the time since a message of it left the backlog, and since it has some that should be done;
    None: it does not say, or has nothing to do and had nothing. `read_nothing_for`: since its last read without an
    error, if that is long ago. `reserve`: the slots of its handler that only messages of a band may take. `weights`:
    those of its tenants that are written down, at most 20. `longest_calls`: the messages, as partition/stream id, of
    its five longest calls (of a call with several its first one), and for how many ms they have run.
    """

    topic: str
    group: str
    id: str
    handler: str
    concurrency: int
    heard_ago: timedelta | None
    loop_lag: timedelta | None
    pending: int
    partitions: tuple[int, ...]
    is_present: bool | None = None
    gc_every: int | None = None
    lease_ttl: timedelta | None = None
    work: Work = NO_WORK
    waiting_for_rate_by: tuple[tuple[str, int], ...] = ()
    waiting_by_tenant: tuple[tuple[str, int], ...] = ()
    missing_keys: tuple[tuple[str, int], ...] = ()
    outputs_wait_for: tuple[str, ...] = ()
    fallback: tuple[str, str] | None = None
    calls: CallCounts = NO_CALLS
    longest: timedelta | None = None
    process: ProcessState = NO_PROCESS
    attempts: int | None = None
    timeout: timedelta | None = None
    limits: tuple[str, ...] = ()
    read_ahead_used: int = 0
    unreadable: tuple[int, ...] = ()
    layout: int | None = None
    has_told: bool = True
    waiting_for_key_by: tuple[tuple[str, int], ...] = ()
    settled_nothing_for: timedelta | None = None
    read_nothing_for: timedelta | None = None
    reserve: tuple[tuple[str, int], ...] = ()
    weights: tuple[tuple[str, float], ...] = ()
    longest_calls: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything under one prefix. `at` is the monotonic clock in seconds, for the time between two snapshots."""

    at: float
    topics: tuple[TopicState, ...]
    groups: tuple[GroupState, ...]
    members: tuple[MemberState, ...]


@dataclass(frozen=True, slots=True)
class ServerState:
    """The server as `rsmq doctor` shows it. `round_trip` is the shortest of a few."""

    url: str
    server: str
    round_trip: timedelta
    topics: int
    groups: int
    python: str
    redis_py: str
    hiredis: str
    is_hiredis_used: bool
    embedded_directory: str | None
    findings: tuple[Finding, ...]
    newer: tuple[str, ...] = ()

    @property
    def is_refused(self) -> bool:
        """Whether a worker would refuse to start here."""
        return any(finding.level == "refuse" for finding in self.findings)


def topic_state(topic: Topic, rows: Sequence[Row]) -> TopicState:
    """From MEASURE_PARTITION of each partition."""
    partitions = tuple(
        PartitionState(number, length, first.decode() or None, last.decode() or None, delayed, added)
        for number, (added, length, delayed, first, last, *_) in zip(topic.numbers, rows, strict=True)
    )
    return TopicState(
        topic=topic,
        length=sum(each.length for each in partitions),
        delayed=sum(each.delayed for each in partitions),
        groups=tuple(sorted({row[0].decode(errors="replace") for _, _, _, _, _, *groups in rows for row in groups})),
        partitions=partitions,
    )


def group_partition(partition: PartitionState, row: Row, reply: Row, now_ms: int) -> GroupPartition:
    """From the group's row of MEASURE_PARTITION and the reply of MEASURE_GROUP_PARTITION."""
    _, delivered, read, unread, consumers = row
    pending, following, parked_id, waiting_for_retry, dead, owner, epoch, until_ms, due, both, *counts = reply
    until = min(whole(until_ms) or 0, LATEST_MS)
    pending_of = {name.decode(errors="replace"): count for name, count in zip(counts[::2], counts[1::2], strict=True)}
    return GroupPartition(
        partition=partition.partition,
        owner=text(owner),
        epoch=whole(epoch) or 0,
        lease_left=timedelta(milliseconds=until - now_ms) if owner and until else None,
        unread=partition.length if unread == UNKNOWN else unread,
        is_unread_exact=unread != UNKNOWN,
        read=None if read == UNKNOWN else read,
        pending=sum(pending_of.values()),
        waiting_for_retry=waiting_for_retry,
        pending_for_retry=both,
        dead_letters=dead,
        consumers=consumers,
        last_delivered_id=delivered.decode(),
        oldest=age_of((pending, following, parked_id), now_ms),
        oldest_in_stream=age_of((pending, following), now_ms),
        overdue=past(due, now_ms),
        pending_of=pending_of,
    )


def age_of(ids: Sequence[bytes], now_ms: int) -> timedelta | None:
    """The age of the oldest of these entries; an empty id is none."""
    times = [ms for found in ids if (ms := whole(found.partition(b"-")[0])) is not None]
    return timedelta(milliseconds=max(0, now_ms - min(times))) if times else None


def past(due: bytes, now_ms: int) -> timedelta | None:
    """How long a due time in ms is over, None if it is not, or there is none."""
    due_ms = whole(due.partition(b".")[0])
    return timedelta(milliseconds=now_ms - due_ms) if due_ms is not None and due_ms < now_ms else None


def band_states(layout: Layout, shares: Sequence[GroupPartition]) -> tuple[BandState, ...]:
    """The partitions of a group, summed by band."""
    if not layout.has_bands:
        return ()
    by_band: dict[str, list[GroupPartition]] = {band: [] for band in layout.order}
    for share in shares:
        by_band[layout.band_of(share.partition)].append(share)
    return tuple(
        BandState(
            name=band,
            partitions=len(some),
            unread=sum(each.unread for each in some),
            pending=sum(each.pending for each in some),
            oldest=max((each.oldest for each in some if each.oldest is not None), default=None),
            dead_letters=sum(each.dead_letters for each in some),
        )
        for band, some in by_band.items()
    )


def most_owners(shares: Sequence[GroupPartition], bands: Sequence[BandState]) -> int:
    """How many members can own something: the partitions of all bands that belong together have one owner."""
    return bands[0].partitions if bands else len(shares)


def group_state(topic: Topic, name: str, about: Row, shares: Sequence[GroupPartition]) -> GroupState:
    """From MEASURE_MEMBERS and the partitions."""
    now_ms, distribution, paused, holds, *members = about
    return GroupState(
        topic=topic.name,
        name=name,
        distribution=plain_distribution(text(distribution)),
        is_paused=paused == b"1",
        holds=still_held(read_holds(holds), int(now_ms)),
        members=tuple(sorted(member.decode(errors="replace") for member in members[::4])),
        unread=sum(share.unread for share in shares),
        is_unread_exact=all(share.is_unread_exact for share in shares),
        pending=sum(share.pending for share in shares),
        waiting_for_retry=sum(share.waiting_for_retry for share in shares),
        pending_for_retry=sum(share.pending_for_retry for share in shares),
        dead_letters=sum(share.dead_letters for share in shares),
        shares=tuple(shares),
        bands=band_states(topic.layout, shares),
        follows=topic.layout.current.count if topic.layout.is_resized else 0,
        left_before=sum(left_before(topic.layout, shares).values()),
    )


def left_before(layout: Layout, shares: Iterable[GroupPartition]) -> dict[int, int]:
    """The sealed partitions that a group has not finished, and how many messages it has not settled in each."""
    sealed = layout.sealed_numbers
    left = {each.partition: each.unread + each.pending for each in shares if each.partition in sealed}
    return {partition: number for partition, number in left.items() if number}


def counts(found: object) -> tuple[tuple[str, int], ...]:
    """Names and numbers of a JSON object."""
    return tuple((name, n) for name, n in found.items() if isinstance(n, int)) if isinstance(found, dict) else ()


def weights_of(found: object) -> tuple[tuple[str, float], ...]:
    """Names and weights of a JSON object."""
    rows = found.items() if isinstance(found, dict) else ()
    return tuple((name, weight) for name, weight in rows if isinstance(weight, int | float) and 0 < weight < LARGEST_MS)


def member_state(group: GroupState, row: Row, ttl: timedelta) -> MemberState:
    """From the member's row of MEASURE_MEMBERS. Another client may have written anything into its keys. `ttl`: the
    lease of a member that does not say its own."""
    name, info, left_ms, vitals = row
    member, about, vital = name.decode(errors="replace"), read_info(info), read_info(vitals)
    lag_ms, most = vital.get("loop_lag_ms", -1), vital.get("waiting_for_rate_by")
    gc_every = about.get("gc_every")
    lease_ms = about.get("lease_ttl_ms")
    layout, concurrency = about.get("layout"), about.get("concurrency")
    is_lag = isinstance(lag_ms, int | float) and 0 <= lag_ms < LARGEST_MS
    lease_ttl = timedelta(milliseconds=lease_ms) if isinstance(lease_ms, int) and 0 < lease_ms < LARGEST_MS else None
    ttl = lease_ttl or ttl
    heard_ago = max(timedelta(0), ttl - timedelta(milliseconds=left_ms)) if left_ms >= 0 else None
    return MemberState(
        topic=group.topic,
        group=group.name,
        id=member,
        handler=str(about.get("handler", "")),
        concurrency=concurrency if isinstance(concurrency, int) else 0,
        heard_ago=heard_ago,
        loop_lag=timedelta(milliseconds=lag_ms) if is_lag else None,
        pending=sum(share.pending_of.get(member, 0) for share in group.shares),
        partitions=tuple(share.partition for share in group.shares if share.owner == member),
        gc_every=gc_every if isinstance(gc_every, int) else None,
        lease_ttl=lease_ttl,
        work=Work.read(vital),
        waiting_for_rate_by=counts(most),
        waiting_by_tenant=counts(vital.get("waiting_by_tenant")),
        missing_keys=counts(vital.get("missing_keys")),
        outputs_wait_for=tuple(targets_of(vital)),
        fallback=(str(about["fallback"]), str(about.get("fallback_group", ""))) if "fallback" in about else None,
        calls=CallCounts.read(vital.get("calls")),
        longest=span(vital.get("longest_ms")),
        process=process_state(about, vital),
        attempts=count_of(about.get("attempts")),
        timeout=span(about.get("timeout_ms")),
        limits=texts(about.get("limits")),
        read_ahead_used=used if isinstance(used := vital.get(READ_AHEAD_USED, 0), int) else 0,
        unreadable=tuple(sorted(read_numbers(str(about.get(UNREADABLE, "")).encode(errors="replace")))),
        layout=layout if isinstance(layout, int) else None,
        longest_calls=counts(vital.get("longest_calls")),
        reserve=counts(about.get("reserve")),
        weights=weights_of(about.get("weights")),
        waiting_for_key_by=counts(vital.get("waiting_for_key_by")),
        settled_nothing_for=span(vital.get("settled_nothing_ms")),
        read_nothing_for=span(vital.get("not_read_ms")),
        has_told=bool(vital) and heard_ago is not None and heard_ago <= ttl / TOLD_WITHIN,
    )


def process_state(about: Mapping[str, Any], vital: Mapping[str, Any]) -> ProcessState:
    """From a member's own description and its vitals."""
    started = count_of(about.get("started_ms"))
    return ProcessState(
        host=str(about.get("host", ""))[:LONGEST_TEXT],
        pid=count_of(about.get("pid")),
        version=str(about.get("version", ""))[:LONGEST_TEXT],
        started=None if started is None or started > LATEST_MS else from_epoch_ms(started),
        memory=count_of(vital.get("memory_bytes")),
        app_version=str(about.get("app_version", ""))[:LONGEST_TEXT],
    )


def count_of(found: object) -> int | None:
    """A number that a member may have written, or None."""
    return found if isinstance(found, int) and is_count(found) else None


def span(found: object) -> timedelta | None:
    """Milliseconds that a member may have written as a duration, or None."""
    ms = count_of(found)
    return None if ms is None or ms >= LARGEST_MS else timedelta(milliseconds=ms)


def texts(found: object) -> tuple[str, ...]:
    """Some texts that a member may have written."""
    return tuple(str(each)[:LONGEST_TEXT] for each in found[:MOST_TEXTS]) if isinstance(found, list) else ()
