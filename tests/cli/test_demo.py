"""The demo with worker processes, a SIGKILL and few departures."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from rsmq.cli.demo.flight import CHAIN, Departure, notify, read_departures
from rsmq.handler.retry import Retry
from tests.servers import Server


def run_demo(url: str, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`rsmq demo` as a process."""
    command = [sys.executable, "-m", "rsmq", "demo", "--url", url, *options]
    env = {name: value for name, value in os.environ.items() if not name.startswith("RSMQ_")} | environment
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=env, check=False)


def test_demo_keeps_its_promises_and_leaves_no_key() -> None:
    """Both groups handle everything in order although a worker is killed; no key is left."""
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


def test_demo_of_mqtt_keeps_its_promises_and_leaves_no_key() -> None:
    """A handler, the aircraft and the tower get everything in order although a gateway is killed; no key is left."""
    with Server(aof=True) as server:
        done = run_demo(server.url, "--mqtt", "--flights", "6000", "--aircraft", "8", "--json")
        assert done.returncode == 0, done.stdout + done.stderr
        verdict = json.loads(done.stdout)
        assert verdict["is_good"]
        assert verdict["was_killed"]
        assert verdict["reconnect_seconds"] > 0
        numbers = {each["receiver"]: (each["received"], each["lost"]) for each in verdict["receivers"]}
        assert set(numbers) == {"handler", "aircraft", "tower"}
        assert len(set(numbers.values())) == 1
        assert numbers["tower"][0] > 50
        assert "SIGKILL to gateway" in done.stderr
        with server.client() as client:
            assert [key for key in client.keys("demo-*") if client.ttl(key) < 0] == []


def test_demo_without_a_server_prints_no_traceback() -> None:
    """The exit code is 1 or 2."""
    done = run_demo("redis://127.0.0.1:1", "--flights", "100", RSMQ_UNAVAILABLE_TIMEOUT="PT0.1S")
    assert done.returncode in (1, 2)
    assert "Traceback" not in done.stderr


def test_turns_count_the_departures_of_each_aircraft() -> None:
    """The turn is the order in which an aircraft's departures must be handled."""
    departures = read_departures(3000)
    turns: dict[str, int] = {}
    for departure in departures:
        assert departure.turn == turns.get(departure.aircraft, 0)
        turns[departure.aircraft] = departure.turn + 1
    assert [departure.number for departure in departures] == list(range(3000))


def test_channel_chain_falls_back_and_sometimes_retries() -> None:
    """Every channel is used; for a few departures all fail at the first attempt."""
    used, exhausted = set(), 0
    for departure in read_departures(3000):
        try:
            used.add(notify(departure, 1))
        except Retry:
            exhausted += 1
    assert used == {channel.name for channel in CHAIN}
    assert 0 < exhausted < 60


def test_channel_has_the_same_outcome_for_the_same_attempt() -> None:
    """The failures are the same in every run."""
    departure: Departure = read_departures(1)[0]
    assert len({notify(departure, 1) for _ in range(5)}) == 1
