"""Every metric that rsmq exports: name, kind, labels, meaning. Tests compare dashboard, alerts and docs with it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from rsmq.model.call_counts import BOUNDS

Kind = Literal["counter", "gauge", "histogram"]
GROUP = ("topic", "group")


@dataclass(frozen=True, slots=True)
class Metric:
    """One family. Units are in the name: `_seconds`, else what is counted; counters end in `_total`."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    text: str

    @property
    def series(self) -> tuple[str, ...]:
        """The names under which its samples can be asked for."""
        parts = ("_bucket", "_sum", "_count") if self.kind == "histogram" else ("",)
        return tuple(self.name + part for part in parts)


class Histogram:
    """Counts durations by upper bound, in seconds. One thread writes, without a lock."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...] = BOUNDS) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, seconds: float) -> None:
        """Count one duration."""
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.sum += seconds

    def buckets(self) -> Iterator[tuple[str, float]]:
        """Upper bound as text, and how many were at most that."""
        bounds = [*(repr(bound) for bound in self.bounds), "+Inf"]
        return zip(bounds, accumulate(self.counts[:]), strict=True)

    def __repr__(self) -> str:
        return f"<Histogram {sum(self.counts)} in {self.sum:.3f} s>"


@dataclass(frozen=True, slots=True)
class Sample:
    """One value of one metric, for one set of label values."""

    metric: Metric
    labels: Sequence[str]
    value: float | Histogram


# -- of one worker process, from its own counters

INFO = Metric(
    "rsmq_worker_info", "gauge", ("member", "version"), "Always 1; its labels are the member id and the version."
)
SERVING = Metric("rsmq_worker_serving", "gauge", (), "1 while all handlers are served, 0 while it starts or stops.")
SETTLED = Metric("rsmq_messages_settled_total", "counter", GROUP, "Messages handled and acknowledged.")
RETRIED = Metric("rsmq_messages_retried_total", "counter", GROUP, "Failed attempts that will be repeated.")
CANCELLED = Metric(
    "rsmq_messages_cancelled_total",
    "counter",
    GROUP,
    "Messages cancelled by this process: as their owner, or by `broker.cancel` (delayed ones have no group).",
)
BURIED = Metric("rsmq_messages_dead_lettered_total", "counter", GROUP, "Messages moved to the dead letters.")
HANDED_ON = Metric(
    "rsmq_messages_handed_on_total", "counter", GROUP, "Messages that failed for good and went to the fallback topic."
)
EXPIRED = Metric("rsmq_messages_expired_total", "counter", GROUP, "Messages that expired before an attempt started.")
REDELIVERED = Metric(
    "rsmq_messages_redelivered_total", "counter", GROUP, "Messages delivered again, after a takeover or a retry."
)
HANDED_BACK = Metric("rsmq_messages_handed_back_total", "counter", GROUP, "Messages returned unhandled by a stop.")
LOST_BODIES = Metric("rsmq_messages_lost_body_total", "counter", GROUP, "Pending messages whose entry was deleted.")
TRIMMED = Metric(
    "rsmq_messages_trimmed_total", "counter", GROUP, "Messages that a full topic removed before their turn came."
)
RESTORED = Metric(
    "rsmq_messages_restored_total",
    "counter",
    GROUP,
    "Messages of a member made pending again: their consumer was deleted.",
)
DELETED = Metric("rsmq_entries_deleted_total", "counter", GROUP, "Entries deleted by other clients.")
REFUSED = Metric("rsmq_settles_refused_total", "counter", GROUP, "Settles refused because the lease had moved on.")
NOT_PENDING = Metric(
    "rsmq_settles_not_pending_total", "counter", GROUP, "Settles of messages that were settled before."
)
OPENED = Metric("rsmq_breaker_opened_total", "counter", GROUP, "Breakers of a handler that have opened.")
READS = Metric("rsmq_reads_total", "counter", GROUP, "Reads that brought messages.")
LEASE_MOVES = Metric("rsmq_lease_moves_total", "counter", (*GROUP, "move"), "Leases taken, released and lost.")
OWNED = Metric("rsmq_partitions_owned", "gauge", GROUP, "Partitions that this process reads.")
RUNNING = Metric("rsmq_messages_running", "gauge", GROUP, "Messages that a handler of this process handles now.")
READY = Metric("rsmq_messages_ready", "gauge", GROUP, "Messages in memory that may start as soon as a handler is free.")
WAITING = Metric(
    "rsmq_messages_waiting",
    "gauge",
    (*GROUP, "for"),
    "Messages that wait: for a key, a rate (or a hold), a retry, a time.",
)
TENANTS = Metric("rsmq_tenants", "gauge", GROUP, "Tenants with messages in this process that have not started.")
TENANT_WAITING = Metric(
    "rsmq_tenant_messages", "gauge", (*GROUP, "rank"),
    "Messages that have not started, of the tenants that have most of them: 1 to 3.",
)  # fmt: skip
MISSING_KEY = Metric(
    "rsmq_missing_key_seconds", "gauge", (*GROUP, "needs"),
    "How long messages have waited for a key, or a coding, that this process does not have.",
)  # fmt: skip
BUSY = Metric("rsmq_handlers_busy", "gauge", GROUP, "Handler calls running now.")
LIMIT = Metric("rsmq_handlers_limit", "gauge", GROUP, "Highest number of concurrent handler calls.")
LONGEST = Metric("rsmq_handler_longest_seconds", "gauge", GROUP, "How long the oldest running handler call has run.")
SECONDS = Metric(
    "rsmq_handler_seconds", "histogram", (*GROUP, "handler"), "Duration of handler calls; a batch is one call."
)
FAILED = Metric("rsmq_handler_failures_total", "counter", (*GROUP, "handler"), "Handler calls that failed.")
READ_AGE = Metric(
    "rsmq_read_age_seconds", "gauge", GROUP, "Time since the last read without an error, of the slowest read loop."
)
HEARTBEAT_AGE = Metric("rsmq_heartbeat_age_seconds", "gauge", (), "Time since the server last confirmed a heartbeat.")
LOOP_LAG = Metric("rsmq_loop_lag_seconds", "histogram", (), "How long the event loop took to answer.")
BLOCKED = Metric("rsmq_loop_blocked_seconds", "gauge", (), "How long the event loop has been blocked so far.")
PUBLISHED = Metric("rsmq_messages_published_total", "counter", ("topic",), "Messages confirmed by the server.")
UNPUBLISHED = Metric("rsmq_publish_failures_total", "counter", ("topic",), "Messages whose publish ended in an error.")
OUTBOX_ROWS = Metric(
    "rsmq_outbox_backlog_rows", "gauge", ("database",), "Rows that wait in an outbox; of its relay only."
)
OUTBOX_AGE = Metric(
    "rsmq_outbox_oldest_seconds", "gauge", ("database",), "Age of the oldest of these rows; 0 if none is."
)
OUTBOX_REFUSED = Metric(
    "rsmq_outbox_refused_rows", "gauge", ("database",), "Rows of an outbox that cannot be published."
)
KEPT_OUT = Metric(
    "rsmq_outbox_kept_out_total",
    "counter",
    ("database",),
    "Rows not stored, as another message keeps their unique name.",
)
RELAYED = Metric("rsmq_outbox_relayed_total", "counter", ("database",), "Rows that this process moved into topics.")

WORKER = (
    INFO, SERVING, SETTLED, RETRIED, CANCELLED, BURIED, HANDED_ON, EXPIRED, REDELIVERED, HANDED_BACK, LOST_BODIES,
    TRIMMED, RESTORED, DELETED, REFUSED, NOT_PENDING, OPENED, READS, LEASE_MOVES, OWNED, RUNNING, READY, WAITING,
    TENANTS, TENANT_WAITING, MISSING_KEY, BUSY, LIMIT,
    LONGEST, SECONDS, FAILED, READ_AGE, HEARTBEAT_AGE, LOOP_LAG, BLOCKED, PUBLISHED, UNPUBLISHED, OUTBOX_ROWS,
    OUTBOX_AGE, OUTBOX_REFUSED, KEPT_OUT, RELAYED,
)  # fmt: skip

# -- of the groups, from the server, by `rsmq exporter`

UP = Metric("rsmq_up", "gauge", (), "1 if the server answered this scrape.")
ASKING = Metric("rsmq_exporter_query_seconds", "gauge", (), "How long the exporter took to ask the server.")
STORED = Metric("rsmq_topic_messages", "gauge", ("topic",), "Entries stored, also settled ones kept for replay.")
DELAYED = Metric("rsmq_topic_delayed_messages", "gauge", ("topic",), "Messages that are not due yet.")
BACKLOG = Metric(
    "rsmq_group_backlog_messages", "gauge", GROUP,
    "Unread, ready, running and waiting messages together, but for those that wait for a time.",
)  # fmt: skip
UNREAD = Metric("rsmq_group_unread_messages", "gauge", GROUP, "Messages never delivered to the group.")
UNREAD_EXACT = Metric("rsmq_group_unread_exact", "gauge", GROUP, "0 if the unread are only an upper bound.")
OLDEST = Metric("rsmq_group_oldest_seconds", "gauge", GROUP, "Age of the oldest message not settled; 0 if none is.")
OVERDUE = Metric(
    "rsmq_group_overdue_seconds", "gauge", GROUP, "How late the first message that waits for a time is; 0 if none is."
)
GROUP_RUNNING = Metric("rsmq_group_running_messages", "gauge", GROUP, "Messages that handlers handle now.")
GROUP_READY = Metric(
    "rsmq_group_ready_messages", "gauge", GROUP, "Delivered messages that may start, and those of dead members."
)
GROUP_WAITING = Metric(
    "rsmq_group_waiting_messages",
    "gauge",
    (*GROUP, "for"),
    "Messages that wait: for a key, a rate (or a hold), a retry, a time.",
)
DEAD = Metric("rsmq_group_dead_letters", "gauge", GROUP, "Dead letters kept.")
MEMBERS = Metric("rsmq_group_members", "gauge", GROUP, "Members whose heartbeat is fresh.")
SILENT = Metric("rsmq_group_silent_members", "gauge", GROUP, "Members whose heartbeat has run out.")
STALLED = Metric(
    "rsmq_group_stalled_seconds", "gauge", GROUP,
    "How long it has settled nothing though messages are ready or wait for their keys; 0 while it goes on.",
)  # fmt: skip
OWNERS = Metric("rsmq_group_owners_limit", "gauge", GROUP, "How many members can own partitions of it.")
UNTOLD = Metric(
    "rsmq_group_untold_members", "gauge", GROUP,
    "Live members that have not told for two beats what becomes of their messages: these count as ready.",
)  # fmt: skip
UNOWNED = Metric("rsmq_group_unowned_partitions", "gauge", GROUP, "Partitions without a lease (hash distribution).")
BAND = (*GROUP, "band")
BAND_BACKLOG = Metric(
    "rsmq_band_backlog_messages", "gauge", BAND, "Unread and pending messages of a band; only of topics with bands."
)
BAND_OLDEST = Metric("rsmq_band_oldest_seconds", "gauge", BAND, "Age of the oldest of them; 0 if there is none.")
PAUSED = Metric("rsmq_group_paused", "gauge", GROUP, "1 while the group is paused.")
HELD = Metric(
    "rsmq_group_held_names", "gauge", (*GROUP, "by"), "Names of which nothing starts: by a handler, command or breaker."
)

SCHEDULE_FAILURES = Metric(
    "rsmq_schedule_failures", "gauge", ("topic", "schedule"), "Attempts that have failed since the last success."
)
SCHEDULE_LAST = Metric(
    "rsmq_schedule_last_success_timestamp_seconds",
    "gauge",
    ("topic", "schedule"),
    "The newest tick that was published, or had nothing to publish.",
)
SCHEDULE_LED = Metric(
    "rsmq_schedule_led", "gauge", ("topic", "schedule"), "1 if a worker publishes it, it is paused, or no code has it."
)

GROUPS = (
    UP, ASKING, STORED, DELAYED, BACKLOG, UNREAD, UNREAD_EXACT, GROUP_READY, GROUP_RUNNING, GROUP_WAITING, OLDEST,
    OVERDUE, DEAD, MEMBERS, SILENT, UNTOLD, STALLED, OWNERS, UNOWNED, BAND_BACKLOG, BAND_OLDEST, PAUSED, HELD,
    SCHEDULE_FAILURES, SCHEDULE_LAST, SCHEDULE_LED,
)  # fmt: skip

# -- of one gateway process, from its own counters

MQTT_CONNECTIONS = Metric("rsmq_mqtt_connections", "gauge", (), "MQTT clients that are connected to this process.")
MQTT_CONNECTS = Metric("rsmq_mqtt_connects_total", "counter", (), "CONNECTs that were accepted.")
MQTT_DISCONNECTS = Metric(
    "rsmq_mqtt_disconnects_total", "counter", (), "Connections that have ended, also refused ones."
)
MQTT_BYTES = Metric("rsmq_mqtt_bytes_total", "counter", ("direction",), "Bytes received from clients and sent to them.")
MQTT_MESSAGES = Metric("rsmq_mqtt_messages_total", "counter", (), "PUBLISH packets of clients.")
MQTT_UNCONFIRMED = Metric(
    "rsmq_mqtt_unconfirmed_messages", "gauge", (), "Messages of clients that wait for the server to store them."
)
MQTT_HELD = Metric("rsmq_mqtt_held_acknowledgements", "gauge", (), "Acknowledgements that wait for a router that lags.")
MQTT_UNREADABLE = Metric(
    "rsmq_mqtt_waiting_for_key_clients", "gauge", ("needs",),
    "Clients whose letters wait for a key or a codec that this gateway does not have.",
)  # fmt: skip
MQTT_STORED_SECONDS = Metric(
    "rsmq_mqtt_publish_seconds", "histogram", (), "From a PUBLISH of QoS 1 or 2 until the server has confirmed it."
)
MQTT_DELIVERY_SECONDS = Metric(
    "rsmq_mqtt_delivery_seconds", "histogram", (),
    "From the storing of a message to its PUBLISH for a client that was connected by then.",
)  # fmt: skip
MQTT_ROUTED = Metric("rsmq_mqtt_routed_messages_total", "counter", (), "Messages that this process has routed.")
MQTT_LETTERS = Metric("rsmq_mqtt_letters_total", "counter", (), "Letters that this process has stored in inboxes.")
MQTT_WILLS = Metric("rsmq_mqtt_wills_total", "counter", (), "Wills that this process has published.")
MQTT_DROPPED = Metric("rsmq_mqtt_dropped_total", "counter", ("reason",), "Messages that a client did not get.")
MQTT_REFUSED = Metric("rsmq_mqtt_refused_total", "counter", ("reason",), "Packets and requests that were refused.")
MQTT_FAILED = Metric("rsmq_mqtt_failed_total", "counter", ("reason",), "Connections that ended by a failure here.")

GATEWAY = (
    MQTT_CONNECTIONS, MQTT_CONNECTS, MQTT_DISCONNECTS, MQTT_BYTES, MQTT_MESSAGES, MQTT_UNCONFIRMED, MQTT_HELD,
    MQTT_UNREADABLE, MQTT_STORED_SECONDS, MQTT_DELIVERY_SECONDS, MQTT_ROUTED, MQTT_LETTERS, MQTT_WILLS, MQTT_DROPPED,
    MQTT_REFUSED, MQTT_FAILED,
)  # fmt: skip
