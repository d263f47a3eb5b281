"""Compares the Spark pipeline with plain pyarrow and redis-py: `python -m benchmarks.pipeline`."""
