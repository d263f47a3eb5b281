"""Encoded messages: compressed and encrypted, or with bodies in a store that is slow, goes away, and is swept."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, TypeVar

import anyio

from rsmq import Broker, Message
from rsmq.codecs import Encrypt, Keyring, Zstd
from rsmq.control import Bodies
from rsmq.errors import BodyUnavailable, LostBody, RsmqError, StoreUnavailable
from rsmq.model.encoding import ENC, Binding, Encoding, binding_of
from rsmq.model.kept_result import KeptResult, result_binding
from rsmq.model.message import stored_entry
from tests.simulation.plan import GROUP

if TYPE_CHECKING:
    from tests.simulation.run import Run

T = TypeVar("T")

KEEP: Final = timedelta(seconds=8)
"""Longer than a publish is tried: see `Run.settings`."""
GRACE: Final = timedelta(seconds=3)
"""Longer than what a failover loses."""
TRIED: Final = timedelta(seconds=4)


class SimulatedStore:
    """The store of all processes of a run. No failover takes back what it has done."""

    above = 0
    largest = 1 << 20
    keep = KEEP

    def __init__(self, run: Run) -> None:
        self._run = run
        self._bodies: dict[str, tuple[float, bytes]] = {}
        self._deleted: dict[str, bytes] = {}
        self._calls = 0

    async def put(self, name: str, data: bytes) -> None:
        await self._reach("put", StoreUnavailable("the store is away"))
        self._bodies[name] = (self._run.world.now, data)

    async def fetch(self, name: str) -> bytes:
        await self._reach("fetch", BodyUnavailable("the store", "it is away"))
        return self.read(name)

    def read(self, name: str) -> bytes:
        if name not in self._bodies:
            raise LostBody(f"{name} is lost")
        return self._bodies[name][1]

    def recall(self, name: str) -> bytes:
        """A body that is there, or was."""
        return self._deleted[name] if name in self._deleted else self.read(name)

    async def delete(self, name: str) -> None:
        await self._reach("delete", StoreUnavailable("the store is away"))
        if name in self._bodies:
            self._deleted[name] = self._bodies.pop(name)[1]

    async def survey(self, folder: str, take: Callable[[Iterator[tuple[str, float, int]]], T]) -> T:
        await self._reach("list", StoreUnavailable("the store is away"))
        return take(iter([(name, at, len(data)) for name, (at, data) in self._bodies.items()]))

    async def _reach(self, what: str, error: RsmqError) -> None:
        """A call takes a while, sometimes as long as a lease; for two spans of the run the store does not answer."""
        self._calls += 1
        choices, plan, now = self._run.world.choices, self._run.plan, self._run.world.now
        is_slow = choices.unit(f"slow store {self._calls}") < 0.05
        await anyio.sleep(choices.between(0.0, 4.0 if is_slow else 0.02, f"store {what} {self._calls}"))
        for number in range(2):
            begin = choices.between(0, plan.seconds, f"store is away {number}")
            if begin <= now < begin + choices.between(0.1, 2.0, f"store is away for {number}"):
                raise error


class Encoded:
    """What a plan with `encoded` needs: `sealed` or `stored`."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._store = SimulatedStore(run)
        self.encoding = Encoding([Zstd(above=0), Encrypt(Keyring({"k1": b"1" * 32, "k2": b"2" * 32}))])

    def broker(self, number: int = 0) -> Broker:
        """A broker with these settings. The publisher writes with the older key, members may write with the newer."""
        settings, kind = self._run.settings(number), self._run.plan.encoded
        if not kind:
            return Broker(settings)
        names = ("k1", "k2") if number % 2 else ("k2", "k1")
        keyring = Keyring({name: {"k1": b"1" * 32, "k2": b"2" * 32}[name] for name in names})
        return Broker(
            settings,
            codecs=[Zstd(above=0), Encrypt(keyring)],
            offload=self._store if kind == "stored" else None,
        )

    async def sweep(self) -> None:
        """Sweep again and again, with times as short as those of the run."""
        async with Broker(self._run.settings()) as broker:
            while True:
                bodies = Bodies(broker.client, broker.keys, broker.topics, self._store, grace=GRACE)
                try:
                    done = await bodies.sweep()
                except RsmqError as error:
                    self._run.world.note(f"   the sweep failed: {error!r}")
                else:
                    self._run.world.note(f"   swept: {sum(each.removed for each in done)}")
                await anyio.sleep(0.7)

    def order_of(self, message: Message) -> Any:
        """The payload of a message that a member has, also before it is decoded.

        A member that was paused may have one that others have settled meanwhile, and whose body is swept.
        """
        if message.is_plain or not message.is_encoded:
            return json.loads(message.data)
        flat = stored_entry(message)
        return self._decoded(dict(zip(flat[::2], flat[1::2], strict=True)), self._store.recall)

    def result(self, kept: KeptResult, message_id: str) -> Any:
        """What the handler of a message has returned."""
        if not kept.enc:
            return json.loads(kept.data or b"null")
        identity = result_binding(GROUP, message_id).encode()
        return json.loads(self.encoding.undo(kept.data, Binding(identity, None, kept.type.encode(), kept.enc.encode())))

    def order(self, fields: Mapping[bytes, bytes]) -> Any:
        """The payload of an entry that is stored. Its body must be there."""
        try:
            return self._decoded(fields, self._store.read)
        except LostBody as error:
            self._run.violate(f"an entry names a body that is lost: {error}")
            return {"key": "lost", "n": 0}

    def _decoded(self, fields: Mapping[bytes, bytes], body_of: Callable[[str], bytes]) -> Any:
        data = fields.get(b"data", b'{"key": "lost", "n": 0}')
        if ENC in fields:
            body = body_of(fields[b"ref"].decode()) if b"ref" in fields else None
            data = self.encoding.undo(data, binding_of(fields, body))
        return json.loads(data)
