"""All names that users depend on, as text: `python -m tests.repository.public_names --write` writes the list.

The list is `public_names.txt` beside this file. It changes only by a diff that a commit explains, until the first
release freezes it. A test compares it with what would be written now.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from datetime import timedelta
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Final, get_args, get_type_hints

import griffe
import typer

from rsmq.cli import make_app
from rsmq.model.settings import Settings
from rsmq.model.words import duration
from rsmq.telemetry import metric
from tests import reference

PAGE: Final = Path(__file__).with_name("public_names.txt")
ROOT: Final = Path(__file__).parents[2]
TOP: Final = """\
# All names that users depend on. They change only by a diff that a commit explains, until a release freezes them.
# Written by: python -m tests.repository.public_names --write
"""
PRINTED: Final = {
    "batch": ("rsmq.control.batches:BatchStatus",),
    "bodies": ("rsmq.control.bodies:TopicBodies",),
    "client": ("rsmq.persistence.mqtt_clients:MqttClient",),
    "device": ("rsmq.persistence:Device",),
    "doctor": ("rsmq.inspector.state:ServerState",),
    "erase": ("rsmq.control.erase:Erased",),
    "group": ("rsmq.inspector.state:GroupState",),
    "member": ("rsmq.inspector.state:MemberState",),
    "message": ("rsmq.control.status:MessageStatus", "rsmq.control.search:Hit"),
    "outbox": ("rsmq.sql.status:OutboxStatus",),
    "pipeline": (
        "rsmq.pipeline.jobs.archive:ArchiveResult", "rsmq.pipeline.jobs.compact:CompactResult",
        "rsmq.pipeline.jobs.replay:ReplayPlan", "rsmq.pipeline.jobs.send:SendPlan",
        "rsmq.pipeline.report.data:ReportData",
    ),
    "schedule": ("rsmq.inspector.schedules:ScheduleState",),
    "schema": ("rsmq.inspector.schema_check:SchemaFinding",),
    "top": ("rsmq.inspector.trend:Board",),
    "topic": ("rsmq.inspector.state:TopicState", "rsmq.inspector.retention_holds:RetentionHold"),
}  # fmt: skip
"""The dataclasses that commands print with `--json`, with those in their fields."""
PRINTERS: Final = {"print_json", "print_result", "print_rows"}


def page() -> str:
    """The text of the list."""
    sections = {
        "Python": python_names(),
        "Settings, each also as a variable RSMQ_<NAME>": setting_names(),
        "Commands and their options": command_names(),
        "Keys of --json": json_names(),
        "Metrics, with their labels": metric_names(),
    }
    return TOP + "".join(f"\n## {title}\n\n" + "\n".join(lines) + "\n" for title, lines in sections.items())


def python_names() -> list[str]:
    """Where each name is imported from, and each member with its signature."""
    package, found = reference.load(), set[str]()
    for _, _, paths in reference.SECTIONS:
        for path in paths:
            each = package[path.removeprefix("rsmq.")]
            if each.is_module:
                for member in reference.public(each):
                    found |= set(entries(member, f"{path}.{member.name}"))
            else:
                found |= set(entries(each, path))
    return sorted(found)


def entries(member: griffe.Object | griffe.Alias, path: str) -> Iterator[str]:
    """A class with its members, a function or a constant."""
    each = reference.target(member)
    if not isinstance(each, griffe.Class):
        yield from (f"{path}{text}" for text in texts(each))
        return
    made = reference.constructor(each, member.name)
    yield f"{path}{joined(made).removeprefix('class ').removeprefix(member.name)}"
    for name, inner in reference.members(each):
        if member.name not in reference.FRAMEWORKS:
            yield from (f"{path}.{name}{text}" for text in texts(inner))


def texts(each: griffe.Object) -> Iterator[str]:
    """Parameters and result of a function (of each way to call it), or the type of an attribute."""
    if isinstance(each, griffe.Function):
        for one in each.overloads or [each]:
            yield joined(reference.call("", one)) + (" async" if "async" in each.labels else "")
    elif isinstance(each, griffe.Attribute):
        yield f": {each.annotation}" if each.annotation is not None else ""


def joined(lines: Iterable[str]) -> str:
    """A signature on one line."""
    return " ".join(line.strip() for line in lines).replace("( ", "(").replace(", )", ")")


def setting_names() -> list[str]:
    """Name, type and default."""
    return sorted(
        f"{field.name}: {field.type}" + ("" if field.default is MISSING else f" = {as_text(field.default)}")
        for field in fields(Settings)
        if not field.name.startswith("_")
    )


def as_text(value: object) -> str:
    """A duration as users write it."""
    return duration(value) if isinstance(value, timedelta) else repr(value)


def command_names() -> list[str]:
    """Each command on a line, and each of its options below it."""
    root = typer.main.get_command(make_app())
    return list(described(root, "rsmq"))


def described(command: Any, name: str) -> Iterator[str]:
    """The classes of typer's commands are its own, so what they are is asked by their attributes."""
    given = [each for each in command.params if not getattr(each, "hidden", False)]
    yield " ".join((name, *((each.metavar or each.name).upper() for each in given if not is_option(each))))
    yield from sorted(f"    {', '.join((*each.opts, *each.secondary_opts))}" for each in given if is_option(each))
    for part, inner in sorted(getattr(command, "commands", {}).items()):
        yield from described(inner, f"{name} {part}")


