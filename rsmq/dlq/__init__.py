"""Dead letters: messages that no attempt could handle, kept with the reason until an operator decides.

`dead_letter` reads one entry; `dead_letters` lists, replays and purges those of a group; `selection` filters them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rsmq.dlq.dead_letter import DeadLetter
    from rsmq.dlq.dead_letters import DeadLetters
    from rsmq.dlq.selection import Selection, read_fields
else:
    from rsmq.model.lazy import loading

    __getattr__, __dir__ = loading(
        __name__, {"dead_letter": "DeadLetter", "dead_letters": "DeadLetters", "selection": "Selection read_fields"}
    )

__all__ = ["DeadLetter", "DeadLetters", "Selection", "read_fields"]
