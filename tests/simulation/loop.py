"""An event loop on virtual time: it runs what is ready when it is asked to, and never waits."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from tests.simulation.world import World

INFINITY: Final = float("inf")


class EndlessError(Exception):
    """The loop of a process runs without end, and without waiting for anything."""


class SimulatedTask(asyncio.Task[Any]):
    """A task whose hash is its number: a set of tasks is then iterated in the same order in every run."""

    _numbers = itertools.count(1)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._number = next(self._numbers)
        super().__init__(*args, **kwargs)

    def __hash__(self) -> int:
        return self._number

    def __eq__(self, other: object) -> bool:
        return self is other


class SimulatedLoop(asyncio.BaseEventLoop):
    """The loop of one process. `connect` opens its connections."""

    def __init__(self, world: World, connect: Callable[[Any], Any]) -> None:
        super().__init__()
        self._world, self._connect = world, connect
        self._thread_id = threading.get_ident()
        self.set_task_factory(lambda loop, coroutine, **options: SimulatedTask(coroutine, loop=loop, **options))
        self.failures: list[dict[str, Any]] = []
        self.set_exception_handler(lambda _, context: self.failures.append(context))

    def time(self) -> float:
        return self._world.now

    @property
    def calls(self) -> deque[asyncio.Handle]:
        """Those that wait for their turn; always the same queue."""
        return self._ready  # type: ignore[attr-defined,no-any-return]

    @property
    def next_timer(self) -> float:
        """When the next timer is due."""
        while self._scheduled and self._scheduled[0]._cancelled:
            heapq.heappop(self._scheduled)._scheduled = False
        return self._scheduled[0]._when if self._scheduled else INFINITY  # type: ignore[no-any-return]

    def run_ready(self) -> None:
        """Run everything that is ready now, and what becomes ready by that."""
        asyncio._set_running_loop(self)
        ready, scheduled, now = self._ready, self._scheduled, self._world.now
        try:
            for _ in range(100_000):
                while scheduled and (scheduled[0]._when <= now or scheduled[0]._cancelled):
                    handle = heapq.heappop(scheduled)
                    handle._scheduled = False
                    if not handle._cancelled:
                        ready.append(handle)
                if not ready:
                    return
                handle = ready.popleft()
                if not handle._cancelled:
                    handle._run()
            raise EndlessError
        finally:
            asyncio._set_running_loop(None)

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    def _write_to_self(self) -> None:
        pass

    def _process_events(self, event_list: Any) -> None:
        pass

    async def create_unix_connection(self, protocol_factory: Any, path: Any = None, **_: Any) -> Any:
        protocol = protocol_factory()
        transport = await self._connect(protocol)
        return transport, protocol


class SimulatedTransport(asyncio.Transport):
    """Hands what is written to the network, and what arrives to the protocol."""

    def __init__(self, loop: SimulatedLoop, protocol: Any, connection: Any) -> None:
        super().__init__()
        self._loop, self._protocol, self._connection = loop, protocol, connection
        self._is_closing = False

    def arrived(self, data: bytes) -> None:
        """Bytes, or b"" for the end of the connection."""
        if self._is_closing:
            return
        if data:
            self._loop.call_soon(self._protocol.data_received, data)
        else:
            self._is_closing = True
            self._loop.call_soon(self._protocol.eof_received)
            self._loop.call_soon(self._protocol.connection_lost, None)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self._is_closing:
            self._connection.send(bytes(data))

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            self._connection.close()
            self._loop.call_soon(self._protocol.connection_lost, None)

    abort = close

    def is_closing(self) -> bool:
        return self._is_closing

    def get_protocol(self) -> Any:
        return self._protocol

    def set_protocol(self, protocol: Any) -> None:
        self._protocol = protocol

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def is_reading(self) -> bool:
        return True

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def can_write_eof(self) -> bool:
        return False
