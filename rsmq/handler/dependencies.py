"""Dependencies: parameters annotated `Annotated[T, Depends(...)]` are filled by fast-depends, for each message.

A handler without dependencies is called directly, so it pays nothing. `Depends` and `dependency_provider` come from
fast-depends: install the extra `depends`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any, Final, get_args, get_origin

from rsmq.errors import ConfigError
from rsmq.handler.filled import are_simple, filled
from rsmq.handler.retry import BatchRolledBack
from rsmq.handler.returned import completed, ended
from rsmq.handler.service import Service
from rsmq.handler.signature import annotations_of, is_coroutine_function
from rsmq.model.message import Message

LIBRARY: Final = "fast_depends"
EITHER: Final = Message | list[Message]
LATER: Final = "which would run when its dependencies are closed: make it `async def`, also inside its decorators"


def with_dependencies(function: Callable[..., Any], title: str, *, is_batch: bool) -> Callable[..., Any]:
    """`function` itself, or if it has dependencies a wrapper that fills them and takes the other parameters.

    A dependency may take the payload by its name in the handler, the message by the annotation `Message` (in a batch
    handler `list[Message]`; `Message | list[Message]` does for both), and other dependencies; code after its `yield`
    runs when the handler has ended. Raises ConfigError for a parameter that cannot be filled, and for an async
    dependency of a plain function.
    """
    if not callable(function) or not _mentions_dependencies(function):
        return function
    hints = annotations_of(function, title)
    wanted = {name: found for name in hints if (found := _dependency(function, name, hints[name], title)) is not None}
    if not wanted:
        return function
    wants = list[Message] if is_batch else Message
    own = [each for each in inspect.signature(function).parameters.values() if each.name not in wanted]
    services: list[Service] = []
    aliases = _message_parameters(list(wanted.values()), {each.name for each in own}, wants, title, services)
    holder = next((each.name for each in own if _plain(hints.get(each.name)) == wants), None)
    if aliases and holder is None:
        holder = aliases[0]
        own.append(inspect.Parameter(holder, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=wants))
    names = [each.name for each in own if _is_filled(each)]
    if inspect.isroutine(function) and any(_is_closed(each, title) for each in wanted.values()):
        function = _to_its_end(function)
    if is_batch and any(getattr(each, "_commits", False) for each in services):
        function = _all_or_none(function)
    injected = _inject(function, title)
    if are_simple(function, wanted, {*names, *aliases}):
        injected = _unless_overridden(filled(function, wanted), injected)
    wrapper = functools.wraps(function)(_caller(function, injected, names, holder, aliases))
    wrapper.__signature__ = inspect.Signature(own)  # type: ignore[attr-defined]
    wrapper.services = tuple(services)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {each.name: hints[each.name] for each in own if each.name in hints}
    if holder is not None:
        wrapper.__annotations__.setdefault(holder, wants)
    return wrapper


def _mentions_dependencies(function: Callable[..., Any]) -> bool:
    """A cheap check first: annotations may be unresolved text."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(
        isinstance(each.annotation, str) or get_origin(each.annotation) is Annotated or _is_marker(each.default)
        for each in parameters
    )


def _is_marker(value: object) -> bool:
    return type(value).__name__ == "Dependant" and type(value).__module__.startswith(LIBRARY)


def _dependency(function: Callable[..., Any], name: str, hint: Any, title: str) -> Callable[..., Any] | None:
    """The dependency that fills a parameter, or None."""
    if name not in inspect.signature(function).parameters:
        return None
    default = inspect.signature(function).parameters[name].default
    for each in (*(get_args(hint)[1:] if get_origin(hint) is Annotated else ()), default):
        if _is_marker(each):
            found: Callable[..., Any] = each.dependency
            return found
        if type(each).__name__ == "Depends" and hasattr(each, "dependency"):
            kind = type(each).__module__.partition(".")[0]
            raise ConfigError(
                f"handler {title}: {name!r} has the Depends of {kind}, which works in its requests only: write "
                f"`from fast_depends import Depends`"
            )
    return None


