"""The outbox: messages that are published if, and only if, a transaction of Django commits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, TypeVar, Unpack

from django.db import DEFAULT_DB_ALIAS, Error, connections

from rsmq.django.database.connection import DjangoConnection, engine_of, explained
from rsmq.errors import ConfigError
from rsmq.model.encoding import Codec
from rsmq.model.named_topic import NamedTopic
from rsmq.model.publish_options import OutboxManyOptions, OutboxOptions, refuse_unknown
from rsmq.sql.database import Database
from rsmq.sql.error_values import without_values
from rsmq.sql.outbox import RelayedOutbox, outbox_row

T = TypeVar("T")


class DjangoOutbox(RelayedOutbox):
    """Messages in a table of a database of Django, which the workers relay to their topics after the commit.

    `broker.include(outbox)` lets the workers of a broker relay it. `using` is the alias in DATABASES; `poll`, `notify`,
    `wait_replicas`, `prefix` and `codecs` are those of `rsmq.sql.Outbox`.
    """

    def __init__(
        self,
        using: str = DEFAULT_DB_ALIAS,
        *,
        poll: timedelta = timedelta(milliseconds=50),
        notify: bool = True,
        wait_replicas: int = 0,
        prefix: str | None = None,
        codecs: Sequence[Codec] = (),
    ) -> None:
        self._alias = using
        database = Database(engine_of(using), "DjangoOutbox")
        super().__init__(
            database, poll=poll, notify=notify, wait_replicas=wait_replicas, prefix=prefix, codecs=codecs
        )  # fmt: skip

    def publish(self, topic: str | NamedTopic, payload: Any, **options: Unpack[OutboxOptions]) -> str:
        """Publish a message when the transaction of this thread commits, and return its id.

        The options are those of `rsmq.sql.Outbox.publish`: all of `broker.publish`. Raises ConfigError outside of
        `transaction.atomic()`. In async code write `await sync_to_async(...)` around the transaction, as for the ORM.
        """
        refuse_unknown("outbox.publish", options, OutboxOptions.__annotations__)
        identity = self.add([outbox_row(self, topic, payload, **options)])[0]
        return options.get("message_id") or identity

    def cancel(self, message_id: str, topic: str | NamedTopic, *, key: str | None = None) -> None:
        """Cancel a message when the transaction of this thread commits, as `rsmq.sql.Outbox.cancel` does."""
        self.add([self._cancel_row(message_id, topic, key)])

    def publish_many(
        self,
        topic: str | NamedTopic,
        items: Iterable[T],
        *,
        key: Callable[[T], str | None] | None = None,
        **options: Unpack[OutboxManyOptions],
    ) -> list[str]:
        """`publish` for many payloads, in one statement. `key` gives the key of a payload."""
        refuse_unknown("outbox.publish_many", options, OutboxManyOptions.__annotations__)
        return self.add(self._rows(topic, items, key, options))

    def add(self, rows: list[dict[str, Any]]) -> list[str]:
        """Insert what `row` has made; returns the ids."""
        if not connections[self._alias].in_atomic_block:
            raise ConfigError(
                f"outbox.publish outside of a transaction of {self._alias!r}: write it inside `with "
                f"transaction.atomic():`, or publish at once with broker.publish_sync"
            )
        here = DjangoConnection(self._alias)
        try:
            for statement, values in self._steps(rows):
                here.execute(statement, values)
        except Error as error:
            without_values(error)
            raise explained(error) from error
        return [str(row["id"]) for row in rows]
