"""Every order in which the members of a group note what is finished, and take and hand over partitions by that note:
the package's own `Families`, over a server that is reduced to what is finished, noted and owned.

A member may sleep between its question and its note, and between two looks at the note. From each state there must be
a way to the end. And there must be one on which nothing more is finished, as with a hot key: to a state in which each
partition that is not finished has one owner with all that follow it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Final

from rsmq.consumer.owning.families import Families
from rsmq.model.layout import Layout, single
from tests.interleavings.bands import Edit
from tests.interleavings.search import Result

UNOWNED: Final = ""


@dataclass(frozen=True)
class Viewer:
    """A member: the note that it knows, what follows nothing any more, what it has asked for in vain, and a note that
    it has decided on and not written: of what it knew, and what is to be there. `kept` are partitions that it could not
    hand over."""

    note: bytes
    free: frozenset[int] = frozenset()
    in_vain: frozenset[int] = frozenset()
    kept: frozenset[int] = frozenset()
    writes: tuple[bytes, bytes] | None = None


@dataclass(frozen=True)
class GroupState:
    """What the server has, and the members that live."""

    finished: frozenset[int]
    note: bytes
    owners: tuple[str, ...]
    viewers: tuple[tuple[str, Viewer], ...]
    faults: tuple[tuple[str, int], ...]

    def viewed(self, name: str, viewer: Viewer) -> GroupState:
        """One member has changed."""
        return replace(self, viewers=tuple((each, viewer if each == name else old) for each, old in self.viewers))

    def owned(self, number: int, owner: str) -> GroupState:
        """A partition has changed its owner."""
        owners = list(self.owners)
        owners[number] = owner
        return replace(self, owners=tuple(owners))

    def after(self, fault: str) -> GroupState:
        """A fault has happened once more."""
        return replace(self, faults=tuple((each, n - (each == fault)) for each, n in self.faults))


@dataclass(frozen=True)
class FamilyScenario:
    """A topic that has had so many partitions, one number after the other; its members, what is noted at first, and how
    often each fault may happen."""

    name: str
    counts: tuple[int, ...]
    members: tuple[str, ...] = ("m1", "m2")
    note: bytes = b""
    faults: dict[str, int] = field(default_factory=dict)
    bands: tuple[str, ...] = ("normal",)
    busy: tuple[str, int] | None = None
    """A member that has a partition from the beginning, in which a handler runs until it is finished: it is not handed
    over."""
    is_short: bool = True
    """Searched in `make test`, too."""

    @property
    def layout(self) -> Layout:
        """Of the topic."""
        layout = single(self.counts[0]).with_bands(self.bands)
        layout = layout.opened() if layout.waits else layout
        for count in self.counts[1:]:
            layout = layout.with_partitions(count).sealed()
        return layout

    def search(self, edit: Edit | None = None) -> Result:
        """All states, or the first from which there is no way on."""
        with nullcontext() if edit is None else edit.applied():
            return FamilySearch(self).run()


class FamilySearch:
    """All states of a scenario. Steps are `(text, kind, state)`, of a member, of the group, or a fault."""

    def __init__(self, scenario: FamilyScenario) -> None:
        self._layout = layout = scenario.layout
        self._sealed = {number for number in layout.numbers if layout.is_sealed(number)}
        self._families: Callable[[bytes], Families] = cache(lambda note: Families(layout, note))
        self._owned: Callable[[bytes, str, tuple[str, ...]], frozenset[int]] = cache(
            lambda note, member, live: self._families(note).owned_by(member, live, "t/g", {})
        )
        self._busy = scenario.busy
        self._first = GroupState(
            frozenset(), scenario.note, (UNOWNED,) * len(layout.numbers),
            tuple((name, Viewer(scenario.note)) for name in scenario.members), tuple(scenario.faults.items()),
        )  # fmt: skip
        if self._busy is not None:
            self._first = self._first.owned(self._busy[1], self._busy[0])

    def run(self) -> Result:
        """Breadth first: the story of a state from which there is no way on is a shortest one."""
        result, came_from = Result(), {self._first: (self._first, "")}
        own, every = dict[GroupState, list[GroupState]](), dict[GroupState, list[GroupState]]()
        waiting = deque([self._first])
        while waiting:
            state = waiting.popleft()
            for text, kind, after in self._steps(state):
                result.steps += 1
                if after not in came_from:
                    came_from[after] = state, text
                    waiting.append(after)
                if kind == "member":
                    own.setdefault(after, []).append(state)
                if kind != "fault":
                    every.setdefault(after, []).append(state)
        result.states = len(came_from)
        ends = [each for each in came_from if self._is_end(each)]
        result.done = len(ends)
        goals = (
            ("no order of steps ends", ends, every),
            (
                "no order of steps brings a family together",
                [each for each in came_from if self._is_together(each)],
                own,
            ),
        )
        for broken, goal, backwards in goals:
            good = _reaching(goal, backwards)
            stuck = next((each for each in came_from if each not in good), None)
            if stuck is not None and not result.broken:
                result.broken = f"from here {broken}"
                while stuck != self._first:
                    stuck, text = came_from[stuck]
                    result.story.insert(0, text)
        return result

    def _live(self, state: GroupState) -> tuple[str, ...]:
        return tuple(name for name, _ in state.viewers)

    def _is_end(self, state: GroupState) -> bool:
        """Everything is finished, and each partition has the owner that it has for good."""
        live, done = self._live(state), b"%d:" % self._layout.current.count
        return state.finished == self._sealed and all(
            state.owners[number] == name
            for name in live for number in self._owned(done, name, live)
        )  # fmt: skip

    def _is_together(self, state: GroupState) -> bool:
        if UNOWNED in state.owners:
            return False
        for number in self._sealed - state.finished:
            family = [number, *self._layout.descendants_of(number)]
            if len({state.owners[each] for each in family}) > 1:
                return False
        return True

    def _steps(self, state: GroupState) -> Iterator[tuple[str, str, GroupState]]:
        for name, viewer in state.viewers:
            for text, after in self._member_steps(state, name, viewer):
                yield text, "member", after
        for number in self._sealed - state.finished:
            if state.finished.issuperset(self._layout.ancestors_of(number)) and state.owners[number]:
                yield f"{number} is finished", "group", replace(state, finished=state.finished | {number})
        left = dict(state.faults)
        if left.get("reset"):
            over = state.after("reset")
            for name, viewer in state.viewers:
                over = over.viewed(name, replace(viewer, free=frozenset(), in_vain=frozenset()))
            free = (UNOWNED,) * len(state.owners)
            yield "the group is reset", "fault", replace(over, finished=frozenset(), owners=free)
        if left.get("loss") and state.note:
            yield "the server loses the note", "fault", replace(state.after("loss"), note=b"")
        if left.get("death") and len(state.viewers) > 1:
            for name, _ in state.viewers:
                viewers = tuple(each for each in state.viewers if each[0] != name)
                owners = tuple(UNOWNED if each == name else each for each in state.owners)
                yield f"{name} dies", "fault", replace(state.after("death"), viewers=viewers, owners=owners)

    def _member_steps(self, state: GroupState, name: str, viewer: Viewer) -> Iterator[tuple[str, GroupState]]:
        if viewer.writes is not None:
            known, wanted = viewer.writes
            note = wanted if state.note == known else state.note
            written = replace(state, note=note).viewed(name, replace(viewer, note=note, writes=None))
            yield f"{name} notes {wanted.decode()}", written
            return  # one task does all
        if viewer.note != state.note:
            yield f"{name} reads the note", state.viewed(name, replace(viewer, note=state.note))
        own = self._owned(viewer.note, name, self._live(state))
        for number, owner in enumerate(state.owners):
            if owner == UNOWNED and number in own:
                yield f"{name} takes {number}", state.owned(number, name)
            if owner != name:
                continue
            if number not in own and (name, number) == self._busy and number not in state.finished:
                if number not in viewer.kept:
                    kept = replace(viewer, kept=viewer.kept | {number})
                    yield f"{name} gives up to hand {number} over", state.viewed(name, kept)
            elif number not in own:
                left = replace(
                    viewer, free=viewer.free - {number}, in_vain=viewer.in_vain - {number},
                    kept=viewer.kept - {number},
                )  # fmt: skip
                yield f"{name} hands {number} over", state.owned(number, UNOWNED).viewed(name, left)
            before = self._layout.ancestors_of(number)
            if before and number not in viewer.free | viewer.in_vain:
                kind = "free" if state.finished.issuperset(before) else "in_vain"
                asked = replace(viewer, **{kind: getattr(viewer, kind) | {number}})
                yield f"{name} asks for {number}", state.viewed(name, asked)
        families = self._families(viewer.note)
        found = families.found({**dict.fromkeys(viewer.free, True), **dict.fromkeys(viewer.in_vain, False)})
        kept = families.kept_with(name, viewer.kept)
        if found != families.unfinished or kept != families.kept:
            writes = viewer.note, families.note(found, kept)
            decided = replace(viewer, in_vain=frozenset(), writes=writes)
            yield f"{name} decides on {writes[1].decode()}", state.viewed(name, decided)
        elif viewer.in_vain:
            yield f"{name} asks again later", state.viewed(name, replace(viewer, in_vain=frozenset()))


def _reaching(goal: list[GroupState], backwards: dict[GroupState, list[GroupState]]) -> set[GroupState]:
    found, waiting = {*goal}, list(goal)
    while waiting:
        for each in backwards.get(waiting.pop(), ()):
            if each not in found:
                found.add(each)
                waiting.append(each)
    return found


GROWS: Final = FamilyScenario("families: a topic grows", (1, 2), faults={"death": 1, "loss": 1})
RESET: Final = FamilyScenario("families: a group is reset", (1, 2), note=b"2:", faults={"reset": 1})
BANDS: Final = FamilyScenario("families: a topic with bands", (1, 2), bands=("urgent", "normal"))
TWO: Final = FamilyScenario("families: two partitions", (2, 4), faults={"death": 1})
AGAIN: Final = FamilyScenario("families: three generations", (1, 2, 4), is_short=False)
BUSY: Final = tuple(
    FamilyScenario(
        f"families: a handler of {name} does not end", (1, 2), faults={"death": 1, "loss": 1}, busy=(name, 0)
    )
    for name in ("m1", "m2")
)
FAMILY_SCENARIOS: Final = (GROWS, RESET, BANDS, TWO, AGAIN, *BUSY)
FAMILY_EDITS: Final = (
    Edit(
        "each partition has an owner of its own", GROWS, Families, "unit_of",
        "if (count, at % count) in self.unfinished:", "if False:",
    ),
    Edit("what is finished is never noted", GROWS, Families, "found", "self.unfinished - over", "self.unfinished"),
    Edit("what was finished stays so after a reset", RESET, Families, "found", " | waiting", ""),
    Edit("what is kept is not noted", BUSY[0], Families, "kept_with", "if NAME.fullmatch(member):", "if False:"),
    Edit("what a member that has died has kept has no owner", BUSY[0], Families, "owned_by", "name in live and ", ""),
    Edit("the note is of the partitions before", GROWS, Families, "note", "(self._now,", "(1,"),
)  # fmt: skip
