"""A gateway in a process of its own: `python -m tests.gateway.process URL PREFIX OPTIONS` prints its port."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from subprocess import Popen
from tempfile import TemporaryFile
from types import TracebackType
from typing import Any, Self

import anyio
import anyio.abc

from rsmq import Broker
from rsmq.gateway import Gateway, GatewayOptions
from rsmq.model.settings import Settings
from tests import forks

ROOT = Path(__file__).parents[2]


class GatewayProcess:
    """A gateway that can be killed, paused and stopped. Its log is a file: a pipe that is full would stop it."""

    def __init__(self, url: str, prefix: str, *, environment: Mapping[str, str] | None = None, **options: Any) -> None:
        """`environment` is that of another release, which a fork of this process cannot be."""
        ours, theirs = os.pipe()
        self._output, self._log = os.fdopen(ours), TemporaryFile()  # noqa: SIM115 - they are open as long as it runs
        command = ("tests.gateway.process", url, prefix, json.dumps(options))
        env = {**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})}
        self._process: Popen[bytes] | forks.ForkedProcess
        if environment:
            self._process = Popen([sys.executable, "-m", *command], cwd=ROOT, env=env, stdout=theirs, stderr=self._log)
        else:
            self._process = forks.start(*command, cwd=ROOT, env=env, stdout=theirs, stderr=self._log)
        os.close(theirs)
        self._ports: list[int] = []
        self._logged = ""

    @property
    def port(self) -> int:
        """Where it listens; waits until it does."""
        return self.ports[0]

    @property
    def ports(self) -> list[int]:
        """The port of each listener."""
        if not self._ports:
            line = self._output.readline()
            if not line.startswith("port "):
                self.kill()
                raise AssertionError(f"the gateway did not start: {self.log()}")
            self._ports = [int(each) for each in line.split()[1:]]
        return self._ports

    @property
    def pid(self) -> int:
        return self._process.pid

    def log(self) -> str:
        """What it has logged up to now."""
        if not self._log.closed:
            size = os.fstat(self._log.fileno()).st_size
            self._logged = os.pread(self._log.fileno(), size, 0).decode(errors="replace")
        return self._logged

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, and wait until the process is gone."""
        self._process.kill()
        self._process.wait()
        self._close()

    def stop(self) -> int:
        """SIGTERM; returns the exit code."""
        self._process.terminate()
        code = self._process.wait(60)
        self._close()
        assert "Traceback" not in self.log(), self.log()
        return code

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, at: TracebackType | None) -> None:
        if self.is_running:
            self.signal(signal.SIGCONT)
            if kind is None:
                assert self.stop() == 0
            else:
                self.kill()
                print(self.log()[-5000:], file=sys.stderr)
        self._close()

    def _close(self) -> None:
        self.log()
        self._output.close()
        self._log.close()


async def main(url: str, prefix: str, given: dict[str, Any]) -> None:
    settings = given.pop("settings", {})
    routes, deny, fails = given.pop("routes", {}), given.pop("deny", ()), given.pop("fails", ())
    for name in ("session_expiry", "connect_timeout", "lease", "keep_alive", "sys_interval", "full_inbox_wait"):
        if name in given:
            given[name] = timedelta(seconds=given[name])
    schemes = given.pop("schemes", ["mqtt"])
    for name in ("origins", "proxies"):
        if name in given:
            given[name] = tuple(given[name])
    for name in ("password_file", "acl_file", "certificate", "client_ca", "crl", "jwt_key"):
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
    if fails:
        fail(gateway, fails)
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


def fail(gateway: Gateway, fails: list[list[str]]) -> None:
    """Give it callbacks that raise errors: about these rights, but not of clients called good, and a user `broken`."""

    @gateway.authenticate
    async def check(_client: str, user: str | None, _password: bytes | None) -> bool:
        if user == "broken":
            raise ConnectionError("the database is away")
        return True

    @gateway.authorize
    def may(client: str, _user: str | None, access: str, topic: str) -> bool:
        if [access, topic] in fails and not client.startswith("good"):
            raise KeyError(topic)
        return True


if __name__ == "__main__":
    import logging

    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    logging.info("version: %s", sys.modules["rsmq"].__file__)
    anyio.run(
        main, sys.argv[1], sys.argv[2], json.loads(sys.argv[3]),
        backend_options={"use_uvloop": bool(os.environ.get("UVLOOP"))},
    )  # fmt: skip
