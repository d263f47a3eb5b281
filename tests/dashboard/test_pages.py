"""The pages over HTTP: what they show, what they refuse, and what their actions do. No browser."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from html import unescape
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlencode

import httpx
import pytest
from sqlalchemy import create_engine

from rsmq import SyncBroker
from rsmq.codecs import Encrypt, Keyring, Zstd
from rsmq.dashboard.chart import chart, unbroken
from rsmq.dashboard.dead_letter import kind_of
from rsmq.dashboard.html import Live, Row, tag
from rsmq.dashboard.overview import first, more
from rsmq.dashboard.payload import readable
from rsmq.model.settings import Settings
from rsmq.model.words import installed
from rsmq.sql import Outbox, create_tables
from rsmq.sql.outbox import outbox_row
from rsmq.sql.tables import OUTBOX
from tests.cli.conftest import Cli, Running
from tests.dashboard.conftest import APP_VERSION, KEYS, Feed
from tests.servers import Server, wait_until

HACK = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>'
PAGES = [
    "", "members", "processes", "topic/orders", "group/orders/billing", "messages/orders", "delayed/orders",
    "parked/orders/billing", "dead-letters", "dead-letters/orders/billing", "devices", "connections", "audit",
    "?range=6h",
]  # fmt: skip
MISSING = [
    "topic/nothing", "topic/%00", "topic/..%2f", "group/orders/nothing", "group/nothing/billing", "messages/nothing",
    "message/orders/nothing", "message/orders/0/1-1", "message/nothing/0/1-1",
    "delayed/nothing", "parked/orders/nothing", "dead-letters/orders/nothing", "dead-letter/orders/billing/0/1-1",
    "dead-letter/orders/billing/x", "device/nothing", "connection/nothing", "process/nothing", "nothing",
    "messages/orders/x",
]  # fmt: skip
CELL = re.compile(r'<td[^>]*data-label="([^"]*)"[^>]*>(.*?)</td>')
HIDDEN = re.compile(r'<input type="hidden" name="([^"]*)" value="([^"]*)">')


@pytest.fixture(scope="module")
def worker(start: Callable[..., Running]) -> Running:
    """Serves `orders`."""
    running = start("worker", "app:broker")
    running.expect("reads 4 of 4 partitions")
    return running


@pytest.fixture(scope="module")
def web(open_dashboard: Callable[..., str], worker: Running) -> Iterator[httpx.Client]:
    """A visitor of a dashboard that may change things."""
    with httpx.Client(base_url=open_dashboard("--allow-changes"), timeout=60) as client:
        yield client


def ask(web: httpx.Client, action: str, **fields: str | list[str]) -> str:
    """The question that an action asks first."""
    answer = web.post(f"do/{action}", data=fields)
    assert answer.status_code == 200, answer.text
    return unescape(answer.text)


def do(web: httpx.Client, action: str, **fields: str | list[str]) -> str:
    """Send the form of the question, and return the page that follows."""
    question = web.post(f"do/{action}", data=fields)
    sent: dict[str, list[str]] = {}
    for name, value in HIDDEN.findall(question.text):
        sent.setdefault(unescape(name), []).append(unescape(value))
    answer = web.post(f"do/{action}", data=sent, follow_redirects=True)
    assert answer.status_code == 200, answer.text
    return unescape(answer.text)


@pytest.mark.parametrize("path", PAGES)
def test_every_page_answers(web: httpx.Client, path: str) -> None:
    """With its title, and without any script in it."""
    answer = web.get(path)
    assert answer.status_code == 200
    assert "<h1>" in answer.text
    assert "<script>" not in answer.text


@pytest.mark.parametrize("path", MISSING)
def test_unknown_name_answers_404(web: httpx.Client, path: str) -> None:
    """And the page says what does not exist."""
    answer = web.get(path)
    assert (answer.status_code, "Not found" in answer.text) == (404, True), answer.text


@pytest.mark.parametrize("query", ["until=x", "where=x", "partition=9", "partition=-1", "before=x"])
def test_field_that_cannot_be_read_answers_400(web: httpx.Client, query: str) -> None:
    """With a sentence."""
    answer = web.get(f"messages/orders?{query}")
    assert (answer.status_code, "That does not work" in answer.text) == (400, True)


def test_handlers_show_failures_durations_and_settings(web: httpx.Client, scene: Cli) -> None:
    """As the heartbeats tell them: no message is needed to ask."""
    scene.ok("publish", "orders", "-", stdin='{"n": 1}\n{"n": 2}\n{"bad": "x"}\n')

    def shown() -> dict[str, str]:
        row = re.search(r'<tr id="handlers:bill">.*?</tr>', web.get("group/orders/billing").text)
        return {} if row is None else {name: unescape(text) for name, text in CELL.findall(row[0])}

    wait_until(lambda: shown().get("failed") == "1", "the failure is shown")
    found = shown()
    assert int(found["settled"]) >= 2
    assert (found["dead"], found["attempts"], found["timeout"], found["limits"]) == ("1", "5", "none", "none")
    assert found["p99"] != "–"
    page = web.get("group/orders/billing").text
    assert 'aria-label="calls of bill by duration"' in page
    assert 'aria-label="failures a second"' in page


def test_search_finds_an_id_a_key_and_names_in_all_topics(web: httpx.Client, scene: Cli) -> None:
    """Its field is on every page; what it cannot find it says."""
    first = scene.ok("publish", "found-here", '{"n": 1}', "--key", "k-search").strip()
    scene.ok("publish", "found-there", "2", "--key", "k-search")
    assert 'action="/search"' in web.get("audit").text
    by_id = web.get("search", params={"find": first}).text
    assert (by_id.count("<code>"), "topic/found-here" in by_id) == (1, True)
    by_key = web.get("search", params={"find": "k-search"}).text
    assert (by_key.count("<code>"), "topic/found-there" in by_key) == (2, True)
    named = web.get("search", params={"find": "found-"}).text
    assert ("no message has this id" in named, "topic/found-here" in named) == (True, True)
    assert web.get("search?find=%00%ff").status_code == 200
    assert web.get("search").status_code == 200


def test_search_finds_the_dead_letter_of_a_message_that_is_gone(web: httpx.Client, scene: Cli, server: Server) -> None:
    """Its entry was deleted; its id still leads to the page that has the letter."""
    mine = scene.ok("publish", "orders", '{"bad": "gone"}', "--key", "gone").strip()
    found: list[Any] = []

    def is_dead() -> bool:
        found[:] = scene.json("dlq", "list", "orders", "billing", "--key", "gone")
        return bool(found)

    wait_until(is_dead, "it is dead")
    partition, stream_id = found[0]["origin"].split("/") if "/" in found[0]["origin"] else ("", found[0]["origin"])
    partition = partition or str(found[0]["partition"])
    with server.client() as redis:
        assert redis.xdel(f"{scene.environment['RSMQ_PREFIX']}:{{orders.{partition}}}", stream_id) == 1
    shown = web.get("search", params={"find": mine}).text
    assert f"/message/orders/{mine}" in shown


def test_json_is_spread_over_lines_and_its_values_stay(web: httpx.Client, scene: Cli) -> None:
    """Every character of a number or a text is as it was sent."""
    text = '{"a":1.10,"b":[],"c":{"d":"x, y: {z}\\""},"e":[1,2e400],"f":12345678901234567890}'
    shown = '{\n  "a": 1.10,\n  "b": [],\n  "c": {\n    "d": "x, y: {z}\\""\n  },\n  "e": [\n    1,\n    2e400\n  ],'
    assert readable(text.encode()).startswith(shown)
    assert [readable(each) for each in (b"{broken", b"\xff", b"5", None)] == ["{broken", "\\xff", "5", "(none)"]
    assert json.loads(readable(b'[{"a": "\\u00e9\\n"}, null, true]')) == [{"a": "é\n"}, None, True]
    deep = b"[" * 3000 + b"]" * 3000
    assert readable(deep) == deep.decode() or json.loads(readable(deep)) is not None


def test_message_is_published_copied_and_edited(web: httpx.Client, scene: Cli) -> None:
    """As a new message with its own id, after a question, with an entry of the audit; text stays text."""
    scene.ok("topic", "set", "copies", "--partitions", "1")
    assert "publish/copies" in web.get("topic/copies").text
    fields = {"topic": "copies", "back": "/topic/copies", "kind": "json", "key": "k", "delay": "", "headers": "a=b=c"}
    question = ask(web, "publish", **fields, payload='{\r\n  "n": 1\r\n}')
    assert "Publish a new message with key 'k' to copies? Every group of the topic gets it." in question
    assert "published " in do(web, "publish", **fields, payload='{\r\n  "n": 1\r\n}')
    (first,) = [json.loads(line) for line in scene.ok("tail", "copies", "--json").splitlines()]
    assert (first["data"], first["key"], first["headers"]) == ({"n": 1}, "k", {"a": "b=c"})
    form = web.get(f"publish/copies?message={first['id']}&key=k").text
    assert ("&quot;n&quot;: 1" in form, 'value="k"' in form, "a=b=c" in form) == (True, True, True)
    do(web, "publish", **{**fields, "kind": "text"}, payload="1.10")
    do(web, "publish", **{**fields, "delay": "1h"}, payload="2")
    second = json.loads(scene.ok("tail", "copies", "-n", "1", "--json"))
    assert (second["data"], second["type"], second["id"] != first["id"]) == ("1.10", "text/plain", True)
    assert scene.json("topic", "show", "copies")["delayed"] == 1
    assert web.get("audit").text.count(">publish<") >= 3


def test_copy_of_what_no_field_can_show_is_refused(web: httpx.Client, feed: Callable[..., None], scene: Cli) -> None:
    """Bytes; and what was encrypted with a key that the dashboard does not have."""
    scene.ok("topic", "set", "sealed", "--partitions", "1")
    feed("sealed", ["x"], enc="a256gcm=k9", id="m-1")
    feed("sealed", ["x"], type="application/octet-stream", id="m-2")
    ids = [json.loads(line)["stream_id"] for line in scene.ok("tail", "sealed", "--json").splitlines()]
    answers = [web.get("publish/sealed", params={"message": f"0/{each}"}) for each in ids]
    assert [each.status_code for each in answers] == [400, 400]
    assert "the payload is encoded (a256gcm=k9), and this dashboard cannot read it" in answers[0].text
    assert "only JSON and text can" in answers[1].text


def test_copy_of_an_encrypted_message_is_encrypted(web: httpx.Client, scene: Cli, server: Server) -> None:
    """Edited first: it is stored with the same codings and the dashboard's first key; a wrong coding is refused."""
    prefix, older = scene.environment["RSMQ_PREFIX"], Keyring.read(KEYS.partition(",")[2], "the test")
    settings = Settings(url=scene.environment["RSMQ_URL"], prefix=prefix)
    with SyncBroker(settings, codecs=[Zstd(), Encrypt(older)]) as broker:
        broker.publish("safe", {"iban": "DE" + "0" * 2000}, key="k")
    first = json.loads(scene("tail", "safe", "--json", RSMQ_KEYS=KEYS).stdout)
    form = web.get(f"publish/safe?message={first['id']}&key=k").text
    chosen = '<option value="zstd;a256gcm" selected>encrypted (zstd;a256gcm), with the first key'
    assert (chosen in form, "DE000" in form, chosen in web.get("publish/safe").text) == (True, True, True)
    fields = dict(HIDDEN.findall(form)) | {"kind": "json", "key": "k", "delay": "", "headers": ""}
    fields["encoding"] = "zstd;a256gcm"
    payload = json.dumps({"iban": "FR" + "0" * 2000})
    assert "It is stored encrypted (zstd;a256gcm)." in ask(web, "publish", **fields, payload=payload)
    do(web, "publish", **fields, payload=payload)
    with server.client() as redis:
        stored = [entry for each in redis.keys(f"{prefix}:{{safe.?}}") for _, entry in redis.xrange(each)]
    assert [each[b"enc"] for each in stored] == [b"zstd;a256gcm=k6", b"zstd;a256gcm=k7"]
    assert json.loads(scene("tail", "safe", "-n", "1", "--json", RSMQ_KEYS=KEYS).stdout)["data"] == json.loads(payload)
    schedule = {"topic": "safe", "schedule": "s", "rule": "12h", "payload": '{"iban": "FR"}', "confirmed": "yes"}
    assert web.post("do/add-schedule", data=schedule).status_code == 303
    with server.client() as redis:
        added = [redis.hget(key, "added|s") for key in redis.keys(f"{prefix}:{{safe.?}}:every")]
    assert [b'"enc":"a256gcm=k7"' in each for each in added] == [True]
    answer = web.post("do/publish", data={**fields, "payload": payload, "encoding": "rot13"})
    assert (answer.status_code, "cannot write payloads with the coding" in answer.text) == (400, True)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"payload": "{"}, "the payload is not valid JSON"),
        ({"payload": "0.1234567890123456789012"}, "cannot be kept exactly"),
        ({"payload": "NaN"}, "JSON has no NaN"),
        ({"payload": "1", "headers": "x"}, "is not a header"),
        ({"payload": "1", "delay": "5"}, "it has no unit"),
    ],
)
def test_wrong_field_of_a_new_message_is_refused(web: httpx.Client, fields: dict[str, str], said: str) -> None:
    """With a sentence, and nothing is published."""
    answer = web.post("do/publish", data={"topic": "orders", "kind": "json", **fields})
    assert (answer.status_code, said in unescape(answer.text)) == (400, True), answer.text


