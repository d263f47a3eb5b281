"""A report as one HTML page. It loads nothing, and all text from messages and keys is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Final

from rsmq.errors import RsmqError
from rsmq.model.words import count, duration, number
from rsmq.pipeline.report.charts import bars, columns, lines, short, stacked
from rsmq.pipeline.report.data import DeadLetterCause, GroupReport, InboxBacklog, ReportData, TrafficHistory, jain

TIME: Final = "%Y-%m-%d %H:%M:%S"
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
<p class="about"><b>Publishing</b> is the time from the message id (a UUIDv7, by the publisher's clock) to the stream
id (by the server's clock). A delayed message includes its delay, a replayed message its age, and differences between
the clocks show. Messages with other ids are not measured. <b>Waiting</b> is the age of the oldest message that a group
has not settled now. The queue does not record when a message was settled, so there is no distribution of that time.
Dead letters do record when they were given up. <b>Fairness</b> is Jain's index (1: even, 1/n: one member has
everything) over the live members of a group, by the window's messages in the partitions that each owns now. Under
shared distribution members own no partitions, so there is no index.</p>
"""


def page(data: ReportData) -> str:
    """The whole page as HTML."""
    body = "".join(sections(data))
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>rsmq report</title><style>{STYLE}</style><body>{body}</body></html>\n"
    )


def sections(data: ReportData) -> Iterator[str]:
    """The sections, the most important first."""
    yield header(data)
    yield cards(data)
    if data.history.messages:
        yield volume(data.history)
    if data.history.latencies:
        yield latency(data.history)
    if data.groups:
        yield groups(data.groups)
    yield deaths(data.deaths)
    if any(group.loads for group in data.groups):
        yield fairness(data.groups)
    if data.history.hot_keys or data.history.spreads:
        yield keys(data.history)
    if data.backlog is not None:
        yield backlog(data.backlog)
    cut = "".join(f'<p class="warn">{escape(text)}</p>' for text in data.cut)
    yield f"<h2>What the numbers mean</h2>{NOTES}{cut}<footer>Times are UTC. Made by rsmq pipeline report.</footer>"


def header(data: ReportData) -> str:
    """The title, the window and the sources."""
    first, last = data.history.first, data.history.last
    window = f"{first:{TIME}} to {last:{TIME}}" if first and last else "no message in the window"
    return (
        f"<h1>rsmq report</h1><p class='about'>{escape(window)}, from {escape(data.source)}; the server "
        f"{escape(data.server)} at {data.made_at:{TIME}}</p>"
    )


def cards(data: ReportData) -> str:
    """The most important numbers."""
    history = data.history
    waiting = max((group.waiting for group in data.groups if group.waiting is not None), default=None)
    shown = [
        (short(history.messages), "messages"),
        (f"{short(sum(volume.bytes for volume in history.volumes))}B", "keys and payloads"),
        (short(sum(death.letters for death in data.deaths)), "dead letters"),
        (
            short(sum(group.unread + group.pending + group.waiting_for_retry for group in data.groups)),
            "not settled now",
        ),
        ("–" if waiting is None else duration(waiting), "longest wait now"),
    ]
    if data.backlog is not None:
        shown.append(
            (
                short(data.backlog.letters),
                f"letters for {short(data.backlog.devices)} device{'' if data.backlog.devices == 1 else 's'}",
            )
        )
    inner = "".join(f'<div class="card"><b>{escape(value)}</b><span>{label}</span></div>' for value, label in shown)
    return f'<div class="cards">{inner}</div>'


def volume(history: TrafficHistory) -> str:
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


def latency(history: TrafficHistory) -> str:
    """Percentiles over time."""
    found = history.latencies
    times = [each.at for each in found]
    series = [("50 %", [e.p50 for e in found]), ("95 %", [e.p95 for e in found]), ("99 %", [e.p99 for e in found])]
    measured = sum(each.measured for each in found)
    return (
        f'<h2>Publishing</h2><p class="about">From creating a message to its entry in the stream, '
        f"{number(measured)} of {count(history.messages, 'message')}, by steps of {duration(history.step)}.</p>"
        f"{lines('latency', times, series, 'ms')}"
    )


