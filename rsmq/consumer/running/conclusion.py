"""What becomes of a message after its call has ended: one decision for single messages and for batches. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta

from rsmq.handler.retry import Ack, Bury, Outcome, Park, RetryPolicy, decide


class Abandoned(Exception):
    """The call was cancelled because the lease is lost or the worker stops: no attempt, no outcome. Or its commit was
    `fenced`: the database knows a newer `epoch` of the partition."""

    def __init__(self, reason: str, epoch: int = 0) -> None:
        super().__init__(reason)
        self.reason = reason
        self.epoch = epoch


class NotDue(Exception):
    """The message was to start, and its retry is not due for `wait`: it was taken over behind an earlier message of its
    key, so it has no timer. No attempt, no outcome."""

    def __init__(self, wait: timedelta) -> None:
        super().__init__(f"its retry is due in {wait}")
        self.wait = wait


@dataclass(frozen=True, slots=True)
class Settle:
    """It is done. `is_cancelled`: a cancellation came while it ran, and the attempt did not succeed."""

    is_cancelled: bool = False


@dataclass(frozen=True, slots=True)
class HandBack:
    """Its call did not end by itself, so it counts as no attempt. `is_stop`: the worker stops, or gives the partition
    up, and gives it back. Otherwise the lease is lost, and the next owner takes it over. `newer`: the epoch for which
    the partition is given up."""

    is_stop: bool
    newer: int = 0


Conclusion = Settle | Park | Bury | HandBack


def conclude(
    outcome: Outcome, attempt: int, policy: RetryPolicy, age: timedelta, left: timedelta | None, *, is_marked: bool
) -> Conclusion:
    """The conclusion for a message that was stored `age` ago and expires in `left`.

    `is_marked`: it is to be cancelled. Then it is not tried again, unless the next owner must do it: who is stopped, or
    loses the lease, cannot know that the attempt would have failed. A retry waits no longer than the message lives.
    """
    if isinstance(outcome, NotDue) and not is_marked:
        return Park(outcome.wait, is_counted=False)
    if isinstance(outcome, Abandoned):
        if is_marked and outcome.reason == "cancelled":
            return Settle(is_cancelled=True)
        return HandBack(is_stop=outcome.reason in ("stop", "fenced"), newer=outcome.epoch)
    if outcome is not None and is_marked:
        return Settle(is_cancelled=True)
    decision = decide(outcome, attempt, policy, age)
    if isinstance(decision, Ack):
        return Settle()
    if left is None or not isinstance(decision, Park):
        return decision
    return replace(decision, delay=min(decision.delay, max(timedelta(0), left)))
