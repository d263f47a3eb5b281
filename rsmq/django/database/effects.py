"""Effects that happen once: what a handler writes with Django's ORM commits once for each message, or not at all."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, Final

from django.db import DEFAULT_DB_ALIAS, Error, connections, transaction

from rsmq.django.database.connection import DjangoConnection, engine_of, explained
from rsmq.errors import ConfigError
from rsmq.model.message import Message
from rsmq.sql.database import Database
from rsmq.sql.handled import HandledMessages, MarkedWork

log = logging.getLogger("rsmq.effects")


class DjangoEffects(HandledMessages):
    """A transaction as a dependency of a handler: `db: Annotated[None, Depends(effects.atomic)]`.

    It is `transaction.atomic` around the handler. It commits together with a mark of the message, before the message is
    settled. If the mark is there already, the handler is skipped, or what it has done is rolled back. The database also
    refuses the commit of a worker whose partition has a newer owner. `using` is the alias in DATABASES.
    """

    needs_thread: Final = "effects.atomic is for plain functions, as Django's transactions are: write `def`"
    """Why an async handler cannot have it."""

    def __init__(self, using: str = DEFAULT_DB_ALIAS) -> None:
        self._alias = using
        self.database = Database(engine_of(using), "DjangoEffects")

    def atomic(self, work: Message | list[Message] = None) -> Iterator[None]:  # type: ignore[assignment]
        """The dependency: a transaction of the thread of the handler."""
        marked = MarkedWork(work, "effects.atomic")
        with self.following(marked):
            yield from self._transaction(marked)

    def _transaction(self, marked: MarkedWork) -> Iterator[None]:
        is_complete, committed = False, list[bool]()
        wrapper = connections[self._alias]
        wrapper.close_if_unusable_or_obsolete()
        try:
            if not (wrapper.in_atomic_block or wrapper.get_autocommit()):
                raise ConfigError(MANUAL.format(self._alias))
            with transaction.atomic(using=self._alias):
                transaction.on_commit(lambda: committed.append(True), using=self._alias)
                here: Any = DjangoConnection(self._alias)
                if marked.is_redelivered:
                    marked.skip_handled(here)
                yield
                marked.refuse_outputs("outbox.publish(topic, payload)")
                if wrapper.needs_rollback:
                    raise ConfigError(DROPS)
                marked.begin_commit()
                marked.write_marks(here)
                is_complete = True
        except Exception as error:
            if committed:
                log.exception("a function of transaction.on_commit failed: the message is handled, and not tried again")
                return
            if not isinstance(error, Error):
                raise
            is_in_doubt = is_complete and (wrapper.connection is None or not wrapper.is_usable())
            wrapper.close_if_unusable_or_obsolete()
            if is_in_doubt and self._has_committed_plain(marked.marks[0]):
                return
            said = explained(error)
            if said is error:
                raise
            raise said from error
        finally:
            wrapper.close_if_unusable_or_obsolete()


MANUAL: Final = (
    "DATABASES[{!r}] has AUTOCOMMIT: False, so `transaction.atomic` does not commit, and what the handler writes would "
    "be lost: remove it"
)
DROPS: Final = (
    "the handler has marked the transaction of effects.atomic for a rollback, so what it wrote is dropped, and the "
    "message is not handled: remove `transaction.set_rollback(True)`; a part that may fail alone, or whose "
    "IntegrityError you catch, belongs into `with transaction.atomic():`; to undo everything raise an error"
)
