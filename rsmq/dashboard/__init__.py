"""The web dashboard (extra `dashboard`): shows everything; what visitors may change depends on their role.

`mount(app)` adds it to an application of your own, `create_app()` makes one that serves only the dashboard (`app.py`).
Pages are made here and sent as HTML (`html.py`, `page.py`); of a live page the changed parts are sent each second.
`access.py` checks every request, `roles.py` says who may do what, `actions.py` has what visitors may change, and
`rsmq.control.audit` notes it. `queries.py` asks the server for the pages and takes one snapshot a second for all of
them, `history.py` keeps a sample a minute, `waiting.py` reads what waits for a time. `overview.py`, `message.py`,
`dead_letter.py` and `device.py` are the pages, `chart.py` draws. `connection_limits.py` keeps slow clients from the
server of `rsmq dashboard`.
"""

from rsmq.model.distribution import missing

try:
    from rsmq.dashboard.access import Rules
    from rsmq.dashboard.app import create_app, mount
    from rsmq.dashboard.roles import Role, Visitor
except ModuleNotFoundError as error:
    raise missing(error, __name__, "dashboard") from None

__all__ = ["Role", "Rules", "Visitor", "create_app", "mount"]
