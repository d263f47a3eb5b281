"""Every order of the Lua scripts: all states of small scenarios, with the real scripts on a real server.

`world.py` is what a state is. `commands.py` takes the commands from the package, `store.py` executes them. `member.py`
is what a member does with a reply, `moves.py` what can happen next and what must hold, `search.py` the search, and
`scenarios.py` what is searched. `flows.py` is what a member keeps only as ids, and `flow_moves.py` what can happen and
must hold there. `permits.py` is the same for the permits that members borrow, `bands.py` for bands that are added
to a topic, `batch_counts.py` for members that a batch counts, and `pushes.py` for letters that come with their rings.
`lookups.py` plays histories by seed, not all orders: routers that look up subscriptions while clients change them.
`python -m tests.interleavings` is the command; tests/simulation/README.md explains it.
"""
