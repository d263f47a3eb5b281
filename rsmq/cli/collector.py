"""The garbage collector in a worker: it looks for cycles in what lives a few milliseconds, and finds none."""

from __future__ import annotations

import gc
from typing import Final

DEFAULT: Final = gc.get_threshold()
"""As this process has started; a module that sets its own knows why."""
YOUNG: Final = 10_000
"""New objects between two looks at the youngest. A message is about 10 objects for a moment, so that the default of 700
looks at each of them: 8 % of the CPU of a handler that does nothing, measured. With this, nothing measurable."""


def relax() -> None:
    """Called once, when all modules are loaded: they are never looked at again, and the youngest more rarely.

    Nothing is lost: what no cycle holds is freed at once as ever, and cycles are found after `YOUNG` objects.
    """
    gc.collect()
    gc.freeze()
    if gc.get_threshold() == DEFAULT and gc.isenabled():
        gc.set_threshold(YOUNG, *DEFAULT[1:])
