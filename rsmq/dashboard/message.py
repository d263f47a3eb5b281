"""The message browser: a partition, newest first, a page at a time. It consumes nothing."""

from __future__ import annotations

from nicegui import ui
from nicegui.events import GenericEventArguments, ValueChangeEventArguments

from rsmq.dashboard.desk import MOST_MESSAGES, PREVIEW, Entry
from rsmq.dashboard.frame import Frame, clicked, fill, table


class Browser:
    """One open browser. `_before` is where its page begins; the ids of earlier pages are the way back."""

    def __init__(self, frame: Frame, topic: str, partitions: int) -> None:
        self._frame, self._topic = frame, topic
        self._partition = 0
        self._starts = ["+"]
        self._entries: list[Entry] = []
        with ui.row().classes("items-center"):
            numbers = list(range(partitions))
            ui.select(numbers, value=0, label="partition", on_change=self._choose).classes("w-32")
            ui.button("newest", on_click=self._newest).props("flat")
            self._newer_button = ui.button("newer", on_click=self._newer).props("flat")
            self._older_button = ui.button("older", on_click=self._older).props("flat")
        self._table = table(["id", "stored", "key", "payload"])
        self._table.on("rowClick", self._open)
        ui.label("A click shows a message whole. Looking consumes nothing.").classes("text-sm opacity-70")

    async def load(self) -> None:
        """Read the page and show it."""
        self._entries = await self._frame.desk.messages(self._topic, self._partition, self._starts[-1])
        rows = [
            {"id": each.id, "stored": each.at, "key": each.key[:PREVIEW], "payload": each.text[:PREVIEW]}
            for each in self._entries
        ]
        fill(self._table, rows)
        self._older_button.set_enabled(len(self._entries) == MOST_MESSAGES)
        self._newer_button.set_enabled(len(self._starts) > 1)

    async def _choose(self, event: ValueChangeEventArguments[int]) -> None:
        self._partition = event.value
        await self._newest()

    async def _newest(self) -> None:
        self._starts = ["+"]
        await self.load()

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
