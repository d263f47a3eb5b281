"""The server of a test run: it serves, keeps what it should, and goes with whoever started it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import redis

from rsmq import BrokerUnavailable
from rsmq.testing import ThrowawayServer
from tests.servers import wait_until

ROOT = Path(__file__).parents[2]

PROGRAM = """
import signal
from rsmq.testing import ThrowawayServer
with ThrowawayServer() as server:
    print(server.pid, flush=True)
    signal.pause()
"""


@pytest.mark.parametrize(("tcp", "durable"), [(True, True), (False, False)])
def test_restart(tcp: bool, durable: bool) -> None:
    """It comes back at the same address, a durable one with its data; afterwards nothing is left."""
    with ThrowawayServer(tcp=tcp, durable=durable) as server:
        with redis.Redis.from_url(server.url) as client:
            client.set("a", 1)
        url, directory = server.url, server._directory
        server.restart()
        assert server.url == url
        with redis.Redis.from_url(url) as client:
            assert client.exists("a") == durable
    assert not directory.exists()


def test_it_ends_with_its_process() -> None:
    """Also when that is killed: no test run leaves a server behind."""
    command = [sys.executable, "-c", PROGRAM]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    wait_until(lambda: not Path(f"/proc/{pid}").exists() or is_zombie(pid), "the server has ended")


def is_zombie(pid: int) -> bool:
    """Ended, and not yet collected by whoever inherited it."""
    return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()


def test_a_server_that_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has its log."""
    monkeypatch.setattr(ThrowawayServer, "_command", lambda _: [sys.executable, "-c", "raise SystemExit('no disk')"])
    with pytest.raises(BrokerUnavailable, match="did not start: no disk"):
        ThrowawayServer().start()
