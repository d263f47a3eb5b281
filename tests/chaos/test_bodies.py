"""SIGKILL of publishers and workers with a store of bodies, also while it is away."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from rsmq import Broker, Settings
from rsmq.codecs import Offload
from rsmq.control import Bodies
from tests.chaos.bodies_run import BodiesJob, BodiesRun
from tests.compiler import MISSING, compiler
from tests.contract.witness import Witness, settled

PUBLISHER = """
import asyncio, os, signal, sys
from rsmq import Broker
from rsmq.codecs import Offload

url, prefix, folder, where = sys.argv[1:]
offload = Offload(folder, above="1kB")
put, left = offload.store.put, [3]

def dying(name, data):
    if "/t/" in name:
        left[0] -= 1
        if not left[0] and where == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        if not left[0] and where == "inside":
            os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)
        put(name, data)
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
    else:
        if where == "first":
            os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)
        put(name, data)

offload.store.put = dying

async def main():
    async with Broker(url, prefix=prefix, preflight="warn", offload=offload) as broker:
        for n in range(5):
            await broker.publish("t", {"n": n, "x": "x" * 2000}, message_id=f"m{n}")
            print(n, flush=True)

asyncio.run(main())
"""


@pytest.mark.parametrize("where", ["first", "before", "inside", "after"])
async def test_a_publisher_that_is_killed_between_its_body_and_its_entry_leaves_nothing(
    settings: Settings, tmp_path: Path, witness: Witness, where: str
) -> None:
    """What it has confirmed has a body. It publishes all again; then the sweeps leave no orphan, nor half of one, and
    miss nothing. `first`: in the put of the object that marks the folder of the server."""
    assert settings.url is not None
    command = [sys.executable, "-c", PUBLISHER, settings.url, settings.prefix, str(tmp_path), where]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    known = 0 if where == "first" else 2
    assert done.stdout.split() == ["0", "1"][:known]
    offload = Offload(tmp_path, above="1kB")
    broker = Broker(settings.url, prefix=settings.prefix, preflight="warn", offload=offload)

    @broker.handler("t", group="g")
    async def take(payload: dict[str, Any]) -> None:
        witness.note(payload["n"])

    async with broker:
        bodies = Bodies(broker.client, broker.keys, broker.topics, offload, keep=timedelta(0), grace=timedelta(0))
        for n in range(5):
            ref = await broker.publish("t", {"n": n, "x": "x" * 2000}, message_id=f"m{n}")
            assert (ref.is_new, ref.is_same) == ((False, True) if n < known else (True, True))
        (state,) = await bodies.status()
        assert (state.bodies - known, state.named, state.lost) == (6 if where == "after" else 5, 5, [])
        assert len(list(tmp_path.rglob("*.part"))) == (where in ("first", "inside"))
        await bodies.sweep()
        assert sum(each.removed for each in await bodies.sweep()) == state.bodies - 5
        assert list(tmp_path.rglob("*.part")) == []
        async with broker.running():
            await witness.sees(range(5))
            await settled(broker, "t")


async def test_a_store_that_fails_while_processes_are_killed_costs_no_message_and_keeps_no_body(
    server_url: str, prefix: str, tmp_path: Path
) -> None:
    """It refuses, hangs in a write, fails after it, or answers with half of a body, while workers that publish large
    outputs, and their publisher, die. The long form is `python -m tests.chaos.bodies_run`."""
    run = BodiesRun(BodiesJob(server_url, prefix, str(tmp_path), messages=5), seed=1)
    assert await run.play(faults=8, pause=0.25) == []


async def test_a_rotation_of_three_keys_under_load_and_sigkill_loses_no_message(
    server_url: str, prefix: str, tmp_path: Path
) -> None:
    """The clock of the publisher is a day ahead, then a day behind; bodies lie in a store that fails; one key comes
    before the workers have it. The long form: `python -m tests.chaos.bodies_run --rotate --shift 24`."""
    if compiler() is None:
        pytest.skip(MISSING)
    job = BodiesJob(server_url, prefix, str(tmp_path), messages=25, pause=0.1, rotates=True, shift=24)
    assert await BodiesRun(job, seed=1).play(faults=6, pause=0.25) == []
    assert "messages wait for the key k3" in job.log.read_text()
