"""What must hold after every command and at every start of a handler, whatever the members believe."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from rsmq.redis import scripts
from rsmq.redis.scripts import STALE_EPOCH

FENCED: Final = (
    scripts.START_MESSAGE, scripts.PARK_MESSAGE, scripts.UNPARK_MESSAGES, scripts.CLAIM_PENDING, scripts.BURY_MESSAGE,
    scripts.HAND_BACK,
)  # fmt: skip
"""Scripts of one partition that an owner runs: the lease is the second key, owner and epoch are the first arguments."""
Ask = Callable[..., Any]


def fences(command: Sequence[bytes], name: str) -> Iterator[tuple[bytes, bytes, bytes]]:
    """Lease, owner and epoch that a command claims to have; nothing for one without a lease."""
    count = int(command[2]) if len(command) > 2 and command[2].isdigit() else 0
    keys, args = command[3 : 3 + count], command[3 + count :]
    if name == scripts.SETTLE_MESSAGES.name:
        at = 2
        for lease in keys[1::2]:
            yield lease, args[0], args[at]
            at += 2 + int(args[at + 1])
    elif name in {script.name for script in FENCED}:
        yield keys[1], args[0], args[1]


class Fences:
    """A command of a member that is not the owner (any more) is refused."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self.violations: list[str] = []
        self._stale: list[list[bool]] = []
        self._names: list[str] = []

    def before(self, commands: Sequence[Sequence[bytes]], names: Sequence[str]) -> None:
        """What must be refused."""
        self._names = list(names)
        self._stale = [
            [
                bool(epoch) and self._ask("HMGET", lease, "owner", "epoch") != [owner, epoch]
                for lease, owner, epoch in claims
            ]
            for claims in (list(fences(command, name)) for command, name in zip(commands, names, strict=True))
        ]

    def after(self, replies: Sequence[Any]) -> None:
        """Compare with what the server has answered."""
        for name, stale, reply in zip(self._names, self._stale, replies, strict=False):
            if not any(stale) or isinstance(reply, Exception):
                continue
            answers = reply if name == scripts.SETTLE_MESSAGES.name else [reply]
            if any(is_stale and answer[0] != STALE_EPOCH for is_stale, answer in zip(stale, answers, strict=True)):
                self.violations.append(f"{name} of a member without the lease was accepted")
