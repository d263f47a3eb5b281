"""AsyncAPI 3: what a broker receives and sends, from the annotations of its handlers; and what a change would break."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, get_type_hints

from pydantic import TypeAdapter

from rsmq.broker.broker import Broker, payloads_of
from rsmq.errors import ConfigError
from rsmq.model.body import REF
from rsmq.model.formats import format_of
from rsmq.model.json_schema import Comparison
from rsmq.model.message import BYTES, JSON, TEXT

VERSION: Final = "3.0.0"
SCHEMAS: Final = "#/components/schemas/"
Action = Literal["receive", "send"]


@dataclass(frozen=True, slots=True)
class Flow:
    """Messages of one type in one direction. `name` is that of the operation; `answer` what a request gets back."""

    name: str
    topic: str
    action: Action
    payload: Any
    summary: str = ""
    answer: Any = inspect.Parameter.empty


def flows(broker: Broker) -> Iterator[Flow]:
    """All that the broker receives and sends, as far as its code declares it."""
    for handler in broker.handlers:
        returned = returned_by(handler.function)
        payload = handler.signature.payload if handler.signature.has_payload else Any
        about = (inspect.getdoc(handler.function) or "").partition("\n")[0]
        answer = returned if handler.replies else inspect.Parameter.empty
        name = f"{handler.topic}.{handler.group}"
        yield Flow(name, handler.topic, "receive", payload, about, answer)
        for at, output in enumerate(handler.outputs):
            yield Flow(f"{name}.output{f'.{output}' if at else ''}", output, "send", returned)
    for schedule in broker.declared_schedules:
        yield Flow(f"{schedule.topic}.every.{schedule.name}", schedule.topic, "send", returned_by(schedule.function))
    for topic, payload in payloads_of(broker).items():
        yield Flow(f"{topic}.publish", topic, "send", payload)


def returned_by(function: Any) -> Any:
    """The annotation of what a function returns; what is not annotated may be anything. An optional output is none."""
    try:
        found = get_type_hints(function).get("return", Any)
    except (NameError, TypeError):
        return Any
    return Any if found is None else found


def asyncapi(broker: Broker, *, title: str, version: str) -> dict[str, Any]:
    """The document. Each topic is a channel, each group an operation."""
    found = sorted(flows(broker), key=lambda flow: flow.name)
    kinds = [kind for flow in found for kind in (flow.payload, flow.answer) if kind is not inspect.Parameter.empty]
    schemas, components = json_schemas(kinds)
    answered = broker.encoding.names
    encoded = ";".join(filter(None, (answered, REF if broker.encoding.bodies is not None else "")))
    channels: dict[str, Any] = {}
    operations: dict[str, Any] = {}
    for flow in found:
        channel = channels.setdefault(flow.topic, {"address": flow.topic, "messages": {}})
        name = message_name(flow.payload)
        channel["messages"][name] = message_of(flow.payload, schemas[key_of(flow.payload)], encoded)
        operation: dict[str, Any] = {
            "action": flow.action,
            "channel": {"$ref": f"#/channels/{flow.topic}"},
            "messages": [{"$ref": f"#/channels/{flow.topic}/messages/{name}"}],
        }
        if flow.summary:
            operation["summary"] = flow.summary
        if flow.answer is not inspect.Parameter.empty:
            answers, answer = f"{flow.name}.answer", message_name(flow.answer)
            content = message_of(flow.answer, schemas[key_of(flow.answer)], answered)
            channels[answers] = {"address": None, "messages": {answer: content}}
            operation["reply"] = {
                "address": {"location": "$message.header#/reply-to"},
                "channel": {"$ref": f"#/channels/{answers}"},
                "messages": [{"$ref": f"#/channels/{answers}/messages/{answer}"}],
            }
        operations[flow.name] = operation
    return {
        "asyncapi": VERSION,
        "info": {"title": title, "version": version},
        "defaultContentType": JSON,
        "channels": channels,
        "operations": operations,
        "components": {"schemas": components},
    }


def key_of(kind: Any) -> str:
    """Equal types have one schema."""
    return repr(kind)


def json_schemas(kinds: list[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The schema of each type, and the definitions that they share."""
    unique = {key_of(kind): kind for kind in kinds if kind not in (bytes, str) and format_of(kind) is None}
    inputs = [(key, "validation", TypeAdapter(kind)) for key, kind in unique.items()]
    found, shared = TypeAdapter.json_schemas(inputs, ref_template=f"{SCHEMAS}{{model}}")  # type: ignore[arg-type]
    schemas: dict[str, Any] = {key: schema for (key, _), schema in found.items()}
    definitions = dict(shared.get("$defs", {}))
    for kind in kinds:
        if (own := format_of(kind)) is not None:
            schemas[key_of(kind)], more = ({}, {}) if own.schema is None else own.schema(f"{SCHEMAS}{{name}}")
            definitions |= more
    text = {key_of(bytes): {"type": "string", "format": "binary"}, key_of(str): {"type": "string"}}
    return schemas | text, definitions


