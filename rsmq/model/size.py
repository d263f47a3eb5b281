"""Numbers of bytes as users write them: `512KiB`, `1.5 MB`, or a bare number."""

from __future__ import annotations

import re
from typing import Any, Final

WITH_UNIT: Final = re.compile(r"(\d{1,15}(?:\.\d{1,9})?) ?((?:[kmgt]i?)?b?)", re.ASCII | re.IGNORECASE)
POWERS: Final = "kmgt"
FORMS: Final = "a size is a number of bytes, or text with a unit, such as 256KiB, 32MiB or 1GB"


def as_size(value: Any) -> int:
    """An int as it is, text as a number of bytes. Raises ValueError for everything else. `1kB` is 1000, `1KiB` 1024."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    found = WITH_UNIT.fullmatch(value.strip()) if isinstance(value, str) else None
    if found is None:
        raise ValueError(FORMS)
    number, unit = found[1], found[2].lower().removesuffix("b")
    power = POWERS.index(unit[0]) + 1 if unit else 0
    return int(float(number) * (1024 if unit.endswith("i") else 1000) ** power)
