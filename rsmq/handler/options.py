"""The options of a handler: their names, types, defaults and checks. Each is checked when the handler is registered."""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final, Literal, Required, TypedDict, get_args

from rsmq.errors import ConfigError
from rsmq.handler.bands import BandRules, Pick
from rsmq.handler.breaker import Breaker
from rsmq.handler.concurrency import Concurrency
from rsmq.handler.fallback import Fallback
from rsmq.handler.quiet_hours import QuietHours, When
from rsmq.handler.rate_limit import Rate
from rsmq.handler.retry import RetryPolicy
from rsmq.handler.tenants import TenantOf, Tenants, Weights
from rsmq.model.clock import epoch_ms
from rsmq.model.duration import Duration, checked_duration
from rsmq.model.keys import check_name
from rsmq.model.named_topic import NamedTopic
from rsmq.model.partition import MOST_PARTITIONS
from rsmq.model.publish_options import refuse_unknown
from rsmq.model.stream_id import is_position

PermitLimits = Rate | Concurrency | Sequence[Rate | Concurrency]
Ordering = Literal["key", "partition", "none"]
Distribution = Literal["hash", "shared"]
Execution = Literal["inline", "thread", "process"]
By = Literal["key"]
LONGEST_LINGER: Final = timedelta(hours=24)
MOST_GATHERED: Final = 1000
"""Messages of one call by key: the server marks all of them in one step."""


class SingleOptions(TypedDict, total=False):
    """The options of `handler`, without those of batches."""

    group: Required[str]
    concurrency: int
    ordering: Ordering | None
    distribution: Distribution
    retry: RetryPolicy | None
    timeout: Duration | float | None
    soft_timeout: Duration | float | None
    start: str | datetime
    partitions: int | None
    execution: Execution | None
    rate: Rate | Sequence[Rate] | None
    when: When | None
    group_concurrency: int | Concurrency | Sequence[Concurrency] | None
    tenant: TenantOf | None
    weights: Weights | None
    breaker: Breaker | None
    permits: Mapping[str, PermitLimits] | None
    output: str | Sequence[str] | None
    replies: bool
    fallback: str | NamedTopic | Fallback | None
    pick: Pick
    aging: Duration | None
    reserve: Mapping[str, int] | None


class HandlerOptions(SingleOptions, total=False):
    """The options of `handler`. `Router.handler` describes them; `DEFAULTS` has their defaults."""

    batch: int | None
    linger: Duration | None
    by: By | None


DEFAULTS: Final[Mapping[str, Any]] = dict.fromkeys(HandlerOptions.__annotations__) | {
    "concurrency": 64, "distribution": "hash", "start": "earliest", "replies": False, "pick": "strict", "aging": "30s"
}  # fmt: skip


