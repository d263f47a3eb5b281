"""What became of a message: each run of a handler, and where the message is now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rsmq.dlq import DeadLetter
from rsmq.handler import Handler
from rsmq.message import Message
from rsmq.retry import batch_outcomes

Status = Literal["done", "waiting", "dead"]


@dataclass(frozen=True, slots=True)
class Run:
    """One call of a handler for one message. `error` is what it raised, or returned for this item of a batch."""

    topic: str
    group: str
    message_id: str
    attempt: int
    result: Any
    error: BaseException | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """A message in one group. `done`: settled; `waiting`: for its retry or its time; `dead`: a dead letter.

    `error` and `result` are of the last run; `runs` are all of them, `dead_letter` is set when it is dead.
    """

    topic: str
    group: str
    handler: str
    message_id: str
    status: Status
    runs: tuple[Run, ...]
    dead_letter: DeadLetter | None = None

    @property
    def is_done(self) -> bool:
        """Whether it is settled."""
        return self.status == "done"

    @property
    def attempts(self) -> int:
        """How often its handler has run."""
        return len(self.runs)

    @property
    def error(self) -> BaseException | None:
        """What the last run ended with; None if it ended well, or never began."""
        return self.runs[-1].error if self.runs else None

    @property
    def result(self) -> Any:
        """What the handler returned in the last run."""
        return self.runs[-1].result if self.runs else None


def runs_of(work: Message | Sequence[Message], handler: Handler, result: Any, error: BaseException | None) -> list[Run]:
    """One run a message from what a call of the handler returned or raised."""
    messages = [work] if isinstance(work, Message) else list(work)
    is_batch = handler.batch is not None
    errors = [error] * len(messages)
    if error is None and is_batch:
        errors = batch_outcomes(result, messages)
    return [
        Run(message.topic, message.group, message.id, message.attempt, result, each)
        for message, each in zip(messages, errors, strict=True)
    ]
