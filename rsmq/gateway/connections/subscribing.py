"""SUBSCRIBE and UNSUBSCRIBE: written to the registry before they are acknowledged, then the retained messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Final

from rsmq.errors import BrokerError, CannotDecode, Malformed, OwnershipError
from rsmq.gateway.connections.client_link import ClientLink
from rsmq.gateway.connections.context import Context
from rsmq.gateway.fleet.message import Published, decoded, identifiers_of
from rsmq.gateway.fleet.retained import Retained, is_name
from rsmq.gateway.fleet.shares import has_shares
from rsmq.gateway.protocol import encode
from rsmq.gateway.protocol.packet import V31, ReasonCode, RefusedPacket, Subscribe, Subscription, Unsubscribe
from rsmq.gateway.protocol.topic_filter import SHARE, is_within
from rsmq.model.log_names import name_in_log
from rsmq.persistence.letter import EXPIRES, RETAIN, ms_left, read_mqtt, seal_mqtt

EARLY_BYTES: Final = 256 << 10
"""Retained messages that are read before a SUBACK."""


async def serve(context: Context, client: ClientLink) -> None:
    """Answer the requests of a client one after the other: each is the base of the next."""
    while client.requests and not client.is_closed:
        request = client.requests[0]
        try:
            if isinstance(request, Subscribe):
                await subscribe(context, client, request)
            else:
                await unsubscribe(context, client, request)
        except OwnershipError:
            return  # the reader ends this connection
        except RefusedPacket as error:
            client.refuse(error)
        except BrokerError as error:
            client.fail(error)
        del client.requests[0]


async def subscribe(context: Context, client: ClientLink, request: Subscribe) -> None:
    """Add or replace subscriptions, acknowledge them, and send what is retained.

    A message that this gateway has acknowledged before does not meet a new subscription, but may be retained.
    """
    await published(client)
    wanted = dict(client.subscriptions)
    reasons, granted = list[int](), list[tuple[Subscription, bool]]()
    for each in map(of_bridge, request.subscriptions) if client.is_bridge else request.subscriptions:
        reason = refusal(context, client, each, wanted)
        if reason is None:
            granted.append((each, each.filter not in wanted))
            wanted[each.filter] = each
        reasons.append(each.qos if reason is None else reason)
        if reason is not None:
            name = reason.name.lower()
            context.counts[f"refused: subscription, {name}"] += 1
            about = f"client {name_in_log(client.client_id)}: {name_in_log(each.filter)}"
            context.counts.warn(f"subscriptions are refused, {name}", about)
    if client.level == V31 and max(reasons) >= 0x80:
        client.close(ReasonCode.NOT_AUTHORIZED, "a subscription is refused, which version 3.1 cannot say")
        return
    if granted:
        before = context.ingest.just_stored()
        await context.fleet.registry.change(client.client_id, client.epoch, wanted.values(), before)
        if client.is_closed:
            return
        client.subscriptions = wanted
        for each, _ in granted:
            context.clients.subscribe(client, each)
        if has_shares(each for each, _ in granted):
            await context.fleet.registry.catch_up()  # this gateway chooses a member for messages of QoS 0
    retained = list[tuple[Subscription, FoundRetained]]()
    for each, is_new in granted:
        if each.filter.startswith(SHARE):
            continue  # no retained messages [MQTT-4.8.2]
        if each.retain_handling == 0 or (each.retain_handling == 1 and is_new):
            found = FoundRetained(context.fleet.retained, each.filter, context.rules.options.retained_per_subscribe)
            await found.look(EARLY_BYTES - sum(other.size for _, other in retained))
            if not found.is_empty:
                retained.append((each, found))
    client.send(encode.suback(request.packet_id, reasons, client.level))
    client.answered()  # the request still stands there: what comes now starts no second turn
    for each, found in retained:
        await send_retained(context, client, each, found)


def of_bridge(each: Subscription) -> Subscription:
    """A subscription of another broker: it wants nothing back that it has sent, and the retain flag as it was.

    Version 5 has options for both. A bridge of an older version says in its CONNECT that it is one.
    """
    return each._replace(no_local=not each.filter.startswith(SHARE), retain_as_published=True)


async def published(client: ClientLink) -> None:
    """Wait until what the client has published is stored: it came before its request."""
    if client.inbound.unconfirmed and not client.is_closed:
        stored = asyncio.Event()
        client.inbound.when_done = stored.set
        await stored.wait()


def refusal(
    context: Context, client: ClientLink, each: Subscription, wanted: dict[str, Subscription]
) -> ReasonCode | None:
    """Why a subscription is not possible, or None."""
    if not is_within(each.filter, context.rules.options.most_levels, context.rules.options.most_topic_bytes):
        return ReasonCode.TOPIC_FILTER_INVALID
    if not context.rules.gatekeeper.may_subscribe(client.client_id, client.user, each.filter):
        return ReasonCode.NOT_AUTHORIZED
    if each.filter not in wanted and len(wanted) >= context.rules.options.most_subscriptions:
        return ReasonCode.QUOTA_EXCEEDED
    return None


class FoundRetained:
    """The retained messages that a filter matches, the first of them as of before the SUBACK.

    What is published after that comes to the subscription by itself: it must not come as a retained message, too.
    """

    def __init__(self, retained: Retained, pattern: str, most: int) -> None:
        self._retained = retained
        self._pattern = pattern
        self._most = most
        self._first = list[bytes]()
        self.size = 0
        self._rest: AsyncIterator[bytes] | None = None

    @property
    def is_empty(self) -> bool:
        """Whether there are none."""
        return not self._first and self._rest is None

    async def look(self, budget: int) -> None:
        """Read so many bytes of them now. Most filters are a topic name, which needs no search."""
        if budget > 0 and is_name(self._pattern):
            self._add(await self._retained.find_one(self._pattern))
            return
        rest = self._retained.find(self._pattern, self._most)
        while self.size < budget:
            envelope = await anext(rest, None)
            if envelope is None:
                return
            self._add(envelope)
        self._rest = rest

    def _add(self, envelope: bytes) -> None:
        if envelope:
            self._first.append(envelope)
            self.size += len(envelope)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for each in self._first:
            yield each
        if self._rest is not None:
            async for each in self._rest:
                yield each


async def send_retained(context: Context, client: ClientLink, subscription: Subscription, found: FoundRetained) -> None:
    """The retained messages that a new subscription matches: through the inbox, where they have packet ids."""
    number = unread = 0
    identifiers = (subscription.identifier,) if subscription.identifier else ()
    async for envelope in found:
        if client.is_closed:
            return
        number += 1
        try:
            letter = read_mqtt(envelope)
        except Malformed:  # another client has written it
            context.counts.dropped("malformed retained message")
            continue
        left = ms_left(envelope, context.fleet.clock.now_ms()) if letter.flags & EXPIRES else None
        if left is not None and left <= 0:
            continue
        qos = min(letter.flags & 3, subscription.qos)
        if qos == 0:
            unread += len(envelope)
            if client.is_stuck or unread > context.rules.options.write_buffer:
                await client.has_read()
                unread = 0
            seconds = None if left is None else -(-left // 1000)
            message = Published(letter.topic, letter.data, 0, True, "", seconds, letter.properties, letter.binding)
            try:
                plain = decoded(message, context.fleet.inboxes.encoding)
                client.direct(plain, retain=True, identifiers=identifiers)
            except CannotDecode:
                context.counts.dropped("retained, QoS 0, key missing")
            except Malformed:
                context.counts.dropped("malformed retained message")
            continue
        properties = letter.properties + identifiers_of(identifiers)
        flags = qos | RETAIN | (letter.flags & EXPIRES)
        sealed = seal_mqtt(flags, letter.topic.encode(), properties, letter.data, binding=letter.binding)
        await context.fleet.inboxes.writer.retain(client.client_id, sealed, b"" if left is None else left)
    if number >= context.rules.options.retained_per_subscribe:
        context.counts.dropped("retained beyond the limit")


async def unsubscribe(context: Context, client: ClientLink, request: Unsubscribe) -> None:
    """End subscriptions, and acknowledge that."""
    left = {name: each for name, each in client.subscriptions.items() if name not in request.filters}
    reasons = [
        ReasonCode.SUCCESS if name in client.subscriptions else ReasonCode.NO_SUBSCRIPTION_EXISTED
        for name in request.filters
    ]
    if len(left) < len(client.subscriptions):
        await context.fleet.registry.change(client.client_id, client.epoch, left.values())
        if client.is_closed:
            return
        for name in client.subscriptions.keys() - left.keys():
            context.clients.unsubscribe(client, name)
        client.subscriptions = left
    client.send(encode.unsuback(request.packet_id, reasons, client.level))
    client.answered()
