"""Takes what a driver says of a row's values out of its error. Pure.

PostgreSQL says in the detail of a violated constraint what the row was, payload and headers among it. MariaDB quotes
what it refuses.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

QUOTING: Final = {1062, 1292, 1366, 1411}
"""Errors of MariaDB and MySQL that quote a value: of a unique column, or one that does not fit into its column."""
QUOTED: Final = re.compile(r"'.*'(?= for (?:key|column|function)\b|$)", re.DOTALL)


def without_values(error: BaseException) -> None:
    """Change the text of an error, and of those it came from: `str`, `repr` and tracebacks show no value of a row."""
    chain, replaced = list(chained(error)), list[tuple[str, str]]()
    for each in chain:
        before = [str(each), *each.args]
        if hide_values(each):
            replaced += zip(before, [str(each), *each.args], strict=True)
    for each in chain:  # wrappers have the text of the driver's error in their own
        for old, new in replaced:
            if isinstance(old, str):
                each.args = tuple(text.replace(old, new) if isinstance(text, str) else text for text in each.args)


def chained(error: BaseException) -> Iterator[BaseException]:
    """An error and those it came from, each once. What was handled when it was raised is the user's."""
    seen, left = set[int](), [error]
    while left:
        each = left.pop()
        if id(each) not in seen:
            seen.add(id(each))
            yield each
            left += [found for found in (getattr(each, "orig", None), each.__cause__) if found is not None]


def hide_values(error: BaseException) -> bool:
    """Change a driver's error; whether it was one that may have values."""
    primary = getattr(getattr(error, "diag", None), "message_primary", None)
    if isinstance(primary, str) and len(error.args) == 1:  # psycopg: detail and context follow it
        error.args = (primary,)
    elif hasattr(error, "sqlstate") and isinstance(getattr(error, "detail", None), str):
        error.detail = None  # type: ignore[attr-defined]  # asyncpg writes it behind its text
    elif len(error.args) == 2 and error.args[0] in QUOTING:
        error.args = (error.args[0], QUOTED.sub("'...'", str(error.args[1]), count=1))
    else:
        return False
    return True
