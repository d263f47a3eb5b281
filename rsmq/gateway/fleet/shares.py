"""Shared subscriptions: each message goes to one member of a share."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Collection, Iterable, Mapping
from typing import Final

from rsmq.errors import BrokerUnavailable, Malformed
from rsmq.gateway.fleet.message import identifiers_of
from rsmq.gateway.fleet.registry import Registry
from rsmq.gateway.protocol.packet import PUBLISH, RefusedPacket, Subscription
from rsmq.gateway.protocol.properties import read_properties, write_varint
from rsmq.gateway.protocol.topic_filter import SHARE
from rsmq.model.keys import Keys
from rsmq.model.log_names import name_in_log
from rsmq.model.record import whole
from rsmq.persistence.inbox_writer import InboxWriter, Receipt
from rsmq.persistence.letter import EXPIRES, STAMP, MqttLetter, pack_letter, read_mqtt, seal_mqtt
from rsmq.redis.client.connector import Client

log = logging.getLogger("rsmq.gateway")

PAGE: Final = 500


def has_shares(subscriptions: Iterable[Subscription]) -> bool:
    """Whether one of them is shared."""
    return any(each.filter.startswith(SHARE) for each in subscriptions)


def choose(position: str, members: Mapping[str, Subscription], offline: Collection[str]) -> str:
    """The member that gets a message. A client that is connected comes first.

    The same position chooses the same member as long as it is there, so that a batch that is routed again does not go
    to others: each member has a pseudo-random weight, and the highest one wins.
    """
    online = [client for client in members if client not in offline] if offline else list(members)
    found = online or list(members)
    if len(found) == 1:
        return found[0]
    seed = position.encode()
    return max(found, key=lambda client: hashlib.blake2b(client.encode(), digest_size=8, key=seed[:64]).digest())


class Shares:
    """Hands the messages of a member whose session has ended to the others."""

    def __init__(self, client: Client, keys: Keys, registry: Registry, writer: InboxWriter) -> None:
        self._client = client
        self._keys = keys
        self._registry = registry
        self._writer = writer

    async def pass_on(self, client: str) -> None:
        """Pass on what a member has not acknowledged. It is not a member any more.

        A message of QoS 2 that was on its way to it is not sent to another one [4.8.2-5]. Repeated after a crash, this
        may send a message of QoS 1 twice.
        """
        inbox, session, _, _ = self._keys.device(client)
        await self._registry.catch_up()
        sent = whole(await self._client.execute_command("HGET", session, "sent")) or 0
        after, number, limit = b"-inf", 0, self._client.page_limit
        while True:
            command = ("ZRANGEBYSCORE", inbox, after, "+inf", "LIMIT", 0, limit.of(PAGE))
            refs = await self._client.execute_command(*command)
            if not refs:
                break
            seqs = [whole(ref) or 0 for ref in refs]  # another client may write anything: there is no letter 0
            names = [self._keys.letter(client, seq) for seq in seqs]
            try:
                with limit.asking():
                    found = await self._client.execute_command("MGET", *names)
            except BrokerUnavailable as error:
                if error.is_broken and len(refs) > 1:
                    continue
                raise
            receipt = Receipt()
            for seq, envelope in zip(seqs, found, strict=True):
                if envelope:
                    number += await self._pass_on(client, seq, envelope, receipt, was_sent=seq <= sent)
            await receipt.complete()
            after = b"(" + refs[-1]
        if number:
            log.info("client %s has left its shares: %d messages go to other members", name_in_log(client), number)

    async def _pass_on(self, client: str, seq: int, envelope: bytes, receipt: Receipt, *, was_sent: bool) -> bool:
        try:
            letter = read_mqtt(envelope)
        except Malformed:
            return False
        members = self._registry.shares.get(letter.share, {})
        if not members or (letter.flags & 3 == 2 and was_sent):
            return False
        position = f"{client}/{seq}"
        chosen = choose(position[-64:], members, self._registry.offline)
        left: int | bytes = b""
        if letter.flags & EXPIRES:
            left = int.from_bytes(envelope[7:STAMP], "big") - int.from_bytes(envelope[1:7], "big")
        published = int.from_bytes(envelope[1:7], "big")
        try:
            sealed = seal_for(letter, members[chosen])
        except RefusedPacket:  # another client has written its properties
            return False
        # a source of its own: a repetition of this step is skipped, if it chooses the same member
        source = f"source:&{hashlib.blake2b(client.encode(), digest_size=6).hexdigest()}"
        packed = pack_letter(b"%016d%016d" % (published, seq), published, left, sealed)
        self._writer.put((chosen,), source, packed, receipt)
        return True

    def __repr__(self) -> str:
        return f"<Shares {len(self._registry.shares)}>"


def seal_for(letter: MqttLetter, subscription: Subscription) -> bytes:
    """The message as another member gets it: with the QoS and the identifier of its subscription."""
    raw = write_varint(len(letter.properties)) + letter.properties
    _, forwarded, _ = read_properties(raw, 0, len(raw), PUBLISH)
    identifiers = (subscription.identifier,) if subscription.identifier else ()
    flags = (letter.flags & ~3) | min(letter.flags & 3, subscription.qos)
    properties = forwarded + identifiers_of(identifiers)
    return seal_mqtt(flags, letter.topic.encode(), properties, letter.data, letter.share, letter.binding)
