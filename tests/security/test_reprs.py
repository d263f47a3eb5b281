"""No `repr` of an object of rsmq has a payload, a key or a password in it: objects end up in logs and reports."""

from __future__ import annotations

import dataclasses
import pkgutil
from collections.abc import Iterator
from importlib import import_module
from typing import Any, Final

import rsmq

HOLDING: Final = {"args", "data", "envelope", "fields", "packed", "password", "payload", "secret", "values"}
"""Names of fields that may hold a payload or a password."""
MARK: Final = "hunter2"
FREE: Final = {
    "rsmq.broker.asyncapi.Flow": "types, not values",
    "rsmq.handler.signature.Signature": "types, not values",
    "rsmq.handler.fallback.Fallback": "a function of the user",
    "rsmq.model.batch_member.MemberBlock": "names of a batch",
    "rsmq.testing.harness.OutboxEntry": "what a test of the user compares",
}
"""Classes that show such a field, and why."""
LEFT_OUT: Final = ("rsmq.__main__", "rsmq.cli.demo.mqtt_service", "rsmq.cli.demo.service", "rsmq.django.")
"""Modules that do something when they are imported, or need a project of Django."""


def shown_classes() -> Iterator[type]:
    """Each dataclass and named tuple of rsmq, whose `repr` shows its fields unless it says otherwise."""
    seen = set[type]()
    for found in pkgutil.walk_packages(rsmq.__path__, "rsmq."):
        if f"{found.name}.".startswith(LEFT_OUT) or found.name in LEFT_OUT:
            continue
        for kind in vars(import_module(found.name)).values():
            if not isinstance(kind, type) or kind in seen:
                continue
            seen.add(kind)
            if kind.__module__.startswith("rsmq") and (dataclasses.is_dataclass(kind) or is_named_tuple(kind)):
                yield kind


def is_named_tuple(kind: type) -> bool:
    """Whether a class is a NamedTuple."""
    return issubclass(kind, tuple) and hasattr(kind, "_fields")


def names_of(kind: Any) -> list[str]:
    """The fields of a class."""
    return list(kind._fields) if is_named_tuple(kind) else [each.name for each in dataclasses.fields(kind)]


class Quiet:
    """A value of any field: it shows nothing, and has a length and any attribute."""

    def __getattr__(self, name: str) -> Any:
        return Quiet()

    def __len__(self) -> int:
        return 0

    def __repr__(self) -> str:
        return ""


class Loud(Quiet):
    """A value that must not be shown."""

    def __repr__(self) -> str:
        return MARK

    def __str__(self) -> str:
        return MARK

    def __format__(self, _spec: str) -> str:
        return MARK


def shows(kind: Any) -> bool:
    """Whether the repr of an object has what is in a field that may hold a payload."""
    values = {name: Loud() if name in HOLDING else Quiet() for name in names_of(kind)}
    if is_named_tuple(kind):
        made = tuple.__new__(kind, values.values())
    else:
        made = object.__new__(kind)
        for name, value in values.items():
            object.__setattr__(made, name, value)
    return MARK in repr(made)


def test_no_repr_of_an_object_shows_a_payload() -> None:
    """Of all dataclasses and named tuples; those that show such a field are listed with the reason."""
    kinds = [kind for kind in shown_classes() if HOLDING & set(names_of(kind))]
    showing = {f"{kind.__module__}.{kind.__qualname__}" for kind in kinds if shows(kind)}
    assert len(kinds) > 25
    assert sorted(showing - FREE.keys()) == []
    assert sorted(FREE.keys() - showing) == []