@pytest.mark.parametrize("word", ["quiet", "stop"])
def test_process_ends_when_a_visitor_wants_it(
    web: httpx.Client, worker: Running, start: Callable[..., Running], word: str
) -> None:
    """Only that one; after a question, with an entry of the audit. Its exit code is that of an orderly end."""
    other = start("worker", "app:broker")
    other.expect(" serves ")
    name = other.expect("member ")[0].partition("member ")[2].split()[0]
    wait_until(lambda: f"/process/{name}" in web.get("processes").text, "it is on the page")
    assert f"do/{word}-process" in web.get(f"process/{name}").text
    question = ask(web, f"{word}-process", process=name)
    assert f"{word.capitalize()} process {name}, which serves orders/billing" in question
    assert f"{name} is asked to {word}" in do(web, f"{word}-process", process=name)
    assert other.end() == 0
    assert other.matching(f"member {name} ends, because an operator has asked for that ({word})")
    assert worker.process.poll() is None
    assert f"{name} is asked to {word}" in web.get("audit").text
    assert web.post(f"do/{word}-process", data={"process": "nothing"}).status_code == 404


def test_topic_shows_its_limits(web: httpx.Client, scene: Cli) -> None:
    """As `rsmq topic show` says them."""
    scene.ok("topic", "set", "small", "--partitions", "1", "--max-length", "5", "--retention-age", "2h")
    page = web.get("topic/small").text
    for said in ("5 messages in a partition, then reject", "settled messages for 2 h"):
        assert said in page
        assert said in scene.ok("topic", "show", "small")


