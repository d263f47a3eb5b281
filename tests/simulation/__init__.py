"""A simulator that repeats a race: the real workers of many members in one process, on a real server.

`world.py` has the virtual clock, the choices of a seed and the agenda: one scheduler decides what happens next.
`network.py` connects to the real server (`server.py`) and decides when a command reaches it and when its reply arrives.
`process.py` is a member: an event loop (`loop.py`) and its threads (`threads.py`). `clock.py` and `patches.py` put them
below the package. `plan.py`, `run.py` and `faults.py` are what is played, `seeds.py` plays and shrinks, and
`python -m tests.simulation` is the command. README.md explains how to read what it prints.
"""
