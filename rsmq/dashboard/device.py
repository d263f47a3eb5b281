"""Devices: what waits for whom, when they were seen, what was dropped."""

from __future__ import annotations

from datetime import datetime

from nicegui import ui

from rsmq.dashboard.desk import MOST_DEVICES
from rsmq.dashboard.frame import Frame, Row, fill, number, table
from rsmq.errors import RsmqError
from rsmq.persistence import Device


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


def row_of(device: Device) -> Row:
    """A line of the table."""
    return {
        "device": device.client_id, "backlog": number(device.backlog),
        "connected": f"{moment(device.connected_at)} by {device.gateway}" if device.gateway else "no",
        "seen": moment(device.seen_at) or "never", "dropped": number(device.dropped),
        "expired": number(device.expired), "late": number(device.late),
    }  # fmt: skip


def moment(at: datetime | None) -> str:
    """To the second."""
    return "" if at is None else at.strftime("%Y-%m-%d %H:%M:%SZ")
