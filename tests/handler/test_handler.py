"""Handlers: the shape of their call, their options, payload decoding, and batch results."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, field_validator
from typing_extensions import TypedDict

from rsmq.errors import ConfigError, Malformed
from rsmq.handler.handler import Handler, build_handler
from rsmq.handler.middleware import compose
from rsmq.handler.payload import decoder_for
from rsmq.handler.retry import Reject, Retry, batch_outcomes
from rsmq.model.message import Message, MessageOrigin


def message(data: bytes = b"{}") -> Message:
    """A message as it comes from a stream."""
    return Message(MessageOrigin("orders", 0, "billing"), b"1-0", [b"data", data])


def decoded(handler: Handler, data: bytes) -> Message:
    """A message with its payload set, as the runner does it."""
    made = message(data)
    made.payload = handler.decode(data)
    return made


class Order(BaseModel):
    number: int
    customer: str = "c"

    @field_validator("customer")
    @classmethod
    def _known(cls, value: str) -> str:
        if value == "crash":
            raise KeyError(value)
        return value


class Nested(BaseModel):
    orders: list[Order]


@dataclass
class Point:
    x: int


class Options(TypedDict):
    name: str


def plain(order: dict) -> None:
    """A handler that another process can import."""


async def both(order: Order, message: Message) -> tuple[Order, Message]:
    return order, message


async def reverse(message: Message, order: Order) -> tuple[Message, Order]:
    return message, order


async def message_only(message: Annotated[Message, "the whole of it"]) -> Message:
    return message


async def text(order: str, verbose: bool = False) -> str:
    return order


async def batch_both(orders: list[Order], messages: list[Message]) -> tuple[list[Order], list[Message]]:
    return orders, messages


async def batch_bare(orders: list) -> list[Any]:
    return orders


class Service:
    async def handle(self, order: dict) -> dict:
        return order

    async def __call__(self, order: bytes) -> bytes:
        return order


def build(function: Callable[..., Any], **options: Any) -> Handler:
    return build_handler(function, "orders", **{"group": "billing", **options})


# -- the call


async def test_handler_of_a_payload_gets_the_payload() -> None:
    """A handler of one payload parameter gets the decoded payload."""
    handler = build(text)
    assert await handler.invoke(decoded(handler, b"hello")) == "hello"


async def test_message_is_passed_where_it_is_annotated() -> None:
    """The parameter annotated Message gets the message, first or last."""
    for function in (both, reverse):
        handler = build(function)
        made = decoded(handler, b'{"number": 1}')
        assert set(map(type, await handler.invoke(made))) == {Order, Message}
        assert handler.signature.arguments(made) == await handler.invoke(made)


async def optional(order: Order, message: Message | None = None) -> Any:
    return order, message


async def optional_many(orders: list[Order], messages: list[Message] | None = None) -> Any:
    return orders, messages


def behind_a_default(order: Order, limit: int = 5, message: Message | None = None) -> None: ...


async def test_message_with_a_default_is_passed() -> None:
    """A default is for callers of the function: the message is passed all the same, or the handler is refused."""
    handler = build(optional)
    made = decoded(handler, b'{"number": 1}')
    assert await handler.invoke(made) == (Order(number=1), made)
    handler = build(optional_many, batch=10)
    made = decoded(handler, b'{"number": 1}')
    assert await handler.invoke_batch([made]) == ([Order(number=1)], [made])
    with pytest.raises(ConfigError, match="write 'message' before 'limit', which keeps its default"):
        build(behind_a_default)


async def test_handler_of_a_message_decodes_nothing() -> None:
    """A handler that takes only the message gets undecodable payloads, too."""
    handler = build(message_only)
    made = decoded(handler, b"\xff")
    assert await handler.invoke(made) is made
    assert made.payload is None


async def test_batch_handler_gets_lists() -> None:
    """A batch handler gets the payloads and the messages, in order."""
    handler = build(batch_both, batch=10)
    made = [decoded(handler, b'{"number": %d}' % number) for number in range(3)]
    orders, messages = await handler.invoke_batch(made)
    assert ([order.number for order in orders], messages) == ([0, 1, 2], made)
    assert handler.signature.arguments(made) == (orders, messages)


async def test_bare_list_takes_any_payload() -> None:
    """`list` without a type is a batch of any JSON."""
    handler = build(batch_bare, batch=10)
    assert await handler.invoke_batch([decoded(handler, b"1"), decoded(handler, b'{"a": null}')]) == [1, {"a": None}]


async def test_methods_callables_and_partials_are_handlers() -> None:
    """Any callable that takes a payload can be a handler, and async ones are recognised."""
    for function, data, payload in [
        (Service().handle, b'{"a": 1}', {"a": 1}),
        (Service(), b"raw", b"raw"),
        (functools.partial(text, verbose=True), b"t", "t"),
    ]:
        handler = build(function)
        assert handler.is_async
        assert await handler.invoke(decoded(handler, data)) == payload


def test_invoke_refuses_the_shape_of_the_other() -> None:
    """A single handler has no batch call, a batch handler no single call."""
    with pytest.raises(TypeError, match="invoke_batch"):
        build(batch_bare, batch=2).invoke(message())
    with pytest.raises(TypeError, match="invoke_batch"):
        build(both).invoke_batch([message()])


# -- the options


def test_handler_without_options_gets_the_defaults() -> None:
    """The defaults of a handler are those of the documentation."""
    handler = build(both)
    assert (handler.name, handler.topic, handler.group) == ("both", "orders", "billing")
    assert (handler.concurrency, handler.ordering, handler.distribution) == (64, "key", "hash")
    assert (handler.timeout, handler.batch, handler.linger) == (None, None, timedelta(0))
    assert (handler.start, handler.partitions, handler.execution) == ("earliest", None, "inline")
    assert handler.retry.max_attempts == 5
    assert repr(handler) == "<Handler both orders/billing>"


def test_defaults_depend_on_distribution_and_function() -> None:
    """Shared distribution has no order, a plain function runs in a thread."""
    assert build(both, distribution="shared").ordering == "none"
    assert build(plain).execution == "thread"
    assert build(plain, execution="process").execution == "process"


def test_timeout_number_is_seconds() -> None:
    """`timeout=30` is thirty seconds, as the documentation shows it."""
    assert (
        build(both, timeout=30).timeout == timedelta(seconds=30) == build(both, timeout=timedelta(seconds=30)).timeout
    )


def test_start_may_be_a_word_an_id_or_a_time() -> None:
    """A group starts at a word, an id or a moment."""
    for start in ("earliest", "latest", "1700000000000-0", "1700000000000", datetime(2026, 1, 1, tzinfo=UTC)):
        assert build(both, start=start).start == start


@pytest.mark.parametrize(
    "start",
    [
        "\uff11\uff12\uff13",
        "\uff11\uff12\uff13-0",
        "123-\u0664",
        " 123",
        "1_000",
        "18446744073709551616",
        "1-" + "9" * 20,
    ],
)
def test_start_with_digits_that_redis_does_not_read_is_refused(start: str) -> None:
    """Python takes them for a number, or the server's numbers end before it."""
    with pytest.raises(ConfigError, match="start"):
        build(both, start=start)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"group": "a b"}, "group name 'a b' is not allowed"),
        ({"concurrency": 0}, "concurrency=0 is not a whole number of 1 or more"),
        ({"concurrency": True}, "concurrency=True"),
        ({"batch": 0}, "batch=0"),
        ({"partitions": 0}, "partitions=0 is not a whole number from 1 to 1024"),
        ({"partitions": 4096}, "partitions=4096"),
        ({"ordering": "fifo"}, "ordering='fifo' is unknown: use 'key' or 'partition' or 'none'"),
        ({"distribution": "random"}, "distribution='random' is unknown"),
        ({"distribution": "shared", "ordering": "key"}, "leave one of them out"),
        ({"distribution": "shared", "tenant": str}, "distribution='shared' has no tenants"),
        ({"ordering": "partition", "tenant": str}, "leave tenant out, or use ordering='key'"),
        ({"tenant": "acme"}, "tenant='acme' is no function of the message"),
        ({"weights": {"acme": 2}}, "weights are those of tenants: add tenant="),
        ({"tenant": str, "weights": 2}, "weights=2 is no dict"),
        ({"tenant": str, "weights": {"acme": 0.5}}, "weight 0.5 of the tenant 'acme' is not from 1 to 1000"),
        ({"tenant": str, "weights": {7: 1}}, "7 is no name of a tenant"),
        ({"retry": 3}, r"retry=RetryPolicy\(max_attempts=5\)"),
        ({"timeout": 0}, "timeout=0 is not above 0: write timeout='30s'"),
        ({"timeout": True}, "timeout=True"),
        ({"timeout": "30"}, "has no unit, so write timeout='30s'"),
        ({"timeout": "soon"}, "timeout='soon' is not a duration: write timeout='5s'"),
        ({"timeout": -1}, "timeout=-1 is not above 0"),
        ({"timeout": "0s"}, "timeout='0s' is not above 0"),
        ({"timeout": timedelta(0)}, "is not above 0"),
        ({"timeout": float("nan")}, "timeout=nan is not a duration"),
        ({"linger": timedelta(seconds=1)}, "linger needs batch"),
        ({"start": "yesterday"}, "not a position in a topic"),
        ({"start": datetime(2026, 1, 1)}, "has no time zone"),
        ({"execution": "thread"}, "an async def cannot run with execution='thread': write a plain def"),
        ({"execution": "gpu"}, "execution='gpu' is unknown"),
        ({"group": None}, "the group is missing"),
        ({"concurency": 8}, "handler both: unknown option 'concurency'. Did you mean concurrency?"),
    ],
)
def test_impossible_option_is_refused(options: dict[str, Any], says: str) -> None:
    """Every wrong option is a ConfigError that says what to write."""
    function = batch_bare if "batch" in options else both
    with pytest.raises(ConfigError, match=says):
        build(function, **options)


