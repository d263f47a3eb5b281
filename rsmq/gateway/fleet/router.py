"""The router stores the messages of a topic in the inboxes of the clients that have subscribed to them."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Final, NamedTuple

from rsmq.errors import BrokerUnavailable, RsmqError
from rsmq.gateway.fleet.message import RETAINED, Copy, Published, combine, from_headers
from rsmq.gateway.fleet.registry import Registry
from rsmq.gateway.fleet.retained import REMEMBERED_MS, Retained, stamp
from rsmq.gateway.fleet.shares import Choice, Decide, KeptChoices, choices_of
from rsmq.gateway.fleet.subscribers import Subscribers
from rsmq.gateway.protocol.packet import Subscription
from rsmq.gateway.protocol.topic_filter import SHARE
from rsmq.handler.handler import Handler, build_handler
from rsmq.model.encoding import Binding, Encoding
from rsmq.model.message import Message, Origin, stored_ms, stored_payload
from rsmq.model.stream_id import sortable
from rsmq.persistence.inbox_writer import InboxWriter, Receipt
from rsmq.persistence.letter import encoded_front, pack_binding, pack_letter

log = logging.getLogger("rsmq.gateway")

GROUP = "mqtt"
ORIGIN: Final = attrgetter("origin")
BATCH = 500
RAW_RETAINED: Final = RETAINED.encode()
MOST_PLANNED: Final = 50_000
"""Plans that are kept, and the recipients in them: 60 MB at most, if headers are as long as they may be for that."""


class RoutePlan(NamedTuple):
    """Where the messages with the same headers go: all that one client publishes to one topic name, as a rule.

    `published`: such a message without its payload. `fronts`: the letter up to the payload, and the clients that get
    this one. The member of a share is chosen for each message. `subscribers`: those of its topic name; with others it
    is not the plan any more.
    """

    published: Published
    ttl_ms: int | bytes
    fronts: list[tuple[bytes, list[str]]]
    shares: list[str]
    subscribers: Subscribers | None


New = frozenset[tuple[str, str]]
"""Subscriptions, by client and filter."""
Placed = dict[tuple[str, str, bytes], tuple[Message, RoutePlan, Choice]]
"""What the letters of shares are about, by member, source and letter."""
Refusals = dict[tuple[Origin, bytes], set[tuple[str, str]]]
"""By message, the shares and members whose sessions have refused it."""
NOWHERE: Final = RoutePlan(Published("", b"", 0, False, "", None, b""), b"", [], [], None)


def source_of(origin: Origin) -> str:
    """The source of letters from a partition. `&`: only for a session that has not ended."""
    return f"source:&{origin.topic}.{origin.partition}/{GROUP}"


def partition_name(origin: Origin) -> str:
    """The name of a partition."""
    return f"{origin.topic}.{origin.partition}"


def stamp_of(message: Message) -> tuple[bytes, bytes]:
    """When a message was stored, in ms, and the position of its letters, which has one width."""
    milliseconds, _, number = message.entry_id.partition(b"-")
    return milliseconds, milliseconds.zfill(20) + number.zfill(20)


def maybe_retained(messages: Sequence[Message], raw_headers: Sequence[bytes | None]) -> list[Message]:
    """Those whose headers say that they are retained, or something that looks so. `raw_headers`: of each message."""
    return [
        each for each, raw in zip(messages, raw_headers, strict=True)
        if (RAW_RETAINED in raw if raw is not None else RETAINED in each.headers)
    ]  # fmt: skip


def front_of(published: Published, copy: Copy, share: str = "") -> bytes:
    """The letter for one kind of receiver up to the payload, which is its end."""
    return published.envelope(copy.qos, retain=copy.retain, identifiers=copy.identifiers, share=share)


class MqttRouter:
    """The batch handler of the group `mqtt`. It must get the messages of a partition in stream order.

    The stream ids are the positions of its letters, so a batch that is repeated stores nothing twice. Subscriptions are
    read after the messages: see `Registry`. Before that, those that are retained are kept: so who subscribes meets such
    a message, or finds it kept.
    """

    def __init__(
        self, registry: Registry, writer: InboxWriter, retained: Retained, choices: KeptChoices,
        now_ms: Callable[[], int], encoding_in: Callable[[str], Encoding] | None = None,
    ) -> None:  # fmt: skip
        """`encoding_in`: what encodes the letters of a topic. Without it they are stored as they were published."""
        self._registry = registry
        self._writer = writer
        self._retained = retained
        self._choices = choices
        self._now_ms = now_ms
        self._encoding_in = encoding_in
        self.routed = 0
        """Messages."""
        self.letters = 0
        """For all their receivers."""
        self._plans: dict[bytes, RoutePlan] = {}
        """By headers."""
        self._parsed: dict[bytes, Published | None] = {}
        """What headers say, of the messages that are being routed and have no plan."""
        self._version = 0
        self._planned = 0
        self.under_way: dict[str, int] = {}
        """The partitions of which messages are being routed, and when the oldest was stored, in ms of the server."""

    def handler(self, topic: str) -> Handler:
        """This router as the handler of a topic. A new group begins at the end: what is older meets no subscription."""
        made = build_handler(self.route, topic, group=GROUP, ordering="partition", batch=BATCH, start="latest")
        return replace(made, stores_letters=True)

    async def route(self, messages: list[Message]) -> list[BaseException | None] | None:
        """None when all letters of all messages are stored, else one outcome per message."""
        partitions = self._begin(messages)
        try:
            return await self._route(messages)
        finally:
            for each in partitions:
                self.under_way.pop(each, None)

    def _begin(self, messages: list[Message]) -> list[str]:
        """Note what is under way. A partition has one batch at a time."""
        found = dict[str, int]()
        for origin, run in groupby(messages, ORIGIN):
            found.setdefault(partition_name(origin), stored_ms(next(run)))
        self.under_way.update(found)
        return list(found)

    async def _route(self, messages: list[Message]) -> list[BaseException | None] | None:
        raw_headers = [each.raw_headers for each in messages]
        if retained := maybe_retained(messages, raw_headers):
            await self._keep_all(retained)
        names = self._topic_names(messages, raw_headers)
        await self._registry.look(names)  # no other await until all of them are planned
        self._renew_plans()
        some_new = [each for name in names if (each := self._registry.subscribers(name)) is not None and each.older]
        self.routed += len(messages)
        stored, shared, next_raw = Receipt(), list[tuple[Message, RoutePlan]](), iter(raw_headers)
        for origin, run in groupby(messages, ORIGIN):
            partition, source = partition_name(origin), source_of(origin)
            for message in run:
                self._deliver(message, next(next_raw), source, stored, shared, partition)
            self._pass(partition, sortable(message.entry_id), some_new)
        self._parsed.clear()
        try:
            await self._complete(shared, stored)
        except BrokerUnavailable as error:
            return [error] * len(messages)
        except Exception:  # of the letters of some messages: once more, to find out which
            return [await self._outcome(message) for message in messages]
        return None

    def _topic_names(self, messages: Sequence[Message], raw_headers: Sequence[bytes | None]) -> set[str]:
        """The topic names of messages, as far as their headers can be read."""
        found, plans, parsed = set[str](), self._plans, self._parsed
        for message, raw in zip(messages, raw_headers, strict=True):
            if raw is not None and (plan := plans.get(raw)) is not None:
                if plan.subscribers is not None:
                    found.add(plan.published.topic)
                continue
            if raw is None or raw not in parsed:
                with suppress(ValueError):  # broken headers, which `_deliver` names
                    published = from_headers(message.headers, b"")
                    if published is not None:
                        found.add(published.topic)
                    if raw is not None:
                        parsed[raw] = published
            elif (known := parsed[raw]) is not None:
                found.add(known.topic)
        return found

    def _pass(self, partition: str, position: str, some_new: Iterable[Subscribers]) -> None:
        """All messages of a partition up to a position are planned: which of them are older counts no more."""
        if new := self._registry.new.get(partition):
            new[:] = [each for each in new if each[0] > position]
        for each in some_new:
            each.passed(partition, position)

    async def _keep_all(self, messages: Sequence[Message]) -> None:
        """Keep the messages that are to be retained. Their gateway does it, too, and may be later than this one."""
        await asyncio.gather(*(self._keep(each, published) for each, published in self._retainable(messages)))

    async def _keep(self, message: Message, published: Published) -> None:
        try:
            await self._retained.keep(published, stamp(message.entry_id))
        except BrokerUnavailable:
            raise
        except RsmqError as error:  # its gateway gets the same answer, and does not acknowledge it
            log.warning("retained message %s is not kept: %s", message.id, error)

    def _retainable(self, messages: Sequence[Message]) -> Iterator[tuple[Message, Published]]:
        """Those that have not expired, and are not so old that it may be forgotten by now how they were removed."""
        for each in messages:
            age_ms = self._now_ms() - stored_ms(each)
            with suppress(ValueError):  # broken headers, which `_deliver` names
                published = from_headers(each.headers, *self._stored(each))
                if published is None or not published.retain or age_ms > REMEMBERED_MS // 2:
                    continue
                if published.expiry is None:
                    yield each, published
                elif (left := published.expiry - max(0, age_ms) // 1000) > 0:
                    yield each, published._replace(expiry=left)

    def _stored(self, message: Message) -> tuple[bytes, Binding | None]:
        """The payload as a letter has it, and what undoes it: as its topic has it."""
        if self._encoding_in is None:
            return message.data, None
        encoding = self._encoding_in(message.topic)
        return stored_payload(message, encoding) if encoding.names else (message.data, None)

    async def _outcome(self, message: Message) -> Exception | None:
        """Deliver a message again, by itself. What is stored already is not stored twice."""
        stored, shared = Receipt(), list[tuple[Message, RoutePlan]]()
        raw, origin = message.raw_headers, message.origin
        try:
            await self._registry.look(self._topic_names([message], [raw]))
            self._renew_plans()
            self._deliver(message, raw, source_of(origin), stored, shared, partition_name(origin))
            await self._complete(shared, stored)
        except Exception as error:
            return error
        return None

    async def _complete(self, shared: Sequence[tuple[Message, RoutePlan]], stored: Receipt) -> None:
        """Queue the letters of shared subscriptions, and wait until all are stored. Raises BrokerError.

        A member may leave between its choice and its letter: no gateway passes that letter on, and its session refuses
        it. So another member is chosen.
        """
        if not shared:
            await stored.complete()
            return
        refusals: Refusals = {}
        placed = await self._share_all(shared, stored, refusals)
        await stored.complete()
        while again := [placed[each] for each in stored.refused if each in placed]:
            for message, _, choice in again:
                refusals.setdefault((message.origin, message.entry_id), set()).add((choice.share, choice.member))
            await self._registry.catch_up()
            stored = Receipt()
            runs = {(message.origin, message.entry_id): (message, plan) for message, plan, _ in again}
            placed = await self._share_all(list(runs.values()), stored, refusals)
            await stored.complete()

    def _deliver(
        self, message: Message, raw_headers: bytes | None, source: str, stored: Receipt,
        shared: list[tuple[Message, RoutePlan]], partition: str,
    ) -> None:  # fmt: skip
        """Queue the letters of one message. `shared` gets it if it meets shared subscriptions, too."""
        try:
            plan = self._plan_of(message, raw_headers)
            subscribers = plan.subscribers
            if self._registry.new.get(partition) or (subscribers is not None and subscribers.older):
                plan = self._older_plan(message, plan, partition)
        except ValueError as error:
            log.warning("message %s has broken MQTT headers and is not routed: %s", message.id, error)
            return
        if plan.shares:
            shared.append((message, plan))
        if not plan.fronts:
            return
        milliseconds, position = stamp_of(message)
        writer, (data, binding) = self._writer, self._stored(message)
        about = b"" if binding is None else pack_binding(binding)
        for plain_front, clients in plan.fronts:
            front = encoded_front(plain_front, about) if about else plain_front
            writer.put(clients, source, pack_letter(position, milliseconds, plan.ttl_ms, front + data), stored)
            self.letters += len(clients)

    async def _share_all(
        self, shared: Sequence[tuple[Message, RoutePlan]], stored: Receipt, refusals: Refusals
    ) -> Placed:
        """Queue the letters of shared subscriptions, when it is kept which members get them. Raises BrokerError.

        `refusals`: of a message that has some, only these shares get it, and none of these members.
        """
        by_origin = ((origin, list(run)) for origin, run in groupby(shared, lambda each: each[0].origin))
        placed: Placed = {}
        await asyncio.gather(*(self._share(origin, run, stored, refusals, placed) for origin, run in by_origin))
        return placed

    async def _share(
        self, origin: Origin, run: Sequence[tuple[Message, RoutePlan]], stored: Receipt, refusals: Refusals,
        placed: Placed,
    ) -> None:  # fmt: skip
        """The same, of one partition."""
        registry, source = self._registry, source_of(origin)

        def decide(kept: Sequence[Choice], message: Message, plan: RoutePlan) -> Sequence[Choice]:
            shares, members = plan.shares, registry.shares
            if refused := refusals.get((origin, message.entry_id)):
                shares = list({share for share, _ in refused})
                members = {
                    share: {each: its for each, its in members.get(share, {}).items() if (share, each) not in refused}
                    for share in shares
                }
            return choices_of(kept, shares, stamp_of(message)[1].decode(), members, registry.offline)

        wanted: dict[bytes, Decide] = {each.entry_id: partial(decide, message=each, plan=plan) for each, plan in run}
        kept = await self._choices.keep(origin.topic, origin.partition, GROUP, wanted)
        for (message, plan), choices in zip(run, kept, strict=True):
            refused = refusals.get((origin, message.entry_id), ())
            shares = {share for share, _ in refused} or plan.shares
            found = [each for each in choices if each.share in shares and (each.share, each.member) not in refused]
            self._put_shared(message, plan, found, source, stored, placed)

    def _put_shared(
        self, message: Message, plan: RoutePlan, choices: Iterable[Choice], source: str, stored: Receipt, placed: Placed
    ) -> None:
        """Queue the letters of one message for the members that were chosen."""
        milliseconds, position = stamp_of(message)
        data, binding = self._stored(message)
        about = b"" if binding is None else pack_binding(binding)
        for choice in choices:
            subscription = self._registry.shares.get(choice.share, {}).get(choice.member)
            if subscription is None:  # the share has ended
                continue
            copy = combine(plan.published, (subscription,))
            assert copy is not None, "a member has a subscription"
            # a client may get the message by a subscription of its own, too: each has its own positions
            front = front_of(plan.published, copy, choice.share)
            envelope = (encoded_front(front, about) if about else front) + data
            letter, own = pack_letter(position, milliseconds, plan.ttl_ms, envelope), choice.source(source)
            self._writer.put((choice.member,), own, letter, stored)
            placed[choice.member, own, letter] = message, plan, choice
            self.letters += 1

    def _renew_plans(self) -> None:
        """Forget all plans if a subscription has changed."""
        if self._version != self._registry.version:
            self._version = self._registry.version
            self._plans.clear()
            self._planned = 0

    def _plan_of(self, message: Message, raw: bytes | None) -> RoutePlan:
        """The plan for a message; it is kept until a subscription changes. Raises ValueError for broken headers."""
        plan = None if raw is None else self._plans.get(raw)
        if plan is not None:
            known = plan.subscribers
            if known is None or known is self._registry.subscribers(plan.published.topic):
                return plan
            published: Published | None = plan.published
        else:
            known = None
            is_parsed = raw is not None and raw in self._parsed
            published = self._parsed[raw] if is_parsed else from_headers(message.headers, b"")  # type: ignore[index]
        plan = self._plan(published)
        if raw is not None:
            self._planned += (known is None) + sum(len(clients) for _, clients in plan.fronts)
            if self._planned > MOST_PLANNED:
                self._plans.clear()
                self._planned = 0
            self._plans[raw] = plan
        return plan

    def _older_plan(self, message: Message, plan: RoutePlan, partition: str) -> RoutePlan:
        """The plan for a message that may be older than some of the new subscriptions."""
        position = sortable(message.entry_id)
        new = self._registry.new.get(partition, ())
        skipped = {each for newest, found in new if position <= newest for each in found}
        if plan.subscribers is not None:
            for client, older in plan.subscribers.older.items():
                if position <= older.get(partition, ""):
                    skipped.add((client, plan.published.topic))
        if not skipped or plan is NOWHERE:
            return plan
        return self._plan(plan.published, frozenset(skipped))

    def _plan(self, published: Published | None, skipped: New = frozenset()) -> RoutePlan:
        if published is None:  # it did not come from an MQTT client
            return NOWHERE
        recipients, shares = defaultdict[str, list[Subscription]](list), list[str]()
        subscribers = self._registry.subscribers(published.topic)
        assert subscribers is not None, "the name was looked up"
        for client, subscription in (*subscribers.found, *self._registry.tree.match(published.topic)):
            name = subscription.filter
            if name.startswith(SHARE):
                if any((member, name) not in skipped for member in self._registry.shares[name]):
                    shares.append(name)
            elif (client, name) not in skipped and not (subscription.no_local and client == published.client):
                recipients[client].append(subscription)
        by_copy = defaultdict[Copy, list[str]](list)
        for client, found in recipients.items():
            copy = combine(published, found)
            assert copy is not None, "a recipient has a subscription"
            by_copy[copy].append(client)
        fronts = [(front_of(published, copy), clients) for copy, clients in by_copy.items()]
        return RoutePlan(published, published.ttl_ms, fronts, shares, subscribers)

    def __repr__(self) -> str:
        return f"<MqttRouter routed={self.routed} letters={self.letters}>"
