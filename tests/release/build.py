"""The two files of a release, and what they may hold."""

from __future__ import annotations

import email
import hashlib
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple

from tests.forks import ROOT

MODULES = {"rsmq", "pyspark_rsmq.py", "pytest_rsmq.py"}
"""What a wheel installs."""
SUFFIXES = {".py", ".lua", ".json", ".css", ".js", ".svg", ".txt", ".typed"}
"""Kinds of files below `rsmq/`: sources, and what the commands and pages show or write."""


class Built(NamedTuple):
    """The files of a release."""

    sdist: Path
    wheel: Path


def build(folder: Path, source: Path = ROOT) -> Built:
    """Build a source distribution, and the wheel out of it: so the wheel holds what users of the sources get."""
    _hatchling(source, folder, "sdist")
    (sdist,) = folder.glob("*.tar.gz")
    with tempfile.TemporaryDirectory() as scratch:
        with tarfile.open(sdist) as archive:
            archive.extractall(scratch, filter="data")
        (unpacked,) = Path(scratch).iterdir()
        _hatchling(unpacked, folder, "wheel")
    (wheel,) = folder.glob("*.whl")
    return Built(sdist, wheel)


def _hatchling(source: Path, folder: Path, kind: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", kind, "--directory", folder.absolute()],
        cwd=source, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"the {kind} was not built: {done.stderr[-2000:]}")


def refused(files: Built) -> str:
    """What PyPI would say against the files; empty if it takes them."""
    command = [sys.executable, "-m", "twine", "--no-color", "check", "--strict", *files]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr if done.returncode else ""


def description(wheel: Path) -> str:
    """The page of the project on PyPI: the body of the metadata, in Markdown."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [each for each in archive.namelist() if each.endswith(".dist-info/METADATA")]
        return email.message_from_bytes(archive.read(name)).get_payload()


def digest(file: Path) -> str:
    """Its SHA-256."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def surplus(wheel: Path) -> list[str]:
    """The files of a wheel that are none of the package and its description."""
    with zipfile.ZipFile(wheel) as archive:
        names = [Path(each) for each in archive.namelist()]
    return [
        str(each)
        for each in names
        if not each.parts[0].endswith(".dist-info")
        and (each.parts[0] not in MODULES or each.suffix not in SUFFIXES or "tests" in each.parts)
    ]
