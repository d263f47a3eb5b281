"""A rolling upgrade from an earlier commit under load, and the downgrade back to it."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import anyio

from tests.chaos.catalogue import scenario
from tests.chaos.checker import Verdict
from tests.chaos.processes import ChaosProcess
from tests.chaos.release import NEW, Release, earlier_release
from tests.chaos.release_process import ReleaseJob, Style
from tests.chaos.scenario_run import ScenarioRun
from tests.chaos.scenarios.gateway import KEPT, NODES, run_on, size
from tests.chaos.scenarios.keys import PARTITIONS
from tests.chaos.testbed import Testbed, ask
from tests.chaos.worker import GROUP, TOPIC
from tests.servers import Server

GATEWAYS = 3
LEASE = 6.0
"""Seconds. On a busy machine a shorter one runs out by itself, and then messages come again without a fault."""
DEVICES = [f"phone-{n}" for n in range(12)]


class UpgradeRun(ScenarioRun):
    """A run whose processes are of two releases."""

    has_till: ClassVar[bool] = False  # an old release may know no databases
    loses_leases_of: Server | None = None

    def set_out(self, style: Style, old: Release) -> None:
        """Say what kind of handler the workers have and which release is the old one."""
        self.style, self.old, self.note = style, old, f"from {old.name}"
        self.history.is_ordered = style != "shared"
        self.devices = DEVICES if style == "inboxes" else []

    def order_for(self, role: str) -> ReleaseJob:
        """The job of a process."""
        job = self.job
        given = {"url": job.url, "prefix": job.prefix, "ledger": job.ledger, "lease": job.lease}
        attempts = 100 if self.style == "payloads" else 5  # there a failure counts for its whole batch
        seed = self.random.randrange(10**6)
        return ReleaseJob(role, self.style, **given, attempts=attempts, devices=self.devices, seed=seed)  # type: ignore[arg-type]

    async def serve(self, release: Release) -> ChaosProcess:
        """One more worker of a release."""
        return (await self.processes.start_workers(1, self.order_for("worker"), release.environment))[0]

    async def publish_with(self, release: Release) -> None:
        """One more publisher of a release."""
        await self.processes.start_publisher(self.order_for("publisher"), release.environment)

    async def connect_with(self, release: Release, turn: int) -> ChaosProcess:
        """A gateway of a release, for its part of the devices."""
        job = replace(self.order_for("gateway"), devices=self.devices[turn::GATEWAYS])
        return (await self.processes.start_workers(1, job, release.environment))[0]

    async def replace_workers(self, release: Release, workers: list[ChaosProcess]) -> list[ChaosProcess]:
        """One after the other: the second is killed, the others stop in order."""
        new = []
        for turn, leaver in enumerate(workers):
            if self.style in ("hash", "shared", "batches"):
                await self.publish_poison(f"poison-{self.random.random()}", do="raise")
            if turn == 1:
                leaver.kill()
                self.excuse("killed", leaver)
            else:
                leaver.terminate()
                assert await leaver.ended() == 0, self.processes.log()
            await self.handles(100)  # the rest does its work meanwhile
            self.delete_leases()
            new.append(await self.serve(release))
            await self.handles(200)
        return new

    def delete_leases(self) -> None:
        """Delete the records of all leases, if the run is one that loses them: members of both releases ask for new."""
        if self.loses_leases_of is not None:
            keys = [self.broker.keys.lease(TOPIC, partition, GROUP) for partition in PARTITIONS]
            ask(self.loses_leases_of, "DEL", *keys)
            self.excuse("its leases were deleted")

    async def replace_gateways(self, release: Release, gateways: list[ChaosProcess]) -> list[ChaosProcess]:
        """One after the other: the new one takes the devices over, then the old one stops."""
        new = []
        for turn, leaver in enumerate(gateways):
            self.excuse("a letter was out while its device moved", leaver)
            new.append(await self.connect_with(release, turn))
            await self.handles(50)
            leaver.terminate()
            assert await leaver.ended() == 0, self.processes.log()
        return new

    async def _holds(self) -> list[str]:
        """The inboxes must be empty, too."""
        found = {name: await self.broker.devices.find(name) for name in self.devices}
        full = [f"{device.backlog} letters of {name}" for name, device in found.items() if device and device.backlog]
        return await super()._holds() + full


@scenario("52", injection="three workers of an earlier commit's wheel and of this one replace each other one by one "
          "under load, there and back; in each direction one is killed; publishers of both",
          bound="dead letters exactly the poison; repeats only of what the killed workers had", is_cheap=True,
          variants=({"style": "hash"}, {"style": "shared"}, {"style": "batches"}, {"style": "payloads"}))  # fmt: skip
async def rolling_upgrade(testbed: Testbed, style: Style) -> Verdict:
    """Old and new workers and publishers run side by side on one server."""
    return await _upgrade(testbed, style)


@scenario("52", injection="the same, and the records of all leases are deleted six times, while workers of both serve",
          bound="order is kept, nothing lost")  # fmt: skip
async def rolling_upgrade_without_leases(testbed: Testbed) -> Verdict:
    """Who asks first waits for the longest lease of a member, whatever release that is of."""
    return await _upgrade(testbed, "hash", loses_leases=True)


@scenario("52", injection="the same with workers that feed inboxes, and gateways that connect twelve devices",
          bound="per device in order; again at most the letter that was out when a device moved")  # fmt: skip
async def rolling_upgrade_of_devices(testbed: Testbed) -> Verdict:
    """A device's session moves between gateways of two releases while both feed and send."""
    return await _upgrade(testbed, "inboxes")


