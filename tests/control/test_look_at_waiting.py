"""`broker.look` says for what a message waits that a member has, how many are before it, and until when it is held."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from rsmq import Broker, Concurrency, Message, Rate, Settings
from rsmq.consumer.reading.questions import Questions
from rsmq.control import GroupStatus, asking
from rsmq.dashboard import Role, Rules, Visitor, create_app
from rsmq.model.delivery_state import DeliveryQuestion, DeliveryState, read_delivery_state, read_question
from tests.cli.conftest import Cli
from tests.consumer.members import consumer_of
from tests.contract.test_flows import far_of
from tests.contract.witness import ask
from tests.dashboard.test_extension import browsing
from tests.patience import PATIENCE, until

PREFETCH = 40
ADMIN = Rules(authorize=lambda _: Visitor("me", Role.ADMIN))
MEMBER = r"in the hands of \S+: it has not started"

Make = Callable[..., "Shop"]


def tenant(message: Message) -> str | None:
    """The tenant in the headers."""
    return message.headers.get("tenant")


def provider(message: Message) -> str | None:
    """What limits count by."""
    return message.headers.get("provider")


class Shop:
    """A worker with one partition and little memory, whose calls wait for `gate`."""

    def __init__(self, settings: Settings, **options: Any) -> None:
        changed = settings.changed() | {
            "preflight": "warn",
            "prefetch": PREFETCH,
            "partitions": 1,
            "stop_grace": "50ms",
        }
        self.broker = Broker(Settings(**changed))
        self.gate, self.started = asyncio.Event(), list[str]()
        self.broker.handler("t", group="g", **({"concurrency": 2} | options))(self.handle)

    async def handle(self, message: Message) -> None:
        self.started.append(message.id)
        await self.gate.wait()

    async def send(self, count: int, key: str | None = None, **headers: str) -> list[str]:
        """So many messages with these headers, one after the other."""
        return await self.broker.publish_many(
            "t", [{"n": n} for n in range(count)], key=key and (lambda _: key), headers=headers
        )

    async def sees(self, ref: str) -> GroupStatus:
        """The state of a message."""
        status = (await self.broker.look(ref, topic="t")).group("g")
        assert status is not None
        return status

    async def reads(self, count: int) -> None:
        """Wait until the worker has so many messages."""
        consumer = consumer_of(self.broker)
        await until(
            lambda: sum(len(lane.in_flight) + lane.flows.far for lane in consumer.lanes.values()) >= count,
            "it has them",
        )


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may stand still for longer than a caller waits for an answer."""
    monkeypatch.setattr(asking, "ANSWER_SECONDS", PATIENCE)


@pytest.fixture
def shop(settings: Settings) -> Make:
    """Makes a shop on the server of the tests."""
    return lambda **options: Shop(settings, **options)


async def test_message_in_the_flow_of_a_tenant_knows_how_many_are_before_it(shop: Make) -> None:
    """In memory and as an id, and behind the messages of its own tenant only."""
    here = shop(tenant=tenant)
    async with here.broker.running():
        acme = await here.send(10 * PREFETCH, tenant="acme")
        zeta = await here.send(3, tenant="zeta")
        await here.reads(10 * PREFETCH + 3)
        assert far_of(here.broker) > 5 * PREFETCH, "most wait as ids"
        for n in (2, 20, 200, 10 * PREFETCH - 1):
            status = await here.sees(acme[n])
            assert (status.state, status.tenant, status.before) == ("waiting_for_turn", "acme", n - 2), "two run"
        last = await here.sees(zeta[2])
        assert (last.state, last.tenant, last.before) == ("waiting_for_turn", "zeta", 2)
        text = (await here.sees(acme[314])).text
        assert re.fullmatch(rf"waits for its turn, in the flow of acme, 312 before it, {MEMBER}", text)
        running = await here.sees(acme[0])
        assert running.state == "running"
        here.gate.set()


async def test_message_that_waits_for_the_rate_of_a_name_says_so(shop: Make) -> None:
    """With and without a tenant, in memory and as an id."""
    here = shop(rate=Rate(1, per="1h", by=provider), tenant=tenant)
    async with here.broker.running():
        refs = await here.send(5 * PREFETCH, tenant="acme", provider="twilio")
        await here.reads(5 * PREFETCH)
        await until(lambda: here.started, "one has started")
        await until(lambda: far_of(here.broker) > PREFETCH, "most wait as ids")
        status = await here.sees(refs[-1])
        assert (status.state, status.name, status.tenant) == ("waiting_for_rate", "twilio", "acme")
        assert status.before == 5 * PREFETCH - 2, "one has started"
        assert re.fullmatch(rf"waits for the rate of twilio, in the flow of acme, 198 before it, {MEMBER}", status.text)
        first = await here.sees(refs[1])
        assert (first.state, first.name, first.before) == ("waiting_for_rate", "twilio", 0), "held in memory"
        here.gate.set()


