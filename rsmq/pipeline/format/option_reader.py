"""Reads the options that Spark passes as text. A wrong option raises ConfigError with one line that says what to do."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, TypeVar

from rsmq.errors import ConfigError
from rsmq.model.clock import epoch_ms
from rsmq.model.duration import FORMS, parse_duration
from rsmq.model.keys import check_name
from rsmq.model.settings import unquoted
from rsmq.model.stream_id import LARGEST_PART, is_position
from rsmq.pipeline.format.offsets import BEHIND, NO_ID, Offsets
from rsmq.redis.streams import EARLIEST, LATEST

T = TypeVar("T")

NOTHING_SAVED: Final = Offsets({}, {})
OFFSETS_EXAMPLE: Final = 'such as {"orders": {"0": "1718000000000-0", "1": "earliest"}}'

Bound = str
"""`earliest`, `latest` or a stream id. A start excludes the entry with that id; an end includes it."""


@dataclass(frozen=True)
class Bounds:
    """Where to start or end, by topic and partition, with a `default` for the rest."""

    default: Bound
    by_partition: tuple[tuple[str, int, Bound], ...] = ()
    has_times: bool = False
    saved: Offsets = NOTHING_SAVED
    """Positions with counts, as in the progress of a query: the difference to now must be there, or it is lost."""

    def of(self, topic: str, partition: int) -> Bound:
        """The bound of one stream."""
        return next((b for t, p, b in self.by_partition if (t, p) == (topic, partition)), self.default)


class OptionReader:
    """Options by name, in upper or lower case. Unknown names are refused at once."""

    def __init__(
        self,
        options: Mapping[str, str],
        known: Iterable[str],
        use: str,
        *,
        others: Iterable[str] = (),
        ignored: Iterable[str] = (),
    ) -> None:
        """`use`: `a read` or `a write`; `others`: the options of the other one; `ignored`: options of Spark itself."""
        names = {name.lower(): name for name in known}
        elsewhere = {name.lower(): name for name in others}
        for name in options:
            if name.lower() not in names and name.lower() not in ignored:
                raise ConfigError(refusal(name, names, elsewhere, use))
        self._values = {names[name.lower()]: value for name, value in options.items() if name.lower() in names}

    def text(self, name: str) -> str | None:
        """The option, or None."""
        value = self._values.get(name)
        if value is not None:
            value = unquoted(value)
        if value is not None and not value:
            raise ConfigError(f"the option {name!r} is empty: give it a value or leave it out")
        return value

    def number(self, name: str, default: int) -> int:
        """A whole number, 1 or more."""
        return self._matching(name, default, r"(?=0*[1-9])[0-9]{1,18}", int, "a whole number from 1")

    def rate(self, name: str) -> float | None:
        """A number above 0."""
        pattern = r"(?=[0.]*[1-9])[0-9]{1,9}(\.[0-9]{1,9})?"
        return self._matching(name, None, pattern, float, "messages a second, such as 100 or 0.5")

    def flag(self, name: str, default: bool) -> bool:
        """`true` or `false`."""
        return self._matching(name, default, "(?i:true|false)", lambda text: text.lower() == "true", "true or false")

    def _matching(self, name: str, default: T, pattern: str, parse: Callable[[str], T], hint: str) -> T:
        text = self.text(name)
        if text is None:
            return default
        if not re.fullmatch(pattern, text):
            raise ConfigError(f"{name}={text!r} is not valid: use {hint}")
        return parse(text)

    def choice(self, name: str, choices: tuple[str, ...]) -> str:
        """One of the choices; the first is the default."""
        text = self.text(name)
        if text is None:
            return choices[0]
        if text.lower() not in choices:
            raise ConfigError(f"{name}={text!r} is not valid.{closest(text, choices)}")
        return text.lower()

    def duration(self, name: str) -> timedelta | None:
        """A positive duration."""
        text = self.text(name)
        if text is None:
            return None
        try:
            span = parse_duration(text)
        except ValueError:
            span = timedelta(0)
        if span <= timedelta(0):
            raise ConfigError(f"{name}={text!r} is not a valid duration: use {FORMS}")
        return span

    def bounds(self, by_offset: str, by_time: str, by_times: str, *, is_start: bool) -> Bounds | None:
        """Where to start or end: by offsets, by one time, or by the times of partitions; None if no option is set."""
        offsets, moment, moments = (self.text(name) for name in (by_offset, by_time, by_times))
        given = [name for name in (by_offset, by_time, by_times) if self.text(name) is not None]
        if len(given) > 1:
            raise ConfigError(f"give {' or '.join(given)}, not both")
        if moment is not None:
            return Bounds(bound_at(moment_ms(by_time, moment)), has_times=True)
        if moments is not None:
            times = tuple(partition_times(by_times, moments))
            return Bounds(EARLIEST if is_start else LATEST, times, has_times=True)
        if offsets is None:
            return None
        if offsets.lower() in (EARLIEST, LATEST):
            if offsets.lower() == EARLIEST and not is_start:
                raise ConfigError(f"{by_offset}=earliest reads nothing: use latest, or offsets as JSON")
            return Bounds(offsets.lower())
        found = json_object(by_offset, offsets, OFFSETS_EXAMPLE)
        saved = saved_offsets(found) if is_start else NOTHING_SAVED
        by_partition = tuple(partition_bounds(by_offset, without_counts(found, saved)))
        return Bounds(EARLIEST if is_start else LATEST, by_partition, saved=saved)


def bound_at(ms: int) -> Bound:
    """A time as a bound: a start includes everything at or after it, an end everything before it."""
    return f"{ms - 1}-{LARGEST_PART}" if ms > 0 else NO_ID


def partition_times(name: str, text: str) -> Iterable[tuple[str, int, Bound]]:
    """`{"orders": {"0": 1718000000000, "1": "2026-05-01T12:00:00Z"}}` as tuples."""
    example = 'such as {"orders": {"0": 1718000000000, "1": "2026-05-01T12:00:00Z"}}'
    for topic, times in json_object(name, text, example).items():
        check_name("topic", topic)
        if not isinstance(times, dict) or not all(re.fullmatch(r"[0-9]{1,7}", number) for number in times):
            raise ConfigError(f"{name}: {topic!r} needs an object of partition numbers, {example}")
        for number, time in times.items():
            if isinstance(time, bool) or not isinstance(time, int | str):
                raise ConfigError(f"{name}: {topic}.{number} needs a time, {example}")
            yield topic, int(number), bound_at(moment_ms(name, str(time)))


def saved_offsets(found: dict[str, Any]) -> Offsets:
    """The positions with counts among offsets: those of topics with an epoch, as `Offsets.to_json` writes them."""
    topics = {topic: inner for topic, inner in found.items() if isinstance(inner, dict) and "epoch" in inner}
    counted = {
        topic: {name: value for name, value in inner.items() if name == "epoch" or isinstance(value, dict)}
        for topic, inner in topics.items()
    }
    return Offsets.from_json(counted)


def without_counts(found: dict[str, Any], saved: Offsets) -> dict[str, Any]:
    """The offsets that have no counts."""
    return {
        topic: {name: value for name, value in inner.items() if name != "epoch" and not isinstance(value, dict)}
        if topic in saved.epochs
        else inner
        for topic, inner in found.items()
        if topic != BEHIND
    }


def partition_bounds(name: str, found: dict[str, Any]) -> Iterable[tuple[str, int, Bound]]:
    """`{"orders": {"0": "1718000000000-0", "1": "earliest"}}` as tuples. -2 and -1 mean earliest and latest."""
    example = OFFSETS_EXAMPLE
    kafka: dict[Any, str] = {-2: EARLIEST, -1: LATEST}
    for topic, bounds in found.items():
        check_name("topic", topic)
        if not isinstance(bounds, dict) or not all(re.fullmatch(r"[0-9]{1,7}", number) for number in bounds):
            raise ConfigError(f"{name}: {topic!r} needs an object of partition numbers, {example}")
        for number, bound in bounds.items():
            if isinstance(bound, int):
                bound = kafka.get(bound, "")
            if not isinstance(bound, str) or not (bound in (EARLIEST, LATEST) or is_position(bound)):
                raise ConfigError(f"{name}: {topic}.{number} needs earliest, latest or a stream id, {example}")
            yield topic, int(number), bound if "-" in bound or bound in (EARLIEST, LATEST) else f"{bound}-0"


def moment_ms(name: str, text: str) -> int:
    """A time as milliseconds: ISO 8601 with a time zone, or milliseconds since 1970 as in Spark's Kafka source."""
    if re.fullmatch(r"[0-9]{1,15}", text):
        return int(text)
    try:
        return epoch_ms(datetime.fromisoformat(text))
    except ValueError:
        raise ConfigError(
            f"{name}={text!r} is not a valid time: use 2026-05-01T12:00:00+00:00, or milliseconds since 1970"
        ) from None


