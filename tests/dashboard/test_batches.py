"""The pages of batches, what a group waits behind, and what runs: the application in this process, on a real server."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import timedelta
from html import unescape

import httpx
import pytest

from rsmq import Broker, Message, Rate, Settings
from rsmq.dashboard import Role, Rules, Visitor, create_app
from tests.dashboard.test_extension import browsing
from tests.patience import until

VISITORS = {
    "ada": Visitor("ada", Role.LOOK, {"sms": Role.ADMIN, "mail": Role.ACT}),
    "root": Visitor("root", Role.ADMIN),
    "guest": Visitor("guest", Role.NONE, {"sms": Role.LOOK}),
}


def tenant(message: Message) -> str:
    """In the headers."""
    return message.headers["tenant"]


class Shop:
    """A batch over two topics of one group: handlers wait for `gate`."""

    def __init__(self, settings: Settings) -> None:
        beat = timedelta(milliseconds=100)
        self.broker = Broker(replace(settings, preflight="warn", partitions=2, heartbeat=beat))
        self.gate, self.started = asyncio.Event(), list[str]()
        sms = self.broker.topic("sms", str, bands=("urgent", "normal"))
        limits = {"rate": Rate(2, per="1h", by=tenant), "reserve": {"urgent": 1}}
        sms.handler(group="sender", concurrency=8, tenant=tenant, weights={"acme": 3}, **limits)(self.handle)
        self.broker.handler("mail", group="sender")(self.handle)
        self.broker.handler("reports", group="reports")(self.note)

    async def handle(self, message: Message) -> None:
        await message.progress(0.4, "page 3")
        self.started.append(message.id)
        await self.gate.wait()

    async def note(self, message: Message) -> None: ...

    async def fill(self) -> list[str]:
        """Six members for acme, two of which start, and one of mail."""
        async with self.broker.batch("spring/sale", group="sender", on_complete="reports") as batch:
            headers = {"tenant": "acme"}
            refs = [await batch.publish("sms", f"{n}", key=f"k{n}", headers=headers) for n in range(6)]
            return [str(each) for each in [*refs, await batch.publish("mail", "hello")]]


@pytest.fixture
async def shop(settings: Settings) -> AsyncIterator[Shop]:
    """With its worker, and a batch."""
    found = Shop(settings)
    async with found.broker.running():
        yield found
        found.gate.set()
        found.broker.stop(timedelta(0))


@pytest.fixture
async def web(shop: Shop) -> AsyncIterator[httpx.AsyncClient]:
    """Its dashboard; the header says who asks."""
    rules = Rules(authorize=lambda request: VISITORS.get(request.headers.get("who", "ada")))
    async with browsing(create_app(shop.broker.settings, rules=rules)) as client:
        yield client


async def shown(web: httpx.AsyncClient, path: str, who: str = "ada") -> str:
    """A page as text."""
    found = await web.get(path, headers={"who": who})
    assert found.status_code == 200, found.text
    return unescape(found.text)


BATCH = "/batch/spring%2Fsale"


async def test_batch_has_a_bar_and_its_numbers_and_is_cancelled(shop: Shop, web: httpx.AsyncClient) -> None:
    """On the list, by a part of its name, on its own page; its members say it. Cancelling is audited, and needs the
    role in all its topics."""
    assert "there are no batches" in await shown(web, "/batches")
    refs = await shop.fill()
    await until(lambda: len(shop.started) == 3, "two of acme and the mail run")
    page = await shown(web, "/batches?q=SALE")
    assert '<progress value="0.0000" max="1" aria-label="0 % of spring/sale have ended"></progress> 0 %' in page
    assert f'href="{BATCH}"' in page
    assert "spring" not in await shown(web, "/batches?q=autumn")
    page = await shown(web, BATCH)
    for part in ("closed: members are under way", "7: not ended yet, or lost", "sender of mail", "sender of sms"):
        assert part in page
    assert f'<a href="{BATCH}">spring/sale</a>' in await shown(web, f"/message/sms/{refs[0]}")
    bar = '<progress value="0.4000" max="1"'
    assert "Members that run" in page
    assert (page.count(bar), page.count('<td data-label="what">page 3</td>')) == (3, 3)
    mail = await shown(web, f"/message/mail/{refs[-1]}")
    assert bar in mail
    assert "40% done, page 3" in mail
    asked = await web.post("/do/cancel-batch", data={"batch": "spring/sale", "confirmed": "yes"})
    assert asked.status_code == 403, "not the role admin in mail"
    question = await web.post("/do/cancel-batch", data={"batch": "spring/sale"}, headers={"who": "root"})
    assert "Cancel 7 members of batch 'spring/sale' for good?" in unescape(question.text)
    form = {"batch": "spring/sale", "confirmed": "yes"}
    assert (await web.post("/do/cancel-batch", data=form, headers={"who": "root"})).status_code == 303
    audit = await shown(web, "/audit")
    assert "cancel-batch" in audit
    assert "spring/sale" in audit
    shop.gate.set()

    async def is_over() -> bool:
        page = await shown(web, BATCH)
        return "complete: all members have ended" in page and '<progress value="1.0000"' in page

    await until(is_over, "what ran is done, and the rest is cancelled")
    assert "cancel-batch" not in await shown(web, BATCH, "root"), "there is nothing left to cancel"


async def test_batch_of_topics_that_a_visitor_may_not_see_does_not_exist(shop: Shop, web: httpx.AsyncClient) -> None:
    """One topic is enough."""
    await shop.fill()
    assert "there are no batches" in await shown(web, "/batches", "guest")
    assert (await web.get(BATCH, headers={"who": "guest"})).status_code == 404
    assert (await web.get("/batch/other")).status_code == 404
    form = {"batch": "spring/sale", "confirmed": "yes"}
    assert (await web.post("/do/cancel-batch", data=form, headers={"who": "guest"})).status_code == 404


async def test_group_shows_bands_tenants_rates_and_what_runs(shop: Shop, web: httpx.AsyncClient) -> None:
    """Bands with their reserved slots, tenants with their weights, what waits for which rate, and what really runs: two
    of six pending messages."""
    await shop.fill()
    rows = ("urgent 2 0 0 0 – 0 1 ", r"normal 2 6 0 6 [\d.]+ m?s 0 0 ", r"acme \d 3 \d ", r"rate acme \d \S+-")

    def listed(page: str) -> tuple[str, str]:
        running, pending = (page.partition(f'id="{name}"')[2].partition("<h2>")[0] for name in ("running", "pending"))
        return running, pending

    async def is_told() -> bool:
        """Counts, and what a member works on, which it tells by itself."""
        page = await shown(web, "/group/sms/sender")
        counts = tuple(part.count("<tr id=") for part in listed(page))
        return counts == (2, 6) and all(re.search(row, words(page)) for row in rows)

    await until(is_told, "the members have told it")
    page = await shown(web, "/group/sms/sender")
    running, _ = listed(page)
    assert re.search(r'href="/message/sms/\d%2F\d+-\d+">\d/\d+-\d+</a>', running)
    overview = words(await shown(web, "/"))
    assert re.search(r"backlog 7 oldest [\d.]+ (m?s|min) in a second", overview), overview[:300]
    process = await shown(web, re.search(r'href="(/process/[^"]+)"', page)[1])  # type: ignore[index]
    assert "Runs of sender of sms" in process
    assert "tenants in turn" in page


def words(page: str) -> str:
    """A page without its tags."""
    return " ".join(re.sub(r"<[^>]*>", " ", page).split())
