"""Payloads on pages: JSON with a line for each value, with every character of its values as it was sent."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Final

from rsmq.dashboard.html import Html, block
from rsmq.dashboard.queries import LONGEST, as_text

OPEN: Final = {"{": "}", "[": "]"}
MOST_DEPTH: Final = 100


def payload_block(data: bytes | None) -> Html:
    """A payload as a block of text: JSON is spread over lines, everything else is as it is."""
    return block(readable(data), "payload")


def readable(data: bytes | None) -> str:
    """The text of a payload. Numbers and texts in JSON are not changed, only the space between them."""
    text = as_text(data)
    if data is None or len(data) > LONGEST or not text.lstrip().startswith(("{", "[")):
        return text
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return text
    return spread(text)


def spread(text: str) -> str:
    """JSON with a line for each value; empty objects and lists stay on theirs."""
    made, depth, tokens = list[str](), 0, list(tokens_of(text))
    for at, token in enumerate(tokens):
        after = tokens[at + 1] if at + 1 < len(tokens) else ""
        if token in OPEN:
            depth += 1
            made.append(token if after == OPEN[token] else f"{token}{line(depth)}")
        elif token in OPEN.values():
            depth -= 1
            made.append(token if tokens[at - 1] in OPEN else f"{line(depth)}{token}")
        elif token == ",":
            made.append(f",{line(depth)}")
        else:
            made.append(": " if token == ":" else token)
    return "".join(made)


def line(depth: int) -> str:
    """The begin of a line."""
    return "\n" + "  " * min(depth, MOST_DEPTH)


def tokens_of(text: str) -> Iterator[str]:
    """The parts of valid JSON: marks, texts with their quotes, and words and numbers."""
    at = 0
    while at < len(text):
        char, start = text[at], at
        at += 1
        if char == '"':
            while text[at] != '"':
                at += 2 if text[at] == "\\" else 1
            at += 1
        elif char not in "{}[],: \t\r\n":
            while at < len(text) and text[at] not in "{}[],: \t\r\n":
                at += 1
        elif char in " \t\r\n":
            continue
        yield text[start:at]
