"""The scenarios, a file for each target: workers, handlers, publishers, server, network, disk and clock, keys."""
