"""`rsmq new`: what it writes is a service that works as it is."""

from __future__ import annotations

import json
import secrets
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.cli.conftest import ROOT, Cli, Running
from tests.servers import wait_until


def test_its_tests_pass_and_its_types_hold(cli: Cli) -> None:
    assert "pip install -e '.[test]' && pytest" in cli.ok("new", "my-service")
    made = cli.directory / "my-service"
    for command in (("pytest", "-q", "-p", "no:asyncio", "-p", "no:cacheprovider"), ("mypy", "--strict", ".")):
        done = subprocess.run(
            [sys.executable, "-m", *command], cwd=made, env=cli.environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    compose = yaml.safe_load((made / "compose.yaml").read_text())
    assert set(compose["services"]) == {"queue", "web", "worker", "dashboard"}
    assert yaml.safe_load((made / ".github" / "workflows" / "test.yml").read_text())["jobs"]
    assert "$" not in (made / "README.md").read_text()
    left_out = (made / ".dockerignore").read_text().splitlines()
    secrets_of_compose = {each["file"].removeprefix("./") for each in compose["secrets"].values()}
    assert secrets_of_compose <= set(left_out), "COPY . . would put a password into the image"


def test_it_takes_a_notification_and_delivers_it(cli: Cli, start: Callable[..., Running]) -> None:
    """Its web application and its worker, as two processes on one server."""
    cli.ok("new", "myservice")
    cli.directory = cli.directory / "myservice"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    worker = start("worker", "app:broker")
    web = subprocess.Popen(
        [sys.executable, "-m", "uvicorn", "app:app", "--port", str(port)], cwd=cli.directory, env=cli.environment
    )
    try:
        address = f"http://127.0.0.1:{port}"
        wait_until(lambda: answers(f"{address}/healthz"), "the web application answers")
        body = json.dumps({"user": "+4930", "text": "hello"}).encode()
        request = urllib.request.Request(
            f"{address}/notifications", body, {"Content-Type": "application/json"}, method="POST"
        )
        with urllib.request.urlopen(request, timeout=10) as response:
            assert response.status == 202
        worker.expect("SMS to +4930: hello")
    finally:
        web.terminate()
        web.wait(20)


@pytest.mark.parametrize("file", ["rsmq/cli/template/compose.yaml.txt", "deploy/compose/service.yaml"])
def test_dashboard_of_the_compose_files_starts(cli: Cli, start: Callable[..., Running], file: str) -> None:
    """With the options that stand there, on every address, and a token as the file says to make one."""
    text = (ROOT / file).read_text()
    assert "openssl rand -hex 24 > " in text
    token = cli.directory / "token"
    token.write_text(secrets.token_hex(24))
    program, *words = yaml.safe_load(text)["services"]["dashboard"]["entrypoint"]
    assert program == "rsmq"
    start(*(str(token) if each == "/run/secrets/dashboard" else each for each in words), "--port", "0").expect(
        " shows "
    )


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2):
            return True
    except OSError:
        return False


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("My Service", "use small letters"), ("class", "use small letters"), ("there", "there exists"),
        ("rsmq", "a package that the service needs"), ("fastapi", "a package that the service needs"),
        ("s" * 300, "cannot be written: File name too long"),
    ],
)  # fmt: skip
def test_what_is_not_possible_is_said(cli: Cli, name: str, said: str) -> None:
    Path(cli.directory, "there").mkdir()
    done = cli("new", name)
    assert done.returncode == 2
    assert said in done.stderr
