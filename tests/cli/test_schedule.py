"""The timetable: what the server knows of the schedules, beside workers that serve them and after them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import anyio
import pytest

from rsmq import Broker, Settings
from rsmq.clock import epoch_ms
from rsmq.schedule import Cron, Interval, Rule, rule_of
from rsmq.timetable import ScheduleState, look_up
from tests.cli.conftest import Cli
from tests.contract.witness import PATIENCE, ask


async def look(broker: Broker, topic: str | None = None) -> list[ScheduleState]:
    """What stands in the server."""
    return await look_up(broker.client, broker.keys, broker.topics, topic)


async def led(broker: Broker, count: int) -> list[ScheduleState]:
    """Wait until so many schedules have a leader."""
    with anyio.fail_after(PATIENCE):
        while sum(1 for state in await look(broker) if state.leader) < count:
            await anyio.sleep(0.01)
    return await look(broker)


async def test_the_timetable(server_url: str, prefix: str, cli: Cli) -> None:
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
        assert morning.rule == Rule(cron="0 6 * * MON-FRI", timezone="Asia/Seoul")
        assert clock.rule == Rule(every_ms=5 * 3600_000)
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


async def test_what_others_have_written(server_url: str, prefix: str) -> None:
    """A schedule of an older worker has no rule, one of a newer worker perhaps one that is not understood."""
    async with Broker(Settings(url=server_url, prefix=prefix, preflight="warn")) as broker:
        await broker.publish("ticks", "x", key="k")
        place = broker.keys.every("ticks", 0)
        await ask(broker, "HSET", place, "last|old", "1700000000000", "last|new", "1700000000000", "rule|new", "moon")
        states = {state.name: state for state in await look(broker, "ticks")}
    assert states.keys() == {"old", "new"}
    for state in states.values():
        assert (state.next, state.leader, state.rule) == (None, "", Rule())
        assert state.last == datetime.fromtimestamp(1700000000, UTC)


@pytest.mark.parametrize("times", [Interval(1500), Cron("*/5 * * * *", UTC)])
def test_a_rule_is_its_times(times: Interval | Cron) -> None:
    """What is stored gives the same ticks again."""
    again = Rule.model_validate_json(rule_of(times)).times
    assert again is not None
    assert again.after(1700000000000) == times.after(1700000000000)


def test_a_rule_that_cannot_be_told() -> None:
    """A zone that exists only in the worker: no next tick, and no error."""
    assert Rule(cron="* * * * *", timezone="Mine").times is None
