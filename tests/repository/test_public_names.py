"""What users depend on is listed in one file, and the list is true."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("griffe", reason="the extra `docs` is not installed")

from tests.repository import public_names

LISTED = public_names.PAGE.read_text(encoding="utf-8")


def test_the_list_of_public_names_is_true() -> None:
    """A name that users depend on changes only together with its line, which a review sees."""
    assert public_names.page() == LISTED, (
        "run `python -m tests.repository.public_names --write`, and say why it changes"
    )


def test_the_list_has_all_kinds_of_names() -> None:
    """One of each, so that a kind that is not found any more is noticed."""
    for line in (
        r"rsmq\.Broker\.publish\(topic: str, payload: Any, .*\) -> Coroutine\[Any, Any, MessageRef\]",
        r"rsmq\.testing\.Harness\.advance\(.*",
        r"lease_ttl: timedelta = 6 s",
        r"rsmq dlq replay .*",
        r"    --processes.*",
        r"rsmq group: GroupState\(.*unread.*",
        r"rsmq_messages_waiting\{topic, group, for\} gauge",
    ):
        assert re.search(f"^{line}$", LISTED, re.MULTILINE), line


def test_what_is_printed_for_programs_is_listed_for_each_command() -> None:
    """A command with `--json` has its keys in the list."""
    commands = re.findall(r"^rsmq ([a-z]+)(?: [a-z-]+)*[^\n]*\n(?:    [^\n]*\n)*?    --json", LISTED, re.MULTILINE)
    keys = set(re.findall(r"^rsmq ([a-z]+): ", LISTED, re.MULTILINE))
    assert len(set(commands)) > 15
    assert set(commands) - keys == LOGS | {"trace", "bench", "demo"}, "write them into PRINTED of public_names.py"


LOGS = {"worker", "gateway"}
"""Their `--json` writes logs; `trace` prints what `message` prints, `bench` and `demo` what their pages explain."""