def test_topic_shows_what_groups_have_not_handled_of_before_a_resize(
    web: httpx.Client, scene: Cli, feed: Feed, server: Server
) -> None:
    """By partition, as `rsmq topic resize --status` does."""
    scene.ok("topic", "set", "grows", "--partitions", "1")
    feed("grows", ["1"])
    with server.client() as redis:
        redis.execute_command("XGROUP", "CREATE", f"{scene.environment['RSMQ_PREFIX']}:{{grows.0}}", "late", "0")
    scene.ok("topic", "resize", "grows", "2")
    said = "Group late has 1 message in partition 0 of before the resize."
    wait_until(lambda: said in web.get("topic/grows").text, "the page says what is left")


def test_processes_show_host_memory_uptime_and_what_they_serve(web: httpx.Client, worker: Running) -> None:
    """Each leads to a page of its own, and its start is a mark on the charts."""
    wait_until(lambda: "iB" in web.get("processes").text, "its memory is shown")
    rows = re.findall(r'<tr id="processes:[^"]*">.*?</tr>', web.get("processes").text)
    cells = [{name: unescape(re.sub("<.*?>", "", text)) for name, text in CELL.findall(row)} for row in rows]
    (found,) = [each for each in cells if each["pid"] == str(worker.process.pid)]
    assert (found["pid"], found["version"]) == (str(worker.process.pid), APP_VERSION)
    assert found["process"].startswith(found["host"][:40])
    assert "orders/billing" in found["serves"]
    page = web.get(f"process/{found['process']}")
    assert page.status_code == 200
    for said in (APP_VERSION, installed("rsmq"), "up for"):
        assert said in page.text
    assert web.get("processes?q=nothing-like-it").text.count("<tr id=") == 0


