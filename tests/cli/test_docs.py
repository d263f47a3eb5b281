"""`rsmq docs`: the document on stdout, and the exit code of a comparison."""

from __future__ import annotations

import json

from tests.cli.conftest import Cli

BEFORE = """
from pydantic import BaseModel
from rsmq import SyncBroker

class Order(BaseModel):
    customer: str

broker = SyncBroker()

@broker.handler("orders", group="billing")
def bill(order: Order) -> None: ...
"""


def test_a_breaking_change_is_an_exit_code(cli: Cli) -> None:
    """0 for the same code, 1 with a line for each change that breaks, 2 for what is no document."""
    app, old = cli.directory / "shop.py", cli.directory / "old.json"
    app.write_text(BEFORE)
    old.write_text(cli.ok("docs", "shop:broker", "--version", "3.0"))
    document = json.loads(old.read_text())
    assert (document["info"], document["asyncapi"]) == ({"title": "shop", "version": "3.0"}, "3.0.0")
    assert cli.ok("docs", "shop:broker", "--check", "old.json") == "nothing would break\n"
    app.write_text(BEFORE.replace("customer: str", "customer: str\n    email: str"))
    changed = cli("docs", "shop:broker", "--check", "old.json")
    assert (changed.returncode, changed.stdout.splitlines()) == (
        1, ["orders.billing: email may be missing, and is required", "1 change would break"],
    )  # fmt: skip
    as_json = cli("docs", "shop:broker", "--check", "old.json", "--json")
    assert (as_json.returncode, len(json.loads(as_json.stdout)["breaking"])) == (1, 1)
    for text in ("{", "[]", "{}"):
        old.write_text(text)
        wrong = cli("docs", "shop:broker", "--check", "old.json")
        assert (wrong.returncode, wrong.stdout) == (2, ""), wrong.stderr
