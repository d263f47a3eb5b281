"""What all pages have in common: the bar, the banner of an outage, tables, and how numbers are written.

Everything that comes from the queues is put on a page as text: as a label, or as a table's cell, which the browser
never reads as markup.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final
from urllib.parse import quote

from fastapi import Request
from nicegui import ui
from nicegui.events import GenericEventArguments

from rsmq.dashboard.desk import Desk

EVERY: Final = 1.0
PAGE: Final = 25
PAGES: Final = (("Overview", "/"), ("Members", "/members"), ("Dead letters", "/dead-letters"), ("Devices", "/devices"))
LINK_CELL: Final = '<q-td :props="props"><a class="text-primary" :href="props.row.url">{{ props.value }}</a></q-td>'

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Frame:
    """One open page. `prefix` is where the dashboard is mounted."""

    desk: Desk
    prefix: str

    def url(self, *parts: str) -> str:
        """The address of a page; names are escaped, other programs may have chosen them."""
        return self.prefix + self.path(*parts)

    def path(self, *parts: str) -> str:
        """The same for what puts the prefix before it by itself."""
        return "/" + "/".join(quote(part, safe="") for part in parts)

    def live(self, draw: Callable[[], None]) -> None:
        """Draw now and again each second, from what the watcher saw last."""
        self.desk.watcher.touch()
        draw()

        def again() -> None:
            self.desk.watcher.touch()
            draw()

        ui.timer(EVERY, again)


@contextmanager
def framed(desk: Desk, request: Request, title: str) -> Iterator[Frame]:
    """The page around its content."""
    prefix = request.headers.get("X-Forwarded-Prefix", "") + request.scope.get("root_path", "")
    ui.page_title(f"{title} · rsmq")
    ui.dark_mode(None)
    with ui.header().classes("items-center gap-6 py-2"):
        ui.label("rsmq").classes("text-lg font-bold")
        for name, path in PAGES:
            ui.link(name, path).classes("text-white no-underline")
        ui.space()
        ui.label(f"prefix {desk.prefix}").classes("text-sm opacity-70")
        ui.label("changes allowed" if desk.allow_changes else "read-only").classes("text-sm opacity-70")
    trouble = ui.label().classes("w-full bg-red text-white p-2").bind_visibility_from(desk.watcher, "trouble")
    trouble.bind_text_from(desk.watcher, "trouble")
    with ui.column().classes("w-full max-w-screen-xl mx-auto gap-4"):
        ui.label(title).classes("text-2xl")
        yield Frame(desk, prefix)


def table(columns: Sequence[str], *, link: str | None = None, title: str | None = None) -> ui.table:
    """A table; a column that starts with `#` holds numbers, the cells of `link` lead to the row's `url`."""
    found = (
        ui.table(
            columns=[
                {
                    "name": column.removeprefix("#"),
                    "label": column.removeprefix("#"),
                    "field": column.removeprefix("#"),
                    "align": "right" if column.startswith("#") else "left",
                    "sortable": True,
                }
                for column in columns
            ],
            rows=[],
            row_key="row",
            pagination=PAGE,
            title=title,
        )
        .classes("w-full")
        .props("dense flat bordered")
    )
    if link is not None:
        found.add_slot(f"body-cell-{link}", LINK_CELL)
    return found


def fill(target: ui.table, rows: Sequence[Row]) -> None:
    """Show these rows; what is shown already is not sent again."""
    numbered = [{"row": number, **row} for number, row in enumerate(rows)]
    if target.rows != numbered:
        target.rows = numbered
        is_one_page = 0 < len(rows) <= PAGE  # without a footer that offers nothing
        target.props("hide-bottom") if is_one_page else target.props(remove="hide-bottom")


def clicked(event: GenericEventArguments) -> str:
    """The id in the row of a table that was clicked; a browser may send anything."""
    row = event.args[1] if isinstance(event.args, list) and len(event.args) > 1 else None
    return str(row.get("id", "")) if isinstance(row, dict) else ""


async def confirmed(question: str, word: str) -> bool:
    """Ask; anything but the word is no."""
    with ui.dialog(value=True) as dialog, ui.card():
        ui.label(question)
        with ui.row():
            ui.button("cancel", on_click=lambda: dialog.submit(False)).props("flat")
            ui.button(word, on_click=lambda: dialog.submit(True), color="negative")
    answer = await dialog
    dialog.delete()
    return bool(answer)


def number(value: int | None) -> str:
    """Unknown is a question mark."""
    return "?" if value is None else f"{value:,}".replace(",", " ")


def rate(value: float | None) -> str:
    """Messages a second."""
    return "–" if value is None else f"{value:.1f}" if 0 < value < 10 else number(round(value))


def age(value: timedelta | None) -> str:
    """A span, in one unit."""
    if value is None:
        return "–"
    seconds = value.total_seconds()
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1000:.{0 if seconds >= 0.01 else 1}f} ms"
