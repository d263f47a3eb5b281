"""How often a wrong token may be tried: by one address, and by all together.

A visitor who is logged in has a cookie and is not affected. An address that has logged in before is not held back by
the attempts of others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from math import ceil
from typing import Final

from rsmq.model.clock import monotonic


@dataclass(frozen=True, slots=True)
class LoginAllowance:
    """So many attempts at once, and then one every `seconds`."""

    attempts: int
    seconds: float


OF_ADDRESS: Final = LoginAllowance(attempts=10, seconds=3.0)
OF_ALL: Final = LoginAllowance(attempts=100, seconds=0.125)
MOST_KNOWN: Final = 1000
MOST_BUCKETS: Final = 1000


@dataclass(slots=True)
class Bucket:
    """The attempts that are left, as the time at which all of them will be back."""

    full_at: float = 0.0

    def wait(self, allowance: LoginAllowance, now: float) -> float:
        """Seconds until an attempt is allowed; 0 if one is."""
        return max(0.0, self.full_at - now - (allowance.attempts - 1) * allowance.seconds)

    def take(self, allowance: LoginAllowance, now: float) -> None:
        """Count an attempt."""
        self.full_at = max(self.full_at, now) + allowance.seconds

    def give_back(self, allowance: LoginAllowance) -> None:
        """It was no guess."""
        self.full_at -= allowance.seconds


class LoginLimit:
    """Counts attempts before their token is looked at, so that many at the same time are counted, too."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._all = Bucket()
        self._buckets: dict[str, Bucket] = {}
        self._known: dict[str, None] = {}

    def take(self, address: str) -> int:
        """Count an attempt. 0: it may be made; else the seconds to wait, and nothing was counted."""
        now, name = self._clock(), network_of(address)
        bucket = self._buckets.get(name) or Bucket()
        wait = bucket.wait(OF_ADDRESS, now)
        if name not in self._known:
            wait = max(wait, self._all.wait(OF_ALL, now))
        if wait > 0:
            return ceil(wait)
        self._forget(now)
        self._buckets[name] = bucket
        bucket.take(OF_ADDRESS, now)
        self._all.take(OF_ALL, now)
        return 0

    def succeeded(self, address: str) -> None:
        """The attempt had the token."""
        name = network_of(address)
        self._all.give_back(OF_ALL)
        self._buckets.pop(name, None)
        self._known.pop(name, None)
        self._known[name] = None
        if len(self._known) > MOST_KNOWN:
            del self._known[next(iter(self._known))]

    def _forget(self, now: float) -> None:
        """Drop the addresses that have all their attempts again. The limit of all together bounds the others."""
        if len(self._buckets) > MOST_BUCKETS:
            self._buckets = {name: bucket for name, bucket in self._buckets.items() if bucket.full_at > now}


def network_of(address: str) -> str:
    """An IPv6 address without its last 64 bits, which a visitor can choose freely; anything else as it is."""
    try:
        parsed = ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, IPv6Address) and parsed.ipv4_mapped is None:
        return str(IPv6Address(int(parsed) >> 64 << 64))
    return str(getattr(parsed, "ipv4_mapped", None) or parsed)
