"""Packages that load their names at first use."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from rsmq.model.distribution import missing


def loading(
    package: str, names: Mapping[str, str], extra: str = ""
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package. `names`: module of the package -> the names that it provides. `extra`:
    what has the packages that these modules import."""
    loaded = vars(sys.modules[package])
    home_of = {name: f"{package}.{module}" for module, provided in names.items() for name in provided.split()}

    def load(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            module = import_module(home_of[name])
        except ModuleNotFoundError as error:
            if not extra:
                raise
            raise missing(error, package, extra) from None
        found = loaded[name] = getattr(module, name)
        return found

    return load, lambda: sorted({*loaded, *home_of})
