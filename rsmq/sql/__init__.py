"""rsmq and the service's own database: effects that happen once, and publishing from a transaction (SQLAlchemy 2).

Install the extra `sql`. `effects.py` is the session of a handler, `marks.py` has its statements, `settled_floor.py`
says which marks are needed. `outbox.py` is what a service calls, `relay.py` moves its rows into topics, `listener.py`
wakes the relay, and `status.py` counts what waits, and the keys that it needs. `tables.py` has the tables,
`database.py` one way to async and plain engines.
"""

from rsmq.model.distribution import missing

try:
    from rsmq.sql.database import Database
    from rsmq.sql.effects import Effects
    from rsmq.sql.outbox import Outbox
    from rsmq.sql.status import OutboxStatus, read_keys, read_status
    from rsmq.sql.tables import create_tables, ddl, metadata
except ModuleNotFoundError as error:
    raise missing(error, __name__, "sql") from None

__all__ = [
    "Database",
    "Effects",
    "Outbox",
    "OutboxStatus",
    "create_tables",
    "ddl",
    "metadata",
    "read_keys",
    "read_status",
]
