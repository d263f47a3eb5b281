"""Secrets are planted wherever a user may have some, and all that rsmq prints, logs and raises is searched for them.

Planted are values and names of dicts in payloads of each format, the texts of validators, keys of a keyring, results,
steps, passwords of MQTT clients. A value that a handler, a middleware or an `on_dead` puts into an error of its own is
its own (docs/security.md), and so is what a reader with the keys asks to see.
"""

from __future__ import annotations

import json
import logging
import pickle
import re
import traceback
from base64 import b64encode
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, Final, Literal

import anyio
import httpx
import msgspec
import pytest
from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, field_serializer
from pydantic_core import PydanticCustomError
from tenacity import wait_none
from typing_extensions import TypedDict

from rsmq import Broker, Message, Reject, RetryPolicy, RsmqError, Settings
from rsmq.codecs import Encrypt, Keyring, Zstd, avro_record
from rsmq.dashboard import create_app
from rsmq.gateway import Gateway
from rsmq.gateway.options import GatewayOptions
from rsmq.inspector import Inspector
from rsmq.model.kept_result import KeptResult
from tests.cli.conftest import Cli, Running, cli, start
from tests.codecs.test_read_back import Whole, record
from tests.contract.witness import dies, letters_of, settled
from tests.gateway.raw_client import RawClient
from tests.patience import until

__all__ = ["cli", "start"]

MARK: Final = "pl4nt3d"
"""In every secret; what follows says where it was planted."""
KEY: Final = f"{MARK}-key-0123456789abcdefghij".encode()[:32].ljust(32, b"k")
KEYS: Final = f"k1={b64encode(KEY).decode()}"
FORMS: Final = (MARK, MARK.encode().hex(), KEYS[3:20], b64encode(f"{MARK}-".encode()).decode()[:9])
"""As text, in hexadecimal digits, as a key in base64, and as a payload in base64."""


def leaks(*texts: str) -> list[str]:
    """Where a secret is shown, with some of what stands around it."""
    return [text[max(0, text.find(form) - 200) :][:300] for text in texts for form in FORMS if form in text]


def said(error: BaseException) -> str:
    """All that is shown of an error: its text, its repr, its traceback with those it came from."""
    return "\n".join((str(error), repr(error), *traceback.format_exception(error)))


# -- types of payloads -------------------------------------------------------------------------------------------------


def owner(value: str) -> str:
    """A validator as users write them: its error has the value."""
    if "kind" in value:
        raise PydanticCustomError("no_owner", "{value} is no owner", {"value": value})
    if "lookup" in value:
        return {"ada": "Ada"}[value]
    if "assert" in value:
        raise AssertionError(value)
    if value.startswith(MARK):
        raise ValueError(f"{value} is no owner")
    return value


class Card(BaseModel):
    """A model with each way to say what is wrong."""

    model_config = ConfigDict(extra="forbid")

    owner: Annotated[str, AfterValidator(owner)] = "ada"
    limits: dict[str, int] = {}
    numbers: dict[int, str] = {}
    sort: Literal["debit", "credit"] = "debit"

    @field_serializer("sort")
    def write_sort(self, value: str) -> str:
        """A serializer as users write them."""
        if value.startswith(MARK):
            raise ValueError(f"{value} is no sort")
        return value


class Debit(BaseModel):
    """One of a tagged union."""

    tag: Literal["debit"] = "debit"


class Credit(BaseModel):
    """The other one."""

    tag: Literal["credit"] = "credit"


Tagged = Annotated[Debit | Credit, Discriminator("tag")]


class Typed(TypedDict):
    """A dict with known names."""

    owner: Annotated[str, AfterValidator(owner)]
    limits: dict[str, int]


@dataclass
class Plain:
    """A dataclass."""

    owner: Annotated[str, AfterValidator(owner)] = "ada"
    limits: dict[str, int] = field(default_factory=dict)


class Struct(msgspec.Struct, forbid_unknown_fields=True, tag="card"):
    """A struct that checks itself."""

    owner: str = "ada"
    limits: dict[str, float] = {}
    sort: Literal["debit", "credit"] = "debit"

    def __post_init__(self) -> None:
        owner(self.owner)


