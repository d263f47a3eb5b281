"""Groups of more members than watchers: a few look at all the others, and all see who comes and goes."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from typing import Any

import pytest

from rsmq.heartbeat import group_watch
from rsmq.heartbeat.group_watch import GroupWatch, watchers_of
from rsmq.model.keys import Keys
from rsmq.model.settings import Settings
from rsmq.redis.client.connector import Client, Connector
from rsmq.redis.pubsub import announce, listeners
from rsmq.redis.scripts import LOOK_AT_GROUP, LOOK_AT_MEMBERS, Script, Value
from tests.heartbeat.member import GROUP, TOPIC, Member, member
from tests.patience import until
from tests.unchecked import unchecked

SALT = f"{TOPIC}/{GROUP}"
NAMES = [f"host{number % 3}-{number}-x" for number in range(5)]
LOOKS_PROVED = "rsmq.heartbeat.membership.LOOKS_PROVED"


def test_watchers_are_eight_of_different_hosts() -> None:
    """All of a group that is not larger. Where there are fewer hosts than watchers, each has about as many."""
    members = [f"host{number % 20}-{number}-x" for number in range(1000)]
    chosen = watchers_of(members, SALT)
    assert len(chosen) == len({each.split("-")[0] for each in chosen}) == 8
    assert watchers_of(members[::-1], SALT) == chosen
    gone = min(chosen)
    assert len(chosen - watchers_of([each for each in members if each != gone], SALT)) == 1
    few = Counter(each.split("-")[0] for each in watchers_of(members[::5], SALT))
    assert sorted(few.values()) == [2, 2, 2, 2]
    assert watchers_of(members[:8], SALT) == frozenset(members[:8])


def test_member_stands_in_only_if_nobody_has_looked_twice() -> None:
    """Not if another one has looked meanwhile; and for two leases only."""
    members = [f"m-{number}-x" for number in range(100)]
    other = min(set(members) - watchers_of(members, SALT))
    watch = GroupWatch(other, SALT, heartbeat=1.5, ttl=6.0)
    watch.saw(members, members)
    watch.looked(0.0, 100)
    assert not watch.watches(1.0)
    assert watch.glanced(1.0, is_counted=True, is_watched=False)
    assert not watch.glanced(1.2, is_counted=True, is_watched=True)
    assert not watch.watches(1.3)
    assert watch.glanced(2.0, is_counted=True, is_watched=False)
    assert not watch.glanced(2.2, is_counted=True, is_watched=False)
    assert watch.watches(2.3)
    assert not watch.watches(2.2 + 2 * 6.0)


def test_member_reads_all_if_it_counts_others_twice() -> None:
    """Once may be news on its way."""
    members = [f"m-{number}-x" for number in range(100)]
    other = min(set(members) - watchers_of(members, SALT))
    watch = GroupWatch(other, SALT, heartbeat=1.5, ttl=6.0)
    watch.saw(members, members)
    watch.looked(0.0, 100)
    for is_counted in (False, True, False):
        watch.glanced(1.0, is_counted=is_counted, is_watched=True)
        assert not watch.reads_all(1.0)
    watch.glanced(1.0, is_counted=False, is_watched=True)
    assert watch.reads_all(1.0)


class Large:
    """A group with one watcher, and what each of its members has asked the server."""

    def __init__(self, members: dict[str, Member], asked: dict[str, Counter[Script]]) -> None:
        self.members, self.asked = members, asked
        (self.watcher,) = watchers_of(NAMES, SALT)
        self.others = [each for each in members if each != self.watcher]

    def see(self, names: Sequence[str], without: Sequence[str] = ()) -> bool:
        """Whether all members but `without` see these as live, and no others."""
        views = [each.membership.live for name, each in self.members.items() if name not in without]
        return all(view == tuple(sorted(names)) for view in views)


@asynccontextmanager
async def large(client: Client, connector: Connector, settings: Settings, blind: str = "") -> AsyncIterator[Large]:
    """Five members that see each other. `blind` looks at nothing."""
    async with AsyncExitStack() as stack:
        members, asked = dict[str, Member](), {name: Counter[Script]() for name in NAMES}

        def asking(name: str) -> Any:
            async def ask(script: Script, names: Sequence[str], args: Sequence[Value]) -> Any:
                asked[name][script] += 1
                return await script(client, names, args)

            return ask

        for name in NAMES:
            one = member(name, client, connector, settings, ask=asking(name), sees=name != blind)
            members[name] = await stack.enter_async_context(one)
        group = Large(members, asked)
        await until(lambda: group.see(NAMES, [blind]), "they see each other")
        yield group


@pytest.fixture
def quick(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """One watcher, and short times. No member stands in while its first proof lasts, however slow the machine is."""
    monkeypatch.setattr(group_watch, "WATCHERS", 1)
    monkeypatch.setattr("rsmq.heartbeat.membership.STAND_IN_PAUSE", 0.1)
    monkeypatch.setattr(LOOKS_PROVED, 1_000_000)

    def looked(watch: GroupWatch, _now: float, _members: int) -> None:
        watch._different, watch._full_look_at = 0, float("inf")

    monkeypatch.setattr(GroupWatch, "looked", looked)  # in such a small group all would read all members often
    short = {"presence_interval": timedelta(milliseconds=50), "presence_grace": timedelta(milliseconds=200)}
    return unchecked(settings, lease_ttl=timedelta(minutes=10), heartbeat=timedelta(milliseconds=150), **short)


pytestmark = pytest.mark.anyio


async def test_members_that_are_no_watchers_read_no_member_for_a_leave(
    client: Client, connector: Connector, quick: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They hear of it. At rest they ask for the number of members only, and the watcher reads all."""
    monkeypatch.setattr(group_watch, "TIMES_DIFFERENT", 1_000_000)  # the news may be on its way for long
    async with large(client, connector, quick) as group:
        await until(lambda: all(group.asked[each][LOOK_AT_GROUP] > 2 for each in group.others), "they ask for it")
        for counts in group.asked.values():
            counts.clear()
        gone = group.others[0]
        await group.members[gone].heartbeat.leave(TOPIC, GROUP)
        rest = [each for each in NAMES if each != gone]
        await until(lambda: group.see(rest, [gone]), "they hear of it")
        await until(lambda: group.asked[group.watcher][LOOK_AT_MEMBERS] > 1, "the watcher reads all")
        assert [group.asked[each][LOOK_AT_MEMBERS] for each in group.others[1:]] == [0, 0, 0]


