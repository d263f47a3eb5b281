"""The preflight: whether this server keeps what it is given, asked once at the start, before a message is touched."""

from rsmq.preflight.facts import Facts, gather
from rsmq.preflight.rule import Finding, judge
from rsmq.preflight.start import require

__all__ = ["Facts", "Finding", "gather", "judge", "require"]
