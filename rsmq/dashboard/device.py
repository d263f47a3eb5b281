"""Devices: what waits for whom, when they were seen, what was dropped."""

from __future__ import annotations

from datetime import datetime

from nicegui import ui
from nicegui.events import GenericEventArguments

from rsmq.dashboard.desk import MOST_DEVICES, as_text
from rsmq.dashboard.frame import Frame, Row, clicked, confirmed, fill, number, table
from rsmq.dashboard.message import facts, payload
from rsmq.errors import Malformed, RsmqError
from rsmq.persistence import Device, Letter


class Register:
    """Some devices, or the one that was asked for: there may be millions."""

    def __init__(self, frame: Frame) -> None:
        self._frame = frame
        with ui.row().classes("items-end"):
            self._name = ui.input("device id")
            self._waiting = ui.checkbox("only with letters", value=False)
            ui.button("show", on_click=self.load).props("flat")
        self._count = ui.label()
        columns = ["device", "#backlog", "connected", "seen", "#dropped", "#expired", "#late"]
        self._table = table(columns)
        self._table.on("rowClick", self._open)
        ui.label("A click shows what waits. Looking delivers nothing.").classes("text-sm opacity-70")

    async def load(self) -> None:
        """Read and show them."""
        try:
            devices, is_more = await self._found()
        except RsmqError as error:
            ui.notify(str(error), type="negative")
            return
        self._count.text = f"{len(devices)} devices" + (f", there are more than {MOST_DEVICES}" if is_more else "")
        fill(self._table, [row_of(device) for device in devices])

    async def _found(self) -> tuple[list[Device], bool]:
        if not self._name.value:
            return await self._frame.desk.devices(only_waiting=bool(self._waiting.value))
        device = await self._frame.desk.device(self._name.value)
        return ([] if device is None else [device]), False

    async def _open(self, event: GenericEventArguments) -> None:
        """The oldest letters of one device, and the way to delete all of them."""
        desk, client_id = self._frame.desk, clicked(event)
        try:
            device, letters = await desk.device(client_id), await desk.letters(client_id)
        except RsmqError as error:
            ui.notify(str(error), type="negative")
            return
        with ui.dialog(value=True) as dialog, ui.card().classes("max-w-3xl"):
            facts({"device": client_id, "waiting": "" if device is None else number(device.backlog)})
            for letter in letters:
                ui.label(about(letter)).classes("text-sm opacity-70")
                payload(text_of(letter))
            with ui.row():
                ui.button("close", on_click=dialog.close).props("flat")
                if desk.allow_changes and device is not None:

                    async def purge() -> None:
                        dialog.close()
                        await self._purge(client_id)

                    ui.button("purge the inbox", on_click=purge, color="negative")

    async def _purge(self, client_id: str) -> None:
        if not await confirmed(f"Delete all letters that wait for device {client_id!r} for good?", "delete"):
            return
        try:
            ui.notify(f"deleted {await self._frame.desk.purge_device(client_id)}")
        except RsmqError as error:
            ui.notify(str(error), type="negative")
        await self.load()


def row_of(device: Device) -> Row:
    """A line of the table."""
    return {
        "id": device.client_id, "device": device.client_id, "backlog": number(device.backlog),
        "connected": f"{moment(device.connected_at)} by {device.gateway}" if device.gateway else "no",
        "seen": moment(device.seen_at) or "never", "dropped": number(device.dropped),
        "expired": number(device.expired), "late": number(device.late),
    }  # fmt: skip


def about(letter: Letter) -> str:
    """Number, time and topic, as far as they can be read."""
    try:
        at = "received" if letter.is_received else moment(letter.timestamp)
        return f"{letter.seq} {at} {letter.topic}"
    except Malformed:
        return str(letter.seq)


def text_of(letter: Letter) -> str:
    """Its payload for a person."""
    try:
        return as_text(letter.data)
    except Malformed as error:
        return f"(unreadable: {error})"


def moment(at: datetime | None) -> str:
    """To the second."""
    return "" if at is None else at.strftime("%Y-%m-%d %H:%M:%SZ")
