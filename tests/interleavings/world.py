"""What a state of the search is: values that never change, so equal states are found to be equal."""

from __future__ import annotations

from typing import Final, NamedTuple

READY: Final = "ready"
GATHERED: Final = "gathered"
"""In a batch that waits until others of it are charged."""
STARTING: Final = "starting"
RUNNING: Final = "running"
PARKING: Final = "parking"
PARKED: Final = "parked"
BURYING: Final = "burying"
HANDLED: Final = "handled"
"""In a batch of which another message is being parked or buried."""
DONE: Final = "done"
SETTLING: Final = "settling"
AWAY: Final = "away"
"""Only its id is kept."""


class Command(NamedTuple):
    """A command that is on its way to the server. `grant`: under which it was sent.

    `role` is the connection of the member that has sent it: one command at a time. `known`: for a claim, the messages
    that were in flight when it was sent. `retried`: for a settlement, what has started again, and after how many
    attempts.
    """

    kind: str
    role: str
    member: str
    grant: int = 0
    epoch: str = ""
    args: tuple = ()
    known: frozenset[int] = frozenset()
    retried: tuple[tuple[int, int], ...] = ()


class Item(NamedTuple):
    """A message that a member has.

    `is_again`: redelivered. `reason`: why it is being buried. `is_unsure`: a call for it may have been executed.
    `flow`: the name whose turn it waits for, if only its id is kept; empty: it waits behind its key.
    """

    number: int
    attempt: int
    phase: str = READY
    is_again: bool = False
    reason: str = ""
    is_unsure: bool = False
    flow: str = ""


class Lane(NamedTuple):
    """What a member believes about its partition, as in `rsmq.consumer.waiting.lane`.

    `leaving`: how far a handover is (1 waits for the read, 2 for the hand-back, 3 for what runs). `deferred`: messages
    that were brought back before the reply to their parking has come. Of what waits as an id, `aside` is to be told to
    the server, `kept` is the last that is no first delivery, `asked` are those of the last call for bodies; `calls`
    counts the calls, and those up to `answered` are over. `undelivered` are in memory, and the server has lost that it
    delivered them.
    """

    grant: int
    epoch: str
    is_held: bool
    cursor: int | None = 0
    newest: int | None = None
    is_restarted: bool = False
    items: tuple[Item, ...] = ()
    deferred: tuple = ()
    is_missing_retries: bool = False
    leaving: int = 0
    aside: tuple[int, ...] = ()
    kept: int = 0
    calls: int = 0
    answered: int = 0
    asked: tuple[int, ...] = ()
    undelivered: frozenset[int] = frozenset()


class Opening(NamedTuple):
    """A lease that was granted, while the readers before it are not cut off yet."""

    grant: int
    epoch: str
    is_held: bool
    readers: tuple[str, ...]


class Member(NamedTuple):
    """`connection` counts its reading connections; a role in `broken` has lost its connection.

    `is_read_late`: a read may be on its way on the connection that was lost. `lanes` counts those that it has opened
    under shared distribution.
    """

    name: str
    is_alive: bool = True
    connection: int = 1
    opening: Opening | None = None
    lane: Lane | None = None
    on_way: tuple[Command, ...] = ()
    broken: frozenset[str] = frozenset()
    is_read_late: bool = False
    lanes: int = 0

    @property
    def reader(self) -> str:
        """The name of its reading connection, as the lease stores it."""
        return f"{self.name[1:]}{self.connection} {self.name}"

    def is_free(self, role: str) -> bool:
        """Whether a command may be sent in this role."""
        return role not in self.broken and all(command.role != role for command in self.on_way)


class Server(NamedTuple):
    """The keys of the partition, without what no script looks at.

    `pending`: number, consumer, deliveries, and whether it was not touched for a lease. `call`: the last numbered call
    of an owner. `stored`: the entries of the stream.
    """

    owner: str = ""
    epoch: str = ""
    is_over: bool = True
    reader: str = ""
    before: tuple[str, ...] = ()
    delivered: int = 0
    pending: tuple[tuple[int, str, int, bool], ...] = ()
    parked: tuple[tuple[int, int, bool], ...] = ()
    dead: tuple[tuple[int, str], ...] = ()
    outputs: tuple[int, ...] = ()
    call: str = ""
    stored: tuple[int, ...] = ()


class Left(NamedTuple):
    """How often each fault may still happen."""

    crashes: int = 0
    lost: int = 0
    pauses: int = 0
    failures: int = 0
    handovers: int = 0
    renewals: int = 0
    stops: int = 0
    losses: int = 0
    refusals: int = 0
    deletions: int = 0
    unconsumed: int = 0
    failovers: int = 0


class Truth(NamedTuple):
    """What no member knows: who really has the lease, by which grant; which messages were handled and acknowledged.

    `retried`: each message that was parked, and after how many attempts. Where ids are kept: `starts`, how often each
    has started, and which ones the server may count as started without it, because their member was lost (`exposed`).
    `replica`: what a failover goes back to.
    """

    grants: int = 0
    holder: tuple[str, int] = ("", 0)
    handled: frozenset[int] = frozenset()
    settled: frozenset[int] = frozenset()
    retried: frozenset[tuple[int, int]] = frozenset()
    starts: tuple[int, ...] = ()
    exposed: frozenset[int] = frozenset()
    replica: Server | None = None


class World(NamedTuple):
    """One state. `late`: commands whose sender waits for no reply any more."""

    server: Server
    members: tuple[Member, ...]
    late: frozenset[Command]
    left: Left
    truth: Truth
