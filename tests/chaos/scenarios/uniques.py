"""Messages with a unique name: never two of a name at once, and no name is held by what has ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any, TypeVar

import anyio

from rsmq import BrokerError, MessageRef
from rsmq.control import MessageStatus
from tests.chaos.catalogue import scenario
from tests.chaos.checker import Name, Verdict
from tests.chaos.scenario_run import IS_LONG, ScenarioRun
from tests.chaos.testbed import Testbed, kill_and_pause
from tests.chaos.worker import TOPIC

T = TypeVar("T")
NAMES = 12
OVER = ("settled", "dead", "cancelled")
WITH_A_WORKER = ("waiting_for_key", "ready", "running", "waiting_for_retry", *OVER)


class Named:
    """Publishes under a few names, each with a key of its own, and looks at the message that had the name before.

    A message is accepted if its publish says that it is stored. Then the one before it is over; until `started`, it is
    in the hands of a worker or over. What is over stays over, so the look may come later.
    """

    def __init__(self, run: ScenarioRun) -> None:
        self._run, self.is_ending = run, False
        self.ended = dict[Name, str]()
        """The states in which messages were that had a name before another one."""
        self.counts = Counter[str]()
        self.wrong = list[str]()

    async def publish(self, number: int) -> None:
        """Store messages of one name, one after the other, until the end; then one more, or the name is lost."""
        key, n = f"u{number}", 0
        until = "started" if number % 3 == 0 else "settled"
        before: tuple[Name, MessageRef] | None = None
        while True:
            is_last, name = self.is_ending, (key, n)
            await anyio.sleep(self._run.random.random() / 5)
            ref = await self._store(name, until, on_conflict=self._run.random.choice(("keep", "replace", "extend")))
            n += 1
            if ref != "-".join(map(str, name)):
                self.counts["held"] += 1
                continue
            self.counts["stored"] += 1
            if before is not None:
                await self._check(*before, name, until)
            before = name, ref
            if is_last:
                return

    async def _store(self, name: Name, until: str, **options: Any) -> MessageRef:
        """The message that has the name now. A call whose answer is lost is made again with the same id."""
        run, chance = self._run, self._run.random
        order = {"key": name[0], "n": name[1], "seconds": chance.random() * 0.1}
        order |= {"do": chance.choice(("fail once", "wait once"))} if chance.random() < 0.3 else {}
        delay = timedelta(seconds=chance.random()) if options["on_conflict"] == "extend" else None
        run.history.unknown.add(name)
        run.history.given_up[name] = "held or replaced"
        identity = "-".join(map(str, name))
        return await self._sure(
            lambda: run.broker.publish(
                TOPIC, order, key=name[0], message_id=identity, delay=delay, unique=name[0], until=until, **options
            )
        )

    async def _check(self, before: Name, ref: MessageRef, name: Name, until: str) -> None:
        status: MessageStatus = await self._sure(lambda: self._run.broker.look(ref))
        billing = status.groups[0].state if status.groups else status.state
        allowed = WITH_A_WORKER if until == "started" else OVER
        if billing not in allowed and status.state != "removed":
            self.wrong.append(f"{name} is stored, and {before} is still {billing}")
        self.ended[before] = billing
        self.counts["replaced"] += billing == "cancelled"

    @staticmethod
    async def _sure(call: Callable[[], Awaitable[T]]) -> T:
        while True:
            try:
                return await call()
            except BrokerError:
                await anyio.sleep(0.1)

    def broken(self) -> list[str]:
        """Also messages that were replaced and handled all the same, or were over without either."""
        run = self._run
        started = {(each.key, each.n) for each in run.history.events if each.what == "start"}
        handled = {(each.key, each.n) for each in run.history.events if each.what == "commit"}
        dead = {name for name, _ in run.history.dead}
        for name, state in self.ended.items():
            if state == "cancelled" and name in started:
                self.wrong.append(f"{name} was replaced, and handled all the same")
            if state in ("settled", "dead") and name not in handled | dead:
                self.wrong.append(f"{name} is {state}, and neither handled nor dead")
        return self.wrong


@scenario("A37", injection="messages with unique names are published, and kept, replaced or extended, while workers "
          "are killed (SIGKILL) and paused for two leases, and the connections of the publisher are reset (RST); long "
          "runs: eight times",
          bound="when a message of a name is stored the one before it is over; no name is held for ever")  # fmt: skip
async def unique_names(testbed: Testbed) -> Verdict:
    """At most one message of a name."""
    server = await testbed.server(tcp=True)
    proxy = await testbed.proxy(server)
    run = await testbed.start(server, workers=3, publish_url=proxy.url, concurrency=8)
    named = Named(run)
    async with anyio.create_task_group() as tasks:
        for number in range(NAMES):
            tasks.start_soon(named.publish, number)
        for turn in range(8 if IS_LONG else 2):
            await kill_and_pause(run, proxy, turn)
        named.is_ending = True
    verdict = await run.verdict()
    wrong, counts = named.broken(), named.counts
    assert not wrong, wrong[:20]
    assert counts["held"], "a check that cannot fail is none"
    assert counts["replaced"], "a check that cannot fail is none"
    run.note = f"{counts['stored']} messages stored, {counts['held']} not, {counts['replaced']} replaced"
    return verdict
