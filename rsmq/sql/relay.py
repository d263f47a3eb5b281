"""The relay: moves the rows of an outbox into their topics, in order, and deletes them."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final

import anyio
from sqlalchemy import ARRAY, BigInteger, Connection, any_, bindparam, delete, func, select, type_coerce, update
from sqlalchemy.types import NullType

from rsmq.errors import BrokerError, ConfigError, MessageError, Oversized, PartitionSealed, StoreUnavailable, TopicFull
from rsmq.model.body import Body
from rsmq.model.clock import to_ms
from rsmq.model.encoded_message import EncodedMessage
from rsmq.model.keys import check_name
from rsmq.model.layout import Block
from rsmq.model.log_throttle import ThrottledLog
from rsmq.model.message import JSON, LARGEST_PAYLOAD, entry_fields, read_headers
from rsmq.model.own_tasks import own_tasks
from rsmq.redis.client.raw_connection import ShardedConnection, pack
from rsmq.redis.leadership import RENEW, Leadership
from rsmq.redis.outboxes import CountedOutbox, report_outbox
from rsmq.redis.scripts import OK, RELAY_ROWS, Value
from rsmq.redis.server_context import RowActions, ServerContext
from rsmq.redis.streams import server_now_ms, trim
from rsmq.redis.topics import Topic, cached_topic, lookup_topic
from rsmq.sql.database import Database
from rsmq.sql.deployment import DatabaseClaim
from rsmq.sql.listener import CommitListener
from rsmq.sql.row_options import CANCEL, NO_OPTIONS, RowOptions
from rsmq.sql.status import OutboxStatus, as_utc, read_status, read_strangers
from rsmq.sql.tables import OUTBOX

log = logging.getLogger("rsmq.outbox")

MOST_ROWS: Final = 2000
FIRST_ROWS: Final = 100
MOST_BYTES: Final = 16 << 20
MOST_IN_CALL: Final = 500
BYTES: Final = bytes | bytearray | memoryview
"""What drivers give for a payload."""
STATUS_SECONDS: Final = 5.0
STRANGE_SECONDS: Final = 10.0
"""Rows of another prefix that have waited so long are named in the log: perhaps no worker has that prefix."""
FULL_SECONDS: Final = 1.0
"""Between two attempts on a topic that has no room."""

Row = Any
TopicPartition = tuple[str, int]
"""Topic and partition."""


DELETE_ANY: Final = delete(OUTBOX).where(OUTBOX.c.seq == any_(bindparam("seqs", type_=ARRAY(BigInteger))))


COLUMNS: Final = (
    "seq", "id", "aggregatetype", "aggregateid", "type", "payload", "headers", "band", "enc", "due_ms", "options"
)  # fmt: skip
SEQ, ID, TOPIC, KEY, OPTIONS = map(COLUMNS.index, ("seq", "id", "aggregatetype", "aggregateid", "options"))
PAYLOAD: Final = COLUMNS.index("payload")
WAITING: Final = select(
    *(type_coerce(OUTBOX.c[name], NullType) for name in COLUMNS),
    type_coerce(OUTBOX.c.created_at, NullType),
    type_coerce(func.current_timestamp(), NullType),
).where(OUTBOX.c.error.is_(None))
"""As the driver has read them: what another program has written into SQLite may be of any type."""


def due_of(due_ms: Any, created_at: Any, now: Any, *, is_coarse: bool) -> Any:
    """When the server is to deliver a row: `+` and the ms that are left of a delay, below 0 when it is overdue, or the
    moment that the row has.

    How long the row has waited is the difference of two times of the database, and the server counts the rest by its
    own clock: no two clocks meet. Raises ValueError for a row that another program has spoiled.
    """
    if not isinstance(due_ms, int) or due_ms >= 0:
        return due_ms
    return f"+{-due_ms - waited_ms(created_at, now, is_coarse=is_coarse)}"


def waited_ms(created_at: Any, now: Any, *, is_coarse: bool) -> int:
    """How long a row has waited, at most what the clock of the database can tell. Raises ValueError."""
    if not all(isinstance(each, datetime | str) for each in (created_at, now)):
        raise ValueError(f"created_at is {created_at!r}, which is no time")
    return max(0, round((as_utc(now) - as_utc(created_at)).total_seconds() * 1000) - 1000 * is_coarse)


def is_apart(row: Row) -> bool:
    """Whether a row is no plain message: it cancels one, or has a unique name."""
    topic, options = row[TOPIC], row[OPTIONS]
    return (isinstance(topic, str) and topic.startswith(CANCEL)) or (options is not None and '"unique"' in str(options))


def id_in(row: Row) -> str:
    """The id of a row's message, or of the message that it cancels. Raises ValueError."""
    options = RowOptions.read(row[OPTIONS])
    return options.cancel or options.message_id or str(id_of(row[ID]))


