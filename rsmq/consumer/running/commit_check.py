"""Asks for committed effects before a message ends in any other way than handled.

A transaction may have committed although its attempt did not succeed: the worker died before it could settle, COMMIT
took longer than the timeout, its answer was lost, a middleware failed after it. Such a message is handled.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from itertools import groupby
from typing import Final, Literal

from rsmq.consumer.running.conclusion import Abandoned
from rsmq.consumer.waiting.lane import Lane
from rsmq.errors import ConfigError, StaleEpoch
from rsmq.handler.handler import Handler
from rsmq.handler.retry import AlreadyHandled, Outcome
from rsmq.handler.service import Commits
from rsmq.model.backoff import Backoff
from rsmq.model.log_throttle import ThrottledLog
from rsmq.model.message import Message

log = logging.getLogger("rsmq.effects")

FIRST_PAUSE: Final = 0.1
LONGEST_PAUSE: Final = 2.0
Answer = Abandoned | Literal[False] | None
"""None: its effects are committed. False: they are not, and will not be. Or why that is not for this member to say."""


class CommitCheck:
    """Of one handler. Without effects it asks nobody."""

    def __init__(self, handler: Handler) -> None:
        self._service = next((each for each in handler.services if isinstance(each, Commits)), None)
        self._throttled = ThrottledLog(log)
        self._is_ending = False

    def end(self) -> None:
        """The worker ends: nothing waits for the database any more."""
        self._is_ending = True

    @property
    def is_needed(self) -> bool:
        """Whether the handler has effects."""
        return self._service is not None

    async def outcomes(self, messages: Sequence[Message], outcomes: Sequence[Outcome]) -> list[Outcome]:
        """The outcomes of a call, after a look into the database: committed is handled. Without an answer before the
        lease is over, the next owner has to ask."""
        found = list(outcomes)
        for at, outcome in enumerate(found):
            if isinstance(outcome, StaleEpoch):
                found[at] = Abandoned("fenced", outcome.epoch)
        if self._service is None:
            return found
        asked = [at for at, outcome in enumerate(found) if may_have_committed(outcome)]
        for lane, run in groupby(asked, lambda at: messages[at].origin):
            numbers = list(run)
            answers = await self.ask(lane, [messages[at] for at in numbers])
            for at, answer in zip(numbers, answers, strict=True):
                if answer is not False:
                    found[at] = answer
        return found

    async def ask(self, lane: Lane, messages: Sequence[Message]) -> list[Answer]:
        """The answer for each message. Waits for the database as long as the lease is held."""
        if self._service is None:
            return [False for _ in messages]
        backoff = Backoff(FIRST_PAUSE, LONGEST_PAUSE)
        while lane.lease.is_held():
            try:
                return [None if each else False for each in await self._service.committed(messages)]
            except StaleEpoch as error:
                return [Abandoned("fenced", error.epoch)] * len(messages)
            except ConfigError:  # there is no table that a mark could be in
                return [False for _ in messages]
            except Exception as error:
                self._throttled.warn("messages wait for the database, which knows whether they are handled", error)
            if self._is_ending:
                return [Abandoned("stop")] * len(messages)
            await asyncio.sleep(backoff.next())
        return [Abandoned("lost")] * len(messages)


def may_have_committed(outcome: Outcome) -> bool:
    """Whether the message would end, or wait for its next attempt. What is given back is asked for then."""
    if isinstance(outcome, Abandoned):
        return outcome.reason == "cancelled"
    return outcome is not None and not isinstance(outcome, AlreadyHandled)
