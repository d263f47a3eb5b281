"""What a row of an outbox says beside its message, in its column `options`. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, Final

from rsmq.model.clock import now_ms
from rsmq.model.duration import Duration
from rsmq.model.expiry import OnExpiry, expiry_fields
from rsmq.model.kept_result import result_fields
from rsmq.model.publish_options import check_message_id, check_replicas
from rsmq.model.unique import Unique

CANCEL: Final = "!"
"""In front of the topic of a row that cancels a message: no other reader of the table takes it for a message of it."""


@dataclass(frozen=True, slots=True)
class RowOptions:
    """The options of one row. `expires`: ms since 1970, or `+ms` from the insert; `is_kept`: it becomes a dead letter
    then. `till`, `on_conflict`: of the name `unique`, as `publish_unique.lua` takes them; a time counts from the
    insert. `cancel`: the id of the message that the row cancels. `keep_result`: for how many ms its result is kept."""

    message_id: str | None = None
    expires: str | None = None
    on_expiry: str | None = None
    unique: str | None = None
    till: str | None = None
    on_conflict: str | None = None
    wait_replicas: int = 0
    cancel: str | None = None
    keep_result: str | None = None

    @classmethod
    def checked(
        cls,
        due: str,
        *,
        message_id: str | None = None,
        expires: Duration | datetime | None = None,
        on_expiry: OnExpiry | None = None,
        unique: str | None = None,
        until: Any = None,
        on_conflict: Any = None,
        wait_replicas: int = 0,
        keep_result: Duration | None = None,
    ) -> RowOptions:
        """The options of a publish whose due time is `due` (see `due_time`). Raises ConfigError."""
        found: dict[str, Any] = {"wait_replicas": check_replicas(wait_replicas)}
        if message_id is not None:
            found["message_id"] = check_message_id(message_id)
        if expires is not None or on_expiry is not None:
            expiry_fields(expires, on_expiry, due, now_ms())  # raises, also for one that is over before it is due
            found["expires"] = expiry_fields(expires, on_expiry)[1]
            found["on_expiry"] = "dead" if on_expiry == "dead" else None
        if keep_result is not None:
            found["keep_result"] = result_fields(keep_result)[1]
        if unique is not None or until is not None or on_conflict is not None:
            name = Unique.checked(unique, until, on_conflict, is_delayed=bool(due))
            found |= {"unique": name.name, "till": name.till, "on_conflict": name.on_conflict}
        return cls(**found)

    def to_text(self) -> str | None:
        """For the column. None: there are none."""
        given = {name: value for name, value in asdict(self).items() if value}
        return json.dumps(given) if given else None

    @classmethod
    def read(cls, text: Any) -> RowOptions:
        """From the column. Raises ValueError for what no outbox has written: another program may write rows, too."""
        if text is None:
            return NO_OPTIONS
        try:
            found = json.loads(text)
        except (TypeError, ValueError) as error:
            raise ValueError(f"the column options is no JSON ({error})") from None
        if not isinstance(found, Mapping) or not found.keys() <= cls.__dataclass_fields__.keys():
            raise ValueError(f"the column options has other names than {', '.join(cls.__dataclass_fields__)}")
        read = cls(**found)
        read._check()
        return read

    def _check(self) -> None:
        texts = (
            self.message_id, self.expires, self.on_expiry, self.unique, self.till, self.on_conflict, self.cancel,
            self.keep_result,
        )  # fmt: skip
        if not all(isinstance(each, str | None) for each in texts):
            raise ValueError("a value in the column options is no text")
        check_replicas(self.wait_replicas)
        for each in (self.message_id, self.cancel):
            if each is not None:
                check_message_id(each)
        if self.expires is not None and not self.expires.removeprefix("+").isdigit():
            raise ValueError(f"expires={self.expires!r} in the column options is no time in ms")
        if self.keep_result is not None and not self.keep_result.isdigit():
            raise ValueError(f"keep_result={self.keep_result!r} in the column options is no time in ms")
        if self.unique is not None and not (self.till in ("settled", "started") or str(self.till).isdigit()):
            raise ValueError(f"till={self.till!r} in the column options is unknown")

    def fields(self, waited_ms: int, server_ms: int) -> tuple[str, ...]:
        """The fields of the entry: those of its expiry, and of its result."""
        kept = () if self.keep_result is None else ("keep_result", self.keep_result)
        return (*self._expiry(waited_ms, server_ms), *kept)

    def _expiry(self, waited_ms: int, server_ms: int) -> tuple[str, ...]:
        """A duration that began `waited_ms` ago becomes a moment of the server's clock."""
        if self.expires is None:
            return ()
        is_span = self.expires.startswith("+")
        moment = server_ms + int(self.expires[1:]) - waited_ms if is_span else int(self.expires)
        return ("expires", str(max(1, moment)), *(("on_expiry", "dead") if self.on_expiry == "dead" else ()))

    def name(self, waited_ms: int) -> Unique | None:
        """The unique name."""
        if self.unique is None:
            return None
        till = self.till or "settled"
        if till.isdigit():
            till = str(max(1, int(till) - waited_ms))
        return Unique(self.unique, till, self.on_conflict or "keep")  # type: ignore[arg-type]


NO_OPTIONS: Final = RowOptions()
