"""A worker process of a chaos run, seen from the test: started, killed, paused."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from pydantic_core import to_json

from rsmq.broker import Broker
from rsmq.errors import ConfigError
from rsmq.redis.embedded.keeper import dies_with_us


@dataclass(frozen=True, slots=True)
class Job:
    """The task of a worker process. `target` is `module:attribute`; `settings` are overrides as JSON."""

    target: str
    ledger: str
    settings: dict[str, Any]
    path: list[str] = field(default_factory=lambda: list(sys.path))

    def broker(self) -> Broker:
        """The user's broker. Raises ConfigError."""
        try:
            broker = resolve_name(self.target)
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigError(f"{self.target!r} cannot be imported ({error}): write module:broker") from error
        if not isinstance(broker, Broker) or not broker.handlers:
            raise ConfigError(f"{self.target} is not a Broker with handlers: write module:broker")
        return broker


class WorkerProcess:
    """A process that runs `module` with `job` as JSON. What it prints is appended to `log`."""

    module = "rsmq.testing.worker_main"

    def __init__(self, job: Any, log: Path, environment: Mapping[str, str] | None = None) -> None:
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", self.module, to_json(job)], env=environment,
                stdout=output, stderr=output, stdin=subprocess.DEVNULL, preexec_fn=dies_with_us(),
            )  # fmt: skip
        self.is_paused = False

    @property
    def pid(self) -> int:
        """The process id, which identifies it in the ledger."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether the process exists, paused or not."""
        return self._process.poll() is None

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()
        self._process.wait(30)

    def pause(self) -> None:
        """SIGSTOP."""
        self.is_paused = True
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        self._process.send_signal(signal.SIGCONT)
        self.is_paused = False

    def __repr__(self) -> str:
        return f"<WorkerProcess {self.pid} {'paused' if self.is_paused else 'running' if self.is_running else 'ended'}>"
