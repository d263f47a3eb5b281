"""Everything that imports redis-py. `connector` makes the clients that the `url` asks for: `client` for one server,
`cluster` with its `slots`, `sentinel`. `raw_connection` serves the hot path. `scripts` loads `lua/`, `script_batcher`
groups its calls. `topics` and `streams` manage what is stored. `preflight/` checks the server, `embedded/` runs one."""
