"""A gateway in a process of its own: `python -m tests.gateway.process URL PREFIX OPTIONS` prints its port."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import anyio
import anyio.abc

from rsmq import Broker
from rsmq.gateway import Gateway, GatewayOptions
from rsmq.model.settings import Settings

ROOT = Path(__file__).parents[2]


class GatewayProcess:
    """A gateway that can be killed, paused and stopped."""

    def __init__(self, url: str, prefix: str, **options: Any) -> None:
        command = [sys.executable, "-m", "tests.gateway.process", url, prefix, json.dumps(options)]
        self._process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self._ports: list[int] = []

    @property
    def port(self) -> int:
        """Where it listens; waits until it does."""
        return self.ports[0]

    @property
    def ports(self) -> list[int]:
        """The port of each listener."""
        if not self._ports:
            assert self._process.stdout is not None
            line = self._process.stdout.readline()
            if not line.startswith("port "):
                self._process.kill()
                raise AssertionError(f"the gateway did not start: {self._process.communicate()}")
            self._ports = [int(each) for each in line.split()[1:]]
        return self._ports

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, and wait until the process is gone."""
        self._process.kill()
        self._process.communicate()

    def stop(self) -> int:
        """SIGTERM; returns the exit code."""
        self._process.terminate()
        _, log = self._process.communicate(timeout=30)
        assert "Traceback" not in log, log
        return self._process.returncode

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, at: TracebackType | None) -> None:
        if not self.is_running:
            self._process.communicate()
        elif kind is None:
            self.signal(signal.SIGCONT)
            assert self.stop() == 0
        else:
            self._process.kill()
            print(self._process.communicate()[1][-5000:], file=sys.stderr)


async def main(url: str, prefix: str, given: dict[str, Any]) -> None:
    settings = given.pop("settings", {})
    routes, deny = given.pop("routes", {}), given.pop("deny", ())
    for name in ("session_expiry", "connect_timeout", "lease", "keep_alive"):
        if name in given:
            given[name] = timedelta(seconds=given[name])
    schemes = given.pop("schemes", ["mqtt"])
    if "origins" in given:
        given["origins"] = tuple(given["origins"])
    for name in ("password_file", "acl_file", "certificate"):
        if name in given:
            given[name] = Path(given[name])
    broker = Broker(Settings(url=url, prefix=prefix, **settings))
    gateway = Gateway(
        broker,
        listen=[f"{each}://127.0.0.1:0" for each in schemes],
        options=GatewayOptions(**{"anonymous": True, **given}),
    )
    for pattern, topic in routes.items():
        gateway.route(pattern, topic=topic)
    if deny:
        gateway.authorize(lambda _client, _user, access, topic: [access, topic] not in deny)
    with anyio.open_signal_receiver(signal.SIGTERM) as signals:
        async with anyio.create_task_group() as tasks:

            async def obey() -> None:
                async for _ in signals:
                    gateway.stop()

            tasks.start_soon(obey)
            await tasks.start(gateway.run)
            print("port", *gateway.ports, flush=True)
            while gateway.context is not None and not gateway.is_ended:
                await anyio.sleep(0.05)
            tasks.cancel_scope.cancel()


if __name__ == "__main__":
    os.environ["PYTHONFAULTHANDLER"] = "1"
    import logging

    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    anyio.run(
        main, sys.argv[1], sys.argv[2], json.loads(sys.argv[3]),
        backend_options={"use_uvloop": bool(os.environ.get("UVLOOP"))},
    )  # fmt: skip
