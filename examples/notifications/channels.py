"""The failover chain: PUSH, else SMS, else AlimTalk.

The providers are simulated: each answers after its own latency and is now and then unavailable. Which call fails is
drawn from what is sent, so that every run fails at the same places.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from random import Random

from pydantic import BaseModel


class Notification(BaseModel):
    """What a user is to read."""

    user: str
    text: str


class ChannelUnavailable(Exception):
    """The provider did not take it."""


class NoChannelAvailable(Exception):
    """No channel of the chain took it."""


@dataclass(frozen=True)
class Channel:
    """One way to reach a user. `outage` is the share of calls that its provider refuses."""

    name: str
    latency: timedelta
    outage: float

    async def send(self, notification: Notification, attempt: int) -> None:
        """Return when the provider has taken it. Raises ChannelUnavailable."""
        await asyncio.sleep(self.latency.total_seconds())
        if Random(f"{self.name} {notification} {attempt}").random() < self.outage:
            raise ChannelUnavailable(self.name)


@dataclass(frozen=True)
class FailoverChain:
    """Channels in the order of preference: the first that takes a notification wins."""

    channels: Sequence[Channel]

    async def send(self, notification: Notification, attempt: int = 1) -> Channel:
        """The channel that took it. Raises NoChannelAvailable."""
        for channel in self.channels:
            try:
                await channel.send(notification, attempt)
            except ChannelUnavailable:
                continue
            return channel
        raise NoChannelAvailable(f"none of {', '.join(channel.name for channel in self.channels)} took it")


CHAIN = FailoverChain(
    [
        Channel("PUSH", latency=timedelta(milliseconds=50), outage=0.3),
        Channel("SMS", latency=timedelta(milliseconds=120), outage=0.2),
        Channel("AlimTalk", latency=timedelta(milliseconds=80), outage=0.2),
    ]
)
