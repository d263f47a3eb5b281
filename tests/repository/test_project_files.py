"""The files that a stranger looks for: licence, metadata, the workflow and the forms are there and agree."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.browsers import BROWSERS
from tests.matrix.__main__ import SERVERS
from tests.repeat import SUITES

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOW: dict[str, Any] = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())
YAML = sorted([*(ROOT / ".github").rglob("*.yml"), ROOT / ".pre-commit-config.yaml"])
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
NIGHTLY: dict[str, Any] = yaml.safe_load((ROOT / ".github" / "workflows" / "nightly.yml").read_text())
RELEASE: dict[str, Any] = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
PYTHONS = ["3.11", "3.12", "3.13", "3.14"]


def claimed() -> list[str]:
    """The versions of Python that the classifiers name."""
    return re.findall(r"Python :: (3\.\d+)", " ".join(PROJECT["classifiers"]))


@pytest.mark.parametrize("path", YAML, ids=lambda path: path.name)
def test_a_yaml_file_of_the_repository_is_parsed(path: Path) -> None:
    """GitHub and pre-commit say little about a file that they cannot read, so it is read here."""
    assert isinstance(yaml.safe_load(path.read_text()), dict)


def test_the_workflow_runs_the_two_commands_of_the_readme() -> None:
    """`make demo` and `make test`, and `make check` beside them."""
    jobs = WORKFLOW["jobs"].values()
    run = " ".join(step.get("run", "") for job in jobs for step in job["steps"])
    assert {f"make {target}" for target in ("demo", "test", "check")} <= set(re.findall(r"make \w+", run))


def test_the_workflow_installs_a_browser_before_the_tests() -> None:
    """One that the tests look for: without one they would say in a line that they were skipped."""
    steps = [step.get("run", "") for step in WORKFLOW["jobs"]["test"]["steps"]]
    (installs,) = [at for at, run in enumerate(steps) if set(BROWSERS) & set(run.split())]
    (tests,) = [at for at, run in enumerate(steps) if "make test" in run]
    assert installs < tests


def test_the_workflow_matrix_requires_what_the_classifiers_claim() -> None:
    """Every Python from 3.11 to 3.14 is run and claimed, and none may fail."""
    job = WORKFLOW["jobs"]["test"]
    assert job["strategy"]["matrix"]["python"] == claimed() == PYTHONS
    assert "continue-on-error" not in job


def test_the_workflow_runs_all_parts_of_the_tests() -> None:
    """A part that no job runs would be a suite that nobody runs."""
    parts = [part.split("/") for part in WORKFLOW["jobs"]["test"]["strategy"]["matrix"]["shard"]]
    assert [int(number) for number, _ in parts] == list(range(1, len(parts) + 1))
    assert {int(of) for _, of in parts} == {len(parts)}


def test_the_workflow_plays_the_contract_on_every_server() -> None:
    """Those that the suites know."""
    assert WORKFLOW["jobs"]["servers"]["strategy"]["matrix"]["server"] == SERVERS


def test_the_nightly_workflow_installs_each_extra_by_itself() -> None:
    run = " ".join(step.get("run", "") for step in NIGHTLY["jobs"]["dist"]["steps"])
    assert re.search(r"make dist .*INSTALL=1", run)


def test_the_nightly_rounds_are_fifty_of_each_suite() -> None:
    """Each round has its own number, which is its seed."""
    job = NIGHTLY["jobs"]["repeat"]
    matrix = job["strategy"]["matrix"]
    (times,) = [int(each) for step in job["steps"] for each in re.findall(r"TIMES=(\d+)", step.get("run", ""))]
    rounds = [first + number for first in matrix["first"] for number in range(times)]
    assert rounds == list(range(1, 51))
    assert set(matrix["suite"]) == set(SUITES)


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_an_action_is_pinned_by_its_commit(workflow: Path) -> None:
    """A tag can be moved to other code; the version stands behind it for people."""
    uses = re.findall(r"uses: (.*)", workflow.read_text())
    assert uses
    assert [each for each in uses if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", each)] == []


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_a_checkout_leaves_no_credentials_behind(workflow: Path) -> None:
    """What runs after it, such as a package that a test installs, cannot push."""
    steps = [step for job in yaml.safe_load(workflow.read_text())["jobs"].values() for step in job["steps"]]
    checkouts = [step["with"] for step in steps if step.get("uses", "").startswith("actions/checkout@")]
    assert checkouts
    assert all(each["persist-credentials"] is False for each in checkouts)


def test_a_release_is_refused_before_it_is_built_and_published_by_a_job_that_builds_nothing() -> None:
    """The job that PyPI trusts has files of the other one, and runs no command."""
    build, publish = RELEASE["jobs"]["build"], RELEASE["jobs"]["publish"]
    runs = [step.get("run", "") for step in build["steps"]]
    (ready,) = [at for at, run in enumerate(runs) if 'tests.release.ready "$GITHUB_REF_NAME"' in run]
    (dist,) = [at for at, run in enumerate(runs) if re.search(r"make dist .*INSTALL=1", run)]
    assert ready < dist
    assert RELEASE["permissions"] == {"contents": "read"}
    assert "permissions" not in build
    assert (publish["needs"], publish["environment"]) == ("build", "pypi")
    assert [step for step in publish["steps"] if "run" in step] == []


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_a_target_that_a_workflow_makes_exists(workflow: Path) -> None:
    """With each of its options, too."""
    makefile = (ROOT / "Makefile").read_text()
    for target, options in re.findall(r"\bmake ([\w-]+)((?:\s+[A-Z]+=\S+)*)", workflow.read_text()):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
        for name in re.findall(r"([A-Z]+)=", options):
            assert f"$({name})" in makefile or name == "PYTHON", name


def test_the_lowest_python_is_the_same_everywhere() -> None:
    """The first classifier, `requires-python` and the target of the linter agree."""
    ruff = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]
    lowest = claimed()[0]
    assert PROJECT["requires-python"] == f">={lowest}"
    assert ruff["target-version"] == "py" + lowest.replace(".", "")


def test_the_licence_is_named_and_shipped() -> None:
    """The full text of Apache 2.0, with its holder; the metadata names it, so the wheel has it."""
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text
    assert "The rsmq authors" in text
    assert (PROJECT["license"], PROJECT["license-files"]) == ("Apache-2.0", ["LICENSE"])
    assert PROJECT["authors"] == [{"name": "The rsmq authors"}]


def test_the_urls_lead_into_one_repository() -> None:
    """What the metadata links to is in the repository that it names."""
    urls = PROJECT["urls"]
    assert {"Homepage", "Documentation", "Source", "Issues", "Changelog"} <= set(urls)
    for url in urls.values():
        assert url.startswith(urls["Source"])
        _, _, path = url.partition("/main/")
        assert (ROOT / path).exists(), url


def test_pre_commit_runs_the_check() -> None:
    """One hook, which is `make check`: what passes here passes in the workflow."""
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    assert [hook["entry"] for hook in hooks] == ["make check"]


@pytest.mark.parametrize("form", ["bug.yml", "feature.yml"])
def test_an_issue_form_asks_each_question_once(form: str) -> None:
    """A form has a name, a description, and questions with ids of their own."""
    page = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / form).read_text())
    ids = [each["id"] for each in page["body"] if each["type"] != "markdown"]
    assert page["name"]
    assert page["description"]
    assert ids
    assert len(set(ids)) == len(ids)


def test_what_is_left_to_make_chaos_is_run_by_it() -> None:
    """A test that the default run leaves out is below a path that the target names."""
    line = next(each for each in (ROOT / "Makefile").read_text().splitlines() if "-m chaos" in each)
    chosen = [ROOT / each.rstrip(")") for each in line.split() if each.startswith("tests/")]
    texts = {path: path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")}
    left = [path for path, text in texts.items() if "pytest.mark." + "long_chaos" in text]
    assert len(left) > 5
    assert [path for path in left if not any(path.is_relative_to(each) for each in chosen)] == []
    conditions = [path for path, text in texts.items() if "skipif(os.environ." + 'get("CHAOS")' in text]
    assert conditions == [], "the mark long_chaos says it"
