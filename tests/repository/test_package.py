"""The package as it is imported: every public name is there, and an import loads only what is used."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

import rsmq

ROOT = Path(__file__).parents[2]
UNNEEDED = (
    "broker worker inspector producer consumer handler dlq heartbeat persistence cli redis.embedded redis.preflight"
)
"""What neither a reader nor a writer of topics on an executor of Spark needs."""
OF_WORKERS = "worker.worker consumer heartbeat inspector dlq.dead_letters persistence.session telemetry"
"""What a process that only publishes does not need."""
FOREIGN = ("typer", "rich", "click", "pandas", "matplotlib", "uvicorn")
HEAVY = ("pydantic", "pydantic_settings", "annotated_types", "dotenv", "argparse", "rsmq.dlq", "rsmq.handler.validated")
"""What takes long to import, and only some processes need."""


def loaded_by(line: str) -> set[str]:
    """The modules that a line of Python loads, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", f"{line}; import sys; print(*sys.modules)"],
        capture_output=True, text=True, timeout=200, check=True, cwd=ROOT,
    )  # fmt: skip
    return set(done.stdout.split())


def test_every_public_name_is_there() -> None:
    """Each name of `__all__` is an object of the module that type checkers see, and `dir` lists it."""
    tree = ast.parse(Path(rsmq.__file__).read_text(encoding="utf-8"))
    (typed,) = [node for node in tree.body if isinstance(node, ast.If)]
    homes = {alias.name: node.module for node in typed.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert sorted(homes) == sorted(rsmq.__all__)
    for name, home in homes.items():
        assert getattr(rsmq, name) is getattr(__import__(str(home), fromlist=[name]), name)
    assert set(rsmq.__all__) <= set(dir(rsmq))


def test_a_misspelt_name_raises_the_usual_error() -> None:
    """A mistake in an import is reported as for any module."""
    with pytest.raises(AttributeError, match="module 'rsmq' has no attribute 'Brocker'"):
        rsmq.Brocker  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'Brocker'"):
        exec("from rsmq import Brocker")


@pytest.mark.parametrize(
    ("overwritten", "line"),
    [(False, "import rsmq"), (True, "from rsmq.broker import Broker"), (True, "import rsmq.cli.quick")],
)
def test_pyrsmq_in_the_same_folder_is_refused(tmp_path: Path, overwritten: bool, line: str) -> None:
    """Whichever of the two was installed last, the import fails and says which one to uninstall."""
    package = tmp_path / "rsmq"
    shutil.copytree(Path(rsmq.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "rsmq.py").write_text("class RedisSMQ: ...\n")
    if overwritten:
        (package / "__init__.py").write_text("from .rsmq import RedisSMQ\n")
    done = subprocess.run([sys.executable, "-c", line], capture_output=True, text=True, timeout=200, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("ImportError: PyRSMQ is installed")
    assert "pip uninstall PyRSMQ" in done.stderr


def test_an_import_alone_loads_nothing() -> None:
    """`import rsmq` is free; the first name that is used brings its part."""
    assert {name for name in loaded_by("import rsmq") if name.startswith("rsmq")} == {"rsmq"}
    assert "rsmq.broker" not in loaded_by("from rsmq import Settings, ConfigError")
    assert "rsmq.broker" in loaded_by("from rsmq import Broker")


def test_a_producer_loads_no_part_of_a_worker() -> None:
    """Making a broker brings what publishes; the folders of a worker come with `run`."""
    loaded = loaded_by("from rsmq import Broker; Broker()")
    assert "rsmq.producer.sender" in loaded
    unneeded = tuple(f"rsmq.{module}" for module in OF_WORKERS.split())
    assert all(find_spec(module) for module in unneeded), "a module that has moved"
    assert {name for name in loaded if name.startswith(unneeded)} == set()
    assert {name for name in loaded if name.split(".")[0] in FOREIGN} == set()
    assert set(HEAVY) & loaded == {"rsmq.dlq"}, "the package alone: its names load late"
    assert "rsmq.dlq.selection" not in loaded


def test_a_typed_payload_loads_pydantic() -> None:
    """A handler of plain JSON does not need it."""
    register = (
        "from rsmq import Broker; handle = Broker().handler('orders', group='bill')\nasync def bill(order: {}): ..."
    )
    assert "pydantic" not in loaded_by(register.format("dict") + "\nhandle(bill)")
    assert "pydantic" in loaded_by(register.format("tuple[int, str]") + "\nhandle(bill)")


def test_a_command_loads_no_other_command() -> None:
    """A worker keeps in memory what it runs, not the gateway, the tables and the pictures of other commands."""
    loaded = loaded_by("import rsmq.cli; rsmq.cli.make_app('worker')")
    assert {"rsmq.cli.worker", "rsmq.consumer.consumer"} <= loaded
    unneeded = ("rsmq.gateway", "rsmq.testing", "rsmq.cli.top", "rsmq.cli.bench", "rsmq.cli.tables", "rich")
    assert {name for name in loaded if name.startswith(unneeded)} == set()


@pytest.mark.parametrize("package", ["rsmq.worker", "rsmq.control", "rsmq.dlq", "rsmq.persistence"])
def test_a_package_that_loads_its_names_late_has_all_of_them(package: str) -> None:
    """Each name of `__all__` is there, type checkers see it in the module that has it, and a wrong name is an error."""
    module = import_module(package)
    tree = ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))
    typed = next(node for node in tree.body if isinstance(node, ast.If))
    homes = {alias.name: node.module for node in typed.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert sorted(homes) == sorted(module.__all__)
    for name, home in homes.items():
        assert getattr(module, name) is getattr(import_module(str(home)), name)
    assert set(module.__all__) <= set(dir(module))
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'Sesion'"):
        module.Sesion  # noqa: B018


def test_a_spark_executor_loads_only_the_redis_layer() -> None:
    """The source and its sinks bring the Redis layer, no part above it, and nothing of the command line."""
    pytest.importorskip("pyspark", reason="the extra is not installed: pip install 'rsmq[spark]'")
    loaded = loaded_by("import pyspark_rsmq")
    assert "rsmq.redis.client.connector" in loaded
    unneeded = tuple(f"rsmq.{room}" for room in UNNEEDED.split())
    assert all(find_spec(module) for module in unneeded), "a folder that has moved"
    assert {name for name in loaded if name.startswith(unneeded)} == set()
    assert {name for name in loaded if name.split(".")[0] in FOREIGN} == set()


@pytest.mark.parametrize(
    ("package", "line", "said"),
    [
        ("sqlalchemy", "from rsmq.sql import Outbox", "rsmq.sql needs sqlalchemy, {}'rsmq[sql]'"),
        ("starlette", "import rsmq.dashboard", "rsmq.dashboard needs starlette, {}'rsmq[dashboard]'"),
        ("pyspark", "from rsmq.pipeline import open_session", "rsmq.pipeline needs pyspark, {}'rsmq[spark]'"),
        ("pyarrow", "from rsmq.pipeline import find_archived", "rsmq.pipeline needs pyarrow, {}'rsmq[spark]'"),
    ],
)
def test_a_part_without_its_extra_says_what_to_install(package: str, line: str, said: str) -> None:
    """In the last line of the traceback; the error is that of any import that fails."""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.modules[{package!r}] = None; {line}"],
        cwd=ROOT, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.stderr.splitlines()[-1] == f"ModuleNotFoundError: {said.format('which is not installed: pip install ')}"
