"""The state of the server, read without changing it.

`Observer` takes a `Snapshot` (`observer.py`); what is in it, and how it is read from the replies, is in `state.py`.
Everything else is made of snapshots: the answers of `Inspector`, the rates of `trend.py` (`rsmq top`, the dashboard),
the metrics of the exporter, and the findings of `doctor/`. `schedules.py` reads the schedules. `schema_check.py`
decodes what waits with the handlers of new code.
"""

from rsmq.inspector.inspector import Inspector

__all__ = ["Inspector"]
