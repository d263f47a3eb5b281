"""Statements of the standard that no other test has: bytes in, the exact bytes out, and whether the connection ends.

`docs/mqtt-conformance.md` says which test has which statement.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.gateway import packets as p
from tests.gateway.raw_client import SECONDS, RawClient

HERE = Path(__file__).parent
Make = Callable[..., RawClient]
COMPOSED, DECOMPOSED = "caf\u00e9", "cafe\u0301"

BAD = b"\0\2\xc3\x28"
"""A string that is not UTF-8."""


def connect_with(flags: int, *fields: bytes, level: int = 5) -> bytes:
    """A CONNECT with these flags and fields."""
    return p.packet(0x10, p.text("MQTT"), bytes((level, flags)), b"\0\x3c", p.props(level), *fields)


CONNECTED: list[tuple[str, int, bytes, str, bool]] = [
    # statement, version, what a connected client sends, what it gets, whether the connection ends
    ("2.2.1-2", 5, p.publish("a/b", b"\0\7", 0, level=5), "", False),
    ("2.2.1-6", 5, p.subscribe([("s/1", 1), ("s/2", 2)], 0x1234, 5), "90051234000102", False),
    ("2.2.1-6 3.1.1", 4, p.subscribe([("s/1", 1), ("s/2", 2)], 0x1234), "900412340102", False),
    ("2.2.2-1", 5, p.packet(0x32, p.text("a/b"), b"\0\7", b"x"), "e00181", True),
    ("3.3.2-1", 5, p.packet(0x30, b"\0"), "e00181", True),
    ("3.3.2-1 3.1.1", 4, p.packet(0x30, b"\0"), "", True),
    ("3.3.2-2", 5, p.publish("a/+/b", level=5), "e00181", True),
    ("3.3.4-6", 5, p.publish("a/b", level=5, raw_props=b"\x0b\1"), "e00182", True),
    ("3.8.1-1", 5, b"\x80" + p.subscribe([("s", 0)], 1, 5)[1:], "e00181", True),
    ("3.8.1-1 3.1.1", 4, b"\x80" + p.subscribe([("s", 0)], 1)[1:], "", True),
    ("3.8.3-5", 5, p.subscribe([("s", 0x40)], 1, 5), "e00181", True),
    ("3.8.4-5", 5, p.subscribe([("s/x", 0), ("s/x", 2), ("s/x", 1)], 3, 5), "90060003000002" + "01", False),
    ("3.10.1-1", 5, b"\xa0" + p.unsubscribe(["s"], 1, 5)[1:], "e00181", True),
    ("3.10.4-4", 5, p.unsubscribe(["never"], 7, 5), "b00400070011", False),
    ("3.10.4-4 3.1.1", 4, p.unsubscribe(["never"], 7), "b0020007", False),
    ("3.10.4-6", 5, p.unsubscribe(["never", "not/once", "never"], 8, 5), "b0060008" + "00111111", False),
    ("3.12.4-1", 5, p.PING * 3, "d000d000d000", False),
    ("2.1.3-1", 5, b"\xc1\0", "e00181", True),
    ("3.14.1-1", 5, b"\xe1\0", "e00181", True),
    ("3.14.1-1 3.1.1", 4, b"\xe1\0", "", True),
    ("3.14.4-2", 5, p.DISCONNECT, "", True),
    ("3.14.4-1", 5, p.DISCONNECT + p.PING, "", True),
    ("3.15.1-1", 5, b"\xf1\0", "e00181", True),
    ("4.3.2-4", 5, p.publish("a/b", b"x", 1, 9, 5), "40020009", False),
    ("4.3.3-8", 5, p.publish("a/b", b"x", 2, 9, 5), "50020009", False),
    ("4.3.3-11", 5, p.ack(6, 77), "7003004d92", False),
    ("4.3.3-11 3.1.1", 4, p.ack(6, 77), "7002004d", False),
    ("4.7.1-1", 5, p.subscribe([("a/#/b", 0)], 1, 5), "e00181", True),
    ("4.7.3-1", 5, p.publish("", level=5), "e00182", True),
    ("4.13.1-1", 5, b"\0\0", "e00181", True),
    ("1.5.7-1 name", 5, p.publish("a", b"x", 1, 1, 5, raw_props=b"\x26" + BAD + p.text("v")), "e00181", True),
    ("1.5.7-1 value", 5, p.publish("a", b"x", 1, 1, 5, raw_props=b"\x26" + p.text("n") + BAD), "e00181", True),
    ("3.2.0-2", 5, p.connect("again", 5), "e00182", True),
    ("3.2.0-2 3.1.1", 4, p.connect("again"), "", True),
    ("3.2.2-15", 5, b"\x30\xff\xff\xff\x7f", "e00195", True),
    ("3.2.2-15 3.1.1", 4, b"\x30\xff\xff\xff\x7f", "", True),
    ("3.3.2-13", 5, p.publish("a", b"x", 1, 1, 5, raw_props=b"\x08" + BAD), "e00181", True),
    ("3.3.2-14", 5, p.publish("a", b"x", 1, 1, 5, raw_props=b"\x08" + p.text("a/#")), "e00181", True),
    ("3.3.2-19", 5, p.publish("a", b"x", 1, 1, 5, raw_props=b"\x03" + BAD), "e00181", True),
    ("3.4.2-1", 5, p.ack(4, 5, 0x05), "e00181", True),
    ("3.5.2-1", 5, p.ack(5, 5, 0x05), "e00181", True),
    ("3.6.1-1", 5, b"\x60\x02\0\1", "e00181", True),
    ("3.6.1-1 3.1.1", 4, b"\x60\x02\0\1", "", True),
    ("3.6.2-1", 5, p.ack(6, 5, 0x05), "e00181", True),
    ("3.7.2-1", 5, p.ack(7, 5, 0x05), "e00181", True),
    ("3.8.3-1", 5, p.packet(0x82, b"\0\1\0", BAD, b"\0"), "e00181", True),
    ("3.10.3-1", 5, p.packet(0xA2, b"\0\1\0", BAD), "e00181", True),
    ("3.14.2-1", 5, p.packet(0xE0, b"\x05"), "e00181", True),
    ("3.15.2-1", 5, p.packet(0xF0, b"\x05\0"), "e00181", True),
    ("4.3.1-1", 5, p.subscribe([("s", 0)], 1, 5) + p.publish("s", b"y", 0, 0, 5), "90040001000030050001730079", False),
    ("4.3.2-5", 5, p.publish("a", b"x", 1, 9, 5) + p.publish("a", b"y", 1, 9, 5, dup=True), "4002000940020009", False),
    ("4.3.3-13", 5, p.publish("a", b"x", 2, 7, 5, raw_props=b"\x02\0\0\0\0"), "50020007", False),
    ("4.7.0-1", 4, p.publish("a/#", b"x", 0), "", True),
    ("4.7.3-2", 5, p.publish("a\0b", b"x", 1, 1, 5), "e00181", True),
    ("4.7.3-3", 5, p.publish("t" * 65_535, b"x", 0, 0, 5), "", False),
    ("4.7.3-3 levels", 5, p.publish("/" * 200, b"x", 1, 9, 5), "40020009", False),
    ("4.12.0-7", 5, p.packet(0xF0, b"\x18\0"), "e00182", True),
]  # fmt: skip

CONNECTING: list[tuple[str, bytes, str]] = [
    # statement, what comes first, what the client gets before the connection ends
    ("3.1.2-1", p.connect("x", 5, name="MQTX"), ""),
    ("3.1.2-2", p.packet(0x10, p.text("MQTT"), b"\x06\x02\0\x3c\0", p.text("x")), "2003008400"),
    ("3.1.2-2 3.1.1", p.packet(0x10, p.text("MQTT"), b"\x02\x02\0\x3c", p.text("x")), "20020001"),
    ("3.1.2-3", p.connect("x", 4, flags=3), ""),
    ("3.1.3-8 3.1.1", p.connect("", 4, clean=False), "20020002"),
    ("3.14.0-1", p.connect("x", 5, raw_props=b"\x21\0\0"), "2003008200"),
    ("3.1.2-9", connect_with(0x06, p.text("x")), "2003008100"),
    ("3.1.2-16", connect_with(0x02, p.text("x"), p.text("user")), "2003008100"),
    ("3.1.2-16 3.1.1", connect_with(0x02, p.text("x"), p.text("user"), level=4), ""),
    ("3.1.2-17", connect_with(0x82, p.text("x")), "2003008100"),
    ("3.1.2-18", connect_with(0x82, p.text("x"), p.text("user"), p.text("password")), "2003008100"),
    ("3.1.2-19", connect_with(0xC2, p.text("x"), p.text("user")), "2003008100"),
    ("3.1.3-3", connect_with(0x02), "2003008100"),
    ("3.1.3-4", connect_with(0x02, BAD), "2003008100"),
    ("3.1.3-4 3.1.1", connect_with(0x02, BAD, level=4), ""),
    ("3.1.3-11", connect_with(0x06, p.text("x"), b"\0", BAD, p.text("gone")), "2003008100"),
    ("3.1.3-12", connect_with(0x82, p.text("x"), BAD), "2003008100"),
]

ALIKE: list[tuple[str, str]] = [
    # filter, topic names that it does not match: names are compared byte by byte
    (COMPOSED, DECOMPOSED), ("Accounts", "ACCOUNTS"), ("/finance", "finance"), ("a/", "a"), ("a", "a "), ("a/+", "a"),
    ("sport/+", "sport/a/b"), ("+", "/a"),
]  # fmt: skip


@pytest.mark.parametrize(("statement", "level", "data", "expected", "ends"), CONNECTED, ids=[e[0] for e in CONNECTED])
async def test_statement(
    client: Make, name: str, statement: str, level: int, data: bytes, expected: str, ends: bool
) -> None:
    one = await client(level).connect(name)
    one.send(data)
    assert (await got(one, expected, ends=ends)).hex() == expected, statement


@pytest.mark.parametrize(("statement", "data", "expected"), CONNECTING, ids=[each[0] for each in CONNECTING])
async def test_statement_about_connecting(client: Make, statement: str, data: bytes, expected: str) -> None:
    one = await client().open()
    one.send(data)
    assert (await got(one, expected, ends=True)).hex() == expected, statement


async def got(one: RawClient, expected: str, *, ends: bool) -> bytes:
    """What comes. A connection that does not end answers a ping next."""
    async with asyncio.timeout(SECONDS):
        if ends:
            return await one._reader.read()
        found = await one._reader.readexactly(len(expected) // 2)
        one.send(p.PING)
        assert await one._reader.readexactly(2) == b"\xd0\0"
        return found


async def test_topic_names_are_compared_byte_by_byte(client: Make, name: str) -> None:
    """[4.7.3-4], 4.7.1."""
    one = await client(5).connect(name)
    for number, (wanted, other) in enumerate(ALIKE):
        prefix = "" if wanted.startswith(("/", "+")) else f"{name}{number}"
        await one.subscribe((f"{prefix}{wanted}", 0))
        await one.publish(f"{prefix}{other}", b"other", 0)
        if "+" not in wanted:
            await one.publish(f"{prefix}{wanted}", b"%d" % number, 0)
            assert (await one.message()).payload == b"%d" % number
    assert await one.is_silent()


STATEMENTS = """
    1.5.4:1-3 1.5.5:1-1 1.5.7:1-1 2.1.3:1-1 2.2.1:2-6 2.2.2:1-1 3.1.0:1-2 3.1.2:1-30 3.1.3:1-12 3.1.4:1-6 3.2.0:1-2
    3.2.2:1-22 3.3.1:1-13 3.3.2:1-20 3.3.4:1-10 3.4.2:1-3 3.5.2:1-3 3.6.1:1-1 3.6.2:1-3 3.7.2:1-3 3.8.1:1-1 3.8.3:1-5
    3.8.4:1-8 3.9.2:1-2 3.9.3:1-2 3.10.1:1-1 3.10.3:1-2 3.10.4:1-6 3.11.2:1-2 3.11.3:1-2 3.12.4:1-1 3.14.0:1-1
    3.14.1:1-1 3.14.2:1-4 3.14.4:1-3 3.15.1:1-1 3.15.2:1-3 4.1.0:1-2 4.2.0:1-1 4.3.1:1-1 4.3.2:1-5 4.3.3:1-13 4.4.0:1-2
    4.5.0:1-2 4.6.0:1-6 4.7.0:1-1 4.7.1:1-2 4.7.2:1-1 4.7.3:1-4 4.8.2:1-6 4.9.0:1-3 4.12.0:1-7 4.12.1:1-2 4.13.1:1-1
    4.13.2:1-1 6.0.0:1-4
"""
"""Sections of the standard, and the numbers of their statements."""
RANGE = re.compile(r"(\d+\.\d+\.\d+)-(\d+)(?: to \1-(\d+))?")


def test_every_statement_of_the_standard_is_listed_once_with_tests_that_exist() -> None:
    """And every row of this file is in the list."""
    text = (HERE.parents[1] / "docs" / "mqtt-conformance.md").read_text("utf-8")
    there = {name for path in HERE.glob("test_*.py") for name in re.findall(r"def (test_\w+)", path.read_text("utf-8"))}
    assert set(re.findall(r"test_\w+", text)) - there == set()
    listed = [
        f"{section}-{number}" for section, first, last in RANGE.findall(text.partition("## Where public suites")[0])
        for number in range(int(first), int(last or first) + 1)
    ]  # fmt: skip
    wanted = [
        f"{section}-{number}" for each in STATEMENTS.split() for section, _, numbers in [each.partition(":")]
        for number in range(int(numbers.partition("-")[0]), int(numbers.partition("-")[2]) + 1)
    ]  # fmt: skip
    assert len(wanted) == 251
    assert sorted(listed) == sorted(wanted)
    assert {row[0].split()[0] for row in (*CONNECTED, *CONNECTING)} - set(listed) == set()
