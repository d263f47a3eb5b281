"""Publishing from a page: a new message, a copy of one, or one that was edited first."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from decimal import Decimal
from math import isfinite
from typing import Any, Final

from rsmq.codecs.reading import codecs_beside, codecs_to_write
from rsmq.dashboard.html import Content, about, button, choice, hidden, tag, text_field
from rsmq.dashboard.page import Page, Visit
from rsmq.dashboard.payload import readable
from rsmq.dashboard.queries import LONGEST, PageRefused
from rsmq.dashboard.roles import Role
from rsmq.errors import ConfigError
from rsmq.inspector.key_in_use import key_of_topic
from rsmq.model.body import is_outside, without_ref
from rsmq.model.encoding import ENC, Encoding, key_of, names_of
from rsmq.model.message import JSON
from rsmq.redis.topics import Topic

NOT_COPIED: Final = frozenset({"traceparent", "tracestate"})
"""Headers that belong to the first message: a copy begins a trace of its own."""


@dataclass(frozen=True, slots=True)
class Draft:
    """What the fields of the form begin with."""

    payload: str = field(default="{}", repr=False)
    key: str = ""
    headers: dict[str, str] = field(default_factory=dict, repr=False)
    is_text: bool = False
    encoding: str = ""
    """The codings with which it is stored, such as `zstd;a256gcm`: those of the message that it is a copy of, or as
    the newest one is stored. Empty: it is readable."""


async def publish_form(visit: Visit, topic: str) -> Page:
    """The fields of a new message; with `message` or `letter` in the address those of a copy."""
    visit.check(topic)
    if not visit.visitor.may(Role.ACT, topic):
        raise PageRefused("your role may not do this: it takes the role act")
    found = await visit.queries.topic(topic)
    draft, source = await draft_of(visit, topic)
    headers = "\n".join(f"{name}={value}" for name, value in draft.headers.items() if name not in NOT_COPIED)
    kinds = (("json", "JSON"), ("text", "text"))
    rows = max(6, min(30, draft.payload.count("\n") + 2))
    body: list[Content] = [
        hidden([("topic", topic), ("back", visit.url("topic", topic))]),
        text_field("key", "key", draft.key),
        choice("kind", "payload is", kinds, "text" if draft.is_text else "json"),
        tag("label", "payload", tag("textarea", f"\n{draft.payload}", name="payload", rows=rows, spellcheck="false")),
        tag("label", "headers, one a line: name=value",
            tag("textarea", f"\n{headers}", name="headers", rows=3, spellcheck="false")),
        text_field("delay", "deliver it after, such as 10m (empty: now)"),
        stored_as(draft.encoding),
        button("publish"),
    ]  # fmt: skip
    form = tag("form", body, method="post", action=visit.url("do", "publish"), class_="lines")
    about_source = about({"copy of": source}) if source else None
    said = f"It is a new message with an id of its own: every group of {topic} gets it."
    crumbs = [("Overview", visit.url()), (f"topic {found.name}", visit.url("topic", topic))]
    return Page(f"Publish to {topic}", [about_source, tag("p", said), form], crumbs=crumbs)


async def draft_of(visit: Visit, topic: str) -> tuple[Draft, str]:
    """What the form begins with, and what that is a copy of. Raises ConfigError for a payload no field can show."""
    message, letter = visit.given("message"), visit.given("letter")
    if letter:
        dead = await visit.queries.dead_letter(topic, visit.given("group"), letter)
        fields = dict(reversed(dead.fields))
        kind = fields.get(b"type", JSON.encode()).decode(errors="replace")
        enc = fields.get(ENC, b"").decode(errors="replace")
        draft = drafted(check_read(dead.data, dead.sealed, enc), kind, dead.key, dead.headers, encryption(enc))
        return draft, f"dead letter {letter}"
    if message:
        found = await visit.queries.one(topic, message, visit.given("key") or None)
        if found is None:
            raise ConfigError(
                f"message {message!r} of {topic!r} is not there any more: only its dead letters may be left"
            )
        kind, headers = found.kind, dict(found.header_pairs)
        data = check_read(found.data, found.text if found.data is None else "", found.encoding)
        return drafted(data, kind, found.key or None, headers, encryption(found.encoding)), f"message {message}"
    return Draft(encoding=await codings_for(visit, await visit.queries.topic(topic))), ""


async def codings_for(visit: Visit, topic: Topic) -> str:
    """The codings of a new message: as the newest one is stored; keys decide for a topic without any. Raises
    ConfigError for keys that are missing."""
    newest = await key_of_topic(visit.queries.client, visit.queries.keys, topic)
    return Encoding(codecs_beside(newest, f"topic {topic.name!r}")).names


def stored_as(encoding: str) -> Content:
    """The choice between encrypted and readable, for a dashboard with keys. `encoding`: the codings by default."""
    codings = encoding or Encoding(codecs_to_write()).names
    if not codings:
        return hidden([("encoding", "")])
    kinds = ((codings, f"encrypted ({codings}), with the first key of this dashboard"), ("", "readable"))
    return choice("encoding", "it is stored", kinds, encoding)


def check_read(data: bytes | None, sealed: str, enc: str) -> bytes | None:
    """The payload. Raises ConfigError for one that is encoded, and that this dashboard cannot read."""
    if enc and sealed:
        raise ConfigError(
            f"the payload is encoded ({enc}), and this dashboard cannot read it: give it the key, such as in RSMQ_KEYS"
        )
    return data


def encryption(enc: str) -> str:
    """The codings of a message that is encrypted; empty for any other: its copy is stored as it is. What fits into a
    form needs no store."""
    stored = without_ref(enc.encode()) if is_outside(enc.encode()) else enc.encode()
    return names_of(stored) if key_of(stored) else ""


def drafted(data: bytes | None, kind: str, key: str | None, headers: dict[str, str], encoding: str = "") -> Draft:
    """A copy as fields. Raises ConfigError if the payload is no JSON and no text, or too long for a page."""
    is_json = kind == JSON or kind.endswith("+json")
    if data is None or not (is_json or kind.startswith("text/")):
        raise ConfigError(f"a payload of type {kind} cannot be edited here: only JSON and text can")
    if len(data) > LONGEST:
        raise ConfigError(f"the payload has {len(data)} bytes, and a page can edit {LONGEST}")
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise ConfigError("the payload is not UTF-8, so it cannot be edited here") from None
    return Draft(readable(data) if is_json else text, key or "", headers, is_text=not is_json, encoding=encoding)


def payload_given(text: str, kind: str) -> Any:
    """The payload of a form. Raises ConfigError for what is no JSON, and for numbers that JSON readers would change."""
    text = text.replace("\r\n", "\n")  # as browsers send the end of a line
    if kind == "text":
        return text
    try:
        return json.loads(text, parse_float=exact, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the payload is not valid JSON: {error}") from None


def exact(digits: str) -> float:
    """A number that stays as it is."""
    number = float(digits)
    if not isfinite(number) or Decimal(repr(number)) != Decimal(digits):
        raise ValueError(f"{digits[:40]} cannot be kept exactly: write it as text, in quotes")
    return number


def refuse(name: str) -> None:
    """NaN and Infinity are not JSON."""
    raise ValueError(f"JSON has no {name}")


def headers_given(text: str) -> dict[str, str]:
    """The headers of a form. Raises ConfigError."""
    found = dict[str, str]()
    for line in text.splitlines():
        name, equals, value = line.partition("=")
        if line.strip() and not (name.strip() and equals):
            raise ConfigError(f"{line[:80]!r} is not a header: write name=value")
        if line.strip():
            found[name.strip()] = value
    return found
