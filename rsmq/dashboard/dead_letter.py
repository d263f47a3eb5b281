"""Dead letters: look at them, choose some, and where it is allowed replay or purge them. None is edited."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import timedelta

from nicegui import ui
from nicegui.events import GenericEventArguments

from rsmq.dashboard.desk import MOST_LETTERS, PREVIEW, as_text
from rsmq.dashboard.frame import Frame, Row, clicked, confirmed, fill, table
from rsmq.dashboard.message import facts, moment_input, moment_of, payload
from rsmq.dlq import DeadLetter, Selection, read_fields
from rsmq.errors import RsmqError

Act = Callable[[], Awaitable[int]]


def graveyards(frame: Frame) -> None:
    """How many each group has."""
    found = table(["group", "topic", "#dead letters"], link="group")

    def rows() -> list[Row]:
        return [
            {"group": group.name, "topic": group.topic, "dead letters": group.dead_letters,
             "url": frame.url("dead-letters", group.topic, group.name)}
            for group in frame.desk.watcher.board.groups
            if group.dead_letters
        ]  # fmt: skip

    frame.live(lambda: fill(found, rows()))


class Graveyard:
    """The dead letters of one group, as far as they are meant by what was typed."""

    def __init__(self, frame: Frame, topic: str, group: str) -> None:
        self._frame, self._topic, self._group = frame, topic, group
        with ui.row().classes("items-end"):
            self._reason = ui.input("reason").classes("w-32")
            self._error = ui.input("error contains")
            self._key = ui.input("key").classes("w-32")
            self._field = ui.input("payload field", placeholder="shop=7")
            self._since, self._until = moment_input("died since (UTC)"), moment_input("died before (UTC)")
            ui.button("show", on_click=self.load).props("flat")
        if frame.desk.allow_changes:
            with ui.row().classes("items-end"):
                self._rate = ui.number("replay at most a second", min=0, placeholder="no limit").classes("w-48")
                ui.button("replay all of these", on_click=self._replay_selected)
                ui.button("purge the group's", on_click=self._purge, color="negative")
        self._count = ui.label()
        self._table = table(["id", "at", "reason", "#attempts", "key", "error"])
        self._table.on("rowClick", self._open)

    async def load(self) -> None:
        """Read and show those that are meant."""
        try:
            letters, is_more = await self._frame.desk.dead_letters(self._topic, self._group, self._wanted())
        except RsmqError as error:
            ui.notify(str(error), type="negative")
            return
        more = f", the oldest {MOST_LETTERS} are shown" if is_more else ""
        self._count.text = f"{len(letters)} dead letters{more}"
        fill(self._table, [row_of(letter) for letter in letters])

    def _wanted(self) -> Selection:
        return Selection(
            reasons=tuple((self._reason.value or "").split()),
            error=self._error.value or None,
            since=moment_of(self._since),
            until=moment_of(self._until),
            key=self._key.value or None,
            where=read_fields([self._field.value] if self._field.value else []),
        )

    async def _open(self, event: GenericEventArguments) -> None:
        letter = await self._frame.desk.dead_letter(self._topic, self._group, clicked(event))
        if letter is None:
            ui.notify("it is not there any more")
            return
        with ui.dialog(value=True) as dialog, ui.card().classes("max-w-3xl"):
            facts(
                {
                    "id": letter.id, "reason": letter.reason, "error": letter.error,
                    "attempts": str(letter.attempts), "origin": letter.origin, "member": letter.member,
                    "message id": letter.message_id, "key": letter.key or "",
                    "headers": "\n".join(f"{name}: {value}" for name, value in letter.headers.items()),
                }
            )  # fmt: skip
            payload(as_text(letter.data))
            with ui.row():
                ui.button("close", on_click=dialog.close).props("flat")
                if self._frame.desk.allow_changes:

                    async def replay() -> None:
                        dialog.close()
                        await self._do(
                            lambda: self._frame.desk.replay(self._topic, self._group, [letter.id]), "replayed"
                        )

                    ui.button("replay", on_click=replay)

    async def _replay_selected(self) -> None:
        try:
            wanted, rate = self._wanted(), self._rate.value or 0
        except RsmqError as error:
            ui.notify(str(error), type="negative")
            return
        every = timedelta(seconds=1 / rate if rate > 0 else 0)
        pace = f", at most {rate:g} a second: it goes on when this page is closed" if every else ""
        which = "all dead letters" if wanted.is_all else "all dead letters that are chosen above"
        if await confirmed(f"Replay {which} of {self._group} of {self._topic}, to this group only{pace}?", "replay"):
            desk = self._frame.desk
            await self._do(lambda: desk.replay_selected(self._topic, self._group, wanted, every), "replayed")

    async def _purge(self) -> None:
        text = f"Delete all dead letters of {self._group} of {self._topic} for good, also those that are not shown?"
        if await confirmed(text, "delete"):
            await self._do(lambda: self._frame.desk.purge(self._topic, self._group), "deleted")

    async def _do(self, act: Act, word: str) -> None:
        failed = False
        try:
            text = f"{word} {await act()}"
        except RsmqError as error:
            text, failed = str(error), True
        if self._table.client.has_socket_connection:  # it may have taken long, and the page be closed
            ui.notify(text, type="negative" if failed else None)
            await self.load()


def row_of(letter: DeadLetter) -> Row:
    """A line of the table."""
    return {
        "id": letter.id, "at": letter.at.strftime("%Y-%m-%d %H:%M:%S"), "reason": letter.reason,
        "attempts": letter.attempts, "key": (letter.key or "")[:PREVIEW], "error": letter.error[:PREVIEW],
    }  # fmt: skip
