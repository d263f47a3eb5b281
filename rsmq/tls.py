"""TLS connections that share their context: redis-py makes one for each, which costs 25 ms of CPU, on the loop, and
after an outage a process opens dozens."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from copy import copy
from pathlib import Path
from typing import Any, Final

from redis.asyncio.connection import SSLConnection

MOST: Final = 16
"""Contexts kept: one for each set of options in use, and a few of yesterday's certificates."""


class Contexts:
    """Contexts by the options and the files that they are made of: a certificate that is replaced counts at once."""

    def __init__(self) -> None:
        self._made: OrderedDict[tuple[Any, ...], Any] = OrderedDict()

    def like(self, options: Any) -> Any:
        """The one for these options (as redis-py holds them), with the files as they are now."""
        files = (options.keyfile, options.certfile, options.ca_certs, options.ca_path)
        state = (*files, *map(age_of, files), options.cert_reqs, options.check_hostname, options.min_version)
        if state not in self._made:
            self._made[state] = fresh = copy(options)
            fresh.context = None
            if len(self._made) > MOST:
                self._made.popitem(last=False)
        return self._made[state]


CONTEXTS: Final = Contexts()


def age_of(path: str | None) -> int:
    """When a file was written; 0 where there is none: whoever loads it says what is wrong."""
    try:
        return 0 if path is None else Path(path).stat().st_mtime_ns
    except OSError:
        return 0


class SharedTls(SSLConnection):
    """One for the loop. Threads have two or three connections for their whole life, and make their own contexts."""

    def _connection_arguments(self) -> Mapping[str, Any]:
        self.ssl_context = CONTEXTS.like(self.ssl_context)
        return super()._connection_arguments()


def share_contexts(pool: Any) -> None:
    """From here on the connections of a pool do. To be said afterwards: the scheme of a URL overrides a given class."""
    if pool.connection_class is SSLConnection:
        pool.connection_class = SharedTls
