"""The program of a worker process in a chaos run: `python -m rsmq.testing.program '<Job as JSON>'`.

It serves a broker of the user's and writes into the ledger what its handlers did.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
from collections.abc import Sequence
from typing import Any

import anyio

from rsmq.message import Message
from rsmq.middleware import Call
from rsmq.settings import Settings
from rsmq.testing.hand import Job
from rsmq.testing.ledger import Pen


async def serve(job: Job) -> None:
    """Run the broker until SIGTERM."""
    broker, pen = job.broker(), Pen(job.ledger)

    async def keep_ledger(work: Any, call_next: Call) -> Any:
        messages: Sequence[Message] = [work] if isinstance(work, Message) else work
        for message in messages:
            pen.note("start", message.topic, message.group, message.id, message.attempt)
        result = await call_next(work)
        failed = result if isinstance(result, list | tuple) and not isinstance(work, Message) else ()
        for at, message in enumerate(messages):
            if not failed or failed[at] is None:
                pen.note("commit", message.topic, message.group, message.id, message.attempt)
        return result

    with broker.pointed_at(Settings(**job.settings), around=keep_ledger):
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, broker.stop)
        async with anyio.create_task_group() as tasks:
            await tasks.start(broker.run)
            pen.note("ready")
        pen.note("bye")


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(process)d %(name)s %(message)s")
    told = Job(**json.loads(sys.argv[1]))
    sys.path[:] = told.path
    asyncio.run(serve(told))
