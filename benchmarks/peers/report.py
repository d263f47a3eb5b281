"""The report and the section of the page, made from the results and nothing else, and tables for the terminal."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.peers import picture
from benchmarks.peers.environment import Unavailable
from benchmarks.peers.results import Measured, Result, load, read
from benchmarks.prose import wrapped
from benchmarks.section import PAGE, RESULTS, Section, rewrite

TEMPLATE = Path(__file__).with_name("report.template")
PAYLOAD_BYTES = 200
Row = tuple[str, ...]

CONSUME = ("", "worker CPU µs/message", "× bare", "server CPU µs", "commands", "messages/s", "two workers: messages/s")
PUBLISH = (
    "", "fast path: CPU µs", "messages/s", "one await each: CPU µs", "messages/s", "64 at once: CPU µs", "messages/s",
)  # fmt: skip
RECOVERY = ("", "p50 ms", "p99 ms", "all done after, defaults", "tuned", "how it was tuned")
SHORT = ("", "worker CPU µs", "× bare", "messages/s", "p50 ms", "p99 ms", "of a killed worker, all done after")
SYSTEMS = ("", "version", "Python", "messages", "set up")


KEPT = RESULTS / "peers.md"
"""The report of a full run, which makes the section of the page, too."""


def write(output: Path) -> None:
    """The report and its picture, from the JSON beside them; and of a full run the section of the page."""
    found = load(output)
    _, systems = read(found)
    measured = [each for each in systems if each.rounds]
    if not measured:
        raise Unavailable("nothing could be measured. " + " ".join(missing(systems)).replace("**", ""))
    bars = [(each.entry.title, each.cpu or 0.0, each.entry.environment) for each in measured]
    picture.draw(output.with_suffix(".svg"), bars)
    output.write_text(wrapped(full(found, output.with_suffix(".svg").name)))
    if output == KEPT:
        rewrite(PAGE, SECTION.name, short(found))


def full(found: Result, drawing: str = "peers.svg") -> str:
    """All figures."""
    about, systems = read(found)
    measured, plan = [each for each in systems if each.rounds], about["plan"]
    rounds = f"the median of {plan['rounds']} rounds, with minimum … maximum" if plan["rounds"] > 1 else "of one round"
    return TEMPLATE.read_text().format(
        picture=drawing,
        payload=PAYLOAD_BYTES,
        cores=about["machine"]["cores"],
        rounds=rounds,
        limit=plan["limit"],
        parallel=plan["parallel"],
        consume=markdown(CONSUME, consume_rows(measured)),
        publish=markdown(PUBLISH, publish_rows(measured)),
        recovery=markdown(RECOVERY, recovery_rows(measured), text=(5,)),
        systems=markdown(SYSTEMS, system_rows(systems), text=(1, 2, 4)),
        missing="".join(f"- {line}\n" for line in missing(systems)) or "- nothing\n",
        machine=conditions(about),
    )


def short(found: Result) -> str:
    """The section of the page: one worker, its latency, and how soon the messages of a dead one are done."""
    about, systems = read(found)
    rows = [
        (
            each.entry.title, number(each.median("one", "consume", "cpu_us")), number(each.ratio),
            number(each.median("one", "consume", "rate")), number(each.latency("p50_ms")),
            number(each.latency("p99_ms")), each.recovery("default"),
        )
        for each in systems if each.rounds
    ]  # fmt: skip
    said = conditions(about).replace(": ", " on ", 1).rstrip(".")
    return f"{markdown(SHORT, rows)}\n\n`python -m benchmarks.peers`, {said} ({SECTION.link}).\n"


SECTION = Section("peers", short, full)


def show(output: Path, console: Console) -> None:
    """The tables in the terminal, and where the page is."""
    _, systems = read(load(output))
    measured = [each for each in systems if each.rounds]
    for titles, rows in ((CONSUME, consume_rows), (PUBLISH, publish_rows), (RECOVERY[:-1], recovery_rows)):
        table = Table()
        for title in titles:
            table.add_column(title, justify="right" if title else "left")
        for row in rows(measured):
            table.add_row(*row[: len(titles)])
        console.print(table)
    for line in missing(systems):
        console.print(line.replace("**", ""), style="yellow", markup=False)
    console.print(f"Written: {output}")


def consume_rows(systems: list[Measured]) -> Iterator[Row]:
    """One worker, and the rate of two."""
    for each in systems:
        yield (
            each.entry.title,
            spread(each.all("one", "consume", "cpu_us")),
            number(each.ratio),
            number(each.median("one", "consume", "server_us")),
            number(each.median("one", "consume", "commands"), 2),
            spread(each.all("one", "consume", "rate")),
            spread(each.all("two", "consume", "rate")),
        )


def publish_rows(systems: list[Measured]) -> Iterator[Row]:
    """The three ways to publish."""
    ways = (("one", "publish", "fast"), ("two", "publish", "one"), ("two", "publish", "concurrent"))
    for each in systems:
        if each.entry.environment == "rsmq" and each.entry.variant:
            continue  # they differ in the handler only
        cells = [text for way in ways for text in (spread(each.all(*way, "cpu_us")), number(each.median(*way, "rate")))]
        yield (each.entry.title, *cells)


def recovery_rows(systems: list[Measured]) -> Iterator[Row]:
    """Latencies and recoveries."""
    for each in systems:
        latency = (number(each.latency("p50_ms")), number(each.latency("p99_ms")))
        recovery = (each.recovery("default"), each.recovery("tuned"))
        yield (each.entry.title, *latency, *recovery, each.entry.tuned or "–")


def system_rows(systems: list[Measured]) -> Iterator[Row]:
    """What was installed and how it was set up."""
    for each in systems:
        package = each.entry.requirements[0].partition("[")[0] if each.entry.requirements else "rsmq"
        version, python = each.result.get("version", "–"), each.result.get("python", "–")
        count = number(each.median("count"), 9)
        yield (each.entry.title, f"{package} {version}", python, count, each.entry.note)


def missing(systems: list[Measured]) -> Iterator[str]:
    """What could not be measured, with its reason, and what was handled twice although nothing had failed."""
    for each in systems:
        title = f"**{each.entry.title}**"
        if each.reason:
            yield f"{title} {'has fewer rounds' if each.rounds else 'was not measured'}: {each.reason}"
        for what, said in each.failures.items():
            yield f"{title}, {what}: {said}"
        if each.repeated:
            yield f"{title} handled {each.repeated} messages more than once."


def conditions(about: Result) -> str:
    """When, where and on what."""
    box = about["machine"]
    where = f"{box['cpu']}, {box['cores']} cores, {box['memory_gib']} GiB, {box['system']}, Python {box['python']}"
    server = f"{about['server']}, append-only file on, loopback TCP"
    return (
        f"{about['date']}: {where}; {server}; {about['minutes']:g} minutes, load average {about['load']:g} at the end."
    )


def markdown(titles: Sequence[str], rows: Iterable[Row], text: tuple[int, ...] = ()) -> str:
    """A table; figures to the right, the first column and those of `text` to the left."""
    rule = "".join("---|" if at == 0 or at in text else "--:|" for at in range(len(titles)))
    return "\n".join(["| " + " | ".join(titles) + " |", f"|{rule}", *("| " + " | ".join(row) + " |" for row in rows)])


def number(value: float | None, digits: int = 3) -> str:
    """As many digits as mean something."""
    if value is None:
        return "–"
    if value >= 10 ** (digits - 1) or value == int(value):
        return f"{value:,.0f}".replace(",", " ")
    return f"{value:.{digits}g}" if value >= 0.001 else "0"


def spread(values: list[float]) -> str:
    """The median, and the range in brackets."""
    if not values:
        return "–"
    middle = number(statistics.median(values))
    return middle if len(values) == 1 else f"{middle} ({number(min(values))} … {number(max(values))})"
