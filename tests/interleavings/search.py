"""The search: breadth first, so the first story of a broken promise is a shortest one."""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Final

from tests.interleavings.moves import Move, Moves
from tests.interleavings.world import World

NONE: Final = -1


@dataclass
class Result:
    """What a search has found. `story`: the steps to the first broken promise."""

    states: int = 0
    steps: int = 0
    depth: int = 0
    done: int = 0
    seconds: float = 0.0  # of CPU, without the server
    broken: str = ""
    story: list[str] = field(default_factory=list)


class Search:
    """All states of a scenario, each once.

    A state is known by the numbers of its parts. From each there must be a way to the end without further faults.
    """

    def __init__(self, moves: Moves, *, progress: Callable[[Result], None] = lambda _: None) -> None:
        self._moves, self._progress = moves, progress
        self._parts: dict[Hashable, int] = {}
        self._known: dict[tuple[int, ...], int] = {}
        self._parent, self._choice = array("i"), array("i")
        self._from, self._to, self._done = array("i"), array("i"), array("i")

    def run(self) -> Result:
        """Everything, or until a promise is broken."""
        result, started = Result(), time.process_time()
        first = self._moves.begin()
        waiting = deque([(self._number(first, NONE, NONE)[0], 0, first)])
        while waiting and not result.broken:
            number, result.depth, world = waiting.popleft()
            if self._moves.is_done(world):
                self._done.append(number)
            for choice, move in enumerate(self._moves.after(world)):
                result.steps += 1
                if move.broken:
                    result.broken, result.story = move.broken, [*self._story(number), move.text]
                    break
                after, is_new = self._number(move.world, number, choice)
                if is_new:
                    waiting.append((after, result.depth + 1, move.world))
                if not move.is_fault:
                    self._from.append(number)
                    self._to.append(after)
            if result.steps % 64 == 0:
                result.states, result.seconds = len(self._parent), time.process_time() - started
                self._progress(result)
        result.states, result.done = len(self._parent), len(self._done)
        if not result.broken and (stuck := self._stuck()) is not None:
            result.broken, result.story = "from here no order of steps settles everything", self._story(stuck)
        result.seconds = time.process_time() - started
        return result

    def _number(self, world: World, parent: int, choice: int) -> tuple[int, bool]:
        parts = (world.server, *world.members, world.late, world.left, world.truth)
        key = tuple([self._parts.setdefault(part, len(self._parts)) for part in parts])
        number = self._known.setdefault(key, len(self._parent))
        is_new = number == len(self._parent)
        if is_new:
            self._parent.append(parent)
            self._choice.append(choice)
        return number, is_new

    def _story(self, number: int) -> list[str]:
        """The steps that lead to a state, played again."""
        choices = []
        while self._parent[number] != NONE:
            choices.append(self._choice[number])
            number = self._parent[number]
        world, story = self._moves.begin(), []
        for choice in reversed(choices):
            move: Move = next(move for at, move in enumerate(self._moves.after(world)) if at == choice)
            story.append(move.text)
            world = move.world
        return story

    def _stuck(self) -> int | None:
        """The first state without a way to the end."""
        before: dict[int, list[int]] = {}
        for source, target in zip(self._from, self._to, strict=True):
            before.setdefault(target, []).append(source)
        good: Any = bytearray(len(self._parent))
        waiting = list(self._done)
        while waiting:
            number = waiting.pop()
            if not good[number]:
                good[number] = 1
                waiting += before.get(number, ())
        index = good.find(0)
        return None if index < 0 else index
