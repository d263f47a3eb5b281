"""A web application of a test, served in this process."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import uvicorn
from starlette.applications import Starlette


@asynccontextmanager
async def served(app: Starlette, **options: Any) -> AsyncIterator[str]:
    """The address, as host and port, of an application that uvicorn serves with these options until the block ends."""
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", **options))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(server.serve, [listener])
            try:
                yield f"127.0.0.1:{listener.getsockname()[1]}"
            finally:
                server.should_exit = True
