"""The producer: encodes a message, chooses its partition and queue, and returns its id when it is stored."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from itertools import islice
from typing import Any, Final, Generic, TypeVar

import anyio
import anyio.abc

from rsmq.errors import OTHER_LOOP, BatchEnded, BrokerUnavailable, ConfigError, TooLarge, TopicFull
from rsmq.model.batch_member import BatchMember
from rsmq.model.body import Body, BodyFolder
from rsmq.model.clock import ServerClock, monotonic, now_ms, to_ms
from rsmq.model.duration import Duration
from rsmq.model.encoded_message import EncodedMessage
from rsmq.model.encoding import NO_CODECS, Encoding
from rsmq.model.expiry import OnExpiry, expiry_fields
from rsmq.model.headers import LARGEST_HEADERS
from rsmq.model.kept_result import result_fields
from rsmq.model.keys import Keys
from rsmq.model.layout import Block
from rsmq.model.message import Message, encode_payload, entry_fields, message_id_at, new_message_id, same_expiry
from rsmq.model.message_ref import MessageRef
from rsmq.model.partition import not_unicode, partition_for
from rsmq.model.publish_options import (
    PublishOptions,
    check_message_id,
    check_replicas,
    check_size,
    due_time,
    refuse_single,
    refuse_unknown,
)
from rsmq.model.record import text
from rsmq.model.settings import Settings
from rsmq.model.unique import OnConflict, Unique, Until
from rsmq.model.words import suggestion
from rsmq.producer.batch import (
    MOST_BYTES,
    MOST_MESSAGES,
    Append,
    Batch,
    Delay,
    Encode,
    EntryEncoder,
    Members,
    MembersDelay,
    Once,
    Waiter,
    encode_member,
)
from rsmq.producer.bodies import BodyWriter
from rsmq.producer.claims import Claim, Claims
from rsmq.producer.in_doubt import InDoubtMessages
from rsmq.producer.output import Output
from rsmq.producer.publication import Preparation
from rsmq.producer.send_queue import SendQueue
from rsmq.producer.sender import Sender
from rsmq.redis.client.connector import Client
from rsmq.redis.scripts import COUNT_MEMBERS, OK
from rsmq.redis.streams import group_names
from rsmq.redis.topics import Topic, Topics, cached_topic, lookup_topic, make_known_topics, note_batches

LARGE: Final = 4096
"""Larger messages join a batch one by one, so that it does not become much larger than it may."""
MOST_PER_ROUND: Final = 1000
"""More in one write only fills socket buffers: 1 000 messages cost 2.6 us each, 4 000 cost 4."""
CLOCKS_DIFFER_MS: Final = 1000
"""From here on ids carry the server's time instead of this machine's."""
TIME_LASTS: Final = 60.0
"""Seconds for which a known time is good enough for an expiry: the server's clock may be set meanwhile."""
NOT_OPEN: Final = "the broker is not open: publish inside `async with broker:`"

T = TypeVar("T")

EncodedItem = tuple[str, str, Any, int, str]
"""The text that decides the partition of an item, its id, its entry, its size, and when it is due (see `due_time`)."""


@dataclass(frozen=True, slots=True)
class ItemTimes(Generic[T]):
    """When each item of `publish_many` is due, and when it expires. `kept`: the fields for its result."""

    delay: Duration | None
    at: datetime | Callable[[T], datetime] | None
    expires: Duration | datetime | None
    on_expiry: OnExpiry | None
    kept: tuple[str, ...]

    def of(self, item: T) -> tuple[Duration | None, datetime | None]:
        """The delay or the time of an item."""
        return self.delay, self.at(item) if callable(self.at) else self.at

    def expiry(self, due: str, server_ms: int) -> tuple[str, ...]:
        """The fields for the expiry of an item that is due then. Raises ConfigError if it is due later."""
        if self.expires is None and self.on_expiry is None:
            return ()
        return expiry_fields(self.expires, self.on_expiry, due, server_ms)


