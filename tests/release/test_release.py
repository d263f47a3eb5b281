"""The files of a release: built out of the sources alone, twice the same, without what no user needs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from rsmq.model.distribution import OWN
from tests.forks import ROOT
from tests.release.build import Built, build, description, digest, refused, surplus
from tests.release.install import PROJECT, SMOKE, extras, requirements
from tests.release.ready import obstacles
from tests.release.rename import changes, renamed

OTHER = "rsmq-streams"
"""A name that the distribution could have."""
VERSION = PROJECT["version"]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The files as they are now."""
    return build(tmp_path_factory.mktemp("dist"))


def test_wheel_out_of_the_sources_holds_the_package_and_nothing_else(built: Built) -> None:
    """`make dist` builds it twice, too; here once, and the folder it was built in does not count."""
    assert surplus(built.wheel) == []
    assert len(digest(built.wheel)) == 64


def test_pypi_takes_both_files(built: Built) -> None:
    """Its own tool has nothing to say against them. An older one did not know the metadata that hatchling writes."""
    pytest.importorskip("twine", reason="make installs it")
    assert refused(built) == ""


def test_each_link_of_the_page_on_pypi_leads_to_a_file_of_the_version(built: Built) -> None:
    """Those of the README are relative, and would lead to a page of PyPI that is not there."""
    links = re.findall(r"\]\(([^)\s]+)\)", description(built.wheel))
    home = f"{PROJECT['urls']['Source']}/blob/v{VERSION}/"
    inside = [each.removeprefix(home).partition("#")[0] for each in links if each.startswith(home)]
    assert len(inside) > 30
    assert [each for each in inside if not (ROOT / each).exists()] == []
    assert [each for each in links if not each.startswith("https://")] == []


def test_every_extra_is_tried_by_itself() -> None:
    """An extra that is added says what it is for."""
    assert set(extras()) == set(SMOKE)


def test_a_new_name_of_the_distribution_changes_what_is_installed_and_no_import() -> None:
    """`name` of pyproject.toml, the constant, extras, and what a message says to install."""
    assert renamed(f'name = "{OWN}"\nversion', "q") == 'name = "q"\nversion'
    assert renamed(f'OWN: Final = "{OWN}"\n', "q") == 'OWN: Final = "q"\n'
    assert renamed(f"pip install '{OWN}[mqtt]', ./rsmq[mqtt]", "q") == "pip install 'q[mqtt]', ./rsmq[mqtt]"
    assert renamed(f"`pip install --no-deps {OWN}`", "q") == "`pip install --no-deps q`"
    assert renamed("import rsmq; rsmq worker; rsmq_inbox", "q") == "import rsmq; rsmq worker; rsmq_inbox"
    found = {path.name for path, _ in changes("q")}
    assert {"pyproject.toml", "errors.py", "distribution.py", "pyproject.toml.txt"} <= found


def test_a_release_under_another_name_knows_its_version_and_its_extras(tmp_path: Path) -> None:
    """The command finds its metadata, and `make dist INSTALL=1` asks the index for no extra of the old name."""
    source, site = tmp_path / "source", tmp_path / "site"
    needed = (*(ROOT / "rsmq").rglob("*.*"), *(ROOT / "tests" / "release").glob("*.py"), *ROOT.glob("*.*"))
    for each in filter(Path.is_file, (*needed, *(ROOT / "tests").glob("*.py"), ROOT / "LICENSE")):
        if each.suffix != ".pyc":
            (copy := source / each.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(renamed(each.read_text(encoding="utf-8"), OTHER), encoding="utf-8")
    (tmp_path / "dist").mkdir()
    wheel = build(tmp_path / "dist", source).wheel
    assert wheel.name.startswith("rsmq_streams-")
    python(site, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", site, wheel)
    assert python(site, "-S", "-m", "rsmq", "--version") == f"rsmq {VERSION}\n"
    asked = python(
        source, "-c", "from tests.release.install import requirements; print(*requirements('all'), sep='\\n')"
    )
    assert asked.splitlines() == requirements("all")


def python(path: Path, *words: str | Path) -> str:
    """What a Python prints that looks into a folder first."""
    done = subprocess.run(
        [sys.executable, *words], cwd=path.parent, env={"PYTHONPATH": str(path)}, capture_output=True, text=True,
        timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("pyproject.toml", VERSION, "9.9.9", "pyproject.toml says 9.9.9"),
        ("CHANGELOG.md", "2026-12-01", "not tagged yet", "no heading with a date"),
        ("README.md", "rsmq", "rsmq is not on PyPI yet", "README.md says"),
        ("docs/tutorial.md", "rsmq", "rsmq is not on PyPI yet", "docs/tutorial.md says"),
    ],
)
def test_a_tag_is_refused_while_the_sources_are_not_those_of_its_release(
    tmp_path: Path, file: str, old: str, new: str, said: str
) -> None:
    """A version is published once, so what its pages say stays wrong. Without that mistake nothing is in the way."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "pyproject.toml").write_text(f'[project]\nversion = "{VERSION}"\n')
    (tmp_path / "CHANGELOG.md").write_text(f"## [Unreleased]\n\n## [{VERSION}] - 2026-12-01\n")
    (tmp_path / "README.md").write_text("rsmq\n")
    (tmp_path / "docs" / "tutorial.md").write_text("rsmq\n")
    assert list(obstacles(f"v{VERSION}", tmp_path)) == []
    (tmp_path / file).write_text((tmp_path / file).read_text().replace(old, new))
    assert said in "\n".join(obstacles(f"v{VERSION}", tmp_path))