def test_messages_are_found_by_key_id_and_field(web: httpx.Client, scene: Cli) -> None:
    """Newest first; markup in a payload, key or header stays text; paging goes on to the oldest."""
    scene.ok("topic", "set", "pages", "--partitions", "3")
    lines = "".join(f'{{"n": {n}, "shop": {n % 7}}}\n' for n in range(60))
    scene.ok("publish", "pages", "-", stdin=lines)
    mine = scene.ok("publish", "pages", "--text", HACK, "--key", HACK, "--header", f"h={HACK}").strip()
    first = web.get("messages/pages").text
    assert (first.count('data-label="stored"'), HACK in first, HACK in unescape(first)) == (25, False, True)
    older = re.search(r'<a href="([^"]*before=[^"]*)">older', first)
    assert older is not None
    second = web.get(unescape(older[1])).text
    assert second.count('data-label="stored"') == 25
    for fields in ({"key": HACK}, {"id": mine}):
        assert HACK in unescape(web.get("messages/pages", params=fields).text)
    by_field = web.get("messages/pages", params={"where": "shop=3"}).text
    assert by_field.count('data-label="stored"') == len([n for n in range(60) if n % 7 == 3])
    whole = web.get("messages/pages", params={"id": mine}).text
    assert f"<pre data-payload>{tag('x', HACK)[3:-4]}</pre>" in whole
    assert "no message matches" in web.get("messages/pages", params={"until": "2020-01-01T00:00"}).text
    assert len(scene.ok("tail", "pages", "-n", "100").splitlines()) == 61, "nothing is consumed"


SHOP = """
from sqlalchemy import create_engine

from rsmq import Broker
from rsmq.sql import Outbox, create_tables

broker = Broker()
broker.include(Outbox(create_engine("sqlite:///shop.db")))

@broker.handler("ships", group="harbour")
async def land(order: dict) -> None: ...
"""


def test_overview_shows_what_waits_in_an_outbox(
    web: httpx.Client, scene: Cli, server: Server, start: Callable[..., Running]
) -> None:
    """As its relay has counted it: a row for a full topic waits, another one was refused."""
    assert "Outboxes" not in web.get("").text
    (scene.directory / "shop.py").write_text(SHOP)
    scene.ok("topic", "set", "full", "--partitions", "1", "--max-length", "1")
    with server.client() as redis:
        stream = f"{scene.environment['RSMQ_PREFIX']}:{{full.0}}"
        redis.xadd(stream, {"data": "{}"})
        redis.xgroup_create(stream, "harbour", "0")
    engine = create_engine(f"sqlite:///{scene.directory / 'shop.db'}")
    outbox = Outbox(engine, prefix=scene.environment["RSMQ_PREFIX"])
    with engine.begin() as connection:
        create_tables(connection)
        outbox.publish(connection, "full", {"waits": 1})
        connection.execute(OUTBOX.insert(), {**outbox_row(outbox, "full", 1), "error": "no such topic"})
    engine.dispose()
    start("worker", "shop:broker")
    row = r"<tr[^>]*><td[^>]*>[^<]*shop\.db</td><td[^>]*>1</td><td[^>]*>[^<–]+</td><td[^>]*>1</td><td[^>]*>[^<]+-\d+-"
    wait_until(lambda: re.search(row, web.get("").text), "one row waits, one is refused")


def test_delayed_messages_are_run_now_and_moved(web: httpx.Client, scene: Cli) -> None:
    """What is ticked changes, with its number in the question; the rest waits on."""
    ids = [f"moved-{n}" for n in range(3)]
    for each in ids:
        scene.ok("publish", "orders", "{}", "--delay", "2h", "--id", each)
    refs = re.findall(r'name="id" value="([^"]+)"', web.get("delayed/orders").text)
    assert len(refs) == 3
    question = ask(web, "move-delayed", topic="orders", id=refs[:1], when="now")
    assert "Make 1 delayed message of orders due now?" in question
    assert len(re.findall(r'name="id" value="', web.get("delayed/orders").text)) == 3, "it was only asked"
    assert "1 delayed message due now" in do(web, "move-delayed", topic="orders", id=refs[:1], when="now")
    wait_until(lambda: "2 delayed messages" in web.get("delayed/orders").text, "the first has left")
    moved = do(web, "move-delayed", topic="orders", id=refs, when="at", at="2099-01-01T00:00")
    assert "2 delayed messages of 3: the others are gone due at 2099-01-01" in moved
    assert web.get("delayed/orders").text.count("2099-01-01 00:00:00Z") == 2
    shown = [scene.ok("message", "show", each, "--topic", "orders") for each in ids]
    assert sum("2099-01-01" in each for each in shown) == 2, "an id of the publisher still leads to it"
    wrong = web.post("do/move-delayed", data={"topic": "orders", "id": refs, "when": "at", "at": ""})
    assert (wrong.status_code, "give the time" in wrong.text) == (400, True)
    nothing = web.post("do/move-delayed", data={"topic": "orders", "when": "now"})
    assert (nothing.status_code, "nothing is chosen" in nothing.text) == (400, True)


