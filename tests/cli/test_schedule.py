"""The schedules that the server knows, while workers serve them and afterwards."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import anyio
import pytest

from rsmq import Broker, ConfigError, Message, Settings
from rsmq.handler.schedule import Cron, Interval, ScheduleRule, read_rule, rule_json
from rsmq.inspector.schedules import ScheduleState, look_up
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
        assert (clock.last, clock.runs) == (None, ()), "it has never run"
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
            after = (await look(broker))[0]
            assert after.next == before.next, "the ticks stay as they are"
            assert [(run.result, run.is_asked, run.time) for run in after.runs] == [("published", True, at)]
            await broker.schedules.run("ticks", "clock")
            await seen(2)
    wrong = await anyio.to_thread.run_sync(cli, "schedule", "run", "ticks", "watch")
    assert (wrong.returncode, "the schedules are clock" in wrong.stderr) == (1, True)


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
        assert state.last is None


@pytest.mark.parametrize("times", [Interval(1500), Cron("*/5 * * * *", UTC)])
def test_rule_gives_its_times(times: Interval | Cron) -> None:
    """The stored rule gives the same ticks."""
    again = read_rule(rule_json(times)).trigger
    assert again is not None
    assert again.after(1700000000000) == times.after(1700000000000)


def test_rule_with_unknown_time_zone_has_no_times() -> None:
    """A time zone that exists only in the worker: no next tick, and no error."""
    assert ScheduleRule(cron="* * * * *", timezone="Mine").trigger is None


async def test_a_failing_schedule_is_seen_and_its_log_backs_off(
    server_url: str, prefix: str, cli: Cli, caplog: pytest.LogCaptureFixture
) -> None:
    """Its error, its traceback and how often it has failed; one traceback in the log; then it works again."""
    broker = Broker(Settings(url=server_url, prefix=prefix, preflight="warn"))
    works = list[bool]()

    @broker.every(timedelta(hours=1000), "reports", name="late")
    def never() -> None: ...

    @broker.every(timedelta(milliseconds=100), "reports")
    def broken() -> str:
        if not works:
            raise LookupError("the price list is gone")
        return "done"

    async def failed(times: int) -> None:
        async def is_true() -> bool:
            return any(state.failures >= times for state in await look(broker))

        await until(is_true, f"it has failed {times} times")

    async with broker, broker.running():
        await failed(2)
        state = next(each for each in await look(broker) if each.name == "broken")
        assert state.last is None
        assert state.newest is not None
        assert (state.newest.result, state.newest.error) == ("failed", "LookupError: the price list is gone")
        table = await anyio.to_thread.run_sync(cli.ok, "schedule", "list")
        assert "failed 2 times" in table or "failed 3 times" in table
        assert "never" in table
        shown = await anyio.to_thread.run_sync(cli.ok, "schedule", "show", "reports", "broken")
        assert "LookupError: the price list is gone" in shown
        assert "Traceback (most recent call last)" in shown
        works.append(True)

        async def is_done() -> bool:
            return any(run.result == "published" for each in await look(broker) for run in each.runs)

        await until(is_done, "it works again")
    assert sum("Traceback" in (each.exc_text or "") for each in caplog.records if "broken" in each.message) == 1


async def test_an_operator_pauses_changes_adds_and_removes_schedules(server_url: str, prefix: str, cli: Cli) -> None:
    """All of it while a worker runs; what was set stays over its restart."""
    broker = Broker(Settings(url=server_url, prefix=prefix, preflight="warn", lease_ttl="1s"))
    found = list[object]()
    broker.every(timedelta(hours=1000), "ticks", name="clock")(lambda: {"tick": 1})

    @broker.handler("ticks", group="g", partitions=2)
    async def note(payload: object) -> None:
        found.append(payload)

    async def run(*words: str) -> str:
        return await anyio.to_thread.run_sync(lambda: cli.ok("schedule", *words))

    async with broker:
        async with broker.running():
            await led(broker, 1)
            await run("pause", "ticks", "clock")
            await run("set", "ticks", "clock", "--every", "200ms")
            [state] = await look(broker)
            assert (state.paused is not None, state.next) == (True, None)
            assert state.set_rule == ScheduleRule(every_ms=200)
            assert "every 200 ms (code: every 41.7 days)" in await run("list")
            assert found == []
        async with broker.running():
            await led(broker, 1)
            await run("resume", "ticks", "clock")
            await until(lambda: found.count({"tick": 1}) >= 2, "it ticks by the rule of the operator")
            await run("set", "ticks", "clock", "--reset")
            await run("add", "ticks", "customer-7", '{"customer": 7}', "--every", "150ms", "--key", "c7")
            await until(lambda: found.count({"customer": 7}) >= 2, "an added one ticks")
            await broker.schedules.upsert("customer-7", "150ms", "ticks", {"customer": 8}, key="c7")
            await until(lambda: {"customer": 8} in found, "it has another payload")
            added = next(each for each in await look(broker) if each.name == "customer-7")
            assert added.runs[-1].result == "published"
            await run("remove", "ticks", "customer-7")
            assert [each.name for each in await look(broker)] == ["clock"]
            lost = ("add", "ticks", "lost", "1", "--every", "1h", "--band", "bulk")
            wrong = await anyio.to_thread.run_sync(lambda: cli("schedule", *lost))
            assert (wrong.returncode, "has no band 'bulk'" in wrong.stderr) == (2, True)
            wrong = await anyio.to_thread.run_sync(lambda: cli("schedule", "remove", "ticks", "clock"))
            assert (wrong.returncode, "in the code of a worker" in wrong.stderr) == (2, True)
            with pytest.raises(ConfigError, match="in the code of a worker"):
                await broker.schedules.upsert("clock", "1h", "ticks", 1)
