"""Files of the server that are cut short or have a flipped bit when it starts again, and a disk that is slow."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import anyio

from rsmq.errors import BrokerUnavailable
from tests.chaos.catalogue import scenario
from tests.chaos.checker import Innocent, MoreThanOnce, Name, Never, Verdict
from tests.chaos.publisher import PublisherJob
from tests.chaos.scenario_run import ScenarioRun
from tests.chaos.scenarios.keys import PARTITIONS
from tests.chaos.scenarios.server import all_alive
from tests.chaos.testbed import Testbed, ask
from tests.chaos.worker import GROUP, TOPIC
from tests.servers import Server

DAMAGES = ("cut", "flip length", "flip payload", "flip dump")
SLOW = (("everysec", 2.0), ("always", 0.5), ("always", 2.0))
LAST_WORDS = ("Bad file format", "RDB", "Unexpected end of file", "Unrecoverable error")


class Disk:
    """The files of a server that is not running."""

    def __init__(self, server: Server, run: ScenarioRun) -> None:
        self._server, self._random = server, run.random

    @property
    def log(self) -> Path:
        """The append-only file that was written last."""
        directory = self._server.directory / "appendonlydir"
        return max(directory.glob("*.incr.aof"), key=lambda path: path.stat().st_mtime)

    @property
    def dump(self) -> Path:
        """The snapshot of a server without an append-only file."""
        return self._server.directory / "dump.rdb"

    def cut(self) -> None:
        """The last part of the append-only file is missing, in the middle of a command."""
        os.truncate(self.log, self.log.stat().st_size - self._random.randrange(1000, 50_000))

    def flip(self, path: Path, at: int) -> None:
        """One bit is another one."""
        with path.open("r+b") as file:
            file.seek(at)
            (byte,) = file.read(1)
            file.seek(at)
            file.write(bytes([byte ^ 1 << self._random.randrange(7)]))

    def flip_length(self) -> None:
        """The length of an argument is wrong: the server cannot read on from there."""
        data = self.log.read_bytes()
        self.flip(self.log, data.index(b"\r\n$", len(data) - self._random.randrange(1000, 50_000)) + 2)

    def flip_payload(self) -> None:
        """A payload is another one: the server does not detect it."""
        data = self.log.read_bytes()
        self.flip(self.log, data.index(b'"seconds":', len(data) - self._random.randrange(20_000, 50_000)))

    def flip_dump(self) -> None:
        """The checksum of the snapshot is wrong."""
        self.flip(self.dump, self.dump.stat().st_size // 2)

    def repair(self, backup: Path) -> None:
        """What an operator does: cut the append-only file before the damage, or bring the snapshot's backup back."""
        if self.dump.exists():
            shutil.copy(backup, self.dump)
            return
        tool = f"{'redis' if 'redis' in self._server.kind else 'valkey'}-check-aof"
        command = ["bash", "-c", f'exec -a {tool} "$0" --fix "$1"', self._server.binary(), str(self.log)]
        done = subprocess.run(command, input="y\n", capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@scenario("A30", injection="SIGKILL of the server; its append-only file is cut short, or has a flipped bit in a length "
          "or in a payload; or its snapshot has one and the backup of an earlier moment is used",
          bound="all that the server still has is handled; again only what it holds as unsettled",
          variants=tuple({"damage": each} for each in DAMAGES))  # fmt: skip
async def damaged_files(testbed: Testbed, damage: str) -> Verdict:
    """If the server refuses to start it is repaired with its own tool."""
    is_dump = damage == "flip dump"
    server = await testbed.server("--rdbchecksum", "yes", tcp=True, aof=not is_dump)
    front = await testbed.proxy(server)
    run = await testbed.begin(ScenarioRun, front.url)
    disk, backup = Disk(server, run), server.directory / "backup.rdb"
    run.excuse("the server has forgotten something")
    run.history.rewound = "the server has forgotten something"
    job = PublisherJob(run.job, many=20, pause=0.03, seed=testbed.seed, keys=40, handler_seconds=0.1)
    await run.processes.start_publisher(job)  # faster than the handlers: some of the last messages are not started
    await run.handles(1000)
    if is_dump:
        ask(server, "SAVE")
        shutil.copy(disk.dump, backup)
        await run.handles(500)
        ask(server, "SAVE")
    run.busiest().kill()  # what it had in memory is only on the disk
    front.cut()
    front.reset()
    server.kill()
    getattr(disk, damage.replace(" ", "_"))()
    is_refused = await anyio.to_thread.run_sync(_refuses, server)
    assert is_refused == (damage in ("flip length", "flip dump")), server.log()[-2000:]
    if is_refused:
        disk.repair(backup)
        await anyio.to_thread.run_sync(server.start)
    unsettled = _take_stock(server, run, is_changed="payload" in damage)
    front.mend()
    await run.recovers()
    await run.handles(500)
    await run.processes.start_workers()
    verdict = but_for_unreadable(await run.verdict(), damage)
    run.lost = sum(isinstance(each, Never) for each in verdict.findings)
    again = {each.message for each in verdict.findings if isinstance(each, MoreThanOnce)}
    assert again <= unsettled, f"settled, and handled again: {sorted(again - unsettled)[:10]}"
    return verdict


def _refuses(server: Server) -> bool:
    """Start it. True if it ends instead, and says why; its files stay."""
    before = len(server.log())
    server.close, close = lambda: None, server.close  # type: ignore[method-assign]
    try:
        server.start()
    except (AssertionError, BrokerUnavailable):
        said = server.log()[before:]
        assert any(word in said for word in LAST_WORDS), f"it does not say what is wrong: {said}"
        return True
    finally:
        server.close = close  # type: ignore[method-assign]
    return False


def _take_stock(server: Server, run: ScenarioRun, *, is_changed: bool) -> set[Name]:
    """Compare what was confirmed with what the server has: the rest is given up. Returns what it has as unsettled.

    `is_changed`: a payload may be another message now.
    """
    confirmed = {(event.key, event.n) for event in run.ledger.events() if event.what == "ok"}
    present, unsettled = set[Name](), set[Name]()
    for partition in PARTITIONS:
        stream = run.broker.keys.stream(TOPIC, partition)
        names = dict(_names(server, stream, "-"))
        present |= set(names.values())
        with server.client() as client:
            (group,) = client.xinfo_groups(stream)
            pending = [row["message_id"] for row in client.xpending_range(stream, GROUP, "-", "+", 100_000)]
            retries = [
                member.partition(b"|")[0]
                for member in client.zrange(run.broker.keys.retry(TOPIC, partition, GROUP), 0, -1)
            ]
        undelivered = dict(_names(server, stream, f"({group['last-delivered-id'].decode()}"))
        unsettled |= {names[each] for each in (*pending, *retries, *undelivered) if each in names}
    run.history.given_up |= dict.fromkeys(confirmed - present, "it is not on the disk any more")
    if is_changed:
        run.history.unknown |= present - confirmed
    return unsettled


def _names(server: Server, stream: str, start: str) -> Iterator[tuple[bytes, Name]]:
    """Id and message of each readable entry."""
    for entry_id, fields in ask(server, "XRANGE", stream, start, "+"):
        with contextlib.suppress(ValueError, KeyError, TypeError):
            order = json.loads(fields[b"data"])
            yield entry_id, (str(order["key"]), int(order["n"]))


def but_for_unreadable(verdict: Verdict, damage: str) -> Verdict:
    """Without the dead letters of entries whose payload the disk has changed."""
    if damage == "flip payload":
        verdict.findings = [each for each in verdict.findings if not isinstance(each, Innocent)]
    return verdict


@scenario("A31", injection="every fsync takes so many seconds, for four leases of 6 s; writes wait for it",
          bound="no duplicate; where every command takes 2 to 4 s (always, 2 s) leases are lost: few repeats",
          variants=tuple({"fsync": how, "seconds": each} for how, each in SLOW))  # fmt: skip
async def slow_disk(testbed: Testbed, fsync: str, seconds: float) -> Verdict:
    """With `always` the server answers only after each fsync, so every command takes as long as one or two."""
    server = await testbed.faulty_server("--appendfsync", fsync)
    run = await testbed.start(server, lease=6)
    is_too_slow = fsync == "always" and seconds > run.job.lease / 6  # a heartbeat waits a third of the lease
    if is_too_slow:
        run.excuse("the server answered too late")
        run.history.most_repeats = 3 * run.job.concurrency
    async with run.load(seconds=0.005):
        await run.handles(200)
        with server.faults.slow_disk(seconds):
            await anyio.sleep(4 * run.job.lease)  # the slowness is the fault under test
        await run.recovers()
        await run.handles(200)
    all_alive(run)
    verdict = await run.verdict()
    assert is_too_slow or not verdict.findings, verdict
    return verdict
