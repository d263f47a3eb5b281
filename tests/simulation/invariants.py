"""What must hold after every command and at every start of a handler, whatever the members believe."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from rsmq.redis import scripts
from rsmq.redis.scripts import NO_SESSION, OK, STALE_EPOCH

FENCED: Final = {
    script.name: lease
    for lease, owned in (
        (0, (scripts.RENEW_LEASE, scripts.RELEASE_LEASE, scripts.KEEP_WAITS)),
        (1, (scripts.START_MESSAGE, scripts.PARK_MESSAGE, scripts.UNPARK_MESSAGES, scripts.CLAIM_PENDING)),
        (1, (scripts.SETTLE_OUTPUTS, scripts.BURY_MESSAGE, scripts.HAND_BACK, scripts.RESTORE_PENDING)),
        (1, (scripts.PUT_ASIDE, scripts.READ_AGAIN, scripts.START_CALL, scripts.KEEP_NOTE)),
    )
    for script in owned
}
"""Scripts that an owner runs: which of their keys is the lease. Owner and epoch are the first arguments."""
REFUSED: Final = {STALE_EPOCH, NO_SESSION}
Ask = Callable[..., Any]


SESSIONS: Final = {script.name for script in (scripts.ACK_LETTERS, scripts.PAGE_LETTERS, scripts.RECEIVE_LETTERS)}
"""Scripts that a session runs: its state is the second key, its epoch the first argument."""


def fences(command: Sequence[bytes], name: str) -> Iterator[tuple[bytes, list[bytes]]]:
    """The record that a command relies on, and the owner and epoch (of a session: the epoch) that it says are there."""
    count = int(command[2]) if len(command) > 2 and command[2].isdigit() else 0
    keys, args = command[3 : 3 + count], command[3 + count :]
    if name == scripts.SETTLE_MESSAGES.name:
        at = 2
        for lease in keys[1::3]:
            yield lease, [args[0], args[at]]
            at += 3 + int(args[at + 1]) + int(args[at + 2])
    elif name in FENCED:
        yield keys[FENCED[name]], [args[0], args[1]]
    elif name in SESSIONS:
        yield keys[1], [args[0]]


def settled_by(command: Sequence[bytes]) -> Iterator[tuple[str, list[bytes]]]:
    """The streams, and the ids in each, that a call of settle_messages names."""
    count = int(command[2])
    keys, args, at = command[3 : 3 + count], command[3 + count :], 2
    for stream in keys[::3]:
        size = int(args[at + 1])
        yield stream.decode(), list(args[at + 3 : at + 3 + size])
        at += 3 + size + int(args[at + 2])


class Fences:
    """A command of a member that is not the owner (any more) is refused."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self.violate: Callable[[str], None] = lambda _: None
        self._stale: list[list[bool]] = []
        self._names: list[str] = []
        self._settling: list[list[tuple[str, list[bytes]]]] = []
        self.settled = set[tuple[str, str]]()
        """Stream and id of each message that an owner has settled, in a call that settled all that it names."""

    def before(self, commands: Sequence[Sequence[bytes]], names: Sequence[str]) -> None:
        """What must be refused."""
        self._names = list(names)
        self._settling = [
            list(settled_by(command)) if name == scripts.SETTLE_MESSAGES.name else []
            for command, name in zip(commands, names, strict=True)
        ]
        self._stale = [
            [self._is_stale(record, expected) for record, expected in fences(command, name)]
            for command, name in zip(commands, names, strict=True)
        ]

    def _is_stale(self, record: bytes, expected: list[bytes]) -> bool:
        fields = ("owner", "epoch")[-len(expected) :]
        return bool(expected[-1]) and self._ask("HMGET", record, *fields) != expected

    def after(self, replies: Sequence[Any]) -> None:
        """Compare with what the server has answered."""
        for settling, reply in zip(self._settling, replies, strict=False):
            answers = reply if settling and isinstance(reply, list) else ()
            for (stream, ids), answer in zip(settling, answers, strict=False):
                if answer[0] == OK and answer[1] == len(ids):
                    self.settled |= {(stream, each.decode()) for each in ids}
        for name, stale, reply in zip(self._names, self._stale, replies, strict=False):
            if not any(stale) or isinstance(reply, Exception):
                continue
            answers = reply if name == scripts.SETTLE_MESSAGES.name else [reply]
            words = [answer if isinstance(answer, bytes) else answer[0] for answer in answers]
            if any(is_stale and word not in REFUSED for is_stale, word in zip(stale, words, strict=True)):
                self.violate(f"{name} of a member without the lease was accepted")
