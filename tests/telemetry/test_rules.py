"""The alert rules and the dashboard ask only for what is exported: every expression is parsed, name by name."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from rsmq.telemetry.metric import GATEWAY, GROUPS, WORKER, Metric

DEPLOY = Path(__file__).parents[2] / "deploy"
RULES = DEPLOY / "prometheus" / "rsmq.rules.yml"
DASHBOARD = DEPLOY / "grafana" / "rsmq.json"
PROCESS = {"process_cpu_seconds_total", "process_resident_memory_bytes"}
EVERYWHERE = {"instance", "job", "le"}
KNOWN: dict[str, Metric] = {series: metric for metric in (*WORKER, *GROUPS, *GATEWAY) for series in metric.series}


def alerts() -> dict[str, dict[str, Any]]:
    """The rules by name."""
    document = yaml.safe_load(RULES.read_text())
    rules = [rule for group in document["groups"] for rule in group["rules"]]
    named = {rule["alert"]: rule for rule in rules}
    assert len(named) == len(rules)
    return named


def panels() -> dict[str, dict[str, Any]]:
    """What the dashboard draws, by number and title."""
    document = json.loads(DASHBOARD.read_text())
    return {f"{each['id']} {each['title']}": each for each in document["panels"] if each["type"] != "row"}


QUERIES = [(name, rule["expr"]) for name, rule in alerts().items()] + [
    (name, target["expr"].replace("$__rate_interval", "1m"))
    for name, panel in panels().items()
    for target in panel["targets"]
]


def parts(node: object) -> Iterator[Any]:
    """An expression and everything inside of it."""
    yield node
    inner = [getattr(node, name, None) for name in ("expr", "lhs", "rhs", "vector_selector", "param")]
    for each in (*inner, *(getattr(node, "args", None) or ())):
        if isinstance(each, promql_parser.Expr):
            yield from parts(each)


@pytest.mark.parametrize(("name", "query"), QUERIES)
def test_query_uses_exported_metrics_and_labels(name: str, query: str) -> None:
    """It parses, each name in it is a series of ours, and each label is one that this series has."""
    nodes = list(parts(promql_parser.parse(query)))
    selectors = [node for node in nodes if isinstance(node, promql_parser.VectorSelector)]
    assert selectors, query
    labels = EVERYWHERE.union(*(KNOWN[each.name].labels for each in selectors if each.name in KNOWN))
    for selector in selectors:
        assert selector.name in KNOWN or selector.name in PROCESS, f"{name}: {selector.name} is not exported"
        for matcher in selector.matchers.matchers:
            assert matcher.name in KNOWN[selector.name].labels, f"{name}: {selector.name} has no label {matcher.name}"
    for node in nodes:
        if isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
            assert labels.issuperset(node.modifier.labels), f"{name}: no metric has {node.modifier.labels}"
        if isinstance(node, promql_parser.Call) and node.func.name in ("rate", "increase"):
            (matrix,) = node.args
            family = KNOWN.get(matrix.vector_selector.name)
            assert family is None or family.kind != "gauge", f"{name}: a rate of the gauge {family}"


@pytest.mark.parametrize("name", panels())
def test_legend_uses_labels_of_its_query(name: str) -> None:
    """A legend uses only labels that the query's result has."""
    for target in panels()[name]["targets"]:
        for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
            assert re.search(rf"\b{label}\b", target["expr"]) or any(
                label in KNOWN[series].labels or label in EVERYWHERE
                for series in re.findall(r"rsmq_\w+", target["expr"])
            ), f"{name}: {label}"


@pytest.mark.parametrize("name", alerts())
def test_alert_has_summary_and_action(name: str) -> None:
    """A severity, what is the matter, and what to do about it."""
    rule = alerts()[name]
    assert rule["labels"]["severity"] in ("info", "warning", "critical")
    assert set(rule["annotations"]) == {"summary", "action"}


def test_every_metric_is_on_the_dashboard_or_in_a_rule() -> None:
    """A metric is drawn or has an alert, except those that explain others."""
    asked = {name for _, query in QUERIES for name in re.findall(r"rsmq_\w+", query)}
    unseen = {metric.name for metric in (*WORKER, *GROUPS, *GATEWAY) if not asked.intersection(metric.series)}
    assert unseen == {
        "rsmq_worker_info", "rsmq_messages_redelivered_total", "rsmq_messages_handed_back_total",
        "rsmq_settles_not_pending_total", "rsmq_reads_total", "rsmq_exporter_query_seconds",
        "rsmq_group_unread_exact", "rsmq_group_silent_members", "rsmq_group_unread_messages",
    }  # fmt: skip


UNMODELLED = {"definition"}  # of a variable: what Grafana's editor shows


def unread(given: object, read: object, place: str = "") -> Iterator[str]:
    """What is in a document and not in what became of it."""
    if isinstance(given, dict) and isinstance(read, dict):
        for name, value in given.items():
            if name in read:
                yield from unread(value, read[name], f"{place}/{name}")
            elif name not in UNMODELLED:
                yield f"{place}/{name}"
    elif isinstance(given, list) and isinstance(read, list):
        for at, (one, other) in enumerate(zip(given, read, strict=True)):
            yield from unread(one, other, f"{place}/{at}")


@pytest.mark.parametrize("is_spoilt", [False, True])
def test_grafana_model_reads_every_field(is_spoilt: bool) -> None:
    """Grafana's model of a dashboard reads all of it, down to the options of the panels; a typo would be left out."""
    models = pytest.importorskip("grafana_foundation_sdk.models.dashboard")
    encoder = pytest.importorskip("grafana_foundation_sdk.cog.encoder").JSONEncoder()
    document = json.loads(DASHBOARD.read_text())
    if is_spoilt:
        document["panels"][1]["fieldConfig"]["defaults"]["unti"] = "s"
    read = json.loads(encoder.encode(models.Dashboard.from_json(document)))
    assert list(unread(document, read)) == (["/panels/1/fieldConfig/defaults/unti"] if is_spoilt else [])


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_accepts_the_rules() -> None:
    """Where Prometheus' own tool is installed: it reads the rules, and they fire when they should."""
    for command in (["check", "rules", RULES.name], ["test", "rules", "rsmq.rules.test.yml"]):
        done = subprocess.run(
            ["promtool", *command], cwd=RULES.parent, capture_output=True, text=True, check=False
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("metric", [*WORKER, *GROUPS], ids=lambda metric: metric.name)
def test_telemetry_page_lists_every_metric(metric: Metric) -> None:
    """Each metric has its row in the document; names and units follow the conventions of Prometheus."""
    row = f"| `{metric.name}` | {metric.kind} | {', '.join(metric.labels)} | {metric.text} |"
    assert row in (DEPLOY.parent / "docs" / "telemetry.md").read_text()
    assert (metric.kind == "counter") == metric.name.endswith("_total")
    assert not re.search(r"_(ms|minutes|kb|bytes_total|count|sum|bucket)$", metric.name)
