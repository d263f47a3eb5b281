"""Which gateways are dead, from what the renewals of this gateway's lease have shown. No I/O."""

from __future__ import annotations

from typing import Final, NamedTuple

BEAT: Final = 0.25
"""Seconds between two renewals of the lease of a gateway."""
SILENT_MS: Final = 600
"""A gateway that has not renewed its lease for so long, and whose connection is closed, seems to be dead."""
CONFIRMED: Final = 2
"""Beats in a row at which it must seem so."""
NOTICED: Final = SILENT_MS / 1000 + CONFIRMED * BEAT
"""Seconds after its last renewal in which the others have noticed its death at the latest. What is left of the three
that a will may take is for ending its connections."""
YOUNG: Final = 1.0
"""Seconds in which a gateway that has just started declares none dead that it has not seen alive itself."""


class Renewal(NamedTuple):
    """The answer to a renewal. `leases`: until when those of others last, in ms of the server: of all that were asked
    for. `silent`: who seems to be dead."""

    leases: dict[str, int]
    silent: list[str]


class Suspects:
    """Which gateways are dead.

    After an outage all seem to be dead until they have renewed their own leases: for `settle` seconds only one that has
    done so since is declared dead. When this gateway starts, an outage may just have ended, too.
    """

    def __init__(self, settle: float, now: float) -> None:
        self._settle, self._steady = settle, now
        self._has_just_started = True
        self._beats = dict[str, int]()
        self._leases = dict[str, int]()
        """As they were first seen since the outage."""
        self._returned = set[str]()

    def is_settled(self, now: float) -> bool:
        """Whether every gateway has had the time to renew its lease. If not, a beat has to show the leases of all."""
        return now - self._steady >= self._settle

    def beaten(self, beat: Renewal, now: float) -> list[str]:
        """A renewal has shown this. Returns those whose connections are to be ended."""
        self._beats = {each: self._beats.get(each, 0) + 1 for each in beat.silent}
        is_settled = self.is_settled(now)
        if is_settled:
            self._leases.clear()
            self._returned.clear()
            self._has_just_started = False
        else:
            for each, until in beat.leases.items():
                if until > self._leases.setdefault(each, until):
                    self._returned.add(each)
        return [each for each in self._confirmed() if is_settled or each in self._returned]

    def unseen(self, now: float) -> list[str]:
        """Those that have been silent since this gateway has started: `vouch` for each if the server was there all the
        time. Then there was no outage after which they could come back."""
        if not self._has_just_started or self.is_settled(now) or now - self._steady < YOUNG:
            return []
        return [each for each in self._confirmed() if each not in self._returned]

    def vouch(self, gateway: str) -> None:
        """No outage is the reason why it is silent."""
        self._returned.add(gateway)

    def interrupted(self, now: float) -> None:
        """The server did not answer."""
        self._beats.clear()
        self._leases.clear()
        self._returned.clear()
        self._steady = now
        self._has_just_started = False

    def _confirmed(self) -> list[str]:
        return [each for each, beats in self._beats.items() if beats >= CONFIRMED]

    def __repr__(self) -> str:
        return f"<Suspects {self._beats}>"
