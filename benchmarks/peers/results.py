"""The results of a run, as a file and as figures: what the page shows is worked out here."""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.catalogue import CATALOGUE, Entry
from benchmarks.peers.environment import Unavailable
from benchmarks.peers.system import HELD

Result = dict[str, Any]


def save(output: Path, systems: dict[str, Result], plan: dict[str, Any], server: str, seconds: float) -> None:
    """Write the JSON that the report is made from."""
    output.parent.mkdir(parents=True, exist_ok=True)
    about = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": machine(),
        "server": server,
        "plan": plan,
        "minutes": round(seconds / 60, 1),
        "load": round(os.getloadavg()[0], 1),
        "systems": rounded(systems),
    }
    output.with_suffix(".json").write_text(json.dumps(about, indent=1, ensure_ascii=False) + "\n")


def machine() -> Result:
    """What it ran on."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def rounded(value: Any) -> Any:
    """Four significant digits are more than a noisy machine gives."""
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(each) for each in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def load(output: Path) -> Result:
    """The JSON beside the report."""
    path = output.with_suffix(".json")
    if not path.exists():
        raise Unavailable(f"there is no {path} to make a report from: run python -m benchmarks.peers first")
    about: Result = json.loads(path.read_text())
    return about


def read(about: Result) -> tuple[Result, list[Measured]]:
    """What a run has kept, and its systems: the cheapest worker first, those without figures last."""
    found = about["systems"]
    systems = [Measured(entry, found[entry.name], found["bare"]) for entry in CATALOGUE if entry.name in found]
    return about, sorted(systems, key=lambda each: each.cpu or float("inf"))


class Measured:
    """One system's results. Figures are medians over the rounds; None is not known."""

    def __init__(self, entry: Entry, result: Result, bare: Result) -> None:
        self.entry, self.result, self._bare = entry, result, bare
        self.rounds: list[Result] = result["rounds"]
        self.reason: str = result.get("reason", "")
        self.failures: dict[str, str] = result.get("failures", {})

    @property
    def cpu(self) -> float | None:
        """Microseconds a message of one worker."""
        return self.median("one", "consume", "cpu_us")

    @property
    def ratio(self) -> float | None:
        """The same, in terms of the bare loop in the same round."""
        path = ("one", "consume", "cpu_us")
        ratios = [
            dig(mine, path) / dig(bare, path) for mine, bare in zip(self.rounds, self._bare["rounds"], strict=False)
        ]
        return statistics.median(ratios) if ratios else None

    @property
    def repeated(self) -> int:
        """Messages handled more than once, although nothing had failed."""
        return int(sum(self.all("one", "consume", "repeated") + self.all("two", "consume", "repeated")))

    def all(self, *path: str) -> list[float]:
        """One figure of every round."""
        return [found for each in self.rounds if (found := dig(each, path)) is not None]

    def median(self, *path: str) -> float | None:
        """One figure over the rounds."""
        values = self.all(*path)
        return statistics.median(values) if values else None

    def latency(self, name: str) -> float | None:
        """Milliseconds."""
        values = [each[name] for each in self.result["latency"]]
        return statistics.median(values) if values else None

    def recovery(self, name: str) -> str:
        """How long until all that the killed worker held was done, in words."""
        if self.entry.recovery == "none":
            return "–"
        if name == "tuned" and self.entry.recovery == "default":
            return "nothing to tune"
        found = self.result["recovery"].get(name)
        if found is None:
            return "failed" if f"recovery {name}" in self.failures else "not measured"
        if found["all"] is not None:
            seconds = f"{found['all']:.2g}" if found["all"] < 10 else f"{found['all']:.0f}"
            return f"{seconds} s" + (f" (held {found['held']})" if found["held"] < HELD else "")
        return f"> {found['limit']:g} s" + (f" ({found['done']} of {HELD})" if found["done"] else "")


def dig(value: Any, path: Sequence[str]) -> Any:
    """A figure deep inside."""
    for key in path:
        value = value.get(key) if value is not None else None
    return value
