"""`rsmq member`: who is serving."""

from __future__ import annotations

from rsmq.cli.option import AnyGroup, AnyTopic, Json, Url, noun
from rsmq.cli.printer import dump, span, tabulate
from rsmq.cli.session import Session, ask
from rsmq.inspector import MemberState

app = noun("Members: list.")


@app.callback()
def members() -> None:
    """Keeps `list` a word of its own while it is the only one."""


@app.command("list", epilog="Example: rsmq member list orders billing")
def list_(topic: AnyTopic = None, group: AnyGroup = None, url: Url = None, as_json: Json = False) -> None:
    """All members: their handler, when they were heard of, which partitions they own."""

    async def look(session: Session) -> list[MemberState]:
        if topic is not None and group is not None:
            await session.group(topic, group)
        elif topic is not None:
            await session.topic(topic)
        return await session.inspector.members(topic, group)

    states = ask(url, look)
    if as_json:
        dump(states)
        return
    rows = ((each.topic, each.group, each.id, each.handler, heard(each), each.partitions) for each in states)
    tabulate(("topic", "group", "member", "handler", "heard of", "partitions"), rows, "there are no members")


def heard(member: MemberState) -> str:
    """Its last sign of life."""
    if member.heard_ago is None:
        return "dead"
    return f"{span(member.heard_ago)} ago{'' if member.is_present else ', connection lost'}"
