"""The schedules that the server knows, while workers serve them and afterwards."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import anyio
import pytest

from rsmq import Broker, Message, Settings
from rsmq.control import run_schedule
from rsmq.handler.schedule import Cron, Interval, ScheduleRule, rule_json
from rsmq.inspector.schedules import RULES, ScheduleState, look_up
from rsmq.model.clock import epoch_ms
from tests.cli.conftest import Cli
from tests.contract.witness import PATIENCE, ask
from tests.patience import until


async def look(broker: Broker, topic: str | None = None) -> list[ScheduleState]:
    """The schedules in the server."""
    return await look_up(broker.client, broker.keys, broker.topics, topic)


async def led(broker: Broker, count: int) -> list[ScheduleState]:
    """Wait until this number of schedules has a leader."""
    with anyio.fail_after(PATIENCE):
        while sum(1 for state in await look(broker) if state.leader) < count:
            await anyio.sleep(0.01)
    return await look(broker)


async def test_schedule_list_shows_rule_ticks_and_leader(server_url: str, prefix: str, cli: Cli) -> None:
    """Each schedule with its rule, next and last tick and leader; when the worker is gone, without a leader."""
    broker = Broker(Settings(url=server_url, prefix=prefix, preflight="warn"))
    broker.every("0 6 * * MON-FRI", "reports", name="morning", timezone="Asia/Seoul")(lambda: "x")
    broker.every(timedelta(hours=5), "ticks", name="clock")(lambda: "x")
    async with broker:
        assert await look(broker) == []
        assert await look(broker, "missing") == []
        async with broker.running():
            morning, clock = await led(broker, 2)
            assert broker.worker is not None
            assert {morning.leader, clock.leader} == {broker.worker.member}
        assert (morning.topic, morning.name, clock.topic, clock.name) == ("reports", "morning", "ticks", "clock")
        assert morning.rule == ScheduleRule(cron="0 6 * * MON-FRI", timezone="Asia/Seoul")
        assert clock.rule == ScheduleRule(every_ms=5 * 3600_000)
        assert morning.next is not None
        assert (morning.next.hour, morning.next.minute) == (21, 0), "six in Seoul"
        assert clock.next is not None
        assert epoch_ms(clock.next) % (5 * 3600_000) == 0
        assert clock.last is not None
        assert clock.last < clock.next <= clock.last + timedelta(hours=10)
        assert [state.leader for state in await look(broker)] == ["", ""]
    table = await anyio.to_thread.run_sync(cli.ok, "schedule", "list")
    assert "0 6 * * MON-FRI Asia/Seoul" in table
    assert "every 5 h" in table
    (row,) = await anyio.to_thread.run_sync(cli.json, "schedule", "list", "ticks")
    assert (row["name"], row["leader"], row["rule"]["every_ms"]) == ("clock", "", 5 * 3600_000)
    assert datetime.fromisoformat(row["next"]) == clock.next
    missing = await anyio.to_thread.run_sync(cli, "schedule", "list", "missing")
    assert (missing.returncode, missing.stdout) == (1, "")


async def test_schedule_is_run_now_once_beside_its_ticks(server_url: str, prefix: str, cli: Cli) -> None:
    """Asked for twice before the worker starts, it is published once; then once more by the running leader."""
    broker = Broker(Settings(url=server_url, prefix=prefix, preflight="warn", lease_ttl="1s"))
    found = list[tuple[str, str]]()
    broker.every(timedelta(hours=5), "ticks", name="clock")(lambda at: at.isoformat())

    @broker.handler("ticks", group="g")
    async def note(text: str, message: Message) -> None:
        found.append((text, message.id))

    async def seen(count: int) -> None:
        async def is_done() -> bool:
            return len(found) >= count and (await look(broker))[0].run_asked is None

        await until(is_done, f"run {count} is published and handled")

    async with broker:
        async with broker.running():
            await led(broker, 1)
        first = await anyio.to_thread.run_sync(cli.json, "schedule", "run", "ticks", "clock")
        again = await anyio.to_thread.run_sync(cli.ok, "schedule", "run", "ticks", "clock")
        assert again == "clock of ticks is asked for: no worker leads it: it is published when one starts\n"
        before = (await look(broker))[0]
        async with broker.running():
            await seen(1)
            at = datetime.fromisoformat(first["asked"])
            assert found == [(at.isoformat(), f"clock@{at.isoformat()}-run")]
            assert (await look(broker))[0].last == before.last, "the ticks stay as they are"
            await run_schedule(broker.client, broker.keys, await broker.topics.existing("ticks"), "clock")
            await seen(2)
    wrong = await anyio.to_thread.run_sync(cli, "schedule", "run", "ticks", "watch")
    assert (wrong.returncode, "its schedules are clock" in wrong.stderr) == (1, True)


async def test_schedule_without_readable_rule_is_listed(server_url: str, prefix: str) -> None:
    """A schedule of an older worker has no rule; that of a newer worker may be unreadable."""
    async with Broker(Settings(url=server_url, prefix=prefix, preflight="warn")) as broker:
        await broker.publish("ticks", "x", key="k")
        schedule_key = broker.keys.every("ticks", 0)
        await ask(
            broker, "HSET", schedule_key, "last|old", "1700000000000", "last|new", "1700000000000", "rule|new", "moon"
        )
        states = {state.name: state for state in await look(broker, "ticks")}
    assert states.keys() == {"old", "new"}
    for state in states.values():
        assert (state.next, state.leader, state.rule) == (None, "", ScheduleRule())
        assert state.last == datetime.fromtimestamp(1700000000, UTC)


@pytest.mark.parametrize("times", [Interval(1500), Cron("*/5 * * * *", UTC)])
def test_rule_gives_its_times(times: Interval | Cron) -> None:
    """The stored rule gives the same ticks."""
    again = RULES.validate_json(rule_json(times)).trigger
    assert again is not None
    assert again.after(1700000000000) == times.after(1700000000000)


def test_rule_with_unknown_time_zone_has_no_times() -> None:
    """A time zone that exists only in the worker: no next tick, and no error."""
    assert ScheduleRule(cron="* * * * *", timezone="Mine").trigger is None
