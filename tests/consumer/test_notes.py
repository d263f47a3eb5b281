"""What handlers keep about their message: results for its publisher, steps that run once, and progress."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pydantic import BaseModel
from tenacity import wait_fixed

from rsmq import (
    Broker,
    Burial,
    ConfigError,
    Fallback,
    Malformed,
    Message,
    Reject,
    ResultFailed,
    ResultTimeout,
    Retry,
    RetryPolicy,
    Settings,
    TooLarge,
)
from rsmq.codecs import Encrypt, Keyring, Zstd
from rsmq.consumer.settling import notes
from rsmq.worker.retention import Retention
from tests.contract.witness import ask, settled
from tests.patience import until

pytestmark = pytest.mark.usefixtures("no_task_left")

SOON = RetryPolicy(max_attempts=3, wait=wait_fixed(0.01))
LATER = RetryPolicy(max_attempts=3, wait=wait_fixed(3600))
STYLES: list[dict[str, Any]] = [{}, {"ordering": "none"}, {"distribution": "shared"}]
styles = pytest.mark.parametrize("options", STYLES, ids=["key", "none", "shared"])


class Receipt(BaseModel):
    """A result."""

    cents: int


@pytest.fixture
def broker(settings: Settings) -> Broker:
    """A broker with a prefix of its own."""
    return Broker(replace(settings, preflight="warn", partitions=2))


async def kept(broker: Broker, kind: str = "") -> list[str]:
    """The keys of notes that are there."""
    found = await ask(broker, "KEYS", f"{broker.keys.prefix}:*")
    names = [key.decode() for key in found]
    return [name for name in names if any(f":{each}" in name for each in ([kind] if kind else ["steps", "progress"]))]


# -- results -------------------------------------------------------------------------------------------------------


@styles
async def test_each_group_has_a_result_of_its_own(broker: Broker, options: dict[str, Any]) -> None:
    """Coroutines and functions; models, text, bytes and None; it may be asked for again, also by its text."""

    @broker.handler("orders", group="billing", **options)
    async def bill(payload: dict[str, Any]) -> Receipt:
        return Receipt(cents=payload["n"] * 2)

    @broker.handler("orders", group="audit", **options)
    def audit(payload: dict[str, Any]) -> Any:
        return ["text", b"\x00\n", None][payload["n"]]

    async with broker.running():
        refs = [await broker.publish("orders", {"n": n}, key="ada", keep_result="1h") for n in range(3)]
        ref, *_ = refs
        about: dict[str, Any] = {"group": "billing", "timeout": "20s"}
        assert await broker.result(ref, returns=Receipt, **about) == Receipt(cents=0)
        assert await broker.result(refs[2], **about) == {"cents": 4}
        assert await broker.result(str(ref), topic="orders", key="ada", **about) == {"cents": 0}
        assert [await broker.result(each, group="audit", timeout="20s") for each in refs] == ["text", b"\x00\n", None]
        with pytest.raises(Malformed):
            await broker.result(refs[2], returns=Receipt, group="audit", timeout="0s")
        (many,) = await broker.publish_many("orders", [{"n": 1}], key=lambda _: "ada", keep_result="1h")
        assert await broker.result(many, topic="orders", key="ada", **about) == {"cents": 2}
        key = broker.keys.result("orders", ref.partition_number, "billing", str(ref))
        assert 3_500_000 < await ask(broker, "PTTL", key) <= 3_600_000
        channels = await ask(broker, "PUBSUB", "SHARDCHANNELS", f"{broker.keys.prefix}*")
        assert not [each for each in channels if b":result:" in each]


async def test_without_keep_result_nothing_is_kept(broker: Broker) -> None:
    """A call that asks gets its answer at once, or when its time is over."""

    @broker.handler("orders", group="billing")
    async def bill(payload: Any) -> int:
        return 1

    async with broker.running():
        ref = await broker.publish("orders", 1)
        await settled(broker, "orders")
        with pytest.raises(ResultTimeout, match="published without keep_result"):
            await broker.result(ref, group="billing", timeout="0s")
        with pytest.raises(ResultTimeout):
            await broker.result(ref, group="billing", timeout="10ms")
        for wrong, text in (("0s", "at least 1 ms"), ("9000d", "at most")):
            with pytest.raises(ConfigError, match=text):
                await broker.publish("orders", 1, keep_result=wrong)
        with pytest.raises(ConfigError, match="use 0 or more"):
            await broker.result(ref, group="billing", timeout=timedelta(seconds=-1))
        assert await kept(broker, "billing:result") == []


async def test_what_ends_otherwise_has_a_reason(broker: Broker) -> None:
    """A dead letter, one with an output of `on_dead`, one that expired, was cancelled, or went to a fallback topic. A
    replay that works replaces it."""
    is_fixed = asyncio.Event()

    @broker.handler("orders", group="billing", retry=RetryPolicy(max_attempts=1))
    async def bill(payload: str) -> str:
        if not is_fixed.is_set():
            raise Reject("no such customer")
        return payload

    @broker.on_dead("orders", group="billing")
    async def dead(message: Message, _: Burial) -> None:
        if message.data == b"tell":
            await message.publish("dead", "x")

    @broker.handler("push", group="sender", retry=RetryPolicy(max_attempts=1), fallback=Fallback("sms"))
    async def push(payload: str) -> str:
        raise OSError("no device")

    @broker.handler("later", group="sender", retry=LATER)
    async def later(payload: str) -> str:
        raise OSError("not now")

    async def failure(ref: Any, group: str) -> tuple[str, str]:
        with pytest.raises(ResultFailed) as caught:
            await broker.result(ref, group=group, timeout="20s")
        return caught.value.reason, caught.value.error

    async with broker.running():
        refs = [await broker.publish("orders", text, keep_result="1h") for text in ("quiet", "tell")]
        assert [await failure(each, "billing") for each in refs] == [("rejected", "no such customer")] * 2
        ref = await broker.publish("push", "x", keep_result="1h")
        assert await failure(ref, "sender") == ("failed", "OSError: no device (it went on to the fallback topic 'sms')")
        ref = await broker.publish("later", "x", keep_result="1h", expires=datetime(2020, 1, 1, tzinfo=UTC))
        assert (await failure(ref, "sender"))[0] == "expired"
        ref = await broker.publish("later", "x", keep_result="1h")
        await until(lambda: has_state(broker, ref, "waiting_for_retry"), "it waits for its retry")
        await broker.cancel(ref)
        assert (await failure(ref, "sender"))[0] == "cancelled"
        is_fixed.set()
        await replay(broker)
        await settled(broker, "orders")
        assert [await broker.result(each, group="billing", timeout="20s") for each in refs] == ["quiet", "tell"]


async def has_state(broker: Broker, ref: Any, state: str) -> bool:
    """Whether a message is in this state for the group `sender`."""
    found = (await broker.look(ref)).group("sender")
    return found is not None and found.state == state


async def test_a_result_comes_with_the_outputs_and_not_of_a_failed_attempt(broker: Broker) -> None:
    """A retry has the result of the attempt that works; what cannot be written fails the attempt."""
    attempts = list[int]()

    @broker.handler("orders", group="billing", retry=SOON)
    async def bill(payload: Any, message: Message) -> Any:
        attempts.append(message.attempt)
        await message.publish("invoices", message.attempt)
        return float("nan") if message.attempt == 1 else message.attempt

    async with broker.running():
        ref = await broker.publish("orders", 1, keep_result="1h")
        assert await broker.result(ref, group="billing", timeout="20s") == 2
        await settled(broker, "orders")
    assert attempts == [1, 2]


async def test_batch_handlers_keep_that_a_message_is_done(broker: Broker) -> None:
    """They return outcomes; also with payloads only, and gathered by key."""

    @broker.handler("orders", group="payloads", batch=10)
    async def payloads(many: list[Any]) -> None: ...

    @broker.handler("orders", group="outcomes", batch=10, retry=RetryPolicy(max_attempts=1))
    async def outcomes(many: list[Message]) -> list[Any]:
        return [Reject("odd") if each.data == b"1" else None for each in many]

    @broker.handler("orders", group="gathered", batch=10, by="key", linger="1ms")
    async def gathered(many: list[Message]) -> None:
        await many[0].publish("out", 1)

    async with broker.running():
        refs = [await broker.publish("orders", n, key="k", keep_result="1h") for n in range(2)]
        plain = await broker.publish("orders", 7, key="k")
        for group in ("payloads", "gathered"):
            assert [await broker.result(each, group=group, timeout="20s") for each in refs] == [None, None]
        assert await broker.result(refs[0], group="outcomes", timeout="20s") is None
        with pytest.raises(ResultFailed, match="odd"):
            await broker.result(refs[1], group="outcomes", timeout="20s")
        await settled(broker, "orders")
        assert not [each for each in await kept(broker, "payloads:result") if str(plain) in each]


async def test_results_and_steps_are_encoded(settings: Settings) -> None:
    """By the codecs of the broker, each under a subkey of its own; a broker without the key cannot read them."""
    codecs = [Zstd(), Encrypt(Keyring({"k1": b"x" * 32}), required=True)]
    broker = Broker(replace(settings, preflight="warn", partitions=1), codecs=codecs)

    @broker.handler("orders", group="billing", retry=SOON)
    async def bill(payload: str, message: Message) -> str:
        async with message.step("secret") as step:
            if step.is_done:
                return str(step.result)
            step.result = "secret" * 100
        raise OSError("again")

    async with broker.running():
        ref = await broker.publish("orders", "x", keep_result="1h")
        assert await broker.result(ref, group="billing", timeout="20s") == "secret" * 100
        raw = await ask(broker, "GET", broker.keys.result("orders", 0, "billing", str(ref)))
        assert b"secret" not in raw


# -- steps ---------------------------------------------------------------------------------------------------------


@styles
async def test_a_step_runs_once_over_retries_and_a_replay(broker: Broker, options: dict[str, Any]) -> None:
    """Its dead letter takes it along, also with an output of `on_dead`; the settlement removes it."""
    ran, may_end = list[str](), asyncio.Event()

    @broker.handler("orders", group="billing", retry=replace(SOON, max_attempts=2), **options)
    async def bill(payload: Any, message: Message) -> None:
        async with message.step("charge") as step:
            if not step.is_done:
                ran.append(f"charge {message.key}")
                step.result = {"id": message.key}
        assert step.is_done
        assert step.result == {"id": message.key}
        with pytest.raises(ValueError, match="half"):
            async with message.step("mail"):
                raise ValueError("half")
        async with message.step("mail") as mail:
            assert not mail.is_done or may_end.is_set()
            ran.append(f"mail {message.key}") if may_end.is_set() else None
            if not may_end.is_set():
                raise OSError("no mail")

    @broker.on_dead("orders", group="billing")
    async def dead(message: Message, _: Burial) -> None:
        if message.key == "tell":
            await message.publish("dead", "x")

    async with broker.running():
        for key in ("quiet", "tell"):
            await broker.publish("orders", 1, key=key)
        await until(lambda: dead_letters(broker, 2), "two dead letters")
        assert await kept(broker) == []
        may_end.set()
        await replay(broker)
        await until(lambda: len(ran) == 4, "both are mailed")
        await settled(broker, "orders")
        await until(lambda: nothing_kept(broker), "the settlement removes the steps")
    assert sorted(ran) == ["charge quiet", "charge tell", "mail quiet", "mail tell"]


async def dead_letters(broker: Broker, number: int) -> bool:
    """Whether there are so many."""
    return await broker.dead_letters.count(await broker.topics.existing("orders"), "billing") == number


async def replay(broker: Broker) -> None:
    """All dead letters."""
    await broker.dead_letters.replay(await broker.topics.existing("orders"), "billing")


async def nothing_kept(broker: Broker) -> bool:
    """Whether no note is left."""
    return not await kept(broker)


async def test_a_cursor_is_a_step_that_is_overwritten(broker: Broker) -> None:
    """An attempt goes on where the last one has failed; a plain function writes `with`."""
    seen = list[int]()

    @broker.handler("orders", group="billing", retry=SOON)
    def copy(payload: Any, message: Message) -> None:
        while True:
            with message.step("rows") as step:
                start = step.result or 0
                if start >= 6:
                    return
                seen.append(start)
                step.result = start + 2
            if start == 2 and message.attempt == 1:
                raise OSError("the connection broke")

    async with broker.running():
        await broker.publish("orders", 1)
        await until(lambda: seen == [0, 2, 4], "all rows")
        await settled(broker, "orders")


async def test_what_a_step_cannot_be(broker: Broker) -> None:
    """Names, sizes and numbers have limits, and a handler that has ended keeps nothing."""
    errors, messages = list[Exception](), list[Message]()

    async def fails(kind: type[Exception], call: Callable[[], Any]) -> None:
        with pytest.raises(kind) as caught:
            async with call() as step:
                step.result = b"x" * 60_000
        errors.append(caught.value)

    @broker.handler("orders", group="billing")
    async def bill(payload: Any, message: Message) -> None:
        messages.append(message)
        for name in ("", "a|b", "x" * 101, "\n", 7):
            with pytest.raises(ConfigError, match="cannot be called"):
                message.step(name)  # type: ignore[arg-type]
        with pytest.raises(TooLarge, match="keep a reference"):
            async with message.step("large") as step:
                step.result = b"x" * 70_000
        for number in range(4):
            async with message.step(f"s{number}") as step:
                step.result = b"x" * 60_000
        await fails(ConfigError, lambda: message.step("s4"))
        with pytest.raises(ConfigError, match="async with"), message.step("sync"):
            pass
        for wrong in (-0.1, 1.1, "a"):
            with pytest.raises(ConfigError, match="a part of 1"):
                await message.progress(wrong)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="200 characters"):
            await message.progress(0.5, "x" * 201)

    async with broker.running():
        await broker.publish("orders", 1)
        await settled(broker, "orders")
        assert "more than 100 steps" in str(errors[0])
        with pytest.raises(ConfigError, match="has ended"):
            async with messages[0].step("late"):
                pass
        with pytest.raises(ConfigError, match="has ended"):
            await messages[0].progress(1)
        await until(lambda: nothing_kept(broker), "nothing is left")


async def test_a_reset_does_all_steps_again(broker: Broker) -> None:
    """Steps belong to the run of the group; those of the old one are gone."""
    ran = list[int]()

    @broker.handler("orders", group="billing", retry=LATER)
    async def bill(payload: Any, message: Message) -> None:
        async with message.step("charge") as step:
            if not step.is_done:
                ran.append(1)
        await message.progress(0.5)
        raise OSError("not now")

    async with broker.running():
        ref = await broker.publish("orders", 1)
        await until(lambda: len(ran) == 1, "the first run")
        await until(lambda: parked(broker, ref), "it waits")
        await broker.reset_group("orders", "billing")
        await until(lambda: len(ran) == 2, "the second run")


async def parked(broker: Broker, ref: Any) -> bool:
    """Whether it waits for its retry."""
    found = (await broker.look(ref)).group("billing")
    return found is not None and found.state == "waiting_for_retry"


async def test_retention_removes_notes_that_a_settlement_has_left(broker: Broker) -> None:
    """An attempt without the step has settled the message. Notes on what waits for a retry stay."""

    @broker.handler("orders", group="billing", retry=RetryPolicy(max_attempts=9, wait=wait_fixed(0.01)))
    async def bill(payload: str, message: Message) -> None:
        if message.attempt == 1:
            async with message.step("charge"):
                await message.progress(0.5)
            raise Retry(after="1h") if payload == "wait" else OSError("once")

    async with broker.running():
        await broker.publish("orders", "left", key="a")
        await settled(broker, "orders")
        ref = await broker.publish("orders", "wait", key="a")
        await until(lambda: parked(broker, ref), "it waits")
        number = ref.partition_number
        steps = broker.keys.steps("orders", number, "billing")
        assert await ask(broker, "HLEN", steps) == 4
        await trim(broker)
        assert sorted(await ask(broker, "HKEYS", steps)) == await fields_of(broker, ref)
        assert await ask(broker, "HLEN", broker.keys.progress("orders", number, "billing")) == 1


async def trim(broker: Broker) -> None:
    """One round of retention."""
    assert broker.worker is not None
    await Retention(broker.client, broker.keys, broker.settings, broker.topics, broker.worker.consumers).tidy()


async def fields_of(broker: Broker, ref: Any) -> list[bytes]:
    """The fields of the steps of a message."""
    status = await broker.look(ref)
    assert status.stream_id is not None
    return sorted([status.stream_id.encode(), f"{status.stream_id}|charge".encode()])


# -- progress ------------------------------------------------------------------------------------------------------


async def test_progress_is_written_at_most_once_a_second(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first at once, then the last that was said; look shows it, and the settlement removes it."""
    monkeypatch.setattr(notes, "PROGRESS_SECONDS", 0.05)
    may_end = asyncio.Event()

    @broker.handler("orders", group="sender")
    async def work(payload: Any, message: Message) -> None:
        for page in range(100):
            await message.progress(page / 100, f"page {page}")
        await may_end.wait()

    async with broker.running():
        ref = await broker.publish("orders", 1)
        await until(lambda: tells(broker, ref, "99% done, page 99"), "the last one is written")
        may_end.set()
        await settled(broker, "orders")
        await until(lambda: nothing_kept(broker), "the settlement removes it")


async def tells(broker: Broker, ref: Any, text: str) -> bool:
    """Whether `look` says this."""
    found = (await broker.look(ref)).group("sender")
    return found is not None and text in found.text
