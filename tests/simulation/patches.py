"""Puts the simulation below the package: threads, sockets and ids. Nothing in the package knows of it."""

from __future__ import annotations

import random
import types
import uuid
from typing import Any

import anyio.to_thread
import redis._parsers.hiredis
import redis.connection

import rsmq.broker.connection
import rsmq.consumer.running.pool
import rsmq.heartbeat.heartbeat
import rsmq.heartbeat.presence
import rsmq.heartbeat.registration
import rsmq.model.batch_member
import rsmq.model.body
import rsmq.model.message
import rsmq.persistence.inbox_writer
import rsmq.persistence.session
import rsmq.redis.identity
import rsmq.worker.worker
from tests.simulation import threads
from tests.simulation.loop import SimulatedTask
from tests.simulation.threads import world
from tests.simulation.world import EPOCH

THREADING = types.SimpleNamespace(
    Thread=threads.Thread, Event=threads.Event, Lock=threads.Lock, Timer=threads.Timer, get_ident=threads.get_ident
)


class Numbers:
    """Ids that depend on the seed only."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def uuid7(self, *, nanoseconds: int | None = None) -> uuid.UUID:
        """A version 7 UUID of a moment, by default of the present virtual one."""
        ms = int((EPOCH + world().now) * 1000) if nanoseconds is None else nanoseconds // 1_000_000
        return uuid.UUID(
            int=ms << 80 | 7 << 76 | self._random.getrandbits(12) << 64 | 2 << 62 | self._random.getrandbits(62)
        )

    def token_hex(self, size: int) -> str:
        """As `secrets.token_hex`."""
        return self._random.randbytes(size).hex()


async def run_sync(function: Any, *args: Any, abandon_on_cancel: bool = False, **_: Any) -> Any:
    """As `anyio.to_thread.run_sync`."""
    loop = world().current.loop
    done = loop.create_future()

    def call() -> None:
        try:
            result = function(*args)
        except BaseException as error:
            if not done.done():
                loop.call_soon(lambda e=error: done.done() or done.set_exception(e))
        else:
            loop.call_soon(lambda: done.done() or done.set_result(result))

    threads.Thread(target=call).start()
    if abandon_on_cancel:
        return await done
    with anyio.CancelScope(shield=True):
        return await done


def begin(seed: int) -> None:
    """Patch the package for one run; the process ends with it."""
    numbers = Numbers(seed)
    random.seed(seed)
    for module in (rsmq.heartbeat.heartbeat, rsmq.heartbeat.presence, rsmq.heartbeat.registration):
        module.threading = THREADING  # type: ignore[attr-defined]
    rsmq.heartbeat.heartbeat.about_process = lambda app_version: {}
    rsmq.heartbeat.heartbeat.memory_bytes = lambda: None
    rsmq.consumer.running.pool.Task = SimulatedTask  # type: ignore[misc,assignment]
    rsmq.heartbeat.presence.Wakeup = threads.Wakeup  # type: ignore[misc,assignment]
    rsmq.model.message.uuid_utils = numbers  # type: ignore[assignment]
    owners = (rsmq.persistence.inbox_writer, rsmq.persistence.session, rsmq.model.body, rsmq.redis.identity)
    for owner in (*owners, rsmq.model.batch_member):
        owner.secrets = numbers  # type: ignore[attr-defined]
    for module in (rsmq.worker.worker, rsmq.broker.connection):
        module.new_member_id = lambda: str(world().current.name)  # type: ignore[attr-defined]
    anyio.to_thread.run_sync = run_sync  # type: ignore[assignment]
    redis._parsers.hiredis._socket_can_read = lambda sock, timeout: sock.can_read(timeout)
    redis._parsers.hiredis._socket_is_closed = lambda sock: sock.is_at_end
    redis.connection.UnixDomainSocketConnection._connect = lambda self: world().current.connect_thread(  # type: ignore[method-assign,assignment]
        threads.current(), self.socket_timeout
    )
