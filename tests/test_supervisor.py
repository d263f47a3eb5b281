"""The decisions of the supervisor, and its life with children that are plain shell commands."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import AsyncIterator

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsmq.supervisor import Backoff, Stage, Supervisor, Verdict, judge, reason, respond

SIGNALS = st.sampled_from([signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])


@given(st.lists(SIGNALS))
def test_stages_only_rise(numbers: list[int]) -> None:
    """No signal takes back what an earlier one has asked for."""
    stage = Stage.RUNNING
    for number in numbers:
        assert respond(stage, number) >= stage
        stage = respond(stage, number)


@given(st.sampled_from(Stage), st.sampled_from([signal.SIGTERM, signal.SIGINT]))
def test_each_stop_is_more_urgent(stage: Stage, number: int) -> None:
    """SIGTERM and Ctrl-C mean the same: stop, then now, then without a word."""
    following = {
        Stage.RUNNING: Stage.STOPPING,
        Stage.QUIET: Stage.STOPPING,
        Stage.STOPPING: Stage.ENDING,
        Stage.ENDING: Stage.ABORTED,
        Stage.ABORTED: Stage.ABORTED,
    }
    assert respond(stage, number) == following[stage]


def test_quiet_does_not_soften_a_stop() -> None:
    """SIGUSR1 is the first stage and nothing after it."""
    assert respond(Stage.RUNNING, signal.SIGUSR1) == Stage.QUIET
    assert respond(Stage.ENDING, signal.SIGUSR1) == Stage.ENDING


@pytest.mark.parametrize(
    ("code", "stage", "is_replaced", "is_reloading", "verdict"),
    [
        (-9, Stage.RUNNING, False, False, Verdict.RESTART_LATER),
        (1, Stage.RUNNING, False, False, Verdict.RESTART_LATER),
        (0, Stage.RUNNING, False, False, Verdict.LEAVE),
        (2, Stage.RUNNING, False, False, Verdict.STOP_ALL),
        (2, Stage.RUNNING, False, True, Verdict.AWAIT_CHANGE),
        (0, Stage.RUNNING, True, True, Verdict.RESTART),
        (-15, Stage.RUNNING, True, True, Verdict.RESTART),
        (1, Stage.QUIET, False, False, Verdict.LEAVE),
        (2, Stage.STOPPING, False, False, Verdict.LEAVE),
        (0, Stage.STOPPING, True, True, Verdict.LEAVE),
    ],
)
def test_verdict(code: int, stage: Stage, is_replaced: bool, is_reloading: bool, verdict: Verdict) -> None:
    """What follows from the end of a child, by its exit code and what was asked of it."""
    assert judge(code, stage, is_replaced=is_replaced, is_reloading=is_reloading) is verdict


def test_backoff_doubles_up_to_its_limit() -> None:
    """A child that dies again and again is started ever later, but never later than 10 s."""
    backoff = Backoff()
    assert [backoff.delay(0) for _ in range(9)] == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0]
    assert backoff.delay(29.9) == 10.0


def test_long_life_is_a_new_start() -> None:
    """Who lived for 30 s did not die of its start."""
    backoff = Backoff(failures=7)
    assert backoff.delay(30) == 0.1
    assert backoff.delay(0) == 0.2


@given(st.integers(0, 10_000))
def test_backoff_never_overflows(failures: int) -> None:
    """Not after a year of restarts either."""
    assert 0 < Backoff(failures=min(failures, 60)).delay(0) <= 10


def test_reason_names_the_signal() -> None:
    """A log line for people says SIGKILL, not -9."""
    assert reason(-9) == "was killed by SIGKILL"
    assert reason(3) == "ended with exit code 3"
    assert reason(-200) == "was killed by signal 200"


def child(code: str) -> list[str]:
    """A child that says that it is ready and then runs some Python; SIGTERM ends it."""
    return [sys.executable, "-c", f"import os, sys, signal; os.write(0, b'1'); {code}"]


async def test_children_that_finish_end_it() -> None:
    """When all children have finished on their own account there is nothing left to supervise."""
    assert await Supervisor(child("sys.exit(0)"), 3).run() == 0


async def test_config_error_ends_it_with_its_code() -> None:
    """Exit code 2 of one child stops all."""
    assert await Supervisor(child("sys.exit(2)"), 2).run() == 2


async def test_stop_during_the_backoff_does_not_wait() -> None:
    """A stop that arrives while a child waits for its restart ends that wait."""
    supervisor = Supervisor(child("sys.exit(1)"), 1)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(supervisor.run)
        while not supervisor.stage:
            await anyio.lowlevel.checkpoint()
            if supervisor.restarts >= 3:
                supervisor.obey(signal.SIGTERM)
    assert supervisor.stage == Stage.STOPPING


async def test_signals_reach_the_children_once() -> None:
    """Each stage is passed on as one signal, and the last one is SIGKILL."""
    deaf = "signal.signal(signal.SIGTERM, lambda *_: None); os.write(0, b'1'); [signal.pause() for _ in iter(int, 1)]"
    stubborn = [sys.executable, "-c", f"import os, signal; {deaf}"]
    supervisor = Supervisor(stubborn, 1)
    codes: list[int] = []

    async def run() -> None:
        codes.append(await supervisor.run())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        while not supervisor.is_ready:
            await anyio.lowlevel.checkpoint()
        for _ in range(3):
            supervisor.obey(signal.SIGTERM)
    assert supervisor.stage == Stage.ABORTED
    assert codes == [0]


async def test_signal_of_the_process_is_obeyed() -> None:
    """While it runs the process's own SIGTERM is for the supervisor; afterwards it is what it was."""
    before = signal.getsignal(signal.SIGTERM)
    supervisor = Supervisor(child("signal.pause()"), 1)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(supervisor.run)
        while not supervisor.is_ready:
            await anyio.lowlevel.checkpoint()
        os.kill(os.getpid(), signal.SIGTERM)
    assert supervisor.stage == Stage.STOPPING
    assert signal.getsignal(signal.SIGTERM) is before


async def test_change_replaces_the_children() -> None:
    """New code: every child is asked to make place and started again at once, without a back-off."""
    changes = anyio.Event()

    async def changing() -> AsyncIterator[None]:
        await changes.wait()
        yield
        await anyio.sleep_forever()

    supervisor = Supervisor(child("signal.pause()"), 1, changing)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(supervisor.run)
        while not supervisor.is_ready:
            await anyio.lowlevel.checkpoint()
        (before,) = supervisor.pids
        changes.set()
        while supervisor.pids in ((), (before,)):
            await anyio.lowlevel.checkpoint()
        supervisor.obey(signal.SIGINT)
    assert supervisor.stage == Stage.STOPPING
