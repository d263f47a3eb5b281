"""No `repr` of an object of rsmq has a payload, a key or a password in it: objects end up in logs and reports."""

from __future__ import annotations

import dataclasses
import inspect
import pkgutil
import re
from collections.abc import Iterator
from enum import Enum
from importlib import import_module
from typing import Any, Final

import rsmq

HOLDING: Final = {
    "args", "body", "content", "data", "envelope", "fields", "header_pairs", "headers", "kwargs", "packed", "password",
    "payload", "payloads", "result", "returned", "secret", "sent", "text", "value", "values", "where",
}  # fmt: skip
"""Names of fields that may hold a payload, a header, a result, a search for one of them, or a password."""
MARK: Final = "hunter2"
FREE: Final = {
    "rsmq.broker.asyncapi.Flow": "types, not values",
    "rsmq.handler.signature.Signature": "types, not values",
    "rsmq.handler.fallback.Fallback": "a function of the user",
    "rsmq.model.batch_member.MemberBlock": "names of a batch",
    "rsmq.cli.bench.command.Advice": "a setting",
    "rsmq.cli.demo.screen.Check": "a number of the demo",
    "rsmq.telemetry.metric.Metric": "numbers",
    "rsmq.telemetry.metric.Sample": "a number",
    "rsmq.testing.verdict.MoreThanOnce": "topic and id",
    "rsmq.testing.verdict.Never": "topic and id",
    "rsmq.testing.verdict.OutOfOrder": "topic and id",
    "rsmq.consumer.waiting.allowance.Question": "a number",
    "rsmq.control.audit.AuditEntry": "what came of an action",
    "rsmq.model.schedule_run.ScheduleRun": "a word",
    "rsmq.redis.preflight.rules.Finding": "what rsmq found",
    "rsmq.redis.client.refusals.Refusal": "words of a server",
    "rsmq.handler.failure.ChainedError": "the text of an error of the user",
    "rsmq.dlq.selection.Selection": "conditions, which hide their values",
    "rsmq.control.search.Criteria": "conditions, which hide their values",
    "rsmq.dashboard.queries.MessageSearch": "conditions, which hide their values",
    "rsmq.producer.output.Output": "a body, which shows nothing",
    "rsmq.consumer.waiting.outgoing.MessageOutputs": "outputs, which show no fields",
    "rsmq.gateway.connections.ingest.Change": "a topic and a token",
    "rsmq.pipeline.jobs.send.SendOptions": "a column",
    "rsmq.persistence.mqtt_traces.TraceOrder": "whether payloads are wanted",
}
"""Classes that show such a field, and why."""
NAMED: Final = {
    "rsmq.broker.sync_broker.SyncTopic": "a type",
    "rsmq.broker.typed_topic.TypedTopic": "a type",
    "rsmq.gateway.protocol.packet.Publish": "how many",
    "rsmq.handler.lifespan.OpenedLifespan": "whether it is open",
    "rsmq.producer.publication.Preparation": "names of headers",
}
"""Classes that use such a field for their own text, and what they say of it."""
LEFT_OUT: Final = (
    "rsmq.__main__", "rsmq.cli.demo.mqtt_service", "rsmq.cli.demo.service", "rsmq.django.worker",
    "rsmq.django.database.migrations.", "rsmq.django.management.",
)  # fmt: skip
"""Modules that do something when they are imported, or need a project of Django."""


def all_classes() -> Iterator[type]:
    """Each class of rsmq."""
    seen = set[type]()
    for found in pkgutil.walk_packages(rsmq.__path__, "rsmq."):
        if f"{found.name}.".startswith(LEFT_OUT) or found.name in LEFT_OUT:
            continue
        for kind in vars(import_module(found.name)).values():
            if not issubclass(type(kind), type) or kind in seen:  # the settings of Django must not be asked
                continue
            seen.add(kind)
            if kind.__module__.startswith("rsmq"):
                yield kind


def shown_classes() -> Iterator[type]:
    """Each dataclass and named tuple of rsmq, whose `repr` shows its fields unless it says otherwise."""
    return (kind for kind in all_classes() if dataclasses.is_dataclass(kind) or is_named_tuple(kind))


def writing_classes() -> Iterator[type]:
    """Each other class of rsmq with a `repr` or a text of its own. What an error says is planted in `test_planted`."""
    shown = set(shown_classes())
    for kind in all_classes():
        if (
            kind not in shown
            and not issubclass(kind, BaseException | Enum)
            and {"__repr__", "__str__"} & set(vars(kind))
        ):
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

    def __format__(self, _spec: str) -> str:
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


def named_in_texts(kind: type) -> set[str]:
    """What the methods of a class that write its `repr` and its text name of itself."""
    methods = [vars(kind)[name] for name in ("__repr__", "__str__", "__format__") if name in vars(kind)]
    return {name for each in methods for name in re.findall(r"\bself\._*([a-z]\w*)", inspect.getsource(each))}


def test_no_repr_of_an_object_shows_a_payload() -> None:
    """Of all dataclasses and named tuples; those that show such a field are listed with the reason."""
    kinds = [kind for kind in shown_classes() if HOLDING & set(names_of(kind))]
    showing = {f"{kind.__module__}.{kind.__qualname__}" for kind in kinds if shows(kind)}
    assert len(kinds) > 25
    assert sorted(showing - FREE.keys()) == []
    assert sorted(FREE.keys() - showing) == []


def test_no_class_writes_a_payload_into_its_text() -> None:
    """Of all other classes with a `repr` of their own."""
    writing = {f"{kind.__module__}.{kind.__qualname__}": named_in_texts(kind) for kind in writing_classes()}
    assert len(writing) > 50
    assert {name for name, found in writing.items() if found & HOLDING} == NAMED.keys()
