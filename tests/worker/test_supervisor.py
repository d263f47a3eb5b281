"""The decisions of the supervisor, and the supervisor with real children that are small Python programs."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsmq.model.backoff import Backoff
from rsmq.worker.supervisor import (
    EXHAUSTED,
    FINISHED,
    FIRST_PAUSE,
    LONGEST_PAUSE,
    MISCONFIGURED,
    READY,
    RestartDecision,
    Stage,
    Supervisor,
    decide,
    is_orderly,
    respond,
    restart_delay,
)
from tests.patience import until

SIGNALS = st.sampled_from([signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])


@given(st.lists(SIGNALS))
def test_stage_after_any_signal_never_falls(numbers: list[int]) -> None:
    """No signal undoes the stage that an earlier one has set."""
    stage = Stage.RUNNING
    for number in numbers:
        assert respond(stage, number) >= stage
        stage = respond(stage, number)


@given(st.sampled_from(Stage), st.sampled_from([signal.SIGTERM, signal.SIGINT, signal.SIGHUP]))
def test_repeated_stop_signal_raises_the_stage(stage: Stage, number: int) -> None:
    """SIGTERM, SIGHUP and Ctrl-C mean the same: stop within the grace, then stop now, then abort."""
    following = {
        Stage.RUNNING: Stage.STOPPING,
        Stage.QUIET: Stage.STOPPING,
        Stage.STOPPING: Stage.ENDING,
        Stage.ENDING: Stage.ABORTED,
        Stage.ABORTED: Stage.ABORTED,
    }
    assert respond(stage, number) == following[stage]


def test_quiet_signal_after_a_stop_changes_nothing() -> None:
    """SIGUSR1 only leads from running to quiet."""
    assert respond(Stage.RUNNING, signal.SIGUSR1) == Stage.QUIET
    assert respond(Stage.ENDING, signal.SIGUSR1) == Stage.ENDING


@pytest.mark.parametrize(
    ("code", "stage", "last_word", "is_replaced", "is_reloading", "decision"),
    [
        (-9, Stage.RUNNING, READY, False, False, RestartDecision.RESTART_LATER),
        (1, Stage.RUNNING, READY, False, False, RestartDecision.RESTART_LATER),
        (0, Stage.RUNNING, FINISHED, False, False, RestartDecision.END),
        (0, Stage.RUNNING, READY, False, False, RestartDecision.RESTART_LATER),
        (0, Stage.RUNNING, b"", False, False, RestartDecision.RESTART_LATER),
        (2, Stage.RUNNING, MISCONFIGURED, False, False, RestartDecision.STOP_ALL),
        (2, Stage.RUNNING, MISCONFIGURED, False, True, RestartDecision.AWAIT_CHANGE),
        (2, Stage.RUNNING, READY, False, False, RestartDecision.RESTART_LATER),
        (2, Stage.RUNNING, READY, False, True, RestartDecision.RESTART_LATER),
        (0, Stage.RUNNING, FINISHED, True, True, RestartDecision.RESTART),
        (-15, Stage.RUNNING, READY, True, True, RestartDecision.RESTART),
        (0, Stage.RUNNING, EXHAUSTED, False, False, RestartDecision.RESTART),
        (1, Stage.RUNNING, EXHAUSTED, False, False, RestartDecision.RESTART_LATER),
        (0, Stage.STOPPING, EXHAUSTED, False, False, RestartDecision.END),
        (1, Stage.QUIET, READY, False, False, RestartDecision.END),
        (2, Stage.STOPPING, MISCONFIGURED, False, False, RestartDecision.END),
        (0, Stage.STOPPING, READY, True, True, RestartDecision.END),
    ],
)
def test_restart_decision_follows_from_exit_code_word_and_stage(
    code: int, stage: Stage, last_word: bytes, is_replaced: bool, is_reloading: bool, decision: RestartDecision
) -> None:
    """Each kind of ending of a child leads to one decision."""
    assert decide(code, stage, last_word, is_replaced=is_replaced, is_reloading=is_reloading) is decision


@pytest.mark.parametrize(("code", "is_one"), [(0, True), (-15, True), (143, True), (1, False), (-9, False)])
def test_end_of_a_child_that_was_stopped(code: int, is_one: bool) -> None:
    """Also one that was still starting: it ends by the signal, or as a first process does, with the exit code of it."""
    assert is_orderly(code, signal.SIGTERM) is is_one


def test_restart_delay_of_short_lives_doubles_up_to_its_limit() -> None:
    """A child that keeps failing is restarted after growing pauses of at most 10 s."""
    backoff = Backoff(FIRST_PAUSE, LONGEST_PAUSE)
    delays = [restart_delay(backoff, 0) for _ in range(9)]
    assert delays == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0]
    assert restart_delay(backoff, 29.9) == 10.0


def test_restart_delay_after_a_long_life_starts_anew() -> None:
    """A child that lived for 30 s did not die of its start."""
    backoff = Backoff(FIRST_PAUSE, LONGEST_PAUSE, failures=7)
    assert restart_delay(backoff, 30) == 0.1
    assert restart_delay(backoff, 0) == 0.2


@given(st.integers(0, 10_000))
def test_restart_delay_never_overflows(failures: int) -> None:
    """Not after a year of restarts either."""
    assert 0 < restart_delay(Backoff(FIRST_PAUSE, LONGEST_PAUSE, failures), 0) <= 10


def child(code: str) -> list[str]:
    """A child that reports that it is ready and then runs some Python; SIGTERM ends it."""
    return [sys.executable, "-c", f"import os, sys, signal; os.write(0, b'ready\\n'); {code}"]


async def test_supervisor_ends_when_all_children_have_finished() -> None:
    """Children that were stopped, and say so, end the supervisor with 0."""
    assert await Supervisor(child("os.write(0, b'finished\\n'); sys.exit(0)"), 3).run() == 0


async def test_config_error_of_a_child_ends_the_supervisor_with_its_code() -> None:
    """A child that says so stops all."""
    assert await Supervisor(child("os.write(0, b'misconfigured\\n'); sys.exit(2)"), 2).run() == 2


@pytest.mark.parametrize("code", [0, 2])
async def test_exit_code_of_user_code_restarts_the_child(code: int) -> None:
    """User code may end a process with any exit code: neither 0 nor 2 ends the service."""
    supervisor = Supervisor(child(f"os._exit({code})"), 1)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(supervisor.run)
        await until(lambda: supervisor.restarts >= 2, "the child was restarted twice")
        supervisor.obey(signal.SIGTERM)


async def test_stop_during_the_backoff_ends_the_pause() -> None:
    """A stop that arrives while a child waits for its restart ends the supervisor at once."""
    supervisor = Supervisor(child("sys.exit(1)"), 1)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(supervisor.run)
        await until(lambda: supervisor.restarts >= 3, "the child was restarted three times")
        supervisor.obey(signal.SIGTERM)
    assert supervisor.stage == Stage.STOPPING


async def test_each_stage_sends_the_children_one_signal() -> None:
    """The third SIGTERM becomes a SIGKILL, which ends a child that ignores SIGTERM."""
    ready = "os.write(0, b'ready\\n')"
    deaf = f"signal.signal(signal.SIGTERM, lambda *_: None); {ready}; [signal.pause() for _ in iter(int, 1)]"
    stubborn = [sys.executable, "-c", f"import os, signal; {deaf}"]
    supervisor = Supervisor(stubborn, 1)
    codes: list[int] = []

    async def run() -> None:
        codes.append(await supervisor.run())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        await until(lambda: supervisor.is_ready, "the child is ready")
        for _ in range(3):
            supervisor.obey(signal.SIGTERM)
    assert supervisor.stage == Stage.ABORTED
    assert codes == [0]


async def test_supervisor_handles_signals_of_its_process_while_it_runs() -> None:
    """SIGTERM to the process stops the supervisor; afterwards the previous handler is back."""
    before = signal.getsignal(signal.SIGTERM)
    supervisor = Supervisor(child("signal.pause()"), 1)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(supervisor.run)
        await until(lambda: supervisor.is_ready, "the child is ready")
        os.kill(os.getpid(), signal.SIGTERM)
    assert supervisor.stage == Stage.STOPPING
    assert signal.getsignal(signal.SIGTERM) is before


async def test_change_of_the_code_restarts_the_children_at_once() -> None:
    """Every child is stopped and started again without a back-off."""
    changes = anyio.Event()

    async def changing() -> AsyncIterator[None]:
        await changes.wait()
        yield
        await anyio.sleep_forever()

    supervisor = Supervisor(child("signal.pause()"), 1, changing)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(supervisor.run)
        await until(lambda: supervisor.is_ready, "the child is ready")
        (before,) = supervisor.pids
        changes.set()
        await until(lambda: supervisor.pids not in ((), (before,)), "another child runs")
        supervisor.obey(signal.SIGINT)
    assert supervisor.stage == Stage.STOPPING


SERVING = """
import contextlib, os, sys
folder, slot = sys.argv[1:]
os.write(0, f"ready\\nmember host-{slot}-{os.getpid()}\\n".encode())
with open(f"{folder}/{os.getpid()}", "a", buffering=1) as heard:
    with contextlib.suppress(ConnectionResetError):  # the parent has ended and had not read all
        heard.writelines(sys.stdin)
    heard.write("the parent has ended\\n")
