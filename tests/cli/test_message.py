"""`rsmq message` and `rsmq trace`: either id finds a message, both are printed, and wrong input is one clear line."""

from __future__ import annotations

import json

from tests.cli.conftest import Cli

NOWHERE = "01980000-0000-7000-8000-000000000000"


def test_either_id_is_printed_for_the_other(cli: Cli) -> None:
    """Of a stored message and of a delayed one, in what the commands print as JSON."""
    mine = cli.ok("publish", "orders", '{"n": 1}', "--key", "ada").strip()
    held = cli.json("topic", "why-not-trimmed", "orders")
    either = f"{held[0]['partition']}/{held[0]['oldest']}"
    assert [each["message_id"] for each in held] == [mine]
    done = cli("message", "cancel", either, "--topic", "orders", "--json")
    assert json.loads(done.stdout) == {"id": mine, "stream_id": either, "answer": "cancelled", "groups": {}}
    late = cli.ok("publish", "orders", "{}", "--delay", "1h").strip()
    moved = cli.json("message", "reschedule", late, "--topic", "orders", "--delay", "2h")
    assert (moved["id"], moved["stream_id"]) == (late, None)


WRONG = [
    (1, "is not found", "trace", "99/1700000000000-0"),
    (1, "unknown (it is not there", "message", "cancel", NOWHERE, "--topic", "orders"),
    (2, "has no group 'lost'", "message", "find", "orders", "--state", "running", "--group", "lost"),
]


def test_wrong_input_is_one_line(cli: Cli) -> None:
    """Exit code 1 for what is not there, 2 for what cannot be meant; no traceback."""
    cli.ok("publish", "orders", "{}")
    for code, text, *words in WRONG:
        result = cli(*map(str, words))
        assert (result.returncode, "Traceback" in result.stderr) == (code, False), (result.stdout, result.stderr)
        assert str(text) in result.stderr + result.stdout, (result.stdout, result.stderr)
