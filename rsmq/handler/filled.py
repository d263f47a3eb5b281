"""Dependencies that need no resolver are filled without fast-depends, for a fraction of its CPU.

These are functions as async or as plain as the handler, which take nothing but the payload and the message. All others
are left to fast-depends, and all of them while a test overrides dependencies.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from contextlib import asynccontextmanager, contextmanager
from typing import Annotated, Any, Final, get_origin

from rsmq.handler.signature import annotations_of, is_coroutine_function

Dependencies = dict[str, Callable[..., Any]]
"""By the names of the parameters that they fill."""
Call = Callable[[dict[str, Any]], Any]
"""A call of the handler with the values that are known so far."""
KINDS: Final = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
SWALLOWED: Final = "the dependency for {!r} has swallowed an error of the handler: raise it again behind its `yield`"


def are_simple(function: Callable[..., Any], dependencies: Dependencies, given: set[str]) -> bool:
    """Whether `filled` can fill all dependencies of a handler. `given`: the names of what each call has."""
    is_async = is_coroutine_function(function)
    return (
        len(set(dependencies.values())) == len(dependencies)  # fast-depends calls one that occurs twice only once
        and all(inspect.isroutine(each) and _is_async(each) == is_async for each in dependencies.values())
        and all(_takes_only(each, given) for each in dependencies.values())
        and _takes_only(function, {*given, *dependencies}, except_for=dependencies)
    )


def _is_async(dependency: Callable[..., Any]) -> bool:
    return inspect.isasyncgenfunction(dependency) or inspect.iscoroutinefunction(dependency)


def _takes_only(function: Callable[..., Any], given: Iterable[str], except_for: Iterable[str] = ()) -> bool:
    """Whether each parameter is given by its name. An annotation with more than a type may mean more than that."""
    hints = annotations_of(function, repr(function))
    return all(
        each.name in given
        and each.kind in KINDS
        and (each.name in except_for or get_origin(hints.get(each.name)) is not Annotated)
        for each in inspect.signature(function).parameters.values()
    )


def filled(function: Callable[..., Any], dependencies: Dependencies) -> Callable[..., Any]:
    """`function` with its dependencies, opened in their order and closed in the other one. It takes arguments by name,
    also those that only dependencies take."""
    own = tuple(inspect.signature(function).parameters)

    call: Call = lambda values: function(**{name: values[name] for name in own})  # noqa: E731
    for name, dependency in reversed(dependencies.items()):
        takes = tuple(inspect.signature(dependency).parameters)
        call = (_with_async if _is_async(dependency) else _with_plain)(call, name, dependency, takes)
    return lambda **values: call(values)


def _with_async(call: Call, name: str, dependency: Callable[..., Any], takes: tuple[str, ...]) -> Call:
    """`call` with one value more, from an async dependency."""
    opened = asynccontextmanager(dependency) if inspect.isasyncgenfunction(dependency) else None

    async def fill(values: dict[str, Any]) -> Any:
        found = {each: values[each] for each in takes}
        if opened is None:
            values[name] = await dependency(**found)
            return await call(values)
        async with opened(**found) as values[name]:
            return await call(values)
        raise RuntimeError(SWALLOWED.format(name))

    return fill


def _with_plain(call: Call, name: str, dependency: Callable[..., Any], takes: tuple[str, ...]) -> Call:
    """`call` with one value more, from a plain dependency."""
    opened = contextmanager(dependency) if inspect.isgeneratorfunction(dependency) else None

    def fill(values: dict[str, Any]) -> Any:
        found = {each: values[each] for each in takes}
        if opened is None:
            values[name] = dependency(**found)
            return call(values)
        with opened(**found) as values[name]:
            return call(values)
        raise RuntimeError(SWALLOWED.format(name))

    return fill
