"""Writes the section of docs/compatibility.md that holds what was measured."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Final

from benchmarks.section import rewrite
from tests.matrix.cell import ROOT, Result

PAGE: Final = ROOT / "docs" / "compatibility.md"
DATA: Final = ROOT / "tests" / "matrix" / "results.json"


def table(results: Sequence[Result], versions: Mapping[str, str]) -> str:
    """Way × server: how many contract tests passed, of how many, and on which day if not on the last one; and the names
    of the failed ones."""
    ways, servers, last = list(dict.fromkeys(each.way for each in results)), list(versions), last_day(results)
    by_cell = {
        (each.way, each.server): str(each) if each.measured == last else f"{each}, on {each.measured}"
        for each in results
    }
    lines = [
        f"Measured on {last}, where no other day is given.",
        "",
        "| way | " + " | ".join(versions[server] for server in servers) + " |",
        "|---|" + "--:|" * len(servers),
        *(f"| {way} | " + " | ".join(by_cell.get((way, server), "–") for server in servers) + " |" for way in ways),
    ]
    failed = [
        f"- {each.way}, {versions[each.server]}: {', '.join(f'`{name}`' for name in each.failed)}"
        for each in results
        if each.failed
    ]
    return "\n".join(lines + (["", "Failed:", "", *failed] if failed else ["", "No test failed."]))


def last_day(results: Sequence[Result]) -> str:
    """On which the newest of them was measured."""
    return max(each.measured for each in results)


def remember(result: Result, versions: Mapping[str, str]) -> list[Result]:
    """Store the result of a cell and return all stored results."""
    kept = {(each["server"], each["way"]): each for each in (json.loads(DATA.read_text()) if DATA.exists() else [])}
    measured = datetime.now(UTC).strftime("%Y-%m-%d")
    kept[result.server, result.way] = asdict(result) | {"version": versions[result.server], "measured": measured}
    DATA.write_text(json.dumps(list(kept.values()), indent=1) + "\n", encoding="utf-8")
    names = set(Result.__dataclass_fields__)
    return [Result(**{name: value for name, value in each.items() if name in names}) for each in kept.values()]


def last_version(server: str) -> str:
    """The version in the stored results, for a server that this machine does not have."""
    kept = json.loads(DATA.read_text()) if DATA.exists() else []
    return next((each["version"] for each in kept if each["server"] == server), f"{server} (not on this machine)")


def write(results: Sequence[Result], versions: Mapping[str, str]) -> None:
    """Replace the table of the page."""
    rewrite(PAGE, "matrix", table(results, versions))
