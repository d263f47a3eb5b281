"""The notification service: with the worker inside it and beside it, its measurement, and its run with kills."""

from __future__ import annotations

import importlib
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest

from rsmq.testing.server import free_port
from tests.examples.program import EXAMPLES, expected, run_python, sorted_lines
from tests.servers import wait_until

SERVICE = EXAMPLES / "notifications"
USERS = ("ada", "linus", "mary", "radia")
TEXTS = ("your order is on its way", "your order has arrived", "your order was refunded")


@contextmanager
def running(module: list[str], env: dict[str, str], output: Path) -> Iterator[None]:
    """A program that runs until SIGINT. It has no traceback but those of what its providers have refused to the end."""
    problems = output.with_suffix(".err")
    with output.open("w") as out, problems.open("w") as err:
        process = subprocess.Popen([sys.executable, *module], cwd=SERVICE, env=env, stdout=out, stderr=err)
    try:
        yield
        process.send_signal(signal.SIGINT)
        process.wait(30)
    finally:
        process.kill()
        process.wait()
    said = problems.read_text()
    assert said.count("Traceback") == said.count("\nchannels.ChannelUnavailable: "), said


@contextmanager
def serving(app: str, env: dict[str, str], output: Path) -> Iterator[httpx.Client]:
    """The service behind uvicorn, and a client for it."""
    port = free_port()
    command = ["-m", "uvicorn", f"service:{app}", "--port", str(port), "--log-level", "warning"]
    with running(command, env, output), httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
        wait_until(lambda: is_up(client), f"{app} answers")
        yield client


def is_up(client: httpx.Client) -> bool:
    """Whether the service takes connections."""
    try:
        return client.get("/openapi.json").is_success
    except httpx.TransportError:
        return False


def zone_at(hour: int) -> str:
    """A time zone in which it is this hour now."""
    ahead = (hour - datetime.now(UTC).hour + 11) % 24 - 11
    return f"Etc/GMT{-ahead:+d}"


def notify_all(client: httpx.Client) -> list[tuple[str, str]]:
    """Post every notification; each is accepted under an id of its own. Returns users and ids."""
    zone = zone_at(12)
    sent = [
        (user, client.post("/notify", json={"user": user, "text": text, "zone": zone}))
        for text in TEXTS
        for user in USERS
    ]
    assert {post.status_code for _, post in sent} == {202}
    assert len({post.json()["id"] for _, post in sent}) == len(sent)
    return [(user, post.json()["id"]) for user, post in sent]


def check_sent(output: Path, name: str) -> None:
    """Wait until everything was sent; it went through the expected channels, the pushes in order for each user."""
    wanted = sorted_lines(expected(name))
    wait_until(lambda: output.read_text().count("\n") >= len(wanted), "everything is sent")
    lines = [line.split(" ", 1)[1] for line in output.read_text().splitlines()]
    assert sorted(lines) == wanted
    for user in USERS:
        pushed = [line for line in lines if line.startswith(f"PUSH {user}")]
        assert pushed == [line for text in TEXTS if (line := f"PUSH {user}: {text}") in wanted]


def test_the_worker_in_the_service_and_receipts(env: dict[str, str], tmp_path: Path) -> None:
    """`uvicorn service:app` pushes. A receipt, also a repeated one, cancels the next step."""
    output = tmp_path / "app.txt"
    with serving("app", {**env, "READ_WITHIN": "600"}, output) as client:
        accepted = notify_all(client)
        check_sent(output, "notifications")
        receipts = [client.post("/read", json={"user": user, "id": number}) for user, number in accepted * 2]
        assert {receipt.status_code for receipt in receipts} == {202}
        wait_until(lambda: output.read_text().count(" READ ") >= len(accepted), "the receipts are processed")
    lines = [line.split(" ", 1) for line in output.read_text().splitlines()]
    sent_by_sms = {number for number, what in lines if what.startswith("SMS")}  # its PUSH was refused to the end
    assert sorted(line for line in lines if line[1].startswith("READ")) == sorted(
        [number, f"READ {user}: {'alimtalk' if number in sent_by_sms else 'sms'} cancelled"]
        for user, number in accepted
    )


def test_the_worker_beside_the_service_and_no_receipt(env: dict[str, str], tmp_path: Path) -> None:
    """`uvicorn service:web` only accepts; `rsmq worker` sends, and escalates to the end what is not read."""
    web, worker = tmp_path / "web.txt", tmp_path / "worker.txt"
    command = ["-m", "rsmq", "worker", "service:broker"]
    with serving("web", env, web) as client:
        notify_all(client)
        with running(command, {**env, "READ_WITHIN": "0.1"}, worker):
            check_sent(worker, "escalated")
    assert web.read_text() == ""