@scenario("52", injection="three MQTT gateways of an earlier commit's wheel and of this one replace each other one by "
          "one under load, there and back; in each direction one is killed",
          bound=KEPT, is_cheap=True)  # fmt: skip
async def rolling_upgrade_of_gateways(testbed: Testbed) -> Verdict:
    """MQTT clients move between gateways of two releases, with what they have not acknowledged."""
    old = await anyio.to_thread.run_sync(earlier_release)
    count = size(testbed, 60)
    run = await run_on(testbed, await testbed.shared_server(), count=count, release=old)
    run.note = f"from {old.name}"
    steps = [NEW] * NODES + [old] * NODES
    for number, release in enumerate(steps):
        await run.reaches(4 * count * (number + 1) // (len(steps) + 2))
        (arrival,) = await run.start_gateways(1, release)
        assert f"version: {release.site}/rsmq/__init__.py" in arrival.log(), arrival.log()
        await (run.kill if number % NODES == 1 else run.stop)(run.gateways[0])
        await run.recovers()
    return await run.judge()


async def _upgrade(testbed: Testbed, style: Style, *, loses_leases: bool = False) -> Verdict:
    old = await anyio.to_thread.run_sync(earlier_release)
    server = await testbed.shared_server()
    run = await testbed.begin(UpgradeRun, server.url, workers=0, lease=LEASE)
    run.set_out(style, old)
    run.loses_leases_of = server if loses_leases else None
    workers = [await run.serve(old) for _ in range(3)]
    gateways = [await run.connect_with(old, turn) for turn in range(GATEWAYS)] if run.devices else []
    await run.publish_with(old)
    await run.handles(200)
    await run.publish_with(NEW)
    await run.handles(200)
    for release in (NEW, old):
        workers = await run.replace_workers(release, workers)
        gateways = await run.replace_gateways(release, gateways)
        await run.handles(300)
    if run.devices:
        run.history.most_repeats = 2 * len(run.devices)
    of_both(run)
    return await run.verdict()


def of_both(run: UpgradeRun) -> None:
    """Each release was really there: its processes have said from where they import it."""
    log = run.processes.log(10**8)
    for release in (NEW, run.old):
        assert f"version: {release.site}/rsmq/__init__.py" in log, f"nothing ran from {release.site}"
