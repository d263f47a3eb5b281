"""Spark's Python daemon with rsmq loaded: the workers that it forks need not load rsmq again.

Spark starts this module by its name (`spark.python.daemon.module`), on the driver and on every executor, once for each
kind of worker. The argument is the worker's module. PySpark's own daemon loads that module after each fork; this one
loads it before.
"""

from __future__ import annotations

import sys
from importlib import import_module

from pyspark.daemon import manager

import rsmq.pipeline.source  # noqa: F401
from rsmq.pipeline.format.plain_errors import hide_closed_pipe

if __name__ == "__main__":
    hide_closed_pipe()
    for name in sys.argv[1:2]:
        import_module(name)
    manager()