def test_night_bands_orders_and_erasing(env: dict[str, str], tmp_path: Path) -> None:
    """By night only what is urgent is sent. Comments are one notification, a campaign says when it is out. An order
    that is taken back is not reminded of. What is no notification is refused. A user who is forgotten has nothing
    stored."""
    output, night, day = tmp_path / "app.txt", zone_at(0), zone_at(12)
    with serving("app", {**env, "READ_WITHIN": "600", "REMIND_AFTER": "1", "DIGEST_WITHIN": "1"}, output) as client:
        assert client.post("/notify", json={"user": "grace"}).status_code == 422
        assert client.put("/orders/1", params={"user": "grace", "zone": day}).status_code == 201
        assert client.put("/orders/2", params={"user": "grace", "zone": day}).status_code == 201
        assert client.delete("/orders/1", params={"user": "grace"}).status_code == 204
        late = {"user": "ada", "text": "a thing you may like", "zone": night}
        code = {"user": "ada", "text": "your code is 4711", "zone": night, "band": "urgent"}
        assert [client.post("/notify", json=each).status_code for each in (late, code)] == [202, 202]
        offer = {"name": "sale", "text": "the sale begins", "tenant": "shop", "users": {"mary": night, "radia": day}}
        assert client.post("/offers", json=offer).json() == {"stored": 2}
        small = {"name": "thanks", "text": "thank you", "tenant": "shop", "users": {"alan": day}}
        assert client.post("/offers", json=small).json() == {"stored": 1}
        for text in ("nice", "very nice"):
            comment = {"user": "alan", "text": text, "zone": day}
            assert client.post("/comments", json=comment).status_code == 202
        wait_until(lambda: output.read_text().count("\n") >= 6, "what may be sent is sent")
        sent = {line.split(" ", 2)[2] for line in output.read_text().splitlines()}
        assert sent == {
            "grace: please pay order 2", "ada: your code is 4711", "radia: the sale begins", "alan: thank you",
            "thanks: 1 of 1 reached", "alan: very nice (2 new comments)",
        }  # fmt: skip
        forgotten = {user: client.delete(f"/users/{user}").json() for user in ("ada", "mary", "grace")}
        # the code and the SMS behind it, and what waits for the morning; the offer; the reminder and its SMS
        assert forgotten == {
            "ada": {"deleted": 3, "running": 0},
            "mary": {"deleted": 1, "running": 0},
            "grace": {"deleted": 2, "running": 0},
        }


def test_measurement_compares_both_ways_and_leaves_nothing_unsent(env: dict[str, str], tmp_path: Path) -> None:
    """The measurement shows p50 and p99 of both ways with their ratio, and that nothing accepted was left unsent."""
    output = run_python(SERVICE / "measure.py", "60", cwd=tmp_path, env=env)
    shown = [re.sub(r"\d+\.\d", "#", " ".join(re.findall(r"[\w.;]+", line))) for line in output.splitlines()]
    assert "\n".join(line for line in shown if line) + "\n" == expected("measure")


def test_run_with_a_killed_worker_escalates_what_is_not_read_only(env: dict[str, str], tmp_path: Path) -> None:
    """A short run: its verdict is good, and so is its exit code."""
    output = run_python(SERVICE / "run.py", "--notifications", "40", "--kills", "1", cwd=tmp_path, env=env)
    assert output.startswith("notifications 40, workers killed 1 times\n")
    assert output.count("✓") == 4
    assert output.endswith("nothing after its receipt was processed, and no limit exceeded.\n")


CHAIN = ["a PUSH", "b PUSH", "a READ", "b SMS", "b AlimTalk"]


@pytest.mark.parametrize(
    ("lines", "broken"),
    [
        (CHAIN, {}),
        ([*CHAIN[:2], "b PUSH", *CHAIN[2:]], {}),
        (CHAIN[:-1], {"lost": 1}),
        ([line for line in CHAIN if line != "a READ"], {"unread_receipts": 1}),
        ([*CHAIN, "a SMS"], {"after_receipt": 1}),
    ],
)
def test_the_verdict_detects_each_violation(
    monkeypatch: pytest.MonkeyPatch, lines: list[str], broken: dict[str, int]
) -> None:
    """Of `a`, which was read, and `b`, which was not; a repeat is counted and breaks nothing."""
    monkeypatch.syspath_prepend(str(SERVICE))
    run = importlib.import_module("run")
    verdict = run.judge({"a", "b"}, {"a"}, [run.Event(*line.split()) for line in lines])
    found = {name: getattr(verdict, name) for name in ("lost", "unread_receipts", "after_receipt")}
    assert found == {"lost": 0, "unread_receipts": 0, "after_receipt": 0} | broken
    assert verdict.is_good is not bool(broken)
    calls = [*(run.Call("SMS", "b", at / 10) for at in range(3)), run.Call("SMS", "b", 1.2)]
    assert run.judge({"a", "b"}, {"a"}, [], calls).busiest == {("SMS", "all"): 3, ("SMS", "a user"): 3}
    assert run.judge((), (), [], calls).over_limit == 1, "three to a user in a second, the limit is two"
    assert not run.judge((), (), [], calls).is_good
    assert verdict.repeated["PUSH"] == lines.count("b PUSH") - 1
