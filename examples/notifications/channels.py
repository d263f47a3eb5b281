"""The three providers that reach a user: PUSH, SMS and AlimTalk.

They are simulated: each answers after its own latency, is now and then unavailable or too busy, and prints what it has
taken. Which call fails is drawn from what is sent, so that every run fails at the same places. Each call is noted in
the file CALLS, if there is one, so that `run.py` sees that no limit was exceeded.
"""

import asyncio
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from random import Random

from pydantic import BaseModel

PER = timedelta(seconds=1)
CALLS = os.environ.get("CALLS")
BUSY_FOR = timedelta(milliseconds=200)


class Notification(BaseModel):
    """What a user is to read."""

    user: str
    text: str


class ChannelUnavailable(Exception):
    """The provider did not take it."""


class TooManyRequests(Exception):
    """The provider says "not now", as with status 429; `after` is its Retry-After."""

    after = BUSY_FOR


class NoAddress(Exception):
    """The provider knows no address of the user: trying again is no use."""


@dataclass(frozen=True)
class Channel:
    """One way to reach a user. `outage` is the share of calls that its provider refuses. It takes so many `calls` in
    the time `PER`; of these `to_a_user` are for the same one. One call in `busy` is answered with "not now"."""

    name: str
    latency: timedelta
    outage: float
    calls: int
    to_a_user: int
    busy: int = 50
    without: str = ""
    """Users whose name begins so have no address here."""
    made: Iterator[int] = field(default_factory=lambda: count(1), compare=False, repr=False)
    """Numbers of its calls."""

    async def send(self, notification: Notification, number: str = "-", attempt: int = 1) -> None:
        """Return when the provider has taken it, under the id of the notification.

        Raises ChannelUnavailable, TooManyRequests or NoAddress."""
        if next(self.made) % self.busy == 0:
            raise TooManyRequests(self.name)
        self._note(notification)
        await asyncio.sleep(self.latency.total_seconds())
        if self.without and notification.user.startswith(self.without):
            raise NoAddress(f"{self.name} has no address of {notification.user}")
        if Random(f"{self.name} {notification} {attempt}").random() < self.outage:
            raise ChannelUnavailable(self.name)
        print(f"{number} {self.name} {notification.user}: {notification.text}", flush=True)

    def _note(self, notification: Notification) -> None:
        if CALLS:
            with open(CALLS, "a") as calls:
                calls.write(f"{self.name} {notification.user} {time.time()}\n")


PUSH = Channel("PUSH", latency=timedelta(milliseconds=50), outage=0.3, calls=40, to_a_user=3, without="guest")
SMS = Channel("SMS", latency=timedelta(milliseconds=120), outage=0.2, calls=20, to_a_user=2)
ALIMTALK = Channel("AlimTalk", latency=timedelta(milliseconds=80), outage=0.2, calls=10, to_a_user=2)
