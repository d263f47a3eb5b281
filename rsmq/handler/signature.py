"""Reads a handler's signature when it is registered: the type of the payload and the shape of the call.

A parameter annotated `Message` gets the message, the other parameter gets the payload; in a batch handler both are
lists. An unusable signature is a ConfigError that shows what to write.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Union, get_args, get_origin, get_type_hints

from rsmq.errors import ConfigError
from rsmq.model.message import Message

UNDECLARED: Final = inspect.Parameter.empty
"""No type is declared: a payload may be None."""


@dataclass(frozen=True, slots=True)
class Signature:
    """The shape of one function. `wants_message` says for each parameter whether it gets the message.

    `payload` is the annotation of the payload parameter (of one item in a batch handler); None if there is none.
    """

    function: Callable[..., Any]
    is_async: bool
    wants_message: tuple[bool, ...]
    payload: Any

    @property
    def has_payload(self) -> bool:
        """Whether the function takes the payload, which must be decoded."""
        return not all(self.wants_message)

    def single_call(self) -> Callable[[Message], Any]:
        """The call for one message; the shape is chosen here, not in each call."""
        function = self.function
        calls: dict[tuple[bool, ...], Callable[[Message], Any]] = {
            (True,): function,
            (False,): lambda message: function(message.payload),
            (False, True): lambda message: function(message.payload, message),
            (True, False): lambda message: function(message, message.payload),
        }
        return calls[self.wants_message]

    def batch_call(self) -> Callable[[Sequence[Message]], Any]:
        """The call for a batch."""
        function, arguments = self.function, self.arguments
        return lambda messages: function(*arguments(messages))

    def payload_call(self) -> Callable[[Any], Any] | None:
        """The call for an async handler that takes nothing but its payload or payloads; None for any other."""
        return self.function if self.wants_message == (False,) and self.is_async else None

    def arguments(self, work: Message | Sequence[Message]) -> tuple[Any, ...]:
        """The arguments that these calls pass; for a call in another process, too."""
        if isinstance(work, Message):
            return tuple(work if wanted else work.payload for wanted in self.wants_message)
        return tuple(list(work) if wanted else [message.payload for message in work] for wanted in self.wants_message)


def read_signature(
    function: Callable[..., Any],
    title: str,
    *,
    is_batch: bool,
    unannotated: Any = UNDECLARED,
    declared: Any = UNDECLARED,
) -> Signature:
    """The signature of a handler, called `title` in errors. A parameter with a default keeps its default, except the
    message: `message: Message | None = None` gets it, so that tests may call the function without one.

    `unannotated` replaces a missing annotation (a lambda cannot have one); without it a missing one is refused.
    `declared` is the payload type of a typed topic: the annotation must accept it, and may be missing.
    """
    if declared is not UNDECLARED:
        unannotated = list[declared] if is_batch else declared
    is_async = _is_async(function, title)
    hints = annotations_of(function, title)
    filled = _filled(function, title, hints, is_batch=is_batch)
    if unannotated is not UNDECLARED:
        hints = {parameter.name: unannotated for parameter in filled} | hints
    items = [
        _item_type(title, parameter.name, hints[parameter.name], is_batch=is_batch)
        for parameter in filled
        if parameter.name in hints or _refuse_missing(function, title, parameter.name, is_batch=is_batch)
    ]
    payloads = [item for item in items if item is not Message]
    if not items:
        raise ConfigError(
            f"handler {title} has no parameter without a default: give it a payload (`order: dict`) or "
            f"`message: Message`"
        )
    if len(payloads) > 1 or len(items) - len(payloads) > 1:
        raise ConfigError(f"handler {title}: one payload and one Message at most; give other parameters a default")
    payload = payloads[0] if payloads else None
    if payloads and declared is not UNDECLARED:
        payload = _accepted(title, payload, declared)
    return Signature(function, is_async, tuple(item is Message for item in items), payload)


def _accepted(title: str, annotation: Any, declared: Any) -> Any:
    """The declared type, if the annotation accepts it: the same type, a class above it, or Any."""
    if annotation in (declared, Any, object):
        return declared
    are_classes = isinstance(annotation, type) and isinstance(declared, type)
    if not are_classes or hasattr(annotation, "__total__") or not issubclass(declared, annotation):
        raise ConfigError(
            f"handler {title} takes {_name(annotation)}, but its topic has payloads of {_name(declared)}: annotate the "
            f"payload with {_name(declared)}, or register the handler with broker.handler"
        )
    return declared


def _name(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind)


def is_coroutine_function(function: Callable[..., Any]) -> bool:
    """Whether a function, or an object with an async `__call__`, returns a coroutine when called."""
    return any(inspect.iscoroutinefunction(each) for each in _called(function))


def _called(function: Callable[..., Any]) -> tuple[Any, Any]:
    return function, getattr(function, "__call__", None)  # noqa: B004  an object's __call__ may be the async one


def _is_async(function: Callable[..., Any], title: str) -> bool:
    """Whether calling it returns an awaitable."""
    if not callable(function):
        raise ConfigError(f"handler {function!r} is not a function")
    if any(inspect.isgeneratorfunction(each) or inspect.isasyncgenfunction(each) for each in _called(function)):
        raise ConfigError(f"handler {title} has a `yield`: its body would never run; publish results instead")
    is_async = is_coroutine_function(function)
    if not is_async and inspect.iscoroutinefunction(inspect.unwrap(function)):
        # in a thread it would return a coroutine that is never awaited: acknowledged without having run
        raise ConfigError(
            f"handler {title} is an async def inside a plain wrapper: make the decorator's wrapper async def"
        )
    return is_async


def _filled(
    function: Callable[..., Any], title: str, hints: Mapping[str, Any], *, is_batch: bool
) -> list[inspect.Parameter]:
    """The parameters that a call fills: those without a default, and the message."""
    filled, kept = list[inspect.Parameter](), ""
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        has_default = parameter.default is not parameter.empty
        if has_default and not _is_message(hints.get(parameter.name), is_batch=is_batch):
            kept = parameter.name
            continue
        if parameter.kind is parameter.KEYWORD_ONLY:
            raise ConfigError(f"handler {title}: remove the `*` before {parameter.name!r}: arguments go by position")
        if kept:
            raise ConfigError(
                f"handler {title}: write {parameter.name!r} before {kept!r}, which keeps its default: arguments go by "
                f"position"
            )
        filled.append(parameter)
    return filled


def _is_message(annotation: Any, *, is_batch: bool) -> bool:
    """Whether it is `Message` or `Message | None`; in a batch handler `list[Message]`, or that or None."""
    choices = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    wanted = list[Message] if is_batch else Message
    return wanted in choices and all(choice in (wanted, NoneType) for choice in choices)


def annotations_of(function: Callable[..., Any], title: str) -> dict[str, Any]:
    """The annotations as objects, of functions, methods, partials and callable objects."""
    while isinstance(function, functools.partial):
        function = function.func
    holder: Any = function if inspect.isroutine(function) else type(function).__call__
    try:
        return get_type_hints(holder, include_extras=True)
    except Exception as error:  # annotations are the user's code and may raise anything
        raise ConfigError(
            f"handler {title}: its annotations cannot be resolved ({error}): import or define the types at module "
            f"level, before the handler, not inside a function or under TYPE_CHECKING"
        ) from None


def _item_type(title: str, name: str, annotation: Any, *, is_batch: bool) -> Any:
    """`T` of `T`, in a batch handler of `list[T]`; Message without its metadata."""
    if _is_message(annotation, is_batch=is_batch):
        return Message
    item = annotation
    if is_batch:
        if (get_origin(annotation) or annotation) is not list:
            raise ConfigError(
                f"handler {title} gets batches: annotate {name!r} as a list, such as `{name}: list[dict]`"
            )
        item = (*get_args(annotation), Any)[0]
    if get_origin(item) is Annotated and get_args(item)[0] is Message:
        return Message
    if item == list[Message]:
        raise ConfigError(f"handler {title} gets one message at a time: annotate `message: Message`, or pass batch=500")
    return item


def _refuse_missing(function: Callable[..., Any], title: str, name: str, *, is_batch: bool) -> bool:
    """Raise with the fix for a parameter without annotation, ready to paste."""
    if name == "self":
        raise ConfigError(
            f"handler {title} is a method: register that of an instance, "
            f"`broker.handler(topic, group=...)(instance.{function.__name__})`"
        )
    define = "async def" if inspect.iscoroutinefunction(function) else "def"
    called = getattr(function, "__name__", title)
    example = "list[dict]" if is_batch else "dict"
    if name in ("message", "messages"):
        wanted = "list[Message]" if is_batch else "Message"
        raise ConfigError(
            f"handler {title} has no annotation on {name!r}: write `{name}: {wanted}` (from rsmq import Message) if it "
            f"shall get the message, or its payload's type, such as `{name}: {example}`"
        )
    raise ConfigError(
        f"handler {title} has no annotation on {name!r}, so its payload has no type: write `{define} "
        f"{called}({name}: {example}) -> None`, or a pydantic model, a dataclass, str or bytes instead of dict"
    )
