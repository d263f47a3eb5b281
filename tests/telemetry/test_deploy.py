"""The files for operators say only what exists: options, settings, paths and ports."""

from __future__ import annotations

import re
import shlex
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from rsmq import Settings
from rsmq.cli import app
from rsmq.cli.service import SLACK

DEPLOY = Path(__file__).parents[2] / "deploy"
UNIT = (DEPLOY / "systemd" / "rsmq-worker.service").read_text()
CONTAINER = (DEPLOY / "container" / "Containerfile").read_text()
MANIFESTS = list(yaml.safe_load_all((DEPLOY / "kubernetes" / "worker.yaml").read_text()))
LONGEST_STOP = Settings.model_fields["stop_grace"].default + Settings.model_fields["lease_ttl"].default


def options_of(command: str) -> set[str]:
    """What `rsmq COMMAND` takes."""
    group: Any = typer.main.get_command(app)
    return {name for parameter in group.commands[command].params for name in parameter.opts}


def containers() -> list[dict[str, Any]]:
    """All of them, in the manifests."""
    pods = [each["spec"]["template"]["spec"] for each in MANIFESTS if each["kind"] == "Deployment"]
    return [container for pod in pods for container in pod["containers"]]


@pytest.mark.parametrize("path", [path for path in DEPLOY.rglob("*") if path.is_file()], ids=lambda path: path.name)
def test_settings_exist(path: Path) -> None:
    """Each RSMQ_* in a file is a setting."""
    named = set(re.findall(r"\bRSMQ_([A-Z_]+)", path.read_text()))
    assert named <= {name.upper() for name in Settings.model_fields}


def test_commands_exist() -> None:
    """The unit and the container start a worker with options that it has."""
    (started,) = re.findall(r"^ExecStart=(.*)$", UNIT, re.MULTILINE)
    (entry,) = re.findall(r"^ENTRYPOINT \[(.*)\]$", CONTAINER, re.MULTILINE)
    for words in (shlex.split(started), [word.strip(' "') for word in entry.split(",")]):
        assert Path(words[0]).name == "rsmq"
        assert words[1] == "worker"
        assert {word for word in words if word.startswith("--")} <= options_of("worker")
    (exporter,) = [each for each in containers() if each["name"] == "exporter"]
    assert {word for word in exporter["command"] if word.startswith("--")} <= options_of("exporter")


def test_a_stop_gets_its_time() -> None:
    """Whoever kills at last waits longer than the grace, a lease and the goodbyes."""
    needed = LONGEST_STOP + timedelta(seconds=SLACK)
    (seconds,) = re.findall(r"^TimeoutStopSec=(\d+)$", UNIT, re.MULTILINE)
    assert timedelta(seconds=int(seconds)) > needed
    pod = MANIFESTS[0]["spec"]["template"]["spec"]
    assert timedelta(seconds=pod["terminationGracePeriodSeconds"]) > needed


def test_probes_ask_where_somebody_answers() -> None:
    """Live for restarts, ready for traffic, at the port that the process listens at."""
    (worker,) = [each for each in containers() if each["name"] == "worker"]
    assert [worker[kind]["httpGet"]["path"] for kind in ("startupProbe", "livenessProbe", "readinessProbe")] == [
        "/livez", "/livez", "/readyz",
    ]  # fmt: skip
    ports = {each["containerPort"] for each in worker["ports"] if each["name"] == "metrics"}
    assert {f"0.0.0.0:{port}" for port in ports} == {
        each["value"] for each in worker["env"] if each["name"] == "RSMQ_METRICS"
    }
    assert "RSMQ_METRICS=0.0.0.0:9100" in CONTAINER
    assert "cpu" not in worker["resources"].get("limits", {})
