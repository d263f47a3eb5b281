"""The message browser: a partition, newest first, a page at a time, perhaps of one key or before a time. It consumes
nothing."""

from __future__ import annotations

from datetime import UTC, datetime

from nicegui import ui
from nicegui.events import GenericEventArguments, ValueChangeEventArguments

from rsmq.clock import epoch_ms
from rsmq.dashboard.desk import MOST_MESSAGES, PREVIEW, Entry
from rsmq.dashboard.frame import Frame, clicked, fill, table
from rsmq.errors import ConfigError


class Browser:
    """One open browser. `_before` is where its page begins; the ids of earlier pages are the way back."""

    def __init__(self, frame: Frame, topic: str, partitions: int) -> None:
        self._frame, self._topic = frame, topic
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
        ui.label("A click shows a message whole. Looking consumes nothing.").classes("text-sm opacity-70")

    async def load(self) -> None:
        """Read the page and show it."""
        desk, key = self._frame.desk, self._key.value or ""
        self._entries = await desk.messages(self._topic, self._partition, self._starts[-1], key)
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
        """What was typed: a key leads to its partition."""
        if self._key.value:
            self._partition = await self._frame.desk.partition_of(self._topic, self._key.value)
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
            facts({"id": found.id, "stored": found.at, "key": found.key, "headers": found.headers})
            payload(found.text)
            ui.button("close", on_click=dialog.close).props("flat")


def moment_input(label: str) -> ui.input:
    """A field for a time in UTC; empty means none."""
    return ui.input(label).props("type=datetime-local stack-label step=1").classes("w-56")


def moment_of(field: ui.input) -> datetime | None:
    """What was chosen there; a browser may send anything. Raises ConfigError."""
    try:
        return datetime.fromisoformat(field.value).replace(tzinfo=UTC) if field.value else None
    except (TypeError, ValueError):
        raise ConfigError(f"{str(field.value)[:40]!r} is no time") from None


def facts(about: dict[str, str]) -> None:
    """What is known, a line each; nothing for what is empty."""
    for name, value in about.items():
        if value:
            with ui.row().classes("w-full gap-2 no-wrap"):
                ui.label(name).classes("w-24 shrink-0 opacity-70")
                ui.label(value).classes("whitespace-pre-wrap break-all")


def payload(text: str) -> None:
    """As text, whatever it is."""
    ui.label(text).classes("w-full font-mono text-sm whitespace-pre-wrap break-all border p-2").props("data-payload")
