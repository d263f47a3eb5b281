"""HTML that cannot contain foreign markup: every text is escaped, unless it was made here."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

VOID: Final = ("input", "br", "link", "meta", "hr")

IDS: Final = frozenset({"id", "partition/stream id", "stream id", "message id", "member", "process", "owner", "leader"})
"""Columns whose values stay on one line where there is room: a break would look like the end of one."""

Content = Any
"""Text, a number, `Html`, or an iterable of these. None is nothing."""


class Html(str):
    """Markup."""

    __slots__ = ()


def escaped(content: Content) -> Html:
    """Content as markup."""
    if content is None:
        return Html("")
    if isinstance(content, Html):
        return content
    if isinstance(content, str | int | float):
        return Html(html.escape(str(content)))
    return Html("".join(map(escaped, content)))


def tag(kind: str, /, *content: Content, **attributes: Any) -> Html:
    """An element. `class_` is class, `data_key` is data-key; True is an attribute without a value, None is none."""
    parts = [kind]
    for key, value in attributes.items():
        if value is not None and value is not False:
            label = key.rstrip("_").replace("_", "-")
            parts.append(label if value is True else f'{label}="{html.escape(str(value))}"')
    head = f"<{' '.join(parts)}>"
    return Html(head if kind in VOID else f"{head}{escaped(content)}</{kind}>")


def link(text: Content, url: str) -> Html:
    """A link."""
    return tag("a", text, href=url)


@dataclass(frozen=True, slots=True)
class Row:
    """A line of a table; `key` names it among the others."""

    key: str
    cells: tuple[Content, ...]
    mark: str = ""


@dataclass(slots=True)
class Live:
    """The parts of a page that are sent again when they have changed, by their id."""

    parts: dict[str, Html] = field(default_factory=dict)
    orders: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def part(self, name: str, *content: Content, element: str = "div", **attributes: Any) -> Html:
        """An element that is sent again as a whole."""
        self.parts[name] = made = tag(element, *content, id=name, **attributes)
        return made

    def table(self, name: str, columns: Sequence[str], rows: Iterable[Row], nothing: str) -> Html:
        """A table. Only its changed rows are sent again, and all of it when rows come, go or move."""
        shown = list(rows)
        for row in shown:
            self.parts[f"{name}:{row.key}"] = as_row(columns, row, f"{name}:{row.key}")
        self.orders[name] = tuple(row.key for row in shown)
        made = table(columns, shown, nothing, name=name)
        self.parts[name] = made
        return made

    def changes(self, before: Live) -> dict[str, Html]:
        """The parts that a browser must replace if it shows `before`."""
        whole = {name for name, order in self.orders.items() if before.orders.get(name) != order}
        changed = {}
        for name, made in self.parts.items():
            of_table = name.partition(":")[0] if ":" in name else None
            if name in self.orders:
                if name in whole:
                    changed[name] = made
            elif of_table not in whole and before.parts.get(name) != made:
                changed[name] = made
        return changed


def table(columns: Sequence[str], rows: Sequence[Row], nothing: str, name: str | None = None) -> Html:
    """A table; a column that starts with `#` holds numbers."""
    if not rows:
        return tag("div", tag("p", nothing, class_="nothing"), id=name)
    heads = [
        tag("th", each.removeprefix("#"), class_="n" if each.startswith("#") else None) if each else tag("td")
        for each in columns
    ]
    body = [as_row(columns, row, f"{name}:{row.key}" if name else None) for row in rows]
    made = tag("table", tag("thead", tag("tr", heads)), tag("tbody", body))
    return tag("div", made, id=name, class_="wide")


def as_row(columns: Sequence[str], row: Row, name: str | None) -> Html:
    """One line. On a narrow screen each cell shows the name of its column."""
    cells = [
        tag(
            "td",
            cell,
            class_="n" if column.startswith("#") else "id" if column in IDS else None,
            data_label=column.removeprefix("#"),
        )
        for column, cell in zip(columns, row.cells, strict=True)
    ]
    return tag("tr", cells, id=name, class_=row.mark or None)


def about(values: dict[str, Content]) -> Html:
    """A list of names and values; empty ones are left out."""
    return tag("dl", [(tag("dt", name), tag("dd", value)) for name, value in values.items() if value not in ("", None)])


def block(text: str, kind: str) -> Html:
    """Lines of text as they are."""
    return tag("pre", text, **{f"data_{kind}": True})


def progress_bar(part: float, label: str) -> Html:
    """A bar with its percent; `part` is of 1, `label` says of what."""
    percent = f"{int(part * 100)} %"
    shown = tag("progress", value=f"{part:.4f}", max="1", aria_label=f"{percent} of {label}")
    return tag("span", shown, f" {percent}", class_="progress")


def text_field(name: str, label: str, value: str = "", **attributes: Any) -> Html:
    """An input with its label."""
    return tag("label", label, tag("input", name=name, value=value, **attributes))


def choice(name: str, label: str, options: Iterable[tuple[str, str]], value: str) -> Html:
    """A list to choose one from."""
    made = [tag("option", text, value=each, selected=each == value) for each, text in options]
    return tag("label", label, tag("select", made, name=name))


def button(text: str, *, danger: bool = False, **attributes: Any) -> Html:
    """A button that sends its form."""
    return tag("button", text, class_="danger" if danger else None, **attributes)


def hidden(values: Iterable[tuple[str, str]]) -> Html:
    """Values that a form sends without showing them."""
    return escaped(tag("input", type="hidden", name=name, value=value) for name, value in values)
