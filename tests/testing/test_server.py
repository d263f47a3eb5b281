"""The throw-away server: it restarts with or without data and ends with the process that started it."""

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
def test_server_restarts_at_the_same_address(tcp: bool, durable: bool) -> None:
    """A durable server restarts with its data; the directory is removed at the end."""
    with ThrowawayServer(tcp=tcp, durable=durable) as server:
        with redis.Redis.from_url(server.url) as client:
            client.set("a", 1)
        url, directory = server.url, server.directory
        server.restart()
        assert server.url == url
        with redis.Redis.from_url(url) as client:
            assert client.exists("a") == durable
    assert not directory.exists()


def test_server_ends_with_a_killed_process() -> None:
    """A killed test run leaves no server running."""
    command = [sys.executable, "-c", PROGRAM]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    wait_until(lambda: not Path(f"/proc/{pid}").exists() or is_zombie(pid), "the server has ended")


def is_zombie(pid: int) -> bool:
    """Whether the process has ended and its parent has not yet collected it."""
    return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()


def test_server_that_cannot_start_raises_with_its_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error contains the log."""
    monkeypatch.setattr(ThrowawayServer, "command", lambda _: [sys.executable, "-c", "raise SystemExit('no disk')"])
    with pytest.raises(BrokerUnavailable, match="did not start: no disk"):
        ThrowawayServer().start()
