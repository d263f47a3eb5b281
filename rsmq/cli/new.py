"""`rsmq new`: the files of a service that takes notifications and delivers them, to begin with."""

from __future__ import annotations

import keyword
import re
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Annotated, Final

import typer

from rsmq.cli.output import print_result
from rsmq.cli.parameters import Json, example
from rsmq.errors import ConfigError

FILES: Final = {
    "app.py": "app.py", "test_app.py": "test_app.py", "pyproject.toml": "pyproject.toml", "README.md": "README.md",
    "Containerfile": "Containerfile", "compose.yaml": "compose.yaml", "gitignore": ".gitignore",
    "dockerignore": ".dockerignore", "workflow.yml": ".github/workflows/test.yml",
}  # fmt: skip
"""The template of each file, which ends with .txt, and its path in the new directory."""
NAME: Final = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")
NEEDED: Final = ("rsmq", "fastapi", "uvicorn", "pytest", "setuptools")
"""Packages that the service needs: pip would take a service of such a name for the package, and install it instead."""


@example("rsmq new myservice")
def new(
    name: Annotated[str, typer.Argument(help="The name of the service, and of the directory that is made.")],
    as_json: Json = False,
) -> None:
    """Write a service to begin with: application, tests, Containerfile, compose file and CI.

    It takes notifications over HTTP and delivers them from workers. Its tests pass as they are.
    """
    if not NAME.fullmatch(name) or keyword.iskeyword(name):
        raise ConfigError(f"{name!r} is not possible: use small letters, digits and hyphens, such as my-service")
    if name in NEEDED:
        raise ConfigError(f"{name!r} is the name of a package that the service needs: choose another name")
    directory = Path(name)
    try:
        if directory.exists():
            raise ConfigError(f"{directory} exists: choose another name, or remove it")
        for path, text in written(name).items():
            target = directory / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{directory} cannot be written: {error.strerror}") from None
    made = sorted(FILES.values())
    text = f"wrote {directory}/: {', '.join(made)}\nnext: cd {directory} && pip install -e '.[test]' && pytest"
    print_result({"directory": str(directory), "files": made}, text, as_json=as_json)


def written(name: str) -> dict[str, str]:
    """The text of each file, by its path."""
    templates = files("rsmq.cli") / "template"
    return {
        path: Template((templates / f"{source}.txt").read_text(encoding="utf-8")).substitute(name=name)
        for source, path in FILES.items()
    }
