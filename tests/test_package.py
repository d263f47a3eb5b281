"""The package as it is imported: every public name is there, and nobody loads what they do not use."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import rsmq

ROOT = Path(__file__).parents[1]
UNNEEDED = (
    "broker worker supervisor portal inspector producer consumer handler dlq heartbeat persistence cli demo bench "
    "embedded keeper preflight"
)
"""What neither a reader nor a writer of topics on an executor of Spark needs."""
FOREIGN = ("typer", "rich", "click", "pandas", "matplotlib", "uvicorn")


def loaded_by(line: str) -> set[str]:
    """The modules that a line of Python loads, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", f"{line}; import sys; print(*sys.modules)"],
        capture_output=True, text=True, timeout=60, check=True, cwd=ROOT,
    )  # fmt: skip
    return set(done.stdout.split())


def test_every_public_name_is_there() -> None:
    """Each name of `__all__` is an object of the module that type checkers are told of, and `dir` lists it."""
    tree = ast.parse(Path(rsmq.__file__).read_text(encoding="utf-8"))
    (typed,) = [node for node in tree.body if isinstance(node, ast.If)]
    homes = {alias.name: node.module for node in typed.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert sorted(homes) == sorted(rsmq.__all__)
    for name, home in homes.items():
        assert getattr(rsmq, name) is getattr(__import__(str(home), fromlist=[name]), name)
    assert set(rsmq.__all__) <= set(dir(rsmq))


def test_a_name_that_is_not_there() -> None:
    """A mistake in an import is told as for any module."""
    with pytest.raises(AttributeError, match="module 'rsmq' has no attribute 'Brocker'"):
        rsmq.Brocker  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'Brocker'"):
        exec("from rsmq import Brocker")


def test_an_import_alone_loads_nothing() -> None:
    """`import rsmq` is free; the first name that is used brings its part."""
    assert {name for name in loaded_by("import rsmq") if name.startswith("rsmq")} == {"rsmq"}
    assert "rsmq.broker" not in loaded_by("from rsmq import Settings, ConfigError")
    assert "rsmq.broker" in loaded_by("from rsmq import Broker")


def test_an_executor_loads_what_it_needs() -> None:
    """The source and its sinks bring the Redis layer, no part above it, and nothing of the command line."""
    pytest.importorskip("pyspark", reason="the extra is not installed: pip install 'rsmq[spark]'")
    loaded = loaded_by("import pyspark_rsmq")
    assert "rsmq.connect" in loaded
    assert {name for name in loaded if name.startswith("rsmq.") and name.split(".")[1] in UNNEEDED.split()} == set()
    assert {name for name in loaded if name.split(".")[0] in FOREIGN} == set()
