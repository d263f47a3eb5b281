"""`python -m tests.gateway.public_suites`: the suites that MQTT clients bring along, over two gateways of one server.

Those of paho (its client suite for version 5) and of gmqtt are downloaded as their packages have them, and run in an
environment of their own. Each new connection goes to the other gateway, so a publisher and a subscriber hardly ever
have the same one. Prints what has failed: docs/mqtt-conformance.md has the reason of each. Takes eight minutes, most of
which the suites sleep.
"""

from __future__ import annotations

import argparse
import itertools
import os
import socket
import subprocess
import sys
import tarfile
import tempfile
import threading
import venv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

from tests.gateway.process import GatewayProcess
from tests.servers import Server

SUITES: Final = {"paho-mqtt==2.1.0": "tests/test_mqttv5.py", "gmqtt==0.8.0": "tests/test_mqtt5.py"}
"""By package: the file of its suite that needs a server."""
NEEDS: Final = ("pytest", "pytest-asyncio", "paho-mqtt==2.1.0", "gmqtt==0.8.0")
BROKER: Final = """
import os, types
def run(config): pass
_address = ("127.0.0.1", int(os.environ["PORT"]))
_server = types.SimpleNamespace(socket=types.SimpleNamespace(getsockname=lambda: _address), shutdown=lambda: None)
listeners = types.SimpleNamespace(TCPListeners=types.SimpleNamespace(server=_server))
"""
"""Stands where paho's suite looks for a broker that it starts: it names the port of ours."""
REFUSED: Final = [["read", "test/nosubscribe"]]
"""The suites expect a server that refuses this subscription."""


@contextmanager
def alternating(ports: Sequence[int]) -> Iterator[int]:
    """A port whose connections go to each of these in turn."""
    listener, turn = socket.create_server(("127.0.0.1", 0)), itertools.cycle(ports)

    def serve() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            node = socket.create_connection(("127.0.0.1", next(turn)))
            for source, target in ((client, node), (node, client)):
                threading.Thread(target=copy, args=(source, target), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    yield listener.getsockname()[1]
    listener.close()


def copy(source: socket.socket, target: socket.socket) -> None:
    """Pass on what one side sends, and its end."""
    with suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
    for each in (source, target):
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


def unpack(python: Path, package: str, into: Path) -> Path:
    """The folder of a package as its source distribution has it."""
    load = [python, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:", "-d", into / package, package]
    subprocess.run(list(map(str, load)), check=True)
    (archive,) = (into / package).glob("*.tar.gz")
    with tarfile.open(archive) as found:
        found.extractall(into / package, filter="data")
    return next(each for each in (into / package).iterdir() if each.is_dir())


def play(python: Path, folder: Path, suite: str, port: int, only: str) -> list[tuple[str, str]]:
    """Each test, and why it has failed."""
    (folder / "broker" / "mqtt" / "brokers").mkdir(parents=True, exist_ok=True)
    (folder / "broker" / "mqtt" / "__init__.py").touch()
    (folder / "broker" / "mqtt" / "brokers" / "__init__.py").write_text(BROKER)
    report = folder / "report.xml"
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junit-xml={report}", suite, "-k", only]
    path = os.pathsep.join((str(folder), str(folder / "broker")))
    own = {**os.environ, "PYTHONPATH": path, "HOST": "127.0.0.1", "PORT": str(port), "USERNAME": "suite"}
    subprocess.run(list(map(str, command)), cwd=folder, env=own, stdout=subprocess.DEVNULL, timeout=900, check=False)
    found = []
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        bad = next((each for each in case if each.tag in ("failure", "error", "skipped")), None)
        why = "" if bad is None else f"{bad.tag}: {(bad.get('message') or '').splitlines()[0][:150]}"
        found.append((case.get("name") or "", why))
    return found


def main() -> int:
    """Run the suites; the exit code is 0 if each test has run."""
    parser = argparse.ArgumentParser(prog="python -m tests.gateway.public_suites", description=__doc__)
    parser.add_argument("--only", default="", help="tests whose names have this, as with pytest -k")
    only = parser.parse_args().only
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        venv.create(folder / "env", with_pip=True)
        python = folder / "env" / "bin" / "python"
        subprocess.run([str(python), "-m", "pip", "install", "-q", *NEEDS], check=True)
        with (
            Server() as server,
            GatewayProcess(server.url, "suites", deny=REFUSED) as one,
            GatewayProcess(server.url, "suites", deny=REFUSED) as two,
            alternating([one.port, two.port]) as port,
        ):
            is_complete = True
            for package, suite in SUITES.items():
                found = play(python, unpack(python, package, folder), suite, port, only)
                failed = [each for each in found if each[1]]
                is_complete = is_complete and bool(found)
                print(f"{package} {suite}: {len(found) - len(failed)} of {len(found)}")
                for name, why in failed:
                    print(f"  {name}: {why}", flush=True)
    return 0 if is_complete else 1


if __name__ == "__main__":
    sys.exit(main())
