"""Calls with the messages of one key: none begins too early or without one of them, and a retry has the same."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from rsmq import Message
from rsmq.model.stream_id import parse_stream_id
from tests.chaos.checker import Name
from tests.simulation.world import EPOCH

if TYPE_CHECKING:
    from tests.simulation.run import Member, Run

SMALLEST: Final = 100
"""With less room for ids a bound cuts calls short."""


class Digests:
    """The calls of all members. What the server has lost, or a reset has brought back, may come in other calls."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._latest = dict[str, set[Name]]()
        self._is_sure = True

    def forget(self) -> None:
        """The server's clock was set, or it has lost writes, or the group was reset."""
        self._is_sure = False
        self._latest.clear()

    def options(self) -> dict[str, Any]:
        """For the handler."""
        linger = self._run.plan.linger
        return {"by": "key", "linger": timedelta(seconds=linger)} if linger else {}

    def starts(self, member: Member, messages: Sequence[Message]) -> None:
        """A handler is called with these messages."""
        run = self._run
        names = [run.name_in(message) for message in messages]
        if not run.plan.linger or member.process.thawed_at >= run.world.now:  # it cannot know yet that it was replaced
            return
        keys = {message.key for message in messages}
        ids = [parse_stream_id(message.stream_id.encode()) for message in messages]
        if len(keys) > 1 or (self._is_sure and ids != sorted(ids)):
            run.violate(f"m{member.number} has {names} in one call")
        if not self._is_sure or run.world.now < run.unsure_until:
            return
        key = messages[0].key or ""
        before, now = self._latest.get(key, set()), set(names)
        if before & now:
            self._check_repeated(member, before, now)
        else:
            self._check_first(member, messages, names)
        self._latest[key] = now

    def _check_repeated(self, member: Member, before: set[Name], now: set[Name]) -> None:
        run = self._run
        handled = {(event.key, event.n) for event in run.events if event.what == "commit"}
        if more := sorted(now - before - handled):  # a settlement may be lost, and its messages come again
            run.violate(f"m{member.number} repeats a call with {more}, which it did not have")
        if less := sorted(name for name in before - now if not self._has_ended(name)):
            run.violate(f"m{member.number} repeats a call without {less}")

    def _has_ended(self, name: Name) -> bool:
        """Whether a message may have left its call."""
        run = self._run
        ended = {(event.key, event.n) for event in run.events if event.what == "commit"}
        is_free = name in run.cancels.open or name in run.cancels.done or name in run.poison
        return is_free or name in ended or bool(run.plan.expires)

    def _check_first(self, member: Member, messages: Sequence[Message], names: Sequence[Name]) -> None:
        run, plan = self._run, self._run.plan
        # a call that was full may have lost some
        is_cut = len(names) >= plan.batch or plan.expires or plan.cancels or plan.read_ahead < SMALLEST
        # what is stored in its window after its partition was sealed comes in a later call
        is_cut = is_cut or bool(plan.growth and run.layout.is_sealed(messages[0].partition))
        if is_cut or plan.moves or plan.uniques:
            return
        end = int(messages[0].stream_id.partition("-")[0]) / 1000 - EPOCH + plan.linger
        if end - run.world.now > 0.01:
            run.violate(f"m{member.number} begins a call with {names[0]} {end - run.world.now:.3f} s too early")
        missing = [
            name for name, stored in run.stored.items()
            if name[0] == names[0][0] and stored < end and name not in names and name not in run.begun
            and not self._has_ended(name)
        ]  # fmt: skip
        if missing:
            run.violate(f"m{member.number} begins a call without {sorted(missing)}, stored in its window")
