"""rsmq beside its peers: the same work, on the same server, in one run. `python -m benchmarks.peers --help`."""
