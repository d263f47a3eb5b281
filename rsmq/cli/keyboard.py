"""Keys of a terminal, one by one, without waiting for the end of a line."""

from __future__ import annotations

import asyncio
import os
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

SEQUENCES: Final = {
    "\x1b[A": "up", "\x1b[B": "down", "\x1b[5~": "page up", "\x1b[6~": "page down", "\x1b[H": "home", "\x1b[F": "end",
    "\x1bOA": "up", "\x1bOB": "down", "\r": "enter", "\n": "enter", "\x7f": "backspace", "\x08": "backspace",
    "\x03": "ctrl-c", "\x1b": "esc",
}  # fmt: skip


def keys_of(data: str) -> list[str]:
    """The keys in what a terminal has sent. A sequence that is not known is no key."""
    found = []
    while data:
        length = 1
        if data[0] == "\x1b" and len(data) > 2 and data[1] in "[O":
            length = 3
            while data[1] == "[" and length < len(data) and not "@" <= data[length - 1] <= "~":
                length += 1
        sequence, data = data[:length], data[length:]
        found.append(SEQUENCES.get(sequence, sequence if len(sequence) == 1 else ""))
    return [key for key in found if key]


@contextmanager
def keyboard(on_key: Callable[[str], None]) -> Iterator[None]:
    """Call `on_key` for each key, in the running event loop. The terminal is as before afterwards."""
    loop, number = asyncio.get_running_loop(), sys.stdin.fileno()
    before = termios.tcgetattr(number)

    def read() -> None:
        for key in keys_of(os.read(number, 1024).decode(errors="replace")):
            on_key(key)

    tty.setcbreak(number)
    changed = termios.tcgetattr(number)
    changed[3] &= ~termios.ISIG  # Ctrl-C is a key: the screen is put back before the command ends
    termios.tcsetattr(number, termios.TCSANOW, changed)
    loop.add_reader(number, read)
    try:
        yield
    finally:
        loop.remove_reader(number)
        termios.tcsetattr(number, termios.TCSADRAIN, before)
