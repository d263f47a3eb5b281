"""Node.js and Python on one topic: by the wire format alone they agree on partitions, order and groups."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.examples.program import EXAMPLES, ROOT, environment, expected, run, run_python, sorted_lines

SOURCE = EXAMPLES / "polyglot"

pytestmark = pytest.mark.skipif(
    shutil.which("node") is None or shutil.which("npm") is None, reason="Node.js is not installed (node and npm)"
)


@pytest.fixture(scope="module")
def polyglot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the example, with its one dependency installed and the page whose vectors it checks."""
    root = tmp_path_factory.mktemp("polyglot")
    copy = root / "examples" / "polyglot"
    shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns("node_modules", "__pycache__"))
    (root / "docs").mkdir()
    shutil.copy(ROOT / "docs" / "wire-format.md", root / "docs")
    subprocess.run(["npm", "install", "--no-audit", "--no-fund"], cwd=copy, env=os.environ, check=True, timeout=100)
    return copy


def test_the_partition_is_the_same(polyglot: Path) -> None:
    """Node.js computes every golden vector of the wire format: partitions, encoded payloads, encoded letters."""
    found = run(["node", "--test", "--test-reporter=tap"], polyglot, environment())
    assert "# fail 0\n" in found
    assert re.search(r"# pass [56]\n", found)  # an older Node.js has no zstd, and skips one


def test_both_handle_what_both_published(polyglot: Path, env: dict[str, str]) -> None:
    """Each side handles the orders of both, a customer's in publish order, from the partition that Python computes."""
    run_python(polyglot / "orders.py", "publish", cwd=polyglot, env=env)
    run(["node", "orders.js", "publish"], polyglot, env)
    by_node = run(["node", "orders.js", "handle", "12"], polyglot, env)
    by_python = run_python(polyglot / "orders.py", "handle", "12", cwd=polyglot, env=env)
    for output in (by_node, by_python):
        assert sorted_lines(output) == sorted_lines(expected("polyglot"))
        for customer in ("c-42", "grüß", "주문"):
            assert of_customer(output, customer) == of_customer(expected("polyglot"), customer)


def of_customer(output: str, customer: str) -> list[str]:
    """The lines of one customer, in the order in which they were printed."""
    return [line for line in output.splitlines() if f" of {customer} " in line]


def test_node_handles_what_it_left(polyglot: Path, env: dict[str, str]) -> None:
    """What Node.js has read and not acknowledged comes first when it starts again; nothing comes twice or never."""
    run_python(polyglot / "orders.py", "publish", cwd=polyglot, env=env)
    first = run(["node", "orders.js", "handle", "2"], polyglot, env)
    second = run(["node", "orders.js", "handle", "4"], polyglot, env)
    lines = [line for line in expected("polyglot").splitlines() if "from python" in line]
    assert sorted_lines(first + second) == sorted(lines)


def test_a_topic_that_nobody_made(polyglot: Path, env: dict[str, str]) -> None:
    """Node.js cannot know the partitions of a topic that does not exist, and says what to do."""
    ended = subprocess.run(
        ["node", "orders.js", "publish"],
        cwd=polyglot,
        env=env,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ended.returncode == 1
    assert "there is no topic polyglot yet: start its Python worker" in ended.stderr


def test_the_only_dependency_is_pinned() -> None:
    """The package names one dependency in one exact version, and no lock file is kept."""
    package = json.loads((SOURCE / "package.json").read_text())
    assert list(package["dependencies"]) == ["redis"]
    assert package["dependencies"]["redis"].replace(".", "").isdigit()
    assert not (SOURCE / "package-lock.json").exists()
