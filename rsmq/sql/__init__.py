"""rsmq and the service's own database: publish from a transaction (extra `sql`, SQLAlchemy 2).

`outbox.py` is what a service calls, `relay.py` moves its rows into topics, `listener.py` wakes the relay, and
`status.py` counts what waits. `tables.py` has the tables, `database.py` one way to async and plain engines.
"""

from rsmq.sql.outbox import Outbox
from rsmq.sql.status import OutboxStatus
from rsmq.sql.tables import create_tables, ddl, metadata

__all__ = ["Outbox", "OutboxStatus", "create_tables", "ddl", "metadata"]
