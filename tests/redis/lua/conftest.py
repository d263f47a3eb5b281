"""Every call of a script in this folder is first tried under refusals: see `refusals.py`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from rsmq.redis.scripts import Commander, Script, Value
from tests.redis.lua.refusals import Refusals


@pytest.fixture(autouse=True)
def refusals(monkeypatch: pytest.MonkeyPatch, prefix: str) -> Iterator[Refusals]:
    """Fails a test if a refusal has left a script half done."""
    call = Script.__call__
    found = Refusals(call, prefix)

    async def tried(script: Script, client: Commander, keys: Sequence[str | bytes], args: Sequence[Value] = ()) -> Any:
        await found.try_all(script, client, keys, args)
        return await call(script, client, keys, args)

    monkeypatch.setattr(Script, "__call__", tried)
    yield found
    assert not found.broken, "\n".join(found.broken)
