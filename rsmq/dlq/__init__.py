"""Dead letters: messages that no attempt could handle, kept with the reason until an operator decides.

`dead_letter` reads one entry; `dead_letters` lists, replays and purges those of a group; `selection` filters them.
"""

from rsmq.dlq.dead_letter import DeadLetter
from rsmq.dlq.dead_letters import DeadLetters
from rsmq.dlq.selection import Selection, read_fields

__all__ = ["DeadLetter", "DeadLetters", "Selection", "read_fields"]
