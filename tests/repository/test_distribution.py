"""How the tests are given to several processes: what an expensive fixture serves stays together."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests.conftest import LONGEST_FIRST, SLOW, TOGETHER, pytest_xdist_make_scheduler, scope_of, shard_of
from tests.forks import ROOT
from tests.untested import untested


@pytest.mark.parametrize(
    ("nodeid", "scope"),
    [
        ("tests/model/test_keys.py::test_x[a::b]", "tests/model/test_keys.py"),
        ("tests/model/test_keys.py::TestX::test_y", "tests/model/test_keys.py"),
        ("tests/pipeline/test_archive.py::test_x", "spark"),
        ("tests/pipeline/test_cluster.py::test_x", "spark cluster"),
        ("tests/cluster/test_faults.py::test_x[a]", "cluster"),
    ],
)
def test_scheduler_keeps_a_file_or_a_shared_fixture_in_one_process(nodeid: str, scope: str) -> None:
    """A file goes to one process; so do all files with the same Spark or cluster."""
    option = SimpleNamespace()
    config = SimpleNamespace(option=option, getvalue=lambda _: ["popen"], getoption=lambda *_: ["popen"])
    scheduler = pytest_xdist_make_scheduler(config, SimpleNamespace(loadscopesched=print))  # type: ignore[arg-type]
    assert scheduler._split_scope(nodeid) == scope  # type: ignore[attr-defined]
    assert option.loadscopereorder is False


@pytest.mark.parametrize("start", [*LONGEST_FIRST, *SLOW, *TOGETHER])
def test_start_of_a_group_exists(start: str) -> None:
    """A file or folder that was renamed would lose its place."""
    assert (ROOT / start).exists()


@pytest.mark.parametrize("shards", [1, 2, 3, 5])
def test_each_file_is_in_one_part_and_what_belongs_together_in_the_same(shards: int) -> None:
    """The parts of the workflow together are all tests."""
    files = [str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")]
    parts = {each: shard_of(scope_of(each), shards) for each in files}
    assert set(parts.values()) == set(range(1, shards + 1))
    assert len({part for path, part in parts.items() if scope_of(path) == "cluster"}) == 1


def test_fast_leaves_out_the_slow_folders_only() -> None:
    """As `make test-fast` does: no test of a folder in SLOW, and those of the others."""
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "--fast", "-p", "no:cacheprovider"]
    own = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    done = subprocess.run(
        [*command, "tests/model/test_keys.py", "tests/matrix"],
        cwd=ROOT, env=own, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "tests/model/test_keys.py" in done.stdout
    assert "tests/matrix/" not in done.stdout
    assert done.returncode == 0


def test_what_a_machine_cannot_test_is_one_sentence_with_what_to_install() -> None:
    """By reason, with the folders that miss something; what is for another run is not meant."""
    sentence = untested([
        ("tests/simulation/test_x.py", "Skipped: no C compiler: install gcc"),
        ("tests/chaos/test_y.py", "Skipped: no C compiler: install gcc"),
        ("tests/sql/test_z.py", "no mariadbd"),
        ("tests/chaos/test_long.py", "Skipped: half a minute: CHAOS=long, or make chaos"),
    ])  # fmt: skip
    assert sentence.endswith(": some of chaos, simulation (no C compiler: install gcc); some of sql (no mariadbd).")
    assert untested([("tests/chaos/test_long.py", "runs with `make chaos`")]) == ""
