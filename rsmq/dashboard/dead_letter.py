"""The pages of dead letters: filter them, read one, and if changes are allowed replay or purge. None can be edited."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import timedelta

from nicegui import ui
from nicegui.events import GenericEventArguments

from rsmq.dashboard.layout import PageLayout, Row, clicked, confirmed, fill, notified, table
from rsmq.dashboard.message import block, moment_input, moment_of, payload, values
from rsmq.dashboard.queries import MOST_LETTERS, PREVIEW, as_text
from rsmq.dlq import DeadLetter, Selection, read_fields
from rsmq.errors import RsmqError
from rsmq.model.words import count


def dead_letter_tables(layout: PageLayout) -> None:
    """The number of dead letters of each group."""
    found = table(["group", "topic", "#dead letters"], link="group")

    def rows() -> list[Row]:
        return [
            {"group": group.name, "topic": group.topic, "dead letters": group.dead_letters,
             "url": layout.url("dead-letters", group.topic, group.name)}
            for group in layout.queries.poller.board.groups
            if group.dead_letters
        ]  # fmt: skip

    layout.live(lambda: fill(found, rows()))


class DeadLetterTable:
    """The dead letters of one group that match the filter fields."""

    def __init__(self, layout: PageLayout, topic: str, group: str) -> None:
        self._layout, self._topic, self._group = layout, topic, group
        with ui.row().classes("items-end"):
            self._reason = ui.input("reason").classes("w-32")
            self._error = ui.input("error contains")
            self._key = ui.input("key").classes("w-32")
            self._field = ui.input("payload field", placeholder="shop=7")
            self._since, self._until = moment_input("died since (UTC)"), moment_input("died before (UTC)")
            ui.button("show", on_click=self.load).props("flat")
        if layout.queries.allow_changes:
            with ui.row().classes("items-end"):
                self._rate = ui.number("replay at most a second", min=0, placeholder="no limit").classes("w-48")
                ui.button("replay all of these", on_click=self._replay_selected)
                ui.button("purge the group's", on_click=self._purge, color="negative")
        self._count = ui.label()
        self._table = table(["id", "at", "reason", "#attempts", "key", "error"])
        self._table.on("rowClick", self._open)

    async def load(self) -> None:
        """Read and show those that match."""
        with notified():
            letters, is_more = await self._layout.queries.dead_letters(self._topic, self._group, self._wanted())
            more = f", the oldest {MOST_LETTERS} are shown" if is_more else ""
            self._count.text = f"{count(len(letters), 'dead letter')}{more}"
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
        letter = await self._layout.queries.dead_letter(self._topic, self._group, clicked(event))
        if letter is None:
            ui.notify("this dead letter does not exist any more")
            return
        with ui.dialog(value=True) as dialog, ui.card().classes("max-w-3xl"):
            values(
                {
                    "id": letter.id, "reason": letter.reason, "error": letter.error,
                    "attempts": str(letter.attempts), "origin": letter.origin, "member": letter.member,
                    "message id": letter.message_id, "key": letter.key or "",
                    "headers": "\n".join(f"{name}: {value}" for name, value in letter.headers.items()),
                }
            )  # fmt: skip
            if letter.traceback:
                block(letter.traceback).props("data-traceback")
            payload(as_text(letter.data))
            with ui.row():
                ui.button("close", on_click=dialog.close).props("flat")
                if self._layout.queries.allow_changes:

                    async def replay() -> None:
                        dialog.close()
                        await self._do(
                            lambda: self._layout.queries.replay(self._topic, self._group, [letter.id]), "replayed"
                        )

                    ui.button("replay", on_click=replay)

    async def _replay_selected(self) -> None:
        with notified():
            wanted, rate, queries = self._wanted(), self._rate.value or 0, self._layout.queries
            every = timedelta(seconds=1 / rate if rate > 0 else 0)
            pace = f", at most {rate:g} a second: it goes on after this page is closed" if every else ""
            which = "all dead letters" if wanted.is_all else "all dead letters that match the fields above"
            question = f"Replay {which} of {self._group} of {self._topic}, to this group only{pace}?"
            if await confirmed(question, "replay"):
                await self._do(lambda: queries.replay_selected(self._topic, self._group, wanted, every), "replayed")

    async def _purge(self) -> None:
        text = (
            f"Delete all dead letters of {self._group} of {self._topic} for good, including those that are not shown?"
        )
        if await confirmed(text, "delete"):
            await self._do(lambda: self._layout.queries.purge(self._topic, self._group), "deleted")

    async def _do(self, act: Callable[[], Awaitable[int]], word: str) -> None:
        failed = False
        try:
            text = f"{word} {count(await act(), 'dead letter')}"
        except RsmqError as error:
            text, failed = str(error), True
        if self._table.client.has_socket_connection:  # a slow replay may outlast the page
            ui.notify(text, type="negative" if failed else None)
            await self.load()


def row_of(letter: DeadLetter) -> Row:
    """A row of the table."""
    return {
        "id": letter.id, "at": letter.at.strftime("%Y-%m-%d %H:%M:%S"), "reason": letter.reason,
        "attempts": letter.attempts, "key": (letter.key or "")[:PREVIEW], "error": letter.error[:PREVIEW],
    }  # fmt: skip
