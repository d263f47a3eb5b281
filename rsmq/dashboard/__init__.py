"""The web dashboard (extra `dashboard`): shows everything; if changes are allowed, replays and purges dead letters.

`mount(app)` adds it to an application of your own, `create_app()` makes one that serves only the dashboard (`app.py`).
`access.py` checks every request, `queries.py` asks the server for the pages and takes one snapshot a second for all of
them. `layout.py` has what the pages share; `overview.py`, `message.py`, `dead_letter.py` and `device.py` are the pages.
`connection_limits.py` keeps slow clients from the server of `rsmq dashboard`.
"""

from rsmq.dashboard.access import Rules
from rsmq.dashboard.app import create_app, mount

__all__ = ["Rules", "create_app", "mount"]
