"""The audit stream: who changed what, watched a client or let a process end, and the state before and after."""

from __future__ import annotations

import getpass
import json
import os
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from rsmq.model.clock import EPOCH
from rsmq.model.keys import Keys
from rsmq.model.record import moment, text
from rsmq.redis.client.connector import Client

KEPT: Final = 10_000
SHOWN: Final = 200

State = dict[str, Any]


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """One action. `result` is empty for one that has not ended: it runs, or its dashboard has died."""

    id: str
    at: datetime
    who: str
    what: str
    topic: str
    group: str
    before: str
    after: str
    result: str


class Audit:
    """Writes each action twice: before it begins, and when it has ended. An action that cannot be noted is not done."""

    def __init__(self, client: Client, keys: Keys) -> None:
        self._client = client
        self._key = keys.audit

    async def record(
        self,
        who: str,
        what: str,
        subject: tuple[str, str],
        state: Callable[[], Awaitable[State]],
        act: Callable[[], Awaitable[str]],
    ) -> str:
        """Do it, and return what it says."""
        about = {"action": uuid.uuid4().hex, "who": who, "what": what, "topic": subject[0], "group": subject[1]}
        await self._add(about | {"phase": "begin", "before": as_text(await state())})
        try:
            result = await act()
        except BaseException as error:
            await self._add(about | {"phase": "end", "result": f"failed: {type(error).__name__}: {error}"[:500]})
            raise
        await self._add(about | {"phase": "end", "after": as_text(await state()), "result": result})
        return result

    async def _add(self, fields: dict[str, str]) -> None:
        flat = [part for pair in fields.items() for part in pair]
        await self._client.execute_command("XADD", self._key, "MAXLEN", "~", KEPT, "*", *flat)

    async def newest(self) -> list[AuditEntry]:
        """The newest actions, newest first."""
        rows = await self._client.execute_command("XREVRANGE", self._key, "+", "-", "COUNT", 2 * SHOWN)
        found: dict[str, dict[str, str]] = {}
        for entry_id, flat in reversed(rows):
            fields = {text(name): text(value) for name, value in zip(flat[::2], flat[1::2], strict=True)}
            about = found.setdefault(fields.get("action", entry_id.decode()), {"id": entry_id.decode()})
            about.update({name: value for name, value in fields.items() if name != "id"})
        return [read(about) for about in reversed(found.values())][:SHOWN]


def read(about: dict[str, str]) -> AuditEntry:
    """The two entries of an action as one."""
    names = ("who", "what", "topic", "group", "before", "after", "result")
    at = moment(about["id"].partition("-")[0]) or EPOCH
    return AuditEntry(about["id"], at, *(about.get(name, "") for name in names))


def user_name() -> str:
    """The user of this process, for the audit of what a command does."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container may have no name for its user
        return str(os.getuid())


def as_text(state: State) -> str:
    """A state in one line."""
    return json.dumps(state, default=str, ensure_ascii=False)