@pytest.mark.parametrize(
    ("options", "state", "text"),
    [
        ({"rate": Rate(1, per="1h")}, "waiting_for_rate", "waits for the rate of the handler, "),
        ({"rate": Rate(1, per="1h", by="key")}, "waiting_for_key", "waits behind "),
        ({"group_concurrency": 1}, "waiting_for_permit", "waits for a permit of the group, "),
        ({"group_concurrency": Concurrency(1, by=provider)}, "waiting_for_permit", "waits for a permit of twilio, "),
        ({"ordering": "none", "concurrency": 1}, "ready", "ready: it starts when a slot is free, 2 before it, "),
        ({"distribution": "shared", "concurrency": 1}, "ready", "ready: it starts when a slot is free, 2 before it, "),
        ({"concurrency": 1}, "ready", "ready: it starts when a slot is free, 2 before it, "),
    ],
)
async def test_each_limit_says_what_its_message_waits_for(
    shop: Make, options: dict[str, Any], state: str, text: str
) -> None:
    """The last of four, one of which runs."""
    here = shop(**options)
    key = "k" if state == "waiting_for_key" else None
    async with here.broker.running():
        refs = await here.send(4, key, provider="twilio")
        await here.reads(4)
        await until(lambda: here.started, "one has started")
        status = await here.sees(refs[3])
        assert status.state == state
        assert status.text.startswith(text)
        here.gate.set()


async def test_message_whose_handler_waits_for_a_permit_says_so(shop: Make) -> None:
    """It runs: of two that share one permit the second waits inside its handler."""
    here, inside, go_on = shop(), list[str](), asyncio.Event()

    @here.broker.handler("calls", group="g", permits={"twilio": Concurrency(1)})
    async def call(message: Message) -> None:
        async with message.permit("twilio"):
            inside.append(message.id)
            await go_on.wait()

    async with here.broker.running():
        refs = [await here.broker.publish("calls", {"n": n}) for n in range(2)]

        async def is_known() -> bool:
            status = [(await here.broker.look(ref)).group("g") for ref in refs]
            if not all(each is not None and each.state == "running" for each in status):
                return False
            texts = {str(ref): each.text for ref, each in zip(refs, status, strict=True) if each is not None}
            waits = [ref for ref, text in texts.items() if "its handler waits for a permit of twilio" in text]
            return len(inside) == 1 and waits == [str(ref) for ref in refs if str(ref) not in inside]

        await until(is_known, "the one that waits says so")
        go_on.set()


async def test_hold_is_named_with_its_end(shop: Make) -> None:
    """Of what waits in memory, of what is only an id, and of what is not read; and not once it has ended."""
    here = shop(rate=Rate(10_000, by=provider))
    async with here.broker.running():
        await here.send(1)
        until_then = await here.broker.hold("t", "twilio", "1h")
        consumer = consumer_of(here.broker)
        await until(lambda: consumer.holds is not None and consumer.holds.names, "the worker knows of it")
        refs = await here.send(5 * PREFETCH, provider="twilio")
        await here.reads(5 * PREFETCH)
        await until(lambda: far_of(here.broker), "some are kept as ids")
        for ref in (refs[0], refs[-1]):
            status = await here.sees(ref)
            assert (status.state, status.name, status.until) == ("held", "twilio", until_then)
        assert (await here.sees(refs[0])).before == 0
        when = f"{until_then:%Y-%m-%d %H:%M:%S} UTC"
        assert re.fullmatch(rf"held until {when} by twilio, 0 before it, {MEMBER}", (await here.sees(refs[0])).text)
        here.gate.set()
        await here.broker.end_hold("t", "twilio")
        await until(lambda: len(here.started) == 5 * PREFETCH + 1, "all are handled")


async def test_command_and_dashboard_say_the_same(shop: Make, tmp_path: Path) -> None:
    """`rsmq trace`, also as JSON, and the page of the message."""
    here = shop(tenant=tenant, rate=Rate(10_000, by=provider))
    settings, command = here.broker.settings, ("trace", "--topic", "t")
    cli = Cli(tmp_path, {"RSMQ_URL": str(settings.url), "RSMQ_PREFIX": settings.prefix, "COLUMNS": "300"})
    async with here.broker.running(), browsing(create_app(settings, rules=ADMIN)) as web:
        await here.broker.publish("t", {}, headers={"tenant": "acme", "provider": "twilio"})
        until_then = await here.broker.hold("t", "twilio", "1h")
        consumer = consumer_of(here.broker)
        await until(lambda: consumer.holds is not None and consumer.holds.names, "the worker knows of it")
        refs = await here.send(5, tenant="acme", provider="twilio")
        await here.reads(5)
        when = f"held until {until_then:%Y-%m-%d %H:%M:%S} UTC by twilio, in the flow of acme, "

        async def is_shown() -> bool:  # a process of its own, whose patience this test does not set
            return f"{when}0 before it" in await asyncio.to_thread(cli.ok, *command, refs[0])

        await until(is_shown, "the command says so")

        async def is_data() -> bool:
            (found,) = (await asyncio.to_thread(cli.json, *command, refs[0]))["groups"]
            about = ("state", "name", "tenant", "before")
            return [found[each] for each in about] == ["held", "twilio", "acme", 0]

        await until(is_data, "its JSON says so")
        page = await web.get(f"/message/t/{refs[0]}")
        assert f"{when}0 before it" in unescape(page.text)
        assert 'action="/do/cancel"' in page.text, "it has not started"
        here.gate.set()