def test_schedule_is_run_now(web: httpx.Client, scene: Cli) -> None:
    """From the page of its topic; the audit has its state; an unknown one answers 404."""
    subject = {"topic": "ticks", "schedule": "clock"}
    wait_until(lambda: ">run now</button>" in web.get("topic/ticks").text, "the worker has served it")
    assert "Publish schedule clock of ticks once now, beside its ticks?" in ask(web, "run-schedule", **subject)
    assert "clock is asked for: its leader publishes it" in do(web, "run-schedule", **subject)
    wait_until(lambda: web.get("messages/ticks").text.count('data-label="stored"') == 1, "it is published")
    assert '"schedule": "clock"' in unescape(web.get("audit").text)
    assert web.post("do/run-schedule", data={"topic": "ticks", "schedule": "watch"}).status_code == 404


def test_schedule_gets_another_rule_and_that_of_its_code_again(web: httpx.Client, scene: Cli) -> None:
    """The page shows both rules; a rule that cannot be is refused before anything is asked."""
    page, subject = "schedule/ticks/clock", {"topic": "ticks", "schedule": "clock", "confirmed": "yes"}
    assert "back to the code" not in web.get(page).text
    form = subject | {"rule": "0 6 * * *", "timezone": "Asia/Seoul", "back": f"/{page}"}
    assert "Give schedule clock of ticks the rule" in web.post("do/set-schedule", data=form | {"confirmed": ""}).text
    assert web.post("do/set-schedule", data=form).status_code == 303
    shown = unescape(web.get(page).text)
    assert "0 6 * * * Asia/Seoul (code: every 365 days)" in shown
    assert "back to the code's rule" in shown
    assert web.post("do/reset-schedule", data=subject).status_code == 303
    assert "(code:" not in web.get(page).text
    for rule, zone in (("sometimes", "UTC"), ("5m", "Asia/Nowhere"), ("", "UTC")):
        assert web.post("do/set-schedule", data=form | {"rule": rule, "timezone": zone}).status_code == 400
    refused = web.post("do/remove-schedule", data=subject)
    assert (refused.status_code, "is in the code of a worker" in refused.text) == (400, True)


def test_schedule_is_added_changed_and_removed(web: httpx.Client, scene: Cli) -> None:
    """One that no code has, with a payload of JSON; what removed it leads to the page of all schedules."""
    assert 'action="/do/add-schedule"' in web.get("topic/ticks").text
    form = {"topic": "ticks", "schedule": "customer-7", "rule": "12h", "payload": '{"customer": 7}', "confirmed": "yes"}
    for wrong in ({"payload": "{"}, {"rule": "never"}, {"schedule": "a b"}, {"schedule": "clock"}):
        assert web.post("do/add-schedule", data=form | wrong).status_code == 400
    for rule, shown in (("12h", "every 12 h"), ("6h", "every 6 h")):
        assert web.post("do/add-schedule", data=form | {"rule": rule}).status_code == 303
        assert shown in web.get("schedule/ticks/customer-7").text
    (state,) = [each for each in scene.json("schedule", "list", "ticks") if each["name"] == "customer-7"]
    assert state["is_added"]
    found = web.post("do/remove-schedule", data={key: form[key] for key in ("topic", "schedule", "confirmed")})
    assert (found.status_code, found.headers["location"].partition("?")[0]) == (303, "/schedules")
    assert "customer-7" not in web.get("schedules").text


def test_all_schedules_have_a_page_and_each_its_runs(web: httpx.Client, scene: Cli) -> None:
    """It is paused and resumed there; the page of one has its last runs."""
    subject = {"topic": "ticks", "schedule": "clock"}
    wait_until(lambda: ">run now</button>" in web.get("schedules").text, "the worker has served it")
    assert "clock is paused" in do(web, "pause-schedule", **subject)
    assert "<button>resume</button>" in web.get("schedules").text.replace(' class=""', "")
    assert "clock goes on with its next tick" in do(web, "resume-schedule", **subject)
    do(web, "run-schedule", **subject)
    wait_until(lambda: "asked for, clock@" in web.get("schedule/ticks/clock").text, "its run is shown")
    assert web.get("schedule/ticks/watch").status_code == 404
    assert "there are no schedules" in web.get("schedules?q=nothing").text