@avro_record(record("Account", {"owner": "string", "limits": {"type": "map", "values": "long"}}))
@dataclass
class Account:
    """A record."""

    owner: Annotated[str, AfterValidator(owner)] = "ada"
    limits: dict[str, int] = field(default_factory=dict)


TYPES: Final[dict[str, Any]] = {
    "model": Card, "typed": Typed, "dataclass": Plain, "struct": Struct, "structs": list[Struct], "protobuf": Whole,
    "avro": Account, "tagged": Tagged, "names": dict[str, int], "mixed": int | dict[str, Card] | list[int],
    "union": Card | Plain | None,
}  # fmt: skip
"""By topic."""
JSON_TEXTS: Final = (
    f'{{"owner": ["{MARK}-value"]}}', f'{{"owner": "{MARK}-validated"}}', f'{{"owner": "{MARK}-lookup"}}',
    f'{{"owner": "{MARK}-assert"}}', f'{{"owner": "{MARK}-kind"}}', f'{{"limits": {{"{MARK}-name": "{MARK}"}}}}',
    f'{{"numbers": {{"{MARK}-number": "x"}}}}', f'{{"{MARK}-extra": 1}}', f'{{"sort": "{MARK}-sort"}}',
    f'{{"tag": "{MARK}-tag"}}', f'{{"type": "{MARK}-type"}}', f'{{"type": "card", "sort": "{MARK}"}}',
    f'{{"type": "card", "owner": "{MARK}-validated"}}', f'{{"type": "card", "owner": "{MARK}-lookup"}}',
    f'[{{"type": "card", "limits": {{"{MARK}-name": "{MARK}"}}}}]', f'[{{"type": "card", "owner": "{MARK}-listed"}}]',
    f'{{"by": {{"{MARK}-name": {{"n": "{MARK}"}}}}, "word": ["{MARK}"]}}', f'{{"colour": "{MARK}-enum"}}',
    f'{{"{MARK}-broken', f'"{MARK}-text"', f'["{MARK}-list"]', f'{{"{MARK}": {{"{MARK}": {{"{MARK}": "{MARK}"}}}}}}',
    f'{{"{MARK}-a": {{"owner": "{MARK}-validated"}}}}',
)  # fmt: skip
"""Payloads that one type or another refuses."""
BINARY: Final = (MARK.encode() + b"\xff\xfe", b"\xc3\x01" + b"\0" * 8 + MARK.encode(), b"\x82\xa5owner" + MARK.encode())


# -- publishers --------------------------------------------------------------------------------------------------------

NAMES: Final = {f"{MARK}-name": float("nan")}
REFUSED: Final[list[tuple[Any, Any]]] = [
    (Card, Card.model_construct(owner=f"{MARK}-validated")), (Card, Card.model_construct(owner=f"{MARK}-lookup")),
    (Card, Card.model_construct(limits={f"{MARK}-name": "x"})), (Card, Card.model_construct(limits=NAMES)),
    (Card, Card.model_construct(sort=f"{MARK}-sort")), (Card, Card.model_construct(numbers={f"{MARK}": "x"})),
    (Typed, {"owner": f"{MARK}-validated", "limits": {}}), (Typed, {"owner": "a", "limits": {}, f"{MARK}-extra": 1}),
    (Plain, Plain(limits={f"{MARK}-name": 1.5})), (Plain, Plain(limits=NAMES)), (Plain, Plain(owner=f"{MARK}-kind")),
    (Struct, msgspec.structs.replace(Struct(), limits=NAMES)), (Struct, Struct(limits={f"{MARK}-name": MARK})),
    (list[Struct], [Struct(sort=f"{MARK}-sort")]), (Account, Account(limits={f"{MARK}-name": MARK})),
    (Account, Account(owner=f"{MARK}-validated")), (Tagged, Debit.model_construct(tag=f"{MARK}-tag")),
    (dict[str, int], {f"{MARK}-name": MARK}), (dict[str, Any], {f"{MARK}-name": {f"{MARK}-deep": float("inf")}}),
    (dict[str, Any], {f"{MARK}-name": object()}), (dict[str, Any], {f"{MARK}-name": f"{MARK}\ud800"}),
    (dict[str, Any], {f"{MARK}-name": {(MARK, 1)}}), (dict[Any, Any], {(MARK, 1): 1}), (dict[Any, Any], {1: MARK}),
    (str, MARK.encode()), (int, MARK), (Any, {MARK: float("nan")}), (Any, MARK + "\ud800"),
]  # fmt: skip