async def test_page_of_a_message_that_waits_for_a_time_can_move_and_cancel_it(shop: Make) -> None:
    """Its handler's rule lets it start tomorrow."""
    here = shop(when=lambda _message: datetime.now(UTC) + timedelta(days=1))
    async with here.broker.running(), browsing(create_app(here.broker.settings, rules=ADMIN)) as web:
        (ref,) = await here.send(1)

        async def is_known() -> bool:
            page = (await web.get(f"/message/t/{ref}")).text
            return "waits until" in page and 'action="/do/cancel"' in page and 'action="/do/reschedule"' in page

        await until(is_known, "the page says so")


async def test_hold_of_all_messages_is_seen_without_a_worker(shop: Make) -> None:
    """No member can be asked: that all is held is known to the server."""
    here = shop(rate=Rate(10_000, by=provider))
    async with here.broker.running():
        await until(lambda: consumer_of(here.broker).lanes, "it is a member")
    async with Shop(here.broker.settings, rate=Rate(10_000, by=provider)).broker as caller:
        until_then = await caller.hold("t", None, "1h")
        ref = await caller.publish("t", {})
        status = (await caller.look(ref)).group("g")
        assert status is not None
        assert (status.state, status.until) == ("unread", until_then)
        assert f"; all messages of the group are held until {until_then:%Y-%m-%d %H:%M:%S} UTC" in status.text


async def test_message_of_a_member_that_does_not_answer_is_where_the_server_says(
    shop: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one of an older version, or one whose event loop is blocked; and one that is killed meanwhile."""
    here = shop(tenant=tenant)
    async with here.broker.running():
        refs = await here.send(3 * PREFETCH, tenant="acme")
        await here.reads(3 * PREFETCH)
        lane = consumer_of(here.broker).lanes[0]
        await until(lambda: lane.flows.far and not lane.flows.aside, "the server knows what has not started")

        async def silent(_questions: Questions, _question: DeliveryQuestion) -> None:
            """An older version hears the question as a change."""

        monkeypatch.setattr(Questions, "_answer", silent)
        monkeypatch.setattr(asking, "ANSWER_SECONDS", 0.05)
        last, first = await here.sees(refs[-1]), await here.sees(refs[0])
        assert (last.state, last.before, last.tenant) == ("waiting_for_turn", None, None)
        assert re.fullmatch(rf"waits for a rate or for its turn, {MEMBER}", last.text)
        assert first.state == "running"
        here.gate.set()


async def test_question_changes_nothing_for_the_members(shop: Make) -> None:
    """No look at the members, no lost lease, nothing left on the server but an answer that ends by itself."""
    here = shop(tenant=tenant)
    async with here.broker.running():
        refs = await here.send(3, tenant="acme")
        await here.reads(3)
        consumer = consumer_of(here.broker)
        changes = consumer.membership.changes
        for _ in range(20):
            await here.sees(refs[2])
        assert consumer.membership.changes == changes
        answers = await ask(here.broker, "KEYS", f"{here.broker.keys.prefix}:{{%reply.*")
        assert len(answers) == 20
        assert all([await ask(here.broker, "PTTL", each) > 0 for each in answers])
        here.gate.set()


@pytest.mark.parametrize(
    "packed",
    [b"", b"look", b"look 1 2-1", b"look x 2-1 ab", b"look 1 2 ab", b"look 1 2-1 a:b", b"find 1 2-1 ab", b"\xff"],
)
def test_what_is_no_question_is_left_alone(packed: bytes) -> None:
    """Any client may publish anything."""
    assert read_question(packed) is None


def test_question_and_answer_are_read_as_they_were_written() -> None:
    """What another client has written is no answer."""
    question = DeliveryQuestion(3, b"1700000000000-1", "ab12")
    assert read_question(question.pack().encode()) == question
    state = DeliveryState("held", 3, "twilio", "acme", 1_700_000_000_000)
    assert read_delivery_state(state.pack().encode()) == state
    assert read_delivery_state(DeliveryState("running").pack().encode()) == DeliveryState("running")
    for foreign in (b"", b"[]", b'{"state": 1}', b'{"state": "gone"}', b'{"state": ["held"]}'):
        assert read_delivery_state(foreign) is None
    wrong = read_delivery_state(b'{"state": "held", "before": -1, "name": 3, "until_ms": 1e99}')
    assert wrong == DeliveryState("held")
