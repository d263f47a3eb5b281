"""Which message starts next, for a handler with tenants: deficit round robin over what is ready. No I/O."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain

from rsmq.consumer.waiting.named_flows import FlowName
from rsmq.model.message import Message


class Turn:
    """What one tenant has ready, by the name of the rate that it needs; the names take turns, too.

    A name is closed while as many of its messages wait for that rate as the tenant has weight: more of them would only
    take memory. So the starts of a rate that is used up are shared by weight as well.
    """

    __slots__ = ("closed", "credit", "held", "names", "ready", "servable", "tenant", "weight")

    def __init__(self, tenant: str | None, weight: float) -> None:
        self.tenant = tenant
        self.weight = weight
        self.credit = 0.0
        self.ready: dict[str | None, deque[Message]] = {}
        self.names: deque[str | None] = deque()  # those that are not closed and have something
        self.servable = 0
        self.held = Counter[str | None]()
        self.closed: set[str | None] = set()

    @property
    def is_over(self) -> bool:
        """Whether nothing of it is left."""
        return not self.ready and not self.held


class Turns:
    """The ready messages of a handler with tenants. To the queue it looks like a deque.

    A tenant's turn is as many messages as its weight, then the next one's begins. One that has nothing ready takes no
    turn, and saves none up. What comes to the front, because its rate has room again, starts before all others, and
    counts for its tenant. `len` counts what may start; the iterator also goes over what is closed.
    """

    def __init__(self, flow_of: Callable[[Message], FlowName], weight_of: Callable[[str | None], float]) -> None:
        self._flow_of = flow_of
        self._weight_of = weight_of
        self._tenants: dict[str | None, Turn] = {}
        self._ring: deque[Turn] = deque()
        self._front: deque[Message] = deque()
        self._servable = 0
        self._of: dict[Message, FlowName] = {}  # asked once: the function is a user's
        self._last: tuple[Message, FlowName] | None = None

    def __len__(self) -> int:
        return self._servable + len(self._front)

    def __iter__(self) -> Iterator[Message]:
        queues = [queue for turn in list(self._tenants.values()) for queue in list(turn.ready.values())]
        return chain(list(self._front), *[list(queue) for queue in queues])

    def __getitem__(self, _first: int) -> Message:
        return next(iter(self))

    # -- in and out -------------------------------------------------------------------------------------------------

    def append(self, message: Message) -> None:
        """It is ready, behind what its tenant has."""
        tenant, name = self._of[message] = self._flow_of(message)
        turn = self._turn(tenant)
        queue = turn.ready.get(name)
        if queue is None:
            queue = turn.ready[name] = deque()
        queue.append(message)
        if name not in turn.closed:
            if len(queue) == 1:
                turn.names.append(name)
            self._count(turn, 1)

    def extend(self, messages: Iterable[Message]) -> None:
        """The same for each."""
        for message in messages:
            self.append(message)

    def appendleft(self, message: Message) -> None:
        """It starts before all others."""
        self._of[message] = self._flow_of(message)
        self._front.appendleft(message)

    def popleft(self) -> Message:
        """The next one to start."""
        if self._front:
            message = self._front.popleft()
            self._last = message, self._of.pop(message)
            if (counted := self._tenants.get(self._last[1][0])) is not None:
                counted.credit -= 1
            return message
        ring = self._ring
        turn = ring[0]
        while turn.credit < 1:
            turn.credit += turn.weight
            if turn.credit < 1:
                ring.rotate(-1)
                turn = ring[0]
        turn.credit -= 1
        message = self._serve(turn)
        self._last = message, self._of.pop(message)
        if turn.servable and turn.credit < 1:
            ring.rotate(-1)
        return message

    def _serve(self, turn: Turn) -> Message:
        name = turn.names[0]
        queue = turn.ready[name]
        message = queue.popleft()
        if not queue:
            del turn.ready[name]
            turn.names.popleft()
        elif len(turn.names) > 1:
            turn.names.rotate(-1)
        self._count(turn, -1)
        self._forget(turn)
        return message

    def remove(self, message: Message) -> None:
        """It does not start. Raises ValueError if it is not there."""
        flow = self._of.pop(message, None)
        if flow is None:
            raise ValueError(message)
        if message in self._front:
            self._front.remove(message)
            return
        tenant, name = flow
        turn = self._tenants[tenant]
        queue = turn.ready[name]
        queue.remove(message)
        if not queue:
            del turn.ready[name]
        if name not in turn.closed:
            if not queue:
                turn.names.remove(name)
            self._count(turn, -1)
        self._forget(turn)

    def clear(self) -> None:
        """Nothing is ready. What waits for a rate is still counted."""
        for message in self:
            del self._of[message]
        self._front.clear()
        self._ring.clear()
        self._servable = 0
        for turn in list(self._tenants.values()):
            turn.ready.clear()
            turn.names.clear()
            turn.servable = 0
            turn.credit = min(0.0, turn.credit)
            self._forget(turn)

    # -- rates ------------------------------------------------------------------------------------------------------

    def hold(self, message: Message) -> None:
        """It was taken, and waits for its rate: that was no start of its tenant."""
        is_last = self._last is not None and self._last[0] is message
        tenant, name = self._of[message] = self._last[1] if is_last and self._last else self._flow_of(message)
        turn = self._turn(tenant)
        turn.credit += 1
        turn.held[name] += 1
        if turn.held[name] >= turn.weight and name not in turn.closed:
            turn.closed.add(name)
            if name in turn.ready:
                turn.names.remove(name)
                self._count(turn, -len(turn.ready[name]))

    def let_go(self, message: Message) -> None:
        """It waits no more."""
        tenant, name = self._of.pop(message)
        turn = self._turn(tenant)
        turn.held[name] -= 1
        if not turn.held[name]:
            del turn.held[name]
        if name in turn.closed and turn.held[name] < turn.weight:
            turn.closed.remove(name)
            if name in turn.ready:
                turn.names.append(name)
                self._count(turn, len(turn.ready[name]))
        self._forget(turn)

    def is_closed(self, flow: FlowName) -> bool:
        """Whether what this flow has waits for a rate. May be called from any thread."""
        turn = self._tenants.get(flow[0])
        return turn is not None and flow[1] in turn.closed

    def waiting(self) -> dict[FlowName, int]:
        """How many messages of each flow are here and may not start. May be called from any thread."""
        return {
            (turn.tenant, name): len(queue)
            for turn in list(self._tenants.values())
            for name, queue in list(turn.ready.items())
            if name in turn.closed
        }

    def ready(self) -> Counter[str | None]:
        """How many messages each tenant has here, also taken ones that wait for their rate. May be called from any
        thread."""
        found = Counter[str | None]()
        for turn in list(self._tenants.values()):
            held = sum(list(turn.held.values()))
            found[turn.tenant] = held + sum(len(queue) for queue in list(turn.ready.values()))
        return found

    # -- turns ------------------------------------------------------------------------------------------------------

    def _turn(self, tenant: str | None) -> Turn:
        turn = self._tenants.get(tenant)
        if turn is None:
            turn = self._tenants[tenant] = Turn(tenant, self._weight_of(tenant))
        return turn

    def _count(self, turn: Turn, change: int) -> None:
        """So many more of a tenant may start."""
        if not turn.servable and change:
            self._ring.append(turn)
        turn.servable += change
        self._servable += change
        if not turn.servable and change:
            turn.credit = min(0.0, turn.credit)
            self._ring.remove(turn)

    def _forget(self, turn: Turn) -> None:
        if turn.is_over:
            self._tenants.pop(turn.tenant, None)

    def __repr__(self) -> str:
        return f"<Turns {self._servable} of {len(self._ring)} tenants>"