"""


def serving(folder: Path, processes: int) -> Supervisor:
    """Children that say which member they are, and write what the parent says into a file named by their pid."""
    command = [sys.executable, "-c", SERVING, str(folder)]
    return Supervisor(command, processes, arguments=lambda slot: (str(slot),))


def heard(folder: Path, pid: int) -> list[str]:
    """What a child has heard from its parent; nothing before it serves."""
    file = folder / str(pid)
    return file.read_text().splitlines() if file.exists() else []


async def test_end_of_a_child_is_told_to_its_siblings_and_to_its_successor(tmp_path: Path) -> None:
    """All processes that serve, and the one that starts in its place, learn which member has ended."""
    supervisor = serving(tmp_path, 3)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(supervisor.run)
        await until(lambda: sum((tmp_path / str(pid)).exists() for pid in supervisor.pids) == 3, "all serve")
        victim, *siblings = supervisor.pids
        os.kill(victim, signal.SIGKILL)
        await until(lambda: supervisor.restarts == 1 and len(supervisor.pids) == 3, "it is restarted")
        said = f"ended host-1-{victim}"
        for pid in supervisor.pids:
            await until(lambda pid=pid: said in heard(tmp_path, pid), f"{pid} has heard it")
        assert set(siblings) < set(supervisor.pids)
        supervisor.obey(signal.SIGTERM)
    assert not heard(tmp_path, victim), "a living process was declared ended"


async def test_supervisor_that_is_cancelled_does_not_say_that_its_children_have_ended(tmp_path: Path) -> None:
    """They still run: only the end that the system has confirmed is passed on."""
    supervisor = serving(tmp_path, 2)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(supervisor.run)
        await until(lambda: sum((tmp_path / str(pid)).exists() for pid in supervisor.pids) == 2, "both serve")
        pids, processes = supervisor.pids, [each.process for each in supervisor._children.values()]
        tasks.cancel_scope.cancel()
    for process in processes:
        await process.wait()
    for pid in pids:
        await until(lambda pid=pid: heard(tmp_path, pid) == ["the parent has ended"], f"{pid} has heard the end")


async def test_child_that_reads_nothing_does_not_block_the_supervisor(tmp_path: Path) -> None:
    """A sibling is stopped (SIGSTOP) while others come and go: the parent goes on, and drops what does not fit."""
    supervisor = serving(tmp_path, 2)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(supervisor.run)
        await until(lambda: sum((tmp_path / str(pid)).exists() for pid in supervisor.pids) == 2, "both serve")
        first, second = supervisor.pids
        os.kill(second, signal.SIGSTOP)
        stopped = supervisor._children[2]
        for _ in range(5000):
            stopped.write(b"ended " + b"x" * 128)
        os.kill(first, signal.SIGKILL)
        await until(lambda: supervisor.restarts == 1 and len(supervisor.pids) == 2, "the other one is restarted")
        os.kill(second, signal.SIGCONT)
        supervisor.obey(signal.SIGTERM)


async def test_line_of_a_child_that_arrives_in_pieces_is_read_whole() -> None:
    """The last word counts however the bytes were cut."""
    pieces = "[(os.write(0, bytes([each])), time.sleep(0.01)) for each in b'finished\\n']"
    assert await Supervisor(child(f"import time; {pieces}; sys.exit(0)"), 1).run() == 0
