"""Why a message becomes a dead letter."""

from __future__ import annotations

from enum import StrEnum

from rsmq.model.clock import now_ms


class Reason(StrEnum):
    """Why a message became a dead letter (field `dlq.reason`)."""

    FAILED = "failed"
    TIMEOUT = "timeout"
    CRASHED = "crashed"
    REJECTED = "rejected"
    MALFORMED = "malformed"
    LOST_BODY = "lost-body"
    EXPIRED = "expired"
    NO_KEY = "no-key"


def lost_body(group: str, member: str) -> tuple[str | int, ...]:
    """The fields of the dead letter that a script writes for a deleted entry, without its id."""
    error = "the entry was deleted before it was settled"
    about = ("dlq.reason", Reason.LOST_BODY, "dlq.error", error, "dlq.attempts", 0)
    return *about, "dlq.group", group, "dlq.at_ms", now_ms(), "dlq.member", member
