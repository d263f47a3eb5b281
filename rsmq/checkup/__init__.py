"""The checkup behind `rsmq doctor`: what is wrong with the queues themselves, on a server that is fit."""

from rsmq.checkup.facts import Facts, gather
from rsmq.checkup.rule import judge

__all__ = ["Facts", "gather", "judge"]
