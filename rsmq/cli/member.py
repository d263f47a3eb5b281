"""`rsmq member`: the members of groups."""

from __future__ import annotations

from typing import Annotated

import typer

from rsmq.cli.connection import CommandConnection, NotFound, ask, asked
from rsmq.cli.output import confirm, print_result
from rsmq.cli.parameters import AnyGroup, AnyTopic, Json, Url, Yes, noun
from rsmq.cli.tables import print_rows
from rsmq.control.audit import Audit, State, user_name
from rsmq.control.ending import end_process
from rsmq.inspector.state import MemberState
from rsmq.model.member import QUIET, STOP
from rsmq.model.words import duration, suggestion

app = noun("Members: list, quiet, stop.")

MemberId = Annotated[str, typer.Argument(metavar="MEMBER", help="The id, as `list` shows it.", show_default=False)]


@app.command("list", epilog="Example: rsmq member list orders billing")
def list_(topic: AnyTopic = None, group: AnyGroup = None, url: Url = None, as_json: Json = False) -> None:
    """All members: handler, last heartbeat, owned partitions."""

    async def read(connection: CommandConnection) -> list[MemberState]:
        if topic is not None and group is not None:
            await connection.group(topic, group)
        elif topic is not None:
            await connection.topic(topic)
        return await connection.inspector.members(topic, group)

    states = ask(url, read)
    rows = ((each.topic, each.group, each.id, each.handler, heard(each), owned(each)) for each in states)
    columns = ("topic", "group", "member", "handler", "heard of", "partitions")
    print_rows(states, columns, rows, asked("there are no members", url), as_json=as_json)


@app.command("quiet", epilog="Example: rsmq member quiet web-1-4711-9f2c1a07 --yes")
def quiet(member: MemberId, yes: Yes = False, url: Url = None, as_json: Json = False) -> None:
    """Let a worker process take nothing new, finish what runs, however long that takes, and end."""
    let_end(member, QUIET, "It finishes what runs, however long that takes,", url, is_agreed=yes, as_json=as_json)


@app.command("stop", epilog="Example: rsmq member stop web-1-4711-9f2c1a07 --yes")
def stop(member: MemberId, yes: Yes = False, url: Url = None, as_json: Json = False) -> None:
    """Let a worker process end, as SIGTERM does: what still runs after its grace is cancelled, and handled again."""
    let_end(member, STOP, "It cancels what still runs after its grace,", url, is_agreed=yes, as_json=as_json)


def let_end(member: str, word: str, how: str, url: str | None, *, is_agreed: bool, as_json: bool) -> None:
    """Ask a process to end, after a question. It is noted in the audit."""
    served = ask(url, lambda connection: served_by(connection, member))
    groups = [f"{each.topic}/{each.group}" for each in served]
    confirm(f"{word.capitalize()} {member}, which serves {', '.join(groups)}? {how} and ends.", is_agreed=is_agreed)

    async def act(connection: CommandConnection) -> str:
        async def state() -> State:
            members = await connection.inspector.members()
            return {
                "process": member,
                "serves": [f"{each.topic}/{each.group}" for each in members if each.id == member],
            }

        async def end() -> str:
            one = served[0]
            return await end_process(connection.client, connection.keys, member, (one.topic, one.group), word)

        audit = Audit(connection.client, connection.keys)
        return await audit.record(user_name(), f"{word}-process", ("", ""), state, end)

    said = f"{ask(url, act)}: it leaves `rsmq member list` when it has ended"
    print_result({"member": member, "asked": word, "serves": groups}, said, as_json=as_json)


async def served_by(connection: CommandConnection, member: str) -> list[MemberState]:
    """It as a member of each group that it serves. Raises NotFound."""
    found = await connection.inspector.members()
    if served := [each for each in found if each.id == member]:
        return served
    some = suggestion(member, sorted({each.id for each in found}), "members") or "there are no members"
    raise NotFound(f"there is no member {member!r}: {some}")


def owned(member: MemberState) -> str:
    """Its partitions, and those that it cannot read."""
    cannot = f"cannot read {' '.join(map(str, member.unreadable))}" if member.unreadable else ""
    return ", ".join(filter(None, (" ".join(map(str, member.partitions)), cannot)))


def heard(member: MemberState) -> str:
    """The time since its last heartbeat."""
    if member.heard_ago is None:
        return "dead"
    return f"{duration(member.heard_ago)} ago{'' if member.is_present else ', connection lost'}"
