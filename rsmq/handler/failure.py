"""How an error of a handler is written down: one line, and a bounded traceback that starts in the user's code.

Nothing here raises, whatever the error does when it is asked for its text.
"""

from __future__ import annotations

import traceback
from asyncio import CancelledError
from dataclasses import dataclass
from os import sep
from os.path import dirname
from types import FrameType, TracebackType
from typing import Final

import anyio

from rsmq.errors import RsmqError

LONGEST_LINE: Final = 1000
MOST_BYTES: Final = 4096
"""Of a traceback in a dead letter."""
DEEPEST: Final = 40
"""Calls of one error that are looked at, the innermost ones."""
FIRST: Final = 2
LAST: Final = 4
"""Errors of a long chain that are shown: where it began, and how it ended."""
MOST_MEMBERS: Final = 3
"""Of a group of errors."""

PACKAGE: Final = dirname(dirname(__file__)) + sep
MACHINERY: Final = (PACKAGE, dirname(anyio.__file__) + sep)
"""What calls a handler is the same for every message, so it is left out before the first call of other code."""
AROUND: Final = tuple(PACKAGE + room + sep for room in ("consumer", "handler", "telemetry", "testing"))
"""Between middlewares and handler, so it is left out everywhere."""

CAUSE: Final = "\nThe above exception was the direct cause of the following exception:\n\n"
CONTEXT: Final = "\nDuring handling of the above exception, another exception occurred:\n\n"
MEMBER: Final = "\nThe above exception is in the following group:\n\n"
HEADER: Final = "Traceback (most recent call last):\n"


def describe(error: BaseException) -> str:
    """Type and message of an error, at most 1000 characters."""
    if isinstance(error, CancelledError) and not error.args:
        return f"{type(error).__name__}: the handler, or something that it awaited, was cancelled"
    if isinstance(error, BaseExceptionGroup):
        return described_parts(error)
    text = text_of(error)
    return f"{type(error).__name__}: {text}"[:LONGEST_LINE] if text else type(error).__name__


def parts(error: BaseException) -> list[BaseException]:
    """The errors in a group, and in the groups in it; of any other error, itself.

    A task group cancels the other tasks when one fails, so cancellations count only where there is nothing else.
    """
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    found = [part for member in error.exceptions for part in parts(member)]
    return [part for part in found if not isinstance(part, CancelledError)] or found


def described_parts(group: BaseExceptionGroup[BaseException]) -> str:
    """The errors of a group in one line; of a single one only itself, because the group says nothing more."""
    found = parts(group)
    if len(found) == 1:
        return describe(found[0])
    shown = "; ".join(describe(part) for part in found[:MOST_MEMBERS])
    more = f"; and {len(found) - MOST_MEMBERS} more" if len(found) > MOST_MEMBERS else ""
    return f"{type(group).__name__}: {text_of(group.message)}: {shown}{more}"[:LONGEST_LINE]


def text_of(value: object) -> str:
    """The text of an error or of a reason, at most 1000 characters."""
    try:
        return encodable(str(value)[:LONGEST_LINE])[:LONGEST_LINE]
    except BaseException:
        return "its text cannot be shown, because its __str__ raises"


def encodable(text: str) -> str:
    """The text with what UTF-8 cannot hold escaped: the name of a file may have such characters."""
    return text.encode(errors="backslashreplace").decode()


def users_part(trace: TracebackType | None) -> TracebackType | None:
    """A traceback from the first frame that is not rsmq's own; None if there is no other."""
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(MACHINERY):
        trace = trace.tb_next
    return trace


ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None]


def exc_info(error: BaseException | None) -> ExcInfo | None:
    """The argument of a log call that shows the error's traceback; None if it has none that says more than its text."""
    if error is None:
        return None
    trace = users_part(error.__traceback__)
    is_ours = trace is None and (error.__traceback__ is None or isinstance(error, RsmqError))
    if is_ours and source_of(error)[1] is None:
        return None
    return type(error), with_text(error), trace or error.__traceback__


def with_text(error: BaseException) -> BaseException:
    """The error, or one in its place if its text cannot be shown: not every log formatter can do without."""
    try:
        str(error)
    except BaseException:
        return RuntimeError(describe(error)).with_traceback(error.__traceback__)
    return error


# -- the traceback in a dead letter ---------------------------------------------------------------------------------


