"""Dead letters: messages that no attempt could handle, kept with the reason until somebody decides."""

from rsmq.dlq.letter import DeadLetter
from rsmq.dlq.letters import DeadLetters
from rsmq.dlq.selection import Selection, read_fields

__all__ = ["DeadLetter", "DeadLetters", "Selection", "read_fields"]
