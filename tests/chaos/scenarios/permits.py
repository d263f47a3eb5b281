"""Limits on calls at once, and holds, while the members that have the permits die or sleep."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

from tests.chaos.catalogue import ONE, scenario
from tests.chaos.checker import Verdict
from tests.chaos.ledger import Event
from tests.chaos.processes import ChaosProcess
from tests.chaos.scenario_run import IS_LONG, ScenarioRun
from tests.chaos.testbed import CALM, Testbed, paused
from tests.chaos.worker import MOST_CALLS, MOST_CALLS_OF_NAME, TOPIC, provider_of

HELD = "p0"


class Calls:
    """When calls ran, as the ledger says. A killed worker's calls end with it; those of a paused one stand still, and
    count until the pause: its permits end before it can go on."""

    def __init__(self) -> None:
        self._stopped: dict[int, list[float]] = defaultdict(list)

    def stop(self, run: ScenarioRun, worker: ChaosProcess) -> None:
        """A worker was killed, or paused, just now."""
        self._stopped[worker.pid].append(run.now())

    def intervals(self, events: Iterable[Event]) -> list[tuple[str, float, float]]:
        """Of each call its name, begin and end."""
        open_calls: dict[tuple[int, str, int], float] = {}
        found, last = list[tuple[str, float, float]](), 0.0
        for event in events:
            call, last = (event.pid, event.key, event.n), max(last, event.at)
            if event.what == "start":
                open_calls[call] = event.at
            elif event.what in ("commit", "fail") and call in open_calls:
                found.append((provider_of(event.key), *self._bounded(event.pid, open_calls.pop(call), event.at)))
        found += [(provider_of(key), *self._bounded(pid, at, last)) for (pid, key, _), at in open_calls.items()]
        return found

    def _bounded(self, pid: int, begin: float, end: float) -> tuple[float, float]:
        return begin, min([end, *(stop for stop in self._stopped[pid] if stop >= begin)])


def most_at_once(intervals: Iterable[tuple[str, float, float]]) -> tuple[int, Mapping[str, int]]:
    """The most calls at any moment, of all and of each name. One that ends when another begins is over."""
    steps = sorted(step for name, begin, end in intervals for step in ((begin, 1, name), (end, -1, name)))
    running, total, most, most_of = Counter[str](), 0, 0, Counter[str]()
    for _, change, name in steps:
        running[name] += change
        total += change
        most, most_of[name] = max(most, total), max(most_of[name], running[name])
    return most, most_of


@scenario("A40", injection="three workers share permits, of the group, of each name, or those that handlers take; the "
          "one with most of them is killed (SIGKILL); long runs: eight times, and each time another one sleeps for two "
          "leases; then a name is held while a worker sleeps for two leases, and all others are killed and replaced",
          bound="never more calls at once than permits, all permits come back, and nothing of a held name starts",
          variants=({"limits": "group"}, {"limits": "name"}, {"limits": "permit"}), servers=ONE,
          is_cheap=True)  # fmt: skip
async def permits_while_workers_die(testbed: Testbed, limits: str) -> Verdict:
    """A permit ends with its member, before another one gets it; a hold outlives its members."""
    lease = CALM if IS_LONG else 2  # a busy machine that stands still for a second has cost one of 2 s
    run = await testbed.start(await testbed.shared_server(), limits=limits, attempts=20, lease=lease)
    calls = Calls()
    async with run.load(keys=12, burst=2 if IS_LONG else 8, seconds=0.02):  # as much as so few calls can handle
        await run.handles(40)
        for _ in range(8 if IS_LONG else 1):
            victim = run.busiest()
            victim.kill()
            calls.stop(run, victim)
            run.excuse("killed", victim)
            await run.processes.start_workers(1)
            await run.handles(40)
            if IS_LONG:
                sleeper = run.busiest()
                calls.stop(run, sleeper)
                run.excuse("paused", sleeper)
                await paused(sleeper, 2 * run.job.lease)
                await run.handles(40)
        began, ended = await hold_while_workers_die(run, calls)
    verdict = await run.verdict()
    judge(run, calls, limits)
    late = [each for each in run.ledger.events() if began.get(each.pid, ended) < each.at < ended]
    wrong = [each for each in late if each.what == "start" and provider_of(each.key) == HELD]
    assert not wrong, f"{HELD} was held, and {wrong[:5]} started"
    assert any(each.what == "start" for each in late), "a check that cannot fail is none"
    return verdict


async def hold_while_workers_die(run: ScenarioRun, calls: Calls) -> tuple[dict[int, float], float]:
    """Hold a name. Returns from when on each worker may start nothing of it, and when the hold ended."""
    sleeper, *others = sorted(run.processes.living, key=lambda each: each is not run.busiest())
    calls.stop(run, sleeper)
    run.excuse("paused", sleeper)
    sleeper.pause()
    end = run.now() + 2 * run.job.lease
    await run.broker.hold(TOPIC, HELD, "1h")
    for each in others:
        each.kill()
        calls.stop(run, each)
        run.excuse("killed", each)
    began = {each.pid: 0.0 for each in await run.processes.start_workers(2)}
    await run.handles(40)
    await run.until(lambda: run.now() > end, "the pause is over")
    began[sleeper.pid] = run.now()
    sleeper.resume()
    await run.handles(40)
    ended = run.now()
    await run.broker.end_hold(TOPIC, HELD)
    return began, ended


def judge(run: ScenarioRun, calls: Calls, limits: str) -> None:
    """Never more calls than permits, and all of them were used at some moment."""
    most, most_of = most_at_once(calls.intervals(run.ledger.events()))
    if limits == "name":
        assert set(most_of.values()) == {MOST_CALLS_OF_NAME}, f"{most_of} calls at once, {MOST_CALLS_OF_NAME} allowed"
    else:
        assert most == MOST_CALLS, f"{most} calls at once, {MOST_CALLS} allowed"
    run.note = f"at most {most} calls at once, of one name {max(most_of.values())}"
