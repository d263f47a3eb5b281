"""The first line of a log names the server: messages that do not come were often published to another one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rsmq.errors import ConfigError
from rsmq.gateway import GatewayOptions
from tests.cli.conftest import Cli, Running

Start = Callable[..., Running]


@pytest.mark.parametrize(
    "command",
    [
        ("worker", "app:broker", "--metrics", "127.0.0.1:0"),
        ("gateway", "app:broker", "--listen", "mqtt://127.0.0.1:0", "--anonymous"),
        ("exporter", "--listen", "127.0.0.1:0"),
        ("dashboard", "--port", "0"),
    ],
    ids=lambda command: str(command[0]),
)
def test_first_line_names_the_server(cli: Cli, start: Start, app: Path, command: tuple[str, ...]) -> None:
    """Server, database and prefix; not the user and the password."""
    shown = cli.environment["RSMQ_URL"].partition("?")[0]
    cli.environment["RSMQ_URL"] = f'"{cli.environment["RSMQ_URL"]}"\n'
    running = start(*command)
    running.expect("prefix")
    assert f"{shown}, database 0, prefix {cli.environment['RSMQ_PREFIX']}" in running.lines[0]


def test_dashboard_names_the_server_in_json(cli: Cli, start: Start) -> None:
    """For what reads its first line."""
    (line,) = start("dashboard", "--port", "0", "--json").expect("url")
    assert json.loads(line)["server"].endswith(f"prefix {cli.environment['RSMQ_PREFIX']}")


def test_server_is_named_before_it_answers(cli: Cli, start: Start, app: Path) -> None:
    """The address that does not answer is the one to look at; it comes without its password."""
    cli.environment["RSMQ_URL"] = "redis://app:geheim@127.0.0.1:1/3"
    worker = start("worker", "app:broker")
    worker.expect("waiting for the server")
    assert "server: redis://127.0.0.1:1, database 3, prefix" in worker.lines[0]
    assert not worker.matching("geheim")


@pytest.mark.parametrize(
    "options",
    [{"password_file": Path()}, {"acl_file": Path()}, {"jwt_audience": ""}, {"jwt_issuer": ""}, {"proxies": ("",)},
     {"origins": ("",)}],
    ids=lambda options: next(iter(options)),
)  # fmt: skip
def test_empty_option_of_a_gateway_is_refused(options: dict[str, object]) -> None:
    """What a variable that is not set leaves is no value."""
    with pytest.raises(ConfigError, match="is empty: give it a value, or leave it out"):
        GatewayOptions(**options)  # type: ignore[arg-type]
