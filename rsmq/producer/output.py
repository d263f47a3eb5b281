"""An output: a message that a handler publishes, and that is stored when the handler's own message is settled."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

from rsmq.model.batch_member import BatchMember
from rsmq.model.body import Body
from rsmq.model.encoding import NO_CODECS, Encoding
from rsmq.model.json import decode_json
from rsmq.model.keys import Keys
from rsmq.model.message import JSON, Message, MessageOrigin
from rsmq.model.message_ref import MessageRef, location
from rsmq.model.packing import pack_fields
from rsmq.model.partition import route_of
from rsmq.redis.scripts import Value
from rsmq.redis.topics import Topic

OUT_LENGTH: Final = 10_000
"""Entries of an out-stream. When it is full, settlements with outputs wait."""
OUT_FIELDS: Final = frozenset({b"out.topic", b"out.partition", b"out.due", b"out.window", b"out.batch"})
"""Fields of an entry of an out-stream beside those of the message."""


@dataclass(frozen=True, slots=True)
class OwnKey:
    """A stream in the slot of the settled partition that takes an output, also on a cluster, and its limit."""

    name: str
    max_length: int


@dataclass(frozen=True, slots=True)
class ResultKey:
    """A string in the slot of the settled partition that takes a result, and for how many ms."""

    name: str
    ttl_ms: int


@dataclass(frozen=True, slots=True, eq=False)
class Output:
    """One output, encoded. `due`: empty, or when it is to be delivered (see `due_time`). `is_once`: its id was given,
    so it is stored once within the dedup window. `body`: where the payload lies in a store, what was put there.
    `member`: which member of a batch it is."""

    target: Topic
    partition: int
    message_id: str
    fields: Sequence[bytes | str] = field(repr=False)
    size: int
    due: str
    is_once: bool
    own: OwnKey | ResultKey | None = None
    encoding: Encoding = NO_CODECS
    body: Body | None = None
    member: BatchMember | None = None

    def with_body(self, body: Body) -> Output:
        """The same with its body under another name."""
        return replace(self, fields=[*self.fields[:-1], body.name], body=body)

    @property
    def topic(self) -> str:
        """The topic's name."""
        return self.target.name

    def routed(self, target: Topic) -> Output:
        """The same for its topic as it is now: if that was resized, it goes to the partition that follows."""
        if self.own is not None or not target.layout.is_sealed(self.partition):
            return self
        partition = target.layout.partition_after(self.partition, route_of(self.fields, self.message_id))
        return replace(self, target=target, partition=partition)

    @property
    def ref(self) -> MessageRef:
        """The ref that the handler gets for it."""
        ref = MessageRef.of(self.message_id, location(self.target.name, self.partition), self.key)
        if self.is_once:
            ref.is_new = None
            ref.is_same = None
        return ref

    @property
    def key(self) -> str | None:
        """The ordering key."""
        return self.message.key

    @property
    def headers(self) -> dict[str, str]:
        """The headers."""
        return self.message.headers

    @property
    def payload(self) -> Any:
        """The payload as a handler of the topic may get it: JSON decoded, text as str, other types as bytes."""
        message = self.message
        if message.type == JSON:
            return decode_json(message.data)
        return message.data.decode() if message.type.startswith("text/") else message.data

    @property
    def message(self) -> Message:
        """The message as its handler will get it."""
        raw = [part.encode() if isinstance(part, str) else part for part in self.fields]
        message = Message(MessageOrigin(self.topic, self.partition, ""), b"0-0", raw)
        if self.body is not None:
            message.bring(self.body.data)
        message.undo(self.encoding)
        return message


class TargetLimits(Protocol):
    """A producer, as far as this module needs it."""

    @property
    def keys(self) -> Keys: ...
    @property
    def window_ms(self) -> int: ...

    def topic(self, output: Output) -> Topic: ...


class OutputArguments:
    """Keys and arguments of `settle_outputs.lua` for outputs, each key once. The limits are those of now.

    `out`: on a cluster, the out-stream that takes all of them, because their targets are in other slots.
    """

    def __init__(self, limits: TargetLimits, outputs: Iterable[Output], *, first: Sequence[str], out: str = "") -> None:
        self._limits, self._out = limits, out
        streams, zsets, strings = dict[str, None](), dict[str, None](), dict[str, None]()
        for output in outputs:
            kind = strings if isinstance(output.own, ResultKey) else zsets if output.due and not out else streams
            kind[self._target(output)] = None
            if output.is_once and not out:
                strings[self._dedup(output)] = None
        self.keys = [*first, *streams, *zsets, *strings]
        self._positions = {key: position for position, key in enumerate(self.keys, 1)}
        self._rules = {output: self._rule(output) for output in outputs}
        self.counts = (len(streams), len(zsets), int(any(self._rules.values())))

    def of(self, output: Output) -> list[Value]:
        """The arguments of one output."""
        stored: Sequence[Value] = output.fields
        if output.own is not None:
            pass
        elif self._out:
            stored = (*output.fields, *self._destination(output))
        elif output.due:
            stored = (pack_fields(output.fields),)
        return [self._positions[self._target(output)], self._rules[output], len(stored), *stored]

    def _target(self, output: Output) -> str:
        if output.own is not None:
            return output.own.name
        if self._out:
            return self._out
        key = self._limits.keys.delayed if output.due else self._limits.keys.stream
        return key(output.topic, output.partition)

    def _dedup(self, output: Output) -> str:
        layout = output.target.layout
        root = layout.root_of(output.partition) if layout.is_resized else output.partition
        return self._limits.keys.dedup(output.topic, root, output.message_id)

    def _rule(self, output: Output) -> str:
        if isinstance(output.own, ResultKey):
            return ""
        if output.own is not None:
            return f"{output.own.max_length} trim 0 0 "
        if self._out:
            return f"{OUT_LENGTH} reject 0 0 "
        topic = self._limits.topic(output)
        if not (topic.max_length or output.is_once or output.due):
            return ""
        dedup = self._positions[self._dedup(output)] if output.is_once else 0
        return f"{topic.max_length} {topic.on_full} {dedup} {self._limits.window_ms} {output.due}"

    def _destination(self, output: Output) -> Iterator[Value]:
        """The fields of an entry of an out-stream that say where it goes: see `OUT_FIELDS`."""
        yield from ("out.topic", output.topic, "out.partition", output.partition)
        if output.due:
            yield from ("out.due", output.due)
        if output.is_once:
            yield from ("out.window", self._limits.window_ms)
