"""One process that handles messages, and the roles that it runs once for all its consumers.

`worker` starts everything and defines the order of the shutdown; `supervisor` is the parent of several such processes.
The roles are `scheduler` (publishes ticks of schedules), `delayed_poller` (moves due messages into streams),
`retention` (trims settled entries), `auditor` (restores pending entries that other clients deleted) and
`eviction_monitor` (checks that the server evicts nothing). Each is an object with `run()`, which lasts until cancelled.
"""
