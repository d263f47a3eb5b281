"""The files of a release: built out of the sources alone, twice the same, without what no user needs."""

from __future__ import annotations

from pathlib import Path

from tests.release.build import build, digest, surplus
from tests.release.install import SMOKE, extras
from tests.release.rename import changes, renamed


def test_wheel_out_of_the_sources_holds_the_package_and_nothing_else(tmp_path: Path) -> None:
    """`make dist` builds it twice, too; here once, and the folder it was built in does not count."""
    (here := tmp_path / "here").mkdir()
    files = build(here)
    assert surplus(files.wheel) == []
    assert len(digest(files.wheel)) == 64


def test_every_extra_is_tried_by_itself() -> None:
    """An extra that is added says what it is for."""
    assert set(extras()) == set(SMOKE)


def test_a_new_name_of_the_distribution_changes_what_is_installed_and_no_import() -> None:
    """`name` of pyproject.toml, extras, and what a message says to install."""
    assert renamed('name = "rsmq"\nversion', "q") == 'name = "q"\nversion'
    assert renamed("pip install 'rsmq[mqtt]', ./rsmq[mqtt]", "q") == "pip install 'q[mqtt]', ./rsmq[mqtt]"
    assert renamed("`pip install --no-deps rsmq`", "q") == "`pip install --no-deps q`"
    assert renamed("import rsmq; rsmq worker; rsmq_inbox", "q") == "import rsmq; rsmq worker; rsmq_inbox"
    found = {path.name for path, _ in changes("q")}
    assert {"pyproject.toml", "errors.py", "pyproject.toml.txt"} <= found
