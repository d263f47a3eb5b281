"""A handler as the worker gets it: validated when it is registered, so that nothing is decided per message.

Its signature becomes a decoder and a call. No I/O; this module does not know when or where a handler runs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import islice
from typing import Any, Final, Unpack

from rsmq.errors import ConfigError
from rsmq.handler.bands import BandRules
from rsmq.handler.breaker import Breaker
from rsmq.handler.concurrency import Concurrency
from rsmq.handler.dead_hook import DeadFunction
from rsmq.handler.dependencies import with_dependencies
from rsmq.handler.fallback import Fallback, checked_fallback
from rsmq.handler.middleware import Middleware
from rsmq.handler.options import By, Distribution, Execution, HandlerOptions, OptionCheck, Ordering
from rsmq.handler.payload import Decoder, decode_nothing, decoder_for, formats_for, refusal_of
from rsmq.handler.quiet_hours import When
from rsmq.handler.rate_limit import Rate
from rsmq.handler.read_back import reader_back
from rsmq.handler.retry import RetryPolicy
from rsmq.handler.service import Service
from rsmq.handler.signature import UNDECLARED, Signature, read_signature
from rsmq.handler.tenants import Tenants
from rsmq.model.keys import check_name
from rsmq.model.message import Message
from rsmq.model.words import count, duration

log = logging.getLogger("rsmq.handler")

MOST_WEIGHTS: Final = 20
"""Weights of tenants that a member tells."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Handler:
    """One function for one topic and group. Make it with `build_handler`, which checks every field.

    `invoke(message)` calls the function with the arguments of its signature; set `message.payload` with `decode`
    first. A batch handler has `invoke_batch(messages)` instead. The result of an `async def` (`is_async`) must be
    awaited. `around` is the handler's own middleware, which runs inside the broker's. `services` are those that its
    dependencies need in the worker. `problem_of` says why a payload would not come back as it was published, and is
    there only for a type that does not read what it writes. `stores_letters`: its effect is letters in inboxes, which
    another server process may have lost with their settlement. `refuse` answers a request that becomes a dead letter,
    before `on_dead` is called.
    """

    function: Callable[..., Any]
    name: str
    topic: str
    group: str
    concurrency: int
    ordering: Ordering
    distribution: Distribution
    retry: RetryPolicy
    timeout: timedelta | None
    soft_timeout: timedelta | None
    batch: int | None
    linger: timedelta
    by: By | None
    start: str | datetime
    partitions: int | None
    execution: Execution
    rates: tuple[Rate, ...]
    when: When | None
    group_concurrency: tuple[Concurrency, ...]
    tenants: Tenants | None
    breaker: Breaker | None
    permits: dict[str, tuple[Rate | Concurrency, ...]]
    outputs: tuple[str, ...]
    replies: bool
    bands: BandRules
    signature: Signature
    decode: Decoder
    invoke: Callable[[Message], Any]
    invoke_batch: Callable[[Sequence[Message]], Any]
    around: tuple[Middleware, ...] = ()
    services: tuple[Service, ...] = ()
    on_dead: DeadFunction | None = None
    refuse: DeadFunction | None = None
    formats: Mapping[str, Decoder] = field(default_factory=dict)
    fallback: Fallback | None = None
    problem_of: Callable[[Any], str] | None = None
    stores_letters: bool = False

    @property
    def is_async(self) -> bool:
        """Whether the result of a call must be awaited."""
        return self.signature.is_async

    @property
    def most_calls(self) -> int | None:
        """How many calls may run at once in the whole group; None: no limit."""
        return next((each.limit for each in self.group_concurrency if each.by is None), None)

    @property
    def counts_messages(self) -> bool:
        """Whether a limit must know which messages have left the handler."""
        has_permits = any(each.by is not None for each in self.group_concurrency)
        return has_permits or self.breaker is not None or any(each.cost is not None for each in self.rates)

    @property
    def has_limits(self) -> bool:
        """Whether its messages can be held: single ones, under a rate, a limit over the group or a breaker."""
        return self.batch is None and bool(self.rates or self.group_concurrency or self.breaker or self.permits)

    @property
    def limit_texts(self) -> list[str]:
        """Its rates and limits over the group, in words."""
        found = list[str]()
        for each in self.rates:
            by = "" if each.by is None else " by key" if each.by == "key" else " by name"
            found.append(f"{each.limit} per {duration(each.per)}{by}{' a member' if each.over == 'member' else ''}")
        for limit in self.group_concurrency:
            found.append(f"{limit.limit} at once{'' if limit.by is None else ' by name'}")
        if self.tenants is not None:
            found.append("tenants in turn")
        if self.breaker is not None:
            found.append(f"held for {duration(self.breaker.hold)} after {count(self.breaker.failures, 'failure')}")
        return found

    @property
    def known_weights(self) -> dict[str, float]:
        """The weights of tenants that are written down, at most MOST_WEIGHTS; a function knows them only by name."""
        weights = None if self.tenants is None else self.tenants.weights
        return dict(islice(weights.items(), MOST_WEIGHTS)) if isinstance(weights, Mapping) else {}

    @property
    def name_of(self) -> Callable[[Message], str | None] | None:
        """What gives a message the name under which it is held; None: all messages have one."""
        named = [each for each in (self.breaker, *self.rates, *self.group_concurrency) if each is not None and each.by]
        function = next((each.by for each in named if callable(each.by)), None)
        has_one = not named and (self.breaker or self.rates or self.group_concurrency)
        return function if function or has_one else lambda _message: None

    def __repr__(self) -> str:
        return f"<Handler {self.name} {self.topic}/{self.group}>"


