"""Messages that are cancelled, rescheduled, or expire: each ends in exactly one way."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from datetime import timedelta
from typing import Any

import anyio

from rsmq import BrokerError, Cancelled, ConfigError, MessageRef, Settled
from tests.chaos.catalogue import ONE, scenario
from tests.chaos.checker import Name, Verdict
from tests.chaos.scenario_run import IS_LONG, ScenarioRun
from tests.chaos.testbed import Testbed, kill_and_pause
from tests.chaos.worker import TOPIC

EACH = 200
"""Messages a turn."""
ATTEMPTS = 40
"""A lost answer is asked for again."""


class Commanded:
    """Messages of a run that are cancelled or rescheduled at random moments, and the answers."""

    def __init__(self, run: ScenarioRun) -> None:
        self._run, self.published = run, 0
        self.answers = dict[Name, object]()
        self.expiring = set[Name]()
        self.moved = Counter[bool]()
        """Rescheduled: parked ones (True), and delayed ones."""

    async def turn(self) -> None:
        """So many messages that are delayed, wait behind their key, run, or wait for a retry; some expire."""
        async with anyio.create_task_group() as tasks:
            for _ in range(EACH):
                tasks.start_soon(self._one, (f"c{self.published % 20}", self.published))
                self.published += 1

    async def _one(self, name: Name) -> None:
        run, chance = self._run, self._run.random
        order = {"key": name[0], "n": name[1], "seconds": chance.random() * 0.1}
        order |= {"do": chance.choice(("fail once", "wait once", "wait once"))} if chance.random() < 0.4 else {}
        is_delayed = chance.random() < 0.3
        options: dict[str, Any] = {"delay": timedelta(seconds=0.5 + chance.random())} if is_delayed else {}
        if chance.random() < 0.2:
            options["expires"] = timedelta(seconds=2 * chance.random() + (1.7 if is_delayed else 0.2))
            self.expiring.add(name)
        run.history.unknown.add(name)
        run.history.given_up[name] = "cancelled, expired or rescheduled"
        await anyio.sleep(chance.random())
        try:
            ref = await run.broker.publish(TOPIC, order, key=name[0], message_id="-".join(map(str, name)), **options)
        except BrokerError:
            return  # it may be stored or not: what comes of it is not known
        self.answers[name] = None
        is_parked = order.get("do") == "wait once"  # for a second, after its first attempt
        if (is_delayed or is_parked) and chance.random() < 0.5:
            await anyio.sleep(chance.random() if is_parked else 0)
            with suppress(ConfigError):  # it is not delayed or parked yet, or not any more
                await self._ask(ref, lambda: run.broker.reschedule(ref, delay=timedelta(seconds=chance.random())))
                self.moved[is_parked and not is_delayed] += 1
        if chance.random() < 0.7:
            await anyio.sleep(chance.random() * 1.5)
            is_running = chance.random() < 0.3
            self.answers[name] = await self._ask(ref, lambda: run.broker.cancel(ref, running=is_running))

    async def _ask(self, ref: MessageRef, call: object) -> object:
        for _ in range(ATTEMPTS):
            try:
                return await call()  # type: ignore[operator]
            except BrokerError:
                await anyio.sleep(0.1)
        raise AssertionError(f"no answer about {ref}")

    def wrong(self) -> list[str]:
        """Messages that ended in two ways, or in none. What a struck worker had handled and not settled may still be
        cancelled."""
        run, found = self._run, list[str]()
        handled = {(each.key, each.n) for each in run.history.events if each.what == "commit"}
        surely = {(e.key, e.n) for e in run.history.events if e.what == "commit" and e.pid not in run.history.excused}
        dead = {name for name, _ in run.history.dead}
        for name, answer in self.answers.items():
            if isinstance(answer, Cancelled) and name in surely | dead:
                found.append(f"{name} is cancelled, and handled or dead")
            ends = name in handled or name in dead or name in self.expiring
            if not isinstance(answer, Cancelled) and not ends and (answer is None or isinstance(answer, Settled)):
                found.append(f"{name} ({answer}) is neither cancelled nor handled")
        return found

    def counts(self) -> Counter[str]:
        """The answers, for the table."""
        return Counter(type(answer).__name__ for answer in self.answers.values() if answer is not None)


@scenario("A35", injection="messages are cancelled, delayed and parked ones rescheduled at random moments, some "
          "expire, while workers are killed (SIGKILL) and paused for two leases, and the connections of the caller are "
          "reset (RST); long runs: eight times",
          bound="each message is handled, cancelled, expired or dead: never two of them, never none",
          servers=ONE)  # fmt: skip
async def messages_under_command(testbed: Testbed) -> Verdict:
    """Cancelling is exact."""
    server = await testbed.server(tcp=True)
    proxy = await testbed.proxy(server)
    run = await testbed.start(server, workers=3, publish_url=proxy.url, concurrency=8)
    commanded, turns = Commanded(run), 8 if IS_LONG else 2
    for turn in range(turns):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(commanded.turn)
            await kill_and_pause(run, proxy, turn)
    verdict = await run.verdict()
    wrong, counts = commanded.wrong(), commanded.counts()
    assert not wrong, wrong[:20]
    assert counts["Cancelled"], "a check that cannot fail is none"
    assert commanded.moved[True], "a check that cannot fail is none"
    run.note = (
        f"{len(commanded.answers)} messages, {counts['Cancelled']} cancelled, {counts['Settled']} too late, "
        f"{commanded.moved.total()} rescheduled ({commanded.moved[True]} parked)"
    )
    return verdict
