"""The three providers that reach a user: PUSH, SMS and AlimTalk.

They are simulated: each answers after its own latency, is now and then unavailable, and prints what it has taken. Which
call fails is drawn from what is sent, so that every run fails at the same places. Each call is noted in the file CALLS,
if there is one, so that `run.py` sees that no limit was exceeded.
"""

import asyncio
import os
import time
from dataclasses import dataclass
from datetime import timedelta
from random import Random

from pydantic import BaseModel

PER = timedelta(seconds=1)
CALLS = os.environ.get("CALLS")


class Notification(BaseModel):
    """What a user is to read."""

    user: str
    text: str


class ChannelUnavailable(Exception):
    """The provider did not take it."""


@dataclass(frozen=True)
class Channel:
    """One way to reach a user. `outage` is the share of calls that its provider refuses. It takes so many `calls` in
    the time `PER`; of these `to_a_user` are for the same one."""

    name: str
    latency: timedelta
    outage: float
    calls: int
    to_a_user: int

    async def send(self, notification: Notification, number: str = "-", attempt: int = 1) -> None:
        """Return when the provider has taken it, under the id of the notification. Raises ChannelUnavailable."""
        self._note(notification)
        await asyncio.sleep(self.latency.total_seconds())
        if Random(f"{self.name} {notification} {attempt}").random() < self.outage:
            raise ChannelUnavailable(self.name)
        print(f"{number} {self.name} {notification.user}: {notification.text}", flush=True)

    def _note(self, notification: Notification) -> None:
        if CALLS:
            with open(CALLS, "a") as calls:
                calls.write(f"{self.name} {notification.user} {time.time()}\n")


PUSH = Channel("PUSH", latency=timedelta(milliseconds=50), outage=0.3, calls=40, to_a_user=3)
SMS = Channel("SMS", latency=timedelta(milliseconds=120), outage=0.2, calls=20, to_a_user=2)
ALIMTALK = Channel("AlimTalk", latency=timedelta(milliseconds=80), outage=0.2, calls=10, to_a_user=2)
