"""Requests as they are stored: who asks for an answer, and the commands that give it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import timedelta
from typing import Final

from rsmq.model.clock import to_ms
from rsmq.model.headers import REPLY_TO
from rsmq.model.keys import Keys
from rsmq.model.record import whole

REPLY_TTL: Final = "reply-ttl"
LONGEST_TTL: Final = to_ms(timedelta(days=1))

Command = tuple[str | bytes | int, ...]


def asked_by(headers: Mapping[str, str]) -> tuple[str, int] | None:
    """The id of the request and the time for which its answer is kept, in ms; None for a message that is no request."""
    identity, ttl = headers.get(REPLY_TO, ""), headers.get(REPLY_TTL, "")
    if not identity or len(identity) > 64 or not identity.replace("-", "").isalnum():
        return None
    kept = whole(ttl)
    return (identity, min(kept, LONGEST_TTL)) if kept else None


def answer_commands(keys: Keys, identity: str, ttl_ms: int, about: Mapping[str, str], data: bytes) -> list[Command]:
    """The key first, then the ring."""
    reply_key = keys.reply(identity)
    return [
        ("SET", reply_key, json.dumps(about).encode() + b"\n" + data, "PX", ttl_ms),
        ("SPUBLISH", reply_key, ""),
    ]
