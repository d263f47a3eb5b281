"""`rsmq member`: the members of groups."""

from __future__ import annotations

from rsmq.cli.connection import CommandConnection, ask, asked
from rsmq.cli.parameters import AnyGroup, AnyTopic, Json, Url, noun
from rsmq.cli.tables import print_rows
from rsmq.inspector.state import MemberState
from rsmq.model.words import duration

app = noun("Members: list.")


@app.callback()
def members() -> None:
    """Makes `list` a command of its own although it is the only one."""


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
    rows = ((each.topic, each.group, each.id, each.handler, heard(each), each.partitions) for each in states)
    columns = ("topic", "group", "member", "handler", "heard of", "partitions")
    print_rows(states, columns, rows, asked("there are no members", url), as_json=as_json)


def heard(member: MemberState) -> str:
    """The time since its last heartbeat."""
    if member.heard_ago is None:
        return "dead"
    return f"{duration(member.heard_ago)} ago{'' if member.is_present else ', connection lost'}"
