"""The deployment files of gateways: options that exist, manifests that Kubernetes accepts, no rights without need."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import typer.main
import yaml

from rsmq.cli import make_app
from rsmq.gateway.gateway import END_SECONDS
from tests.telemetry.helm import rendered

DEPLOY = Path(__file__).parents[2] / "deploy"
MANIFESTS: list[dict[str, Any]] = list(yaml.safe_load_all((DEPLOY / "kubernetes" / "gateway.yaml").read_text()))
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose" / "gateway.yaml").read_text())
POD = MANIFESTS[0]["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]


@pytest.mark.parametrize("command", [CONTAINER["command"], COMPOSE["services"]["gateway-1"]["entrypoint"]])
def test_the_command_has_only_options_of_a_gateway(command: list[str]) -> None:
    group: Any = typer.main.get_command(make_app())
    known = {name for parameter in group.commands["gateway"].params for name in parameter.opts}
    assert command[:2] == ["rsmq", "gateway"]
    assert {word for word in command if word.startswith("--")} <= known
    assert "--anonymous" not in command


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda each: each["kind"])
def test_kubernetes_accepts_the_manifest(manifest: dict[str, Any]) -> None:
    for version in ("1.28", kubernetes_validate.latest_version()):
        kubernetes_validate.validate(manifest, version, strict=True)


def test_ports_probes_and_times_fit_together() -> None:
    """Each listener has its port, probes ask the page of the metrics, and the kill comes after preStop and the end."""
    ports = {each["name"]: each["containerPort"] for each in CONTAINER["ports"]}
    command = CONTAINER["command"]
    assert [f"mqtts://0.0.0.0:{ports['mqtts']}" in command, f"wss://0.0.0.0:{ports['wss']}" in command] == [True, True]
    assert f"0.0.0.0:{ports['metrics']}" in command
    assert {each["targetPort"] for each in MANIFESTS[1]["spec"]["ports"]} <= set(ports)
    assert CONTAINER["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "metrics"}
    assert CONTAINER["livenessProbe"]["httpGet"] == {"path": "/livez", "port": "metrics"}
    waited = int(CONTAINER["lifecycle"]["preStop"]["exec"]["command"][1])
    assert POD["terminationGracePeriodSeconds"] > waited + 2 * END_SECONDS
    selectors = [MANIFESTS[1]["spec"]["selector"], *(MANIFESTS[at]["spec"]["selector"]["matchLabels"] for at in (0, 2))]
    assert selectors == [MANIFESTS[0]["spec"]["template"]["metadata"]["labels"]] * 3


def test_the_chart_starts_a_gateway_as_the_manifest_does() -> None:
    """With the page that its probes ask: without `--metrics` each pod was started again and again."""
    values = {"workers": {"worker": None}, "exporter": {"enabled": False}, "gateway": {"enabled": True}}
    made = rendered(DEPLOY / "helm" / "rsmq", "mqtt", values)
    (pod,) = [each["spec"]["template"]["spec"] for each in made if each["kind"] == "Deployment"]
    (container,) = pod["containers"]
    kinds = ("startupProbe", "livenessProbe", "readinessProbe", "ports", "lifecycle")
    assert {kind: container[kind] for kind in kinds} == {kind: CONTAINER[kind] for kind in kinds}
    assert container["command"] == CONTAINER["command"]


def test_the_container_has_no_right_that_it_does_not_need() -> None:
    assert POD["securityContext"]["runAsNonRoot"] is True
    assert POD["automountServiceAccountToken"] is False
    rights = CONTAINER["securityContext"]
    assert (rights["allowPrivilegeEscalation"], rights["readOnlyRootFilesystem"]) == (False, True)
    assert rights["capabilities"] == {"drop": COMPOSE["services"]["gateway-2"]["cap_drop"]} == {"drop": ["ALL"]}
    assert "cpu" not in CONTAINER["resources"]["limits"]


def test_systemd_reloads_a_gateway_by_sighup() -> None:
    """Its parent process alone gets the signal, and passes it on."""
    unit = (DEPLOY / "systemd" / "rsmq-gateway.service").read_text()
    assert "\nExecReload=/bin/kill -HUP $MAINPID\n" in unit
    assert "--processes" in unit
