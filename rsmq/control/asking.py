"""What asks the members of a group: which groups a message is for, and waiting for the answer of its owner."""

from __future__ import annotations

import asyncio
from typing import Final
from uuid import uuid4

from rsmq.control.finder import Found
from rsmq.errors import ConfigError, NotPermitted
from rsmq.model.backoff import Backoff
from rsmq.model.clock import awake
from rsmq.model.delivery_state import DeliveryQuestion, DeliveryState, read_delivery_state
from rsmq.model.keys import Keys
from rsmq.model.settings import Settings, lease_margin
from rsmq.redis.client.connector import Client
from rsmq.redis.pubsub import announce
from rsmq.redis.streams import group_names

MOST_ATTEMPTS: Final = 1000
"""A message that is parked without being pending is found up to so many attempts."""
FIRST_PAUSE: Final = 0.005
LONGEST_PAUSE: Final = 0.25
"""Seconds between two questions for the answer of the owner."""
ANSWER_SECONDS: Final = 0.5
"""So long a member has to say what a message waits for: one whose event loop is blocked does not."""
ANSWER_PAUSES: Final = (0.002, 0.02)
"""Seconds between two looks for its answer: the first, and the longest."""


async def groups_of_message(client: Client, keys: Keys, found: Found, group: str | None) -> list[str]:
    """The groups that get a stored message: `group`, or all of them. Raises ConfigError if there is no such group."""
    names = await group_names(client, keys, found.topic.name, found.partition)
    if group is not None and group not in names:
        raise ConfigError(f"topic {found.topic.name!r} has no group {group!r}: it has {', '.join(names) or 'none'}")
    addressee = found.message.addressee
    return [each for each in names if group in (None, each) and addressee in (None, each.encode())]


async def refuse_one_group(client: Client, keys: Keys, found: Found, group: str | None, word: str) -> None:
    """Raise ConfigError if a delayed message is meant to be `word` for one of several groups only."""
    at = (found.topic.name, found.partition)
    if group is not None and (others := set(await group_names(client, keys, *at)) - {group}):
        raise ConfigError(
            f"{found.message.id} is delayed, and so not in the stream of any group yet: {word} it for all groups "
            f"(without group=), or when it is due. {found.topic.name!r} is read by {', '.join(sorted(others))}, too"
        )


class Waking:
    """Wakes the members of a group, so that the owner of a message looks, for at most a lease."""

    def __init__(self, client: Client, keys: Keys, settings: Settings, topic: str, group: str) -> None:
        self._client = client
        self._keys = keys
        self._topic = topic
        self._group = group
        self._deadline = awake() + settings.lease_ttl.total_seconds() + lease_margin(settings).total_seconds()
        self._backoff = Backoff(FIRST_PAUSE, LONGEST_PAUSE)

    @property
    def is_over(self) -> bool:
        """Whether the owner had its time."""
        return awake() >= self._deadline

    async def wake(self) -> None:
        """Let them look."""
        await announce(self._client, self._keys, self._topic, self._group)

    async def wait(self) -> None:
        """Let them look, and leave the owner some time."""
        await self.wake()
        await asyncio.sleep(self._backoff.next())


async def ask_member(client: Client, keys: Keys, at: tuple[str, int, str], entry_id: bytes) -> DeliveryState | None:
    """What a message waits for, as the member says that has it: `at` is topic, partition and group.

    None if no member answers: there is none, it is busy, of an older version, or the user of the server may not
    publish in the channel of the group.
    """
    question = DeliveryQuestion(at[1], entry_id, uuid4().hex)
    try:
        heard = await announce(client, keys, at[0], at[2], question.pack())
    except NotPermitted:
        return None
    if not heard and not client.is_cluster:
        return None
    deadline, backoff = awake() + ANSWER_SECONDS, Backoff(*ANSWER_PAUSES)
    while True:
        is_last = awake() >= deadline  # looked at once more: this process may have stood still
        packed = await client.execute_command("GET", keys.reply(question.request))
        if packed is not None or is_last:
            return None if packed is None else read_delivery_state(packed)
        await asyncio.sleep(backoff.next())