def test_delayed_message_is_rescheduled_and_cancelled_on_its_page(web: httpx.Client, scene: Cli) -> None:
    """The page says the same as `rsmq trace`; the audit has its state before and after."""
    mine = scene.ok("publish", "orders", '{"n": 7}', "--delay", "2h", "--key", "k/7").strip()
    page = unescape(web.get("messages/orders", params={"id": mine}).text)
    assert scene.ok("trace", mine, "--topic", "orders").partition(": ")[2].partition(", key")[0].strip() in page
    assert '<pre data-payload>{\n  "n": 7\n}</pre>' in page
    subject = {"topic": "orders", "message": mine, "key": "k/7"}
    assert f"Make message {mine} of orders due at 2099-01-01 00:00:00 UTC? It is delayed until" in ask(
        web, "reschedule", **subject, when="at", at="2099-01-01T00:00"
    )
    moved = do(web, "reschedule", **subject, when="at", at="2099-01-01T00:00", back=f"/message/orders/{mine}")
    assert "delayed until 2099-01-01 00:00:00+00:00" in moved
    done = do(web, "cancel", **subject, back=f"/message/orders/{mine}")
    assert (f"{mine} is cancelled" in done, "cancelled while it was delayed" in done) == (True, True)
    assert ">reschedule<" not in done
    late = web.post("do/reschedule", data={**subject, "when": "now", "confirmed": "yes"})
    assert (late.status_code, "neither delayed nor waits for a retry" in late.text) == (400, True)
    assert web.post("do/cancel", data={**subject, "message": "nothing"}).status_code == 404
    audit = unescape(web.get("audit").text)
    assert '"state": "delayed until 2099-01-01 00:00:00+00:00, for orders.' in audit
    assert '"state": "cancelled while it was delayed, for orders.' in audit


def test_ticked_delayed_messages_are_cancelled(web: httpx.Client, scene: Cli) -> None:
    """Those that are ticked, and no other: also of one millisecond."""
    scene.ok("topic", "set", "letters", "--partitions", "2")
    lines = "".join(f'{{"n": {n}}}\n' for n in range(3))
    scene.ok("publish", "letters", "-", "--at", "2099-01-01T00:00:00Z", stdin=lines)
    page = web.get("delayed/letters").text
    refs = re.findall(r'name="id" value="([^"]+)"', page)
    messages = re.findall(r'href="/(message/letters/[^"]+)"', page)
    assert "Cancel 2 delayed messages of letters for good" in ask(web, "cancel-delayed", topic="letters", id=refs[:2])
    assert "cancelled 2 delayed messages" in do(web, "cancel-delayed", topic="letters", id=refs[:2])
    again = do(web, "cancel-delayed", topic="letters", id=[*refs[:2], "9-9-x"])
    assert "cancelled 0 delayed messages of 3: the others are gone" in again
    assert "1 delayed message<" in web.get("delayed/letters").text
    assert ["cancelled while" in web.get(each).text for each in messages] == [True, True, False]


def test_parked_message_is_cancelled_on_its_page(web: httpx.Client, scene: Cli) -> None:
    """The page has a row for each group, with the text of `rsmq trace`; afterwards the group is done with it."""
    (scene.directory / "mended").unlink(missing_ok=True)
    mine = scene.ok("publish", "orders", '{"later": true}').strip()
    state = lambda: scene.json("trace", mine, "--topic", "orders")["groups"][0]["state"]  # noqa: E731
    wait_until(lambda: state() == "waiting_for_retry", "it is parked")
    address = re.search(r'href="(/message/orders/[^"]+)">', web.get("parked/orders/billing").text)
    assert address is not None
    page = unescape(web.get(unescape(address[1])).text)
    assert "after attempt 0" in page or "after attempt 1" in page
    assert "waits for its retry at" in page
    assert "Failed attempts of billing" in page
    assert "Retry: not yet" in page.partition("Failed attempts of billing")[2]
    (row,) = scene.ok("trace", mine, "--topic", "orders").partition("failed at")[2].splitlines()[2:]
    assert (row.split()[:2], row.split()[-3:]) == (["billing", "1"], ["Retry:", "not", "yet"])
    done = do(web, "cancel", topic="orders", message=mine)
    assert f"{mine} is cancelled (billing: cancelled)" in done
    assert state() == "cancelled"
    assert 'action="/do/cancel"' not in web.get(f"message/orders/{mine}").text


def test_parked_messages_are_moved_run_now_and_cancelled(web: httpx.Client, scene: Cli) -> None:
    """Also those that keep their key, whose timers their member has; by the ticks, and on the page of a message."""
    (scene.directory / "mended").unlink(missing_ok=True)
    ids = [
        scene.ok("publish", "orders", '{"later": true}', *key).strip() for key in ((), ("--key", "a"), ("--key", "b"))
    ]
    parked = lambda: scene.json("group", "show", "orders", "billing")["waiting_for_retry"]  # noqa: E731
    wait_until(lambda: parked() == 3, "they are parked")
    assert scene.json("group", "show", "orders", "billing")["pending"] == 2, "a key is kept"
    assert [each in web.get("group/orders/billing").text for each in ids] == [False] * 3, "what waits does not run"
    subject, refs = {"topic": "orders", "group": "billing"}, lambda: shown_refs(web)
    late = {"when": "at", "at": "2099-01-01T00:00"}
    assert "3 parked messages due at 2099-01-01 00:00:00 UTC" in do(web, "move-parked", **subject, id=refs(), **late)
    for mine in ids:
        assert "waits for its retry at 2099-01-01" in unescape(web.get(f"message/orders/{mine}").text)
    assert "Cancel 3 parked messages of billing of orders for good, for this group only?" in ask(
        web, "cancel-parked", **subject, id=refs()
    )
    page = web.get("parked/orders/billing").text
    (ref,) = [ref for ref, mine in zip(refs(), re.findall(r'href="/(message/orders/[^"]+)"', page), strict=True)
              if ids[1] in web.get(mine).text]  # fmt: skip
    assert "cancelled 1 parked message" in do(web, "cancel-parked", **subject, id=[ref])
    (scene.directory / "mended").touch()
    message = {"topic": "orders", "message": ids[2], "key": "b"}
    assert "It waits for its retry at 2099-01-01" in ask(web, "reschedule", **message, when="now")
    assert f"{ids[2]} is due now" in do(web, "reschedule", **message, when="now")
    assert "1 parked message due now" in do(web, "move-parked", **subject, id=refs()[:1], when="now")
    wait_until(lambda: parked() == 0, "they have run")
    states = [scene.json("trace", mine, "--topic", "orders")["groups"][0]["state"] for mine in ids]
    assert states == ["settled", "cancelled", "settled"]


