"""Handlers with `execution="process"`: what they do with their process, and how long it lives."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import anyio
import pytest

from rsmq import Broker, RetryPolicy, Settings
from rsmq.consumer.running import process_pool
from rsmq.consumer.running.process_pool import ProcessPool
from tests.contract.witness import letters_of
from tests.patience import until


def busy(what: str) -> str:
    """Do one of the things that programs do with a process."""
    match what:
        case "print":
            print("text of print", end="")  # without a line end it stays in a buffer
        case "log":
            logging.basicConfig()
            logging.getLogger("app").error("text of log")
        case "program":
            subprocess.run(["echo", "text of program"], check=True)
        case "library":
            ctypes.CDLL(None).puts(b"text of library")
            ctypes.CDLL(None).fflush(None)
        case "file 1":
            os.write(1, b"text of file 1\n")
        case "read":
            subprocess.run(["head", "-c", "1"], check=True)  # as ffmpeg and ssh do
        case "close":
            os.close(1)
        case "exit":
            sys.exit(3)
        case "die":
            os._exit(3)
        case "fork and die":
            if os.fork():
                os._exit(3)
            signal.alarm(60)
            signal.pause()  # the worker is not to wait for this one
    return what


def fork_and_end(_text: str) -> int:
    """As `multiprocessing.Pool.terminate` does."""
    begun, says = os.pipe()
    if child := os.fork():
        os.read(begun, 1)
        os.kill(child, signal.SIGTERM)
        _, status = os.waitpid(child, 0)
        return os.waitstatus_to_exitcode(status)
    os.write(says, b"x")
    time.sleep(20)
    os._exit(7)


@asynccontextmanager
async def serving(settings: Settings) -> AsyncIterator[Broker]:
    """A broker whose handler has one process, and two attempts."""
    broker = Broker(replace(settings, preflight="warn", partitions=1))
    broker.handler("t", group="g", execution="process", concurrency=1, retry=RetryPolicy(max_attempts=2))(busy)
    async with broker.running():
        yield broker


@pytest.mark.parametrize("what", ["print", "log", "program", "library", "file 1", "read", "close"])
async def test_handler_in_a_process_has_standard_streams(
    settings: Settings, capfd: pytest.CaptureFixture[str], what: str
) -> None:
    """What it and the programs that it starts print comes out of the worker, and its input is empty. Before, what it
    printed was dropped, and a program that printed made its message a dead letter; one that read never ended."""
    async with serving(settings) as broker:
        for each in (what, "next"):
            ref = await broker.publish("t", each, keep_result="1m")
            assert await broker.result(ref, group="g", timeout="60s") == each
        shown = "".join(capfd.readouterr())
    assert (f"text of {what}" in shown) == (what not in ("read", "close"))


@pytest.mark.parametrize(
    ("what", "error"),
    [
        ("exit", "SystemExit: 3"),
        ("die", "BrokenWorkerProcess: the process of the handler ended with exit code 3"),
        ("fork and die", "BrokenWorkerProcess: the process of the handler ended with exit code 3"),
    ],
)
async def test_end_of_a_process_costs_only_the_message_that_ended_it(settings: Settings, what: str, error: str) -> None:
    """Before, a SystemExit ended the process, and the next message got an attempt, or became a dead letter, for it."""
    async with serving(settings) as broker:
        await broker.publish("t", what, key="a")
        refs = [await broker.publish("t", str(number), key=f"k{number}", keep_result="1m") for number in range(4)]
        for number, ref in enumerate(refs):
            assert await broker.result(ref, group="g", timeout="60s") == str(number)
        await until(lambda: is_dead(broker), "it is a dead letter")
        (letter,) = await letters_of(broker, "t", "g")
    assert (letter.error, letter.attempts) == (error, 2)


async def test_process_that_a_handler_forks_can_be_ended(settings: Settings) -> None:
    """The process of a handler leaves signals to its worker. So did what it forks: SIGTERM did not end it, and
    `Pool.terminate` waited for that."""
    broker = Broker(replace(settings, preflight="warn", partitions=1))
    broker.handler("t", group="g", execution="process")(fork_and_end)
    async with broker.running():
        ref = await broker.publish("t", "", keep_result="1m")
        assert await broker.result(ref, group="g", timeout="60s") == -signal.SIGTERM


async def is_dead(broker: Broker) -> bool:
    """Whether there is a dead letter."""
    return bool(await letters_of(broker, "t", "g"))


def pid() -> int:
    """That of the process which runs this."""
    return os.getpid()


def is_there(number: int) -> bool:
    """Whether there is a process with this number, also one whose parent has not waited for it."""
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    return True


async def test_process_is_used_again_and_ends_when_it_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """No call has to come for that: before, an idle process kept its memory until the next burst."""
    pool = ProcessPool(2)
    first = await pool.run(pid)
    assert await pool.run(pid) == first
    monkeypatch.setattr(process_pool, "IDLE_SECONDS", 0.05)
    await pool.close()
    assert not is_there(first)
    second = await pool.run(pid)
    await until(lambda: not is_there(second), "it has ended")
    await pool.close()


async def test_cancelled_call_ends_its_process() -> None:
    """And no other one; the pool goes on."""
    pool = ProcessPool(2)
    first = await pool.run(pid)
    with anyio.move_on_after(0.05):
        await pool.run(sleep)
    assert not is_there(first)
    assert await pool.run(pid) != first
    await pool.close()


def sleep() -> None:
    """Longer than any test waits."""
    subprocess.run(["sleep", "60"], check=True)
