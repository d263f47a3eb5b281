"""Publishing the members of a batch, which counts each page of them after it is stored."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any, Final, Required, Self, TypedDict, Unpack

from rsmq.errors import BatchEnded, BatchExists, BrokerUnavailable, ConfigError, RsmqError, TopicFull
from rsmq.model.batch_member import (
    FIELD,
    BatchMember,
    Numbers,
    by_block,
    changes,
    check_batch_name,
    new_home,
    shard_of,
)
from rsmq.model.clock import to_ms
from rsmq.model.duration import LONGEST_DELAY, Duration, checked_duration
from rsmq.model.keys import Keys, check_name
from rsmq.model.message_ref import MessageRef
from rsmq.model.packing import by_name, readable_fields
from rsmq.model.publish_options import OutputOptions, refuse_unknown
from rsmq.model.record import text
from rsmq.model.settings import Settings
from rsmq.model.words import duration
from rsmq.producer.output import Output
from rsmq.producer.producer import MemberOnWay, Producer
from rsmq.redis.client.connector import Client, retrying
from rsmq.redis.scripts import COUNT_MEMBERS, OK, OPEN_BATCH, Script, Value
from rsmq.redis.topics import Topics, lookup_topic, note_batches

log = logging.getLogger("rsmq.batch")

PAGE: Final = 500
"""So many stored members are a page: then the batch hears of them, and at its end."""
MOST_UNTOLD: Final = 4 * PAGE
"""With so many no call goes on before the batch has heard of them."""
ONLY_KEY: Final = frozenset(("key",))
DAY: Final = timedelta(days=1)
WEEK: Final = timedelta(days=7)


class BatchSettings(TypedDict, total=False):
    """The options of `broker.batch`."""

    group: Required[str]
    on_complete: str | None
    on_success: str | None
    expires: Duration
    keep: Duration
    resume: bool


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """What a batch is: the group that handles its members, where its callbacks go, until when it has to be complete
    (`expires`), and how long its numbers are kept after its callback (`keep`)."""

    name: str
    group: str
    on_complete: str | None
    on_success: str | None
    expires: timedelta
    keep: timedelta
    resume: bool

    @classmethod
    def checked(
        cls,
        name: str,
        group: str,
        on_complete: str | None = None,
        on_success: str | None = None,
        *,
        expires: Duration = DAY,
        keep: Duration = WEEK,
        resume: bool = False,
    ) -> BatchOptions:
        """Raises ConfigError."""
        name, group = check_batch_name(name), check_name("group", group)
        if not isinstance(resume, bool):
            raise ConfigError(f"resume={resume!r} is not possible for a batch: write resume=True, or leave it out")
        on_complete = None if on_complete is None else check_name("topic", on_complete)
        on_success = None if on_success is None else check_name("topic", on_success)
        spans = checked_duration("expires", expires), checked_duration("keep", keep)
        for word, span in zip(("expires", "keep"), spans, strict=True):
            if not timedelta(0) < span <= LONGEST_DELAY:
                raise ConfigError(
                    f"{word}={duration(span)} is not possible for a batch: use more than 0, at most "
                    f"{duration(LONGEST_DELAY)}"
                )
        return cls(name, group, on_complete, on_success, *spans, resume)


class OpenBatch:
    """A batch to which this process publishes: `async with broker.batch(...) as batch:`.

    Members are counted after the server has confirmed them, in pages. The batch is closed at the end of the block: from
    then on it is complete when all its members have left their group for good. If the block raises, the batch stays
    open: `resume=True` goes on with it, or it is abandoned when it expires. `id`: the same in all its members.
    """

    def __init__(
        self, client: Client, keys: Keys, settings: Settings, topics: Topics, producer: Producer, options: BatchOptions
    ) -> None:
        self._client = client
        self._keys = keys
        self._settings = settings
        self._topics = topics
        self._producer = producer
        self._options = options
        self._lifetime_ms = to_ms(options.expires)
        self.name = options.name
        self.id = new_home(options.name)
        self._numbers = Numbers(self.id, options.group, is_direct=not client.is_cluster)
        self._admitted = set[str]()
        self._is_asking = False
        """Whether a call asks the server if a topic may have members."""
        self._turns = list[asyncio.Future[None]]()
        """Of the calls that wait for that."""
        self._waiting = 0
        """Calls that wait for a topic, or behind one that does."""
        self._is_telling = False
        self._page = list[BatchMember]()
        self._stored: dict[str, set[int]] = {}
        """Numbers of members, by block."""
        self._on_way = 0
        """Calls of `publish` that have not ended, from their first step on: the close waits for them."""
        self._arrived = asyncio.Event()
        """Set when no publish is on its way, while the batch closes."""
        self._unknown: dict[str, MemberOnWay] = {}
        """Members whose publish ended without an answer, or was cancelled, by their id: their numbers stay theirs."""
        self._is_open = False
        self._is_closing = False
        """It waits for the calls that have begun, and takes no others: they would come behind what it closes with."""

    async def __aenter__(self) -> Self:
        """Open it. Raises BatchExists, BatchEnded (nothing to resume), ConfigError, BrokerUnavailable."""
        options, fields = self._options, list[Value]()
        for which, topic in (("on_complete", options.on_complete), ("on_success", options.on_success)):
            if topic is not None:
                fields += (which, await self._callback(topic))
        shard = shard_of(self.name)
        names = (self._keys.batch_names(shard), self._keys.batch_state(self.id), self._keys.batch_due(shard))
        about = (self.name, self.id, int(options.resume), to_ms(options.expires), to_ms(options.keep))
        word, *rest = await self._ask(OPEN_BATCH, names, (*about, "group", options.group, *fields))
        if word == b"EXISTS":
            raise BatchExists(self.name)
        if word != OK:
            raise BatchEnded(self.name)
        self.id = text(rest[0])
        if options.resume:
            await self._check_resumed()
        self._numbers = Numbers(self.id, options.group, is_direct=not self._client.is_cluster)
        self._is_open = True
        return self

    async def _check_resumed(self) -> None:
        """Members of another group would be counted there, and not be cancelled with the batch; a topic that it was not
        opened with would get no callback. Raises ConfigError."""
        options = self._options
        names = ("group", "on_complete", "on_success")
        values = await self._client.execute_command("HMGET", self._keys.batch_state(self.id), *names)
        group, *targets = ("" if value is None else text(value) for value in values)
        if group and group != options.group:
            raise ConfigError(
                f"batch {self.name!r} was opened with group={group!r}: resume it with the same, not with "
                f"{options.group!r}"
            )
        for which, target, topic in zip(names[1:], targets, (options.on_complete, options.on_success), strict=True):
            known = target.rpartition(":{")[2].rpartition(".")[0] or None
            if topic is not None and topic != known:
                raise ConfigError(
                    f"batch {self.name!r} was opened with {which}={known!r}: resume it with the same, not with "
                    f"{topic!r}, or give the batch another name"
                )

    async def _callback(self, topic: str) -> str:
        """Where a callback goes: `d` and a stream, or on a cluster, where a worker publishes it, `o` and the stream."""
        found = await lookup_topic(self._topics, topic)
        number = found.normal.partition_for(self.name)
        await note_batches(self._topics, topic)
        return f"{'o' if self._client.is_cluster else 'd'}{self._keys.stream(topic, number)}"

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            await self.close()
            return
        self._is_open = False
        if kind is not BatchEnded:
            log.warning(
                "batch %r was left open, as its block has failed: go on with resume=True, or it is abandoned in %s",
                self.name, duration(self._options.expires),
            )  # fmt: skip
            with suppress(RsmqError):
                await self._tell("added")

    async def publish(self, topic: str, payload: Any, **options: Unpack[OutputOptions]) -> MessageRef:
        """Store a message that is a member of the batch, and return its id. Takes the options of `message.publish`.

        `topic` needs the group of the batch, and must not drop messages when it is full. With `message_id` a message is
        stored once until the batch expires; `resume=True` needs one for each. Raises what `broker.publish` raises, and
        BatchEnded.
        """
        if not self._is_open or self._is_closing:
            raise ConfigError(
                f"batch {self.name!r} is not open: publish inside `async with broker.batch(...) as batch:`, and await "
                f"each publish there"
            )
        has_options = self._options.resume or not options.keys() <= ONLY_KEY
        given = self._check(options) if has_options else None
        self._on_way += 1
        try:
            if topic not in self._admitted or self._waiting:
                await self._admit(topic)
            if given is not None and (unknown := self._unknown.pop(given, None)) is not None:
                return await self._store(unknown.output, is_again=True)
            member = self._numbers.next()
            on_way = None if has_options else self._producer.add_member(topic, payload, options.get("key"), member)
            if on_way is None:
                return await self._store(await self._producer.output(topic, payload, **options, member=member))
            try:  # as `_store` does, without a call for each member
                await on_way
            except BaseException as error:
                self._failed(on_way, error)
                raise
            self._page.append(member)
            if len(self._page) >= PAGE:
                await self._tell_page()
            return on_way.ref
        finally:
            self._on_way -= 1
            if not self._on_way:
                self._arrived.set()

    def _check(self, options: OutputOptions) -> str | None:
        """The id that was given for a member. Raises ConfigError."""
        refuse_unknown("batch.publish", options, OutputOptions.__annotations__)
        given = options.get("message_id")
        if self._options.resume and given is None:
            raise ConfigError(
                "a batch that is resumed needs a message_id for each member: without one it would be sent twice"
            )
        return given

    async def _admit(self, topic: str) -> None:
        """In the order of the calls, which is that of the messages of a key: one asks the server, and all that wait
        meanwhile go on in one turn of the event loop."""
        self._waiting += 1
        has_waited = False
        try:
            while self._is_asking or topic not in self._admitted or (self._waiting > 1 and not has_waited):
                if self._is_asking:
                    turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                    self._turns.append(turn)
                    await turn
                elif topic not in self._admitted:
                    await self._ask_for(topic)
                else:
                    await asyncio.sleep(0)  # behind those that go on now
                has_waited = True
        except BatchEnded:
            raise BatchEnded(self.name) from None
        finally:
            self._waiting -= 1

    async def _ask_for(self, topic: str) -> None:
        self._is_asking = True
        try:
            await self._producer.admit_batch(self.id, self._options.group, topic)
            self._admitted.add(topic)
        finally:
            self._is_asking = False
            turns, self._turns = self._turns, []
            for turn in turns:
                if not turn.done():
                    turn.set_result(None)

    async def _store(self, output: Output, *, is_again: bool = False) -> MessageRef:
        """Store a member with options, and note it for the next page. Returns its ref."""
        on_way = self._producer.add_output(output, self._lifetime_ms, is_again=is_again)
        try:
            await on_way
        except BaseException as error:
            self._failed(on_way, error)
            raise
        await self._note(on_way)
        return on_way.answered

    def _failed(self, on_way: MemberOnWay, error: BaseException) -> None:
        """What is not stored needs no member; an earlier call may have stored it."""
        if on_way.is_again or not isinstance(error, TopicFull | BrokerUnavailable):
            self._unknown[str(on_way.ref)] = on_way

    async def _note(self, on_way: MemberOnWay) -> None:
        """It is stored: note it for the next page."""
        known, member = on_way.known, on_way.member
        if known is not None:
            member = await self._member_of(on_way.output, known)
        if member is not None:
            self._page.append(member)
            if len(self._page) >= PAGE:
                await self._tell_page()

    async def _member_of(self, output: Output, known: bytes) -> BatchMember | None:
        """The member that a message is which was there before. None: it has left, or is of another batch."""
        at = output.topic, output.partition
        if b"-" in known:
            rows = await self._client.execute_command("XRANGE", self._keys.stream(*at), known, known)
            entries = [fields for _, fields in rows]
        elif known.isdigit():
            due = int(known)
            packed = await self._client.execute_command("ZRANGEBYSCORE", self._keys.delayed(*at), due, f"({due + 1}")
            entries = [readable_fields(each) for each in packed]
        else:
            return None
        for fields in entries:
            about = by_name(fields)
            if about.get(b"id") == output.message_id.encode() and FIELD in about:
                member = BatchMember.read(about[FIELD])
                return member if member is not None and member.home == self.id else None
        return None

    async def close(self) -> None:
        """End what is unknown, and close the batch. It is complete when all members have left.

        Raises BatchEnded, and BrokerUnavailable: then it can be called again.
        """
        if not self._is_open:
            return
        self._is_closing = True
        try:
            await self._close()
        finally:
            self._is_closing = False

    async def _close(self) -> None:
        while self._on_way:
            self._arrived.clear()
            await self._arrived.wait()
        for message_id in list(self._unknown):
            on_way = self._unknown[message_id]
            is_unknown = await on_way.is_unknown()
            self._unknown.pop(message_id, None)
            if is_unknown:
                await self._store(on_way.output, is_again=True)
            elif on_way.is_stored:
                await self._note(on_way)
        await self._tell("added")
        stored = sorted(self._stored.items())
        await self._tell("closed", " ".join(f"{block}={len(numbers)}" for block, numbers in stored))
        self._is_open = False

    async def _tell(self, word: str, told: str = "") -> None:
        """Note the page in the batch."""
        page, self._page = self._page, []
        if word == "added" and not page:
            return
        added = by_block(page)
        for block, numbers in added.items():
            self._stored.setdefault(block, set()).update(numbers)
        args = (self.id, word, told, *changes(added))
        try:
            answer = await self._ask(COUNT_MEMBERS, self._keys.batch_counts(self.id), args)
        except BaseException:
            self._page = page + self._page
            raise
        if answer != OK:
            raise BatchEnded(self.name)

    async def _tell_page(self) -> None:
        """Note it, with all that the same write has stored: numbers that follow each other are one change."""
        if self._is_telling and len(self._page) < MOST_UNTOLD:
            return
        self._is_telling = True
        try:
            await asyncio.sleep(0)  # until the others that are stored now are in the page, too
            await self._tell("added")
        finally:
            self._is_telling = False

    async def _ask(self, script: Script, names: Sequence[str], args: Sequence[Value]) -> Any:
        """Run a script, again while the server is away: each of them may run twice."""
        async for attempt in retrying(self._settings):
            with attempt:
                return await script(self._client, names, args)
        raise AssertionError("retrying ends with a result or an error")

    def __repr__(self) -> str:
        return f"<OpenBatch {self.name!r} members={sum(map(len, self._stored.values())) + len(self._page)}>"
