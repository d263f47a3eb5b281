"""The web dashboard: see everything, and where it is allowed replay and purge dead letters.

Needs the extra `dashboard`. `mount(app)` puts it into an application of your own, `create_app()` makes one that is
nothing else.
"""

from rsmq.dashboard.app import create_app, mount
from rsmq.dashboard.gate import Rules

__all__ = ["Rules", "create_app", "mount"]
