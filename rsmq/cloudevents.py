"""CloudEvents in binary mode: the attributes of an event are headers `ce-*` of a message, and its data is the payload.

So they go over HTTP, too: a bridge copies headers and body. Kept apart from the package's own names; it needs no other
package.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, TypedDict
from urllib.parse import quote, unquote

from rsmq.errors import ConfigError, Malformed
from rsmq.model.json import decode_json
from rsmq.model.message import BYTES, BYTES_LIKE, JSON, TEXT, Message, new_message_id
from rsmq.producer import BeforePublish, Publication

PREFIX: Final = "ce-"
CONTENT_TYPE: Final = "content-type"
VERSION: Final = "1.0"
NAME: Final = re.compile(r"[a-z0-9]+")
TEXTS: Final = ("id", "source", "type", "subject", "dataschema", "datacontenttype")
RESERVED: Final = {*TEXTS, "time", "specversion", "data"}
PLAIN: Final = "".join(map(chr, range(0x21, 0x7F))).replace('"', "").replace("%", "")
"""Characters that a value keeps. The others are written as in HTTP: UTF-8 in percent signs."""


class EventOptions(TypedDict, total=False):
    """The options for `publish` that an event gives besides its data."""

    headers: dict[str, str]
    key: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudEvent:
    """An event: `await broker.publish("orders", event.data, **event.options)`.

    `id` and `time` are made if they are not given. `extensions` are attributes of your own, as text. The extension
    `partitionkey` is the ordering key of the message. `datacontenttype` follows from the data, unless it is given.
    """

    type: str
    source: str
    data: Any = field(default=None, repr=False)
    id: str = field(default_factory=new_message_id)
    time: datetime | None = field(default_factory=lambda: datetime.now(UTC))
    subject: str | None = None
    dataschema: str | None = None
    datacontenttype: str | None = None
    extensions: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in TEXTS:
            value = getattr(self, name)
            is_missing = value is None and name not in ("id", "source", "type")
            if not (is_missing or (isinstance(value, str) and value)):
                raise ConfigError(f"a CloudEvent has a text as its {name}, not {value!r}")
        if self.time is not None and (not isinstance(self.time, datetime) or self.time.tzinfo is None):
            raise ConfigError(f"the time of a CloudEvent is an aware datetime, not {self.time!r}")
        for name, value in self.extensions.items():
            if not NAME.fullmatch(name) or name in RESERVED:
                raise ConfigError(
                    f"a CloudEvent cannot have an extension {name!r}: use small letters and digits, and none of "
                    f"{', '.join(sorted(RESERVED))}"
                )
            if not isinstance(value, str):
                raise ConfigError(f"the extension {name}={value!r} of a CloudEvent is not text: write {name}='{value}'")

    @property
    def headers(self) -> dict[str, str]:
        """The attributes as headers: `ce-type` and so on, and `content-type`."""
        written = {"specversion": VERSION, "id": self.id, "source": self.source, "type": self.type, **self.extensions}
        for name in ("subject", "dataschema"):
            if (value := getattr(self, name)) is not None:
                written[name] = value
        if self.time is not None:
            written["time"] = self.time.isoformat().replace("+00:00", "Z")
        headers = {PREFIX + name: quote(value, safe=PLAIN) for name, value in written.items()}
        if self.data is not None:
            headers[CONTENT_TYPE] = self.datacontenttype or content_type_of(self.data)
        return headers

    @property
    def options(self) -> EventOptions:
        """The options for `publish` besides the data: the headers, and the key if there is a `partitionkey`."""
        return {"headers": self.headers, "key": self.extensions.get("partitionkey")}

    @classmethod
    def from_message(cls, message: Message) -> CloudEvent:
        """The event of a message. Raises Malformed, which makes the message a dead letter, if it is none.

        `data` is the payload as the handler gets it; if it takes only the message, JSON and text are decoded.
        """
        data = message.payload if message.payload is not None else decoded(message.data, message.type)
        return cls.from_headers({CONTENT_TYPE: message.type, **message.headers}, data)

    @classmethod
    def from_headers(cls, headers: Mapping[str, str], data: Any) -> CloudEvent:
        """The event of headers `ce-*`, as an HTTP request has them in any case, and of its data. Raises Malformed."""
        found = {name.lower(): value for name, value in headers.items()}
        attributes = {
            name.removeprefix(PREFIX): unquote(value) for name, value in found.items() if name.startswith(PREFIX)
        }
        version = attributes.pop("specversion", None)
        missing = [PREFIX + name for name in ("id", "source", "type") if not attributes.get(name)]
        if version is None or missing:
            missing = missing if version is not None else ["ce-specversion", *missing]
            raise Malformed(f"this is no CloudEvent: it has no header {', '.join(missing)}")
        if not version.startswith("1."):
            raise Malformed(f"this is a CloudEvent of version {version}, and only 1.0 is known")
        known: dict[str, Any] = {name: attributes.pop(name) for name in TEXTS[:5] if name in attributes}
        try:
            time = attributes.pop("time", None)
            known["time"] = None if time is None else datetime.fromisoformat(time)
            content_type = None if data is None else found.get(CONTENT_TYPE)
            return cls(**known, data=data, datacontenttype=content_type, extensions=attributes)
        except (ConfigError, ValueError) as error:
            raise Malformed(f"this is no CloudEvent: {error}") from None


def as_cloudevents(source: str, kind: Callable[[Publication], str] | None = None) -> BeforePublish:
    """Make an event of each message of a broker: `broker.before_publish(as_cloudevents("/shop"))`.

    Its type is the name of the topic, or what `kind` returns. A message that is an event already stays as it is.
    """
    CloudEvent(type="checked", source=source)

    def complete(publication: Publication) -> None:
        if PREFIX + "type" not in publication.headers:
            name = publication.topic if kind is None else kind(publication)
            event_id = publication.message_id or new_message_id()
            event = CloudEvent(type=name, source=source, id=event_id, data=publication.payload)
            publication.headers.update(event.headers)

    return complete


def content_type_of(data: Any) -> str:
    """As rsmq encodes a payload."""
    return BYTES if isinstance(data, BYTES_LIKE) else TEXT if isinstance(data, str) else JSON


def decoded(data: bytes, content_type: str) -> Any:
    """JSON and text decoded, everything else as bytes."""
    if content_type == JSON:
        return decode_json(data)
    return data.decode() if content_type.startswith("text/") else data
