"""Every command but the worker, run as a person or a script would: what it prints and how it ends."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import typer.main

from rsmq import Broker, Settings, SyncBroker
from rsmq.cli import make_app
from rsmq.model.keys import Keys
from rsmq.model.partition import partition_for
from rsmq.model.progress import write_progress
from rsmq.redis.streams import ensure_groups
from tests.cli.conftest import Cli, Running
from tests.servers import Server, wait_until

Start = Callable[..., Running]


def every_command() -> Iterator[tuple[str, object]]:
    """The words of each command and the command."""

    def walk(words: str, command: object) -> Iterator[tuple[str, object]]:
        inner = getattr(command, "commands", None)
        if inner is None:
            yield words, command
        for name, each in (inner or {}).items():
            yield from walk(f"{words} {name}", each)

    yield from walk("rsmq", typer.main.get_command(make_app()))


@pytest.fixture
def group(cli: Cli, app: Path, start: Start) -> None:
    """A group `billing` that once served `orders`."""
    worker = start("worker", "app:broker")
    worker.expect(" serves ")
    worker.signal(signal.SIGTERM)
    assert worker.end() == 0


@pytest.fixture
def dead(cli: Cli, app: Path, start: Start) -> str:
    """The id of a dead letter of `orders`/`billing`."""
    worker = start("worker", "app:broker")
    cli.ok("publish", "orders", "--text", "no json: \x1b[31m", "--key", "k")
    worker.expect(" serves ")
    wait_until(lambda: cli.json("dlq", "list", "orders"), "there is a dead letter")
    (letter,) = cli.json("dlq", "list", "orders", "billing")
    worker.signal(signal.SIGTERM)
    assert worker.end() == 0
    return str(letter["id"])


def nothing(cli: Cli, things: str) -> str:
    """An empty answer. It names the server that was asked, and the prefix."""
    return f"there are no {things} at {cli.environment['RSMQ_URL']}, prefix {cli.environment['RSMQ_PREFIX']}\n"


def test_every_command_has_an_example_and_its_options() -> None:
    """Help that does not show a line to copy is no help; --json and --url are everywhere they mean something."""
    for words, command in every_command():
        assert f"Example: {words}" in (command.epilog or ""), words  # type: ignore[attr-defined]
        options = {option for parameter in command.params for option in parameter.opts}  # type: ignore[attr-defined]
        assert words == "rsmq demo" or "--json" in options, words
        has_none = (
            "rsmq server",
            "rsmq demo",
            "rsmq pipeline compact",
            "rsmq sql init",
            "rsmq outbox status",
            "rsmq docs",
            "rsmq new",
        )
        assert words in has_none or "--url" in options, words  # those of the database take its URL as their argument


def test_deleting_commands_have_a_yes_option() -> None:
    """Every command that deletes has --yes."""
    for words, command in every_command():
        if words.split()[-1] in ("delete", "reset", "purge"):
            assert any("--yes" in parameter.opts for parameter in command.params), words  # type: ignore[attr-defined]


def test_tail_of_an_empty_topic_names_the_server(cli: Cli) -> None:
    """On stderr: stdout has messages only."""
    cli.ok("topic", "set", "quiet", "--partitions", "1")
    result = cli("tail", "quiet")
    assert (result.returncode, result.stdout) == (0, "")
    assert result.stderr == f"rsmq: quiet has no messages{nothing(cli, 'x').removeprefix('there are no x')}"
    assert cli("tail", "quiet", "--json").stderr == ""


def test_published_message_is_tailed(cli: Cli) -> None:
    """What is published is printed again, in order, and still there: nothing is consumed."""
    first = cli.ok("publish", "orders", '{"n": 1}', "--key", "a", "--header", "tenant=x").strip()
    second = cli.json("publish", "orders", "hello\x1b[31m", "--key", "a")
    lines = cli.ok("tail", "orders").splitlines()
    assert lines[0].endswith('key=a {"n":1}')
    assert lines[1].endswith(r"key=a hello\x1b[31m")
    entries = [json.loads(line) for line in cli.ok("tail", "orders", "--json").splitlines()]
    assert [entry["id"] for entry in entries] == [first, second["id"]]
    assert [entry["data"] for entry in entries] == [{"n": 1}, "hello\x1b[31m"]
    assert [entry["type"] for entry in entries] == ["application/json", "text/plain"]
    assert entries[0]["headers"] == {"tenant": "x"}
    assert len(cli.ok("tail", "orders", "-n", "1").splitlines()) == 1
    assert cli.ok("tail", "orders", "-n", "0") == ""


def test_publish_reads_lines_of_stdin(cli: Cli) -> None:
    """With - every line of stdin is a message; empty lines are none, and the last needs no end."""
    assert (
        cli.ok("publish", "orders", "-", "--key", "a", stdin='{"n": 1}\n\n2\r\nthree')
        == "published 3 messages to orders\n"
    )
    assert [line.rpartition(" ")[2] for line in cli.ok("tail", "orders").splitlines()] == ['{"n":1}', "2", "three"]


def test_publish_into_a_new_topic_says_so(cli: Cli) -> None:
    """A name that is mistyped would wait for a group that never comes. Nothing is said to programs."""
    said = "rsmq: topic {} is new, and no group reads it yet{}\n"
    assert cli("publish", "orders", "1").stderr == said.format("'orders'", "")
    assert cli("publish", "orders", "1").stderr == ""
    assert cli("publish", "ordrs", "1").stderr == said.format("'ordrs'", ": did you mean orders?")
    assert cli("publish", "order", "-", stdin="\n").stderr == "", "nothing was published"
    assert cli("publish", "ordes", "1", "--json").stderr == ""


def test_publish_on_a_terminal_says_how_to_end_it(cli: Cli) -> None:
    """Without a payload it reads lines from the terminal."""
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "rsmq", "publish", "orders"]
    with subprocess.Popen(
        command, cwd=cli.directory, env=cli.environment, stdin=follower, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as publishing:
        assert publishing.stderr is not None
        assert publishing.stderr.readline() == b"rsmq: each line that you type is a message; Ctrl-D ends it\n"
        os.write(leader, b"hello\n\x04")
        assert publishing.stdout is not None
        assert publishing.stdout.read() == b"published 1 message to orders\n"
    assert publishing.returncode == 0
    os.close(leader)
    os.close(follower)


def test_publish_takes_plain_words_as_text(cli: Cli) -> None:
    """Words, versions and dates are text, and so is all with --text; numbers and words of JSON are JSON."""
    words = ["hello", "hello world", "1.2.3", "2026-01-31", "tru", "nano", "12", "true", "null"]
    cli.ok("publish", "orders", "-", "--key", "a", stdin="\n".join(words))
    cli.ok("publish", "orders", "hello", "--key", "a")
    cli.ok("publish", "orders", '{"user":', "--key", "a", "--text")
    found = [json.loads(line) for line in cli.ok("tail", "orders", "-n", "20", "--json").splitlines()]
    assert [each["data"] for each in found] == [*words[:6], 12, True, None, "hello", '{"user":']
    assert [each["type"].partition("/")[0] for each in found] == ["text"] * 6 + ["application"] * 3 + ["text"] * 2


def test_publish_of_lines_puts_long_ones_together(cli: Cli) -> None:
    """Lines that are longer than what a pipe gives at once, also the last one, which has no end."""
    lines = [json.dumps(letter * size) for letter, size in (("a", 1), ("b", 200_000), ("c", 65_535), ("d", 131_072))]
    cli.ok("publish", "orders", "-", "--key", "a", stdin="\n".join(lines))
    found = [json.loads(line)["data"] for line in cli.ok("tail", "orders", "--json").splitlines()]
    assert found == [json.loads(line) for line in lines]


def test_publish_of_lines_ends_at_a_wrong_line(cli: Cli) -> None:
    """It says which one, and how many messages are stored: those before it."""
    refused = cli("publish", "orders", "-", "--key", "a", stdin='1\n\n{"n": 2}\n{"n":\n5\n')
    assert refused.returncode == 2
    assert "line 4 of stdin: the payload looks like JSON" in " ".join(refused.stderr.split())
    assert "published before it: 2" in " ".join(refused.stderr.split())
    assert "Traceback" not in refused.stderr
    assert [json.loads(line)["data"] for line in cli.ok("tail", "orders", "--json").splitlines()] == [1, {"n": 2}]


def test_publish_stores_an_id_once_and_delays_messages(cli: Cli) -> None:
    """An id is stored once; what is delayed is in the topic, but not yet in its stream."""
    for _ in range(2):
        assert cli.ok("publish", "orders", "1", "--id", "o-1") == "o-1\n"
    cli.ok("publish", "orders", "2", "--delay", "PT1H")
    cli.ok("publish", "orders", "3", "--at", "2999-01-01T00:00:00Z")
    (topic,) = cli.json("topic", "list")
    assert (topic["length"], topic["delayed"]) == (1, 2)


def test_publish_stores_a_unique_name_once(cli: Cli) -> None:
    """The second call prints the message that has the name, and says that nothing is stored."""
    first = cli.ok("publish", "orders", "1", "--unique", "user-7", "--until", "started").strip()
    assert cli.ok("publish", "orders", "2", "--unique", "user-7") == f"{first} has the name: nothing is stored\n"
    again = cli.json("publish", "orders", "2", "--unique", "user-7", "--until", "1h")
    assert again == {"topic": "orders", "id": first, "is_new": False}


def test_messages_are_found_by_a_field(cli: Cli) -> None:
    """Those that have it, with their ids; and whether everything was looked at."""
    first = cli.ok("publish", "orders", '{"n": 1}', "--key", "k", "--header", "a=b").strip()
    cli.ok("publish", "orders", '{"n": 2}', "--key", "k")
    found = cli.json("message", "find", "orders", "--where", "n=1", "--header", "a=b", "--key", "k")
    assert [each["id"] for each in found] == [first]
    assert "not all was looked at" in cli("message", "find", "orders", "--scan", "1", "--json").stderr
    shown = cli.ok("message", "find", "orders", "--where", "n=1")
    assert first in shown
    assert re.search(r"\d\d:\d\d:\d\dZ", shown), "the time is shown as by other commands"
    assert "no such message" in cli.ok("message", "find", "orders", "--where", "n=3")


WRONG = [
    (["publish", "orders", "--unique", "x"], "--unique cannot be used with stdin"),
    (["publish", "orders", "1", "--unique", "x", "--until", "5"], "a duration such as '5m'"),
    (["publish", "orders", "1", "--delay", "5"], "write 5s, 2h, 1d, 500ms or PT5S"),
    (["publish", "orders", "1", "--at", "2026-01-01T00:00:00"], "has no time zone"),
    (["publish", "orders", "1", "--header", "x"], "name=value"),
    (["publish", "a:b", "1"], "topic name 'a:b' is not allowed"),
    (["publish", "orders", "--id", "x"], "--id cannot be used with stdin"),
    (["publish", "orders", "1", "--delay", "1s", "--at", "2999-01-01T00:00:00Z"], "give delay or at, not both"),
    (["publish", "orders", '{"user":'], "the payload looks like JSON but is not valid (Expecting value"),
    (["publish", "orders", "{'user': 1}"], "correct it, or send it as text with --text"),
    (["publish", "orders", " [1, 2"], "--text"),
    (["publish", "orders", '"hello'], "--text"),
    (["publish", "orders", '{"price": NaN}'], "JSON has no NaN"),
    (["publish", "orders", "--", "-Infinity"], "JSON has no -Infinity"),
    (["publish", "orders", "1e999"], "1e999 is too large a number"),
    (["device", "send", "phone", '{"user":'], "the payload looks like JSON but is not valid"),
    (["dlq", "replay", "orders", "billing", "--all", "--key", "k"], "give one of: ids, --all"),
    (["dlq", "replay", "orders", "billing", "--where", "n"], "write field=value"),
    (["dlq", "replay", "orders", "billing", "--all", "--rate", "50"], "write 50/s, 10/min or 1/h"),
    (["dlq", "list", "orders", "--reason", "malformed"], "need a topic and a group"),
    (["topic", "set", "orders"], "nothing to set"),
    (["group", "reset", "orders", "billing", "--to", "yesterday", "--yes"], "use earliest, latest, a stream id"),
    (["dlq", "replay", "orders", "billing"], "give one of: ids, --all"),
    (["topic", "list", "--url", "http://localhost"], "is not understood: use redis://host:6379/0"),
    (["nonsense"], "No such command"),
]


@pytest.mark.parametrize(("args", "text"), WRONG, ids=[" ".join(args) for args, _ in WRONG])
def test_wrong_use_is_exit_code_2(cli: Cli, args: list[str], text: str) -> None:
    """A wrong value is exit code 2, a sentence on stderr, and no traceback."""
    result = cli(*args)
    assert result.returncode == 2, result.stderr
    assert text in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr


def test_unknown_setting_is_refused(cli: Cli) -> None:
    """A typo in the environment is refused by every command."""
    result = cli("topic", "list", RSMQ_PREFIXX="a")
    assert (result.returncode, result.stderr) == (2, "rsmq: unknown setting RSMQ_PREFIXX. Did you mean RSMQ_PREFIX?\n")


MISSING = [
    ["topic", "show", "nothing"],
    ["topic", "set", "nothing", "--max-length", "5"],
    ["topic", "delete", "nothing", "--yes"],
    ["topic", "why-not-trimmed", "nothing"],
    ["tail", "nothing"],
    ["group", "list", "nothing"],
    ["group", "pause", "nothing", "billing"],
    ["group", "reset", "nothing", "billing", "--to", "latest", "--yes"],
    ["member", "list", "nothing"],
    ["dlq", "purge", "nothing", "billing", "--yes"],
]


@pytest.mark.parametrize("args", MISSING, ids=" ".join)
def test_missing_topic_is_exit_code_1(cli: Cli, args: list[str]) -> None:
    """A missing topic is exit code 1 and one line, and is not created by the question."""
    result = cli(*args)
    assert (result.returncode, result.stderr) == (1, f"rsmq: there is no topic 'nothing': {nothing(cli, 'topics')}")
    assert cli.json("topic", "list") == []


def test_unreachable_server_is_exit_code_1(cli: Cli) -> None:
    """An unreachable server is one line and exit code 1."""
    result = cli("topic", "list", "--url", "redis://127.0.0.1:1/0", RSMQ_UNAVAILABLE_TIMEOUT="PT0.1S")
    assert result.returncode == 1
    assert result.stderr.startswith("rsmq: no answer from the server at redis://127.0.0.1:1/0")
    assert len(result.stderr.splitlines()) == 1


def test_topic_is_created_changed_and_deleted(cli: Cli) -> None:
    """A topic is created with its partitions, changed, shown, and deleted after a confirmation."""
    assert "orders: 3 partitions" in cli.ok("topic", "set", "orders", "--partitions", "3")
    changed = cli.json("topic", "set", "orders", "--max-length", "5", "--on-full", "trim", "--retention-age", "1h")
    assert (changed["max_length"], changed["on_full"], changed["retention_age"]) == (5, "trim", 3600.0)
    cli.ok("publish", "orders", "1")
    shown = cli.json("topic", "show", "orders")
    assert (shown["length"], len(shown["partitions"])) == (1, 3)
    assert "5 messages in a partition, then trim" in cli.ok("topic", "show", "orders")
    refused = cli("topic", "set", "orders", "--partitions", "4")
    assert refused.returncode == 2
    assert "has 3 partitions, not 4" in refused.stderr
    asked = cli("topic", "delete", "orders")
    assert asked.returncode == 2
    assert "use --yes" in asked.stderr
    assert cli.ok("topic", "delete", "orders", "--yes") == "deleted orders\n"
    assert cli.ok("topic", "list") == nothing(cli, "topics")


def test_topic_is_resized_step_by_step(cli: Cli) -> None:
    """Each state has a word and an exit code; a second resize waits for the group, and is given up."""
    cli.ok("publish", "orders", "1", "--key", "a")
    grown = cli.json("topic", "resize", "orders", "16")
    assert grown == {
        "topic": "orders",
        "partitions": 16,
        "resizing_to": None,
        "waits_for": "",
        "left": {},
        "left_in": {},
    }
    assert cli.ok("topic", "resize", "orders", "--status") == "orders: 16 partitions\n"
    nothing_to_abort = cli("topic", "resize", "orders", "--abort")
    assert (nothing_to_abort.returncode, "is not being resized" in nothing_to_abort.stderr) == (1, True)
    for what in ("--abort", "--status"):
        missing = cli("topic", "resize", "nope", what)
        assert (missing.returncode, "there is no topic 'nope'" in missing.stderr) == (1, True)
    refused = cli("topic", "resize", "orders", "24")
    assert (refused.returncode, "Use 32, 48, 64" in refused.stderr) == (2, True)
    url, prefix = cli.environment["RSMQ_URL"], cli.environment["RSMQ_PREFIX"]
    partition = partition_for("a", 2)
    asyncio.run(begin_resize(Settings(url=url, prefix=prefix)))
    waiting = cli("topic", "resize", "orders", "--status")
    assert waiting.returncode == 1
    assert waiting.stdout.splitlines() == [
        "orders: 16 partitions",
        "to 32 partitions: it waits for groups that have not handled what was published before: late; workers go on by "
        "themselves",
        f"group late: 1 message in partition {partition} of before the resize left",
    ]
    found = cli("topic", "resize", "orders", "--status", "--json")
    assert (json.loads(found.stdout)["left"], json.loads(found.stdout)["left_in"]) == (
        {"late": 1}, {"late": {str(partition): 1}}
    )  # fmt: skip
    assert [each["partitions"] for each in cli.json("top", "--once")["topics"]] == [16]
    said = cli("doctor").stdout
    assert "which are not used before each group has handled" in said
    assert f"late (1 message in partition {partition})" in said
    assert cli.ok("topic", "resize", "orders", "--abort") == "orders: the resize is given up\n"
    assert "16" in cli.ok("topic", "resize", "orders", "--status").splitlines()[0]


async def begin_resize(settings: Settings) -> None:
    """A group that has handled nothing yet, and a resize that waits for it."""
    broker = Broker(settings)
    async with broker:
        await ensure_groups(broker.client, broker.keys, await broker.topics.existing("orders"), "late", "0")
        await broker.topics.resize("orders", 32)


def test_served_topic_is_not_deleted(cli: Cli, app: Path, start: Start) -> None:
    """A topic with live members stays, and they are named."""
    start("worker", "app:broker").expect(" serves ")
    result = cli("topic", "delete", "orders", "--yes")
    assert result.returncode == 1
    assert "has live members: stop " in result.stderr


def test_hold_names_groups_whose_handlers_go_on(cli: Cli, app: Path, start: Start, group: None) -> None:
    """A handler without a rate, a limit or a breaker does not know holds: `rsmq hold begin` says what stops it."""
    assert "goes on" not in cli.ok("hold", "begin", "orders", "1h"), "there is no live member"
    start("worker", "app:broker").expect(" serves ")
    held = cli.ok("hold", "begin", "orders", "1h")
    assert "group billing has a handler without a rate, limit or breaker" in held
    assert "`rsmq group pause orders billing` stops it" in held


def test_group_is_listed_paused_resumed_and_reset(cli: Cli, group: None) -> None:
    """A group is listed, paused, resumed and reset, and says what holds its topic."""
    cli.ok("publish", "orders", "-", stdin="1\n2\n3\n")
    (listed,) = cli.json("group", "list", "orders")
    assert (listed["name"], listed["unread"], listed["is_paused"]) == ("billing", 3, False)
    held = cli("topic", "why-not-trimmed", "orders")
    assert held.returncode == 1
    assert "billing" in held.stdout
    assert cli.ok("group", "pause", "orders", "billing") == "orders/billing is paused\n"
    assert "paused" in cli.ok("group", "show", "orders", "billing")
    assert cli.ok("group", "resume", "orders", "billing") == "orders/billing is running\n"
    assert cli("group", "reset", "orders", "billing", "--to", "latest").returncode == 2
    assert "0 messages unread" in cli.ok("group", "reset", "orders", "billing", "--to", "latest", "--yes")
    assert cli("topic", "why-not-trimmed", "orders").returncode == 0
    cli.ok("topic", "set", "orders", "--archive", "required")
    held = cli("topic", "why-not-trimmed", "orders")
    assert (held.returncode, "archive" in held.stdout, "billing" in held.stdout) == (1, True, False)
    assert {each["holder"] for each in json.loads(cli("topic", "why-not-trimmed", "orders", "--json").stdout)} == {
        "archive"
    }
    assert cli("topic", "set", "orders", "--on-full", "trim").returncode == 2
    assert "archive: required" in cli.ok("topic", "show", "orders")
    cli.ok("topic", "set", "orders", "--archive", "off")
    assert cli.json("group", "reset", "orders", "billing", "--to", "2020-01-01T00:00:00Z", "--yes")["unread"] == 3
    assert len(cli.ok("tail", "orders", "--group", "billing", "-n", "2").splitlines()) == 2
    unknown = cli("group", "show", "orders", "billin")
    assert (unknown.returncode, unknown.stderr) == (
        1,
        "rsmq: topic 'orders' has no group 'billin': did you mean billing?\n",
    )


def test_tail_follow_prints_new_messages(cli: Cli, start: Start) -> None:
    """With --follow new messages are printed as they come, each once, until Ctrl-C, which is no failure."""
    cli.ok("publish", "orders", "1")
    following = start("tail", "orders", "--follow")
    following.expect(" 1")
    cli.ok("publish", "orders", "-", stdin="2\n3\n")
    following.expect(" 3")
    following.signal(signal.SIGINT)
    assert following.end() == 0
    assert len(following.lines) == 3


def test_tail_shows_unreadable_entries(cli: Cli, server: Server, prefix: str) -> None:
    """Unreadable entries say why, and bytes that are not UTF-8 are base64 in JSON."""
    cli.ok("topic", "set", "orders", "--partitions", "1")
    with server.client() as redis:
        redis.xadd(f"{prefix}:{{orders.0}}", {"x": "1"})
        redis.xadd(f"{prefix}:{{orders.0}}", {"data": b"\xff"})
    lines = cli.ok("tail", "orders").splitlines()
    assert lines[0].endswith("unreadable: the entry has no field `data`")
    assert lines[1].endswith(r" \xff")
    objects = [json.loads(line) for line in cli.ok("tail", "orders", "--json").splitlines()]
    assert objects[0]["malformed"] == "the entry has no field `data`"
    assert objects[1]["data_base64"] == "/w=="


def test_member_list_shows_live_members(cli: Cli, app: Path, start: Start) -> None:
    """Each member with handler and partitions; after a stop there are none."""
    worker = start("worker", "app:broker")
    worker.expect("reads 2 of 2 partitions")
    (member,) = cli.json("member", "list", "orders", "billing")
    assert (member["handler"], member["is_present"], member["partitions"]) == ("bill", True, [0, 1])
    assert member["id"] in cli.ok("member", "list")
    worker.signal(signal.SIGTERM)
    assert worker.end() == 0
    assert cli.ok("member", "list") == nothing(cli, "members")


@pytest.mark.parametrize("word", ["quiet", "stop"])
def test_member_is_let_end(cli: Cli, app: Path, start: Start, server: Server, prefix: str, word: str) -> None:
    """The process ends with code 0, and the audit has who asked it to. A wrong name: did you mean."""
    worker = start("worker", "app:broker")
    worker.expect("reads 2 of 2 partitions")
    (member,) = [each["id"] for each in cli.json("member", "list")]
    wrong, unsure = cli("member", word, f"{member}x", "--yes"), cli("member", word, member)
    assert (wrong.returncode, f"did you mean {member}?" in wrong.stderr) == (1, True)
    assert (unsure.returncode, "use --yes" in unsure.stderr) == (2, True)
    assert cli.json("member", word, member, "--yes") == {
        "member": member, "asked": word, "serves": ["orders/billing"],
    }  # fmt: skip
    assert worker.end() == 0
    assert cli("member", word, member, "--yes").returncode == 1
    with server.client() as redis:
        entries = [
            {name.decode(): value.decode() for name, value in fields.items()}
            for _, fields in redis.xrange(Keys(prefix).audit)
        ]
    assert [each["phase"] for each in entries] == ["begin", "end"]
    assert entries[0]["what"] == f"{word}-process"
    assert entries[1]["result"] == f"{member} is asked to {word}"


def test_dead_letter_is_listed_shown_replayed_and_purged(cli: Cli, dead: str) -> None:
    """It is shown without control characters, replayed, and purged after a confirmation."""
    assert cli.json("dlq", "list") == [{"topic": "orders", "group": "billing", "dead_letters": 1}]
    assert dead in cli.ok("dlq", "list", "orders", "billing")
    shown = cli.ok("dlq", "show", "orders", "billing", dead)
    assert "reason: malformed" in shown
    assert "data: no json: \\x1b[31m" in shown
    assert cli.json("dlq", "show", "orders", "billing", dead)["data"] == "no json: \x1b[31m"
    gone = cli("dlq", "replay", "orders", "billing", "0/1-1")
    assert (gone.returncode, gone.stderr) == (1, "rsmq: 1 id does not exist, of 1\n")
    assert cli("dlq", "show", "orders", "billing", "nonsense").returncode == 2
    asked = cli("dlq", "purge", "orders", "billing")
    assert asked.returncode == 2
    assert cli.json("dlq", "purge", "orders", "billing", "--older-than", "P1D", "--yes") == {"purged": 0}
    assert cli.json("dlq", "replay", "orders", "billing", dead) == {"replayed": 1}
    assert cli.json("dlq", "purge", "orders", "billing", "--yes") == {"purged": 0}
    assert cli.ok("dlq", "list") == nothing(cli, "dead letters")
    assert len(cli.ok("tail", "orders").splitlines()) == 2


def test_dead_letters_are_filtered_by_conditions(cli: Cli, dead: str) -> None:
    """Matching letters are listed, shown by a dry run, and replayed at a rate; the others stay."""
    group = ("orders", "billing")
    assert [each["id"] for each in cli.json("dlq", "list", *group, "--reason", "malformed", "--key", "k")] == [dead]
    assert cli.json("dlq", "list", *group, "--until", "2020-01-01T00:00:00Z") == []
    assert "no matching dead letters" in cli.ok("dlq", "list", *group, "--error", "surely not in any error")
    assert cli.json("dlq", "replay", *group, "--where", "n=1", "--dry-run") == {"would_replay": 0, "ids": []}
    dry = cli.ok("dlq", "replay", *group, "--reason", "malformed", "--dry-run")
    assert dead in dry
    assert "1 dead letter of orders/billing would be replayed" in dry
    assert cli.json("dlq", "replay", *group, "--reason", "attempts") == {"replayed": 0}
    assert cli.json("dlq", "replay", *group, "--since", "2020-01-01T00:00:00Z", "--rate", "50/s") == {"replayed": 1}
    assert cli.json("dlq", "list") == []


def test_group_with_live_members_is_not_deleted(cli: Cli, app: Path, start: Start) -> None:
    """It is deleted after its worker stops, and no longer keeps the topic from being trimmed."""
    worker = start("worker", "app:broker")
    worker.expect(" serves ")
    refused = cli("group", "delete", "orders", "billing", "--yes")
    assert (refused.returncode, "has live members" in refused.stderr) == (1, True)
    worker.signal(signal.SIGTERM)
    assert worker.end() == 0
    cli.ok("publish", "orders", "1")
    assert cli("group", "delete", "orders", "billing").returncode == 2
    assert cli.ok("group", "delete", "orders", "billing", "--yes") == "deleted orders/billing\n"
    assert cli.json("group", "list") == []
    assert cli("topic", "why-not-trimmed", "orders").returncode == 0


def test_shell_completion_knows_commands_and_options(cli: Cli) -> None:
    """The shell completes commands and options."""
    script = cli("--show-completion", SHELL="/bin/bash").stdout
    words = {"_RSMQ_COMPLETE": "complete_bash", "COMP_WORDS": "rsmq dlq re", "COMP_CWORD": "2"}
    assert cli(**words).stdout.split() == ["replay"]
    options = cli(**words | {"COMP_WORDS": "rsmq dlq replay --r", "COMP_CWORD": "3"}).stdout.split()
    assert options == ["--reason", "--rate"]
    assert script == "" or "_RSMQ_COMPLETE" in script  # a shell is found by the process above, if there is one


@pytest.mark.parametrize(("stdout", "code", "text"), [
    (">/dev/full", 1, "rsmq: cannot write: No space left on device\n"), (">&-", 0, "")])  # fmt: skip
def test_output_that_cannot_be_written_is_no_traceback(cli: Cli, stdout: str, code: int, text: str) -> None:
    """A full disk is an error in one line. Without a stdout nothing is printed."""
    cli.ok("publish", "orders", "1")
    shell = ["sh", "-c", f"exec {sys.executable} -m rsmq topic list {stdout}"]
    result = subprocess.run(shell, env=cli.environment, stderr=subprocess.PIPE, text=True, check=False)
    assert (result.returncode, result.stderr) == (code, text)


def test_doctor_warns_of_group_without_members(cli: Cli, dead: str) -> None:
    """Messages without a live member are a warning with what to do; --strict makes it exit code 1."""
    cli.ok("publish", "orders", "1")
    text = cli.ok("doctor", "--over", "PT0S")
    assert "group billing of orders has no live member, 1 message waits: start `rsmq worker`" in text
    suggested = re.findall(r"`rsmq (dlq [^`]*)`", text)
    assert [dead in cli.ok(*command.split()) for command in suggested] == [True, True]
    assert cli("doctor", "--over", "PT0S", "--strict").returncode == 1


def test_doctor_accepts_a_good_server(cli: Cli) -> None:
    """The server, its warnings, exit code 0."""
    text = cli.ok("doctor")
    assert "Valkey 9" in text
    assert "none: a restart of the server loses every message" in text
    assert "fit to use, 1 warning\n" in text
    state = cli.json("doctor")
    assert state["is_hiredis_used"] is True
    assert {"level": "ok", "topic": "eviction", "text": "noeviction"} in state["findings"]


def test_doctor_refuses_an_evicting_server(cli: Cli) -> None:
    """A server that may evict messages is exit code 1, with what to do; its password is not printed."""
    with Server("--maxmemory-policy", "allkeys-lru", password="secret", tcp=True) as server:
        result = cli("doctor", "--url", server.url)
        refused = cli("publish", "orders", "1", "--url", server.url)
    assert result.returncode == 1
    assert "CONFIG SET maxmemory-policy noeviction" in result.stdout
    assert "secret" not in result.stdout + result.stderr
    assert refused.returncode == 2
    assert "the server would delete messages" in refused.stderr


def test_doctor_names_a_key_that_another_program_has_written(cli: Cli, server: Server, prefix: str) -> None:
    """Exit code 1, with the key. Every other command fails, too, so it says that the doctor names it."""
    cli.ok("publish", "orders", "1")
    key = f"{prefix}:{{orders.0}}:delayed"
    with server.client() as redis:
        redis.set(key, "x")
    result, other = cli("doctor"), cli("topic", "list")
    assert (result.returncode, other.returncode) == (1, 1)
    assert f"another program has written 1 key of rsmq: {key} is a string, not a zset. Rename or" in result.stderr
    assert "`rsmq doctor` names it" in other.stderr


def test_server_runs_until_interrupted(cli: Cli, start: Start, tmp_path: Path) -> None:
    """`rsmq server` prints its address, serves commands without RSMQ_URL, and ends with Ctrl-C."""
    del cli.environment["RSMQ_URL"]
    cli.environment["XDG_STATE_HOME"] = str(tmp_path / "state")
    (tmp_path / "pyproject.toml").touch()
    server = start("server", "--json")
    server_info = json.loads(server.expect('"url"')[0])
    assert server_info["directory"].startswith(str(tmp_path))
    cli.ok("publish", "orders", "1")
    assert len(cli.ok("tail", "orders", "--url", server_info["url"]).splitlines()) == 1
    assert "(embedded, in " in cli.ok("doctor")
    (listed,) = cli.json("server", "--list")
    assert (listed["directory"], listed["project"]) == (server_info["directory"], str(tmp_path))
    assert listed["is_running"]
    assert listed["size"] > 0
    refused = cli("server", "--remove", listed["name"], "--yes")
    assert (refused.returncode, "is in use" in refused.stderr) == (2, True), refused.stderr
    empty = cli.ok("member", "list")
    assert empty.startswith("there are no members at this project's embedded server, with its data in /"), empty
    server.signal(signal.SIGINT)
    assert server.end() == 0


def test_data_of_a_server_are_listed_and_removed(cli: Cli, tmp_path: Path) -> None:
    """Also those of a project that does not exist any more; the question names the size; the next start is empty."""
    del cli.environment["RSMQ_URL"]
    cli.environment["XDG_STATE_HOME"] = str(tmp_path / "state")
    assert cli.ok("server", "--list") == f"there are no embedded servers in {tmp_path}/state/rsmq\n"
    cli.directory = tmp_path / "shop"
    cli.directory.mkdir()
    (cli.directory / "pyproject.toml").touch()
    cli.ok("publish", "orders", "1")
    moved = cli.directory.rename(tmp_path / "moved")
    cli.directory = moved
    wait_until(lambda: not cli.json("server", "--list")[0]["is_running"], "the server has ended with its last user")
    (listed,) = cli.json("server", "--list")
    assert Path(listed["project"]) == tmp_path / "shop"
    assert "shop (does not exist)" in cli.ok("server", "--list")
    unsure = cli("server", "--remove", str(tmp_path / "shop"))
    assert (unsure.returncode, "Delete " in unsure.stderr, "use --yes" in unsure.stderr) == (2, True, True)
    assert "removed" in cli.ok("server", "--remove", str(tmp_path / "shop"), "--yes")
    assert cli.json("server", "--list") == []
    wrong = cli("server", "--remove", "shop", "--yes")
    assert (wrong.returncode, wrong.stderr) == (2, "rsmq: there is no embedded server 'shop': there are none\n")
    moved.rename(tmp_path / "shop")
    cli.directory = tmp_path / "shop"
    assert cli.ok("topic", "list").startswith("there are no topics")


def test_completion_offers_topics_and_groups_of_the_server(cli: Cli, app: Path, start: Start) -> None:
    """As the shell asks for it; a server that cannot be reached offers nothing, and writes nothing."""

    def complete(*words: str, **environment: str) -> list[str]:
        line = " ".join(words)
        done = cli(**{"_RSMQ_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)},
                   **environment)  # fmt: skip
        assert done.stderr == ""
        return done.stdout.split()

    worker = start("worker", "app:broker")
    worker.expect(" serves ")
    cli.ok("publish", "others", "1")
    wait_until(lambda: cli.json("group", "list"), "the group exists")
    assert complete("rsmq", "topic", "show", "o") == ["orders", "others"]
    assert complete("rsmq", "topic", "show", "or") == ["orders"]
    assert complete("rsmq", "group", "pause", "orders", "b") == ["billing"]
    assert complete("rsmq", "group", "pause", "others", "b") == []
    assert complete("rsmq", "topic", "show", "o", RSMQ_URL="redis://127.0.0.1:1/0") == []


def test_batches_are_listed_shown_and_cancelled_and_a_reset_names_them(cli: Cli, group: None) -> None:
    """With a bar, what members have said of their progress, and what there is instead of a batch that is not there."""
    assert cli.ok("batch", "list").startswith("there are no batches")
    broker = SyncBroker(
        Settings(url=cli.environment["RSMQ_URL"], prefix=cli.environment["RSMQ_PREFIX"], preflight="warn")
    )
    with broker, broker.batch("campaign", group="billing") as batch:
        refs = [batch.publish("orders", {"n": n}, key=str(n)) for n in range(4)]
        broker.client.execute_command(
            "HSET", broker.keys.progress("orders", refs[0].partition_number, "billing"), "1-0",
            write_progress(0.4, "page 3", 1_700_000_000_000, batch_id(cli)),
        )  # fmt: skip
    assert "campaign  closed  [....................] 0 %" in re.sub(" {2,}", "  ", cli.ok("batch", "list"))
    shown = cli.ok("batch", "show", "campaign")
    assert "4 members: 0 done" in shown
    assert "40% done, page 3" in shown
    (progress,) = cli.json("batch", "show", "campaign")["progress"]
    assert (progress["done"], progress["text"]) == (0.4, "page 3")
    missing = cli("batch", "show", "campain")
    assert (missing.returncode, "did you mean campaign?" in missing.stderr) == (1, True)
    refused = cli("group", "reset", "orders", "billing", "--to", "latest")
    assert "Open batches may have members there, and what it skips is missing in them: 'campaign'" in refused.stderr
    assert cli("batch", "cancel", "campaign").returncode == 2
    assert "campaign: cancelled" in cli.ok("batch", "cancel", "campaign", "--yes")


def batch_id(cli: Cli) -> str:
    """The id of the only batch."""
    (found,) = cli.json("batch", "list")
    return str(found["id"])


def test_version_is_printed(cli: Cli) -> None:
    """It is the version of the package."""
    assert cli.ok("--version").startswith("rsmq ")
