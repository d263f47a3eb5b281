"""One message under command: find it by its id, say where it is, cancel it.

`finder.py` finds a message without an index, by the time in its id. `status.py` has what is known of it, and the pure
decisions; `look.py` asks the server. `cancel.py` cancels a message in any state, and answers with one of `answer.py`.
`rescheduling.py` moves a delayed or parked one; `asking.py` is what both need. `schedule_run.py` asks for a run of a
schedule beside its ticks. `search.py` finds messages by what they hold, `erase.py` erases those of a key. `holding.py`
holds names of groups, `ending.py` lets worker processes end, `bodies.py` finds which bodies in the store are needed,
`batches.py` finds and cancels batches, and `audit.py` notes what operators did.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rsmq.control.answer import Answer, Cancelled, Running, Settled, Unknown
    from rsmq.control.batches import Batches, BatchStatus
    from rsmq.control.bodies import Bodies, TopicBodies
    from rsmq.control.cancel import Cancel
    from rsmq.control.erase import Erase, Erased
    from rsmq.control.holding import GroupHold, Holding
    from rsmq.control.look import Look
    from rsmq.control.rescheduling import Reschedule
    from rsmq.control.schedules import Schedules
    from rsmq.control.search import Criteria, Findings, FindState, Hit, Search
    from rsmq.control.status import GroupStatus, MessageStatus
else:
    from rsmq.model.lazy import loading

    __getattr__, __dir__ = loading(
        __name__,
        {
            "answer": "Answer Cancelled Running Settled Unknown", "batches": "Batches BatchStatus", "cancel": "Cancel",
            "bodies": "Bodies TopicBodies", "erase": "Erase Erased",
            "holding": "GroupHold Holding", "look": "Look",
            "rescheduling": "Reschedule", "schedules": "Schedules",
            "search": "Criteria FindState Findings Hit Search", "status": "GroupStatus MessageStatus",
        },
    )  # fmt: skip

__all__ = [
    "Answer",
    "BatchStatus",
    "Batches",
    "Bodies",
    "Cancel",
    "Cancelled",
    "Criteria",
    "Erase",
    "Erased",
    "FindState",
    "Findings",
    "GroupHold",
    "GroupStatus",
    "Hit",
    "Holding",
    "Look",
    "MessageStatus",
    "Reschedule",
    "Running",
    "Schedules",
    "Search",
    "Settled",
    "TopicBodies",
    "Unknown",
]