async def test_members_of_a_resized_topic_look_at_the_note_when_a_partition_is_given_back(
    client: Client, connector: Connector, quick: Settings
) -> None:
    """Not only at their next heartbeat."""
    async with large(client, connector, unchecked(quick, heartbeat=timedelta(minutes=5))) as group:
        views = {name: group.members[name].membership for name in group.others}
        for view in views.values():
            view.ask_for_layouts()
        await until(lambda: all(group.asked[each][LOOK_AT_MEMBERS] > 1 for each in views), "they have looked")
        keys = group.members[group.watcher].keys
        await client.execute_command("HSET", keys.group(TOPIC, GROUP), "unfinished", "8:3")
        await announce(client, keys, TOPIC, GROUP, f"released {group.watcher}")
        await until(lambda: all(view.unfinished == b"8:3" for view in views.values()), "they know it")


async def test_member_that_dies_is_absent_for_all(client: Client, connector: Connector, quick: Settings) -> None:
    """The watcher finds it silent, and the others look themselves."""
    async with large(client, connector, quick) as group:
        gone = group.others[0]
        await group.members[gone].vanish()
        await until(lambda: group.see([each for each in NAMES if each != gone], [gone]), "it is gone")
        assert all(each.membership.absent == {gone} for name, each in group.members.items() if name != gone)


async def test_hint_about_a_live_member_makes_nobody_absent(
    client: Client, connector: Connector, quick: Settings
) -> None:
    """Each member judges by what it sees itself."""
    async with large(client, connector, quick) as group:
        wrong = f"silent {' '.join(NAMES)} unknown"
        await announce(client, Keys(quick.prefix), TOPIC, GROUP, wrong)
        await group.members[group.others[0]].vanish()
        alive = [each for each in NAMES if each != group.others[0]]
        await until(lambda: group.see(alive, group.others[:1]), "only the dead one is gone")
        await until(lambda: not any(each.membership._watch.suspects - {group.others[0]} for each in
                                    group.members.values()), "no other one is looked at")  # fmt: skip