class Producer:
    """Publishes messages to topics. A returned id means that the message is stored; an error says what happened.

    Calls made at the same time share one write. Messages with the same key are stored in the order of the calls, as
    long as they ask for the same number of replicas.
    """

    def __init__(
        self, client: Client, keys: Keys, settings: Settings, topics: Topics, encoding: Encoding | None = None
    ) -> None:
        self._client = client
        self._keys = keys
        self._settings = settings
        self._topics = topics
        self._limit = int(settings.payload_limit)
        self._in_doubt = InDoubtMessages()
        self._queues: dict[int, SendQueue] = {}
        self._senders: list[Sender] = []
        self._tasks: anyio.abc.TaskGroup | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._streams: dict[str, dict[int, str]] = {}
        self.keys = keys
        self.window_ms = to_ms(settings.dedup_window)
        self.outputs = Counter[str]()
        """Outputs of handlers that the server has stored, by topic."""
        self._clock = ServerClock()
        self._time_known_until = 0.0
        self._new_id = new_message_id
        self.prepare: Preparation | None = None
        """Completes or refuses each message before it is encoded: see `Broker.before_publish`."""
        self.encoding: Encoding | None = None
        """Compresses and encrypts payloads; None: they are stored as they are."""
        self._bodies: BodyWriter | None = None
        self.encode_by(encoding)

    def encode_by(self, encoding: Encoding | None) -> None:
        """Before it is used: the codecs, and the store for large payloads."""
        self.encoding = encoding
        bodies = None if encoding is None else encoding.bodies
        self._bodies = None if bodies is None else BodyWriter(bodies, self._client, self._keys, self._limit)

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Send messages until cancelled. Calls still waiting then raise BrokerUnavailable or PublishUnknown."""
        try:
            async with anyio.create_task_group() as tasks:
                self._tasks = tasks
                self._loop = asyncio.get_running_loop()
                task_status.started()
                await anyio.sleep_forever()
        finally:
            self._tasks = None
            self._loop = None
            self._queues.clear()
            self._senders.clear()

    async def learn_time(self) -> None:
        """Ask for the server's time. Raises BrokerUnavailable.

        A message is looked for around the time in its id. Where this machine's clock is wrong, ids carry the server's.
        """
        asked = monotonic()
        seconds, micros = await self._client.execute_command("TIME")
        self._clock.saw(asked, int(seconds) + int(micros) / 1e6)
        self._time_known_until = asked + TIME_LASTS
        is_wrong = abs(self._clock.now_ms() - now_ms()) > CLOCKS_DIFFER_MS
        self._new_id = self._new_id_by_server if is_wrong else new_message_id

    def _new_id_by_server(self) -> str:
        return message_id_at(self._clock.now_ms())

    async def _expiry(
        self, expires: Duration | datetime | None, on_expiry: OnExpiry | None, due: str
    ) -> tuple[str, ...]:
        """The fields for `expires` and `on_expiry`. Of a delayed message they are a moment of the server's clock."""
        if due and isinstance(expires, str | timedelta) and monotonic() > self._time_known_until:
            await self.learn_time()
        return expiry_fields(expires, on_expiry, due, self._clock.now_ms())

    async def publish(
        self,
        topic: str,
        payload: Any,
        *,
        key: str | None = None,
        headers: Mapping[str, str] | None = None,
        delay: Duration | None = None,
        at: datetime | None = None,
        message_id: str | None = None,
        wait_replicas: int = 0,
        expires: Duration | datetime | None = None,
        on_expiry: OnExpiry | None = None,
        unique: str | None = None,
        until: Until | Duration | None = None,
        on_conflict: OnConflict | None = None,
        band: str | None = None,
        keep_result: Duration | None = None,
        **unknown: Any,
    ) -> MessageRef:
        """Store one message and return its id once the server, and `wait_replicas` replicas, have confirmed it.

        With `message_id` it is stored once, however often this is called within the dedup window. With `delay` or `at`
        it is delivered later. With `unique` the id is that of the message that has the name afterwards. Raises
        TooLarge, NotJson, TopicFull, BrokerUnavailable (nothing is stored) or PublishUnknown (publish it again with the
        id it carries). A cancelled call may have stored the message.

        `PublishOptions` describes the options. They are written out here, with their defaults, because this runs for
        each message.
        """
        if unknown:
            refuse_unknown("publish", unknown, PublishOptions.__annotations__)
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            raise ConfigError(NOT_OPEN if self._loop is None else OTHER_LOOP)
        is_delayed = delay is not None or at is not None
        kind: type[Batch] = Delay if is_delayed else Append if message_id is None else Once
        name = None
        if unique is not None or until is not None or on_conflict is not None:
            name = Unique.checked(unique, until, on_conflict, is_delayed=is_delayed)
            kind = Claims
            if key is None:  # a name lives in one partition
                key = name.name
        target = cached_topic(self._topics, topic) or await lookup_topic(self._topics, topic)
        if self.prepare is not None:
            headers = self.prepare(topic, payload, headers, key, delay, at, message_id, wait_replicas)
        due = due_time(delay, at) if is_delayed else ""
        extra = () if expires is None and on_expiry is None else await self._expiry(expires, on_expiry, due)
        if keep_result is not None:
            extra = (*extra, *result_fields(keep_result))
        folder = None if self._bodies is None else await self._bodies.folder(topic)
        identity, entry, size = self._encode(kind.encode, payload, key, headers, message_id, extra, folder)
        block = target.normal if band is None else await self._block(target, band)
        partition = block.numbers[partition_for(identity if key is None else key, block.count)]
        if folder is not None and self._bodies is not None:
            await self._bodies.put_in_turn(topic, key, folder.bodies)
        if name is not None:
            entry = Claim(entry, name, due, message_id is None or len(target.numbers) == 1)
        batch = self._queue(wait_replicas).batch(kind, target, partition, self._stream(target, partition))
        if isinstance(batch, Delay):
            batch.due.setdefault(identity, due)
        waiter: asyncio.Future[None] = loop.create_future()
        position = len(batch.ids)
        batch.add(identity, entry, size)
        batch.waiters.append(waiter)
        await waiter
        if folder is not None and self._bodies is not None:
            await self._bodies.keep(folder.bodies)
        if name is not None:
            return claimed(entry, identity, batch, key)
        ref = MessageRef(identity)
        ref.home = batch.home
        ref.key = key
        if message_id is not None:
            note_answer(ref, batch, position)
        return ref

    def add_member(self, topic: str, payload: Any, key: str | None, member: BatchMember) -> MemberOnWay | None:
        """Send a member of a batch that has no other option: await what is returned. None: that is not possible at
        once, so `output` makes it. Raises what `publish` raises before it writes."""
        target = cached_topic(self._topics, topic)
        if target is None or self.prepare is not None or self.encoding is not None or self._tasks is None:
            return None
        data, content_type = encode_payload(payload)
        identity = self._new_id()
        size = check_size(data, key, None, self._limit)
        try:
            entry = encode_member(data, identity, key, content_type, b"%b%d" % (member.block.packed, member.number))
        except UnicodeEncodeError:
            raise not_unicode(key) from None
        block = target.normal
        partition = block.numbers[partition_for(identity if key is None else key, block.count)]
        batch = self._queue(0).batch(Append, target, partition, self._stream(target, partition))
        ref = MessageRef(identity)
        ref.home = batch.home
        ref.key = key
        return MemberOnWay(batch, identity, ref, entry, size, member)

    def add_output(self, output: Output, lifetime_ms: int, *, is_again: bool = False) -> MemberOnWay:
        """Send a member of a batch, as `output` has made it: await what is returned.

        `lifetime_ms`: so long a given id is remembered. `is_again`: an earlier call may have stored it.
        """
        kind: type[Batch] = MembersDelay if output.due else Members if output.is_once or is_again else Append
        stream = self._stream(output.target, output.partition)
        batch = self._queue(0).batch(kind, output.target, output.partition, stream)
        if isinstance(batch, MembersDelay):
            batch.due.setdefault(output.message_id, output.due)
        if isinstance(batch, Members):
            batch.lifetimes[output.message_id] = lifetime_ms
        return OutputOnWay(batch, output, kind.pack(list(output.fields)), is_again=is_again)

    async def admit_batch(self, home: str, group: str, topic: str) -> None:
        """Let a batch have members in a topic. Raises ConfigError if its group is none of the topic's, or if a full
        topic would drop members, and BatchEnded."""
        found = cached_topic(self._topics, topic) or await lookup_topic(self._topics, topic)
        topic = found.name
        groups = await group_names(self._client, self.keys, topic, found.numbers[0])
        if group not in groups:
            raise ConfigError(
                f"topic {topic!r} has no group {group!r}, which is to handle the members of the batch: "
                f"{suggestion(group, groups, 'groups') or 'start a worker with its handler first'}"
            )
        if found.max_length and found.on_full == "trim":
            raise ConfigError(
                f"topic {topic!r} drops messages when it is full, and a batch would wait for them until it expires: "
                f"use a topic with on_full=reject"
            )
        await note_batches(self._topics, topic)
        if await COUNT_MEMBERS(self._client, self.keys.batch_counts(home), (home, "topic", topic)) != OK:
            name = await self._client.execute_command("HGET", self.keys.batch_state(home), "name")
            raise BatchEnded(home if name is None else text(name))

    async def output(
        self,
        topic: str,
        payload: Any,
        *,
        key: str | None = None,
        headers: Mapping[str, str] | None = None,
        delay: Duration | None = None,
        at: datetime | None = None,
        message_id: str | None = None,
        expires: Duration | datetime | None = None,
        on_expiry: OnExpiry | None = None,
        band: str | None = None,
        keep_result: Duration | None = None,
        member: BatchMember | None = None,
    ) -> Output:
        """One message, checked and encoded, that a settlement stores later. Raises what `publish` raises before it
        writes. Calls with one key return in their order, whatever the store of their bodies does."""
        target = cached_topic(self._topics, topic) or await lookup_topic(self._topics, topic)
        if self.prepare is not None:
            headers = self.prepare(topic, payload, headers, key, delay, at, message_id)
        due = due_time(delay, at)
        extra = () if expires is None and on_expiry is None else await self._expiry(expires, on_expiry, due)
        if keep_result is not None:
            extra = (*extra, *result_fields(keep_result))
        if member is not None:
            extra = (*extra, "batch", member.field)
        folder = None if self._bodies is None else await self._bodies.folder(topic)
        identity, fields, size = self._encode(entry_fields, payload, key, headers, message_id, extra, folder)
        block = target.normal if band is None else await self._block(target, band)
        partition = block.numbers[partition_for(identity if key is None else key, block.count)]
        encoding, body = self.encoding or NO_CODECS, None
        if folder is not None and self._bodies is not None:
            await self._bodies.put_in_turn(topic, key, folder.bodies)
            body = next(iter(folder.bodies), None)
        is_once = message_id is not None
        return Output(
            target, partition, identity, fields, size, due, is_once, encoding=encoding, body=body, member=member
        )  # fmt: skip

    async def _stored_body(self, folder: BodyFolder | None) -> Body | None:
        """The body of the one message that was encoded with this folder, in its store. Raises StoreUnavailable."""
        if folder is None or self._bodies is None or not folder.bodies:
            return None
        await self._bodies.put(folder.bodies)
        return folder.bodies[0]

    @property
    def above(self) -> int | None:
        """A message whose stored form has more bytes has its body in the store; None: there is no store."""
        return None if self._bodies is None else self._bodies.above

    async def offload(self, topic: str, message_id: str, data: bytes) -> Body:
        """Put the stored form of a message into the store. Raises StoreUnavailable, and ConfigError without a store."""
        if self._bodies is None:
            raise ConfigError("this producer has no store of bodies: give its broker offload=Offload(...)")
        folder = await self._bodies.folder(topic)
        body = folder.take(message_id, data)
        await self._bodies.put(folder.take_all())
        return body

    async def stored_form(
        self,
        topic: str,
        data: bytes,
        message_id: str,
        key: str | None,
        content_type: str,
        extra: tuple[str, ...],
        *,
        is_plain: bool = False,
    ) -> tuple[bytes, tuple[str, ...], Body | None]:
        """What is stored for a payload, the further fields of its entry, and its body if that is in the store now.
        `is_plain`: it is neither compressed nor encrypted. Raises TooLarge, and StoreUnavailable."""
        if self.encoding is None:
            return data, extra, None
        folder = None if self._bodies is None else await self._bodies.folder(topic)
        encoding = self.encoding.without_codecs() if is_plain else self.encoding
        data, extra = encoding.extend(data, message_id, key, content_type, extra, folder)
        return data, extra, await self._stored_body(folder)

    async def keep_body(self, body: Body) -> None:
        """After the entry is stored: a body that was put too long before is looked for, and put again if it was swept.
        Raises StoreUnavailable."""
        if self._bodies is not None:
            await self._bodies.keep([body])

    async def refreshed(self, output: Output) -> Output | None:
        """The output under a new name of its body, if that was put so long ago that no entry may name it any more.
        Raises StoreUnavailable."""
        if output.body is None or self._bodies is None:
            return None
        body = await self._bodies.renewed(output.body)
        return None if body is None else output.with_body(body)

    async def claim(self, message: EncodedMessage, name: Unique) -> MessageRef:
        """Store a message with a unique name as `publish` does, and return its ref."""
        topic, data, kind, message_id, key, headers, extra, due, band, wait_replicas = message
        target = cached_topic(self._topics, topic) or await lookup_topic(self._topics, topic)
        block = target.normal if band is None else await self._block(target, band)
        fields = Claims.encode(data, message_id, key, kind, headers, extra)
        entry = Claim(fields, name, due, len(target.numbers) == 1)
        partition = block.numbers[partition_for(key, block.count)]
        batch = self._queue(wait_replicas).batch(Claims, target, partition, self._stream(target, partition))
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        batch.add(message_id, entry, sum(map(len, fields)))
        batch.waiters.append(waiter)
        await waiter
        return claimed(entry, message_id, batch, key)

    async def moved(
        self,
        message: Message,
        topic: str,
        headers: Mapping[str, str],
        band: str,
        *payload: Any,
        member: BatchMember | None = None,
    ) -> Output:
        """A message for another topic, that a settlement stores later: its bytes and content type, or another payload;
        its key, its moment of expiry, and its band where the topic has one of that name. Its id is new.

        Raises what `publish` raises before it writes. Bytes that were stored once are not too large.
        """
        target = cached_topic(self._topics, topic) or await lookup_topic(self._topics, topic)
        key, data, kind = message.key, message.data, message.type
        if payload:
            data, kind = encode_payload(*payload)
            if self._bodies is None:
                check_size(data, key, None, self._limit)
        if self.prepare is not None:
            shown = payload[0] if payload else data if message.payload is None else message.payload
            headers = self.prepare(topic, shown, headers, key)
        identity, extra = self._new_id(), same_expiry(message)
        folder = None if self._bodies is None else await self._bodies.folder(topic)
        if member is not None:
            extra = (*extra, "batch", member.field)
        if self.encoding is not None:
            data, extra = self.encoding.extend(data, identity, key, kind, extra, folder)
        fields = entry_fields(data, identity, key, kind, headers, extra, LARGEST_HEADERS)
        block = target.open_block(band) if band in target.layout.bands else target.normal
        partition = block.numbers[partition_for(identity if key is None else key, block.count)]
        body = await self._stored_body(folder)
        return Output(target, partition, identity, fields, sum(map(len, fields)), "", is_once=False, body=body)

    def topic(self, output: Output) -> Topic:
        """The target of an output, with its present limits as far as this process knows them."""
        return cached_topic(self._topics, output.topic) or output.target

    async def read_topic(self, topic: str) -> Topic | None:
        """Read a topic again: its limits, or its partitions, may be others by now."""
        return await self._topics.find(topic)

    async def make_topics_again(self) -> None:
        """The server has lost everything: make the topics again that were used in the last seconds, as they were."""
        await make_known_topics(self._topics)

    def enqueue(
        self,
        target: Topic,
        payloads: Sequence[bytes],
        waiter: Waiter,
        encoder: EntryEncoder,
        message_id: str | None = None,
    ) -> Batch:
        """Queue messages of one key without a task of their own, and return the batch of the last one.

        `waiter` gets one result for each, in order. `message_id` is for a single one. For a process with many
        publishers, whose order of calls is the order of their messages. Raises TooLarge and ConfigError, and then
        queues nothing; everything else goes to the waiter.
        """
        if self.encoding is not None:
            return self._enqueue_encoded(target, payloads, waiter, encoder, message_id, self.encoding)
        largest = encoder.size + max(map(len, payloads))
        if largest > self._limit:
            raise TooLarge(largest, self._limit)
        block = target.normal
        partition = block.numbers[partition_for(encoder.key, block.count)]
        where, queue = (target, partition, self._stream(target, partition)), self._queue(0)
        if message_id is not None:
            (data,), identity = payloads, check_message_id(message_id)
            single = queue.batch(Once, *where)
            single.add(identity, encoder.fields(data, identity), largest)
            single.waiters.append(waiter)
            return single
        at = 0
        while True:
            batch = queue.batch(Append, *where)
            room = 1 if largest > LARGE else MOST_MESSAGES - len(batch.ids)
            chunk = payloads[at : at + room]
            at += len(chunk)
            batch.extend(chunk, encoder, waiter)
            if at >= len(payloads):
                return batch

    def _enqueue_encoded(
        self,
        target: Topic,
        payloads: Sequence[bytes],
        waiter: Waiter,
        encoder: EntryEncoder,
        message_id: str | None,
        encoding: Encoding,
    ) -> Batch:
        """`enqueue` for payloads that are compressed or encrypted, each with its id."""
        given = None if message_id is None else check_message_id(message_id)
        entries = [encoder.encoded(data, given or self._new_id(), encoding) for data in payloads]
        largest = max(size for _, _, size in entries)
        if largest > self._limit:
            raise TooLarge(largest, self._limit)
        partition = target.normal.partition_for(encoder.key)
        kind: type[Batch] = Append if given is None else Once
        for identity, fields, size in entries:
            batch = self._queue(0).batch(kind, target, partition, self._stream(target, partition))
            batch.add(identity, kind.pack(fields), size)
            batch.waiters.append(waiter)
        return batch

    async def publish_many(  # `ManyOptions` describes the options
        self,
        topic: str,
        items: Iterable[T],
        *,
        key: Callable[[T], str | None] | None = None,
        headers: Mapping[str, str] | Callable[[T], Mapping[str, str] | None] | None = None,
        message_id: Callable[[T], str] | None = None,
        batch: int = MOST_MESSAGES,
        expires: Duration | datetime | None = None,
        on_expiry: OnExpiry | None = None,
        band: str | None = None,
        delay: Duration | None = None,
        at: datetime | Callable[[T], datetime] | None = None,
        keep_result: Duration | None = None,
    ) -> list[Any]:
        """Store many messages, in order per key, and return their ids. `batch`: most of one partition in one write.

        The next round is encoded while one is on its way. On an error some of the messages may be stored: with
        `message_id` all of them can be published again, and each is stored once; then the ids are refs, which say
        whether they were there.
        """
        if not 1 <= batch <= MOST_MESSAGES:
            raise ConfigError(f"batch={batch} is not possible: use 1 to {MOST_MESSAGES} messages")
        refuse_single(items)
        target = cached_topic(self._topics, topic) or await lookup_topic(self._topics, topic)
        block = target.normal if band is None else await self._block(target, band)
        queue, ids, on_the_way = self._queue(0), list[Any](), list[asyncio.Future[None]]()
        is_delayed = delay is not None or at is not None
        kind: type[Batch] = Delay if is_delayed else Append if message_id is None else Once
        batches = list[Batch]()  # of each id, if it was given
        extra: tuple[str, ...] = ()
        if expires is not None or on_expiry is not None:
            extra = await self._expiry(expires, on_expiry, "+0" if is_delayed else "")
        kept = result_fields(keep_result)
        extra = (*extra, *kept)
        times = ItemTimes(delay, at, expires, on_expiry, kept) if is_delayed else None
        folder = None if self._bodies is None else await self._bodies.folder(topic)
        encoded = self._encoded(topic, items, key, headers, message_id, kind.encode, extra, times, folder)
        while True:
            filled = self._fill(encoded, target, block, queue, kind, batch, ids, batches)
            if folder is not None and self._bodies is not None:
                await self._bodies.put(folder.take_all())
            confirmed = [full.promise() for full in filled]
            for full in filled:
                queue.open(full)
            await asyncio.gather(*on_the_way)
            if not filled:
                break
            on_the_way = confirmed
        if message_id is not None:
            positions = Counter[Batch]()
            for ref, of in zip(ids, batches, strict=True):
                note_answer(ref, of, positions[of])
                positions[of] += 1
        return ids

    def _encoded(
        self,
        topic: str,
        items: Iterable[T],
        key: Callable[[T], str | None] | None,
        headers: Mapping[str, str] | Callable[[T], Mapping[str, str] | None] | None,
        message_id: Callable[[T], str] | None,
        encode: Encode,
        extra: Sequence[str],
        times: ItemTimes[T] | None,
        folder: BodyFolder | None = None,
    ) -> Iterator[EncodedItem]:
        """For each item: the text that decides its partition, its id, its entry, its size, and when it is due."""
        due = ""
        delay: Duration | None = None
        at: datetime | None = None
        headers_of = headers if callable(headers) else None
        same = None if callable(headers) else headers
        for item in items:
            route = None if key is None else key(item)
            own = same if headers_of is None else headers_of(item)
            given = None if message_id is None else message_id(item)
            if times is not None:
                delay, at = times.of(item)
                due = due_time(delay, at)
                extra = (*times.expiry(due, self._clock.now_ms()), *times.kept)
            if self.prepare is not None:
                own = self.prepare(topic, item, own, route, delay, at, given)
            identity, entry, size = self._encode(encode, item, route, own, given, extra, folder)
            yield identity if route is None else route, identity, entry, size, due

    def _fill(
        self,
        encoded: Iterator[EncodedItem],
        topic: Topic,
        block: Block,
        queue: SendQueue,
        kind: type[Batch],
        most: int,
        ids: list[Any],
        batches: list[Batch],
    ) -> list[Batch]:
        """The batches of one round, in order; none when everything is encoded. Bounded in messages and bytes."""
        filled, latest, size = list[Batch](), dict[int, Batch](), 0
        is_delayed = issubclass(kind, Delay)  # asked of each batch it would cost a call for each message
        for route, identity, entry, length, due in islice(encoded, min(most * block.count, MOST_PER_ROUND)):
            partition = block.numbers[partition_for(route, block.count)]
            batch = latest.get(partition)
            if batch is None or len(batch.ids) >= most:
                batch = latest[partition] = queue.new(kind, topic, partition, self._stream(topic, partition))
                filled.append(batch)
            if is_delayed:
                assert isinstance(batch, Delay)
                batch.due.setdefault(identity, due)
            batch.add(identity, entry, length)
            if kind is Append:
                ids.append(identity)
            else:
                ids.append(MessageRef.of(identity, batch.home, None if route is identity else route))
                batches.append(batch)
            size += length
            if size >= MOST_BYTES:
                break
        return filled

    def _encode(
        self,
        encode: Encode,
        payload: Any,
        key: str | None,
        headers: Mapping[str, str] | None,
        message_id: str | None,
        extra: Sequence[str] = (),
        folder: BodyFolder | None = None,
    ) -> tuple[str, Any, int]:
        """The id, the entry and the size of a message. Raises for a key or headers that are not text. `folder` takes
        its body if that is large."""
        data, content_type = encode_payload(payload)
        identity = self._new_id() if message_id is None else check_message_id(message_id)
        if self.encoding is not None:
            data, extra = self.encoding.extend(data, identity, key, content_type, extra, folder)
        size = check_size(data, key, headers, self._limit)
        try:
            if extra:
                return identity, encode(data, identity, key, content_type, headers, extra), size
            return identity, encode(data, identity, key, content_type, headers), size
        except UnicodeEncodeError:
            raise not_unicode(key) from None

    async def _block(self, target: Topic, band: str) -> Block:
        """The partitions of a band; the topic is read again if it may have got the band meanwhile."""
        if band not in target.layout.bands:
            target = await self._topics.find(target.name) or target
        return target.open_block(band)

    def _stream(self, topic: Topic, partition: int) -> str:
        streams = self._streams.get(topic.name)
        if streams is None:
            streams = self._streams[topic.name] = {}
        stream = streams.get(partition)
        if stream is None:
            stream = streams[partition] = self._keys.stream(topic.name, partition)
        return stream

    def _queue(self, replicas: int) -> SendQueue:
        """The queue for this number of replicas: waiting for replicas must not delay other messages."""
        queue = self._queues.get(replicas)
        if queue is None:
            if self._tasks is None:
                raise ConfigError(NOT_OPEN)
            check_replicas(replicas)
            queue = SendQueue(self._client, self._keys, self._settings, replicas, partial(self._start, self._tasks))
            self._queues[replicas] = queue
        return queue

    def _start(self, tasks: anyio.abc.TaskGroup, queue: SendQueue, node: Client) -> asyncio.Event:
        sender = Sender(queue, self._client, node, self._keys, self._settings, self._in_doubt, self._topics)
        self._senders.append(sender)
        tasks.start_soon(sender.run)
        return sender.wake

    @property
    def stored(self) -> Counter[str]:
        """Messages that the server has confirmed, by topic."""
        return sum((queue.stored for queue in tuple(self._queues.values())), Counter(self.outputs))

    @property
    def failed(self) -> Counter[str]:
        """Messages whose publish ended with an error after they were written or had waited, by topic."""
        return sum((queue.failed for queue in tuple(self._queues.values())), Counter())

    def __repr__(self) -> str:
        state = "running" if self._tasks else "not running"
        bodies = "" if self._bodies is None else f" {self._bodies!r}"
        return f"<Producer {state} queues={list(self._queues.values())} senders={self._senders}{bodies}>"


