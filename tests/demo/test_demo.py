"""The demo for real: worker processes, a SIGKILL, real departures; small enough for every run of the tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from rsmq.demo.channel import CHAIN, notify
from rsmq.demo.flight import Departure, read_departures
from rsmq.retry import Retry
from tests.servers import Server


def run_demo(url: str, *options: str) -> subprocess.CompletedProcess[str]:
    """`rsmq demo` as a process."""
    command = [sys.executable, "-m", "rsmq", "demo", "--url", url, *options]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RSMQ_")}
    return subprocess.run(command, capture_output=True, text=True, timeout=110, env=environment, check=False)


def test_it_keeps_its_promises_and_leaves_nothing_behind() -> None:
    """Everything handled by both groups, in order, although a worker was killed; no key is left."""
    with Server(aof=True) as server:
        done = run_demo(server.url, "--flights", "6000", "--processes", "3", "--json")
        assert done.returncode == 0, done.stdout + done.stderr
        verdict = json.loads(done.stdout)
        assert verdict["is_good"]
        assert verdict["recovery_seconds"] is not None
        assert {name: group["handled"] for name, group in verdict["groups"].items()} == {
            "auditor": 6005,
            "notifier": 6000,
        }
        assert set(verdict["channels"]) == {"-", "PUSH", "SMS", "AlimTalk"}
        with server.client() as client:
            left = [key for key in client.keys("demo-*") if client.ttl(key) < 0]
        assert left == []


def test_a_server_that_is_not_there_is_one_clear_line() -> None:
    """No traceback, exit code 1 or 2."""
    done = run_demo("redis://127.0.0.1:1", "--flights", "100")
    assert done.returncode in (1, 2)
    assert "Traceback" not in done.stderr


def test_turns_count_the_departures_of_each_aircraft() -> None:
    """So that order can be checked from the outside."""
    departures = read_departures(3000)
    turns: dict[str, int] = {}
    for departure in departures:
        assert departure.turn == turns.get(departure.aircraft, 0)
        turns[departure.aircraft] = departure.turn + 1
    assert [departure.number for departure in departures] == list(range(3000))


def test_the_chain_falls_over_and_sometimes_has_to_try_again() -> None:
    """Every channel is used, and for a few departures all fail at the first attempt."""
    used, exhausted = set(), 0
    for departure in read_departures(3000):
        try:
            used.add(notify(departure, 1))
        except Retry:
            exhausted += 1
    assert used == {channel.name for channel in CHAIN}
    assert 0 < exhausted < 60


def test_a_channel_treats_the_same_attempt_alike() -> None:
    """The demo's outages are the same in every run."""
    departure: Departure = read_departures(1)[0]
    assert len({notify(departure, 1) for _ in range(5)}) == 1
