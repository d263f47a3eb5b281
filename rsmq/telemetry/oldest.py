"""How long the oldest message of a group has been waiting: the one figure that says whether a group keeps up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rsmq.clock import now_ms
from rsmq.connect import Client
from rsmq.inspector import GroupState, answers
from rsmq.keys import Keys
from rsmq.stream import pipelined


async def oldest_unsettled(client: Client, keys: Keys, group: GroupState) -> float:
    """Age in seconds of the oldest message that is pending or was never delivered; 0 if there is none.

    One pipeline, two questions for each partition that has any. By the ids of the entries, so by the server's clock; a
    message that waits for a retry outside of the stream's pending list is not seen.
    """
    questions: list[tuple[str, ...]] = []
    for share in group.shares:
        stream = keys.stream(group.topic, share.partition)
        if share.pending:
            questions.append(("XPENDING", stream, group.name))
        if share.lag:
            questions.append(("XRANGE", stream, f"({share.last_delivered_id}", "+", "COUNT", "1"))
    found = [at for reply in answers(await pipelined(client, questions)) if (at := entry_ms(reply)) is not None]
    return max(0.0, (now_ms() - min(found)) / 1000) if found else 0.0


def entry_ms(reply: Sequence[Any] | None) -> int | None:
    """When the first entry of a reply was stored: of XPENDING's summary, or of XRANGE."""
    if not reply:
        return None
    first = reply[0][0] if isinstance(reply[0], list) else reply[1]
    return None if first is None else int(first.partition(b"-")[0])
