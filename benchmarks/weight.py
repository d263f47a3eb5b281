"""`python -m benchmarks.weight [--beside REV]`: what an installation weighs, and what of it a service never runs.

The wheel of this checkout, and that of another commit, by what is in it; and the packages that each extra brings.
"""

from __future__ import annotations

import argparse
import io
import re
import subprocess
import tarfile
import tempfile
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Final

from hatchling.builders.wheel import WheelBuilder

from benchmarks.section import ROOT
from benchmarks.table import table
from rsmq.model.extension import OWN

NAMED: Final = ("rsmq/cli/demo", "rsmq/cli/bench", "rsmq/cli", "rsmq/pipeline", "rsmq/gateway", "rsmq/dashboard")
"""Folders of the wheel that are shown, and not counted in those around them."""
EXTRAS: Final = ("", "demo", "mqtt", "dashboard", "sql", "spark")


def wheel_of(checkout: Path) -> dict[str, tuple[float, float]]:
    """KiB, as installed and packed, of each part of a wheel."""
    with tempfile.TemporaryDirectory() as folder:
        (path,) = WheelBuilder(str(checkout)).build(directory=folder, versions=["standard"])
        files = zipfile.ZipFile(path).infolist()
    found = defaultdict[str, list[float]](lambda: [0.0, 0.0])
    for each in files:
        part = next((name for name in NAMED if each.filename.startswith(f"{name}/")), "all else")
        for name in (part, "all"):
            found[name][0] += each.file_size / 1024
            found[name][1] += each.compress_size / 1024
    return {name: (size, packed) for name, (size, packed) in found.items()}


def commit(name: str) -> dict[str, tuple[float, float]]:
    """The same of another commit."""
    archive = subprocess.run(["git", "archive", name], cwd=ROOT, capture_output=True, check=True).stdout
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            files.extractall(folder, filter="data")
        return wheel_of(Path(folder))


def brought(name: str, extra: str, seen: set[str]) -> Iterator[metadata.Distribution]:
    """A package and all that it needs, as installed here. What is not installed is left out."""
    key = re.sub(r"[-_.]+", "-", name).lower()
    if f"{key}[{extra}]" in seen:
        return
    seen.add(f"{key}[{extra}]")
    try:
        found = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return
    if key not in seen:
        seen.add(key)
        yield found
    for each in found.requires or ():
        text, _, marker = each.partition(";")
        wanted = re.findall(r"extra == ['\"]([\w-]+)", marker)
        if (not wanted or extra in wanted) and ("sys_platform ==" not in marker or "linux" in marker):
            match = re.match(r"([\w.-]+)(?:\[([\w,-]+)\])?", text)
            assert match is not None
            for inner in (match[2] or "").split(","):
                yield from brought(match[1], inner, seen)


def megabytes(extra: str) -> tuple[int, float]:
    """Packages, and MB, that `pip install 'rsmq[EXTRA]'` brings, without rsmq itself."""
    found = [each for each in brought(OWN, extra, set()) if each.name != OWN]
    return len(found), sum(file.size or 0 for each in found for file in each.files or ()) / 1e6


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--beside", metavar="REV", help="another commit")
    options = parser.parse_args()
    now, then = wheel_of(ROOT), commit(options.beside) if options.beside else {}
    rows = [
        (name, *then.get(name, ("–", "–")), *now.get(name, ("–", "–")))
        for name in sorted(now, key=lambda name: -now[name][0])
    ]
    before = options.beside or "before"
    print(*table(("wheel, KiB", f"{before}", "packed", "now", "packed"), rows), sep="\n")
    extras = [(f"{OWN}[{extra}]" if extra else OWN, *megabytes(extra)) for extra in EXTRAS]
    print("", *table(("installs, beside rsmq", "packages", "MB"), extras), sep="\n")


if __name__ == "__main__":
    main()