def parts_of(rows: Sequence[Row]) -> tuple[list[list[Row]], frozenset[int]]:
    """Runs of plain rows, with each other one by itself between them; and the numbers of rows whose message a later row
    of the page cancels."""
    if not any(row[OPTIONS] is not None or is_apart(row) for row in rows):
        return [list(rows)], frozenset()
    cancels, withdrawn, parts = dict[tuple[str, str], int](), set[int](), [list[Row]()]
    for row in rows:
        with suppress(ValueError):
            if isinstance(row[TOPIC], str) and row[TOPIC].startswith(CANCEL):
                cancels[row[TOPIC].removeprefix(CANCEL), id_in(row)] = row[SEQ]
    for row in rows:
        is_withdrawn = False
        with suppress(ValueError):
            is_withdrawn = not is_apart(row) and cancels.get((row[TOPIC], id_in(row)), 0) > row[SEQ]
        if is_withdrawn:
            withdrawn.add(row[SEQ])
        if is_withdrawn or is_apart(row):
            parts += ([row], [])
        else:
            parts[-1].append(row)
    return [part for part in parts if part], frozenset(withdrawn)


@dataclass(frozen=True, slots=True)
class OutboxRow:
    """A row as the arguments of the script: its id, when it is due, the fields of its entry. `dedups`: where a given
    message id is remembered."""

    seq: int
    id: bytes
    args: list[Value] = field(repr=False)
    dedups: tuple[str, ...] = ()


@dataclass(slots=True, eq=False)
class RelayBatch:
    """The rows for one partition, of which the first `stored` are in their stream. `names`: the keys of the script.
    `before`: the ids of rows that were stored before a resize, in the partitions that this one follows; `earlier` are
    the rows of the page that are among them."""

    topic: Topic
    partition: TopicPartition
    names: list[str]
    before: frozenset[bytes] = frozenset()
    earlier: list[int] = field(default_factory=list)
    entries: list[OutboxRow] = field(default_factory=list)
    stored: int = 0
    has_made_room: bool = False
    replicas: int = 0


@dataclass(slots=True)
class RelayedRows:
    """What became of a page: rows that leave the table, ids that their scripts remember, and rows that cannot go."""

    done: list[int] = field(default_factory=list)
    messages: int = 0
    ids: dict[TopicPartition, set[bytes]] = field(default_factory=dict)
    refused: list[tuple[int, str]] = field(default_factory=list)


class Stale(Exception):
    """Another member leads by now."""


