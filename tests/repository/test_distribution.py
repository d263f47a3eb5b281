"""How the tests are given to several processes: what an expensive fixture serves stays together."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.conftest import LONGEST_FIRST, TOGETHER, pytest_xdist_make_scheduler
from tests.forks import ROOT


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


@pytest.mark.parametrize("start", [*LONGEST_FIRST, *TOGETHER])
def test_start_of_a_group_exists(start: str) -> None:
    """A file or folder that was renamed would lose its place."""
    assert (ROOT / start).exists()
