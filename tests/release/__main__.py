"""`python -m tests.release`: build the files of a release twice, compare them, and with --install try them out."""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

from tests.forks import ROOT
from tests.release.build import build, digest, refused, surplus
from tests.release.install import RESOLUTIONS, extras, install


def main() -> int:
    """Returns 1 if something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--install", action="store_true", help="install each file, and each extra by itself (minutes)")
    parser.add_argument("--extra", action="append", help="with --install: these only")
    options = parser.parse_args()
    folder = ROOT / "dist"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    files = build(folder)
    with tempfile.TemporaryDirectory() as again:
        is_equal = [digest(each) for each in build(Path(again))] == [digest(each) for each in files]
    for file in files:
        print(f"{file.relative_to(ROOT)}  {file.stat().st_size / 1e6:.1f} MB  sha256 {digest(file)}")
    print("built twice: equal" if is_equal else "built twice: NOT EQUAL")
    unneeded = surplus(files.wheel)
    print(f"in the wheel without need: {', '.join(unneeded) or 'nothing'}")
    complaints = refused(files)
    print(complaints or "twine: PyPI would take them", flush=True)
    failed = int(not is_equal) + len(unneeded) + bool(complaints)
    if options.install:
        failed += try_all(files.wheel, options.extra or extras())
        failed += 0 if options.extra else tried(files.sdist, "", "newest")
    return min(1, failed)


def try_all(wheel: Path, names: list[str]) -> int:
    """Returns how many failed."""
    return sum(tried(wheel, name, resolution) for name in names for resolution in RESOLUTIONS)


def tried(file: Path, extra: str, resolution: str) -> int:
    """Install a file and say how that ended. Returns 1 if it failed."""
    what = f"{file.suffix.lstrip('.')} [{extra}] {resolution}"
    try:
        install(file, extra, resolution)
    except AssertionError as error:
        print(f"{what}: FAILED: {error}", flush=True)
        return 1
    print(f"{what}: works", flush=True)
    return 0


raise SystemExit(main())