async def refusal(publish: Callable[[Any], Awaitable[object]], payload: Any) -> str:
    """What is shown where a payload is refused; empty if it is taken."""
    try:
        await publish(payload)
    except (RsmqError, ValueError, TypeError) as error:
        return said(error)
    return ""


async def test_no_refusal_of_a_publisher_shows_a_secret(settings: Settings, caplog: pytest.LogCaptureFixture) -> None:
    """A typed topic, a plain one, a letter, a schedule's payload and a limit: texts, causes and tracebacks."""
    caplog.set_level(logging.DEBUG)
    broker, refused = Broker(replace(settings, payload_limit=1000, preflight="warn")), 0
    async with broker:
        for kind, payload in REFUSED:
            for publish in (broker.topic("t", kind).publish, partial(broker.publish, "t"), partial(broker.send, "d")):
                shown = await refusal(publish, payload)
                refused += bool(shown)
                assert leaks(shown) == [], (kind, payload)
        for large in (MARK * 1000, {MARK * 1000: MARK}):
            with pytest.raises(RsmqError) as caught:
                await broker.publish("t", large)
            assert leaks(said(caught.value)) == []
    assert refused > len(REFUSED)
    assert leaks(caplog.text) == []


# -- workers -----------------------------------------------------------------------------------------------------------