def groups(found: Sequence[GroupReport]) -> str:
    """The messages that each group has not settled yet."""
    rows = (
        (f"{each.topic} / {each.name}", each.unread, each.pending, each.waiting_for_retry, each.dead_letters,
         "–" if each.waiting is None else duration(each.waiting), len(each.loads) or "–",
         "–" if each.jain is None else f"{each.jain:.3f}")
        for each in found
    )  # fmt: skip
    names = ("topic / group", "#not delivered", "#pending", "#retry", "#dead", "#waiting", "#members", "#Jain")
    return f"<h2>Groups now</h2>{table(names, rows)}"


def deaths(found: Sequence[DeadLetterCause]) -> str:
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
         *(duration(timedelta(seconds=seconds)) for seconds in each.given_up), each.example)
        for each in shown
    )  # fmt: skip
    names = ("topic / group", "reason", "#letters", "#given up after (median)", "#(95 %)", "most frequent error")
    return f"<h2>Dead letters</h2>{picture}{table(names, rows)}"


def fairness(found: Sequence[GroupReport]) -> str:
    """Messages by member, one chart for each group."""
    pictures = []
    for group in found:
        if group.loads:
            loads = sorted(group.loads, key=lambda load: -load.messages)[:20]
            labels = [f"{load.member} ({count(load.partitions, 'partition')})" for load in loads]
            drawn = bars(f"load-{group.topic}-{group.name}", labels, [load.messages for load in loads], "messages")
            pictures.append(
                f'<p class="about">{escape(group.topic)} / {escape(group.name)}: Jain {group.jain:.3f}</p>{drawn}'
            )
    return f"<h2>Fairness over members</h2>{''.join(pictures)}"


def keys(history: TrafficHistory) -> str:
    """The most frequent keys of each topic, and its partitions."""
    parts = []
    for topic, hot in groupby(history.hot_keys, key=lambda each: each.topic):
        found = list(hot)
        labels = [f"{each.key} ({each.share:.1%})" for each in found]
        parts.append(f'<p class="about">{escape(topic)}, the most frequent keys</p>')
        parts.append(bars(f"keys-{topic}", labels, [each.messages for each in found], "messages"))
    for spread in history.spreads:
        labels = [str(number) for number in spread.numbers]
        parts.append(f'<p class="about">{escape(spread.topic)} by partition: Jain {jain(spread.messages):.3f}</p>')
        parts.append(columns(f"spread-{spread.topic}", labels, spread.messages, "messages"))
    return f"<h2>Hot keys and partitions</h2>{''.join(parts)}"


def backlog(found: InboxBacklog) -> str:
    """Devices by the number of letters in their inboxes."""
    labels, low = [], 0
    for high, _ in found.steps:
        labels.append(f"over {low - 1}" if high is None else str(high) if low >= high else f"{low}–{high}")
        low = 0 if high is None else high + 1
    picture = columns("devices", labels, [devices for _, devices in found.steps], "devices")
    rows = ((name, letters) for name, letters in found.longest)
    return (
        f'<h2>Device backlog</h2><p class="about">{count(found.devices, "device")}, {found.connected} connected; '
        f"{count(found.letters, 'letter waits', 'letters wait')}, {found.dropped} dropped above the "
        f"limit. Devices by waiting letters:</p>{picture}{table(('longest inboxes', '#letters'), rows)}"
    )


def steps(history: TrafficHistory) -> list[datetime]:
    """The start of every interval from the first to the last, including those without messages."""
    known = [each.at for each in history.volumes]
    last = round((max(known) - min(known)) / history.step)
    return [min(known) + history.step * number for number in range(last + 1)]


def table(names: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table. A name that starts with `#` marks a column of numbers."""
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
    """One value as text."""
    return f"{value:,}".replace(",", " ") if isinstance(value, int) else str(value)


def write_page(data: ReportData, path: str) -> Path:
    """Write the page to a file of this machine, whole or not at all. Raises RsmqError."""
    target = Path(path).absolute()
    draft = target.with_name(f".{target.name}.draft")
    try:
        draft.write_text(page(data), encoding="utf-8")
        draft.replace(target)
    except OSError as error:
        raise RsmqError(f"{target} cannot be written: {error.strerror}") from None
    return target