@dataclass(slots=True)
class ChainedError:
    """One error of a chain: how it follows from the one above, its calls from the outermost, and its text."""

    joint: str
    calls: list[str]
    left_out: int
    text: str

    def render(self, most: int) -> str:
        """In at most so many bytes. The outer calls give way to the innermost ones."""
        calls, left_out, text = self.calls, self.left_out, self.text
        if size(self._joined(calls, left_out, text)) > most:
            room = most - size(self._joined([], 9999, ""))
            text = shortened(text, room // 2 if calls else room)
            calls = innermost(calls, room - size(text))
            left_out += len(self.calls) - len(calls)
        return self._joined(calls, left_out, text)

    def _joined(self, calls: list[str], left_out: int, text: str) -> str:
        header = HEADER if calls or left_out else ""
        gap = f"  ... {left_out} outer calls are left out\n" if left_out else ""
        return "".join((self.joint, header, gap, *calls, text))


def traceback_of(error: BaseException, most: int = MOST_BYTES) -> str:
    """The traceback of an error and of those it came from, as Python prints it, in at most so many bytes.

    The innermost calls are kept, and the first and the last errors of a long chain. Empty if there is no call to show.
    """
    try:
        blocks = [block_of(link) for link in in_short(chain(error))]
    except Exception as problem:  # an error of a user may have any attributes
        return f"the traceback cannot be shown: {type(problem).__name__}\n"
    texts, left = dict[int, str](), most
    by_size = sorted(blocks, key=lambda block: size(block.render(most)))
    for waiting, block in zip(range(len(blocks), 0, -1), by_size, strict=True):
        texts[id(block)] = block.render(left // waiting)  # what a short one does not use is for the longer ones
        left -= size(texts[id(block)])
    text = "".join(texts[id(block)] for block in blocks)
    return text if HEADER in text else ""


Link = tuple[str, BaseException]
"""How an error follows from the one above it, and the error."""


def chain(error: BaseException) -> list[Link]:
    """An error behind those it came from, in the order in which Python prints them."""
    backwards, seen = list[Link](), set[int]()
    came_from: BaseException | None = error
    while came_from is not None and id(came_from) not in seen:
        error = came_from
        seen.add(id(error))
        if isinstance(error, BaseExceptionGroup):
            members = [link for member in error.exceptions[:MOST_MEMBERS] for link in chain(member)]
            return [*members, (MEMBER, error), *backwards[::-1]]
        joint, came_from = source_of(error)
        backwards.append((joint, error))
    return backwards[::-1]


def source_of(error: BaseException) -> tuple[str, BaseException | None]:
    """The error that this one came from, if there is one, and how."""
    if error.__cause__ is not None:
        return CAUSE, error.__cause__
    if error.__context__ is not None and not error.__suppress_context__:
        return CONTEXT, error.__context__
    return "", None


def in_short(links: list[Link]) -> list[Link]:
    """A long chain without its middle."""
    if len(links) <= FIRST + LAST:
        return links
    gap = f"\n... {len(links) - FIRST - LAST} errors of this chain are left out\n"
    joint, error = links[-LAST]
    return [*links[:FIRST], (gap + joint, error), *links[1 - LAST :]]


def block_of(link: Link) -> ChainedError:
    """The calls and the text of one error."""
    joint, error = link
    if isinstance(error, RemoteTraceback):
        return ChainedError(joint, [], 0, error.text)
    own = [(frame, line) for frame, line in traceback.walk_tb(users_part(error.__traceback__)) if is_shown(frame)]
    if not own and source_of(error)[1] is None and not isinstance(error, RsmqError):  # a defect of rsmq
        own = list(traceback.walk_tb(error.__traceback__))
    calls = traceback.StackSummary.extract(iter(own[-DEEPEST:])).format()
    text = "".join(traceback.format_exception_only(error))  # also if its __str__ raises
    return ChainedError(joint, list(map(encodable, calls)), len(own) - len(own[-DEEPEST:]), encodable(text))


def is_shown(frame: FrameType) -> bool:
    """Whether a call says something about this error: rsmq's own around a handler are the same for all."""
    return not frame.f_code.co_filename.startswith(AROUND)


def innermost(calls: list[str], most: int) -> list[str]:
    """The last calls that have at most so many bytes."""
    for at in range(len(calls)):
        if sum(map(size, calls[at:])) <= most:
            return calls[at:]
    return []


def size(text: str) -> int:
    """Its bytes in UTF-8."""
    return len(text.encode())


def shortened(text: str, most: int) -> str:
    """The first bytes of a text that is longer, up to a whole character."""
    if size(text) <= most:
        return text
    return text.encode()[: max(0, most - 5)].decode(errors="ignore") + " ...\n"


def without_text(error: BaseException) -> RemoteTraceback:
    """The calls and the types of an error and of those it came from. Their texts may show what they were given."""
    blocks = [block_of(link) for link in in_short(chain(error))]
    for block, (_, each) in zip(blocks, in_short(chain(error)), strict=True):
        block.text = f"{type(each).__name__}\n"
    return RemoteTraceback("".join(block.render(MOST_BYTES) for block in blocks))


class RemoteTraceback(Exception):
    """The cause of an error, as the text of a traceback: of another process, or without the texts of its errors."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"\n{self.text}"
