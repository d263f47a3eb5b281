"""Slots: the hash, the key of a command, and the map."""

from __future__ import annotations

from typing import Any

import pytest

from rsmq.redis.wire.slots import SLOTS, Key, SlotMap, key_of, slot_of

A, B, C = ("a", 1), ("b", 2), ("c", 3)


@pytest.mark.parametrize(
    ("key", "slot"),
    [("foo", 12182), ("123456789", 12739), ("{foo}.x", 12182), ("x{foo}{bar}", 12182), (b"{foo}", 12182),
     ("{}foo", slot_of(b"{}foo")), ("", 0)],
)  # fmt: skip
def test_slot_of_follows_the_specification(key: Key, slot: int) -> None:
    """CRC16 of the text between the first braces, unless that is empty."""
    assert slot_of(key) == slot


def test_empty_braces_are_no_tag() -> None:
    """`{}` counts as part of the name."""
    assert slot_of("{}foo") != slot_of("{}bar")


@pytest.mark.parametrize(
    ("command", "key"),
    [
        (("GET", "k"), "k"),
        (("get", b"k"), b"k"),
        (("XREADGROUP", "GROUP", "g", "m", "COUNT", 1, "STREAMS", "k", ">"), "k"),
        (("XINFO", "STREAM", "k"), "k"),
        (("XGROUP CREATE", "k", "g", "$"), "k"),
        (("EVALSHA", "sha", 2, "k", "l", "arg"), "k"),
        (("EVAL", "return 1", 0), None),
        (("PUBSUB", "SHARDNUMSUB", "k"), "k"),
        (("PUBSUB", "NUMSUB", "k"), None),
        (("SPUBLISH", "k", ""), "k"),
        (("PUBLISH", "k", ""), None),
        (("CLIENT", "KILL", "ID", 1), None),
        (("SCRIPT LOAD", "return 1"), None),
        (("PING",), None),
        ((b"PING",), None),
    ],
)
def test_the_key_of_a_command(command: tuple[Any, ...], key: Key | None) -> None:
    """The first key of a command; None for a command that any node may answer."""
    assert key_of(command) == key


def test_a_map_without_knowledge_asks_a_seed() -> None:
    """Every key has an address."""
    slots = SlotMap([A, B])
    assert (slots.is_stale, slots.owner("foo"), slots.masters) == (True, A, [A, B])


def test_a_map_is_replaced_and_corrected() -> None:
    """The whole map first, then what a single MOVED says; a node without a name is where it was asked."""
    slots = SlotMap([A])
    slots.replace([[0, 99, [b"b", 2, b"id"]], [100, SLOTS - 1, [None, 1, b"id"], [b"r", 9, b"id"]]], asked=A)
    assert (slots.is_stale, slots.owner("foo"), slots.owner(""), slots.masters) == (False, A, B, [A, B])
    slots.learn(slot_of("foo"), C)
    assert (slots.owner("foo"), slots.owner("bar"), slots.masters) == (C, A, [A, B, C])


def test_who_is_silent_is_asked_last() -> None:
    """Until it answers again; the map is then in doubt."""
    slots = SlotMap([A, B])
    slots.replace([[0, SLOTS - 1, [b"b", 2, b"id"]]], asked=B)
    assert slots.by_reachability() == [B, A]
    slots.mark_silent(B)
    assert (slots.is_stale, slots.by_reachability(), slots.is_silent(B)) == (True, [A, B], True)
    slots.replace([[0, SLOTS - 1, [b"b", 2, b"id"]]], asked=B)
    assert (slots.is_stale, slots.any_master(), slots.is_silent(B)) == (False, B, False)
