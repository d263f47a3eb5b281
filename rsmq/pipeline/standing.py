"""How things stand in the server now: groups, their members, dead letters, device inboxes. Only reads."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta
from heapq import nlargest
from typing import Final

from rsmq.clock import from_epoch_ms
from rsmq.connect import Client, Connector
from rsmq.consumer.retention import why_not_trimmed
from rsmq.dlq import DeadLetter, DeadLetters
from rsmq.entry import place
from rsmq.inspector import GroupState, Inspector
from rsmq.keys import Keys
from rsmq.persistence import Devices
from rsmq.pipeline.facts import Backlog, Deaths, Group, Load, Spread, percentile
from rsmq.settings import Settings
from rsmq.topic import Topics

MOST_LETTERS: Final = 100_000
MOST_DEVICES: Final = 200_000
STEPS: Final = (0, 1, 10, 100, 1000)
LONGEST: Final = 10


class Standing:
    """Asks, and remembers in `cut` what was too much to count to its end."""

    def __init__(self, settings: Settings, spreads: Sequence[Spread]) -> None:
        self._settings, self._keys = settings, Keys(settings.prefix)
        self._volumes: Mapping[str, Spread] = {spread.topic: spread for spread in spreads}
        self.groups: list[Group] = []
        self.deaths: list[Deaths] = []
        self.backlog: Backlog | None = None
        self.cut: list[str] = []

    async def look(self, topics: Sequence[str]) -> None:
        """Ask everything about some topics, all if none is named."""
        url = self._settings.url
        assert url is not None, "a report has been given a server"
        async with Connector(url, self._settings).connected() as client:
            names = list(topics) or await Topics(client, self._keys, self._settings).names()
            inspector = Inspector(client, self._keys, self._settings)
            for name in names:
                for state in await inspector.groups(name):
                    self.groups.append(await self._group(client, inspector, state))
                    await self._dead(client, state)
            await self._devices(client)

    async def _group(self, client: Client, inspector: Inspector, state: GroupState) -> Group:
        loads = [
            Load(member.id, len(member.partitions), self._messages(state.topic, member.partitions))
            for member in await inspector.members(state.topic)
            if member.group == state.name and member.heard_ago is not None
        ]
        return Group(
            topic=state.topic,
            name=state.name,
            distribution=state.distribution,
            lag=state.lag,
            pending=state.pending,
            parked=state.parked,
            dead_letters=state.dead_letters,
            waiting=await self._waiting(client, state),
            loads=tuple(loads) if state.distribution == "hash" else (),
        )

    def _messages(self, topic: str, partitions: Sequence[int]) -> int:
        spread = self._volumes.get(topic)
        counts = () if spread is None else spread.messages
        return sum(counts[number] for number in partitions if number < len(counts))

    async def _waiting(self, client: Client, state: GroupState) -> timedelta | None:
        """Now, by the server's clock, less the time of the oldest entry that is not settled."""
        ids = [
            stream_id.encode()
            for share in state.shares
            for hold in await why_not_trimmed(client, self._keys, state.topic, share.partition)
            if hold.group == state.name
            for stream_id in (hold.oldest_pending, hold.oldest_parked, hold.oldest_undelivered)
            if stream_id
        ]
        if not ids:
            return None
        seconds, _ = await client.execute_command("TIME")
        oldest, _ = min(map(place, ids))
        return max(timedelta(0), from_epoch_ms(int(seconds) * 1000) - from_epoch_ms(oldest))

    async def _dead(self, client: Client, state: GroupState) -> None:
        topic = await Topics(client, self._keys, self._settings).find(state.topic)
        if topic is None or not state.dead_letters:
            return
        by_reason: dict[str, list[DeadLetter]] = {}
        seen = 0
        async for letter in DeadLetters(client, self._keys).iterate(topic, state.name):
            if seen == MOST_LETTERS:
                self.cut.append(
                    f"only the oldest {MOST_LETTERS} dead letters of {state.topic}/{state.name} are counted"
                )
                break
            seen += 1
            by_reason.setdefault(letter.reason, []).append(letter)
        for reason, letters in sorted(by_reason.items(), key=lambda pair: -len(pair[1])):
            took = sorted(filter(None, map(seconds_to_death, letters)))
            error = Counter(letter.error for letter in letters).most_common(1)[0][0]
            spans = (percentile(took, 0.5), percentile(took, 0.95))
            self.deaths.append(Deaths(state.topic, state.name, reason, len(letters), spans, error))

    async def _devices(self, client: Client) -> None:
        steps = [0] * (len(STEPS) + 1)
        total, connected, letters, dropped = 0, 0, 0, 0
        longest: list[tuple[int, str]] = []
        async for device in Devices(client, self._keys).iterate():
            if total == MOST_DEVICES:
                self.cut.append(f"only {MOST_DEVICES} devices are counted")
                break
            total += 1
            connected += device.gateway is not None
            letters += device.backlog
            dropped += device.dropped
            steps[bisect.bisect_left(STEPS, device.backlog)] += 1
            longest = nlargest(LONGEST, [*longest, (device.backlog, device.client_id)])
        if total:
            named = tuple((name, count) for count, name in longest if count)
            self.backlog = Backlog(
                total, connected, letters, dropped, tuple(zip((*STEPS, None), steps, strict=True)), named
            )


def seconds_to_death(letter: DeadLetter) -> float | None:
    """From the stream to the dead letters; None where the letter does not say."""
    ms = letter.origin.partition("-")[0]
    return max(0.0, letter.at.timestamp() - int(ms) / 1000) if ms.isdecimal() else None
