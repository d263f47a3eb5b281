"""The post: letters of any senders into inboxes, in order per source and device, each stored once."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from itertools import islice
from typing import Any, Final

from rsmq.clock import to_ms
from rsmq.errors import BrokerError, BrokerUnavailable, ConfigError
from rsmq.keys import Keys
from rsmq.persistence.courier import Call, Courier
from rsmq.persistence.letter import seal_payload
from rsmq.persistence.receipt import Receipt
from rsmq.script import ADD_LETTERS, Value
from rsmq.settings import Settings

MOST_LETTERS: Final = 500
"""Letters in one script call: about 2 ms of the server's time."""
MOST_DEVICES: Final = 32
"""Devices in one script call: about 0.5 ms of the server's time."""
MOST_BYTES: Final = 1 << 20
MOST_PER_ROUND: Final = 500
LONGEST_EXPIRY: Final = timedelta(seconds=2**32 - 1)


class Line:
    """The letters of one source for one device: its keys, and the parcels that wait, linked one to the next.

    Few objects a letter, for they are what a garbage collection in the middle of much traffic has to walk through.
    """

    __slots__ = ("device", "first", "keys", "last", "source")

    def __init__(self, device: str, source: str, keys: tuple[str, ...]) -> None:
        self.device, self.source, self.keys = device, source, keys
        self.first: Parcel | None = None
        self.last: Parcel | None = None

    def open(self) -> Parcel:
        """The parcel that the next letter joins."""
        last = self.last
        if last is None or last.letters >= MOST_LETTERS or last.size >= MOST_BYTES:
            parcel = self.last = Parcel(self)
            if last is None:
                self.first = parcel
            else:
                last.after = parcel
            return parcel
        return last

    def take(self) -> Parcel | None:
        """The parcel that sets out next."""
        parcel = self.first
        if parcel is not None:
            self.first = parcel.after
            if self.first is None:
                self.last = None
        return parcel


class Parcel:
    """Letters of one line that go together."""

    __slots__ = ("after", "letters", "line", "others", "parts", "receipt", "size")

    def __init__(self, line: Line) -> None:
        self.line = line
        self.after: Parcel | None = None
        self.parts: list[Value] = []
        self.letters = self.size = 0
        self.receipt: Receipt | None = None
        self.others: list[Receipt] | None = None

    def promise(self, receipt: Receipt) -> None:
        """Put a receipt on it, once."""
        if receipt is self.receipt or (self.others is not None and receipt is self.others[-1]):
            return
        receipt.missing += 1
        if self.receipt is None:
            self.receipt = receipt
        elif self.others is None:
            self.others = [receipt]
        else:
            self.others.append(receipt)

    def stored(self, error: Exception | None) -> None:
        """It is stored, or not."""
        for receipt in (self.receipt, *(self.others or ())):
            if receipt is not None:
                receipt.stored(error)


class Van(Call):
    """Parcels that go in one script call: for several devices on one server, for one device on a cluster."""

    __slots__ = ("parcels", "post")

    def __init__(self, post: Post, parcels: list[Parcel], options: tuple[Value, ...]) -> None:
        keys: list[str] = []
        args: list[Value] = [*options]
        for parcel in parcels:
            keys += parcel.line.keys
            args += (parcel.line.source, parcel.letters)
            args += parcel.parts
        super().__init__(ADD_LETTERS, keys, args)
        self.post, self.parcels = post, parcels

    def done(self, reply: Any) -> None:
        error = reply if isinstance(reply, Exception) else None
        if error is None and reply[0] != b"OK":
            error = BrokerError(f"unexpected reply of a script: {reply!r}")
        if isinstance(error, BrokerError) and not isinstance(error, BrokerUnavailable) and len(self.parcels) > 1:
            # one of them has met a key of another type: alone, the others come through (or have done so)
            for parcel in self.parcels:
                self.post.send_off([parcel])
            return
        for parcel in self.parcels:
            parcel.stored(error)
            self.post.went(parcel.line, error)


