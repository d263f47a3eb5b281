"""Everything that imports redis-py, from the ground up.

`wire/` knows bytes and addresses, `scripts` loads `lua/`, `client/` holds the connections. On these stand `pubsub`,
`streams`, `topics`, `outboxes` and `leadership`. `preflight/` checks a server, `embedded/` runs one.
"""
