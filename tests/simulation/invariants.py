"""What must hold after every command and at every start of a handler, whatever the members believe."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from rsmq.gateway.fleet.scripts import ACK_CLIENTS, BEGIN_MQTT_SESSION
from rsmq.redis import scripts
from rsmq.redis.scripts import NO_SESSION, OK, STALE_EPOCH

FENCED: Final = {
    script.name: lease
    for lease, owned in (
        (0, (scripts.RENEW_LEASE, scripts.RELEASE_LEASE, scripts.KEEP_WAITS)),
        (1, (scripts.START_MESSAGE, scripts.PARK_MESSAGE, scripts.UNPARK_MESSAGES, scripts.CLAIM_PENDING)),
        (1, (scripts.SETTLE_OUTPUTS, scripts.BURY_MESSAGE, scripts.HAND_BACK, scripts.RESTORE_PENDING)),
        (1, (scripts.PUT_ASIDE, scripts.READ_AGAIN, scripts.START_CALL, scripts.KEEP_NOTE, scripts.SETTLE_CANCELLED)),
    )
    for script in owned
}
"""Scripts that an owner runs: which of their keys is the lease. Owner and epoch are the first arguments."""
REFUSED: Final = {STALE_EPOCH, NO_SESSION}
Ask = Callable[..., Any]
NUMBER: Final = re.compile(rb"\d+")


SESSIONS: Final = {script.name for script in (scripts.ACK_LETTERS, scripts.PAGE_LETTERS, scripts.RECEIVE_LETTERS)}
"""Scripts that a session runs: its state is the second key, its epoch the first argument."""


OF_LANES: Final = {scripts.SETTLE_MESSAGES.name: 3, scripts.SETTLE_MEMBERS.name: 4}
"""Scripts that settle messages of several partitions and answer for each: how many numbers stand before its ids."""
ENDING: Final = {scripts.SETTLE_CANCELLED.name, scripts.BURY_MESSAGE.name}
"""Scripts that end one message."""
STARTING: Final = {scripts.START_CALL.name, scripts.READ_AGAIN.name}
"""Scripts that end what may not start any more, and say which messages these are."""
ENDED: Final = {b"CANCELLED", b"LOST", b"TRIMMED"}
SETTLING: Final = {*OF_LANES, scripts.SETTLE_OUTPUTS.name, *ENDING, *STARTING}
"""All scripts that end messages of their owner. `put_aside` and the take-over end only what was deleted."""


def parts(command: Sequence[bytes]) -> tuple[Sequence[bytes], Sequence[bytes]]:
    """The keys and the arguments of a script."""
    count = int(command[2]) if len(command) > 2 and command[2].isdigit() else 0
    return command[3 : 3 + count], command[3 + count :]


def fences(command: Sequence[bytes], name: str) -> Iterator[tuple[bytes, list[bytes]]]:
    """The record that a command relies on, and the owner and epoch (of a session: the epoch) that it says are there."""
    keys, args = parts(command)
    if name in OF_LANES:
        at, numbers = 2, OF_LANES[name]
        for lease in keys[1::3]:
            yield lease, [args[0], args[at]]
            at += numbers + sum(map(int, args[at + 1 : at + numbers]))
    elif name in FENCED:
        yield keys[FENCED[name]], [args[0], args[1]]
    elif name in SESSIONS:
        yield keys[1], [args[0]]
    elif name == ACK_CLIENTS.name:
        for session, epoch in zip(keys[1::3], texts(args[0])[::3], strict=True):
            yield session, [epoch]
    elif name == BEGIN_MQTT_SESSION.name:
        yield keys[0], [args[0]]


def texts(packed: bytes) -> list[bytes]:
    """The texts of an array of MessagePack, each with a length of four bytes."""
    found, at = list[bytes](), 5
    while at < len(packed):
        start = at + 5
        at = start + int.from_bytes(packed[at + 1 : start], "big")
        found.append(packed[start:at])
    return found


def settled_by(command: Sequence[bytes], name: str) -> Iterator[tuple[str, list[bytes]]]:
    """The streams, and the ids in each, that a call names which settles messages."""
    keys, args = parts(command)
    if name in OF_LANES:
        at, numbers = 2, OF_LANES[name]
        for stream in keys[::3]:
            first = at + numbers
            yield stream.decode(), list(args[first : first + int(args[at + 1])])
            at = first + sum(map(int, args[at + 1 : first]))
    elif name == scripts.SETTLE_OUTPUTS.name:
        at, ids = 7, list[bytes]()
        while at < len(args):
            ids.append(args[at])
            count = int(NUMBER.match(args[at + 1])[0])  # type: ignore[index]
            at += 2
            for _ in range(count):
                at += 3 + int(args[at + 2])
        yield keys[0].decode(), ids
    elif name in ENDING:
        yield keys[0].decode(), [args[3]]
    elif name in STARTING:
        yield keys[0].decode(), []


def has_settled(name: str, ids: Sequence[bytes], reply: Any) -> Iterator[Sequence[bytes]]:
    """Those of the `ids` of one stream that are settled by now, as its answer says."""
    if reply[0] != OK:
        return
    if name in OF_LANES and reply[1] == len(ids):
        yield ids
    elif name == scripts.SETTLE_OUTPUTS.name and reply[1] == reply[2]:
        yield ids[: reply[1]]
    elif name in ENDING:
        yield ids
    elif name in STARTING:
        yield [row[0] for row in reply[1:] if len(row) == 2 and isinstance(row[1], bytes) and row[1] in ENDED]


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
        self._settling = [list(settled_by(command, name)) for command, name in zip(commands, names, strict=True)]
        self._stale = [
            [self._is_stale(record, expected) for record, expected in fences(command, name)]
            for command, name in zip(commands, names, strict=True)
        ]

    def _is_stale(self, record: bytes, expected: list[bytes]) -> bool:
        fields = ("owner", "epoch")[-len(expected) :]
        return bool(expected[-1]) and self._ask("HMGET", record, *fields) != expected

    def after(self, replies: Sequence[Any]) -> None:
        """Compare with what the server has answered."""
        for name, settling, reply in zip(self._names, self._settling, replies, strict=False):
            if settling and isinstance(reply, list):
                for (stream, ids), answer in zip(settling, reply if name in OF_LANES else [reply], strict=True):
                    for settled in has_settled(name, ids, answer):
                        self.settled |= {(stream, each.decode()) for each in settled}
        for name, stale, reply in zip(self._names, self._stale, replies, strict=False):
            if not any(stale) or isinstance(reply, Exception):
                continue
            answers = reply if name in OF_LANES or name == ACK_CLIENTS.name else [reply]
            words = [answer if isinstance(answer, bytes) else answer[0] for answer in answers]
            if any(is_stale and word not in REFUSED for is_stale, word in zip(stale, words, strict=True)):
                self.violate(f"{name} of a member without the lease was accepted")
