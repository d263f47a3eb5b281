"""Old bugs and removed fences, put back one at a time: `python -m tests.simulation.museum` must find each.

An exhibit is a few replaced lines, applied in a scratch copy of the package.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
MINUTES: Final = 10
FENCE: Final = "if lease[1] ~= ARGV[1] or lease[2] ~= ARGV[2] then return { 'STALE_EPOCH' } end"


@dataclass(frozen=True)
class Edit:
    """Lines of one file, replaced by others."""

    path: str
    old: str
    new: str


@dataclass(frozen=True)
class Exhibit:
    """A bug. `seed`: one that finds it."""

    name: str
    what: str
    edits: Sequence[Edit]
    seed: int = 0


def unfenced(script: str, seed: int = 0) -> Exhibit:
    """A script that does not check owner and epoch."""
    edit = Edit(f"rsmq/redis/lua/{script}.lua", FENCE, "")
    return Exhibit(f"{script} without its fence", "a former owner may run it", [edit], seed)


def bug(name: str, what: str, path: str, old: str, new: str = "") -> Exhibit:
    """A bug in one place."""
    return Exhibit(name, what, [Edit(f"rsmq/{path}", old, new)])


EXHIBITS: Final = (
    unfenced("start_message"),
    unfenced("park_message"),
    unfenced("unpark_messages"),
    unfenced("claim_pending"),
    bug(
        "settle_messages without its fence",
        "a former owner acknowledges the new owner's messages",
        "redis/lua/settle_messages.lua",
        "if holder[1] ~= ARGV[1] or holder[2] ~= epoch then return { 'STALE_EPOCH' } end",
    ),
    bug(
        "no look at the clock before a start",
        "a worker that wakes from a pause starts handlers of partitions that it has lost",
        "consumer/runner.py",
        "if now >= lane.lease.deadline or (",
        "if (",
    ),
    bug(
        "the last reader is not cut off",
        "a read of the last owner that comes late takes messages for it",
        "heartbeat/lease.py",
        "await self._cut_off(key, reply[3].decode().splitlines())",
        "pass",
    ),
    Exhibit(
        "a release forgets the reader",
        "a worker that stops while its read is late leaves a read behind that takes messages",
        [
            Edit("rsmq/redis/lua/release_lease.lua", "'reader', ARGV[4]", "'reader', ''"),
            Edit("rsmq/consumer/lane_lifecycle.py", "await self._fetchers.end_late_reads()", "pass"),
        ],
    ),
    bug(
        "an absent member goes on",
        "a member whose presence is interrupted keeps working while others take its partitions",
        "heartbeat/heartbeat.py",
        "        for lease, on_lost in leases.items():\n            self._lost(lease, on_lost)\n        for each",
        "        for each",
    ),
    bug(
        "a present member is replaced",
        "the script that takes the lease of an absent member does not ask again whether it is back",
        "redis/lua/take_lease.lua",
        "if ARGV[5] ~= '' and redis.call('PUBSUB', 'NUMSUB', ARGV[5])[2] > 0 then return { 'HELD', owner, left } end",
    ),
    bug(
        "a renewal revives a lease",
        "a lease that has run out by the clock is believed again when a late answer comes",
        "heartbeat/lease.py",
        "if not self.is_lost and self.is_held():",
        "if True:",
    ),
    bug(
        "settlements are lost with their connection",
        "what was done is not settled again after the connection has broken",
        "consumer/fetcher.py",
        "            self._settler.put_back(batches)\n            raise",
        "            raise",
    ),
    bug(
        "a new lane gets the old lane's read",
        "messages of a read that began under an earlier lease overtake what is pending",
        "consumer/fetcher.py",
        "if self._lanes.get(lane.partition) is lane}",
        "if lane.partition in self._lanes}",
    ),
    bug(
        "settled during a claim",
        "a message that is settled while a claim is on its way starts again",
        "consumer/reclaimer.py",
        "[entry for entry in reply[3:] if entry[0] not in in_flight]",
        "list(reply[3:])",
    ),
    bug(
        "the reply to a retry is lost",
        "messages that were brought back in a lost reply stay pending",
        "consumer/reclaimer.py",
        "            lane.retry_at = 0.0\n            lane.restart_recovery()",
        "            lane.retry_at = 0.0",
    ),
    bug(
        "a retry before the reply to its parking",
        "a parked message that is due before the reply to its parking stays pending",
        "consumer/reclaimer.py",
        "while lane.lease.is_held() and any(",
        "while False and any(",
    ),
    bug(
        "a publish whose reply is lost",
        "the messages are stored again without a search",
        "producer/in_doubt.py",
        "    places = {message_id",
        "    return 0, write.since\n    places = {message_id",
    ),
    bug(
        "a handover does not wait",
        "a partition is given away while its handlers run",
        "consumer/lane_lifecycle.py",
        "        while lane.running and monotonic() < deadline:\n            await asyncio.sleep(0.01)\n"
        "        if lane.running:\n            return False\n",
    ),
    bug(
        "an outage looks like the death of all",
        "members that could not renew for a while are taken for dead at once",
        "heartbeat/liveness.py",
        "if self._steady_since is None or now - self._steady_since < self._ttl:",
        "if False:",
    ),
    bug(
        "a stop during the start",
        "a worker that is told to stop before it has started spins for ever",
        "worker/worker.py",
        "                self._stop_consumers(grace)\n            async with",
        "                self.stop(grace)\n            async with",
    ),
)


@contextmanager
def put_back(exhibit: Exhibit) -> Iterator[Path]:
    """A scratch copy of the package with the bug."""
    with tempfile.TemporaryDirectory(prefix="rsmq-museum-") as name:
        scratch = Path(name)
        for folder in ("rsmq", "tests"):
            shutil.copytree(ROOT / folder, scratch / folder, ignore=shutil.ignore_patterns("__pycache__"))
        for edit in exhibit.edits:
            path = scratch / edit.path
            text = path.read_text()
            if text.count(edit.old) != 1:
                raise ValueError(f"{exhibit.name}: {edit.path} has the lines {text.count(edit.old)} times:\n{edit.old}")
            path.write_text(text.replace(edit.old, edit.new))
        yield scratch


def find(exhibit: Exhibit, seconds: float) -> tuple[int | None, str, float]:
    """A seed that finds the bug, the first broken promise, and the seconds it took; None if it was not found."""
    started = time.monotonic()
    with put_back(exhibit) as scratch:
        first = exhibit.seed or 1
        while time.monotonic() - started < seconds:
            command = [
                sys.executable,
                "-m",
                "tests.simulation",
                "--seed",
                str(first),
                "--count",
                "20",
                "--until-failure",
            ]
            printed = subprocess.run(command, cwd=scratch, capture_output=True, text=True, check=False).stdout
            failed = re.search(r"^seed (\d+): .*\n  (.*)", printed, re.MULTILINE)
            if failed:
                return int(failed[1]), failed[2], time.monotonic() - started
            first = first + 20 if first != exhibit.seed else 1
    return None, "", time.monotonic() - started


def main() -> int:
    """Look for each bug; the exit code is 1 if one was not found."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.museum", description=__doc__)
    parser.add_argument("only", nargs="*", help="parts of names; default: all")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="the longest search for one of them")
    chosen, missed = parser.parse_args(), 0
    for exhibit in EXHIBITS:
        if chosen.only and not any(part in exhibit.name for part in chosen.only):
            continue
        seed, promise, seconds = find(exhibit, chosen.minutes * 60)
        missed += seed is None
        print(
            f"{exhibit.name}: {'not found' if seed is None else f'seed {seed}: {promise}'} ({seconds:.0f} s)",
            flush=True,
        )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
