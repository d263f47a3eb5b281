"""Where a command works: the server as options that executors get, topics by name or pattern, whole paths."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import overload

from rsmq.address import has_password, redact
from rsmq.embedded import embedded
from rsmq.errors import ConfigError
from rsmq.keys import NAME
from rsmq.settings import Settings


@contextmanager
def connection(
    url: str | None, password_env: str | None, password_file: str | None, master: str | None
) -> Iterator[dict[str, str]]:
    """How executors reach the server, as options of `format("rsmq")`. These never hold a password."""
    settings = Settings() if url is None else Settings(url=url)
    named = {"passwordEnv": password_env, "passwordFile": password_file}
    options = {"prefix": settings.prefix} | {name: text for name, text in named.items() if text is not None}
    if settings.url is None:
        with embedded() as address:
            yield options | {"url": address}
    elif not has_password(settings.url):
        yield options | {"url": settings.url}
    elif (master or "local").startswith("local") or url is None:
        os.environ["RSMQ_URL"] = settings.url  # inherited by Spark's own processes on this machine
        yield options
    else:
        raise ConfigError(
            f"the url {redact(settings.url)} holds a password, which would go to every executor in the clear: leave "
            f"it out and give --password-env or --password-file, or set RSMQ_URL on every executor"
        )


def selection(topics: str) -> dict[str, str]:
    """Names with commas as `subscribe`, anything else as a pattern."""
    listed = [name.strip() for name in topics.split(",")]
    return {"subscribe": ",".join(listed)} if all(map(NAME.fullmatch, listed)) else {"subscribePattern": topics}


def names(topics: str) -> tuple[str, ...]:
    """Names with commas."""
    return tuple(dict.fromkeys(name.strip() for name in topics.split(",") if name.strip()))


@overload
def absolute(path: str) -> str: ...
@overload
def absolute(path: None) -> None: ...
def absolute(path: str | None) -> str | None:
    """A path of this machine as a whole one: executors have another directory. An address stays as it is."""
    return path if path is None or "://" in path else f"file://{os.path.abspath(path)}"
