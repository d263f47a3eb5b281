"""An error on its way out of another process, where a handler with `execution="process"` has raised it.

What decides about its message arrives: its class, what `retry_on` may ask of it, its cause and its notes. Pickle alone
loses the class of each error whose `__init__` takes other arguments than it passes on, as most errors of SDKs do.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from contextvars import copy_context
from typing import Any, Final

from rsmq.handler.failure import RemoteTraceback, text_of, traceback_of
from rsmq.handler.returned import called
from rsmq.handler.surroundings import call_surrounded

DEEPEST: Final = 20
"""Causes, and groups in groups, that are carried."""


class Carried(Exception):
    """An error on its way. It arrives as the error itself, which came from a `RemoteTraceback`."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error
        self.text = traceback_of(error)

    def __reduce__(self) -> tuple[Any, ...]:
        return arrived, (packed(self.error), self.text)


Packed = tuple[bytes, str, "Packed | None"]
"""A pickled error or its parts, its text, and its cause."""


def packed(error: BaseException, depth: int = 0) -> Packed:
    """An error as what pickle can carry."""
    cause = error.__cause__
    below = None if cause is None or depth >= DEEPEST else packed(cause, depth + 1)
    if isinstance(error, BaseExceptionGroup) and depth < DEEPEST:
        members = [packed(each, depth + 1) for each in error.exceptions]
        return pickle.dumps((type(error), error.message, members, notes_of(error))), text_of(error), below
    if (whole := _pickled(error)) is not None and type(pickle.loads(whole)) is type(error):
        return whole, text_of(error), below
    kind = next(base for base in type(error).__mro__ if _pickled(base) is not None)
    arguments = tuple(each if _pickled(each) is not None else text_of(each) for each in error.args)
    state = {name: value for name, value in vars(error).items() if _pickled(value) is not None}
    return pickle.dumps((kind, type(error).__name__, arguments, state)), text_of(error), below


def unpacked(what: Packed) -> BaseException:
    """The error again. It is made without its `__init__`, whose arguments are not known."""
    data, text, below = what
    found = pickle.loads(data)
    if isinstance(found, BaseException):
        error = found
    elif isinstance(found[1], str) and isinstance(found[2], list):
        kind, message, members, notes = found
        error = BaseExceptionGroup(message, [unpacked(each) for each in members])
        if isinstance(error, kind):
            for note in notes:
                error.add_note(note)
    else:
        kind, name, arguments, state = found
        if kind.__name__ != name:  # a class that was made in a function: one of its name stands for it
            kind = type(name, (kind,), {})
        error = kind.__new__(kind)
        error.args = arguments
        vars(error).update(state)
        if text_of(error) != text:
            error.args = (text,)
    error.__cause__ = None if below is None else unpacked(below)
    return error


def arrived(what: Packed, text: str) -> BaseException:
    """The error in the process that asked for the call, with its traceback at the beginning of its causes."""
    last = error = unpacked(what)
    while last.__cause__ is not None:
        last = last.__cause__
    last.__cause__ = RemoteTraceback(text) if text else None
    return error


def notes_of(error: BaseException) -> list[str]:
    """What `add_note` has added."""
    return [text_of(note) for note in getattr(error, "__notes__", ())]


def carrying(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in another process, with context variables of its own. Its error is `Carried`."""
    try:
        return copy_context().run(call_surrounded, called, function, *arguments)
    except BaseException as error:
        raise Carried(error) from None


def _pickled(value: object) -> bytes | None:
    """As pickle carries it; None if it cannot."""
    try:
        data = pickle.dumps(value)
        pickle.loads(data)
    except Exception:
        return None
    return data
