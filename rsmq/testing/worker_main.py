"""The main module of a worker process in a chaos run: `python -m rsmq.testing.worker_main '<Job as JSON>'`.

It serves the user's broker and writes into the ledger what the handlers did.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio

from rsmq.broker.broker import pointed_at
from rsmq.handler.middleware import Call
from rsmq.model.message import Message
from rsmq.model.settings import Settings
from rsmq.testing.ledger import Event, LedgerWriter, What
from rsmq.testing.worker_process import Job


async def serve(job: Job) -> None:
    """Run the broker until SIGTERM."""
    broker, ledger = job.broker(), LedgerWriter(Path(job.ledger))

    def note(what: What, message: Message) -> None:
        fields = {"topic": message.topic, "group": message.group, "message_id": message.id, "attempt": message.attempt}
        ledger.write(Event.now(what, **fields))

    async def keep_ledger(work: Any, call_next: Call) -> Any:
        messages: Sequence[Message] = [work] if isinstance(work, Message) else work
        for message in messages:
            note("start", message)
        result = await call_next(work)
        failed = result if isinstance(result, list | tuple) and not isinstance(work, Message) else ()
        for at, message in enumerate(messages):
            if not failed or failed[at] is None:
                note("commit", message)
        return result

    with pointed_at(broker, Settings(**job.settings), around=keep_ledger):
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, broker.stop)
        async with anyio.create_task_group() as tasks:
            await tasks.start(broker.run)
            ledger.write(Event.now("ready"))
        ledger.write(Event.now("bye"))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(process)d %(name)s %(message)s")
    job = Job(**json.loads(sys.argv[1]))
    sys.path[:] = job.path
    asyncio.run(serve(job))
