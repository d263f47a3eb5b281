"""Lua scripts as objects: one file each, in the folder of `redis/lua/` that bears the name of the room that calls it.

A script is called by its hash, and sent whole to a server that does not have it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Awaitable, Callable, Sequence
from pkgutil import get_data
from typing import Any, Final, Protocol

from redis.exceptions import NoScriptError

Value = str | bytes | int


class Commander(Protocol):
    """Any asyncio client that can send a command."""

    async def execute_command(self, *args: Any) -> Any: ...


class Pipeliner(Protocol):
    """Any asyncio client that can send commands together."""

    async def pipelined(self, commands: Sequence[Sequence[Any]]) -> list[Any]: ...


class SyncCommander(Protocol):
    """Any blocking client that can send a command."""

    def execute_command(self, *args: Any) -> Any: ...


TOGETHER: Final = 100
"""Calls that are sent in one write: all of them share its timeout."""

SCRIPTS: Final[dict[str, Script]] = {}
"""Every script by the hash under which the server caches it."""


USES: Final = re.compile(r"^-- USES +(.+)\n", re.MULTILINE)


def read(name: str) -> str:
    """A Lua file as it is."""
    found = get_data("rsmq.redis", f"lua/{name}.lua")
    if found is None:
        raise FileNotFoundError(f"the installation of rsmq has no {name}.lua")
    return found.decode()


def source_of(name: str) -> str:
    """A script with the functions that its header names: each is a file in `lua/shared`."""
    source = read(name)
    used = USES.search(source)
    if used is None:
        return source
    functions = "".join(read(f"shared/{each}") for each in used[1].split(", "))
    return f"{source[: used.end()]}{functions}{source[used.end() :]}"


class Script:
    """One script, named by its file: `consumer/park_message`. Its folder is the room that calls it.

    Replies are raw: lists, ints and bytes, as the header of the Lua file says.
    """

    def __init__(self, name: str) -> None:
        self.name = name.rpartition("/")[2]
        self.source = source_of(name)
        self.sha = hashlib.sha1(self.source.encode(), usedforsecurity=False).hexdigest()
        SCRIPTS[self.sha] = self

    def command(self, keys: Sequence[str | bytes], args: Sequence[Value]) -> tuple[Value, ...]:
        """The EVALSHA command, for a pipeline or a raw connection: these answer NOSCRIPT themselves."""
        return ("EVALSHA", self.sha, len(keys), *keys, *args)

    def full_command(self, keys: Sequence[str | bytes], args: Sequence[Value]) -> tuple[Value, ...]:
        """The command with the source, for a server that may not have the script."""
        return ("EVAL", self.source, len(keys), *keys, *args)

    async def __call__(self, client: Commander, keys: Sequence[str | bytes], args: Sequence[Value] = ()) -> Any:
        """Run it. A server that has lost its scripts (restart, failover) gets the source."""
        try:
            return await client.execute_command(*self.command(keys, args))
        except NoScriptError:
            return await client.execute_command(*self.full_command(keys, args))

    async def for_each(
        self, client: Pipeliner, calls: Sequence[Sequence[str | bytes]], args: Sequence[Value] = ()
    ) -> list[Any]:
        """Run it with each of these keys, sent together. An error in a reply is returned in its place."""
        found = list[Any]()
        for begin in range(0, len(calls), TOGETHER):
            some = calls[begin : begin + TOGETHER]
            replies = await client.pipelined([self.command(keys, args) for keys in some])
            unknown = [at for at, reply in enumerate(replies) if isinstance(reply, NoScriptError)]
            again = await client.pipelined([self.full_command(some[at], args) for at in unknown])
            for at, reply in zip(unknown, again, strict=True):
                replies[at] = reply
            found += replies
        return found

    def run(
        self, client: SyncCommander, keys: Sequence[str | bytes], args: Sequence[Value] = (), *, read_only: bool = False
    ) -> Any:
        """Run it with a blocking client. `read_only`: for a user who may only read."""
        suffix = "_RO" if read_only else ""
        try:
            return client.execute_command(f"EVALSHA{suffix}", self.sha, len(keys), *keys, *args)
        except NoScriptError:
            return client.execute_command(f"EVAL{suffix}", self.source, len(keys), *keys, *args)

    def __repr__(self) -> str:
        return f"<Script {self.name}>"


class PlainCommand:
    """A plain command in the place of a script, where calls are gathered into one write."""

    def __init__(self, name: str) -> None:
        self.name = name

    def command(self, keys: Sequence[str | bytes], args: Sequence[Value]) -> tuple[Value, ...]:
        """The command."""
        return (self.name, *keys, *args)

    def __repr__(self) -> str:
        return f"<PlainCommand {self.name}>"


def with_source(command: Sequence[Value]) -> Sequence[Value]:
    """An EVALSHA command that was answered with NOSCRIPT, as the EVAL that the server executes and caches."""
    name, sha, *rest = command
    script = SCRIPTS.get(str(sha))
    return command if script is None else (str(name).replace("SHA", ""), script.source, *rest)


def packed_with_source(packed: bytes) -> bytes:
    """A packed EVALSHA command as the packed EVAL, in the same way."""
    count, _, _, _, sha, rest = packed.split(b"\r\n", 5)
    script = SCRIPTS.get(sha.decode())
    if script is None:
        return packed
    source = script.source.encode()
    return b"%b\r\n$4\r\nEVAL\r\n$%d\r\n%b\r\n%b" % (count, len(source), source, rest)


PUBLISH_MESSAGES: Final = Script("producer/publish_messages")
PUBLISH_ONCE: Final = Script("producer/publish_once")
PUBLISH_UNIQUE: Final = Script("producer/publish_unique")
FORGET_NAMES: Final = Script("worker/forget_names")
DELAY_MESSAGE: Final = Script("producer/delay_message")
RELEASE_DELAYED: Final = Script("worker/release_delayed")
MOVE_DELAYED: Final = Script("worker/move_delayed")
TAKE_LEASE: Final = Script("heartbeat/take_lease")
RENEW_LEASE: Final = Script("heartbeat/renew_lease")
KEEP_STARTS: Final = Script("consumer/keep_starts")
TAKE_STARTS: Final = Script("consumer/take_starts")
TAKE_PERMITS: Final = Script("consumer/take_permits")
RENEW_PERMITS: Final = Script("heartbeat/renew_permits")
RELEASE_LEASE: Final = Script("heartbeat/release_lease")
SETTLE_MESSAGES: Final = Script("consumer/settle_messages")
SETTLE_MEMBERS: Final = Script("consumer/settle_members")
SETTLE_OUTPUTS: Final = Script("consumer/settle_outputs")
RELAY_OUTPUTS: Final = Script("consumer/relay_outputs")
PUT_ASIDE: Final = Script("consumer/put_aside")
READ_AGAIN: Final = Script("consumer/read_again")
KEEP_WAITS: Final = Script("consumer/keep_waits")
START_CALL: Final = Script("consumer/start_call")
ARE_FINISHED: Final = Script("consumer/are_finished")
NOTE_UNFINISHED: Final = Script("consumer/note_unfinished")
START_MESSAGE: Final = Script("consumer/start_message")
PARK_MESSAGE: Final = Script("consumer/park_message")
UNPARK_MESSAGES: Final = Script("consumer/unpark_messages")
BURY_MESSAGE: Final = Script("consumer/bury_message")
KEEP_NOTE: Final = Script("consumer/keep_note")
HAND_BACK: Final = Script("consumer/hand_back")
TOUCH_MESSAGES: Final = Script("heartbeat/touch_messages")
CLAIM_IDS: Final = Script("consumer/claim_ids")
CLAIM_PENDING: Final = Script("consumer/claim_pending")
ADOPT_PENDING: Final = Script("consumer/adopt_pending")
REMOVE_CONSUMER: Final = Script("consumer/remove_consumer")
CHANGE_LAYOUT: Final = Script("control/change_layout")
RESIZE_TOPIC: Final = Script("control/resize_topic")
SEAL_PARTITION: Final = Script("control/seal_partition")
RESET_GROUP: Final = Script("control/reset_group")
REPLAY_DEAD_LETTER: Final = Script("dlq/replay_dead_letter")
TRIM_PARTITION: Final = Script("worker/trim_partition")
COUNT_REMOVED: Final = Script("worker/count_removed")
RESTORE_PENDING: Final = Script("worker/restore_pending")
SEEK_ENTRY: Final = Script("control/seek_entry")
PUBLISH_MARKED: Final = Script("pipeline/publish_marked")
PUBLISH_UNSEEN: Final = Script("pipeline/publish_unseen")
RESTORE_MESSAGES: Final = Script("pipeline/restore_messages")
ADD_LETTERS: Final = Script("persistence/add_letters")
PAGE_LETTERS: Final = Script("persistence/page_letters")
ACK_LETTERS: Final = Script("persistence/ack_letters")
RECEIVE_LETTERS: Final = Script("persistence/receive_letters")
OPEN_SESSION: Final = Script("persistence/open_session")
CLOSE_SESSION: Final = Script("persistence/close_session")
LEAD_SCHEDULE: Final = Script("worker/lead_schedule")
NOTE_RUN: Final = Script("worker/note_run")
PUBLISH_TICK: Final = Script("worker/publish_tick")
LEAD_WORK: Final = Script("worker/lead_work")
RELAY_ROWS: Final = Script("sql/relay_rows")
CLEAR_INBOX: Final = Script("persistence/clear_inbox")
MEASURE_PARTITION: Final = Script("inspector/measure_partition")
MEASURE_GROUP_PARTITION: Final = Script("inspector/measure_group_partition")
MEASURE_MEMBERS: Final = Script("heartbeat/measure_members")
LOOK_AT_MEMBERS: Final = Script("heartbeat/look_at_members")
LOOK_AT_GROUP: Final = Script("heartbeat/look_at_group")
PROVE_WATCH: Final = Script("heartbeat/prove_watch")
LOOK_AT_MESSAGE: Final = Script("control/look_at_message")
FIND_ENTRY: Final = Script("control/find_entry")
FIND_DELAYED: Final = Script("control/find_delayed")
CANCEL_MESSAGE: Final = Script("control/cancel_message")
RESCHEDULE_DELAYED: Final = Script("control/reschedule_delayed")
RESCHEDULE_PARKED: Final = Script("control/reschedule_parked")
RESCHEDULE_WAIT: Final = Script("control/reschedule_wait")
MOVE_PARKED: Final = Script("consumer/move_parked")
HOLD_NAME: Final = Script("control/hold_name")
CANCEL_DELAYED: Final = Script("control/cancel_delayed")
CANCEL_UNREAD: Final = Script("control/cancel_unread")
ERASE_ENTRIES: Final = Script("control/erase_entries")
ERASE_NAMES: Final = Script("control/erase_names")
ERASE_RECORD: Final = Script("control/erase_record")
SETTLE_CANCELLED: Final = Script("consumer/settle_cancelled")
ANSWER_CANCEL: Final = Script("consumer/answer_cancel")
FIND_BODIES: Final = Script("control/find_bodies")
FIND_DELAYED_BODIES: Final = Script("control/find_delayed_bodies")
OPEN_BATCH: Final = Script("producer/open_batch")
MAKE_TOPIC: Final = Script("producer/make_topic")
COUNT_MEMBERS: Final = Script("producer/count_members")
END_BATCHES: Final = Script("worker/end_batches")
NOTE_CALLBACK: Final = Script("worker/note_callback")
FORGET_REMOVED: Final = Script("worker/forget_removed")
FORGET_STRAY: Final = Script("worker/forget_stray")

OK: Final = b"OK"
STALE_EPOCH: Final = b"STALE_EPOCH"
CLOCK: Final = b"CLOCK"
"""The server's clock shows another time than the caller expects."""
NO_SESSION: Final = b"NO_SESSION"
BEHIND: Final = b"BEHIND"
"""The server has lost writes that it had confirmed: it knows fewer letters than their reader."""
NOT_PENDING: Final = b"NOT_PENDING"
CANCELLED: Final = b"CANCELLED"
NOT_DUE: Final = b"NOT_DUE"
UNDELIVERED: Final = b"UNDELIVERED"
LOST_BODY: Final = b"LOST_BODY"
UNKNOWN: Final = b"UNKNOWN"
LOST: Final = b"LOST"

Ask = Callable[[Script, Sequence[str], Sequence[Value]], Awaitable[Any]]
"""Runs a script, perhaps in one write with others."""
