"""A terminal for a test: what a command shows on stderr where that is a terminal."""

from __future__ import annotations

import os
import pty
import threading
from types import TracebackType
from typing import Final, Self, TextIO

from tests.servers import wait_until

MARK: Final = "\x1e"
"""A character that no command prints: what stands before it has been read."""


class Terminal:
    """`with Terminal() as terminal:` and `terminal.file` instead of stderr."""

    def __init__(self) -> None:
        self._master, slave = pty.openpty()
        self.file: TextIO = os.fdopen(slave, "w", encoding="utf-8")
        self._text = ""
        self._reader = threading.Thread(target=self._read, name="terminal", daemon=True)

    def shown(self) -> str:
        """What has been written since this was last asked."""
        self.file.write(MARK)
        self.file.flush()
        wait_until(lambda: MARK in self._text, "the terminal has been read")
        shown, _, self._text = self._text.partition(MARK)
        return shown

    def _read(self) -> None:
        """Read what is written: a writer blocks when the buffer of a terminal is full."""
        while True:
            try:
                data = os.read(self._master, 1 << 16)
            except OSError:  # the other side is closed
                return
            self._text += data.decode(errors="replace")

    def __enter__(self) -> Self:
        self._reader.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.file.close()
        self._reader.join()
        os.close(self._master)
