"""The router stores the messages of a topic in the inboxes of the clients that have subscribed to them."""

from __future__ import annotations

import logging
import zlib
from collections import defaultdict
from collections.abc import Callable

from rsmq.gateway.message import Copy, Published, combine, from_headers
from rsmq.gateway.packet import Subscription
from rsmq.gateway.registry import Registry
from rsmq.gateway.shares import choose
from rsmq.gateway.topic_filter import SHARE
from rsmq.handler.handler import Handler, build_handler
from rsmq.model.message import Message
from rsmq.persistence.inbox_writer import InboxWriter, Receipt

log = logging.getLogger("rsmq.gateway")

GROUP = "mqtt"
BATCH = 500


class Router:
    """The batch handler of the group `mqtt`. It must get the messages of a partition in stream order.

    The stream ids are the positions of its letters, so a batch that is repeated stores nothing twice. Subscriptions are
    read after the messages: see `Registry`.
    """

    def __init__(self, registry: Registry, writer: Callable[[], InboxWriter]) -> None:
        self._registry, self._writer = registry, writer
        self.routed = self.letters = 0
        self.under_way: dict[str, int] = {}
        """The partitions of which messages are being routed, and when the oldest was stored, in ms of the server."""

    def handler(self, topic: str) -> Handler:
        """This router as the handler of a topic. A new group begins at the end: what is older meets no subscription."""
        return build_handler(
            self.route, topic, group=GROUP, ordering="partition", batch=BATCH, start="latest"
        )  # fmt: skip

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
        oldest = dict[tuple[str, int], str]()
        for message in messages:
            oldest.setdefault((message.topic, message.partition), message.stream_id)
        found = {f"{topic}.{number}": int(first.partition("-")[0]) for (topic, number), first in oldest.items()}
        self.under_way.update(found)
        return list(found)

    async def _route(self, messages: list[Message]) -> list[BaseException | None] | None:
        await self._registry.catch_up()
        receipts = list[Receipt | None]()
        for message in messages:
            receipts.append(self._deliver(message))
        outcomes: list[BaseException | None] = [None] * len(messages)
        for at, receipt in enumerate(receipts):
            try:
                if receipt is not None:
                    await receipt.complete()
            except Exception as error:
                outcomes[at] = error
        self.routed += len(messages)
        return outcomes if any(each is not None for each in outcomes) else None

    def _deliver(self, message: Message) -> Receipt | None:
        """Queue the letters of one message."""
        try:
            published = from_headers(message.headers, message.data)
        except ValueError as error:
            log.warning("message %s has broken MQTT headers and is not routed: %s", message.id, error)
            return None
        if published is None:
            return None
        recipients = defaultdict[str, list[Subscription]](list)
        shares = list[str]()
        for client, subscription in self._registry.tree.match(published.topic):
            if subscription.filter.startswith(SHARE):
                shares.append(subscription.filter)
            elif not (subscription.no_local and client == published.client):
                recipients[client].append(subscription)
        if not recipients and not shares:
            return None
        return self._store(message, published, recipients, shares)

    def _store(
        self, message: Message, published: Published, recipients: dict[str, list[Subscription]], shares: list[str]
    ) -> Receipt:
        milliseconds, _, number = message.stream_id.partition("-")
        position = f"{milliseconds:0>20}{number:0>20}"
        # `&`: only for a session that has not ended
        source = f"source:&{message.topic}.{message.partition}/{GROUP}"
        writer, stored, sealed = self._writer(), Receipt(), dict[Copy, bytes]()
        for client, found in recipients.items():
            copy = combine(published, found)
            assert copy is not None, "a recipient has a subscription"
            envelope = sealed.get(copy)
            if envelope is None:
                envelope = sealed[copy] = published.envelope(copy.qos, retain=copy.retain, identifiers=copy.identifiers)
            writer.put(client, source, position, milliseconds, published.ttl_ms, envelope, stored)
        for share in shares:
            members = self._registry.shares[share]
            client = choose(position, members, self._registry.offline)
            copy = combine(published, (members[client],))
            assert copy is not None, "a member has a subscription"
            envelope = published.envelope(copy.qos, retain=copy.retain, identifiers=copy.identifiers, share=share)
            # a client may get the message by a subscription of its own, too: each has its own positions
            own = f"{source}/{zlib.crc32(share.encode()):08x}"
            writer.put(client, own, position, milliseconds, published.ttl_ms, envelope, stored)
        self.letters += len(recipients) + len(shares)
        return stored

    def __repr__(self) -> str:
        return f"<Router routed={self.routed} letters={self.letters}>"
