"""Django's database connections around messages: what Django does at the beginning and the end of each request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from asgiref.sync import sync_to_async
from django.db import Error, close_old_connections

from rsmq.handler.surroundings import Surroundings


class DjangoConnections(Surroundings):
    """Closes connections that are broken or older than CONN_MAX_AGE, so that the next message gets new ones.

    A connection belongs to a thread. Async code uses those of the one thread in which Django runs it: they are looked
    at after an error of the database, because a visit there costs more than many a handler.
    """

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """In the thread of the function."""
        close_old_connections()
        try:
            return function(*arguments)
        finally:
            close_old_connections()

    async def failed(self, error: Exception) -> None:
        """In the thread where Django runs the queries of async code."""
        if isinstance(error, Error):
            await sync_to_async(close_old_connections)()
