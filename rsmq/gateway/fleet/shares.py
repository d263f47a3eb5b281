"""Shared subscriptions: each message goes to one member of a share."""

from __future__ import annotations

import hashlib
import logging
import zlib
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from pydantic_core import from_json, to_json

from rsmq.errors import BrokerUnavailable, Malformed
from rsmq.gateway.fleet.message import identifiers_of
from rsmq.gateway.fleet.registry import Registry
from rsmq.gateway.fleet.scripts import KEEP_CHOICES
from rsmq.gateway.protocol.packet import PUBLISH, RefusedPacket, Subscription
from rsmq.gateway.protocol.properties import read_properties, write_varint
from rsmq.gateway.protocol.topic_filter import SHARE
from rsmq.model.clock import server_ms
from rsmq.model.keys import Keys
from rsmq.model.log_names import name_in_log
from rsmq.model.record import whole
from rsmq.persistence.inbox_writer import InboxWriter, Receipt
from rsmq.persistence.letter import EXPIRES, STAMP, MqttLetter, pack_letter, read_mqtt, seal_mqtt
from rsmq.redis.client.connector import Client
from rsmq.redis.client.script_batcher import ScriptBatcher

log = logging.getLogger("rsmq.gateway")

PAGE: Final = 500
CHOICES: Final = "share"
"""The step of a message that has its choices."""
MOST_KEPT: Final = 1000
"""Choices of a partition, before those of settled messages are removed: of two pages."""


def has_shares(subscriptions: Iterable[Subscription]) -> bool:
    """Whether one of them is shared."""
    return any(each.filter.startswith(SHARE) for each in subscriptions)


def candidates(members: Iterable[str], offline: Collection[str]) -> list[str]:
    """The members among which a message is shared: those that are connected, or all if none is."""
    every = list(members)
    return [client for client in every if client not in offline] or every


def choose(position: str, members: Mapping[str, Subscription], offline: Collection[str]) -> str:
    """The member that gets a message. A client that is connected comes first.

    The same position chooses the same member as long as it is there, so that a batch that is routed again does not go
    to others: each member has a pseudo-random weight, and the highest one wins.
    """
    found = candidates(members, offline)
    if len(found) == 1:
        return found[0]
    seed = position.encode()
    return max(found, key=lambda client: hashlib.blake2b(client.encode(), digest_size=8, key=seed[:64]).digest())


class Choice(NamedTuple):
    """The members of one share that were chosen for a message: the last one gets it.

    Those before it were not members any more when the message was routed again. Whether they had got it is not known,
    so their letters are a source of their own at the next one: it may have later letters of the same page already.
    """

    share: str
    chosen: tuple[str, ...]

    @property
    def member(self) -> str:
        """The one that gets the message."""
        return self.chosen[-1]

    def source(self, source: str) -> str:
        """The source of its letter, of a partition."""
        own = f"{source}/{zlib.crc32(self.share.encode()):08x}"
        gone = "\0".join(self.chosen[:-1])
        return f"{own}/{zlib.crc32(gone.encode()):08x}" if gone else own


Decide = Callable[[Sequence[Choice]], Sequence[Choice]]
"""Gets what is kept for a message, and returns what is to be kept: the same if that is still possible."""


def choices_of(
    kept: Iterable[Choice], shares: Iterable[str], position: str, members: Mapping[str, Mapping[str, Subscription]],
    offline: Collection[str],
) -> tuple[Choice, ...]:  # fmt: skip
    """Which member of each share gets a message: the one that is kept, unless it is not a member any more.

    What is kept of other shares stays. A share without members is left out.
    """
    found = {each.share: each for each in kept}
    for share in shares:
        chosen, those = found[share].chosen if share in found else (), members.get(share)
        if those and (not chosen or chosen[-1] not in those):
            found[share] = Choice(share, (*chosen, choose(position, those, offline)))
    return tuple(found.values())


def write_choices(choices: Iterable[Choice]) -> bytes:
    """As they are kept: JSON, share -> members."""
    return to_json({each.share: each.chosen for each in choices})


def read_choices(raw: bytes) -> tuple[Choice, ...]:
    """What is kept. Another client may have written anything, which is left out."""
    try:
        found = from_json(raw or b"{}")
    except ValueError:
        return ()
    pairs = found.items() if isinstance(found, dict) else ()
    return tuple(
        Choice(share, tuple(chosen))
        for share, chosen in pairs
        if isinstance(chosen, list) and chosen and all(isinstance(each, str) for each in chosen)
    )


class KeptChoices:
    """Keeps beside a partition which members get its messages, so that a page which is routed again chooses the same.

    They are kept before the first letter is stored. Two routers of one partition, of which one is late, agree on what
    was kept first.
    """

    def __init__(self, keys: Keys, batcher: ScriptBatcher) -> None:
        self._keys, self._batcher = keys, batcher

    async def keep(
        self, topic: str, partition: int, group: str, wanted: Mapping[bytes, Decide]
    ) -> list[Sequence[Choice]]:
        """Of each message, by stream id, what is kept at last. Nothing runs between the last decisions and the return:
        they hold for the subscriptions of this moment. Raises BrokerError.
        """
        keys = (self._keys.stream(topic, partition), self._keys.steps(topic, partition, group))
        seen = dict.fromkeys(wanted, b"")
        while True:
            chosen = {entry_id: decide(read_choices(seen[entry_id])) for entry_id, decide in wanted.items()}
            packed = {entry_id: write_choices(each) for entry_id, each in chosen.items()}
            new = [entry_id for entry_id in wanted if packed[entry_id] != seen[entry_id]]
            if not new:
                return list(chosen.values())
            args = [part for each in new for part in (each, seen[each], packed[each])]
            replies = await self._batcher.submit(KEEP_CHOICES, keys, (group, CHOICES, MOST_KEPT, *args))
            seen.update(zip(new, replies, strict=True))

    def __repr__(self) -> str:
        return f"<KeptChoices {self._keys.prefix}>"


