"""What all pages share: the navigation bar, the banner of an outage, tables, and the format of numbers.

Everything that comes from the queues is put on a page as text, in a label or a table's cell: the browser never reads it
as markup.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote

from fastapi import Request
from nicegui import ui
from nicegui.events import GenericEventArguments

from rsmq.dashboard.queries import EVERY, Queries
from rsmq.errors import RsmqError

PAGE: Final = 25
PAGES: Final = (("Overview", "/"), ("Members", "/members"), ("Dead letters", "/dead-letters"), ("Devices", "/devices"))
LINK_CELL: Final = '<q-td :props="props"><a class="text-primary" :href="props.row.url">{{ props.value }}</a></q-td>'

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class PageLayout:
    """One open page. `prefix` is the path that the dashboard is mounted at."""

    queries: Queries
    prefix: str

    def url(self, *parts: str) -> str:
        """The address of a page. Names are escaped: other programs may have chosen them."""
        return self.prefix + self.path(*parts)

    def path(self, *parts: str) -> str:
        """The same without the prefix, for NiceGUI functions that add it themselves."""
        return "/" + "/".join(quote(part, safe="") for part in parts)

    def live(self, draw: Callable[[], None]) -> None:
        """Draw now and again each second, from the poller's newest board."""

        def redraw() -> None:
            self.queries.poller.touch()
            draw()

        redraw()
        ui.timer(EVERY, redraw)


@contextmanager
def page_layout(queries: Queries, request: Request, title: str) -> Iterator[PageLayout]:
    """The page around its content: bar, banner and title."""
    prefix = request.headers.get("X-Forwarded-Prefix", "") + request.scope.get("root_path", "")
    ui.page_title(f"{title} · rsmq")
    ui.dark_mode(None)
    with ui.header().classes("items-center gap-6 py-2"):
        ui.label("rsmq").classes("text-lg font-bold")
        for name, path in PAGES:
            ui.link(name, path).classes("text-white no-underline")
        ui.space()
        ui.label(f"prefix {queries.prefix}").classes("text-sm opacity-70")
        ui.label("changes allowed" if queries.allow_changes else "read-only").classes("text-sm opacity-70")
    trouble = ui.label().classes("w-full bg-red text-white p-2").bind_visibility_from(queries.poller, "trouble")
    trouble.bind_text_from(queries.poller, "trouble")
    with ui.column().classes("w-full max-w-screen-xl mx-auto gap-4"):
        ui.label(title).classes("text-2xl")
        yield PageLayout(queries, prefix)


@contextmanager
def notified() -> Iterator[None]:
    """Show an error of rsmq in the page instead of raising it."""
    try:
        yield
    except RsmqError as error:
        ui.notify(str(error), type="negative")


def table(columns: Sequence[str], *, link: str | None = None, title: str | None = None) -> ui.table:
    """A table; a column that starts with `#` holds numbers, the cells of `link` lead to the row's `url`."""
    described = []
    for column in columns:
        name, align = column.removeprefix("#"), "right" if column.startswith("#") else "left"
        described.append({"name": name, "label": name, "field": name, "align": align, "sortable": True})
    found = ui.table(columns=described, rows=[], row_key="row", pagination=PAGE, title=title)
    found.classes("w-full").props("dense flat bordered")
    if link is not None:
        found.add_slot(f"body-cell-{link}", LINK_CELL)
    return found


def fill(target: ui.table, rows: Sequence[Row]) -> None:
    """Show these rows. Rows that are shown already are not sent again."""
    numbered = [{"row": number, **row} for number, row in enumerate(rows)]
    if target.rows != numbered:
        target.rows = numbered
        is_one_page = 0 < len(rows) <= PAGE  # without a footer that offers nothing
        target.props("hide-bottom") if is_one_page else target.props(remove="hide-bottom")


def clicked(event: GenericEventArguments) -> str:
    """The id of the clicked row. A browser may send anything."""
    row = event.args[1] if isinstance(event.args, list) and len(event.args) > 1 else None
    return str(row.get("id", "")) if isinstance(row, dict) else ""


async def confirmed(question: str, word: str) -> bool:
    """Ask in a dialog. True only if the button with the word was clicked."""
    with ui.dialog(value=True) as dialog, ui.card():
        ui.label(question)
        with ui.row():
            ui.button("cancel", on_click=lambda: dialog.submit(False)).props("flat")
            ui.button(word, on_click=lambda: dialog.submit(True), color="negative")
    answer = await dialog
    dialog.delete()
    return bool(answer)
