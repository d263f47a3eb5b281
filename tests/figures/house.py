"""Rooms, floors and arrows: read from the imports of a checkout, which is not run."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple


class House(NamedTuple):
    """A package and its parts. An arrow is a pair of parts of which one imports the other."""

    rooms: int
    floors: int
    arrows: int

    def __str__(self) -> str:
        return f"{self.rooms}, {self.floors}, {self.arrows}"


def modules(root: Path) -> dict[str, Path]:
    """The modules of the package, by name."""
    found = {}
    for path in sorted((root / "rsmq").rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path: Path) -> Iterator[str]:
    """What a module imports of the package, at its top or late."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "import_module":
            yield from (
                each.value
                for each in ast.walk(node.args[0])
                if isinstance(each, ast.Constant) and isinstance(each.value, str)
            )


def part_of(module: str, package: str) -> str | None:
    """The part of a package that a module belongs to: the word behind the package's name. None: it is elsewhere."""
    if not module.startswith(f"{package}."):
        return None
    return module.removeprefix(f"{package}.").split(".")[0]


def house(root: Path, package: str = "rsmq") -> House:
    """The house, or a room with rooms of its own, such as `rsmq.consumer`."""
    known = modules(root)
    parts = {part for module in known if (part := part_of(module, package))}
    below: dict[str, set[str]] = {part: set() for part in parts}
    for module, path in known.items():
        part = part_of(module, package)
        if part is None:
            continue
        for target in imports(path):
            other = part_of(target, package)
            if other in parts and other != part:
                below[part].add(other)
    return House(len(parts), floors(below), sum(map(len, below.values())))


def floors(below: dict[str, set[str]]) -> int:
    """The longest chain of arrows, counted in parts. 0: there is a circle, so there are no floors."""
    height: dict[str, int] = {}
    try:
        for part in TopologicalSorter(below).static_order():
            height[part] = 1 + max((height[other] for other in below[part]), default=0)
    except CycleError:
        return 0
    return max(height.values(), default=0)
