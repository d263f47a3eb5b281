"""Spark imports every top-level module named `pyspark_*` and registers its `DefaultSource`: so it finds rsmq."""

from rsmq.pipeline.source import RsmqSource as DefaultSource

__all__ = ["DefaultSource"]