def message_name(kind: Any) -> str:
    """The name of a type, as names of AsyncAPI may be."""
    name = getattr(kind, "__name__", str(kind)) if isinstance(kind, type) else str(kind)
    return "".join(char if char.isalnum() else "_" for char in name.replace("typing.", "")).strip("_") or "payload"


def message_of(kind: Any, schema: Any, encoding: str = "") -> dict[str, Any]:
    """A message with its payload. `encoding`: the codings that may be in its field `enc`."""
    own = format_of(kind)
    content = BYTES if kind is bytes else TEXT if kind is str else JSON if own is None else own.written
    about = {"name": message_name(kind), "contentType": content, "payload": schema}
    return about | {"x-enc": encoding} if encoding else about


def breaking(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What breaks when code with the old document is replaced by code with the new one, a line for each problem.

    What is received must accept all that was published by the old document. What is sent must be accepted by readers of
    the old document.
    """
    lines: list[str] = []
    for name, before in operations_of(old).items():
        after = operations_of(new).get(name)
        if after is None:
            gone = "its messages are handled no more" if before["action"] == "receive" else "its readers get nothing"
            lines.append(f"{name}: it is gone, so {gone}")
            continue
        given, accepting = (old, new) if before["action"] == "receive" else (new, old)
        first, second = (before, after) if before["action"] == "receive" else (after, before)
        lines += compare(name, (given, first["messages"]), (accepting, second["messages"]))
        if "reply" in before:
            answers = after.get("reply", {}).get("messages", [])
            lines += compare(f"{name} (answer)", (new, answers), (old, before["reply"]["messages"]))
    return lines


def compare(name: str, given: tuple[Any, list[Any]], accepting: tuple[Any, list[Any]]) -> Iterator[str]:
    """The problems of one operation."""
    messages = [message_at(given[0], each) for each in given[1]]
    accepted = [message_at(accepting[0], each) for each in accepting[1]]
    comparison = Comparison(schemas_of(given[0]), schemas_of(accepting[0]))
    if accepted and not messages:
        yield f"{name}: there is none any more"
    for message in messages:
        found = [list(problems_of(comparison, message, other)) for other in accepted]
        if all(found):
            yield from (f"{name}: {line}" for line in min(found, key=len, default=[]))


def problems_of(comparison: Comparison, message: Any, other: Any) -> Iterator[str]:
    """Of one message for a reader of another."""
    if message.get("contentType") != other.get("contentType"):
        yield f"the content is {message.get('contentType')}, and must be {other.get('contentType')}"
    else:
        yield from comparison.problems(message.get("payload", {}), other.get("payload", {}))


def operations_of(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """The operations. Raises ConfigError for what is no document of AsyncAPI 3."""
    if not isinstance(document, Mapping) or not str(document.get("asyncapi", "")).startswith("3."):
        raise ConfigError("this is no AsyncAPI 3 document: write one with `rsmq docs app:broker > asyncapi.json`")
    operations: Mapping[str, Any] = document.get("operations", {})
    return operations


def schemas_of(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """The definitions."""
    schemas: Mapping[str, Any] = document.get("components", {}).get("schemas", {})
    return schemas


def message_at(document: Any, reference: Mapping[str, str]) -> Any:
    """The message behind `#/channels/orders/messages/Order`."""
    found = document
    for part in reference["$ref"].removeprefix("#/").split("/"):
        found = found.get(part, {})
    return found
