"""Large rows of a write go to the store that RSMQ_BODIES of the executor names."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Self

from rsmq.codecs.offload import Offload, problem
from rsmq.codecs.reading import store_of
from rsmq.errors import StoreUnavailable, TooLarge
from rsmq.model.body import REF, Body
from rsmq.model.encoding import ENC
from rsmq.pipeline.format.task_connection import TaskConnection
from rsmq.redis.scripts import Value


class TaskBodies:
    """The store of one task. Each body is put right before the call that stores its message."""

    def __init__(self, offload: Offload, deployment: str) -> None:
        self._offload = offload
        self._deployment = deployment

    @classmethod
    def of(cls, connection: TaskConnection) -> Self | None:
        """None if this machine names no store."""
        offload = store_of()
        if offload is None:
            return None
        made, key = secrets.token_hex(16), connection.keys.deployment
        found = connection.ask("SET", key, made, "NX", "GET")
        return cls(offload, made if found is None else found.decode())

    def stored(self, topic: str, entry: Sequence[Value], limit: int) -> Sequence[Value]:
        """An entry, as the number of its fields and these, whose payload is put into the store if it is larger than an
        entry may be. Raises TooLarge, and StoreUnavailable."""
        fields = [part.encode() if isinstance(part, str) else part for part in entry[1:]]
        named = {bytes(name): value for name, value in zip(fields[::2], fields[1::2], strict=True) if name != b"h"}
        data = named.get(b"data")
        if not isinstance(data, bytes) or len(data) <= limit:
            return entry
        if len(data) > self._offload.largest:
            raise TooLarge(len(data), self._offload.largest, "the option `largest` of Offload")
        body = Body(topic, bytes(named.get(b"id", b"")), data)
        body.call(self._deployment)
        try:
            self._offload.put_now(body.name, data)
        except Exception as error:
            raise StoreUnavailable(f"the payload cannot be put into {self._offload!r}: {problem(error)}") from error
        before = named.get(ENC)
        enc = REF.encode() if before is None else bytes(before) + b";" + REF.encode()
        kept = [
            part
            for name, value in zip(fields[::2], fields[1::2], strict=True)
            if name not in (b"data", ENC)
            for part in (name, value)
        ]
        found = [b"data", body.digest, *kept, ENC, enc, REF.encode(), body.name.encode()]
        return (len(found), *found)