def shown_refs(web: httpx.Client) -> list[str]:
    """What the page of parked messages would send back for each of them."""
    return re.findall(r'name="id" value="([^"]+)"', web.get("parked/orders/billing").text)


def test_dead_letters_are_grouped_and_replayed(web: httpx.Client, scene: Cli, worker: Running) -> None:
    """By error with one traceback; one, the ticked ones, all shown, all that match; always with the number."""
    (scene.directory / "mended").unlink(missing_ok=True)
    scene.ok("dlq", "purge", "orders", "billing", "--yes")
    for n in range(5):
        scene.ok("publish", "orders", json.dumps({"bad": f"'{HACK}' {n}", "shop": n}), "--key", f"k-{n}")
    scene.ok("publish", "orders", "--text", "no json")
    wait_until(lambda: len(scene.json("dlq", "list", "orders", "billing")) == 6, "they are dead")
    subject = {"topic": "orders", "group": "billing"}
    page = web.get("dead-letters/orders/billing").text
    assert "<summary>5 dead letters · rejected · cannot bill</summary>" in page
    assert "<summary>1 dead letter · malformed ·" in page
    assert "in bill" in page
    assert "replay all 6 shown" in page
    assert HACK not in page
    some = web.get("dead-letters/orders/billing", params={"where": "shop=2"}).text
    assert "<p>1 dead letter</p>" in some
    ids = sorted(each["id"] for each in scene.json("dlq", "list", "orders", "billing") if each["key"])
    whole = web.get(f"dead-letter/orders/billing/{ids[0]}").text
    assert (HACK in unescape(whole), HACK in whole, "data-traceback" in whole) == (True, False, True)
    (scene.directory / "mended").touch()
    assert "Replay 2 dead letters of billing of orders, to this group only?" in ask(
        web, "replay", **subject, id=ids[:2]
    )
    assert "replayed 2 dead letters" in do(web, "replay", **subject, id=ids[:2])
    assert "replayed 1 dead letter of 2: the others are gone" in do(web, "replay", **subject, id=ids[1:3])
    worker.expect("billed at last", 3)
    question = ask(web, "replay-matching", **subject, reason="rejected")
    assert "Replay all that match the fields: 2 dead letters" in question
    paced = do(web, "replay-matching", **subject, reason="rejected", rate="50")
    assert "goes on in the background" in paced
    worker.expect("billed at last", 5)
    (left,) = scene.json("dlq", "list", "orders", "billing")
    assert left["reason"] == "malformed"
    assert "Delete all 1 dead letter of billing of orders for good" in ask(web, "purge", **subject)
    assert "deleted 1 dead letter" in do(web, "purge", **subject)


def test_hold_is_shown_and_ended(web: httpx.Client, scene: Cli) -> None:
    """By command and on the page of the group; the audit says what was held before."""
    scene.ok("hold", "begin", "orders", "1h", "--name", "<twilio>")
    assert [each["held"]["name"] for each in scene.json("hold", "list", "orders")] == ["<twilio>"]
    assert "<twilio> is held by a command until" in scene.ok("group", "show", "orders", "billing")
    wait_until(lambda: "&lt;twilio&gt;" in web.get("group/orders/billing").text, "the page names it, escaped")
    assert "is held no longer" in do(web, "end-hold", topic="orders", group="billing", name="<twilio>")
    assert "'<twilio>'" in unescape(web.get("audit").text)
    assert scene.json("hold", "list") == []
    assert "was not held" in scene.ok("hold", "end", "orders", "--name", "<twilio>")
    scene.ok("hold", "begin", "orders", "1s", "--group", "billing")
    assert "everything of orders is held no longer" in scene.ok("hold", "end", "orders")


def test_group_is_paused_resumed_and_reset(web: httpx.Client, scene: Cli) -> None:
    """The question says what is dropped; the audit has the state before and after."""
    subject = {"topic": "orders", "group": "billing"}
    assert "orders/billing is paused" in do(web, "pause", **subject)
    assert scene.json("group", "show", "orders", "billing")["is_paused"]
    wait_until(lambda: "resume" in web.get("group/orders/billing").text, "the page has the other button")
    assert "orders/billing is running" in do(web, "resume", **subject)
    scene.ok("topic", "set", "others", "--partitions", "1")
    scene.ok("publish", "others", "1")
    assert web.post("do/reset", data={"topic": "others", "group": "x", "to": "latest"}).status_code == 404
    assert "drops" in ask(web, "reset", **subject, to="latest")
    assert web.post("do/reset", data={**subject, "to": "nonsense", "confirmed": "yes"}).status_code == 400
    audit = unescape(web.get("audit").text)
    assert 'data-label="what">pause</td>' in audit
    assert '"paused": false' in audit
    assert '"paused": true' in audit
    assert "failed: ConfigError" in audit


