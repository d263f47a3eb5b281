"""`python -m tests.reference` writes docs/reference.md: what is public, with signatures and docstrings, as text.

It is read from the source, nothing is imported: a signature stands there as it was written. `tests/repository`
compares the page with what would be written now.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import griffe

ROOT: Final = Path(__file__).parents[1]
PAGE: Final = ROOT / "docs" / "reference.md"
WIDTH: Final = 100

TOP: Final = """# Python reference

The names on this page, the [settings](settings.md) and the commands are public. Everything else may change without
notice. Written by `python -m tests.reference` from the code: not edited by hand.
"""

SECTIONS: Final[tuple[tuple[str, str, tuple[str, ...]], ...]] = (
    ("Broker", "", ("rsmq.Broker",)),
    (
        "Without an event loop",
        "The methods of a `SyncBroker` are those of `Broker`, and `broker.topics`, `broker.devices`, "
        "`broker.dead_letters` and `broker.connect` give objects whose methods block, too. They are documented where "
        "they are coroutines.",
        ("rsmq.SyncBroker",),
    ),
    (
        "Handlers",
        "",
        (
            "rsmq.Router", "rsmq.RetryPolicy", "rsmq.Retry", "rsmq.Reject", "rsmq.Hold", "rsmq.Breaker", "rsmq.Rate",
            "rsmq.QuietHours", "rsmq.Concurrency", "rsmq.Burial", "rsmq.Fallback",
        ),
    ),
    (
        "Messages",
        "",
        (
            "rsmq.Message", "rsmq.MessageRef", "rsmq.TypedTopic", "rsmq.Publication", "rsmq.Letter", "rsmq.Session",
            "rsmq.model.message.AnyStep", "rsmq.control.MessageStatus", "rsmq.control.GroupStatus",
            "rsmq.control.Findings", "rsmq.control.Hit", "rsmq.Cancelled", "rsmq.Running", "rsmq.Settled",
            "rsmq.Unknown", "rsmq.control.Erased", "rsmq.control.GroupHold", "rsmq.model.message.OwnBatch",
            "rsmq.producer.open_batch.OpenBatch", "rsmq.control.BatchStatus",
        ),
    ),
    (
        "Settings",
        "Each setting has its row in [Settings](settings.md).",
        ("rsmq.Settings", "rsmq.tune_garbage_collector"),
    ),
    (
        "Topics, schedules, dead letters, devices",
        "What `broker.topics`, `broker.schedules`, `broker.dead_letters` and `broker.devices` are.",
        (
            "rsmq.redis.topics.Topics", "rsmq.control.Schedules", "rsmq.dlq.DeadLetters", "rsmq.dlq.DeadLetter",
            "rsmq.dlq.Selection", "rsmq.persistence.Devices", "rsmq.persistence.Device",
        ),
    ),
    (
        "Errors",
        "Of `rsmq.errors`.",
        tuple(
            f"rsmq.errors.{name}"
            for name in (
                "RsmqError", "ConfigError", "BrokerError", "BrokerUnavailable", "TopicFull", "PublishUnknown",
                "TooLarge", "NotJson", "RequestTimeout", "RequestFailed", "ResultTimeout", "ResultFailed",
                "Malformed", "CannotDecode", "HandlerTimeout", "SessionLost",
                "SessionTaken", "BatchExists", "BatchEnded",
                "CannotDecode", "LostBody", "WrongBody", "BodyUnavailable", "StoreUnavailable",
            )
        ),
    ),
    ("Effects and outbox", "Of `rsmq.sql`: [Effects](database.md).", ("rsmq.sql",)),
    (
        "Codecs and formats", "Of `rsmq.codecs`: [Payloads](application.md).",
        (
            "rsmq.codecs.Zstd", "rsmq.codecs.Encrypt", "rsmq.codecs.Keyring", "rsmq.codecs.avro_record",
            "rsmq.codecs.Offload", "rsmq.codecs.BodyStore",
        ),
    ),
    ("Testing", "Of `rsmq.testing`: [Testing](testing.md).", ("rsmq.testing",)),
    (
        "Web applications",
        "Of `rsmq.asgi`: [In your application](application.md).",
        ("rsmq.asgi.lifespan", "rsmq.asgi.connected", "rsmq.asgi.relay", "rsmq.asgi.letter_as_json"),
    ),
    ("Dashboard", "Of `rsmq.dashboard`: [Dashboard](dashboard.md).", ("rsmq.dashboard",)),
    ("CloudEvents", "Of `rsmq.cloudevents`.", ("rsmq.cloudevents.CloudEvent", "rsmq.cloudevents.as_cloudevents")),
    ("Django", "Of `rsmq.django`: [Django](django.md).", ("rsmq.django",)),
    ("MQTT gateway", "Of `rsmq.gateway`: [MQTT](mqtt.md).", ("rsmq.gateway",)),
    ("Pipeline", "Of `rsmq.pipeline`: [Pipeline](pipeline.md).", ("rsmq.pipeline",)),
    (
        "Telemetry",
        "Of `rsmq.telemetry`: [Telemetry](telemetry.md).",
        ("rsmq.telemetry", "rsmq.telemetry.tracing.trace"),
    ),
    ("Inspector", "Of `rsmq.inspector`.", ("rsmq.inspector.Inspector",)),
)  # fmt: skip
"""Title, introduction, and what is shown: objects, or modules with all that they name in `__all__` or define."""

FRAMEWORKS: Final = {"RsmqSource", "RsmqBackend", "MessageFilter", "Offload"}
"""Classes whose methods a framework calls, or rsmq itself."""

GIVEN: Final = {
    "Message", "TypedTopic", "Letter", "Session", "OwnBatch", "OpenBatch", "Topics", "DeadLetters", "Devices",
    "Schedules", "Database", "RsmqBackend",
}  # fmt: skip
"""Classes that rsmq makes, never its users: how they are made is not promised."""

INTERNAL: Final = {
    "Breaker.counts", "Fallback.made", "Fallback.target", "QuietHours.until", "Rate.name_of", "MessageRef.of",
    "TypedTopic.checked", "Settings.changed",
    *(f"Message.{name}" for name in ("again", "body_name", "bring", "is_outside", "open", "raw_headers", "undo")),
    *(f"SyncBroker.{name}" for name in ("declared_schedules", "handlers", "prefix", "services")),
    *(f"Encrypt.{name}" for name in ("seal", "shrink", "undo", "word")),
    *(f"Zstd.{name}" for name in ("seal", "shrink", "undo")),
    *(f"Keyring.{name}" for name in ("first", "get", "read")),
    *(f"Topics.{name}" for name in ("go_on_with_resize", "open_bands", "unaware_of_resize")),
    "Selection.is_all", "Selection.matches", "Rules.pass_word",
    *(f"Visitor.{name}" for name in ("may", "role_in", "sees")),
    *(f"Database.{name}" for name in ("at", "close", "dialect", "identity", "is_async", "read", "run")),
    *(f"Effects.{name}" for name in ("claim", "committed", "following", "is_marked", "prune", "serve")),
    *(f"Outbox.{name}" for name in ("belong_to", "claim", "lent_to", "relay", "remove_rows", "rows_left", "serve")),
    *(f"ThrowawayServer.{name}" for name in ("answers", "binary", "command", "ends_with_process")),
    "Event.now",
}  # fmt: skip
"""Members of public classes that only modules of rsmq call: neither on the page nor promised."""

WITHOUT_FIELDS: Final = {"rsmq.Settings"}
"""Classes whose fields have a page of their own."""


def load() -> griffe.Module:
    """The package, read and not imported."""
    extensions = griffe.load_extensions("unpack_typeddict")
    loaded = griffe.load("rsmq", search_paths=[ROOT], resolve_aliases=True, extensions=extensions)
    assert isinstance(loaded, griffe.Module)
    return loaded


def page() -> str:
    """The text of the page."""
    package, parts = load(), [TOP]
    for title, about, paths in SECTIONS:
        parts.append(f"## {title}\n")
        if about:
            parts.append(textwrap.fill(about, 120, break_on_hyphens=False, break_long_words=False) + "\n")
        for path in paths:
            found = package[path.removeprefix("rsmq.")]
            for each in public(found) if found.is_module else [found]:
                parts += shown(each, path)
    return "\n".join(parts).rstrip("\n") + "\n"


def public(module: griffe.Object | griffe.Alias) -> Iterator[griffe.Object | griffe.Alias]:
    """What a module names in `__all__`; without one, the classes and functions that it defines."""
    named = module.exports
    for name, member in module.members.items():
        if named is None:
            is_public = not member.is_alias and (member.is_class or member.is_function) and not name.startswith("_")
        else:
            is_public = name in named
        if is_public and documented(member):
            yield member


def target(member: griffe.Object | griffe.Alias) -> griffe.Object:
    """What an imported name stands for."""
    return member.final_target if isinstance(member, griffe.Alias) else member


def documented(member: griffe.Object | griffe.Alias) -> bool:
    """Whether it has a docstring."""
    return target(member).docstring is not None


def shown(member: griffe.Object | griffe.Alias, path: str) -> Iterator[str]:
    """A class with its members, a function or a constant."""
    each = target(member)
    yield f"### {member.name}\n"
    if isinstance(each, griffe.Class):
        yield code(constructor(each, member.name))
        yield prose(each)
        for name, inner in members(each):
            if member.name in FRAMEWORKS:
                continue
            if path not in WITHOUT_FIELDS or not inner.is_attribute or "property" in inner.labels:
                yield f"#### {member.name}.{name}\n"
                yield from signature(inner)
                yield prose(inner)
    else:
        yield from signature(each)
        yield prose(each)


def members(each: griffe.Class) -> Iterator[tuple[str, griffe.Object]]:
    """Public and documented, those of its bases first."""
    for name, member in each.all_members.items():
        if not name.startswith("_") and f"{each.name}.{name}" not in INTERNAL and documented(member):
            inner = target(member)
            if not (inner.is_class or inner.is_module):
                yield name, inner


def constructor(each: griffe.Class, name: str) -> list[str]:
    """How it is made, or only its name where it has no constructor of its own."""
    made = each.all_members.get("__init__")
    found = target(made) if made is not None else None
    bases = ", ".join(str(base) for base in each.bases if str(base) not in ("object", "Generic[T]"))
    if each.name in GIVEN:
        return [f"class {name}"]
    if isinstance(found, griffe.Function) and found.path.startswith("rsmq."):
        return call(f"class {name}", found, returns=False)
    return [f"class {name}({bases})" if bases else f"class {name}"]


def signature(each: griffe.Object) -> Iterator[str]:
    """The code block of a function, a property or an attribute."""
    if isinstance(each, griffe.Function):
        word = "async def " if "async" in each.labels else "def "
        lines = []
        for one in each.overloads or [each]:
            lines += call(word + each.name, one)
        yield code(lines)
    elif isinstance(each, griffe.Attribute):
        annotation = f": {each.annotation}" if each.annotation is not None else ""
        yield code([f"{each.name}{annotation}"])


def call(start: str, function: griffe.Function, *, returns: bool = True) -> list[str]:
    """A signature on one line, or with each parameter on its own where that is too long."""
    parts = list(parameters(function))
    end = f") -> {function.returns}" if returns and function.returns is not None else ")"
    line = f"{start}({', '.join(parts)}{end}"
    return [line] if len(line) <= WIDTH else [f"{start}(", *(f"    {part}," for part in parts), end]


def parameters(function: griffe.Function) -> Iterator[str]:
    """As they are written, without `self`."""
    starred, kinds = False, griffe.ParameterKind
    given = [each for each in function.parameters if each.name not in ("self", "cls")]
    for at, each in enumerate(given):
        mark = {kinds.var_positional: "*", kinds.var_keyword: "**"}.get(each.kind, "") if each.kind else ""
        if each.kind is kinds.var_positional:
            starred = True
        elif each.kind is kinds.keyword_only and not starred:
            starred = True
            yield "*"
        annotation = f": {each.annotation}" if each.annotation is not None else ""
        default = f" = {each.default}" if each.default is not None and not mark else ""
        yield f"{mark}{each.name}{annotation}{default}"
        if each.kind is kinds.positional_only and (at + 1 == len(given) or given[at + 1].kind is not each.kind):
            yield "/"


def code(lines: list[str]) -> str:
    """A block that is no part of a program: the tests of the pages do not run it."""
    return "\n".join(["```py", *lines, "```", ""])


def prose(each: griffe.Object) -> str:
    """Its docstring, as Markdown."""
    text = each.docstring.value if each.docstring is not None else ""
    return re.sub(r"``([^`\n]+)``", r"`\1`", text) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
