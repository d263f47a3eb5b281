"""The examples of one file: each prints what is kept beside this test, the first time and the next."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples.program import EXAMPLES, environment, expected, run_python

SPARK = "campaign"  # needs an extra, and prints times: tests/pipeline/test_campaign.py
SCRIPTS = sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem != SPARK)


@pytest.mark.parametrize("name", SCRIPTS)
def test_prints_the_same_each_time(name: str, env: dict[str, str], tmp_path: Path) -> None:
    """A script prints what is expected, also on a server where it has run before."""
    script = EXAMPLES / f"{name}.py"
    assert run_python(script, cwd=tmp_path, env=env) == expected(name)
    assert run_python(script, cwd=tmp_path, env=env) == expected(name)


@pytest.mark.parametrize("name", SCRIPTS)
def test_says_how_to_run_it(name: str) -> None:
    """A script's docstring shows its command."""
    docstring = (EXAMPLES / f"{name}.py").read_text().split('"""')[1]
    assert f"\n    python examples/{name}.py\n" in docstring


def test_the_quickstart_needs_no_server(tmp_path: Path) -> None:
    """Without RSMQ_URL the quickstart starts a server of its own, and finds its data again."""
    project, state = tmp_path / "project", tmp_path / "state"
    project.mkdir()
    env = environment(XDG_STATE_HOME=str(state))
    script = EXAMPLES / "quickstart.py"
    assert run_python(script, cwd=project, env=env) == expected("quickstart")
    assert run_python(script, cwd=project, env=env) == expected("quickstart")
    assert list(state.glob("rsmq/project-*/appendonlydir"))
    assert not list(project.iterdir())
