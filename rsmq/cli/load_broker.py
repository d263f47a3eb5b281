"""Loads a broker from `MODULE:BROKER`. An error in the user's module is reported with its file and line."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
import traceback
from pathlib import Path
from types import ModuleType

from rsmq.broker import Broker
from rsmq.broker.sync_broker import SyncBroker
from rsmq.errors import ConfigError, RsmqError
from rsmq.model.interrupt import is_from_signal

FORM = "write MODULE:BROKER, such as app:broker for the object `broker` in app.py"


def load_broker(target: str) -> Broker:
    """Import the module (from the current directory first) and return its broker. Raises ConfigError."""
    broker = load_object(target)
    if isinstance(broker, SyncBroker):
        return broker.asynchronous
    if not isinstance(broker, Broker):
        name, _, attribute = target.partition(":")
        raise ConfigError(f"{target} is a {type(broker).__name__}, not a Broker: {suggest_broker(name, attribute)}")
    return broker


def load_object(target: str) -> object:
    """Import the module and return what it has under this name. Raises ConfigError."""
    name, colon, attribute = target.partition(":")
    if name.endswith(".py") or os.sep in name:
        name = name.removesuffix(".py").strip("./").replace(os.sep, ".")
        raise ConfigError(f"{target!r} names a file: write {name}:{attribute or 'broker'}")
    if not colon or not name or not attribute:
        raise ConfigError(f"{target!r} does not name a broker: {FORM}")
    here = current_directory()
    if here is not None and str(here) not in sys.path:
        sys.path.insert(0, str(here))
    found: object = import_module(name)
    for part in attribute.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise ConfigError(f"module {name!r} has no {attribute!r}: {suggest_broker(name, attribute)}") from None
        except Exception as error:  # a property, or the module's own __getattr__
            raise ConfigError(f"{target} cannot be read: {position_of(error)}{describe(error)}") from None
    return found


def import_module(name: str) -> ModuleType:
    """The module, or ConfigError with the line of the user's code that failed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise ConfigError(f"there is no module {name!r} in {suggest_module(name)}") from None
        raise ConfigError(f"{name} cannot be imported: {position_of(error)}{describe(error)}") from None
    except BaseException as error:
        if is_from_signal(error) or isinstance(error, KeyboardInterrupt):
            raise
        raise ConfigError(f"{name} cannot be imported: {position_of(error)}{describe(error)}") from None


def suggest_broker(name: str, wanted: str) -> str:
    """The brokers of the module that may have been meant."""
    brokers = [key for key, value in vars(sys.modules[name]).items() if isinstance(value, Broker | SyncBroker)]
    if not brokers:
        return f"it has no Broker at all; {FORM}"
    close = difflib.get_close_matches(wanted, brokers, n=1)
    return f"did you mean {name}:{(close or brokers)[0]}?"


def current_directory() -> Path | None:
    """The current directory; None if it has been removed, as by a deployment that replaces it."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        return None


def suggest_module(name: str) -> str:
    """Where it was looked for, and modules with a similar name there, or all that there are."""
    first = name.partition(".")[0]
    here = current_directory()
    if here is None:
        return "the current directory, which has been removed: run the command in one that is there"
    names = sorted(
        [path.stem for path in here.glob("*.py")] + [path.parent.name for path in here.glob("*/__init__.py")]
    )
    if first in names:
        inside = sorted(path.stem for path in (here / first).glob("*.py") if path.stem != "__init__")
        return f"{here}: package {first} has {', '.join(inside) or 'no modules'}"
    close = difflib.get_close_matches(first, names, n=1)
    if close:
        return f"{here}: did you mean {close[0]}?"
    there = f": there are {', '.join(names[:10])}" if names else ", nor any other: run the command where your code is"
    return f"{here}{there}"


def position_of(error: BaseException) -> str:
    """`file:line: ` of the innermost frame of the user's own code, else of the innermost one."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{shorten(error.filename)}:{error.lineno}: "
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not is_machinery(frame.filename)]
    own = [frame for frame in frames if is_own(frame.filename)]
    for frame in (own or frames)[-1:]:
        return f"{shorten(frame.filename)}:{frame.lineno}: {frame.line}: "
    return ""


def describe(error: BaseException) -> str:
    """The text of an error of rsmq; of any other error its type, too."""
    return str(error) if isinstance(error, RsmqError) else f"{type(error).__name__}: {error}"


def is_machinery(filename: str) -> bool:
    """Whether a frame belongs to the import system or to rsmq."""
    package = Path(__file__).parents[1]
    return filename.startswith("<frozen") or "importlib" in filename or Path(filename).is_relative_to(package)


def is_own(filename: str) -> bool:
    """Whether a file belongs to the project in the current directory, and is not an installed package."""
    here = current_directory()
    return here is not None and Path(filename).is_relative_to(here) and "site-packages" not in filename


def shorten(filename: str) -> str:
    """Relative to the current directory, if it is inside."""
    path, here = Path(filename), current_directory()
    return str(path.relative_to(here)) if here is not None and path.is_relative_to(here) else filename
