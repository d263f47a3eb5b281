"""The page of devices: backlog, last seen, dropped letters, and the letters of one inbox."""

from __future__ import annotations

from nicegui import ui
from nicegui.events import GenericEventArguments

from rsmq.dashboard.layout import PageLayout, Row, clicked, confirmed, fill, notified, table
from rsmq.dashboard.message import payload, values
from rsmq.dashboard.queries import MOST_DEVICES, as_text
from rsmq.errors import Malformed, RsmqError
from rsmq.inspector.text import timestamp
from rsmq.model.words import count, number
from rsmq.persistence import Device, Letter


class DeviceTable:
    """Some devices, or the one that was asked for: there may be millions."""

    def __init__(self, layout: PageLayout) -> None:
        self._layout = layout
        with ui.row().classes("items-end"):
            self._name = ui.input("device id")
            self._waiting = ui.checkbox("only with letters", value=False)
            ui.button("show", on_click=self.load).props("flat")
        self._count = ui.label()
        self._table = table(["device", "#backlog", "connected", "seen", "#dropped", "#expired", "#late"])
        self._table.on("rowClick", self._open)
        ui.label("Click a device to see its letters. This delivers nothing.").classes("text-sm opacity-70")

    async def load(self) -> None:
        """Read and show them."""
        with notified():
            devices, is_more = await self._found()
            self._count.text = count(len(devices), "device") + (
                f", there are more than {MOST_DEVICES}" if is_more else ""
            )
            fill(self._table, [row_of(device) for device in devices])

    async def _found(self) -> tuple[list[Device], bool]:
        if not self._name.value:
            return await self._layout.queries.devices(only_waiting=bool(self._waiting.value))
        device = await self._layout.queries.device(self._name.value)
        return ([] if device is None else [device]), False

    async def _open(self, event: GenericEventArguments) -> None:
        """Show the oldest letters of one device, with a button that deletes all of them."""
        queries, client_id = self._layout.queries, clicked(event)
        try:
            device, letters = await queries.device(client_id), await queries.letters(client_id)
        except RsmqError as error:
            ui.notify(str(error), type="negative")
            return
        with ui.dialog(value=True) as dialog, ui.card().classes("max-w-3xl"):
            values({"device": client_id, "backlog": "" if device is None else number(device.backlog)})
            for letter in letters:
                ui.label(about(letter)).classes("text-sm opacity-70")
                payload(text_of(letter))
            with ui.row():
                ui.button("close", on_click=dialog.close).props("flat")
                if queries.allow_changes and device is not None:

                    async def purge() -> None:
                        dialog.close()
                        await self._purge(client_id)

                    ui.button("purge the inbox", on_click=purge, color="negative")

    async def _purge(self, client_id: str) -> None:
        if not await confirmed(f"Delete all letters that wait for device {client_id!r} for good?", "delete"):
            return
        with notified():
            ui.notify(f"deleted {count(await self._layout.queries.purge_device(client_id), 'letter')}")
        await self.load()


def row_of(device: Device) -> Row:
    """A row of the table."""
    return {
        "id": device.client_id, "device": device.client_id, "backlog": number(device.backlog),
        "connected": f"{timestamp(device.connected_at)} by {device.gateway}" if device.gateway else "no",
        "seen": timestamp(device.seen_at) or "never", "dropped": number(device.dropped),
        "expired": number(device.expired), "late": number(device.late),
    }  # fmt: skip


def about(letter: Letter) -> str:
    """A letter's number, time and topic; only the number if it cannot be read."""
    try:
        at = "received" if letter.is_received else timestamp(letter.timestamp)
        return f"{letter.seq} {at} {letter.topic}"
    except Malformed:
        return str(letter.seq)


def text_of(letter: Letter) -> str:
    """Its payload as text."""
    try:
        return as_text(letter.data)
    except Malformed as error:
        return f"(unreadable: {error})"
