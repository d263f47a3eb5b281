"""What is known of the master, and which of several answers of sentinels counts. No I/O."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from redis.exceptions import AuthenticationError, NoPermissionError, RedisError
from redis.sentinel import MasterNotFoundError

Address = tuple[str, int]


class Knowledge:
    """What is known of the master, by the newest configuration that any sentinel has named.

    A configuration names one master. An older one never counts again, nor another master for the same one, unless all
    sentinels say so who were asked after it was known: then somebody has set them up anew.
    """

    def __init__(self, moved: Callable[[Address], None]) -> None:
        self.master: Address | None = None
        self.epoch = -1
        self._moved = moved

    def learn(self, states: list[Any], sentinels: int, since: int) -> Address:
        """The master, after what some of so many sentinels say who were asked when epoch `since` was known."""
        said = [(int(each["config-epoch"]), (str(each["ip"]), int(each["port"]))) for each in states]
        epoch, address = max(said)
        is_anew = len(states) == sentinels and since == self.epoch and len(set(said)) == 1
        if epoch > self.epoch or is_anew or self.master is None:
            before, self.epoch, self.master = self.master, epoch, address
            if before not in (None, address):
                self._moved(address)
        return self.master

    def is_master(self, connection: Any) -> bool:
        """Whether a connection leads there."""
        return self.master in (None, (connection.host, connection.port))


def is_moving(state: Any) -> bool:
    """Whether this sentinel leads a failover. From the promotion on it names the old master under the new
    configuration, until every replica follows: only where it sends clients is right by then."""
    return state is not None and "failover_in_progress" in state["flags"]


def redirected(state: Any, address: Any) -> Any:
    """What it says, with the address that it sends clients to. That one is up, whatever is said of the other."""
    host, port = address
    host = host.decode() if isinstance(host, bytes) else host
    if (host, int(port)) == (state["ip"], int(state["port"])):
        return state
    return state | {"ip": host, "port": int(port), "is_sdown": False, "is_odown": False}


def absence(name: str, errors: list[Exception]) -> RedisError:
    """Why there is no master: a refusal of the sentinels will not pass by itself, anything else may."""
    for error in errors:
        cause = error.__cause__ if isinstance(error.__cause__, RedisError) else error
        if isinstance(cause, AuthenticationError | NoPermissionError):
            return AuthenticationError(
                f"a sentinel: {cause}; give sentinel_username and sentinel_password in its query"
            )
    return MasterNotFoundError(f"No master found for {name!r}" + "".join(f" ({error})" for error in errors[:1]))