def is_option(parameter: Any) -> bool:
    """Whether it begins with dashes."""
    return bool(parameter.param_type_name == "option")


def json_names() -> list[str]:
    """Of each noun or command: the keys that it writes itself, and the fields of what it prints."""
    lines = list[str]()
    for path in sorted((ROOT / "rsmq" / "cli").glob("*.py")):
        keys = set(own_keys(ast.parse(path.read_text(encoding="utf-8"))))
        if keys:
            lines.append(f"rsmq {path.stem}: {', '.join(sorted(keys))}")
        for name in PRINTED.get(path.stem, ()):
            lines += sorted({f"rsmq {path.stem}: {line}" for line in fields_of(resolve_name(name))})
    return list(dict.fromkeys(lines))


def own_keys(tree: ast.Module) -> Iterator[str]:
    """The keys of dictionaries in functions that print, or that make an object for programs."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            called = {node.func.id for node in ast.walk(function) if isinstance(node, ast.Call) and is_name(node.func)}
            if function.name.startswith("as_") or called & PRINTERS:
                for node in ast.walk(function):
                    if isinstance(node, ast.Dict):
                        yield from (key.value for key in node.keys if isinstance(key, ast.Constant))  # type: ignore[misc]


def is_name(node: ast.expr) -> bool:
    return isinstance(node, ast.Name)


def fields_of(kind: type[Any]) -> Iterator[str]:
    """The fields of a dataclass on one line, and those of the dataclasses in its fields."""
    yield f"{kind.__name__}({', '.join(sorted(field.name for field in fields(kind)))})"
    for hint in get_type_hints(kind).values():
        yield from (line for inner in classes_in(hint) if inner is not kind for line in fields_of(inner))


def classes_in(hint: Any) -> Iterator[type[Any]]:
    """The dataclasses in a type."""
    if isinstance(hint, type) and is_dataclass(hint):
        yield hint
    for each in get_args(hint):
        yield from classes_in(each)


def metric_names() -> list[str]:
    """Name, labels and kind."""
    found = (*metric.WORKER, *metric.GROUPS, *metric.GATEWAY)
    return sorted(f"{each.name}{{{', '.join(each.labels)}}} {each.kind}" for each in found)


if __name__ == "__main__":
    if "--write" in sys.argv:
        PAGE.write_text(page(), encoding="utf-8")
    else:
        print(page(), end="")
