"""Outputs: what handlers publish by their message leaves together with its settlement, or not at all."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import anyio.abc

from rsmq.consumer.settling.output_relay import OutputRelay
from rsmq.consumer.waiting.context import ConsumerContext
from rsmq.consumer.waiting.lane import Lane
from rsmq.consumer.waiting.outgoing import MessageOutputs
from rsmq.errors import (
    BrokerError,
    BrokerUnavailable,
    ConfigError,
    GroupMissing,
    PartitionSealed,
    StoreUnavailable,
    TooLarge,
    TopicFull,
)
from rsmq.heartbeat.circles import standing_circle
from rsmq.model.backoff import Backoff
from rsmq.model.batch_member import BatchMember, Numbers
from rsmq.model.log_throttle import ThrottledLog
from rsmq.model.message import Message, stored_entry
from rsmq.model.message_ref import MessageRef
from rsmq.model.publish_options import OutputOptions, refuse_unknown
from rsmq.producer import Producer
from rsmq.producer.output import Output, OutputArguments, OwnKey
from rsmq.redis.scripts import SETTLE_OUTPUTS, STALE_EPOCH, Ask, Value
from rsmq.redis.streams import trim

log = logging.getLogger("rsmq.settle")

MOST_OUTPUTS: Final = 1000
MOST_NUMBERED: Final = 1000
"""Batches to which this member adds: more begin new blocks."""
MOST_BYTES: Final = 4 << 20
"""Of one message: more would hold up the server, which stores them in one step."""
PAGE_OUTPUTS: Final = 200
PAGE_BYTES: Final = 1 << 20
"""Of one call, if it settles more than one message."""
FIRST_PAUSE: Final = 0.05
STANDING: Final = 5.0
"""Seconds for which a target has had no room, before a circle is looked for: members have said by then what waits."""
CIRCLE_COUNTS: Final = 30.0
"""Seconds for which a circle that was found counts."""
LONGEST_PAUSE: Final = 1.0
"""Seconds between two attempts, while a target is full or the server is away."""


class Outputs:
    """Collects the outputs of running messages and settles messages that have some.

    One call at a time for each lane, with the oldest messages first: so the outputs of a partition are stored in the
    order in which its messages were handled, whatever gets lost. A target without room holds back its lane; the
    handlers do not run again for that.
    """

    def __init__(self, context: ConsumerContext, ask: Ask, on_stale: Callable[[Lane], None]) -> None:
        self._context = context
        self._client = context.client
        self._keys = context.keys
        self._settings = context.settings
        self._member = context.member
        self._stats = context.stats
        self._ask, self._on_stale = ask, on_stale
        self._throttled = ThrottledLog(log)
        self.relay = OutputRelay(context)
        self._numbers: dict[tuple[str, str], Numbers] = {}
        self._batch_topics = set[tuple[str, str]]()
        self._tasks: anyio.abc.TaskGroup | None = None  # while the settler runs

    def use(self, tasks: anyio.abc.TaskGroup | None) -> None:
        """The tasks of the settler, while it runs."""
        self._tasks = tasks
        self.relay.use(tasks)

    # -- while the handler runs -----------------------------------------------------------------------------------

    async def collect(
        self,
        message: Message,
        lane: Lane,
        topic: str,
        payload: Any,
        options: Mapping[str, Any],
        check: Callable[[], None],
        together: Sequence[Message] = (),
        *,
        is_member: bool = False,
    ) -> MessageRef:
        """Keep an output of a running message until it is settled. `check` raises if it does not run. `together`: the
        messages that are settled in one call with it, and share its bounds. `is_member`: the output is a member of the
        message's batch."""
        check()
        if "wait_replicas" in options:
            raise ConfigError("message.publish has no wait_replicas: its output is stored when the message is settled")
        refuse_unknown("message.publish", options, OutputOptions.__annotations__)
        member = await self._next_member(message, topic, options) if is_member else None
        output = await self._producer.output(topic, payload, **options, member=member)
        check()  # the lookup of a topic takes a moment
        entry = lane.outgoing.of(message)
        of_others = [each for each in map(lane.outgoing.of, together) if each.message is not message]
        self._check_bounds([*entry.outputs, *[each for other in of_others for each in other.outputs]], output)
        lane.outgoing.keep(entry, output)
        if member is not None:
            entry.added.append(member)
        return output.ref

    async def _next_member(self, message: Message, topic: str, options: Mapping[str, Any]) -> BatchMember:
        """The next member of the batch of a message, for a topic that the batch's group reads."""
        own = None if message.is_plain else message.member
        assert own is not None
        if "message_id" in options:
            raise ConfigError(
                "message.batch.publish takes no message_id: an output is stored once, with its settlement"
            )
        group = self._context.handler.group  # that of a fallback's message is not known
        about = (own.home, group)
        numbers = self._numbers.get(about)
        if numbers is None:
            if len(self._numbers) >= MOST_NUMBERED:
                self._numbers.clear()
            numbers = self._numbers[about] = Numbers(own.home, group, is_direct=own.block.is_direct)
            self._batch_topics.clear()
        if (own.home, topic) not in self._batch_topics:
            await self._producer.admit_batch(own.home, group, topic)
            self._batch_topics.add((own.home, topic))
        return numbers.next()

    def letter(self, message: Message, key: str, notes: Sequence[Value]) -> Output:
        """A message as a dead letter: an output with a key of its own, in the slot of its partition."""
        fields = (*stored_entry(message), *(str(each) if isinstance(each, int) else each for each in notes))
        own = OwnKey(key, self._settings.dlq_length)
        size = sum(map(len, fields))
        return Output(self._context.topic, message.partition, message.id, fields, size, "", is_once=False, own=own)

    def _check_bounds(self, kept: Sequence[Output], output: Output) -> None:
        """What could never be settled fails in the handler."""
        size = output.size + sum(each.size for each in kept)
        if size > MOST_BYTES:
            raise TooLarge(size, MOST_BYTES)
        if len(kept) >= MOST_OUTPUTS:
            raise ConfigError(
                f"a handler call can publish {MOST_OUTPUTS} outputs for a message: publish one message that names the "
                f"rest, or use broker.publish_many"
            )
        topic = output.target
        if topic.max_length > 0 and topic.on_full == "reject":
            same = sum(each.topic == topic.name and each.partition == output.partition for each in kept)
            if same >= topic.max_length:
                raise TopicFull(topic.name, output.partition, topic.max_length)

    @property
    def _producer(self) -> Producer:
        assert self._context.producer is not None, "a worker gives its consumers a producer"
        return self._context.producer

    # -- after it -------------------------------------------------------------------------------------------------

    def divert(self, lane: Lane) -> None:
        """Take the messages with outputs out of those that are done: they leave by calls of their own."""
        if lane.divert_done() and self._tasks is not None and lane.outgoing.serve():
            self._tasks.start_soon(self._serve, lane)

    async def _serve(self, lane: Lane) -> None:
        """Settle what goes out of a lane, until nothing is left or the lease is over."""
        backoff = Backoff(FIRST_PAUSE, LONGEST_PAUSE)
        try:
            while lane.outgoing.waiting and lane.lease.is_held():
                if await self._settle_page(lane):
                    backoff.reset()
                else:
                    await asyncio.sleep(FIRST_PAUSE if lane.outgoing.is_in_circle else backoff.next())
        finally:
            lane.outgoing.rest()

    async def flush(self, lanes: Sequence[Lane]) -> None:
        """One attempt for each lane, after `run`.

        Not where a call of `run` has no answer: it may still come, after its repetition, and a first call also stores
        outputs of messages that are not pending. The next owner handles these messages again if it did not come.
        """
        for lane in lanes:
            if any(entry.is_sent for entry in lane.outgoing.waiting.values()):
                continue
            self.divert(lane)
            while lane.outgoing.waiting and lane.lease.is_held() and await self._settle_page(lane, most=1):
                pass

    async def wait(self, lane: Lane, entry_id: bytes) -> None:
        """Until a message with outputs is settled, or its lease is over."""
        while entry_id in lane.outgoing.waiting and lane.lease.is_held():
            await asyncio.sleep(0.005)

    async def _settle_page(self, lane: Lane, most: int | None = None) -> bool:
        """Settle the oldest messages of a lane, in one call that is repeated until it has an answer. False: no room."""
        page = self._page(lane)
        attempts, backoff = 0, Backoff(FIRST_PAUSE, LONGEST_PAUSE)
        while lane.lease.is_held() and attempts != most:
            attempts += 1
            if not await self._refresh(page):
                await asyncio.sleep(backoff.next())
                continue
            arguments, args = self._command(lane, page)
            lane.outgoing.send([entry for _, entry in page])  # also if this is cancelled
            try:
                reply = await self._ask(SETTLE_OUTPUTS, arguments.keys, args)
            except BrokerUnavailable as error:
                self._throttled.warn(f"{SETTLE_OUTPUTS.name} waits for the server", error)
            except GroupMissing:  # it is made again from the start: all of it comes again, in order
                lane.lease.lose()
            except PartitionSealed as error:
                if not await self._follow(lane, page):
                    log.error("outputs of %s cannot be stored: %s", lane.stream, error)
                    await asyncio.sleep(backoff.next())
                continue
            except BrokerError as error:  # no memory, no right, a key of a foreign type: an operator can repair it
                log.error("outputs of %s cannot be stored: %s", lane.stream, error)
            else:
                return await self._confirm(lane, page, reply, arguments.keys)
            await asyncio.sleep(backoff.next())
        return False

    async def _refresh(self, page: Sequence[tuple[bytes, MessageOutputs]]) -> bool:
        """Bodies that were put long before their settlement are put again. False: their store is away."""
        try:
            for _, entry in page:
                for output in entry.outputs:
                    if output.body is not None and (other := await self._producer.refreshed(output)) is not None:
                        entry.exchange(output, other)
        except StoreUnavailable as error:
            self._throttled.warn("outputs wait for the store of their bodies", error)
            return False
        return True

    async def _follow(self, lane: Lane, page: Sequence[tuple[bytes, MessageOutputs]]) -> bool:
        """A target was resized, and nothing was stored: its outputs go to the partitions that follow. False: none
        was."""
        names = {output.topic for _, entry in page for output in entry.outputs}
        try:
            found = [each for name in names if (each := await self._producer.read_topic(name)) is not None]
        except (BrokerError, ConfigError) as error:
            log.debug("a target of %s is read again later: %s", lane.stream, error)
            return False
        before = [output.partition for _, entry in page for output in entry.outputs]
        lane.outgoing.route([entry for _, entry in page], {topic.name: topic for topic in found})
        return before != [output.partition for _, entry in page for output in entry.outputs]

    def _command(self, lane: Lane, page: Sequence[tuple[bytes, MessageOutputs]]) -> tuple[OutputArguments, list[Value]]:
        # on a cluster a first call may come late, after its repetition: its connection is not ended before that
        is_again = int(self._client.is_cluster or any(entry.is_sent for _, entry in page))
        out = self._keys.out(lane.topic, lane.partition, lane.group) if self._client.is_cluster else ""
        every = [output for _, entry in page for output in entry.stored]
        arguments = OutputArguments(self._producer, every, first=(lane.stream, lane.lease_key, lane.retry_key), out=out)
        streams, zsets, has_rules = arguments.counts
        if lane.outgoing.can_swap:
            has_rules = 3 if lane.outgoing.can_swap_anywhere else 2
        args: list[Value] = [self._member, lane.epoch, lane.group, is_again, streams, zsets, has_rules]
        for entry_id, entry in page:
            args += (entry_id, entry.words)
            for output in entry.stored:
                args += arguments.of(output)
        return arguments, args

    def _page(self, lane: Lane) -> list[tuple[bytes, MessageOutputs]]:
        page, count, size = list[tuple[bytes, MessageOutputs]](), 0, 0
        for entry_id, entry in lane.outgoing.waiting.items():
            if page and lane.outgoing.can_swap_anywhere and not entry.follows:
                break
            count += len(entry.outputs) + (entry.member is not None or entry.has_notes or entry.result is not None)
            size += sum(output.size for output in (*entry.outputs, *([] if entry.result is None else [entry.result])))
            if page and not entry.follows and (count > PAGE_OUTPUTS or size > PAGE_BYTES):
                break
            page.append((entry_id, entry))
        return page

    async def _confirm(
        self, lane: Lane, page: list[tuple[bytes, MessageOutputs]], reply: Any, keys: Sequence[str]
    ) -> bool:
        """Take the answer of the server. False: there is no room for the next message."""
        if reply[0] == STALE_EPOCH:
            self._stats["refused"] += len(page)
            self._on_stale(lane)
            return True
        _, done, acknowledged, full = reply
        lane.outgoing.stored([entry_id for entry_id, _ in page[:done]], [entry for _, entry in page[done:]])
        for entry_id, entry in page[:done]:
            lane.asking.discard(entry_id)
            lane.in_flight.discard(entry_id)
            self._producer.outputs.update(output.topic for output in entry.outputs)
            if entry.on_stored is not None:
                entry.on_stored()
        letters = sum(1 for _, entry in page[:done] if entry.letter is not None)
        handed_on = sum(1 for _, entry in page[:done] if entry.record is not None)
        self._stats["settled"] += max(0, acknowledged - letters - handed_on)
        if handed_on:
            self._stats["handed_on"] += handed_on
        self._stats["not_pending"] += done - acknowledged
        if done:
            self.relay.wake(lane)
        was_swap = lane.outgoing.can_swap
        lane.outgoing.swap(False)
        if not full:
            lane.outgoing.note_full(False)
            return True
        return await self._make_room(lane, page[done][1], keys[full - 1], can_swap=done > 0 or not was_swap) or done > 0

    async def _make_room(self, lane: Lane, entry: MessageOutputs, key: str, *, can_swap: bool) -> bool:
        """Remove what is kept in a full target only for a replay, and read its limits again. False: no room yet."""
        output = next((each for each in entry.outputs if self._keys.stream(each.topic, each.partition) == key), None)
        if output is None:  # the out-stream: its relay makes room, in a circle beyond the limit of its target
            target = lane.outgoing.relay_waits_for
            if target and await self._is_in_circle(lane, target):
                self.relay.wake(lane)
            self._note_full(lane, key, "its relay go on: see rsmq.relay in the log", target)
            return False
        removed = 0
        try:
            await self._producer.read_topic(output.topic)
            _, removed, *_ = await trim(
                self._client, self._keys, output.topic, output.partition, keep_age_ms=0, keep_length=0, exact=True
            )
        except (BrokerError, ConfigError) as error:  # such as a user without the right to trim
            log.debug("%s is full and cannot be trimmed: %s", key, error)
        if not removed and can_swap and output.topic == lane.topic:  # it would wait for itself
            lane.outgoing.swap(True)
            return True
        if not removed and can_swap and await self._is_in_circle(lane, output.topic):
            lane.outgoing.swap(True, anywhere=True)
            return True
        if not removed:
            remedy = f"the consumers of {output.topic!r} catch up, or raise its max_length"
            self._note_full(lane, key, remedy, output.topic)
        return removed > 0

    async def _is_in_circle(self, lane: Lane, target: str) -> bool:
        """Whether topics wait for each other in a circle: then each would stand still for ever."""
        if not lane.outgoing.is_in_circle and lane.outgoing.stands(STANDING):
            try:
                found = await standing_circle(self._client, self._keys, lane.topic, target)
            except BrokerError as error:
                log.debug("it is not known whether %s stands in a circle: %s", lane.stream, error)
                return False
            if found:
                lane.outgoing.circle(CIRCLE_COUNTS)
                log.warning(
                    "topics wait for each other in a circle, each of them full: %s. Each message makes room for one "
                    "output now, up to twice the limit: raise their max_length", " -> ".join([*found, found[0]]),
                )  # fmt: skip
        return lane.outgoing.is_in_circle

    def _note_full(self, lane: Lane, key: str, remedy: str, topic: str = "") -> None:
        if not lane.outgoing.is_full:
            log.warning(
                "%s is full: %s waits with the outputs of handled messages, and reads nothing new. Let %s", key,
                lane.stream, remedy,
            )  # fmt: skip
        lane.outgoing.note_full(True, topic)