class MemberOnWay(asyncio.Future[None]):
    """A member of a batch that is being stored: done when it is, or fails with what `publish` raises.

    The write goes on when the caller is cancelled, so another future hears of its end then. `is_again`: an earlier
    write may have stored it.
    """

    __slots__ = ("_entry", "_later", "_size", "batch", "member", "ref")
    is_again = False

    def __init__(self, batch: Batch, identity: str, ref: MessageRef, entry: Any, size: int, member: Any) -> None:
        super().__init__()
        self.batch = batch
        self.ref = ref
        self.member: BatchMember | None = member
        self._entry = entry
        self._size = size
        batch.add(identity, entry, size)
        batch.waiters.append(self)

    def cancel(self, msg: Any | None = None) -> bool:
        """Its caller is cancelled."""
        is_cancelled = super().cancel(msg)
        if is_cancelled:
            self._later: asyncio.Future[None] = self.get_loop().create_future()
            self._later.add_done_callback(asyncio.Future.exception)  # without this asyncio logs an error of its own
            self.batch.replace_waiter(self.ref, self._later)
        return is_cancelled

    async def is_unknown(self) -> bool:
        """Wait for its end. Returns whether it is still not known if it is stored."""
        if not self._end.done():
            await asyncio.wait([self._end])
        error = self._end.exception()
        is_certain = error is None or (not self.is_again and isinstance(error, TopicFull | BrokerUnavailable))
        return not is_certain

    @property
    def _end(self) -> asyncio.Future[None]:
        return self._later if self.cancelled() else self

    @property
    def is_stored(self) -> bool:
        """Whether the server has confirmed it."""
        return self._end.done() and self._end.exception() is None

    @property
    def output(self) -> Output:
        """The same, to be stored again."""
        parts = Append.fields_of(self._entry)
        fields = [parts[0], parts[1], *[each if isinstance(each, str) else each.decode() for each in parts[2:]]]
        about = (self.batch.topic, self.batch.partition, str(self.ref), fields, self._size, "")
        return Output(*about, is_once=False, member=self.member)

    @property
    def known(self) -> bytes | None:
        """Once it is stored: where a message of its id is that was there before: a stream id, or when it is due."""
        return None

    @property
    def answered(self) -> MessageRef:
        """Once it is stored: its ref, with what the server has said about its id."""
        return self.ref

    def __repr__(self) -> str:
        return f"<MemberOnWay {self.ref}{' ended' if self.done() else ''}>"


