"""What the extras of this distribution, and other distributions, add by entry points of `importlib.metadata`.

The groups are commands, rules of the doctor and pages of the dashboard: docs/internals.md says what each takes. Listing
a group reads metadata, and runs no code of theirs; only what is used is loaded.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal

from rsmq.errors import ConfigError
from rsmq.model.distribution import OWN

Group = Literal["rsmq.commands", "rsmq.doctor_rules", "rsmq.dashboard_pages"]


class Extension:
    """One entry point. Its extras say what to install for it: `gateway = "rsmq.cli.gateway:gateway [mqtt]"`."""

    def __init__(self, entry: EntryPoint) -> None:
        self._entry = entry
        self.name = entry.name
        self.distribution = OWN if entry.dist is None else entry.dist.name

    @property
    def is_own(self) -> bool:
        """Whether it comes with rsmq."""
        return self.distribution == OWN

    def load(self) -> Any:
        """The object. Raises ConfigError that says what to install, or what is wrong with it."""
        try:
            return self._entry.load()
        except ModuleNotFoundError as error:
            if (error.name or "").split(".")[0] == self._entry.module.split(".")[0]:
                raise self._broken(error) from error
            needs = f"{self.distribution}[{','.join(self._entry.extras)}]" if self._entry.extras else error.name
            raise ConfigError(
                f"{self.name} needs {error.name}, which is not installed: pip install '{needs}'"
            ) from None
        except Exception as error:
            raise self._broken(error) from error

    def _broken(self, error: Exception) -> ConfigError:
        return ConfigError(
            f"{self.name} cannot be loaded ({type(error).__name__}: {error}): update or uninstall {self.distribution}"
        )


def extensions(group: Group) -> list[Extension]:
    """Those of a group, by name. Of two with one name that of rsmq is taken."""
    found: dict[str, Extension] = {}
    for each in map(Extension, entry_points(group=group)):
        if each.is_own or each.name not in found:
            found[each.name] = each
    return sorted(found.values(), key=lambda each: each.name)
