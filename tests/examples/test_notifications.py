"""The notification service: with the worker inside it, with the worker beside it, and its measurement."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from rsmq.testing.server import free_port
from tests.examples.program import EXAMPLES, expected, run_python, sorted_lines
from tests.servers import wait_until

SERVICE = EXAMPLES / "notifications"
USERS = ("ada", "linus", "mary", "radia")
TEXTS = ("your order is on its way", "your order has arrived", "your order was refunded")


@contextmanager
def running(module: list[str], env: dict[str, str], output: Path) -> Iterator[None]:
    """A program that runs until SIGINT and then ends without a traceback."""
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
    assert "Traceback" not in problems.read_text(), problems.read_text()


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


def notify_all(client: httpx.Client) -> None:
    """Post every notification; each is accepted under an id of its own."""
    posts = [client.post("/notify", json={"user": user, "text": text}) for text in TEXTS for user in USERS]
    assert {post.status_code for post in posts} == {202}
    assert len({post.json()["id"] for post in posts}) == len(posts)


def check_sent(output: Path) -> None:
    """Wait until everything was sent; it went through the expected channels, in order for each user."""
    wait_until(lambda: output.read_text().count("\n") >= len(USERS) * len(TEXTS), "everything is sent")
    lines = output.read_text().splitlines()
    assert sorted(lines) == sorted_lines(expected("notifications"))
    for user in USERS:
        texts = [re.sub(r" \[.*", "", line) for line in lines if line.startswith(user)]
        assert texts == [f"{user}: {text}" for text in TEXTS]


def test_the_worker_in_the_service(env: dict[str, str], tmp_path: Path) -> None:
    """`uvicorn service:app` accepts notifications and sends them."""
    output = tmp_path / "app.txt"
    with serving("app", env, output) as client:
        notify_all(client)
        check_sent(output)


def test_the_worker_beside_the_service(env: dict[str, str], tmp_path: Path) -> None:
    """`uvicorn service:web` only accepts notifications, `rsmq worker` sends them."""
    web, worker = tmp_path / "web.txt", tmp_path / "worker.txt"
    command = ["-m", "rsmq", "worker", "service:broker"]
    with serving("web", env, web) as client:
        notify_all(client)
        with running(command, env, worker):
            check_sent(worker)
    assert web.read_text() == ""


def test_a_wrong_notification_is_refused(env: dict[str, str], tmp_path: Path) -> None:
    """What is no notification is refused in the request, and never queued."""
    with serving("web", env, tmp_path / "web.txt") as client:
        assert client.post("/notify", json={"user": "ada"}).status_code == 422


def test_measurement_compares_both_ways_and_leaves_nothing_unsent(env: dict[str, str], tmp_path: Path) -> None:
    """The measurement shows p50 and p99 of both ways with their ratio, and that nothing accepted was left unsent."""
    output = run_python(SERVICE / "measure.py", "60", cwd=tmp_path, env=env)
    shown = [re.sub(r"\d+\.\d", "#", " ".join(re.findall(r"[\w.;]+", line))) for line in output.splitlines()]
    assert "\n".join(line for line in shown if line) + "\n" == expected("measure")
