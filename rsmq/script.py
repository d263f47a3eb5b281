"""Lua scripts as objects: one file each in `rsmq/lua/`, loaded by hash, reloaded when the server has forgotten it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from importlib.resources import files
from typing import Any, Final, Protocol

from redis.exceptions import NoScriptError

Value = str | bytes | int | float


class Commander(Protocol):
    """Any asyncio client that can send a command."""

    async def execute_command(self, *args: Any) -> Any: ...


class SyncCommander(Protocol):
    """Any blocking client that can send a command."""

    def execute_command(self, *args: Any) -> Any: ...


class Script:
    """One script. Replies come back raw: lists, ints and bytes, as the header of the Lua file states them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.source = (files("rsmq") / "lua" / f"{name}.lua").read_text()
        self.sha = hashlib.sha1(self.source.encode(), usedforsecurity=False).hexdigest()

    def command(self, keys: Sequence[str | bytes], args: Sequence[Value]) -> tuple[Value, ...]:
        """The EVALSHA command, to be packed by whoever writes to a raw connection."""
        return ("EVALSHA", self.sha, len(keys), *keys, *args)

    def full_command(self, keys: Sequence[str | bytes], args: Sequence[Value]) -> tuple[Value, ...]:
        """The same with the source: what to send after NOSCRIPT."""
        return ("EVAL", self.source, len(keys), *keys, *args)

    async def __call__(self, client: Commander, keys: Sequence[str | bytes], args: Sequence[Value] = ()) -> Any:
        """Run it. A server that lost its script cache (restart, failover) gets the source again."""
        try:
            return await client.execute_command(*self.command(keys, args))
        except NoScriptError:
            return await client.execute_command(*self.full_command(keys, args))

    def run(self, client: SyncCommander, keys: Sequence[str | bytes], args: Sequence[Value] = ()) -> Any:
        """The same for a blocking client."""
        try:
            return client.execute_command(*self.command(keys, args))
        except NoScriptError:
            return client.execute_command(*self.full_command(keys, args))

    def read(self, client: SyncCommander, keys: Sequence[str | bytes], args: Sequence[Value] = ()) -> Any:
        """The same for a script that writes nothing: as a user who may not write either."""
        try:
            return client.execute_command("EVALSHA_RO", self.sha, len(keys), *keys, *args)
        except NoScriptError:
            return client.execute_command("EVAL_RO", self.source, len(keys), *keys, *args)

    def __repr__(self) -> str:
        return f"<Script {self.name}>"


PUBLISH_MESSAGES: Final = Script("publish_messages")
PUBLISH_ONCE: Final = Script("publish_once")
DELAY_MESSAGE: Final = Script("delay_message")
RELEASE_DELAYED: Final = Script("release_delayed")
TAKE_LEASE: Final = Script("take_lease")
RENEW_LEASE: Final = Script("renew_lease")
RELEASE_LEASE: Final = Script("release_lease")
SETTLE_MESSAGES: Final = Script("settle_messages")
START_MESSAGE: Final = Script("start_message")
PARK_MESSAGE: Final = Script("park_message")
UNPARK_MESSAGES: Final = Script("unpark_messages")
BURY_MESSAGE: Final = Script("bury_message")
HAND_BACK: Final = Script("hand_back")
TOUCH_MESSAGES: Final = Script("touch_messages")
CLAIM_PENDING: Final = Script("claim_pending")
REMOVE_CONSUMER: Final = Script("remove_consumer")
RESET_GROUP: Final = Script("reset_group")
REPLAY_DEAD_LETTER: Final = Script("replay_dead_letter")
TRIM_PARTITION: Final = Script("trim_partition")
COUNT_REMOVED: Final = Script("count_removed")
RESTORE_PENDING: Final = Script("restore_pending")
SEEK_ENTRY: Final = Script("seek_entry")
PUBLISH_MARKED: Final = Script("publish_marked")
PUBLISH_UNSEEN: Final = Script("publish_unseen")
RESTORE_MESSAGES: Final = Script("restore_messages")
ADD_LETTERS: Final = Script("add_letters")
PAGE_LETTERS: Final = Script("page_letters")
ACK_LETTERS: Final = Script("ack_letters")
RECEIVE_LETTERS: Final = Script("receive_letters")
OPEN_SESSION: Final = Script("open_session")
CLOSE_SESSION: Final = Script("close_session")
LEAD_SCHEDULE: Final = Script("lead_schedule")
PUBLISH_TICK: Final = Script("publish_tick")
CLEAR_INBOX: Final = Script("clear_inbox")
MEASURE_PARTITION: Final = Script("measure_partition")
MEASURE_SHARE: Final = Script("measure_share")
MEASURE_MEMBERS: Final = Script("measure_members")
LOOK_AT_MEMBERS: Final = Script("look_at_members")

OK: Final = b"OK"
STALE_EPOCH: Final = b"STALE_EPOCH"
NOT_PENDING: Final = b"NOT_PENDING"