async def test_no_log_letter_or_repr_of_a_worker_shows_a_secret(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    """What no handler can decode, alone and in batches; results, steps and progress of those that fail; redelivery; and
    every object that holds a payload or a key."""
    caplog.set_level(logging.DEBUG)
    keyring = Keyring({"k1": KEY})
    codecs = [Zstd(above="100B"), Encrypt(keyring)]
    broker = Broker(replace(settings, preflight="warn", partitions=2), codecs=codecs)
    shown = list[Any]([keyring, keyring.first, *codecs, broker.encoding])

    def register(topic: str, kind: Any) -> None:
        typed = broker.topic(topic, kind)

        @typed.handler(group="one", retry=RetryPolicy(max_attempts=2, wait=wait_none()))
        async def handle(payload: Any, message: Message) -> str:
            shown.append(message)
            async with message.step("look up") as step:
                step.result = f"{MARK}-step"
            await message.publish("out", {f"{MARK}-output": MARK})
            raise Reject("no")

        @typed.handler(group="many", batch=10, retry=RetryPolicy(max_attempts=1))
        async def handle_many(payloads: list[Any]) -> None:
            raise OSError("no")

    for topic, kind in TYPES.items():
        register(topic, kind)
    count = len(JSON_TEXTS) + len(BINARY)
    async with broker.running():
        for topic in TYPES:
            for text in JSON_TEXTS:
                await broker.publish(topic, json.loads(text) if _is_json(text) else text.encode(), keep_result="1h")
            for data in BINARY:
                await broker.publish(topic, data)
            for group in ("one", "many"):
                await dies(broker, topic, group, count)
        letters = [
            each for topic in TYPES for group in ("one", "many") for each in await letters_of(broker, topic, group)
        ]
        shown += [*letters, broker, broker.worker, broker.client, settings, broker.topic("t", Card)]
        shown += [await Inspector(broker.client, broker.keys, settings).snapshot()]
    texts = [part for each in letters for part in (each.error, each.traceback, *map(repr, each.history))]
    assert len([each for each in letters if each.reason == "malformed"]) > len(TYPES) * 10
    assert any("in a validator" in each.error for each in letters)
    assert leaks(*texts) == []
    assert leaks(*(f"{each!r} {each}" for each in shown)) == []
    assert leaks(caplog.text) == []
    for each in (keyring, keyring.first):
        with pytest.raises(TypeError) as caught:
            pickle.dumps(each)
        assert leaks(said(caught.value)) == []


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def test_no_repr_of_a_result_shows_it() -> None:
    """As it is kept, and as it is read."""
    kept = KeptResult(MARK.encode(), "text/plain")
    assert leaks(repr(kept), str(kept)) == []


# -- commands ----------------------------------------------------------------------------------------------------------

APP = """
from tests.security.test_planted import TYPES
from rsmq import Broker, RetryPolicy
from rsmq.codecs import Encrypt, Keyring, Zstd

broker = Broker(codecs=[Zstd(above="100B"), Encrypt(Keyring.from_env("RSMQ_KEYS"))])

def register(topic, kind):
    @broker.topic(topic, kind).handler(group="one", retry=RetryPolicy(max_attempts=1))
    async def handle(payload) -> None:
        raise ValueError("no")

for topic, kind in TYPES.items():
    register(topic, kind)

@broker.handler("sealed", group="one")
async def handle(payload: dict) -> None:
    raise ValueError("no")
"""
READING: Final = (
    "doctor", "keys status sealed", "top --once", "tail sealed", "tail sealed --group one", "topic list",
    "topic show sealed", "topic why-not-trimmed sealed", "group list sealed", "group show sealed one",
    "member list sealed",
    "dlq list sealed one", "dlq show sealed one {letter}", "message show {id} --topic sealed", "message find sealed",
    "message find sealed --where owner=x", "trace {id} --topic sealed", "schedule list", "device list", "device show d",
    "client list", "retained list", "batch list", "hold list sealed",
    "dlq list sealed one --where a=b",     "schema check app:broker", "docs app:broker",
)  # fmt: skip
"""Commands that only read; each is asked for text and for JSON."""


async def test_no_command_without_the_keys_shows_a_secret(
    settings: Settings, cli: Cli, start: Callable[..., Running]
) -> None:
    """Each command that reads; a worker with other keys, whose log is JSON at the lowest level; wrong keys; and the
    check of a schema with the right ones, which names what does not fit."""
    (cli.directory / "app.py").write_text(APP)
    broker = Broker(replace(settings, preflight="warn", partitions=2), codecs=[Encrypt(Keyring({"k1": KEY}))])

    @broker.handler("sealed", group="one", retry=RetryPolicy(max_attempts=1))
    async def handle(payload: Card) -> None:
        raise Reject("no")

    async with broker.running():
        ref = await broker.publish("sealed", {f"{MARK}-name": f"{MARK}-value"}, key="k", keep_result="1h")
        await dies(broker, "sealed", "one", 1)
        [letter] = await letters_of(broker, "sealed", "one")
        await broker.send("d", {MARK: MARK})
        await broker.publish("sealed", {MARK: MARK}, delay="1h")
    async with Broker(replace(settings, preflight="warn"), codecs=[Encrypt(Keyring({"k1": KEY}))]) as publisher:
        for text in JSON_TEXTS:
            for topic in TYPES:
                await publisher.publish(topic, json.loads(text) if _is_json(text) else text.encode())
        await publisher.publish("sealed", {MARK: MARK})
    other = f"k2={b64encode(b'2' * 32).decode()}"
    texts, at_once = list[str](), anyio.Semaphore(3)

    async def run(*args: str, **environment: str) -> None:
        async with at_once:
            done = await anyio.to_thread.run_sync(partial(cli, *args, **environment))
        texts.append(f"{args}: {done.stdout}{done.stderr}")
        assert "Traceback" not in done.stderr, done
        assert done.returncode in (0, 1), done

    async with anyio.create_task_group() as tasks:
        for line in READING:
            args = line.format(id=ref, letter=letter.id).split()
            tasks.start_soon(partial(run, *args, RSMQ_KEYS=other))
            tasks.start_soon(partial(run, *args, "--json", RSMQ_KEYS=other))
    await run("schema", "check", "app:broker", RSMQ_KEYS=KEYS)
    assert "in a validator" in texts[-1]
    await run("schema", "check", "app:broker", "--json", RSMQ_KEYS=KEYS)
    await run("keys", "status", "sealed", "--json", RSMQ_KEYS=KEYS)
    for wrong in (KEYS[3:], f"{KEYS},k1={KEYS[3:]}", f"{KEYS}x", f"{KEYS[3:]}=k1"):
        for command in (("tail", "sealed"), ("worker", "app:broker")):
            done = await anyio.to_thread.run_sync(partial(cli, *command, RSMQ_KEYS=wrong))
            assert done.returncode in (1, 2), done
            texts.append(f"{command}: {done.stdout}{done.stderr}")
    for keys, waits_for in ((other, "wait for the key k1"), (KEYS, "moved to dead letters")):
        cli.environment["RSMQ_KEYS"] = keys
        running = await anyio.to_thread.run_sync(
            lambda: start("worker", "app:broker", "--log-level", "debug", "--json")
        )
        await anyio.to_thread.run_sync(running.expect, waits_for)
        if keys is KEYS:
            async with publisher:
                for topic in (*TYPES, "sealed"):
                    await settled(publisher, topic)
        running.kill()
        texts += running.lines
    assert leaks(*texts) == []


async def test_no_page_of_the_dashboard_without_the_keys_shows_a_secret(settings: Settings) -> None:
    """All pages that can be reached from the first one by links."""
    broker = Broker(replace(settings, preflight="warn", partitions=1), codecs=[Encrypt(Keyring({"k1": KEY}))])

    @broker.handler("sealed", group="one", retry=RetryPolicy(max_attempts=1))
    async def handle(payload: Card) -> None:
        raise Reject("no")

    async with broker.running():
        for _ in range(3):
            await broker.publish("sealed", {f"{MARK}-name": f"{MARK}-value"})
        await dies(broker, "sealed", "one", 3)
        await broker.send("d", {MARK: MARK})
        await broker.publish("sealed", {MARK: MARK}, delay="1h")
    app = create_app(settings)
    transport = httpx.ASGITransport(app, client=("127.0.0.1", 1))
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://localhost", follow_redirects=True) as client,
    ):
        left, pages = ["/"], dict[str, str]()
        while left and len(pages) < 80:
            path = left.pop(0)
            if path in pages:
                continue
            pages[path] = (await client.get(path)).text
            left += [each.replace("&amp;", "&") for each in re.findall(r'href="(/[^"#]*)"', pages[path])]
    assert any("encrypted (k1)" in text for text in pages.values())
    assert len(pages) > 8
    assert leaks(*pages.values()) == []


