"""The id of a member."""

from __future__ import annotations

import os
import platform
import re
import secrets
from typing import Any

from pydantic_core import from_json


def new_member_id() -> str:
    """Unique for each start: processes that share a consumer name would read each other's messages in flight."""
    host = re.sub(r"[^A-Za-z0-9-]", "-", platform.node())[:40] or "host"
    return f"{host}-{os.getpid()}-{secrets.token_hex(4)}"


def read_info(text: bytes) -> dict[str, Any]:
    """A member's own description: a JSON object, or empty if it is anything else."""
    try:
        found = from_json(text or b"{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