def is_amount(value: object) -> bool:
    """Whether a value is a whole number of 1 or more."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


class OptionCheck:
    """Checks the options of one handler, called `title` in errors. Every method raises ConfigError."""

    def __init__(self, title: str, options: Mapping[str, Any]) -> None:
        self._title = title
        refuse_unknown(f"handler {title}", options, DEFAULTS)
        self._options = {**DEFAULTS, **options}
        self.is_batch = self._options["batch"] is not None

    def checked(self, function: Callable[..., Any], *, is_async: bool, has_dependencies: bool) -> dict[str, Any]:
        """All options, checked and with defaults filled in: the fields of a `Handler`."""
        return {
            "group": self._group(),
            "concurrency": self._count("concurrency"),
            "ordering": self._ordering(),
            "distribution": self._one_of("distribution", Distribution),
            "retry": self._retry(),
            "timeout": self._seconds("timeout"),
            "soft_timeout": self._soft_timeout(is_async=is_async),
            "batch": self._count_or_none("batch"),
            "linger": self._linger(),
            "by": self._by(),
            "start": self._start(),
            "partitions": self._count_or_none("partitions", MOST_PARTITIONS),
            "execution": self._execution(function, is_async=is_async, has_dependencies=has_dependencies),
            "rates": self._rates(),
            "when": self._when(),
            "group_concurrency": self._group_concurrency(),
            "tenants": self._tenants(),
            "breaker": self._breaker(),
            "permits": self._permits(),
            "outputs": self._outputs(),
            "replies": self._replies(),
            "bands": self._bands(),
        }

    def _bands(self) -> BandRules:
        pick, aging = self._options["pick"], self._options["aging"]
        if pick != "strict" and (not isinstance(pick, Mapping) or not pick or not all(map(is_amount, pick.values()))):
            raise self._wrong(
                f"pick={pick!r} is not possible: write pick='strict', the highest band first, or whole numbers from 1 "
                f"as weights, such as pick={{'urgent': 8, 'normal': 3}}"
            )
        span = None if aging is None else self._duration("aging")
        if span is not None and span <= timedelta(0):
            raise self._wrong(f"aging={aging!r} is not above 0: write aging='30s', or aging=None for never")
        return BandRules(None if pick == "strict" else dict(pick), span, self._reserve())

    def _reserve(self) -> dict[str, int]:
        value = self._options["reserve"]
        if value is None:
            return {}
        if not isinstance(value, Mapping) or not value or not all(map(is_amount, value.values())):
            raise self._wrong(
                f"reserve={value!r} is not possible: name slots for a band, such as reserve={{'urgent': 2}}"
            )
        group = [each.limit for each in self._group_concurrency() if each.by is None]
        slots = min([self._count("concurrency"), *group])
        if sum(value.values()) >= slots:
            raise self._wrong(
                f"reserve={value!r} keeps all {slots} slots: leave at least one for the other bands, or raise "
                f"{'concurrency' if slots == self._options['concurrency'] else 'group_concurrency'}"
            )
        return dict(value)

    def _replies(self) -> bool:
        value = self._options["replies"]
        if not isinstance(value, bool):
            raise self._wrong(f"replies={value!r}: write replies=True to answer requests")
        if value and self.is_batch:
            raise self._wrong("replies=True answers one message at a time: leave batch out")
        return value

    def _outputs(self) -> tuple[str, ...]:
        value = self._options["output"]
        topics = () if value is None else (value,) if isinstance(value, str) else value
        if not isinstance(topics, list | tuple):
            raise self._wrong(f"output={value!r} is no topic: write output='invoices', or a list of topics")
        names = tuple(check_name("topic", each) for each in topics)
        if len(set(names)) < len(names):
            raise self._wrong(f"output={value!r} names a topic twice")
        return names

    def _wrong(self, text: str) -> ConfigError:
        return ConfigError(f"handler {self._title}: {text}")

    def _one_of(self, option: str, choices: Any) -> Any:
        value = self._options[option]
        if value not in get_args(choices):
            known = " or ".join(repr(choice) for choice in get_args(choices))
            raise self._wrong(f"{option}={value!r} is unknown: use {known}")
        return value

    def _count(self, option: str, most: int | None = None) -> int:
        value = self._options[option]
        is_number = isinstance(value, int) and not isinstance(value, bool)
        if not is_number or value < 1 or (most is not None and value > most):
            limit = "of 1 or more" if most is None else f"from 1 to {most}"
            raise self._wrong(f"{option}={value!r} is not a whole number {limit}")
        return int(value)

    def _count_or_none(self, option: str, most: int | None = None) -> int | None:
        return None if self._options[option] is None else self._count(option, most)

    def _group(self) -> str:
        if self._options["group"] is None:
            raise self._wrong("the group is missing: write group='billing', the name of what handles the topic")
        return check_name("group", self._options["group"])

    def _ordering(self) -> Ordering:
        value, is_shared = self._options["ordering"], self._options["distribution"] == "shared"
        if value is None:
            return "none" if is_shared else "key"
        if value in ("key", "partition") and is_shared:
            raise self._wrong(
                f"distribution='shared' has no order, so ordering={value!r} cannot hold: leave one of them out"
            )
        chosen: Ordering = self._one_of("ordering", Ordering)
        return chosen

    def _retry(self) -> RetryPolicy:
        value = self._options["retry"]
        if value is not None and not isinstance(value, RetryPolicy):
            raise self._wrong(f"retry={value!r} is not a policy: write retry=RetryPolicy(max_attempts=5)")
        return RetryPolicy() if value is None else value

    def _soft_timeout(self, *, is_async: bool) -> timedelta | None:
        """Only an async handler can be asked to end: it is cancelled once."""
        soft, hard = self._seconds("soft_timeout"), self._seconds("timeout")
        if soft is None:
            return None
        if not is_async:
            raise self._wrong("soft_timeout cancels an `async def` handler once: a plain function cannot be cancelled")
        if hard is None or soft >= hard:
            raise self._wrong("soft_timeout needs a longer timeout: write soft_timeout='25s', timeout='30s'")
        return soft

    def _seconds(self, option: str) -> timedelta | None:
        """A limit of a call. A number is seconds: in no other option a bare number is a time."""
        value = self._options[option]
        if value is None:
            return None
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            span = timedelta(seconds=max(-1, min(value, 10**9)))
        else:
            span = self._duration(option)
        if span > timedelta(0):
            return span
        raise self._wrong(f"{option}={value!r} is not above 0: write {option}='30s', or leave it out")

    def _linger(self) -> timedelta:
        value = self._options["linger"]
        if value is None:
            return timedelta(0)
        if not self.is_batch:
            raise self._wrong("linger needs batch, such as batch=500: single messages never wait")
        span = self._duration("linger")
        if span < timedelta(0):
            raise self._wrong(f"linger={value!r} is negative: write linger='50ms'")
        return span

    def _by(self) -> By | None:
        """What waits is pending with its owner, as an id."""
        value = self._options["by"]
        if value is None:
            return None
        self._one_of("by", By)
        if not self.is_batch:
            raise self._wrong("by='key' needs batch, such as batch=500: its call has many messages of one key")
        if self._options["distribution"] == "shared" or self._ordering() != "key":
            raise self._wrong(
                "by='key' needs the owner of a key: use ordering='key', and leave distribution='shared' out"
            )
        if self._count("batch") > MOST_GATHERED:
            raise self._wrong(f"batch={self._options['batch']!r} is above {MOST_GATHERED}, the most with by='key'")
        if self._linger() > LONGEST_LINGER:
            raise self._wrong(f"linger={self._options['linger']!r} is above 24h, the longest with by='key'")
        if self._options["tenant"] is not None:
            raise self._wrong("by='key' takes the keys that are due in order, not tenants in turn: leave tenant out")
        return value  # type: ignore[no-any-return]

    def _duration(self, option: str) -> timedelta:
        try:
            return checked_duration(option, self._options[option])
        except ConfigError as error:
            raise self._wrong(str(error)) from None

    def _start(self) -> str | datetime:
        value = self._options["start"]
        if isinstance(value, datetime):
            epoch_ms(value)  # raises for a time without a zone
            return value
        if isinstance(value, str) and (value in ("earliest", "latest") or is_position(value)):
            return value
        raise self._wrong(
            f"start={value!r} is not a position in a topic: use 'earliest', 'latest', a stream id such as "
            f"'1700000000000-0' or an aware datetime"
        )

    def _rates(self) -> tuple[Rate, ...]:
        """At most one of each kind: each kind has its own way to count."""
        value = self._options["rate"]
        rates = () if value is None else tuple(value) if isinstance(value, list | tuple) else (value,)
        for each in rates:
            if not isinstance(each, Rate):
                raise self._wrong(f"rate={each!r} is not a Rate: write rate=Rate(100, per='1s')")
        if rates and self.is_batch:
            raise self._wrong("rate counts single messages: leave batch out, or use concurrency")
        kinds = Counter("key" if each.by == "key" else "name" if each.name_of else "" for each in rates)
        if rates and max(kinds.values()) > 1:
            raise self._wrong(
                "several rates of one kind: give it at most one by='key', one by=a function of the message, and one "
                "without `by`"
            )
        if kinds["key"] and self._ordering() != "key":
            raise self._wrong(
                "a rate by='key' needs the owner of a key: use ordering='key', and leave distribution='shared' out"
            )
        return rates

    def _when(self) -> When | None:
        """What waits is pending with its owner, as an id."""
        value = self._options["when"]
        if value is None:
            return None
        if not isinstance(value, QuietHours) and not callable(value):
            raise self._wrong(
                f"when={value!r} is no rule: write QuietHours('22:00', '08:00', default='Asia/Seoul'), or a function "
                f"from a message to an aware datetime, or None for now"
            )
        if self._options["by"] is not None:
            raise self._wrong(
                "what waits for a call by='key' is ids, so when its window ends there is no message that `when` could "
                "be asked about: leave when out, and publish the result into a topic whose handler has it"
            )
        if self.is_batch:
            raise self._wrong("when lets single messages wait: leave batch out")
        if self._options["distribution"] == "shared":
            raise self._wrong(
                "distribution='shared' cannot let messages wait for a time, because no member owns them: leave when "
                "out, or use distribution='hash'"
            )
        if self._ordering() == "partition":
            raise self._wrong(
                "with ordering='partition' one message that waits for the morning stops its whole partition: leave "
                "when out, or use ordering='key'"
            )
        return value  # type: ignore[no-any-return]

    def _group_concurrency(self) -> tuple[Concurrency, ...]:
        """At most one over all messages, and one by name. Partitions go to members that may run a call, which shared
        distribution does not have."""
        value = self._options["group_concurrency"]
        if value is None:
            return ()
        if self._options["distribution"] == "shared":
            raise self._wrong(
                "distribution='shared' cannot enforce a limit over the group: leave group_concurrency out, or use "
                "distribution='hash', where partitions have owners"
            )
        if not isinstance(value, Concurrency | list | tuple):
            value = Concurrency(self._count("group_concurrency"))
        limits = (value,) if isinstance(value, Concurrency) else tuple(value)
        for each in limits:
            if not isinstance(each, Concurrency):
                raise self._wrong(
                    f"group_concurrency={each!r} is not a limit: write group_concurrency=10, or Concurrency(2, by=...)"
                )
        if len({each.by is None for each in limits}) < len(limits):
            raise self._wrong(
                "several limits of one kind: give group_concurrency at most one with `by`, and one without"
            )
        if self.is_batch and any(each.by for each in limits):
            raise self._wrong("group_concurrency with `by` counts single messages: leave batch out, or leave `by` out")
        return limits

    def _tenants(self) -> Tenants | None:
        """Each owner serves the tenants of its partitions in turn."""
        function, weights = self._options["tenant"], self._options["weights"]
        if function is None:
            if weights is not None:
                raise self._wrong("weights are those of tenants: add tenant=lambda message: message.headers['tenant']")
            return None
        if self._options["distribution"] == "shared":
            raise self._wrong(
                "distribution='shared' has no tenants, because what one member keeps waiting no other could start: "
                "leave tenant out, or use distribution='hash', where partitions have owners"
            )
        if self._ordering() == "partition":
            raise self._wrong(
                "ordering='partition' handles all messages in the order of the partition, not in turns: "
                "leave tenant out, or use ordering='key'"
            )
        try:
            return Tenants(function, weights)
        except ConfigError as error:
            raise self._wrong(str(error)) from None

    def _permits(self) -> dict[str, tuple[Rate | Concurrency, ...]]:
        """Each name with at most one limit of each kind, over the group."""
        value, found = self._options["permits"], dict[str, tuple[Rate | Concurrency, ...]]()
        if value is None:
            return found
        if not isinstance(value, Mapping):
            raise self._wrong(f"permits={value!r} are none: write permits={{'twilio': Rate(100, per='1s')}}")
        for name, given in value.items():
            limits = tuple(given) if isinstance(given, list | tuple) else (given,)
            if not isinstance(name, str) or not name:
                raise self._wrong(f"a permit with the name {name!r} is not possible: give text")
            for each in limits:
                if not isinstance(each, Rate | Concurrency):
                    raise self._wrong(
                        f"the permit {name!r} is {each!r}: write Rate(100, per='1s'), Concurrency(5), or both"
                    )
                if each.by is not None or (isinstance(each, Rate) and (each.over == "member" or each.cost)):
                    raise self._wrong(
                        f"the permit {name!r} has a limit with `by`, `cost` or over='member': leave it out"
                    )
            if not limits or len({type(each) for each in limits}) < len(limits):
                raise self._wrong(f"the permit {name!r} needs a Rate, a Concurrency, or one of each")
            if self._options["distribution"] == "shared" and any(isinstance(each, Concurrency) for each in limits):
                raise self._wrong(f"distribution='shared' cannot enforce the Concurrency of the permit {name!r}")
            found[name] = limits
        return found

    def _breaker(self) -> Breaker | None:
        value = self._options["breaker"]
        if value is not None and not isinstance(value, Breaker):
            raise self._wrong(f"breaker={value!r} is not a Breaker: write breaker=Breaker(failures=5, hold='30s')")
        if value is not None and self.is_batch:
            raise self._wrong("breaker counts single messages: leave batch out")
        return value

    def _execution(self, function: Any, *, is_async: bool, has_dependencies: bool) -> Execution:
        if self._options["execution"] is None:
            return "inline" if is_async else "thread"
        chosen: Execution = self._one_of("execution", Execution)
        if is_async != (chosen == "inline"):
            kind, other = ("an async def", "a plain def") if is_async else ("a plain def", "async def")
            raise self._wrong(f"{kind} cannot run with execution={chosen!r}: write {other}, or leave it out")
        if chosen == "process" and has_dependencies:
            raise self._wrong("dependencies cannot be sent to another process: open them in the function")
        if chosen == "process" and not (inspect.isfunction(function) and "<" not in function.__qualname__):
            raise self._wrong(
                "execution='process' needs a function that another process can import by name: define it with def at "
                "module level"
            )
        return chosen
