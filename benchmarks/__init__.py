"""Measurements. `python -m benchmarks` prints the cost of a message beside a bare redis-py loop, in one run."""
