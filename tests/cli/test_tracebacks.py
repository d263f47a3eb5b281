"""Where a handler failed, as an operator sees it: in the worker's log and in `rsmq dlq show`."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from tests.cli.conftest import Cli, Running
from tests.servers import wait_until

MODULE = """
from rsmq import Broker, RetryPolicy

broker = Broker()

@broker.handler("orders", group="billing", retry=RetryPolicy(max_attempts=1))
async def bill(order: dict) -> None:
    price = order["price"]  # red: \x1b[31m
"""
Start = Callable[..., Running]


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_buried_message_has_its_traceback_in_log_and_command(cli: Cli, start: Start, options: tuple[str, ...]) -> None:
    """The log has it behind the warning, JSON in the field `exception`; the dead letter keeps it, without colours."""
    (cli.directory / "app.py").write_text(MODULE)
    worker = start("worker", "app:broker", *options)
    worker.expect(" serves ")
    cli.ok("publish", "orders", '{"n": 1}')
    worker.expect("moved to dead letters")
    worker.expect("KeyError: 'price'", 1 if options else 2)
    if options:
        (record,) = [json.loads(line) for line in worker.matching("moved to dead letters")]
        assert record["exception"].startswith("Traceback (most recent call last):\n")
        assert 'in bill\n    price = order["price"]' in record["exception"]
        assert record["exception"].endswith("KeyError: 'price'")
    wait_until(lambda: cli.json("dlq", "list", "orders"), "there is a dead letter")
    (letter,) = cli.json("dlq", "list", "orders", "billing")
    shown = cli.ok("dlq", "show", "orders", "billing", letter["id"])
    assert "traceback:\n  Traceback (most recent call last):\n" in shown
    assert '    price = order["price"]  # red: \\x1b[31m\n' in shown
    assert "  KeyError: 'price'\n" in shown
    assert "\x1b" not in shown
    traceback = cli.json("dlq", "show", "orders", "billing", letter["id"])["traceback"]
    assert traceback.endswith("KeyError: 'price'\n")
    assert "runner.py" not in traceback
