"""The Spark pipeline beside plain pyarrow and redis-py, in one run: `python -m bench.pipeline`."""
