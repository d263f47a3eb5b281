"""Helm as a process: `python -m tests.telemetry.helm CHART NAME < values.json` lints and renders a chart.

Helm is written in Go. Its library starts threads and takes signals over, which is not for the process of the tests: it
forks.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml


class HelmRefuses(Exception):
    """What Helm says of values that it does not take."""


def rendered(chart: Path, name: str, values: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    """The manifests of a release. Raises HelmRefuses, also for what its linter finds."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.telemetry.helm", str(chart), name],
        input=json.dumps(values or {}), cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise HelmRefuses(done.stderr)
    made = json.loads(done.stdout)
    texts = [text for path, text in made.items() if path.endswith(".yaml")]
    return [found for text in texts for found in yaml.safe_load_all(text) if found is not None]


def main(chart: str, name: str) -> None:
    """Lint strictly, then render."""
    import helm_python

    values = json.load(sys.stdin)
    try:
        report = helm_python.lint(chart, values, strict=True)
        if found := [each["error"] for each in report["messages"] if each["severity"] > 1]:
            sys.exit("\n".join(found))
        print(json.dumps(helm_python.Chart.load(chart).render(values, name=name)))
    except helm_python.HelmError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main(*sys.argv[1:])
