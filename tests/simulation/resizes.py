"""A topic that grows while a run goes on: an operator resizes it, or dies or sleeps on the way, and workers go on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import anyio

from rsmq import Broker
from rsmq.errors import RsmqError
from tests.simulation.plan import TOPIC
from tests.simulation.process import Process

if TYPE_CHECKING:
    from tests.simulation.network import SimulatedConnection
    from tests.simulation.run import Run

STEPS: Final = ("HGETALL", "XGROUP", "measure_members", "change_layout", "are_finished", "resize_topic")
"""What an operator sends during a resize: it is struck when it sends one of these."""
OUTPUTS: Final = "invoices"


class Resizes:
    """Operators of a run. The topic of outputs grows, too. `done`: how many resizes an operator has seen end."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._operators = list[Process]()
        self.done = 0

    def start(self) -> None:
        """Start an operator, and plan what strikes it."""
        run, choices = self._run, self._run.world.choices
        if not run.plan.growth:
            return
        operator = self._start()
        step = choices.among(STEPS, "operator step")
        skips = int(choices.between(0, 3, "operator skips"))
        what = choices.among(["nothing", "dies", "dies", "sleeps"], "operator fate")

        def spring(connection: SimulatedConnection) -> None:
            if not choices.allows(f"the operator {what} at {step}"):
                return
            if choices.unit("operator late") < 0.5:  # what it has sent comes late, too
                connection.held_until = run.world.now + choices.between(0.1, 2 * run.plan.lease, "operator late by")
            run.world.after(choices.between(0, 0.001, "operator ends"), strike)

        def strike() -> None:
            if what == "sleeps":
                operator.freeze()
                run.world.after(choices.between(0.5, 3 * run.plan.lease, "operator wakes"), operator.thaw)
                return
            operator.kill()
            if choices.unit("another operator") < 0.5:
                run.world.after(choices.between(0, 3, "other operator"), self._start)

        if what != "nothing":
            run.network.trap(operator.name, step, spring, skips=skips)

    def _start(self) -> Process:
        operator = Process(self._run.world, self._run.network, f"o{len(self._operators) + 1}")
        self._operators.append(operator)
        operator.start(self._resize())
        return operator

    async def _resize(self) -> None:
        """Resize the topic again and again, as `rsmq topic resize` does it, and try again while the server is away."""
        run = self._run
        await anyio.sleep(max(0.0, run.plan.grows_after - run.world.now))
        async with Broker(run.settings()) as broker:
            wanted = run.plan.partitions
            for factor in run.plan.growth:
                wanted *= factor
                while not await self._has(broker, wanted):
                    await anyio.sleep(0.1)
                run.world.note(f"   {TOPIC} has {wanted} partitions")
                self.done += 1

    async def _has(self, broker: Broker, partitions: int) -> bool:
        """Whether the topics have so many partitions, or more: else they are resized."""
        names = [TOPIC, OUTPUTS] if self._run.plan.has_outputs else [TOPIC]
        try:
            for name in names:
                topic = await broker.topics.ensure(name)
                if topic.partitions < partitions:
                    topic = await broker.topics.resize(name, partitions)
                if topic.partitions < partitions:
                    return False
        except RsmqError as error:
            self._run.world.note(f"   a resize failed: {error!r}")
            return False
        return True

    @property
    def is_over(self) -> bool:
        """Whether no operator is at work."""
        return all(each.is_dead or each.is_over for each in self._operators)

    def holds(self) -> list[str]:
        """A resize that has begun and not ended, and messages in partitions that the topic does not have any more."""
        if not self._run.plan.growth:
            return []
        following = self._run.layout.following
        left = [f"a resize to {following.count} partitions has not ended"] if following is not None else []
        return [*left, *(f"{stream}: stray messages" for stream in self._strays())]

    def _strays(self) -> list[str]:
        """After FLUSHALL a process that does not know the layout may make the topic, while a publisher goes on with it:
        the worker that reads partition 0 looks for these every two seconds."""
        if not self._run.was_wiped:
            return []
        ask, keys = self._run.network.ask, self._run.members[0].broker.keys
        known = {keys.stream(TOPIC, number) for number in self._run.numbers}
        every = keys.stream(TOPIC, 0).replace("0}", "*}")
        there = {each.decode() for pattern in (every, f"{every}:delayed") for each in ask("KEYS", pattern)}
        streams = {name.removesuffix(":delayed") for name in there} - known
        return sorted(each for each in streams if ask("XLEN", each) or ask("ZCARD", f"{each}:delayed"))
