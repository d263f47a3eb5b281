"""A report as one HTML page: nothing is loaded from anywhere, everything that others wrote is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from html import escape
from itertools import groupby
from typing import Final

from rsmq.pipeline.chart import bars, columns, lines, short, stacked
from rsmq.pipeline.facts import Backlog, Deaths, Facts, Group, History, jain

STYLE: Final = """
:root{color-scheme:light dark;--ink:#1f2430;--dim:#6b7280;--line:#d9dde5;--back:#fbfbfd;--card:#fff}
@media(prefers-color-scheme:dark){:root{--ink:#e6e8ee;--dim:#9aa3b2;--line:#333a48;--back:#14171e;--card:#1b1f29}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--back)}
body{max-width:60rem;margin:2rem auto;padding:0 1rem}
h1{font-size:1.6rem;margin:0}h2{font-size:1.15rem;margin:2.4rem 0 .4rem}p.about{color:var(--dim);margin:.2rem 0 .8rem}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(8.5rem,1fr));gap:.8rem;margin:1.4rem 0}
.card{background:var(--card);border:1px solid var(--line);border-radius:.5rem;padding:.7rem .9rem}
.card b{display:block;font-size:1.35rem}.card span{color:var(--dim);font-size:.85rem}
svg{width:100%;height:auto;background:var(--card);border:1px solid var(--line);border-radius:.5rem;margin:.3rem 0}
table{border-collapse:collapse;width:100%;margin:.5rem 0;font-variant-numeric:tabular-nums}
th{text-align:left;color:var(--dim);font-weight:500}
th,td{padding:.25rem .6rem .25rem 0;border-bottom:1px solid var(--line)}
td.n,th.n{text-align:right}td{overflow-wrap:anywhere}.warn{color:#c2410c}
footer{color:var(--dim);margin:3rem 0 1rem;font-size:.85rem}
"""
NOTES: Final = """
<p class="about"><b>Publishing</b> is measured from the moment in the message id (a UUIDv7, the publisher's clock) to
the stream id (the server's clock): a delayed message counts its delay, a replayed one its age, and clocks that differ
show. Messages with other ids are left out. <b>Waiting</b> is the age of the oldest message that a group has not
settled, now. The queue does not record when a message was settled, so there is no distribution of that; what was
given up tells when. <b>Fairness</b> is Jain's index (1: even, 1/n: one has everything) over the live members of a
group, by the window's messages in the partitions that each owns now. Under shared distribution nobody owns a
partition, and there is none.</p>
"""


def page(facts: Facts) -> str:
    """The whole page."""
    body = "".join(sections(facts))
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>rsmq report</title><style>{STYLE}</style><body>{body}</body></html>\n"
    )


def sections(facts: Facts) -> Iterator[str]:
    """From the most asked to the least."""
    yield header(facts)
    yield cards(facts)
    if facts.history.messages:
        yield volume(facts.history)
    if facts.history.latencies:
        yield latency(facts.history)
    if facts.groups:
        yield groups(facts.groups)
    yield deaths(facts.deaths)
    if any(group.loads for group in facts.groups):
        yield fairness(facts.groups)
    if facts.history.hot_keys or facts.history.spreads:
        yield keys(facts.history)
    if facts.backlog is not None:
        yield backlog(facts.backlog)
    cut = "".join(f'<p class="warn">{escape(text)}</p>' for text in facts.cut)
    yield f"<h2>What the numbers mean</h2>{NOTES}{cut}<footer>Times are UTC. Made by rsmq pipeline report.</footer>"


def header(facts: Facts) -> str:
    """What it is about."""
    first, last = facts.history.first, facts.history.last
    window = f"{when(first)} to {when(last)}" if first and last else "no message in the window"
    return (
        f"<h1>rsmq report</h1><p class='about'>{escape(window)}, from {escape(facts.source)}; the server "
        f"{escape(facts.server)} at {when(facts.made_at)}</p>"
    )


def cards(facts: Facts) -> str:
    """The numbers to look at first."""
    history = facts.history
    waiting = max((group.waiting for group in facts.groups if group.waiting is not None), default=None)
    shown = [
        (short(history.messages), "messages"),
        (f"{short(sum(volume.bytes for volume in history.volumes))}B", "keys and payloads"),
        (short(sum(death.letters for death in facts.deaths)), "dead letters"),
        (short(sum(group.lag + group.pending + group.parked for group in facts.groups)), "not settled now"),
        ("–" if waiting is None else span(waiting), "longest waiting now"),
    ]
    if facts.backlog is not None:
        shown.append((short(facts.backlog.letters), f"letters for {short(facts.backlog.devices)} devices"))
    inner = "".join(f'<div class="card"><b>{escape(value)}</b><span>{label}</span></div>' for value, label in shown)
    return f'<div class="cards">{inner}</div>'


def volume(history: History) -> str:
    """Messages a second by topic, over time."""
    times = steps(history)
    topics = sorted({each.topic for each in history.volumes})
    counts = {(each.topic, each.at): each.messages / history.step.total_seconds() for each in history.volumes}
    series = [(topic, [counts.get((topic, at), 0.0) for at in times]) for topic in topics]
    rows = (
        (topic, sum(each.messages for each in found), short(sum(each.bytes for each in found)) + "B")
        for topic, found in ((topic, [each for each in history.volumes if each.topic == topic]) for topic in topics)
    )
    return (
        f"<h2>Volume</h2>{stacked('volume', times, series, 'messages/s')}"
        f"{table(('topic', '#messages', '#keys and payloads'), rows)}"
    )


def latency(history: History) -> str:
    """Percentiles over time."""
    found = history.latencies
    times = [each.at for each in found]
    series = [("50 %", [e.p50 for e in found]), ("95 %", [e.p95 for e in found]), ("99 %", [e.p99 for e in found])]
    measured = sum(each.measured for each in found)
    return (
        f'<h2>Publishing</h2><p class="about">From making a message to its place in the stream, {measured} of '
        f"{history.messages} messages, by steps of {span(history.step)}.</p>{lines('latency', times, series, 'ms')}"
    )


def groups(found: Sequence[Group]) -> str:
    """What each group has still to do."""
    rows = (
        (f"{each.topic} / {each.name}", each.lag, each.pending, each.parked, each.dead_letters,
         "–" if each.waiting is None else span(each.waiting), len(each.loads) or "–",
         "–" if each.jain is None else f"{each.jain:.3f}")
        for each in found
    )  # fmt: skip
    names = ("topic / group", "#not delivered", "#pending", "#retry", "#dead", "#waiting", "#members", "#Jain")
    return f"<h2>Groups now</h2>{table(names, rows)}"


def deaths(found: Sequence[Deaths]) -> str:
    """Dead letters by reason."""
    if not found:
        return '<h2>Dead letters</h2><p class="about">There are none.</p>'
    shown = sorted(found, key=lambda each: -each.letters)[:20]
    picture = bars(
        "deaths", [f"{each.topic}/{each.group}: {each.reason}" for each in shown], [each.letters for each in shown],
        "dead letters",
    )  # fmt: skip
    rows = (
        (f"{each.topic} / {each.group}", each.reason, each.letters,
         *(span(timedelta(seconds=seconds)) for seconds in each.given_up), each.example)
        for each in shown
    )  # fmt: skip
    names = ("topic / group", "reason", "#letters", "#given up after (median)", "#(95 %)", "most frequent error")
    return f"<h2>Dead letters</h2>{picture}{table(names, rows)}"


def fairness(found: Sequence[Group]) -> str:
    """Messages by member, a picture a group."""
    pictures = []
    for group in found:
        if group.loads:
            loads = sorted(group.loads, key=lambda load: -load.messages)[:20]
            labels = [f"{load.member} ({load.partitions} partitions)" for load in loads]
            drawn = bars(f"load-{group.topic}-{group.name}", labels, [load.messages for load in loads], "messages")
            pictures.append(
                f'<p class="about">{escape(group.topic)} / {escape(group.name)}: Jain {group.jain:.3f}</p>{drawn}'
            )
    return f"<h2>Fairness over members</h2>{''.join(pictures)}"


def keys(history: History) -> str:
    """The most frequent keys of each topic, and its partitions."""
    parts = []
    for topic, hot in groupby(history.hot_keys, key=lambda each: each.topic):
        found = list(hot)
        labels = [f"{each.key} ({each.share:.1%})" for each in found]
        parts.append(f'<p class="about">{escape(topic)}, the most frequent keys</p>')
        parts.append(bars(f"keys-{topic}", labels, [each.messages for each in found], "messages"))
    for spread in history.spreads:
        labels = [str(number) for number in range(len(spread.messages))]
        parts.append(f'<p class="about">{escape(spread.topic)} by partition: Jain {jain(spread.messages):.3f}</p>')
        parts.append(columns(f"spread-{spread.topic}", labels, spread.messages, "messages"))
    return f"<h2>Hot keys and partitions</h2>{''.join(parts)}"


def backlog(found: Backlog) -> str:
    """Devices by what waits for them."""
    labels, low = [], 0
    for high, _ in found.steps:
        labels.append(f"over {low - 1}" if high is None else str(high) if low >= high else f"{low}–{high}")
        low = 0 if high is None else high + 1
    picture = columns("devices", labels, [count for _, count in found.steps], "devices")
    rows = ((name, count) for name, count in found.longest)
    return (
        f'<h2>Device backlog</h2><p class="about">{found.devices} devices, {found.connected} connected; '
        f"{found.letters} letters wait, {found.dropped} were dropped above the limit. Devices by letters that wait:</p>"
        f"{picture}"
        f"{table(('longest inboxes', '#letters'), rows)}"
    )


def steps(history: History) -> list[datetime]:
    """Every step of time from the first to the last, those without a message included."""
    known = [each.at for each in history.volumes]
    count = round((max(known) - min(known)) / history.step) + 1
    return [min(known) + history.step * number for number in range(count)]


def table(names: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table; a column whose name starts with `#` holds numbers."""
    kinds = [' class="n"' if name.startswith("#") else "" for name in names]
    head = "".join(f"<th{kind}>{escape(name.removeprefix('#'))}</th>" for name, kind in zip(names, kinds, strict=True))
    body = "".join(
        "<tr>"
        + "".join(f"<td{kind}>{escape(cell(value))}</td>" for value, kind in zip(row, kinds, strict=True))
        + "</tr>"
        for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>" if body else ""


def cell(value: object) -> str:
    """One value for people."""
    return f"{value:,}".replace(",", " ") if isinstance(value, int) else str(value)


def when(moment: datetime) -> str:
    """A time for people."""
    return moment.strftime("%Y-%m-%d %H:%M:%S")


def span(value: timedelta) -> str:
    """A time span for people, one unit."""
    seconds = value.total_seconds()
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s" if seconds >= 1 or seconds == 0 else f"{seconds * 1000:.3g} ms"
