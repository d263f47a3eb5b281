"""Who holds retention back: group needs, archives and the topic's own limits."""

from __future__ import annotations

from typing import Any, cast

import pytest

from rsmq.errors import ConfigError
from rsmq.inspector import observer
from rsmq.inspector.retention_holds import GroupNeeds, RetentionHold, group_needs, retention_holds
from rsmq.model.keys import Keys
from rsmq.model.reason import lost_body
from rsmq.model.settings import Settings
from rsmq.redis import streams
from rsmq.redis.client.connector import Client
from rsmq.redis.scripts import OK, PARK_MESSAGE, UNPARK_MESSAGES
from rsmq.redis.streams import ensure_groups
from tests.worker.orders import GROUP, Orders


@pytest.fixture
async def orders(client: Client, keys: Keys, settings: Settings) -> Orders:
    """No topic yet."""
    return Orders(client, keys, settings)


async def test_group_needs_name_the_oldest_pending_parked_and_undelivered_id(orders: Orders) -> None:
    """Each group is listed with its counts; a group that has settled everything keeps nothing."""
    topic = await orders.make()
    ids = await orders.fill(0, 5, read=4, settle=2)
    for entry in (ids[1], ids[0]):
        await orders.client.execute_command("ZADD", orders.keys.retry("orders", 0, GROUP), 1, entry + b"|2")
    await ensure_groups(orders.client, orders.keys, topic, "audit", "$")
    audit, billing = await group_needs(orders.client, orders.keys, "orders", 0)
    names = [entry.decode() for entry in ids]
    assert billing == GroupNeeds(GROUP, 2, names[2], 2, names[0], names[4])
    assert str(billing) == (
        f"billing: 2 pending, the oldest is {names[2]}; 2 waiting for a retry, the oldest is {names[0]}; "
        f"not delivered from {names[4]} on"
    )
    assert (audit.is_holding, str(audit)) == (False, "audit: has settled everything")
    assert await group_needs(orders.client, orders.keys, "nothing", 0) == []


async def test_retention_holds_list_limits_archives_and_groups_oldest_first(orders: Orders) -> None:
    """The first hold is the one that keeps retention back now; an empty partition has none."""
    topic = await orders.make(archive="required", retention_length=5)
    ids = [entry.decode() for entry in await orders.fill(0, 5, read=5, settle=3)]
    archived = orders.keys.archived("orders", 0)

    async def holds() -> list[RetentionHold]:
        return await retention_holds(orders.client, orders.keys, topic, 0)

    group = RetentionHold(f"group {GROUP}", ids[3], f"2 pending, the oldest is {ids[3]}", message_id=ids[3])
    nothing = RetentionHold(
        "archive", ids[0], "required, but no archive has committed this partition yet", message_id=ids[0]
    )
    assert await holds() == [nothing, group]
    await orders.client.execute_command("HSET", archived, "nightly", ids[0], "done", ids[4])
    limits = "settled by all groups: kept for a replay for 1 day, or until 5 newer messages are settled"
    assert await holds() == [
        RetentionHold("retention", ids[0], limits, is_limit=True, message_id=ids[0]),
        RetentionHold("archive nightly", ids[1], f"has committed up to {ids[0]}", message_id=ids[1]),
        group,
    ]
    assert await retention_holds(orders.client, orders.keys, topic, 1) == []


async def test_retention_holds_without_a_group_name_the_missing_group(orders: Orders) -> None:
    """The first group may want the oldest entry, so nothing is trimmed."""
    topic = await orders.topics.ensure("orders", 1)
    await orders.client.execute_command("XADD", orders.keys.stream("orders", 0), "1-0", "data", "x")
    (hold,) = await retention_holds(orders.client, orders.keys, topic, 0)
    assert (hold.oldest, hold.is_limit) == ("1-0", True)
    assert "no group exists yet" in hold.why


class Moving:
    """A client, and a message that another client moves between the pending list and the retry set after each call."""

    def __init__(self, orders: Orders, entry: bytes, *, is_parked: bool) -> None:
        self._orders, self._entry, self._is_parked = orders, entry, is_parked

    async def execute_command(self, *command: Any) -> Any:
        reply = await self._orders.client.execute_command(*command)
        await self.move()
        return reply

    async def pipelined(self, commands: list[Any]) -> list[Any]:
        replies = await self._orders.client.pipelined(commands)
        await self.move()
        return replies

    async def move(self) -> None:
        keys, at = self._orders.keys, ("orders", 0, GROUP)
        names = (keys.stream("orders", 0), keys.lease(*at), keys.retry(*at))
        if self._is_parked:
            args: tuple[Any, ...] = ("me", "", GROUP, 10, 100, *lost_body(GROUP, "me"))
            _, _, *moved = await UNPARK_MESSAGES(self._orders.client, (*names, keys.dlq(*at)), args)
            assert [entry for entry, *_ in moved] == [self._entry]
        else:
            args = ("me", "", GROUP, self._entry, 1, 0, 0, 1, "")
            assert (await PARK_MESSAGE(self._orders.client, (*names, keys.errors(*at)), args))[0] == OK
        self._is_parked = not self._is_parked


@pytest.mark.parametrize("is_parked", [True, False])
@pytest.mark.parametrize("may_run_scripts", [True, False])
async def test_group_needs_while_a_message_is_parked_or_unparked_contain_it(
    orders: Orders, monkeypatch: pytest.MonkeyPatch, *, is_parked: bool, may_run_scripts: bool
) -> None:
    """A message that moves after every exchange is pending or parked in each answer, never settled."""
    await orders.make()
    (entry,) = await orders.fill(0, 1, read=1, settle=0)
    moving = Moving(orders, entry, is_parked=False)
    if is_parked:
        await moving.move()
    if not may_run_scripts:
        monkeypatch.setattr(observer, "ask_all", refusing_scripts)
    for _ in range(4):
        (needs,) = await group_needs(cast(Client, moving), orders.keys, "orders", 0)
        assert needs.oldest_ids == [entry.decode()]
        assert needs.pending + needs.parked == 1


async def refusing_scripts(client: Client, questions: list[Any]) -> list[Any]:
    """As for a user whose rights exclude EVAL."""
    if any(question[0] == "EVAL" for question in questions):
        raise ConfigError("NOPERM")
    return await streams.ask_all(client, questions)


async def test_group_needs_with_parked_ids_of_the_same_millisecond_name_the_oldest(orders: Orders) -> None:
    """Ids are compared exactly: by both halves, and beyond the 53 bits of a double."""
    await orders.make()
    retry = orders.keys.retry("orders", 0, GROUP)
    ids = [f"{2**64 - 2}-{2**64 - 1}", f"{2**64 - 2}-{2**64 - 2}", f"{2**64 - 1}-0", f"{2**64 - 2}-9999999999999999999"]
    await orders.client.execute_command("ZADD", retry, *(part for each in ids for part in (1, f"{each}|1")))
    (needs,) = await group_needs(orders.client, orders.keys, "orders", 0)
    assert (needs.parked, needs.oldest_parked) == (4, ids[3])