class OutboxRelay:
    """Relays the rows of one outbox while this member leads.

    Invariants. A row is appended once: the script that appends it remembers its id until a later call says that the row
    is deleted, and refuses calls of an earlier leader. A row leaves the table only when the server has confirmed it.
    Order: of two rows, where one was inserted after the transaction of the other had committed, the earlier one comes
    first. So messages of a key keep their order if their transactions lock something of that key before they publish.
    With `replicas` a row leaves the table when so many of them have its message, too.
    """

    def __init__(
        self, database: Database, context: ServerContext, poll: timedelta, channel: str | None, replicas: int = 0
    ) -> None:
        self._database, self._context = database, context
        self._poll = poll.total_seconds()
        self._listener = CommitListener(database, channel)
        self._claim = DatabaseClaim(database)
        self._name = ""
        self._turn = 0
        self._limit = FIRST_ROWS
        self._connection = ShardedConnection(context.client, replicas)
        self._replicas = replicas
        self._window_ms = to_ms(context.settings.dedup_window)
        self._deleted: dict[TopicPartition, set[bytes]] = {}
        self._before = dict[TopicPartition, frozenset[bytes]]()
        self._full: dict[str, float] = {}
        self._bodies = dict[int, Body]()
        """Of rows that are relayed, or wait for room: what was put into the store, by their numbers."""
        self._throttled = ThrottledLog(log)
        self.relayed = 0
        """Rows that were moved into their topics by this process."""
        self._page_ms: int | None = None
        self.kept_out = 0
        """Rows whose message was not stored, because another one keeps its unique name."""
        self.is_leading = False
        self.status: OutboxStatus | None = None
        """What waits, as this member has last counted it; None while it does not lead."""
        self._has_coarse_clock = database.dialect != "postgresql"
        """Whether the database notes whole seconds: a delay must not end early."""
        self._counted = 0.0
        self._strange = set[str]()
        """Other prefixes whose rows wait for long, which the log has named."""

    async def run(self) -> None:
        """Until cancelled. Raises errors of the database or the server; it can be run again then."""
        self._name = await self._database.identity()
        leadership = Leadership(self._context, f"outbox.{self._name}")
        async with own_tasks() as tasks:
            tasks.start_soon(self._listener.run)
            try:
                await self._lead(leadership)
            finally:
                self.is_leading = False
                self.status = None
                with anyio.CancelScope(shield=True), anyio.move_on_after(2):
                    await self._connection.close()
                    await leadership.release()

    async def _lead(self, leadership: Leadership) -> None:
        epoch, waits = 0, False
        while True:
            seconds = await leadership.bid()
            if bool(seconds) != waits:
                waits = not waits
                log.debug("%s %s", self._context.member, "waits: another worker relays" if waits else "relays")
            if seconds:
                self.is_leading = False
                self._listener.is_wanted = False
                self.status = None
                await anyio.sleep(seconds)
                continue
            if leadership.epoch != epoch:
                epoch = leadership.epoch
                self._deleted.clear()
                self._bodies.clear()
                log.info("%s relays the outbox of %r", self._context.member, self._database)
            await self._claim.keep(self._context)
            self.is_leading = True
            self._listener.is_wanted = True
            self._listener.news.clear()
            if self.status is None or time.monotonic() - self._counted > STATUS_SECONDS:
                await self._count()
            try:
                count = await self.relay_once(epoch)
            except Stale:
                leadership.epoch = 0
                continue
            if not count:
                with anyio.move_on_after(min(RENEW, self._pause())):
                    await self._listener.news.wait()

    async def _count(self) -> None:
        """Note the rows that wait, for metrics and dashboards."""
        prefix = self._context.keys.prefix
        self.status = found = await self._database.run(lambda connection: read_status(connection, prefix))
        strangers = await self._database.run(lambda connection: read_strangers(connection, prefix))
        self._warn_of(strangers)
        self._counted = time.monotonic()
        name, member = self._database.sync_engine.url.database or "", self._context.member
        counted = CountedOutbox(name, found.backlog, found.age_seconds, found.refused, member)
        await report_outbox(self._context.client, self._context.keys, self._name, counted)

    def _warn_of(self, strangers: dict[str, tuple[int, float]]) -> None:
        """Name each other prefix whose rows wait for long, once: such rows show in no count of this deployment."""
        late = {prefix: found for prefix, found in strangers.items() if found[1] >= STRANGE_SECONDS}
        for prefix in sorted(late.keys() - self._strange):
            count, seconds = late[prefix]
            log.warning(
                "%d rows of the outbox of %r belong to the prefix %r and have waited for up to %.0f s; this worker has "
                "the prefix %r and leaves them alone: start workers with RSMQ_PREFIX=%s, or give the program that "
                "writes them the prefix of its workers (RSMQ_PREFIX, or Outbox(engine, prefix=...))",
                count, self._database, prefix, seconds, self._context.keys.prefix, prefix,
            )  # fmt: skip
        self._strange = set(late)

    def _pause(self) -> float:
        return RENEW if self._listener.is_listening else self._poll

    async def relay_once(self, epoch: int) -> int:
        """Move one batch of rows; returns how many left the table."""
        rows = await self._database.read(self._read)
        if not rows:
            return 0
        size = sum(len(row[PAYLOAD]) for row in rows if isinstance(row[PAYLOAD], bytes))
        self._limit = max(1, min(MOST_ROWS, self._limit * 10, MOST_BYTES * len(rows) // max(1, size)))
        relayed, self._page_ms = RelayedRows(), None
        parts, withdrawn = parts_of(rows)
        await self._put_bodies([row for row in rows if row[SEQ] not in withdrawn])
        try:
            for part in parts:
                if is_apart(part[0]) or part[0][SEQ] in withdrawn:
                    await self._relay_apart(epoch, part[0], relayed)
                else:
                    await self._relay_plain(epoch, part, relayed)
            await self._keep_bodies(relayed.done)
        finally:  # also if the server has failed in between: what it has confirmed need not be asked for again
            with anyio.CancelScope(shield=True):
                await self._remove(relayed.done, relayed.refused)
            for partition, ids in relayed.ids.items():
                self._deleted.setdefault(partition, set()).update(ids)
            self.relayed += relayed.messages
            for seq in (*relayed.done, *[seq for seq, _ in relayed.refused]):
                self._bodies.pop(seq, None)
            self._bodies = {seq: body.holding(b"") for seq, body in self._bodies.items()}
        return len(relayed.done) + len(relayed.refused)

    async def _put_bodies(self, rows: Sequence[Row]) -> None:
        """Put what is large into the store before an entry names it. While the store is away, all rows of such a topic
        wait: none overtakes."""
        above = None if self._context.actions is None else self._context.actions.above
        if above is not None:
            large = [row for row in rows if isinstance(row[PAYLOAD], BYTES) and len(row[PAYLOAD]) > above]
            puts = [self._put_body(row) for row in large if row[TOPIC] not in self._full]
            failed = [each for each in await asyncio.gather(*puts, return_exceptions=True) if each is not None]
            if failed:
                raise failed[0]

    async def _put_body(self, row: Row) -> None:
        body, payload = self._bodies.get(row[SEQ]), bytes(row[PAYLOAD])
        if body is not None and body.is_fresh:
            self._bodies[row[SEQ]] = body.holding(payload)
            return
        with suppress(ConfigError, ValueError):  # it is refused when its turn comes
            topic = check_name("topic", row[TOPIC])
            try:
                self._bodies[row[SEQ]] = await self._actions.offload(topic, id_in(row), payload)
            except StoreUnavailable as error:
                self._throttled.warn(f"rows of the outbox for {topic} wait for the store of their bodies", error)
                self._full[topic] = time.monotonic() + FULL_SECONDS

    async def _keep_bodies(self, done: Sequence[int]) -> None:
        """This process may have stood still between a put and its entry, for so long that a sweep has come between."""
        for body in [self._bodies[seq] for seq in done if seq in self._bodies]:
            while not body.is_fresh:
                try:
                    await self._actions.keep_body(body)
                    break
                except StoreUnavailable as error:
                    self._throttled.warn(
                        f"rows of the outbox for {body.topic} wait for the store of their bodies", error
                    )
                    await anyio.sleep(FULL_SECONDS)

    async def _relay_plain(self, epoch: int, rows: Sequence[Row], relayed: RelayedRows) -> None:
        """Append messages without a unique name, many at once."""
        batches, refused = await self._by_partition(rows)
        relayed.refused += refused
        try:
            await self._append(epoch, list(batches.values()))
        finally:
            for batch in batches.values():
                stored = batch.entries[: batch.stored]
                relayed.done += [*batch.earlier, *[entry.seq for entry in stored]]
                relayed.messages += len(stored)
                relayed.ids.setdefault(batch.partition, set()).update(entry.id for entry in stored)

    async def _relay_apart(self, epoch: int, row: Row, relayed: RelayedRows) -> None:
        """One row that cancels a message, is cancelled itself, or has a unique name. It waits while its topic is full:
        it must not overtake."""
        topic = str(row[TOPIC]).removeprefix(CANCEL)
        if topic in self._full:
            return
        try:
            options = RowOptions.read(row[OPTIONS])
            if str(row[TOPIC]).startswith(CANCEL):
                await self._actions.cancel(id_in(row), check_name("topic", topic), row[KEY])
            elif options.unique is not None:
                relayed.messages += await self._publish_unique(row, options)
            else:
                relayed.messages += await self._withdraw(epoch, row)
        except TopicFull as error:
            log.warning("%s: its rows wait in the outbox", error)
            self._full[topic] = time.monotonic() + FULL_SECONDS
            return
        except (ConfigError, MessageError, ValueError) as error:
            relayed.refused.append((row[SEQ], str(error)))
            return
        relayed.done.append(row[SEQ])

    async def _publish_unique(self, row: Row, options: RowOptions) -> bool:
        """Store a message with a unique name. False: another message keeps it."""
        seq, row_id, topic, key, kind, payload, headers, band, enc, due_ms, _, created_at, now = row
        waited = waited_ms(created_at, now, is_coarse=self._has_coarse_clock)
        due = due_of(due_ms, created_at, now, is_coarse=self._has_coarse_clock)
        if isinstance(due, str):
            due = f"+{max(0, int(due[1:]))}"
        name, message_id = options.name(waited), options.message_id or str(id_of(row_id))
        fields_of(message_id, key, kind, payload, headers)  # raises for what no reader can decode
        expiry, body = options.fields(waited, await self._server_ms(options)), self._bodies.get(seq)
        data, extra = stored_form(bytes(payload), enc, body, expiry)
        assert name is not None
        message = EncodedMessage(
            check_name("topic", topic), data, kind or JSON, message_id, name.name if key is None else key,
            read_headers(headers.encode()) if headers else None, extra, "" if due is None else str(due), band,
            max(self._replicas, options.wait_replicas),
        )  # fmt: skip
        is_stored = await self._actions.publish_unique(message, name)
        if not is_stored:
            self.kept_out += 1
            log.info("row %d of the outbox is not stored: another message has the unique name %r", seq, name.name)
        return is_stored

    async def _withdraw(self, epoch: int, row: Row) -> bool:
        """A later row cancels this message, so it is not sent: after this no call of an earlier relay can send it
        either. True: an earlier relay has sent it, and died before its row was deleted."""
        batches, refused = await self._by_partition([row])
        if refused:
            return False
        ((_, batch),) = batches.items()
        if batch.earlier:
            return True
        (entry,) = batch.entries
        batch.entries = []
        (reply,) = await self._connection.exchange([(batch.names[0], self._call(epoch, batch))])
        if isinstance(reply, Exception):
            raise reply
        if reply[0] != OK:
            raise Stale
        self._deleted.pop(batch.partition, None)
        known = reply[3]
        return entry.id in {known[at : at + 16] for at in range(0, len(known), 16)}

    @property
    def _actions(self) -> RowActions:
        if self._context.actions is None:
            raise ConfigError("cancels and unique names need the worker of a broker")
        return self._context.actions

    async def _server_ms(self, options: RowOptions) -> int:
        """The server's time, if the row has a duration that becomes a moment."""
        if options.expires is None or not options.expires.startswith("+"):
            return 0
        if self._page_ms is None:  # how long the rows have waited is of that moment, too
            self._page_ms = await server_now_ms(self._context.client)
        return self._page_ms

    async def _by_partition(
        self, rows: Sequence[Row]
    ) -> tuple[dict[TopicPartition, RelayBatch], list[tuple[int, str]]]:
        """The rows as arguments of the script, for each partition, and those that can never be published, with why."""
        batches, refused, topics = dict[TopicPartition, RelayBatch](), list[tuple[int, str]](), dict[str, Topic]()
        for seq, row_id, name, key, kind, payload, headers, band, enc, due_ms, more, created_at, now in rows:
            if name in self._full:  # since this page was read
                continue
            try:
                options = NO_OPTIONS if more is None else RowOptions.read(more)
                due = "" if due_ms is None else due_of(due_ms, created_at, now, is_coarse=self._has_coarse_clock)
                own = id_of(row_id)
                topic = topics.get(name)
                if topic is None:
                    topic = topics[name] = await self._topic(name)
                message_id = options.message_id or str(own)
                waited = 0 if more is None else waited_ms(created_at, now, is_coarse=self._has_coarse_clock)
                extra = () if more is None else options.fields(waited, await self._server_ms(options))
                fields = fields_of(message_id, key, kind, payload, headers, enc, extra, self._bodies.get(seq))
                partition = name, (await self._block(topic, band)).partition_for(message_id if key is None else key)
            except (ConfigError, MessageError, ValueError) as error:
                refused.append((seq, str(error)))
                continue
            batch = batches.get(partition)
            if batch is None:
                keys = self._context.keys
                before = await self._stored_before(topic, partition[1])
                names = [part(*partition) for part in (keys.stream, keys.delayed, keys.relayed, keys.unique)]
                batch = batches[partition] = RelayBatch(topic, partition, names, before)
            if own.bytes in batch.before:
                batch.earlier.append(seq)
                continue
            batch.replicas = max(batch.replicas, options.wait_replicas)
            dedups = () if options.message_id is None else self._dedups(topic, partition[1], message_id)
            batch.entries.append(OutboxRow(seq, own.bytes, [own.bytes, due, len(fields), *fields], dedups))
        return batches, refused

    def _dedups(self, topic: Topic, partition: int, message_id: str) -> tuple[str, ...]:
        """Where a publish with this id would look for it: on one server also in the partition of the id, see `Once`."""
        partitions = {topic.layout.root_of(partition) if topic.layout.is_resized else partition: None}
        if not self._context.client.is_cluster:
            partitions[topic.layout.normal.partition_for(message_id)] = None
        return tuple(self._context.keys.dedup(topic.name, each, message_id) for each in partitions)

    async def _block(self, topic: Topic, band: str | None) -> Block:
        """The partitions of a row. Raises ConfigError for a band that the topic does not have, read again."""
        if band is not None and band not in topic.layout.bands:
            topic = await self._context.topics.find(topic.name) or topic
        return topic.open_block(band)

    async def _topic(self, name: str) -> Topic:
        check_name("topic", name)
        return cached_topic(self._context.topics, name) or await lookup_topic(self._context.topics, name)

    def _read(self, connection: Connection) -> Sequence[Row]:
        """The oldest rows that can be seen, without those of a full topic.

        A row that was inserted later than another one had committed has a higher number: a query that sees it sees the
        other one, too. So there is no need to wait for older transactions that still run.
        """
        now = time.monotonic()
        self._full = {topic: until for topic, until in self._full.items() if until > now}
        query = WAITING.where(OUTBOX.c.deployment == self._context.keys.prefix)
        if self._full:
            full = sorted(self._full)
            query = query.where(OUTBOX.c.aggregatetype.not_in([*full, *[CANCEL + topic for topic in full]]))
        return connection.execute(query.order_by(OUTBOX.c.seq).limit(self._limit)).all()

    async def _append(self, epoch: int, batches: list[RelayBatch]) -> None:
        """Append the rows of all partitions, in order, as far as there is room. The calls of a round share a write."""
        while waiting := [batch for batch in batches if batch.stored < len(batch.entries)]:
            self._connection.wait_for(max(self._replicas, *[batch.replicas for batch in waiting]))
            replies = await self._connection.exchange([(batch.names[0], self._call(epoch, batch)) for batch in waiting])
            for batch, reply in zip(waiting, replies, strict=True):
                if isinstance(reply, Exception):
                    continue
                if reply[0] not in (OK, b"FULL"):
                    raise Stale
                if reply[4:]:
                    log.warning("another client has written into %s: rows may come twice", batch.names[2])
                batch.stored += reply[1] + reply[2]
                self._deleted.pop(batch.partition, None)
                await self._forget_strangers(batch, reply[3])
                if reply[0] == b"FULL" and (batch.has_made_room or not await self._make_room(batch)):
                    log.warning("%s.%d is full: its rows wait in the outbox", *batch.partition)
                    self._full[batch.topic.name] = time.monotonic() + FULL_SECONDS
                    await self._context.topics.find(batch.topic.name)  # its limit may be another by now
                    batches.remove(batch)
                batch.has_made_room = reply[0] == b"FULL"
            failure = next((reply for reply in replies if isinstance(reply, Exception)), None)
            if failure is not None:
                if isinstance(failure, PartitionSealed):  # the next round stores them in the partitions that follow
                    for name in {batch.topic.name for batch in waiting}:
                        await self._context.topics.find(name)
                raise failure

    async def _stored_before(self, topic: Topic, partition: int) -> frozenset[bytes]:
        """The ids of rows that a relay has appended to the partitions that this one follows in a resize, and that may
        not be deleted yet. These are sealed, so nothing is added to them any more."""
        if not topic.layout.is_resized:
            return frozenset()
        at = topic.name, partition
        if at not in self._before:
            found = set[bytes]()
            for each in topic.layout.ancestors_of(partition):
                relayed = self._context.keys.relayed(topic.name, each)
                rows = await self._context.client.execute_command("HGET", relayed, f"rows|{self._name}") or b""
                found |= {bytes(rows[first : first + 16]) for first in range(0, len(rows), 16)}
            self._before[at] = frozenset(found)
        return self._before[at]

    def _call(self, epoch: int, batch: RelayBatch) -> bytes:
        """One call of the script, packed: the next rows of a partition."""
        self._turn += 1
        turn, deleted = f"{epoch:016d}{self._turn:016d}", b"".join(self._deleted.get(batch.partition, ()))
        args: list[Value] = [self._name, turn, batch.topic.max_length, batch.topic.on_full, deleted]
        names = batch.names
        for entry in batch.entries[batch.stored : batch.stored + MOST_IN_CALL]:
            args += entry.args
            if entry.dedups:  # the third argument also says where its id is remembered
                at = len(args) - len(entry.args) + 2
                args[at] = f"{(len(entry.args) - 3)} {len(names) + 1} {len(entry.dedups)} {self._window_ms}"
                names = [*names, *entry.dedups]
        return pack(RELAY_ROWS.command(names, args))

    async def _forget_strangers(self, batch: RelayBatch, known: bytes) -> None:
        """Ids that the server remembers, but which are not of this batch: an earlier relay has appended these rows, and
        died before it could say that they are deleted. Those still in the table are skipped when their turn comes."""
        ours = {entry.id for entry in batch.entries}
        strange = {known[at : at + 16] for at in range(0, len(known), 16)} - ours
        if strange:
            ids = [uuid.UUID(bytes=each) for each in strange]
            there = await self._database.run(lambda connection: ids_there(connection, ids))
            self._deleted.setdefault(batch.partition, set()).update(strange - there)

    async def _make_room(self, batch: RelayBatch) -> bool:
        """Remove settled entries that are kept only for a replay."""
        with suppress(BrokerError, ConfigError):
            _, removed, *_ = await trim(
                self._context.client, self._context.keys, *batch.partition, keep_age_ms=0, keep_length=0, exact=True,
            )  # fmt: skip
            return bool(removed)
        return False

    async def _remove(self, done: Sequence[int], refused: Sequence[tuple[int, str]]) -> None:
        """Delete what is appended, and mark what can never be."""
        for seq, error in refused:
            log.error("row %d of the outbox cannot be published: %s", seq, error)

        def remove(connection: Connection) -> None:
            for at in range(0, len(done), MOST_ROWS):
                delete_rows(connection, list(done[at : at + MOST_ROWS]))
            for seq, error in refused:
                connection.execute(update(OUTBOX).where(OUTBOX.c.seq == seq).values(error=error))

        if done or refused:
            await self._database.run(remove)

    def __repr__(self) -> str:
        return f"<OutboxRelay {self._database!r} {'leads' if self.is_leading else 'waits'} relayed={self.relayed}>"


def id_of(given: Any) -> uuid.UUID:
    """The id of a row. Raises ValueError for what is none."""
    return given if isinstance(given, uuid.UUID) else uuid.UUID(str(given))


def fields_of(
    message_id: str,
    key: str | None,
    content_type: str | None,
    payload: bytes,
    headers: str | None,
    enc: str | None = None,
    extra: Sequence[str] = (),
    body: Body | None = None,
) -> list[bytes | str]:
    """The fields of the stream entry. `body`: the payload is in the store. Raises for a row that no publisher of ours
    has written and none can read."""
    if not isinstance(payload, BYTES):
        raise ValueError(f"the payload is {type(payload).__name__}, not bytes: write a BLOB")
    if not isinstance(headers, str | None):
        raise ValueError(f"the headers are {type(headers).__name__}, not text")
    if len(payload) > LARGEST_PAYLOAD:
        raise Oversized(len(payload), LARGEST_PAYLOAD)
    read = read_headers(headers.encode()) if headers else None
    data, extra = stored_form(bytes(payload), enc, body, extra)
    return entry_fields(data, message_id, key, content_type or JSON, read, extra)


def stored_form(
    payload: bytes, enc: str | None, body: Body | None, extra: Sequence[str]
) -> tuple[bytes, tuple[str, ...]]:
    """What the entry has as `data`, and its further fields: those of the payload, or of its body in the store."""
    if body is None:
        return payload, ((*extra, "enc", str(enc)) if enc else tuple(extra))
    return body.digest, (*extra, *body.fields(str(enc) if enc else ""))


def delete_rows(connection: Connection, seqs: list[int]) -> None:
    """Delete rows by their numbers. A parameter for each would cost more than all the rest."""
    if connection.dialect.name == "postgresql":
        connection.execute(DELETE_ANY, {"seqs": seqs})
    else:
        connection.exec_driver_sql(f"DELETE FROM rsmq_outbox WHERE seq IN ({','.join(map(str, map(int, seqs)))})")


def ids_there(connection: Connection, ids: list[uuid.UUID]) -> set[bytes]:
    """Which of these rows are in the table."""
    found = set[bytes]()
    for at in range(0, len(ids), MOST_IN_CALL):
        part = ids[at : at + MOST_IN_CALL]
        found |= {each.bytes for each in connection.scalars(select(OUTBOX.c.id).where(OUTBOX.c.id.in_(part)))}
    return found
