"""Sentinel: where the master is, and leaving the one that is master no more.

A master that is cut off from its sentinels goes on answering whoever is on its side of the cut. A client that stays
there loses what it writes, however long ago another one was promoted. So all sentinels are asked, the newest
configuration among their answers counts, and whenever they announce a switch every connection to another server is
given up, not only the idle ones.
"""

from rsmq.sentinel.guide import Guide

__all__ = ["Guide"]
