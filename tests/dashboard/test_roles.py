"""Roles by a callback, and the history: the application in this process, on a real server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import timedelta

import httpx
import pytest

from rsmq import Broker, Settings
from rsmq.dashboard import Role, Rules, Visitor, create_app
from rsmq.dashboard.history import HistorySampler
from rsmq.inspector.inspector import Inspector
from rsmq.model.keys import Keys

VISITORS = {
    "ada": Visitor("ada", Role.LOOK, {"secret": Role.NONE, "orders": Role.ACT}),
    "root": Visitor("root", Role.ADMIN),
    "guest": Visitor("guest", Role.NONE, {"orders": Role.LOOK}),
}


@pytest.fixture
async def web(settings: Settings) -> AsyncIterator[httpx.AsyncClient]:
    """The dashboard with two topics that each have a group; the header says who asks."""
    broker = Broker(replace(settings, preflight="warn"))
    for topic in ("orders", "secret"):

        @broker.handler(topic, group="billing", partitions=1)
        async def bill(order: dict[str, int]) -> None: ...

    async with broker.running():
        for topic in ("orders", "secret"):
            await broker.publish(topic, {"n": 1})
            await broker.publish(topic, {"n": 1}, delay=timedelta(hours=1))
        app = create_app(settings, rules=Rules(authorize=lambda request: VISITORS.get(request.headers.get("who", ""))))
        async with app.router.lifespan_context(app):
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                yield client
        broker.stop(timedelta(0))


async def statuses(web: httpx.AsyncClient, who: str) -> dict[str, int]:
    """What each page and action answers to a visitor."""
    pages = ["/", "/topic/orders", "/topic/secret", "/messages/secret", "/devices", "/group/secret/billing",
             "/delayed/secret", "/dead-letters/secret/billing", "/parked/secret/billing"]  # fmt: skip
    found = {page: (await web.get(page, headers={"who": who})).status_code for page in pages}
    for action in ("pause", "purge", "publish"):
        for topic in ("orders", "secret"):
            form = {"topic": topic, "group": "billing", "payload": "1"}
            found[f"{action} {topic}"] = (await web.post(f"/do/{action}", data=form, headers={"who": who})).status_code
    return found


async def test_role_of_a_topic_says_what_is_seen_and_done(web: httpx.AsyncClient) -> None:
    """NONE hides a topic as if it did not exist, LOOK shows, ACT pauses, ADMIN purges; a stranger gets nothing."""
    ada, root = await statuses(web, "ada"), await statuses(web, "root")
    guest, stranger = await statuses(web, "guest"), await statuses(web, "stranger")
    assert {page: status for page, status in ada.items() if status != 200} == {
        page: 404 for page in ada if "secret" in page
    } | {"purge orders": 403}
    assert set(root.values()) == {200}
    assert (guest["/"], guest["/topic/orders"], guest["/topic/secret"], guest["/devices"]) == (200, 200, 404, 403)
    assert (guest["pause orders"], guest["pause secret"]) == (403, 404)
    assert set(stranger.values()) == {403}
    page = (await web.get("/", headers={"who": "ada"})).text
    assert ("orders" in page, "secret" in page) == (True, False)


async def test_process_is_ended_by_those_who_may_act_on_all_that_it_serves(web: httpx.AsyncClient) -> None:
    """Another one has no button, and is refused; what a visitor does not see at all does not exist."""
    listed = (await web.get("/processes", headers={"who": "root"})).text
    name = listed.partition("/process/")[2].partition('"')[0]
    seen = {}
    for who in ("root", "ada", "guest"):
        page = (await web.get(f"/process/{name}", headers={"who": who})).text
        answer = await web.post("/do/stop-process", data={"process": name}, headers={"who": who})
        seen[who] = ("stop-process" in page, "secret" in page, answer.status_code)
    assert seen == {"root": (True, True, 200), "ada": (False, False, 403), "guest": (False, False, 403)}


async def test_message_is_rescheduled_by_act_and_cancelled_by_admin(web: httpx.AsyncClient, settings: Settings) -> None:
    """The page has the buttons of the visitor's role, and the actions of another role are refused."""
    async with Broker(replace(settings, preflight="warn")) as broker:
        ref = await broker.publish("orders", {"n": 2}, delay="1h")
        form = {"topic": "orders", "message": str(ref), "when": "at", "at": "2099-01-01T00:00", "confirmed": "yes"}
        seen = {}
        for who in ("guest", "ada", "root"):
            text = (await web.get(f"/message/orders/{ref}", headers={"who": who})).text
            assert "delayed until" in text
            may = [(await web.post(f"/do/{action}", data=form, headers={"who": who})).status_code
                   for action in ("reschedule", "cancel")]  # fmt: skip
            seen[who] = ("/do/reschedule" in text, "/do/cancel" in text, *may)
        assert seen == {
            "guest": (False, False, 403, 403), "ada": (True, False, 303, 403), "root": (True, True, 303, 303)
        }  # fmt: skip
        secret = await broker.publish("secret", {"n": 2}, delay="1h")
        assert (await web.get(f"/message/secret/{secret}", headers={"who": "ada"})).status_code == 404


async def test_audit_names_the_visitor_and_hides_other_topics(web: httpx.AsyncClient) -> None:
    """Before and after of each action, for those who see the topic."""
    for topic in ("orders", "secret"):
        form = {"topic": topic, "group": "billing", "confirmed": "yes"}
        done = await web.post("/do/pause", data=form, headers={"who": "root"})
        assert done.status_code == 303
    text = (await web.get("/audit", headers={"who": "ada"})).text
    assert ("root" in text, "billing of orders" in text, "secret" in text) == (True, True, False)
    assert "billing of secret" in (await web.get("/audit", headers={"who": "root"})).text


async def test_history_survives_a_restart_and_is_stored_once(settings: Settings) -> None:
    """A second dashboard reads what the first has stored; of two samples of a minute the server keeps one."""
    async with Broker(replace(settings, preflight="warn")) as broker:
        await broker.publish("orders", {"n": 1})
        keys = Keys(settings.prefix)
        first, second = (
            HistorySampler(broker.client, keys, Inspector(broker.client, keys, settings)) for _ in range(2)
        )
        for _ in range(2):
            await first.take()
            await second.take()
        assert (len(first.samples), len(second.samples)) == (1, 1)
        after = HistorySampler(broker.client, keys, Inspector(broker.client, keys, settings))
        await after.load()
        assert list(after.samples)[:1] == list(first.samples)
        minutes = {sample.at for each in (first, second) for sample in each.samples}
        assert await broker.client.execute_command("XLEN", keys.history) == len(minutes)
        await broker.client.execute_command("XADD", keys.history, "*", "z", "broken")
        await after.load()
        assert after.samples[-1].topics == {}