# -- the gateway -------------------------------------------------------------------------------------------------------


async def test_no_log_of_a_gateway_shows_a_secret(settings: Settings, caplog: pytest.LogCaptureFixture) -> None:
    """Passwords, payloads of topics, of letters, of wills and of retained messages, and what is no packet."""
    caplog.set_level(logging.DEBUG)
    broker = Broker(replace(settings, preflight="warn"), codecs=[Encrypt(Keyring({"k1": KEY}))])
    gateway = Gateway(broker, listen=["mqtt://127.0.0.1:0"], options=GatewayOptions(anonymous=True))
    async with broker, anyio.create_task_group() as tasks:
        await tasks.start(gateway.run)
        (port,) = gateway.ports
        reads = await RawClient(port).connect("reads")
        await reads.subscribe(("cards/#", 1))
        writes = await RawClient(port).connect(
            "writes",
            username="ada",
            password=f"{MARK}-password".encode(),
            will=("cards/will", f"{MARK}-will".encode(), 1, False),
        )
        shown = [gateway, gateway.context, writes.connack]
        for payload in (f'{{"{MARK}": "{MARK}"}}'.encode(), MARK.encode() + b"\xff"):
            await writes.publish("cards/1", payload)
            assert (await reads.message()).payload == payload
        writes.send(b"\x30\x05\x00\x7f" + MARK.encode())
        await until(lambda: "writes" not in gateway.context.clients.connections, "it is disconnected")  # type: ignore[union-attr]
        stranger = await RawClient(port).open()
        stranger.send(MARK.encode() * 10)
        assert (await reads.message()).payload == f"{MARK}-will".encode()
        for each in (reads, writes, stranger):
            each.abort()
        gateway.stop()
    assert "ada" in caplog.text or "writes" in caplog.text
    assert leaks(caplog.text, *map(repr, shown)) == []
