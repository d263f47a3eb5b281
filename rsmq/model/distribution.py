"""The distribution of this package, and what its extras are missing for. Packages import it when they are loaded, so it
imports nothing that costs time."""

from __future__ import annotations

from typing import Final

OWN: Final = "rsmq"
"""The distribution, as it is installed: `python -m tests.release.rename` gives it another name."""


def missing(error: ModuleNotFoundError, needer: str, extra: str) -> ModuleNotFoundError:
    """The error with what to install, where a package of an extra of rsmq is not there; any other one as it is."""
    name = (error.name or "").partition(".")[0]
    if name in ("", "rsmq"):
        return error
    return ModuleNotFoundError(
        f"{needer} needs {name}, which is not installed: pip install '{OWN}[{extra}]'", name=error.name
    )
