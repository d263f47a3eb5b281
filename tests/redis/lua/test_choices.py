"""The script that keeps which members of shared subscriptions get the messages of a page."""

from __future__ import annotations

from typing import Any

from rsmq.gateway.fleet.scripts import KEEP_CHOICES
from rsmq.model.keys import Keys
from rsmq.redis.client.connector import Client

STREAM, GROUP = "mqtt", "mqtt"


class Choices:
    """A partition, and what is kept beside it."""

    def __init__(self, client: Client, keys: Keys) -> None:
        self._client = client
        self.stream, self.steps = keys.stream(STREAM, 3), keys.steps(STREAM, 3, GROUP)

    async def keep(self, *rows: tuple[str, str, str], most: int = 100) -> Any:
        """One call: stream id, what was seen, what is chosen."""
        return await KEEP_CHOICES(self._client, (self.stream, self.steps), (GROUP, "share", most, *sum(rows, ())))

    async def kept(self) -> dict[bytes, bytes]:
        """All of them."""
        found = await self._client.execute_command("HGETALL", self.steps)
        return dict(zip(found[::2], found[1::2], strict=True))


async def test_what_was_kept_first_stays_unless_its_router_has_seen_it(client: Client, keys: Keys) -> None:
    """A router that is late gets the choice of the other one, and a call that is repeated changes nothing."""
    choices = Choices(client, keys)
    for _ in range(2):
        assert await choices.keep(("1-0", "", "a"), ("2-0", "", "b")) == [b"a", b"b"]
    assert await choices.keep(("1-0", "", "late"), ("3-0", "", "c")) == [b"a", b"c"]
    for _ in range(2):
        assert await choices.keep(("1-0", "a", "new")) == [b"new"]
    assert await choices.keep(("1-0", "a", "late")) == [b"new"]
    assert await choices.kept() == {b"1-0|share": b"new", b"2-0|share": b"b", b"3-0|share": b"c"}


async def test_choices_of_settled_messages_go_when_there_are_many(client: Client, keys: Keys) -> None:
    """Those of pending messages stay, and so do the steps of others."""
    choices, ask = Choices(client, keys), client.execute_command
    await ask("XGROUP", "CREATE", choices.stream, GROUP, "0", "MKSTREAM")
    for number in range(1, 6):
        await ask("XADD", choices.stream, f"{number}-0", "data", "x")
    await ask("XREADGROUP", "GROUP", GROUP, "me", "STREAMS", choices.stream, ">")
    await ask("XACK", choices.stream, GROUP, "1-0", "2-0")
    await ask("HSET", choices.steps, "1-0|charge", "done", "spoiled|share", "x")
    rows = [(f"{number}-0", "", "a") for number in range(1, 6)]
    await choices.keep(*rows[:4], most=6)
    assert len(await choices.kept()) == 6
    await choices.keep(rows[4], most=6)
    left = {b"%d-0|share" % number for number in (3, 4, 5)}
    assert set(await choices.kept()) == {*left, b"1-0|charge", b"spoiled|share"}


async def test_choices_are_kept_where_the_group_is_gone(client: Client, keys: Keys) -> None:
    """Then what is older than the page goes."""
    choices = Choices(client, keys)
    await choices.keep(("1-0", "", "a"), ("2-0", "", "a"))
    assert await choices.keep(("3-0", "", "b"), most=1) == [b"b"]
    assert set(await choices.kept()) == {b"3-0|share"}
