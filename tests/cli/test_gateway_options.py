"""`rsmq gateway` has an option for each field of GatewayOptions."""

from __future__ import annotations

import socket
from dataclasses import fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from rsmq.cli import make_app
from rsmq.cli.parameters import options_of
from rsmq.gateway import GatewayOptions
from tests.cli.conftest import Cli


def given_by(*words: str) -> dict[str, Any]:
    """What a command with these options gets."""
    app, found = typer.Typer(), dict[str, Any]()

    @app.command()
    @options_of(GatewayOptions)
    def command(**given: Any) -> None:
        found.update(given)

    assert CliRunner().invoke(app, words).exit_code == 0
    return found


def test_a_command_gets_only_the_options_that_are_given() -> None:
    """Under the names of the fields, and as values of their types; 0 is a value."""
    assert given_by() == {}
    assert given_by(
        "--anonymous", "--most-topic-bytes", "256", "--most-bytes", "0", "--keep-alive", "1m", "--sys-interval", "0s",
        "--proxy", "10.0.0.0/8", "--proxy", "::1", "--acl-file", "acl", "--certificate-user", "san",
    ) == {
        "anonymous": True, "most_topic_bytes": 256, "most_bytes": 0, "keep_alive": timedelta(minutes=1),
        "sys_interval": timedelta(0), "proxies": ["10.0.0.0/8", "::1"], "acl_file": Path("acl"),
        "certificate_user": "san",
    }  # fmt: skip


def test_the_help_page_has_every_option() -> None:
    """With its default, where that says something."""
    page = CliRunner().invoke(make_app("gateway"), ["gateway", "--help"]).output
    words = " ".join(page.split())
    for each in fields(GatewayOptions):
        assert f"--{(each.metadata['flag'] or each.name).replace('_', '-')} " in words
    assert "[default: 20 min]" in words


def test_a_gateway_refuses_options_and_wrong_values(cli: Cli, tmp_path: Path) -> None:
    """A Gateway of the code has its options there. A wrong value is refused by its name."""
    (tmp_path / "app.py").write_text(
        "from rsmq import Broker\nfrom rsmq.gateway import Gateway\n\nbroker = Broker()\ngateway = Gateway(broker)\n"
    )
    for words, why in (
        (("app:gateway", "--most-levels", "2"), "is a Gateway: give it its options in the code"),
        (("app:broker", "--most-levels", "0"), "most_levels is 0: use a number from 1 to"),
        (("app:broker", "--lease", "0s"), "lease is 0: use a longer time"),
        (("app:broker", "--route", "sensors/#"), "names no topic: write FILTER=TOPIC, such as 'sensors/#=sensors'"),
    ):
        done = cli("gateway", *words)
        assert done.returncode == 2
        assert why in done.stderr


@pytest.mark.parametrize("more", [(), ("--processes", "2"), ("--proxy", "10.0.0.0/8")])
def test_a_gateway_that_cannot_listen_says_so_in_one_line(cli: Cli, tmp_path: Path, more: tuple[str, ...]) -> None:
    """As where another broker has the port: starting again would not mend it."""
    (tmp_path / "app.py").write_text("from rsmq import Broker\n\nbroker = Broker()\n")
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        done = cli("gateway", "app:broker", "--anonymous", "--listen", f"mqtt://{address}", *more)
    assert done.returncode == 2
    said = f"rsmq: cannot listen at {address}: address already in use"
    assert said in done.stderr.lower().splitlines(), done.stderr
    assert "Traceback" not in done.stderr