def test_topic_name_is_checked() -> None:
    """A topic's name cannot break a key."""
    with pytest.raises(ConfigError, match="topic name 'a}b'"):
        build_handler(both, "a}b", group="g")


def test_linger_number_is_refused() -> None:
    """A bare number is not a duration."""
    assert build(batch_bare, batch=5, linger=timedelta(milliseconds=50)).linger == timedelta(milliseconds=50)
    assert build(batch_bare, batch=5, linger="50ms").linger == timedelta(milliseconds=50)
    with pytest.raises(ConfigError, match=r"linger=0.05 is not a duration: it has no unit, so write linger='0.05s'"):
        build(batch_bare, batch=5, linger=0.05)
    with pytest.raises(ConfigError, match="is negative"):
        build(batch_bare, batch=5, linger=timedelta(seconds=-1))


def test_plain_functions_do_not_run_inline() -> None:
    """A plain function in the event loop would block all other handlers."""
    with pytest.raises(ConfigError, match="a plain def cannot run with execution='inline': write async def"):
        build(plain, execution="inline")


def test_process_execution_needs_an_importable_function() -> None:
    """Only functions that another process can import run in one."""

    def local(order: bytes) -> None: ...

    for function in (local, functools.partial(plain)):
        with pytest.raises(ConfigError, match="at module level"):
            build(function, execution="process")
    assert pickle.loads(pickle.dumps(plain)) is plain