def test_inbox_is_shown_and_purged(web: httpx.Client, scene: Cli) -> None:
    """A device is found by its name; its letters are text; the question has their number."""
    scene.ok("device", "send", "phone-1", "hello")
    scene.ok("device", "send", HACK, HACK)
    page = unescape(web.get("devices").text)
    assert "phone-1" in page
    assert "1 device</p>" in web.get("devices", params={"device": "phone-1"}).text
    shown = web.get("devices", params={"device": HACK}).text
    address = re.search(r'href="(/device/[^"]+)"', shown)
    assert address is not None
    letters = web.get(unescape(address[1])).text
    assert (HACK in unescape(letters), HACK in letters) == (True, False)
    assert "Delete all 1 letter that wait for device 'phone-1'" in ask(web, "purge-device", device="phone-1")
    assert "deleted 1 letter" in do(web, "purge-device", device="phone-1")


def test_live_page_sends_only_what_has_changed(web: httpx.Client, scene: Cli) -> None:
    """First all parts; then, after a publish, the row of the topic, and no row that is as before."""
    scene.ok("topic", "set", "still", "--partitions", "1")
    with web.stream("GET", "?live=1") as events:
        lines = events.iter_lines()

        def following() -> dict[str, str]:
            return json.loads(next(line for line in lines if line.startswith("data: ")).removeprefix("data: "))

        first = following()
        assert {"topics", "groups", "total-in", "chart-0", "trouble"} <= first.keys()
        for _ in range(30):  # a new topic has no rate at first, and rows that move are sent with their table
            scene.ok("publish", "orders", '{"n": 1}')
            changed = following()
            if "topics:orders" in changed and "topics:still" not in changed:
                break
        assert "topics:orders" in changed
        assert {"topics", "topics:still"}.isdisjoint(changed)


def test_back_address_stays_on_this_site(web: httpx.Client) -> None:
    """A form may name any address to go back to."""
    for back in ("//evil.example/", "https://evil.example/", "/\\evil.example"):
        answer = web.post("do/pause", data={"topic": "orders", "group": "billing", "back": back, "confirmed": "yes"})
        assert answer.headers["location"].startswith("/?note=")
        do(web, "resume", topic="orders", group="billing")


# -- without a server -------------------------------------------------------------------------------------------------

AT = datetime(2026, 1, 1, tzinfo=UTC)


def test_line_is_broken_at_a_gap_and_at_an_unknown_value() -> None:
    """A gap is a gap: nothing is drawn over it."""
    line = [(AT + timedelta(seconds=n), value) for n, value in ((0, 1.0), (1, 2.0), (2, None), (3, 3.0), (60, 4.0))]
    assert [len(part) for part in unbroken(line, timedelta(seconds=3))] == [2, 1, 1]
    drawn = chart(Live(), "c", HACK, {HACK: line}, timedelta(seconds=3))
    assert (drawn.count("<polyline"), drawn.count("<circle"), HACK in drawn) == (3, 2, False)
    assert "no data yet" in chart(Live(), "c", "t", {"in": []}, timedelta(seconds=3))


@pytest.mark.parametrize(
    ("most", "marks"), [(0, ["0", "1"]), (2, ["0", "1", "2"]), (4, ["0", "5"]), (9, ["0", "5", "10"])]
)
def test_axis_has_whole_numbers(most: int, marks: list[str]) -> None:
    """A part of a message means nothing."""
    drawn = chart(Live(), "c", "t", {"lag": [(AT, float(most))]}, timedelta(seconds=3))
    assert re.findall(r'text-anchor="end">([\d.]+)</text>', drawn) == marks


def test_changes_are_rows_or_the_whole_table() -> None:
    """A row that changes is sent alone; when rows come, go or move, their table is sent once."""

    def table(*cells: str) -> Live:
        live = Live()
        live.table("t", ("a",), [Row(cell[0], (cell,)) for cell in cells], "none")
        return live

    assert table("a1", "b1").changes(table("a1", "b1")) == {}
    assert list(table("a1", "b2").changes(table("a1", "b1"))) == ["t:b"]
    assert list(table("b1", "a1").changes(table("a1", "b1"))) == ["t"]
    assert list(table("a1").changes(table("a1", "b1"))) == ["t"]
    assert list(table().changes(table("a1"))) == ["t"]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ("KeyError: 's-7'", "KeyError"), ("TimeoutError: no answer after 5 s", "TimeoutError: no answer after"),
        ("ValueError: no", "ValueError: no"), ("7 wrong", "7 wrong"), ("", ""), ("a\nb", "a"),
    ],
)  # fmt: skip
def test_errors_of_one_cause_are_one_kind(error: str, kind: str) -> None:
    """Without the values in them."""
    assert kind_of(error) == kind


def test_overview_of_many_shows_the_first_and_a_way_to_all() -> None:
    """What is left out is counted; a filter and a range stay in the link."""
    given = {"q": "ord", "range": "1h"}
    visit: Any = SimpleNamespace(
        given=lambda name: given.get(name, ""), live=Live(), url=lambda **query: f"/?{urlencode(query)}"
    )
    assert (list(first(visit, range(200))), first(visit, range(3))) == (list(range(50)), range(3))
    assert unescape(more(visit, "topics", 200)) == (
        '<div id="more-topics">150 more: <a href="/?q=ord&range=1h&rows=all">show all 200 topics</a>, or filter by '
        "name</div>"
    )
    assert more(visit, "topics", 50) == '<div id="more-topics" class="none"></div>'
    given["rows"] = "all"
    assert (len(first(visit, range(200))), "none" in more(visit, "topics", 200)) == (200, True)