class OutputOnWay(MemberOnWay):
    """The same of a member with options, as `output` has made it."""

    __slots__ = ("_made", "_position", "is_again")

    def __init__(self, batch: Batch, made: Output, entry: Any, *, is_again: bool) -> None:
        self._made = made
        self._position = len(batch.ids)
        fields = made.fields
        key = str(fields[5]) if len(fields) > 4 and fields[4] == "key" else None
        ref = MessageRef.of(made.message_id, batch.home, key)
        super().__init__(batch, made.message_id, ref, entry, made.size, made.member)
        self.is_again = is_again

    @property
    def output(self) -> Output:
        return self._made

    @property
    def known(self) -> bytes | None:
        return self.batch.known.get(self._made.message_id) if isinstance(self.batch, Members) else None

    @property
    def answered(self) -> MessageRef:
        if self._made.is_once:
            note_answer(self.ref, self.batch, self._position)
        return self.ref


def claimed(claim: Claim, identity: str, batch: Batch, key: str | None) -> MessageRef:
    """The ref of the message that has the unique name now."""
    ref = MessageRef.of(claim.keeper or identity, batch.home, key)
    assert claim.answer is not None
    ref.is_new, ref.is_same = claim.answer
    return ref


def note_answer(ref: MessageRef, batch: Batch, position: int) -> None:
    """Say in a ref what the server has answered about its id."""
    assert isinstance(batch, Once)
    ref.is_new, ref.is_same = batch.answers[position]