# -- signatures that cannot work


def unannotated(order) -> None: ...


async def unannotated_async(order) -> None: ...


def unannotated_message(message) -> None: ...


def unresolved(order: "Missing") -> None: ...  # type: ignore[name-defined]  # noqa: F821, UP037


def nothing() -> None: ...


def two(first: dict, second: dict) -> None: ...


def two_messages(first: Message, second: Message) -> None: ...


def keyword(order: dict, *, message: Message) -> None: ...


def generator(order: dict) -> Any:
    yield order


def list_of_messages(messages: list[Message]) -> None: ...


class Lock:
    """A type that pydantic cannot validate."""


def not_json(order: Lock) -> None: ...


class Incomplete(BaseModel):
    part: "NotDefinedYet"  # type: ignore[name-defined]  # noqa: F821, UP037


def incomplete(order: Incomplete) -> None: ...


def with_default(order: dict | None = None) -> None: ...


class Till:
    def bill(self, order: dict) -> None: ...


@functools.wraps(both)
def wrapped(*arguments: Any) -> Any:
    return both(*arguments)


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (unannotated, r"no annotation on 'order'.*`def unannotated\(order: dict\) -> None`"),
        (unannotated_async, r"`async def unannotated_async\(order: dict\) -> None`"),
        (unannotated_message, r"no annotation on 'message': write `message: Message` .* such as `message: dict`"),
        (unresolved, "annotations cannot be resolved .*Missing.* at module level"),
        (nothing, "has no parameter"),
        (with_default, "no parameter without a default"),
        (Till.bill, r"Till\.bill is a method: register that of an instance, .*\(instance\.bill\)"),
        (two, "one payload and one Message at most"),
        (two_messages, "one payload and one Message at most"),
        (keyword, r"remove the `\*` before 'message'"),
        (generator, "its body would never run"),
        (list_of_messages, "one message at a time"),
        (not_json, "a payload cannot become .*Lock"),
        (incomplete, "a payload cannot become .*Incomplete.*defined before the handler"),
        (wrapped, "make the decorator's wrapper async def"),
        ("orders", "is not a function"),
    ],
)
def test_impossible_signature_is_refused(function: Any, says: str) -> None:
    """Every impossible signature is a ConfigError that shows the fix, when the handler is registered."""
    with pytest.raises(ConfigError, match=says):
        build(function)