@pytest.mark.parametrize("is_paused", [False, True])
async def test_death_of_all_watchers_is_noticed(
    client: Client, connector: Connector, quick: Settings, is_paused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They die, or a pause leaves their sockets open: then a member stands in, and finds who has died meanwhile."""
    monkeypatch.setattr(LOOKS_PROVED, 4)
    (watcher,) = watchers_of(NAMES, SALT)
    async with large(client, connector, quick, blind=watcher if is_paused else "") as group:
        dead = [group.others[0], *([] if is_paused else [watcher])]
        for each in dead:
            await group.members[each].vanish()
        alive = [each for each in NAMES if each not in dead]
        await until(lambda: group.see(alive, [*dead, watcher]), "all have noticed")


async def test_death_is_noticed_while_the_server_has_no_memory(
    client: Client, connector: Connector, quick: Settings
) -> None:
    """The proof that a member looks at all others is written all the same, so what was seen counts."""
    (watcher,) = watchers_of(NAMES, SALT)
    key = Keys(quick.prefix).watched(TOPIC, GROUP)
    async with large(client, connector, quick) as group:
        await group.members[watcher].vanish()
        await client.execute_command("CONFIG", "SET", "maxmemory", "1")
        try:
            await client.execute_command("DEL", key)
            await until(lambda: group.see(group.others, [watcher]), "all have noticed")
            assert await client.execute_command("EXISTS", key) == 1
        finally:
            await client.execute_command("CONFIG", "SET", "maxmemory", "0")


async def test_watcher_tells_who_was_silent_before_it_watched(
    client: Client, connector: Connector, quick: Settings
) -> None:
    """It has found two members silent for a reason of its own. One was the watcher, and this one is the next."""
    (watcher,) = watchers_of(NAMES, SALT)
    gone, *alive = (each for each in NAMES if each != watcher)
    (following,) = watchers_of(alive, SALT)
    async with large(client, connector, quick) as group:
        for each in (watcher, gone):
            await group.members[each].vanish()
        group.members[following].membership.hear("missed", ())
        await until(lambda: group.see(alive, [watcher, gone]), "it has told the others")


async def test_member_that_misses_announcements_sees_who_has_died(
    client: Client, connector: Connector, quick: Settings
) -> None:
    """It reads all members, and looks at the presence of each."""
    async with large(client, connector, quick) as group:
        deaf, gone = group.others[:2]
        view = group.members[deaf].membership
        hear, view.hear = view.hear, lambda *_: None  # type: ignore[method-assign]
        group.members[deaf].heartbeat._registration.memberships[0].on_news = lambda *_: None
        await group.members[gone].vanish()
        alive = [each for each in NAMES if each != gone]
        await until(lambda: group.see(alive, [gone, deaf]), "the others have noticed")
        hear("missed", ())
        await until(lambda: view.live == tuple(sorted(alive)), "so has it")


async def test_flushall_brings_all_members_back(client: Client, connector: Connector, quick: Settings) -> None:
    """Each writes itself again and says so."""
    async with large(client, connector, quick) as group:
        await client.execute_command("FLUSHALL")
        keys = Keys(quick.prefix)

        async def are_back() -> bool:
            return await client.execute_command("SCARD", keys.members(TOPIC, GROUP)) == len(NAMES)

        await until(are_back, "all are members again")
        await until(lambda: group.see(NAMES), "and see each other")


async def test_hint_that_comes_during_an_older_look_is_not_forgotten(
    client: Client, connector: Connector, quick: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reply to a look says that the member lives, and the hint came after the server had written it."""
    async with large(client, connector, quick) as group:
        gone, view = group.others[0], group.members[group.others[1]].membership
        ask = listeners

        async def late(asked: Client, channels: Sequence[str]) -> list[int]:
            counts = await ask(asked, channels)
            view.hear("silent", (gone,))
            return counts

        with monkeypatch.context() as patch:
            patch.setattr("rsmq.heartbeat.membership.listeners", late)
            await view._check_presence([gone])
        assert gone in view._watch.suspects
        await until(lambda: gone not in view._watch.suspects, "the next look finds that it lives")
