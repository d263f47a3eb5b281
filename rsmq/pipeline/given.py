"""Options as Spark hands them over: text by name. Each is read and checked here; a mistake is one line that helps."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError

from rsmq.clock import epoch_ms
from rsmq.errors import ConfigError
from rsmq.keys import check_name
from rsmq.stream import EARLIEST, LATEST, MOST_SEQUENCE, STREAM_ID

BEFORE_ALL: Final = "0-0"

Bound = str
"""`earliest`, `latest` or a stream id; of a start, what comes after the id is read, of an end, the id is read, too."""


@dataclass(frozen=True)
class Bounds:
    """Where to start, or end, by topic and partition; `default` for the rest."""

    default: Bound
    by_partition: tuple[tuple[str, int, Bound], ...] = ()

    def of(self, topic: str, partition: int) -> Bound:
        """The bound of one stream."""
        return next((b for t, p, b in self.by_partition if (t, p) == (topic, partition)), self.default)


class Given:
    """The options as Spark hands them over: text by name, in any case. Unknown names are refused at once."""

    def __init__(
        self,
        given: Mapping[str, str],
        known: Iterable[str],
        what: str,
        *,
        others: Iterable[str] = (),
        ignored: Iterable[str] = (),
    ) -> None:
        """`what`: whose options these are; `others`: names that belong elsewhere; `ignored`: what Spark puts here."""
        names = {name.lower(): name for name in known}
        elsewhere = {name.lower(): name for name in others}
        for name in given:
            if name.lower() not in names and name.lower() not in ignored:
                raise ConfigError(refusal(name, names, elsewhere, what))
        self._values = {names[name.lower()]: value for name, value in given.items() if name.lower() in names}

    def text(self, name: str) -> str | None:
        """The option, or None."""
        value = self._values.get(name)
        if value is not None and not value.strip():
            raise ConfigError(f"the option {name!r} is empty: give it a value or leave it out")
        return value

    def number(self, name: str, default: int) -> int:
        """A whole number from 1."""
        text = self.text(name)
        if text is None:
            return default
        if not re.fullmatch(r"[0-9]{1,18}", text) or int(text) < 1:
            raise ConfigError(f"{name}={text!r} is not possible: use a whole number from 1")
        return int(text)

    def rate(self, name: str) -> float | None:
        """A number above 0."""
        text = self.text(name)
        if text is None:
            return None
        if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", text) or float(text) == 0:
            raise ConfigError(f"{name}={text!r} is not possible: use messages a second, such as 100 or 0.5")
        return float(text)

    def flag(self, name: str, default: bool) -> bool:
        """`true` or `false`."""
        text = self.text(name)
        if text is None:
            return default
        if text.lower() not in ("true", "false"):
            raise ConfigError(f"{name}={text!r} is not possible: use true or false")
        return text.lower() == "true"

    def choice(self, name: str, choices: tuple[str, ...]) -> str:
        """One of the choices; the first is the default."""
        text = self.text(name)
        if text is None:
            return choices[0]
        if text.lower() not in choices:
            raise ConfigError(f"{name}={text!r} is not possible.{closest(text, choices)}")
        return text.lower()

    def duration(self, name: str) -> timedelta | None:
        """ISO 8601, positive."""
        text = self.text(name)
        if text is None:
            return None
        try:
            span = TypeAdapter(timedelta).validate_python(text)
        except ValidationError:
            span = timedelta(0)
        if span <= timedelta(0) or not text.upper().startswith("P"):
            raise ConfigError(f"{name}={text!r} is not possible: a duration is ISO 8601, such as PT10M or P1D")
        return span

    def bounds(self, by_offset: str, by_time: str, *, is_start: bool) -> Bounds | None:
        """Where to start or end: by offsets or by time, None when neither is said."""
        offsets, moment = self.text(by_offset), self.text(by_time)
        if offsets is not None and moment is not None:
            raise ConfigError(f"give {by_offset} or {by_time}, not both")
        if moment is not None:
            ms = moment_ms(by_time, moment)
            # of a start everything at or after the moment is read, of an end everything before it
            return Bounds(f"{ms - 1}-{MOST_SEQUENCE}" if ms > 0 else BEFORE_ALL)
        if offsets is None:
            return None
        if offsets.lower() in (EARLIEST, LATEST):
            if offsets.lower() == EARLIEST and not is_start:
                raise ConfigError(f"{by_offset}=earliest reads nothing: use latest, or offsets as JSON")
            return Bounds(offsets.lower())
        return Bounds(EARLIEST if is_start else LATEST, tuple(partition_bounds(by_offset, offsets)))


def partition_bounds(name: str, text: str) -> Iterable[tuple[str, int, Bound]]:
    """`{"orders": {"0": "1718000000000-0", "1": "earliest"}}` as tuples. -2 and -1 mean earliest and latest."""
    example = 'such as {"orders": {"0": "1718000000000-0", "1": "earliest"}}'
    kafka: dict[Any, str] = {-2: EARLIEST, -1: LATEST}
    for topic, bounds in json_object(name, text, example).items():
        check_name("topic", topic)
        if not isinstance(bounds, dict) or not all(re.fullmatch(r"[0-9]{1,4}", number) for number in bounds):
            raise ConfigError(f"{name}: {topic!r} needs an object of partition numbers, {example}")
        for number, bound in bounds.items():
            if isinstance(bound, int):
                bound = kafka.get(bound, "")
            if not isinstance(bound, str) or not (bound in (EARLIEST, LATEST) or STREAM_ID.fullmatch(bound)):
                raise ConfigError(f"{name}: {topic}.{number} needs earliest, latest or a stream id, {example}")
            yield topic, int(number), bound if "-" in bound or bound in (EARLIEST, LATEST) else f"{bound}-0"


def moment_ms(name: str, text: str) -> int:
    """A moment as milliseconds: ISO 8601 with a time zone, or milliseconds since 1970 as for Spark's Kafka source."""
    if re.fullmatch(r"[0-9]{1,15}", text):
        return int(text)
    try:
        return epoch_ms(datetime.fromisoformat(text))
    except ValueError:
        raise ConfigError(
            f"{name}={text!r} is not understood: use 2026-05-01T12:00:00+00:00, or milliseconds since 1970"
        ) from None


def json_object(name: str, text: str, example: str) -> dict[str, Any]:
    """An option that is a JSON object."""
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict) or not found:
        raise ConfigError(f"{name}={text!r} is not understood: it is a JSON object, {example}")
    return found


def is_index(value: object) -> bool:
    """Whether it can be the number of a partition."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1024


def refusal(name: str, names: Mapping[str, str], elsewhere: Mapping[str, str], what: str) -> str:
    """What to say about a name that is no option here. Both mappings: lower case -> as it is written."""
    lower = name.lower()
    if lower == "path":
        return (
            'rsmq has no path: .load() and .save() without one, and .option("subscribe", ...) or .option("topic", ...)'
        )
    if lower == "password":
        return '"password" is no option: options go to every executor and into logs. Give passwordEnv or passwordFile'
    if lower in elsewhere:
        return f"the option {elsewhere[lower]!r} is not one of {what}: {', '.join(names.values())}"
    return f"unknown option {name!r}.{closest(lower, names, names.__getitem__)}"


def closest(word: str, known: Iterable[str], spell: Callable[[str], str] = str) -> str:
    """` Did you mean X?`, or all that is known."""
    near = difflib.get_close_matches(word.lower(), known, n=1)
    if near:
        return f" Did you mean {spell(near[0])}?"
    return f" Use one of {', '.join(spell(each) for each in known)}"
