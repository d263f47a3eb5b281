"""Writes the index of the command line: `python -m rsmq.cli.write_index`, where all extras are installed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import typer.main

from rsmq.cli.app import COMMANDS, added, make_app
from rsmq.cli.index import FILE, Entry


def described(group: Any, own: Sequence[str]) -> Iterator[tuple[str, Entry]]:
    """The entries of a group of commands as typer has made it."""
    for name, command in group.commands.items():
        if (own and name not in own) or command.hidden:
            continue
        if hasattr(command, "commands"):
            yield name, {"help": command.help, "commands": dict(described(command, ()))}
            continue
        options = {
            " ".join(each.opts) + "".join(f"/{name}" for name in each.secondary_opts): [kind(each), each.help or ""]
            for each in command.params
            if each.param_type_name == "option" and not each.hidden
        }
        yield name, {"help": command.help.partition("\n\n")[0], "options": options}


def kind(option: Any) -> str:
    """What an option takes."""
    return "flag" if option.is_flag else "values" if option.multiple else "value"


def made() -> str:
    """The index as it should be."""
    own = (*COMMANDS, *(name for name, each in added().items() if each.is_own))
    group = typer.main.get_command(make_app())
    lines = [f"{json.dumps(name)}: {json.dumps(entry, ensure_ascii=False)}" for name, entry in described(group, own)]
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    FILE.write_text(made(), encoding="utf-8")
