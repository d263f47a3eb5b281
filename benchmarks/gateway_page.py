"""The section of docs/benchmarks.md about the MQTT gateway, from benchmarks/results/gateway.json."""

from __future__ import annotations

from typing import Any, Final

from benchmarks.section import Section
from benchmarks.table import figure, table

PROSE: Final = """\
`python -m benchmarks.gateway`, {date}, on {cores} cores with a load of {load:g} from other work, which makes every
figure larger; a run of about ten minutes, the best of {rounds}. QoS 1, 200 bytes, 200 connections, MQTT 3.1.1, one
gateway process with uvloop on one server with its append-only file. Mosquitto ({mosquitto}) keeps everything in memory
and has queues without limit; for the last five lines it has its persistence and its defaults. The goals are those of
the design, on a machine without other work.
"""


def short(kept: dict[str, Any]) -> str:
    """What the page says."""
    return PROSE.format(**kept["about"]) + "\n" + "\n".join(rows(kept["results"]))


SECTION: Final = Section("gateway", short)

WORKS: Final = {
    "ingest": "device → topic, busy (10 in flight each)", "ingest paced": "the same, 4 000 a second in all",
    "pairs": "device → device, kept sessions, busy", "pairs paced": "the same, 4 000 a second",
    "single": "the same, one message at a time",
    "fan brief": "fan-out to clean sessions, a delivery", "fan kept": "fan-out to kept sessions, a delivery",
    "connect": "connect, subscribe, kept session", "kill": "", "resume": "", "slow": "",
}  # fmt: skip
GOALS: Final = {"ingest": "5 + 3", "ingest paced": "32 + 18", "pairs": "18 + 14", "pairs paced": "140 + 60",
                "fan brief": "6", "fan kept": "3.6 + 7", "connect": "150 + 60", "single": ""}  # fmt: skip


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
            if title and any(work in found for found in results.values())
        ],
    )

    def row(title: str, work: str, what: Any, goal: str = "") -> tuple[str, ...]:
        return (title, *(cell(name, work, what) for name in names), goal)

    paced = "at 4 000 a second, p50 / p99 ms"
    other = [
        row("messages/s, device → topic", "ingest", lambda got: figure(got["rate"]), "120 000"),
        row("messages/s, device → device", "pairs", lambda got: figure(got["rate"]), "20 000"),
        row("KB a connection", "connect", lambda got: figure(got["bytes"] / 1024), "6"),
        row("connections a GiB", "connect", lambda got: figure(int((1 << 30) / max(1, got["bytes"])))),
        row(f"PUBACK {paced}", "ingest paced", lambda got: both(got["puback"]), "1 / 5"),
        row(f"end to end {paced}", "pairs paced", lambda got: both(got["end_to_end"]), "3 / 15"),
        row("SIGKILL of the broker: delivered of 5 000 acknowledged", "kill",
            lambda got: f"{got['delivered']:,}{'' if got['in_order'] else ', out of order'}", "5 000"),
        row("of these, from CONNECT to the last, s", "kill",
            lambda got: f"{max(0.0, got['seconds']):.2f}" if got["delivered"] else "–"),
        row("CONNECT to the first of 10 000 waiting (others: 1 000), p50 / p99 / longest ms", "resume",
            lambda got: f"{both(got['resumed'])} / {got['longest']:.1f}", "longest 50"),
        row("200 publishers, one slow subscriber: acknowledged", "slow", lambda got: f"{got['acked']:,}"),
        row("of these delivered", "slow", lambda got: f"{got['delivered']:,}", "all"),
    ]  # fmt: skip
    return [*lines, "", *table(("", *names, "goal"), other)]


def both(times: dict[str, float]) -> str:
    """Median and 99th percentile."""
    return f"{times['p50']:.1f} / {times['p99']:.1f}"
