"""A worker process of a chaos run, seen from the test: started, killed, paused."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from rsmq.broker import Broker
from rsmq.errors import ConfigError
from rsmq.keeper import dies_with_us

PROGRAM = "rsmq.testing.program"


@dataclass(frozen=True, slots=True)
class Job:
    """What a worker is told. `target` is `module:attribute`; `settings` are overrides as JSON."""

    target: str
    ledger: str
    settings: dict[str, Any]
    path: list[str] = field(default_factory=lambda: list(sys.path))

    def line(self) -> str:
        """The job as the argument of a process."""
        return json.dumps(asdict(self))

    def broker(self) -> Broker:
        """The user's own object. Raises ConfigError."""
        try:
            broker = resolve_name(self.target)
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigError(f"{self.target!r} names no broker ({error}): write module:broker") from error
        if not isinstance(broker, Broker) or not broker.handlers:
            raise ConfigError(f"{self.target} is no Broker with handlers: write module:broker")
        return broker


class Hand:
    """One worker process, in a session of its own."""

    def __init__(self, job: Job, log: Path) -> None:
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", PROGRAM, job.line()],
                stdout=output, stderr=output, stdin=subprocess.DEVNULL, preexec_fn=dies_with_us(),
            )  # fmt: skip
        self.is_paused = False

    @property
    def pid(self) -> int:
        """The process id: its name in the ledger."""
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
        return f"<Hand {self.pid} {'paused' if self.is_paused else 'running' if self.is_running else 'ended'}>"
