"""The id of a member, and what is said to the members of a group about one of them."""

from __future__ import annotations

import os
import platform
import re
import secrets
from collections.abc import Iterable
from typing import Any, Final

from pydantic_core import from_json

QUIET: Final = "quiet"
"""Take nothing new, finish what runs, end."""
STOP: Final = "stop"
"""The same, but what still runs after the grace is cancelled."""

JOINED: Final = "joined"
LEFT: Final = "left"
"""Withdrew, or was removed after its heartbeat had ended."""
CHANGED: Final = "changed"
"""Says something else about itself with its heartbeat."""
SILENT: Final = "silent"
"""Its channel has no subscriber: each member that hears it looks itself."""
RELEASED: Final = "released"
"""Gave a partition back that another one may take."""

MISSED: Final = "missed"
"""Never published: announcements may have been missed."""


def new_member_id() -> str:
    """Unique for each start: processes that share a consumer name would read each other's messages in flight."""
    host = re.sub(r"[^A-Za-z0-9-]", "-", platform.node())[:40] or "host"
    return f"{host}-{os.getpid()}-{secrets.token_hex(4)}"


def request_to(member: str, word: str) -> str:
    """What is published to the members of a group to let one of them end: QUIET or STOP."""
    return f"{word} {member}"


def request_in(data: bytes) -> tuple[str, str] | None:
    """The word and the member of such a request; None for anything else."""
    word, _, member = data.decode(errors="replace").partition(" ")
    return (word, member) if word in (QUIET, STOP) else None


def news_of(word: str, members: Iterable[str]) -> str:
    """What is published to the members of a group about some of them: JOINED, LEFT, CHANGED, SILENT or RELEASED."""
    return " ".join((word, *members))


def news_in(data: bytes) -> tuple[str, tuple[str, ...]] | None:
    """The word and the members of such news; None for anything else."""
    word, *members = data.decode(errors="replace").split(" ")
    return (word, tuple(members)) if members and word in (JOINED, LEFT, CHANGED, SILENT, RELEASED) else None


def host_of(member: str) -> str:
    """The host in the id of a member."""
    return member.rsplit("-", 2)[0]


def read_info(text: bytes) -> dict[str, Any]:
    """A member's own description: a JSON object, or empty if it is anything else."""
    try:
        found = from_json(text or b"{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