def _message_parameters(
    dependencies: list[Callable[..., Any]], known: set[str], wants: Any, title: str, services: list[Service]
) -> list[str]:
    """The parameters of dependencies, nested ones included, that take the message. Others must be the handler's.

    A dependency that is a method of a service brings that along, in `services`.
    """
    found: list[str] = []
    for dependency in dependencies:
        owner = getattr(dependency, "__self__", None)
        if isinstance(owner, Service) and owner not in services:
            services.append(owner)
        name_of = getattr(dependency, "__name__", type(dependency).__name__)
        hints = annotations_of(dependency, f"{title}, dependency {name_of}")
        for parameter in inspect.signature(dependency).parameters.values():
            hint = hints.get(parameter.name)
            nested = None
            if parameter.name in hints or _is_marker(parameter.default):
                nested = _dependency(dependency, parameter.name, hint, title)
            if nested is not None:
                found += _message_parameters([nested], known, wants, title, services)
            elif _plain(hint) in (Message, list[Message], EITHER):
                if _plain(hint) not in (wants, EITHER):
                    shape = "`Message`" if wants is Message else "`list[Message]`"
                    raise ConfigError(f"handler {title}: dependency {name_of} must take {shape}, as the handler does")
                found.append(parameter.name)
            elif parameter.name not in known and _is_filled(parameter):
                raise ConfigError(
                    f"handler {title}: nothing fills {parameter.name!r} of dependency {name_of}: annotate it "
                    f"`Message`, give it a Depends, or name it like the payload of the handler"
                )
    return list(dict.fromkeys(found))


def _is_closed(dependency: Callable[..., Any], title: str) -> bool:
    """Whether a dependency, or one that it takes, has code that runs when the handler has ended."""
    called = (dependency, getattr(dependency, "__call__", None))  # noqa: B004  an object may have it
    if any(inspect.isgeneratorfunction(each) or inspect.isasyncgenfunction(each) for each in called):
        return True
    hints = annotations_of(dependency, title)
    nested = (
        _dependency(dependency, name, hints.get(name), title) for name in inspect.signature(dependency).parameters
    )
    return any(each is not None and _is_closed(each, title) for each in nested)


def _plain(hint: Any) -> Any:
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def _is_filled(parameter: inspect.Parameter) -> bool:
    """Whether a call must pass it."""
    is_open = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    return not is_open and parameter.default is parameter.empty


def _inject(function: Callable[..., Any], title: str) -> Callable[..., Any]:
    """The function with fast-depends' injection, but without its validation: the payload is decoded already."""
    from fast_depends import inject  # it is installed: the handler's annotations use it

    try:
        return inject(function, cast=False, cast_result=False)
    except AssertionError as error:
        raise ConfigError(f"handler {title}: {error}: make the handler async def, or the dependency plain") from None


def _unless_overridden(function: Callable[..., Any], injected: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, and `injected` while a test overrides dependencies."""
    from fast_depends import dependency_provider

    return lambda **values: (injected if dependency_provider.overrides else function)(**values)


def _to_its_end(function: Callable[..., Any]) -> Callable[..., Any]:
    """A handler whose call has come to its end before its dependencies are closed: an error that it returns is raised
    at their `yield`, and a coroutine that it returns has run. A transaction would be committed before."""

    @functools.wraps(function)
    def call(*values: Any, **named: Any) -> Any:
        return ended(function(*values, **named), function, LATER)

    @functools.wraps(function)
    async def wait(*values: Any, **named: Any) -> Any:
        return await completed(await function(*values, **named))

    return wait if is_coroutine_function(function) else call


def _all_or_none(function: Callable[..., Any]) -> Callable[..., Any]:
    """A batch handler whose dependency commits: with an error for one message, nothing of the call may be committed."""

    def checked(result: Any) -> Any:
        if result is not None and not (isinstance(result, list | tuple) and all(each is None for each in result)):
            raise BatchRolledBack(result)
        return result

    @functools.wraps(function)
    def call(*values: Any, **named: Any) -> Any:
        return checked(function(*values, **named))

    @functools.wraps(function)
    async def wait(*values: Any, **named: Any) -> Any:
        return checked(await function(*values, **named))

    return wait if is_coroutine_function(function) else call


def _caller(
    function: Callable[..., Any], injected: Callable[..., Any], names: list[str], holder: str | None, aliases: list[str]
) -> Callable[..., Any]:
    """The wrapper, async like `function`, passes arguments by name: dependencies find payload and message by name."""

    def call(*values: Any) -> Any:
        given = dict(zip(names, values, strict=True))
        given.update(dict.fromkeys(aliases, given.get(holder or "")))
        return injected(**given)

    async def wait(*values: Any) -> Any:
        return await call(*values)

    return wait if is_coroutine_function(function) else call
