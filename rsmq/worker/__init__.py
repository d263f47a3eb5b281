"""One process that handles messages, and the roles that it runs once for all its consumers.

`worker` starts everything and defines the order of the shutdown; `supervisor` is the parent of several such processes.
The roles are `scheduler` (publishes ticks of schedules), `delayed_poller` (moves due messages into streams),
`retention` (trims settled entries), `body_sweeper` (deletes bodies that no entry names), `auditor` (restores pending
entries that other clients deleted) and `eviction_monitor` (checks that the server evicts nothing). Each is an object
with `run()`, which lasts until cancelled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rsmq.worker.worker import Lifespan, Worker, refuse_handler_process
else:
    from rsmq.model.lazy import loading

    __getattr__, __dir__ = loading(__name__, {"worker": "Lifespan Worker refuse_handler_process"})

__all__ = ["Lifespan", "Worker", "refuse_handler_process"]
