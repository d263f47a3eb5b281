"""Spark's Python daemon with rsmq and the worker's own module loaded: what it forks has them, and loads nothing twice.

Spark starts it by its name (`spark.python.daemon.module`), on the driver and on every executor, once for each kind of
worker; its argument is the worker's module, which PySpark's own daemon loads after each fork.
"""

from __future__ import annotations

import sys
from importlib import import_module

from pyspark.daemon import manager

import rsmq.pipeline.source  # noqa: F401

if __name__ == "__main__":
    for name in sys.argv[1:2]:
        import_module(name)
    manager()