class Post:
    """Takes letters and brings them into inboxes.

    Invariant: of one source and device at most one parcel is under way. The positions of a source only grow, and the
    server skips what is not above the last one it has stored, so a parcel can be sent again but never overtaken.
    """

    def __init__(self, courier: Courier, keys: Keys, settings: Settings, *, is_cluster: bool) -> None:
        self._courier, self._keys = courier, keys
        self._most_devices = 1 if is_cluster else MOST_DEVICES
        self._limit = int(settings.payload_limit)
        self._options = (to_ms(settings.inbox_ttl), settings.inbox_limit, to_ms(settings.dedup_window))
        self._sender = f"source:~{secrets.token_hex(5)}"
        self._count = 0
        self._lines: dict[str, dict[str, Line]] = {}
        self._ready: list[Line] = []

    # -- from this process ----------------------------------------------------------------------------------------

    async def send(
        self, device: str, payload: Any, topic: str, headers: Mapping[str, str] | None, expiry: timedelta | None
    ) -> None:
        """Store one letter. Concurrent calls share a write."""
        envelope, receipt = seal_payload(payload, topic, headers, self._limit), Receipt()
        self._put(device, envelope, expiry_ms(expiry), receipt)
        await receipt.complete()

    async def send_many(
        self,
        letters: Iterable[tuple[str, Any]],
        topic: str,
        headers: Mapping[str, str] | None,
        expiry: timedelta | None,
    ) -> None:
        """Store many, in the order given per device. The next round is encoded while one is under way."""
        ttl, before = expiry_ms(expiry), Receipt()
        sealed = self._sealed(letters, topic, headers)
        while True:
            receipt = None if before.error else self._round(sealed, ttl)
            await before.complete()
            if receipt is None:
                return
            before = receipt

    def _sealed(
        self, letters: Iterable[tuple[str, Any]], topic: str, headers: Mapping[str, str] | None
    ) -> Iterator[tuple[str, bytes]]:
        if isinstance(letters, str | bytes | Mapping) or not isinstance(letters, Iterable):
            raise ConfigError(f"{letters!r} are no letters: give (client id, payload) pairs")
        for pair in letters:
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                raise ConfigError(f"{pair!r} is no pair: give (client id, payload) for each letter")
            yield pair[0], seal_payload(pair[1], topic, headers, self._limit)

    def _round(self, letters: Iterator[tuple[str, bytes]], ttl: Value) -> Receipt | None:
        """What goes next, bounded in letters and bytes; None when nothing is left."""
        size, receipt = 0, Receipt()
        for device, envelope in islice(letters, MOST_PER_ROUND):
            self._put(device, envelope, ttl, receipt)
            size += len(envelope)
            if size >= MOST_BYTES:
                break
        return receipt if size else None  # not by what is missing: it may be stored already

    def _put(self, device: str, envelope: bytes, ttl: Value, receipt: Receipt) -> None:
        self._count += 1
        self.put(device, self._sender, f"{self._count:016d}", b"", ttl, envelope, receipt)

    # -- from any source ------------------------------------------------------------------------------------------

    def put(
        self, device: str, source: str, position: str, published: Value, ttl: Value, envelope: bytes, receipt: Receipt
    ) -> None:
        """Take one letter of a source. Positions of a source have one width and grow.

        `published` and `ttl` are milliseconds or empty: published now, no expiry of its own.
        """
        lines = self._lines.get(source)
        if lines is None:
            lines = self._lines[source] = {}
        line = lines.get(device)
        if line is None:
            line = Line(device, source, self._keys.device(device))  # a wrong id fails here, with nothing taken
            lines[device] = line
            self._make_ready(line)
        parcel = line.open()
        parcel.parts += (position, published, ttl, envelope)
        parcel.letters += 1
        parcel.size += len(envelope)
        if parcel.receipt is not receipt:
            parcel.promise(receipt)

    def _make_ready(self, line: Line) -> None:
        """Its next parcel sets out with those of other lines, when the event loop comes round."""
        if not self._ready:
            asyncio.get_running_loop().call_soon(self._load)
        self._ready.append(line)

    def _load(self) -> None:
        """Whatever is ready in this turn of the event loop sets out, in vans of bounded size."""
        ready, self._ready = self._ready, []
        parcels, letters, size = list[Parcel](), 0, 0
        for line in ready:
            parcel = line.take()
            assert parcel is not None, "what is ready has something to send"
            if parcels and (
                len(parcels) >= self._most_devices
                or letters + parcel.letters > MOST_LETTERS
                or size + parcel.size > MOST_BYTES
            ):
                self.send_off(parcels)
                parcels, letters, size = [], 0, 0
            parcels.append(parcel)
            letters += parcel.letters
            size += parcel.size
        if parcels:
            self.send_off(parcels)

    def send_off(self, parcels: list[Parcel]) -> None:
        """Parcels set out together."""
        self._courier.carry(Van(self, parcels, self._options))

    def went(self, line: Line, error: Exception | None) -> None:
        """A parcel of a line has ended; the next one may set out, and a line without one is forgotten."""
        while error is not None and (parcel := line.take()) is not None:
            parcel.stored(error)  # what comes after a gap would close it for ever, for the mark would be higher
        if line.first is not None:
            self._make_ready(line)
        else:
            del self._lines[line.source][line.device]

    def __repr__(self) -> str:
        return f"<Post lines={sum(map(len, self._lines.values()))}>"


def expiry_ms(expiry: timedelta | None) -> Value:
    """An expiry as milliseconds, empty for none. Raises ConfigError for a span that no letter can have."""
    if expiry is None:
        return b""
    if not isinstance(expiry, timedelta) or not timedelta(0) < expiry <= LONGEST_EXPIRY:
        raise ConfigError(
            f"expiry={expiry!r} is not possible: use a timedelta above 0 and up to {LONGEST_EXPIRY.days} days"
        )
    return max(1, to_ms(expiry))
