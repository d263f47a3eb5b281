"""The three providers that reach a user: PUSH, SMS and AlimTalk.

They are simulated: each answers after its own latency, is now and then unavailable, and prints what it has taken. Which
call fails is drawn from what is sent, so that every run fails at the same places.
"""

import asyncio
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


@dataclass(frozen=True)
class Channel:
    """One way to reach a user. `outage` is the share of calls that its provider refuses."""

    name: str
    latency: timedelta
    outage: float

    async def send(self, notification: Notification, number: str = "-", attempt: int = 1) -> None:
        """Return when the provider has taken it, under the id of the notification. Raises ChannelUnavailable."""
        await asyncio.sleep(self.latency.total_seconds())
        if Random(f"{self.name} {notification} {attempt}").random() < self.outage:
            raise ChannelUnavailable(self.name)
        print(f"{number} {self.name} {notification.user}: {notification.text}", flush=True)


PUSH = Channel("PUSH", latency=timedelta(milliseconds=50), outage=0.3)
SMS = Channel("SMS", latency=timedelta(milliseconds=120), outage=0.2)
ALIMTALK = Channel("AlimTalk", latency=timedelta(milliseconds=80), outage=0.2)
