"""The real server of a run, with a clock that the simulation owns."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from pathlib import Path

from tests.compiler import library

SOURCE = Path(__file__).with_name("clock.c")


class SimulatedServer:
    """A server for one run, in the working directory of the process: its address is the same in every run."""

    def __init__(self, binary: str) -> None:
        self._binary = binary
        self.address, self.clock = "s", Path("clock")

    def start(self) -> None:
        """Start it. Expired keys are removed when they are read, never in the background, which would be a race."""
        self.clock.write_bytes(bytes(8))
        environment = {**os.environ, "LD_PRELOAD": str(library(SOURCE)), "CLOCK_CONTROL": str(self.clock.absolute())}
        command = [
            self._binary, "--port", "0", "--unixsocket", self.address, "--save", "", "--appendonly", "no",
            "--io-threads", "1", "--enable-debug-command", "yes", "--activerehashing", "no",
        ]  # fmt: skip
        with Path("log").open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        for _ in range(5000):
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as sock:
                sock.connect(self.address)
                return
            time.sleep(0.001)
        raise RuntimeError(f"the server did not start: {Path('log').read_text()}")

    def stop(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
