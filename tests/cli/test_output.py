"""What commands print for programs, through any pipe and in any encoding."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rsmq.cli.output import as_data
from rsmq.model.words import suggestion
from tests.cli.conftest import Cli, Running
from tests.servers import wait_until

TOPIC = "orders-of-the-southern-warehouse-with-a-very-long-name"


def pick(value: Any, path: str) -> Any:
    """As `jq` reads it: `.a.b` is a field of a field, `.[0]` an element, `.[]` each element of a list."""
    first, _, rest = path.removeprefix(".").partition(".")
    if not first:
        return value
    if first == "[]":
        return [pick(each, rest) for each in value]
    return pick(value[int(first[1:-1])] if first.startswith("[") else value[first], rest)


@pytest.fixture
def served(cli: Cli, app: Path, start: Callable[..., Running]) -> Running:
    """A worker of `orders`/`billing`, one message of which is dead."""
    worker = start("worker", "app:broker")
    cli.ok("publish", "orders", '{"hold": true, "n": 1}', "--key", "a")
    worker.expect("started 1")
    wait_until(lambda: cli.json("group", "list")[0]["work"]["running"] == 1, "the member has said so")
    return worker


def test_json_of_lists_is_an_array_of_objects(cli: Cli, served: Running) -> None:
    """Each `list` is one, and so is a search; a duration is a number of seconds, and a payload a value."""
    cli.ok("publish", "orders", '{"shop": {"id": 7}}', "--delay", "1h")
    assert pick(cli.json("topic", "list"), ".[].topic.name") == ["orders"]
    (group,) = cli.json("group", "list", "orders")
    assert (pick(group, ".name"), pick(group, ".backlog"), pick(group, ".work.running")) == ("billing", 1, 1)
    assert 0 <= pick(group, ".oldest") < 600
    (member,) = cli.json("member", "list")
    assert 0 <= pick(member, ".heard_ago") < 600
    assert pick(cli.json("message", "find", "orders", "--state", "delayed"), ".[].data.shop.id") == [7]
    assert [cli.json(noun, "list") for noun in ("dlq", "schedule", "hold", "device")] == [[], [], [], []]
    assert pick(json.loads(cli.ok("tail", "orders", "--json")), ".data.n") == 1
    assert pick(cli.json("doctor", "--over", "0s"), ".round_trip") > 0


def test_group_list_and_topic_show_have_the_words_of_the_docs(cli: Cli, served: Running) -> None:
    """Backlog, and what it consists of."""
    for printed in (cli.ok("group", "list"), cli.ok("topic", "show", "orders")):
        head = next(line.split() for line in printed.splitlines() if "backlog" in line)
        row = next(line.split() for line in printed.splitlines() if " billing " in f" {line} ")
        found = dict(zip(head, row, strict=False))
        wanted = {"group": "billing", "state": "running", "backlog": "1", "unread": "0", "ready": "0", "running": "1"}
        assert wanted.items() <= found.items()
    assert "backlog: 1: 0 unread, 0 ready, 1 running, 0 waiting; oldest " in cli.ok(
        "group", "show", "orders", "billing"
    )


@pytest.mark.parametrize(
    ("data", "content_type", "shown"),
    [
        (b'{"n": 1}', "application/json", {"data": {"n": 1}}),
        (b"5", "text/plain", {"data": "5"}),
        (b"5", "application/vnd.shop+json", {"data": 5}),
        (b'"a"', None, {"data": "a"}),
        (b"{broken", "application/json", {"data": "{broken"}),
        (b"NaN", "application/json", {"data": "NaN"}),
        (b"12345678901234567890123", "application/json", {"data": 12345678901234567890123}),
        (b"[" * 10_000, "application/json", {"data": "[" * 10_000}),
        (b"\xff", "application/json", {"data_base64": "/w=="}),
        (None, "application/json", {"data": None}),
    ],
)
def test_payload_is_json_where_it_can_be(data: bytes | None, content_type: str | None, shown: dict[str, Any]) -> None:
    """A value, else text, else base64."""
    assert as_data(data, content_type) == shown


def test_wrong_names_get_at_most_five_suggestions(cli: Cli) -> None:
    """Near ones first; else the first ones, and how many more there are."""
    names = [f"shop-{n}" for n in range(9)]
    assert suggestion("shop-10", names, "topics").count("shop-") == 5
    assert suggestion("zzz", names, "topics") == "the topics are shop-0, shop-1, shop-2, shop-3, shop-4 and 4 more"
    assert suggestion("ordrs", ["orders", "bills"], "topics") == "did you mean orders?"
    assert suggestion("zzz", [], "topics") == ""
    cli.ok("topic", "set", "orders", "--partitions", "1")
    for words in (["group", "list"], ["topic", "show"], ["tail"], ["message", "find"], ["schedule", "list"]):
        result = cli(*words, "ordres")
        assert "there is no topic 'ordres': did you mean orders?" in result.stderr, words
        assert result.returncode in (1, 2), words


@pytest.mark.parametrize("words", [["topic", "show", "orders"], ["tail", "orders", "-n", "2000"], ["--help"]])
def test_command_whose_reader_has_left_ends_with_0(cli: Cli, words: list[str]) -> None:
    """As with `| head -1`, in a script with `set -o pipefail`. Here the reader has left before the first line."""
    cli.ok("publish", "orders", "-", stdin="\n".join(f"line {n} {'x' * 200}" for n in range(1000)))
    reading, writing = os.pipe()
    os.close(reading)
    command = subprocess.run(
        [sys.executable, "-m", "rsmq", *words], cwd=cli.directory, env=cli.environment, stdout=writing,
        stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, timeout=120, check=False,
    )  # fmt: skip
    os.close(writing)
    assert (command.returncode, command.stderr) == (0, b"")


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "utf-16"])
def test_output_can_be_written_in_any_encoding(cli: Cli, encoding: str) -> None:
    """What the encoding does not have is written by its number; no name is cut."""
    cli.ok("topic", "set", TOPIC, "--partitions", "1")
    cli.ok("publish", TOPIC, '"schön 😀"', "--key", "größe")
    for words in (["topic", "show", TOPIC], ["tail", TOPIC], ["top", "--once", "--every", "100ms"], ["topic", "list"]):
        command = subprocess.run(
            [sys.executable, "-m", "rsmq", *words], cwd=cli.directory, capture_output=True, check=False, timeout=120,
            env={**cli.environment, "PYTHONIOENCODING": encoding, "LC_ALL": "C"}, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert (command.returncode, command.stderr) == (0, b""), words
        assert TOPIC in command.stdout.decode(encoding), words
