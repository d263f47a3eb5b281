"""A virtual environment for each system, made from PyPI when first needed and kept until its requirements change."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

from benchmarks.peers.catalogue import Entry

ROOT = Path(__file__).parents[2]
HOME = ROOT / ".bench"
INSTALL_SECONDS = 600


class Unavailable(Exception):
    """A system that cannot be measured here; the text says why, for the page."""


class Environment:
    """Where one system is installed. `ensure` makes it."""

    def __init__(self, entry: Entry) -> None:
        self.requirements = entry.requirements or own_requirements()
        self._entry = entry
        key = hashlib.sha256(repr((self.requirements, entry.python)).encode()).hexdigest()[:10]
        self.directory = HOME / f"{entry.environment}-{key}"

    @property
    def python(self) -> str:
        """The environment's interpreter."""
        return str(self.directory / "bin" / "python")

    @property
    def is_ready(self) -> bool:
        """Whether it was made completely."""
        return (self.directory / "ready").exists()

    def ensure(self) -> None:
        """Make it unless it is there. Raises Unavailable."""
        if self.is_ready:
            return
        shutil.rmtree(self.directory, ignore_errors=True)
        HOME.mkdir(exist_ok=True)
        run([interpreter(self._entry.python), "-m", "venv", "--without-pip", str(self.directory)])
        pip = [sys.executable, "-m", "pip", "--python", self.python, "--disable-pip-version-check", "--quiet"]
        run([*pip, "install", "--upgrade", *self.requirements])
        (self.directory / "ready").touch()

    def version(self, requirement: str = "") -> str:
        """The installed version of a requirement, of the first one unless told."""
        name = (requirement or self.requirements[0]).split("[")[0].split(">")[0].split("=")[0]
        site = [str(path) for path in (self.directory / "lib").glob("python*/site-packages")]
        found = next(iter(importlib.metadata.distributions(name=name, path=site)), None)
        return found.version if found else "?"

    @property
    def python_version(self) -> str:
        """Of the interpreter, as `3.11.7`."""
        lines = (self.directory / "pyvenv.cfg").read_text().splitlines()
        return next(line.split("=")[1].strip() for line in lines if line.startswith("version"))


def own_requirements() -> tuple[str, ...]:
    """What this checkout depends on; its code is run from where it is."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return (*project["dependencies"], "uvloop")


def run(command: list[str]) -> None:
    """Run an installation step. Raises Unavailable with its last line of complaint."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise Unavailable(f"could not be installed in {INSTALL_SECONDS} s") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise Unavailable("could not be installed: " + (lines[-1].strip() if lines else "no reason given"))


def interpreter(oldest: tuple[int, int]) -> str:
    """This Python, or the nearest newer one where it is too old. Raises Unavailable."""
    if sys.version_info[:2] >= oldest:
        return sys.executable
    for candidate in candidates(oldest):
        if works(candidate, oldest):
            return candidate
    raise Unavailable(f"needs Python {oldest[0]}.{oldest[1]} or newer, and none was found")


def candidates(oldest: tuple[int, int]) -> Iterator[str]:
    """Interpreters on the path and those a version manager keeps."""
    for minor in range(oldest[1], oldest[1] + 4):
        if found := shutil.which(f"python3.{minor}"):
            yield found
        versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
        yield from sorted(str(path) for path in versions.glob(f"3.{minor}.*/bin/python"))


def works(python: str, oldest: tuple[int, int]) -> bool:
    """A version manager's shim may be there without its Python."""
    check = f"import sys, venv; sys.exit(sys.version_info < {oldest})"
    return subprocess.run([python, "-c", check], capture_output=True, check=False).returncode == 0
