"""The connections of redis-py's pools, with three repairs: safe writes, no connection that was reset while it was not
used, and TLS contexts that are shared.

Writes: asyncio's own `writelines`, which redis-py calls, had two defects from Python 3.12 on. What the server did not
take was buffered without bound (until December 2024, gh-127655). On a lost connection it raised AttributeError, or left
the number of the closed socket with the event loop, where it disturbed the next socket with that number (until the end
of 2025 in 3.13 and 3.14, never fixed in 3.12; gh-136234). `write` has neither.

Resets: redis-py gives out no connection that the server has closed, but one that was reset, as a firewall or a proxy
does after some idle minutes: asyncio notes that elsewhere. The next command would fail on it.

TLS: redis-py makes a context for each connection. That takes 25 ms of CPU on the event loop, and after an outage a
process opens dozens of connections.
"""

from __future__ import annotations

from asyncio import StreamWriter
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from functools import cache
from pathlib import Path
from typing import Any, Final

import hiredis
from redis.asyncio.connection import AbstractConnection, SSLConnection
from redis.exceptions import ConnectionError as RedisConnectionError

MOST_CONTEXTS: Final = 16
"""One for each set of options in use, and a few of certificates that were replaced."""


class SafeStreamWriter(StreamWriter):
    """Writes several pieces as one, as Python 3.11 does."""

    def writelines(self, data: Iterable[bytes | bytearray | memoryview]) -> None:
        self.write(b"".join(data))


def packed(command: Sequence[Any]) -> bytes:
    """A command in the wire format; a name of two words is split. Raises TypeError for an argument of another type than
    str, bytes, int or float."""
    name = command[0]
    if isinstance(name, str) and " " in name:
        command = (*name.split(), *command[1:])
    packed_command: bytes = hiredis.pack_command(tuple(command))
    return packed_command


class SafeConnection(AbstractConnection):
    """A connection with a `SafeStreamWriter`. redis-py lets asyncio make the writer, so its class is set afterwards.

    Commands are packed by hiredis: redis-py's inspection of each argument costs more than the packing itself.
    """

    def pack_command(self, *args: Any) -> list[bytes]:
        try:
            return [packed(args)]
        except TypeError:  # redis-py's error says what to do
            return list(super().pack_command(*args))

    async def can_read(self) -> bool:
        error = None if self._reader is None else self._reader.exception()
        if error is not None:
            raise RedisConnectionError(f"the connection was reset: {error}") from error
        return await super().can_read()

    async def _connect(self) -> None:
        await super()._connect()  # type: ignore[safe-super, no-untyped-call]
        self._writer.__class__ = SafeStreamWriter


@cache
def safe(kind: type[AbstractConnection]) -> type[AbstractConnection]:
    """The `SafeConnection` of a kind of connection."""
    return type(kind.__name__, (SafeConnection, kind), {})


class TlsContexts:
    """TLS contexts by options and files. A certificate that was replaced gets a new context."""

    def __init__(self) -> None:
        self._contexts: OrderedDict[tuple[Any, ...], Any] = OrderedDict()

    def get(self, options: Any) -> Any:
        """The context for these options (as redis-py holds them) and the present files."""
        files = (options.keyfile, options.certfile, options.ca_certs, options.ca_path)
        key = (*files, *map(age_of, files), options.cert_reqs, options.check_hostname, options.min_version)
        if key not in self._contexts:
            self._contexts[key] = fresh = copy(options)
            fresh.context = None
            if len(self._contexts) > MOST_CONTEXTS:
                self._contexts.popitem(last=False)
        return self._contexts[key]


TLS_CONTEXTS: Final = TlsContexts()


def age_of(path: str | None) -> int:
    """When a file was written; 0 for none, for loading it reports the error."""
    try:
        return 0 if path is None else Path(path).stat().st_mtime_ns
    except OSError:
        return 0


class SharedTlsConnection(SSLConnection):
    """For the event loop. Threads keep their two or three connections, so these make their own contexts."""

    def _connection_arguments(self) -> Mapping[str, Any]:
        self.ssl_context = TLS_CONTEXTS.get(self.ssl_context)
        return super()._connection_arguments()


def repair(pool: Any) -> None:
    """Give a pool all repairs. Call it after the pool was made: the scheme of a URL overrides a given class."""
    if pool.connection_class is SSLConnection:
        pool.connection_class = SharedTlsConnection
    if not issubclass(pool.connection_class, SafeConnection):
        pool.connection_class = safe(pool.connection_class)