def test_batch_signature_without_lists_is_refused() -> None:
    """The error shows the list to write."""
    with pytest.raises(ConfigError, match=r"`order: list\[dict\]`"):
        build(plain, batch=5)
    with pytest.raises(ConfigError, match=r"def unannotated\(order: list\[dict\]\)"):
        build(unannotated, batch=5)


# -- decoding


@pytest.mark.parametrize(
    ("annotation", "data", "payload"),
    [
        (bytes, b"\xff\x00", b"\xff\x00"),
        (str, "grüß 🎉".encode(), "grüß 🎉"),
        (str, b'"quoted"', '"quoted"'),
        (dict, b'{"a": [1, null]}', {"a": [1, None]}),
        (dict[str, Any], b"{}", {}),
        (dict[str, int], b'{"a": 1}', {"a": 1}),
        (dict[int, int], b'{"7": 1}', {7: 1}),
        (dict[int, Any], b'{"7": "x"}', {7: "x"}),
        (list, b"[1]", [1]),
        (list[Any], b"[]", []),
        (list[int], b"[1, 2]", [1, 2]),
        (Any, b"null", None),
        (object, b"1.5", 1.5),
        (int, b"7", 7),
        (int | None, b"null", None),
        (Order, b'{"number": 1}', Order(number=1)),
        (Point, b'{"x": 1}', Point(1)),
        (Options, b'{"name": "n"}', {"name": "n"}),
    ],
)
def test_payload_is_decoded_by_its_annotation(annotation: Any, data: bytes, payload: Any) -> None:
    """Each kind of annotation decodes its own way."""
    value = decoder_for(annotation)(data)
    assert value == payload
    assert type(value) is type(payload)


HOSTILE = {
    "nothing": b"",
    "no JSON": b"{",
    "depth bomb": b"[" * 100_000,
    "object bomb": b'{"a":' * 50_000,
    "NaN": b"NaN",
    "infinity": b'{"number": Infinity}',
    "endless integer": b"9" * 100_000,
    "endless integer inside": b'{"number": ' + b"9" * 100_000 + b"}",
    "broken UTF-8": b'{"customer": "\xff"}',
    "lone surrogate": b'{"customer": "\\ud800"}',
    "byte order mark": b"\xef\xbb\xbf{}",
    "two values": b"{} {}",
    "wrong kind": b'"text"',
}


