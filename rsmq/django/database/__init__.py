"""Effects that happen once and the outbox, in Django's transactions. Needs the extras `django` and `sql`.

`"rsmq.django.database"` in INSTALLED_APPS brings the tables: `manage.py migrate` creates them. `effects.py` is the
transaction of a handler, `outbox.py` publishes from any transaction, `connection.py` runs rsmq's statements on Django's
connections. The rest is that of `rsmq.sql`.
"""

from rsmq.django.database.effects import DjangoEffects
from rsmq.django.database.outbox import DjangoOutbox

Effects = DjangoEffects
"""As in `rsmq.sql`: an application that moves between the two changes one import."""
Outbox = DjangoOutbox

__all__ = ["DjangoEffects", "DjangoOutbox", "Effects", "Outbox"]
