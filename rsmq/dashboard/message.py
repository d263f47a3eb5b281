"""The message browser: a partition, newest first, a page at a time, also by key or time. It consumes nothing."""

from __future__ import annotations

from datetime import UTC, datetime

from nicegui import ui
from nicegui.events import GenericEventArguments, ValueChangeEventArguments

from rsmq.dashboard.layout import PageLayout, clicked, fill, table
from rsmq.dashboard.queries import MOST_MESSAGES, PREVIEW, Entry
from rsmq.errors import ConfigError
from rsmq.model.clock import epoch_ms


class Browser:
    """One open browser. `_starts` has the first id of this page and of the pages before it."""

    def __init__(self, layout: PageLayout, topic: str, partitions: int) -> None:
        self._layout, self._topic = layout, topic
        self._partition = 0
        self._starts = ["+"]
        self._entries: list[Entry] = []
        with ui.row().classes("items-center"):
            numbers = list(range(partitions))
            self._select = ui.select(numbers, value=0, label="partition", on_change=self._choose).classes("w-32")
            self._key = ui.input("key").classes("w-32").on("keydown.enter", self._show)
            self._until = moment_input("stored before (UTC)")
            ui.button("show", on_click=self._show).props("flat")
            ui.button("newest", on_click=self._newest).props("flat")
            self._newer_button = ui.button("newer", on_click=self._newer).props("flat")
            self._older_button = ui.button("older", on_click=self._older).props("flat")
        self._table = table(["id", "stored", "key", "payload"])
        self._table.on("rowClick", self._open)
        ui.label("Click a message to see all of it. This consumes nothing.").classes("text-sm opacity-70")

    async def load(self) -> None:
        """Read the page and show it."""
        queries, key = self._layout.queries, self._key.value or ""
        self._entries = await queries.messages(self._topic, self._partition, self._starts[-1], key)
        rows = [
            {"id": each.id, "stored": each.at, "key": each.key[:PREVIEW], "payload": each.text[:PREVIEW]}
            for each in self._entries
        ]
        fill(self._table, rows)
        self._older_button.set_enabled(len(self._entries) == MOST_MESSAGES)
        self._newer_button.set_enabled(len(self._starts) > 1)

    async def _choose(self, event: ValueChangeEventArguments[int]) -> None:
        self._partition = event.value
        await self._show()

    async def _show(self) -> None:
        """Apply the fields. A key selects its partition."""
        if self._key.value:
            self._partition = await self._layout.queries.partition_of(self._topic, self._key.value)
            self._select.value = self._partition
        try:
            until = moment_of(self._until)
        except ConfigError as error:
            ui.notify(str(error), type="negative")
            return
        self._starts = ["+" if until is None else f"{epoch_ms(until)}-0"]
        await self.load()

    async def _newest(self) -> None:
        self._key.value = self._until.value = ""
        await self._show()

    async def _older(self) -> None:
        self._starts.append(self._entries[-1].id)
        await self.load()

    async def _newer(self) -> None:
        self._starts.pop()
        await self.load()

    def _open(self, event: GenericEventArguments) -> None:
        found = next((each for each in self._entries if each.id == clicked(event)), None)
        if found is None:
            return
        with ui.dialog(value=True) as dialog, ui.card().classes("max-w-3xl"):
            values({"id": found.id, "stored": found.at, "key": found.key, "headers": found.headers})
            payload(found.text)
            ui.button("close", on_click=dialog.close).props("flat")


def moment_input(label: str) -> ui.input:
    """A field for a time in UTC; empty means none."""
    return ui.input(label).props("type=datetime-local stack-label step=1").classes("w-56")


def moment_of(field: ui.input) -> datetime | None:
    """The time in the field; a browser may send anything. Raises ConfigError."""
    try:
        return datetime.fromisoformat(field.value).replace(tzinfo=UTC) if field.value else None
    except (TypeError, ValueError):
        raise ConfigError(f"{str(field.value)[:40]!r} is not a valid time") from None


def values(about: dict[str, str]) -> None:
    """A line for each value that is not empty."""
    for name, value in about.items():
        if value:
            with ui.row().classes("w-full gap-2 no-wrap"):
                ui.label(name).classes("w-24 shrink-0 opacity-70")
                ui.label(value).classes("whitespace-pre-wrap break-all")


def payload(text: str) -> None:
    """A payload as text, never as markup."""
    block(text).props("data-payload")


def block(text: str) -> ui.label:
    """Lines of text as they are."""
    return ui.label(text).classes("w-full font-mono text-sm whitespace-pre-wrap break-all border p-2")
