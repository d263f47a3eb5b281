"""A release in a clean environment: each file, each extra by itself, with the oldest and the newest dependencies."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement

from rsmq.model.distribution import OWN
from tests.forks import ROOT

PROJECT: Final = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
RESOLUTIONS: Final = {"newest": "highest", "oldest": "lowest-direct"}
"""uv's names: the newest of all packages, or the oldest that `pyproject.toml` allows."""
SMOKE: Final = {
    "": "from rsmq import Broker, SyncBroker; Broker('redis://localhost')",
    "embedded": "",
    "reload": "import rsmq.worker, watchfiles",
    "uvloop": "import rsmq.worker, uvloop; uvloop.new_event_loop().close()",
    "depends": "from rsmq import Broker; from fast_depends import Depends\n"
    "async def shop(): return 1\n"
    "@Broker('redis://localhost').handler('orders', group='bill')\n"
    "async def bill(order: dict, shop: int = Depends(shop)): ...",
    "cron": "from rsmq import Broker\n"
    "@Broker('redis://localhost').every('0 9 * * 1-5', topic='reports', timezone='Asia/Seoul')\n"
    "def report(): return {}",
    "spark": "from rsmq.pipeline import open_session; import pyspark_rsmq, matplotlib",
    "prometheus": "import rsmq.telemetry.worker_metrics, prometheus_client",
    "otel": "import rsmq.telemetry.tracing, opentelemetry.trace",
    "demo": "import matplotlib, paho.mqtt; from rsmq.cli.demo.flight import read_departures; read_departures(5)",
    "dashboard": "from rsmq.dashboard import create_app",
    "sql": "from rsmq.sql import Outbox; from sqlalchemy import create_engine; Outbox(create_engine('sqlite://'))",
    "django": "import django; from django.conf import settings; settings.configure(); django.setup()\n"
    "import rsmq.django",
    "mqtt": "from rsmq.gateway import Gateway, GatewayOptions",
    "codecs": "from rsmq.codecs import Encrypt, Keyring, Zstd; Zstd()",
    "offload": "from rsmq.codecs import Offload; Offload('memory://bodies')",
    "avro": "import rsmq.model.formats, fastavro",
    "all": "import rsmq.gateway, rsmq.sql, rsmq.dashboard, rsmq.pipeline, rsmq.codecs",
}
"""What each extra is for, in a line of Python; that with a server runs the first program of the README instead."""


def extras() -> list[str]:
    """The extras of the package; empty: none."""
    return ["", *PROJECT["optional-dependencies"]]


def requirements(extra: str) -> list[str]:
    """What the package and one extra ask for: uv takes the oldest of those only that are named to it."""
    found = (
        list(PROJECT["dependencies"]) if not extra else [*requirements(""), *PROJECT["optional-dependencies"][extra]]
    )
    own = [Requirement(each) for each in found if each.startswith(f"{OWN}[")]
    others = {each: None for each in found if not each.startswith(f"{OWN}[")}
    return [*(others | {each: None for one in own for name in sorted(one.extras) for each in requirements(name)})]


def first_program() -> tuple[str, str]:
    """The first program of the README, and what it prints."""
    code, printed = re.findall(r"```(?:python)?\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S)[:2]
    return code, printed


def install(file: Path, extra: str, resolution: str, python: str = sys.executable) -> None:
    """Install a file of the release with one extra in an environment of its own, and run it. Raises AssertionError."""
    with tempfile.TemporaryDirectory(prefix="rsmq-release-") as folder:
        at = Path(folder)
        _run(["uv", "venv", "--quiet", "--python", python, at / "venv"], at)
        mine = at / "venv" / "bin" / "python"
        wanted = [f"{OWN}{f'[{extra}]' if extra else ''} @ {file.absolute().as_uri()}", *requirements(extra)]
        command = ["uv", "pip", "install", "--quiet", "--system-certs", "--python", mine]
        _run([*command, "--resolution", RESOLUTIONS[resolution], *wanted], at)
        _run([at / "venv" / "bin" / "rsmq", "--version"], at)
        _run([at / "venv" / "bin" / "rsmq", "--help"], at)
        code, printed = first_program() if extra == "embedded" else (SMOKE[extra], "")
        (at / "app.py").write_text(code, encoding="utf-8")
        assert _run([mine, "app.py"], at) == printed


def _run(command: Sequence[str | Path], folder: Path) -> str:
    unwanted = ("PYTHON", "VIRTUAL_ENV", "RSMQ_", "CI")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(unwanted)}
    done = subprocess.run(
        [str(each) for each in command], cwd=folder, env=clean, capture_output=True, text=True, check=False, timeout=600
    )  # fmt: skip
    assert done.returncode == 0, f"{' '.join(map(str, command))}: {(done.stdout + done.stderr)[-3000:]}"
    return done.stdout