def json_object(name: str, text: str, example: str) -> dict[str, Any]:
    """An option that is a JSON object."""
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict) or not found:
        raise ConfigError(f"{name}={text!r} is not valid: use a JSON object, {example}")
    return found


def refusal(name: str, names: Mapping[str, str], elsewhere: Mapping[str, str], use: str) -> str:
    """The message for an unknown option. Both mappings: lower case -> the usual spelling."""
    lower = name.lower()
    if lower == "path":
        return (
            'rsmq has no path: .load() and .save() without one, and .option("subscribe", ...) or .option("topic", ...)'
        )
    if lower == "password":
        return (
            '"password" is not an option: options go to every executor and into logs. Use passwordEnv or passwordFile'
        )
    if lower in elsewhere:
        return f"the option {elsewhere[lower]!r} does not belong to {use}: {', '.join(names.values())}"
    return f"unknown option {name!r}.{closest(lower, names, names.__getitem__)}"


def closest(word: str, known: Iterable[str], spell: Callable[[str], str] = str) -> str:
    """` Did you mean X?`, or a list of all known words."""
    near = difflib.get_close_matches(word.lower(), known, n=1)
    if near:
        return f" Did you mean {spell(near[0])}?"
    return f" Use one of {', '.join(spell(each) for each in known)}"