@pytest.mark.parametrize("annotation", [dict, list, Order, Nested, dict[str, int], Point])
@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_payload_is_malformed(annotation: Any, data: bytes) -> None:
    """Deep nesting and garbage are a Malformed with a short text, for every annotation."""
    with pytest.raises(Malformed) as caught:
        decoder_for(annotation)(data)
    assert len(str(caught.value)) < 400
    assert "\n" not in str(caught.value)


@given(st.binary(max_size=200))
def test_decoder_never_crashes_on_random_bytes(data: bytes) -> None:
    """For any bytes a decoder returns or raises Malformed, nothing else."""
    for annotation in (bytes, str, dict, list, Any, Order, int | None):
        try:
            decoder_for(annotation)(data)
        except Malformed:
            continue


def test_text_payload_that_is_not_utf8_is_malformed() -> None:
    """A str payload is UTF-8 or malformed."""
    with pytest.raises(Malformed, match=r"not UTF-8 \(byte 1\)"):
        decoder_for(str)(b"a\xff")


def test_validation_error_names_fields_without_values() -> None:
    """The error of a dead letter contains no payload."""
    with pytest.raises(Malformed) as caught:
        decoder_for(Nested)(b'{"orders": [{"number": "s3cret"}, {}, {}, {"number": []}]}')
    assert "orders.0.number: Input should be a valid integer" in str(caught.value)
    assert "(and 1 more)" in str(caught.value)
    assert "s3cret" not in str(caught.value)


def test_crashing_validator_is_malformed() -> None:
    """A bug in the user's validator affects only its message."""
    with pytest.raises(Malformed, match="KeyError in a validator"):
        decoder_for(Order)(b'{"number": 1, "customer": "crash"}')


# -- batches


def test_batch_result_none_means_all_done() -> None:
    """A batch handler that returns None has handled every message."""
    assert batch_outcomes(None, [message(), message()]) == [None, None]


def test_batch_result_list_gives_each_message_its_outcome() -> None:
    """A list of outcomes goes to the messages one by one."""
    given_outcomes = [None, Retry(), Reject("no"), ValueError("x"), SystemExit(2)]
    assert batch_outcomes(given_outcomes, [message()] * 5) == given_outcomes
    assert batch_outcomes(tuple(given_outcomes), [message()] * 5) == given_outcomes


@pytest.mark.parametrize(
    ("result", "says"),
    [
        ([None], "1 outcome for 2 messages"),
        ([True, None], "one outcome is bool"),
        ([Retry, None], "one outcome is type"),
        (True, "it returned bool"),
        ({}, "it returned dict"),
    ],
)
def test_unusable_batch_result_fails_the_batch(result: Any, says: str) -> None:
    """Any other result is a failure of every message, with the text that says what to return."""
    first, second = batch_outcomes(result, [message(), message()])
    assert isinstance(first, TypeError)
    assert first is second
    assert says in str(first)
    assert "Retry(...), Reject(...)" in str(first)


# -- middleware


async def test_middleware_wraps_from_the_outside_in() -> None:
    """The first middleware is the outermost, and each sees the result of the next."""
    seen: list[str] = []

    def tagged(tag: str) -> Callable[..., Any]:
        async def middleware(work: Any, call_next: Callable[[Any], Any]) -> Any:
            seen.append(tag)
            return f"{tag}({await call_next(work)})"

        return middleware

    async def innermost(work: Any) -> Any:
        return work

    assert await compose([tagged("a"), tagged("b")], innermost)("x") == "a(b(x))"
    assert seen == ["a", "b"]


def test_compose_without_middleware_returns_the_call_itself() -> None:
    """Without middleware the call is the innermost itself."""

    async def innermost(work: Any) -> Any:
        return work

    assert compose([], innermost) is innermost
