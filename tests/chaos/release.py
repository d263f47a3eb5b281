"""Releases of rsmq: the code that is here, and an earlier commit, installed out of its own wheel beside it."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.chaos.processes import ROOT

KEPT = ROOT / ".chaos" / "releases"
"""Where the installed wheels are kept between runs."""


@dataclass(frozen=True, slots=True)
class Release:
    """One version of the package. `site`: the directory that holds it."""

    name: str
    site: Path

    @property
    def environment(self) -> dict[str, str]:
        """What a process must be started with to import this version; the working directory holds the new one."""
        return {"PYTHONPATH": os.pathsep.join(map(str, (self.site, ROOT))), "PYTHONSAFEPATH": "1"}


NEW = Release("new", ROOT)
FROZEN = "a6cd4b2e"
"""The commit with which names and formats froze: an upgrade starts from it until a release has a tag."""


def earlier_release() -> Release:
    """The release of `UPGRADE_BASE`, else that of the newest tag before this commit, else `FROZEN`.

    Skips the test where there is no such commit, as in an archive or a shallow clone.
    """
    newest_tag = _git("describe", "--tags", "--abbrev=0", "--match", "v*", "HEAD^")
    return installed(os.environ.get("UPGRADE_BASE") or newest_tag or FROZEN)


@functools.cache
def release_before(path: str) -> Release:
    """The newest commit without a file, unpacked: of a time before what the file is for. Skips the test where the clone
    does not have it."""
    added = _git("log", "--diff-filter=A", "--format=%h", "--", path).split()
    name = _git("rev-parse", "--short", f"{added[-1]}^") if added else ""
    if not name:
        pytest.skip(f"no commit before {path}: this is not a clone with its history")
    site = KEPT / f"{name}-files"
    if not site.exists():
        KEPT.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=KEPT, prefix="unpacking-") as scratch:
            _unpack(name, Path(scratch), "rsmq")
            Path(scratch).chmod(0o755)
            try:
                Path(scratch).rename(site)
                Path(scratch).mkdir()  # for its end
            except OSError:  # another process has unpacked it meanwhile
                pass
    return Release(name, site)


def _unpack(commit: str, folder: Path, *parts: str) -> None:
    archive = subprocess.run(["git", "archive", commit, *parts], cwd=ROOT, capture_output=True, check=True).stdout
    subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)


@functools.cache
def installed(commit: str) -> Release:
    """Build the wheel of a commit and install it in a directory of its own. The dependencies are those of the tests."""
    name = _git("rev-parse", "--short", f"{commit}^{{commit}}")
    if not name:
        pytest.skip(f"this clone has no commit {commit}")
    site = KEPT / name
    if not site.exists():
        KEPT.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=KEPT, prefix="building-") as scratch:
            built = _built(name, Path(scratch))
            try:
                built.rename(site)
            except OSError:  # another process has built it meanwhile
                shutil.rmtree(built)
    return Release(name, site)


def _built(commit: str, scratch: Path) -> Path:
    source, wheels, site = scratch / "source", scratch / "wheels", scratch / "site"
    source.mkdir()
    _unpack(commit, source)
    has_backend = importlib.util.find_spec("hatchling") is not None
    _pip("wheel", "--no-deps", *(["--no-build-isolation"] if has_backend else []), "--wheel-dir", wheels, source)
    _pip("install", "--no-deps", "--no-index", "--target", site, *wheels.glob("*.whl"))
    return site


def _pip(*words: str | Path) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"pip {words[0]} failed: {done.stderr[-2000:]}"


def _git(*command: str) -> str:
    done = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""