def build_handler(
    function: Callable[..., Any],
    topic: str,
    *,
    name: str | None = None,
    payload: Any = UNDECLARED,
    **options: Unpack[HandlerOptions],
) -> Handler:
    """A checked handler, with defaults filled in. `Router.handler` describes the options.

    `payload` is the type that the topic declares; without one the function's annotation decides. Raises ConfigError
    that says what to write instead.
    """
    title = name or getattr(function, "__qualname__", type(function).__name__).rpartition("<locals>.")[2]
    check = OptionCheck(title, options)
    called = with_dependencies(function, title, is_batch=check.is_batch)
    signature = read_signature(called, title, is_batch=check.is_batch, declared=payload)
    checked = check.checked(function, is_async=signature.is_async, has_dependencies=called is not function)
    services: tuple[Service, ...] = getattr(called, "services", ())
    effects = [each for each in services if getattr(each, "_commits", False)]
    if len(effects) > 1:
        raise ConfigError(
            f"handler {title}: {' and '.join(map(repr, effects))} commit one after the other: if the second commit "
            f"fails, the mark of the first one would skip the message. Use one of them; for a second database write "
            f"`outbox.publish(session, ...)` to a topic whose handler writes there"
        )
    has_effects = bool(effects)
    if has_effects and checked["outputs"]:
        raise ConfigError(
            f"handler {title}: an output is lost if the worker dies between the commit and the settlement, because the "
            f"next delivery is skipped: write `await outbox.publish(session, {checked['outputs'][0]!r}, ...)` "
            f"instead of output={options['output']!r}"
        )
    if has_effects and checked["distribution"] == "shared":
        raise ConfigError(
            f"handler {title}: distribution='shared' has no fence, and a reset of the group would skip what is marked, "
            f"so effects.session cannot be used: leave distribution out, with ordering='none' if you need no order"
        )
    why = next((str(each.needs_thread) for each in services if hasattr(each, "needs_thread")), "")
    if why and signature.is_async:
        raise ConfigError(f"handler {title}: {why}")
    try:
        fallback = checked_fallback(
            options.get("fallback"), payload, is_declared=payload is not UNDECLARED, replies=checked["replies"]
        )
    except ConfigError as error:
        raise ConfigError(f"handler {title}: {error}") from None
    decode = decoder_for(signature.payload) if signature.has_payload else decode_nothing
    formats = formats_for(signature.payload) if signature.has_payload else {}
    problem_of = None
    if signature.has_payload and (why := refusal_of(signature.payload)):
        log.warning(
            "handler %s: %s. It reads what other programs write; a broker with this handler refuses a payload of this "
            "type that would not come back", title, why,
        )  # fmt: skip
        problem_of = reader_back(signature.payload)
    return Handler(
        function=function,
        name=title,
        topic=check_name("topic", topic),
        **checked,
        signature=signature,
        decode=decode,
        formats=formats,
        invoke=_refuse_shape if check.is_batch else signature.single_call(),
        invoke_batch=signature.batch_call() if check.is_batch else _refuse_shape,
        services=services,
        fallback=fallback,
        problem_of=problem_of,
    )


def _refuse_shape(_work: Any) -> Any:
    """Takes the slot of `invoke` in a batch handler, and of `invoke_batch` in any other."""
    raise TypeError("a batch handler has only invoke_batch, any other handler only invoke")
