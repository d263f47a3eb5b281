"""The section of docs/benchmarks.md about the MQTT gateway, from docs/gateway-benchmarks.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from benchmarks.table import figure, table

KEPT: Final = Path(__file__).parents[1] / "docs" / "gateway-benchmarks.json"
PROSE: Final = """## MQTT gateway

`python -m benchmarks.gateway`, {date}, on {cores} cores with a load of {load:g} from other work, which makes every
figure larger; a run of about ten minutes, the best of {rounds}. QoS 1, 200 bytes, 200 connections, MQTT 3.1.1, one
gateway process with uvloop on one server with its append-only file. Mosquitto ({mosquitto}) keeps everything in memory
and has queues without limit; for the last five lines it has its persistence and its defaults. The goals are those of
the design, on a machine without other work.
"""


def section() -> str:
    """What the page says; nothing while there are no figures."""
    if not KEPT.exists():
        return ""
    kept = json.loads(KEPT.read_text())
    return PROSE.format(**kept["about"]) + "\n" + "\n".join(rows(kept["results"]))


WORKS: Final = {
    "ingest": "device → topic, busy (10 in flight each)", "ingest paced": "the same, 4 000 a second in all",
    "pairs": "device → device, kept sessions, busy", "pairs paced": "the same, 4 000 a second",
    "fan brief": "fan-out to clean sessions, a delivery", "fan kept": "fan-out to kept sessions, a delivery",
    "connect": "connect, subscribe, kept session", "kill": "", "resume": "", "slow": "",
}  # fmt: skip
GOALS: Final = {"ingest": "5 + 3", "ingest paced": "32 + 18", "pairs": "18 + 14", "pairs paced": "75 + 65",
                "fan brief": "6", "fan kept": "6 + 8", "connect": "150 + 60"}  # fmt: skip


def rows(results: dict[str, dict[str, Any]]) -> list[str]:
    """The tables."""
    names = list(results)

    def cell(name: str, work: str, what: Any) -> str:
        found = results[name].get(work)
        return "–" if not found or "why" in found else what(found)

    lines = table(
        ("CPU µs a message, gateway + server", *names, "goal"),
        [
            (title, *(cell(name, work, lambda got: " + ".join(map(figure, got["cpu"]))) for name in names), GOALS[work])
            for work, title in WORKS.items()
            if title
        ],
    )
    other: list[tuple[str, ...]] = []
    for work, title in (("ingest", "device → topic"), ("pairs", "device → device")):
        other.append((f"messages/s, {title}", *(cell(name, work, lambda got: figure(got["rate"])) for name in names)))
    other.append(
        ("KB a connection", *(cell(name, "connect", lambda got: figure(got["bytes"] / 1024)) for name in names))
    )
    gib = 1 << 30
    other.append(("connections a GiB", *(
        cell(name, "connect", lambda got: figure(int(gib / max(1, got["bytes"])))) for name in names)))  # fmt: skip
    for work, key, title in (
        ("ingest paced", "puback", "PUBACK"), ("pairs paced", "end_to_end", "end to end"),
    ):  # fmt: skip
        other.append((f"{title} at 4 000 a second, p50 / p99 ms", *(
            cell(name, work, lambda got, key=key: f"{got[key]['p50']:.1f} / {got[key]['p99']:.1f}")  # type: ignore[misc]
            for name in names)))  # fmt: skip
    other.append(("SIGKILL of the broker: delivered of 5 000 acknowledged", *(
        cell(name, "kill", lambda got: f"{got['delivered']:,}{'' if got['in_order'] else ', out of order'}")
        for name in names)))  # fmt: skip
    other.append(("of these, from CONNECT to the last, s", *(
        cell(name, "kill", lambda got: f"{max(0.0, got['seconds']):.2f}" if got["delivered"] else "–")
        for name in names)))  # fmt: skip
    other.append(("CONNECT to the first of 10 000 waiting (others: 1 000), p50 / p99 / longest ms", *(
        cell(name, "resume", lambda got: f"{got['resumed']['p50']:.1f} / {got['resumed']['p99']:.1f}"
             f" / {got['longest']:.1f}")
        for name in names)))  # fmt: skip
    other.append(("200 publishers, one slow subscriber: acknowledged", *(
        cell(name, "slow", lambda got: f"{got['acked']:,}") for name in names)))  # fmt: skip
    other.append(("of these delivered", *(cell(name, "slow", lambda got: f"{got['delivered']:,}") for name in names)))
    return [*lines, "", *table(("", *names), other)]