class LeftLetter(NamedTuple):
    """A letter of a member that has left. `position`: of its letter for another one, which grows with `seq`."""

    seq: int
    position: bytes
    envelope: bytes

    def __repr__(self) -> str:
        return f"<LeftLetter {self.seq}>"


Placed = dict[tuple[str, str, bytes], LeftLetter]
"""By member, source and letter: what the member that has left has of it."""


class Shares:
    """Hands the messages of a member whose session has ended to the others."""

    def __init__(self, client: Client, keys: Keys, registry: Registry, writer: InboxWriter) -> None:
        self._client = client
        self._keys = keys
        self._registry = registry
        self._writer = writer

    async def pass_on(self, client: str) -> None:
        """Pass on what a member has not acknowledged. It is not a member any more, and its session takes no letters.

        A message of QoS 2 that was on its way to it is not sent to another one [4.8.2-5]. Repeated after a crash, or by
        another gateway meanwhile, this sends none twice unless other members have come, gone or connected.
        """
        session = self._keys.session(client)
        now_ms, number = await self._look(session), 0
        sent = whole(await self._client.execute_command("HGET", session, "sent")) or 0
        async for left in self._left_by(client):
            refusals = dict[int, frozenset[str]]()
            while left:
                # by share and members that have refused: of this page, the members may be others at the next one
                sources = dict[tuple[str, frozenset[str]], str]()
                receipt, placed = Receipt(), Placed()
                for each in left:
                    gone = refusals.get(each.seq, frozenset())
                    put = self._pass_on(client, each, receipt, sources, placed, gone, now_ms, was_sent=each.seq <= sent)
                    number += put and not gone
                await receipt.complete()
                refused = [(each[0], placed[each]) for each in receipt.refused if each in placed]
                for member, each in refused:  # it has left since it was chosen
                    refusals[each.seq] = refusals.get(each.seq, frozenset()) | {member}
                left = sorted(each for _, each in refused)
                if left:
                    now_ms = await self._look(session)
        if number:
            log.info("client %s has left its shares: %d messages go to other members", name_in_log(client), number)

    async def _look(self, session: str) -> int:
        """Read who is a member. Returns when they were, in ms of the server.

        What they get now is of that time, not of the time of its publisher: else one that has come since would refuse
        it as published before its session began.
        """
        await self._registry.catch_up()
        return server_ms(await self._client.node_for(session).execute_command("TIME"))

    async def _left_by(self, client: str) -> AsyncIterator[list[LeftLetter]]:
        """The letters of a member, in pages."""
        after, newest, limit = b"-inf", 0, self._client.page_limit
        while True:
            command = ("ZRANGEBYSCORE", self._keys.inbox(client), after, "+inf", "LIMIT", 0, limit.of(PAGE))
            refs = await self._client.execute_command(*command)
            if not refs:
                return
            seqs = [whole(ref) or 0 for ref in refs]  # another client may write anything: there is no letter 0
            names = [self._keys.letter(client, seq) for seq in seqs]
            try:
                with limit.asking():
                    found = await self._client.execute_command("MGET", *names)
            except BrokerUnavailable as error:
                if error.is_broken and len(refs) > 1:
                    continue
                raise
            page = list[LeftLetter]()
            for seq, envelope in zip(seqs, found, strict=True):
                if envelope:
                    # seqs begin anew with a session, times do not; those of several partitions are in any order
                    newest = max(newest, int.from_bytes(envelope[1:7], "big"))
                    page.append(LeftLetter(seq, b"%016d%016d" % (newest, seq), envelope))
            yield page
            after = b"(" + refs[-1]

    def _pass_on(
        self, client: str, left: LeftLetter, receipt: Receipt, sources: dict[tuple[str, frozenset[str]], str],
        placed: Placed, gone: frozenset[str], now_ms: int, *, was_sent: bool,
    ) -> bool:  # fmt: skip
        try:
            letter = read_mqtt(left.envelope)
        except Malformed:
            return False
        members = self._registry.shares.get(letter.share, {})
        if gone:
            members = {each: its for each, its in members.items() if each not in gone}
        if not members or (letter.flags & 3 == 2 and was_sent):
            return False
        position = f"{client}/{left.seq}"
        chosen = choose(position[-64:], members, self._registry.offline)
        ttl: int | bytes = b""
        if letter.flags & EXPIRES:
            ttl = max(0, int.from_bytes(left.envelope[7:STAMP], "big") - now_ms)
        try:
            sealed = seal_for(letter, members[chosen])
        except RefusedPacket:  # another client has written its properties
            return False
        # a source of its own for each choice of members: what is repeated for the same ones is skipped, and a later
        # letter that one of them has got before hides none that is meant for it now
        if (letter.share, gone) not in sources:
            among = "\0".join(sorted(candidates(members, self._registry.offline)))
            name = hashlib.blake2b(client.encode(), digest_size=6).hexdigest()
            sources[letter.share, gone] = f"source:&{name}/{zlib.crc32(among.encode()):08x}"
        source = sources[letter.share, gone]
        packed = pack_letter(left.position, now_ms, ttl, sealed)
        self._writer.put((chosen,), source, packed, receipt)
        placed[chosen, source, packed] = left
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
