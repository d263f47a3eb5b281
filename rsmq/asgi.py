"""rsmq in an ASGI application (FastAPI, Starlette and what is built on them): a lifespan, a dependency, WebSockets, and
server-sent events.

Kept apart from the package's own names, because it needs Starlette, which such an application has.
"""

from __future__ import annotations

import asyncio
import logging
import re
from base64 import b64encode
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from datetime import timedelta
from operator import le
from typing import Any, Final

import anyio
from pydantic_core import from_json, to_json
from starlette.requests import HTTPConnection, Request
from starlette.responses import StreamingResponse
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from rsmq.broker import Broker
from rsmq.errors import BrokerError, ConfigError, Malformed, SessionLost, SessionTaken
from rsmq.model.duration import Duration, checked_duration
from rsmq.model.record import whole
from rsmq.persistence import Letter, Session

log = logging.getLogger("rsmq.asgi")

STATE: Final = "rsmq"
TAKEN: Final = 4001
"""The close code when the device has connected elsewhere: this client must not connect again by itself."""
REFUSED: Final = 1008
"""The close code when the device sends something else than acknowledgements."""
LINE_END: Final = re.compile("\r\n|\r|\n")
"""What ends a line of an event. `str.splitlines` knows more, which are text here: JSON may have U+2028 in a string."""
RESTART, LATER, FULL_REASON = 1012, 1013, 123
"""The close codes for a lost session and for an unavailable server, and the most bytes of a reason."""

AppLifespan = Callable[[Any], AbstractAsyncContextManager[Any]]


def lifespan(broker: Broker, *, worker: bool = False, inside: AppLifespan | None = None) -> AppLifespan:
    """A `lifespan=` for FastAPI or Starlette: the broker is connected as long as the application runs.

    With `worker` it also runs the handlers, in the application's own event loop, and stops them gracefully before the
    application ends. `inside` is a lifespan of your own, entered after the broker and left before it.
    """

    @asynccontextmanager
    async def surround(app: Any) -> AsyncIterator[Mapping[str, Any]]:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(broker.running() if worker else broker)
            state = None if inside is None else await stack.enter_async_context(inside(app))
            yield {**(state or {}), STATE: broker}

    return surround


async def connected(connection: HTTPConnection) -> Broker:
    """The broker of the application, as a dependency: `Annotated[Broker, Depends(connected)]`.

    Override it in tests as any other (`app.dependency_overrides[connected] = ...`). Raises ConfigError when the
    application was not made with `lifespan`.
    """
    broker = connection.scope.get("state", {}).get(STATE)
    if not isinstance(broker, Broker):
        raise ConfigError("this application has no broker: make it with FastAPI(lifespan=rsmq.asgi.lifespan(broker))")
    return broker


def letter_as_json(letter: Letter) -> str:
    """`{"seq": 7, "topic": "alerts", "type": "application/json", "payload": {...}, "redelivered": false}`.

    Bytes are base64, also those of a payload that cannot be decoded by its content type.
    """
    try:
        payload = letter.payload
    except Malformed:
        payload = letter.data
    if isinstance(payload, bytes):
        payload = b64encode(payload).decode()
    fields = {"seq": letter.seq, "topic": letter.topic, "type": letter.type, "payload": payload}
    return to_json({**fields, "redelivered": letter.is_redelivered}).decode()


async def relay(
    websocket: WebSocket,
    broker: Broker,
    client_id: str,
    *,
    window: int = 100,
    clean: bool = False,
    encode: Callable[[Letter], str | bytes] = letter_as_json,
) -> None:
    """Serve a device at a WebSocket until it disconnects: its letters to it, its acknowledgements to its inbox.

    The device gets each letter as `encode` writes it, and answers `{"ack": 7}` with the `seq`. At most `window` letters
    are unacknowledged at a time. What was not acknowledged comes again at the next connection, in order, marked as
    redelivered. `client_id` must be authenticated: a client that connects with it gets its letters.

    Close codes: 4001 when the device has connected elsewhere (do not connect again by itself), 1008 for something else
    than an acknowledgement, 1012 when the server has lost the session and 1013 when it is unavailable (connect again).
    """
    session = broker.connect(client_id, window=window, clean=clean)
    if websocket.application_state is WebSocketState.CONNECTING:
        await websocket.accept()
    code, reason = 1000, ""
    try:
        async with session:
            await WebSocketRelay(session, websocket, encode).run()
    except SessionTaken as error:
        code, reason = TAKEN, str(error)
    except SessionLost as error:
        code, reason = RESTART, str(error)
    except BrokerError as error:
        code, reason = LATER, str(error)
    except NoAcknowledgement as error:
        code, reason = REFUSED, str(error)
    if WebSocketState.DISCONNECTED not in (websocket.client_state, websocket.application_state):
        with suppress(WebSocketDisconnect):
            await websocket.close(code, reason.encode()[:FULL_REASON].decode(errors="ignore"))


def relay_sse(
    request: Request,
    broker: Broker,
    client_id: str,
    *,
    window: int = 100,
    clean: bool = False,
    encode: Callable[[Letter], str | bytes] = letter_as_json,
    keep_alive: Duration = timedelta(seconds=15),
) -> StreamingResponse:
    """A response that sends the letters of an inbox to a browser, as server-sent events, until it disconnects.

    `new EventSource("/events")` connects again by itself, to any process, and says in `Last-Event-ID` which event it
    has got last: that acknowledges it with all before it, and what comes after is sent (again). A browser that stays
    connected acknowledges nothing: then the oldest letter is, when `window` newer ones were sent. Each event has the
    letter as `encode` writes it, in one or several lines, and an id. `client_id` must be authenticated.

    An event `taken` says that the client has connected elsewhere: close the EventSource, or both end each other for
    ever. The stream ends when the server is unavailable or has lost the session; the browser connects again. Without a
    letter a comment is sent after each `keep_alive`, so that proxies keep the connection. Raises ConfigError.
    """
    seconds = checked_duration("keep_alive", keep_alive).total_seconds()
    if seconds <= 0:
        raise ConfigError(f"keep_alive={keep_alive!r} is not possible: use more than 0, such as '15s'")
    session = broker.connect(client_id, window=window, clean=clean)
    events = EventStream(session, window, encode, seconds, request.headers.get("last-event-id", ""))
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(events.run(), media_type="text/event-stream", headers=headers)


class EventStream:
    """One open session, and the events that a browser gets."""

    def __init__(
        self, session: Session, window: int, encode: Callable[[Letter], str | bytes], keep_alive: float, last_id: str
    ) -> None:
        self._session = session
        self._window = window
        self._encode = encode
        self._keep_alive = keep_alive
        self._seen = read_event_id(last_id)
        self._out = deque[Letter]()

    async def run(self) -> AsyncIterator[str]:
        """The text of the stream."""
        try:
            async with self._session:
                yield ": connected\n\n"
                while True:
                    step = asyncio.ensure_future(anext(self._session))
                    try:
                        while not (await asyncio.wait((step,), timeout=self._keep_alive))[0]:
                            yield ": waiting\n\n"
                        letter = step.result()
                    finally:
                        step.cancel()
                    if letter.is_received or self._has_arrived(letter):
                        await self._session.ack(letter)
                        continue
                    yield self._event(letter)
                    self._out.append(letter)
                    if len(self._out) >= self._window:
                        await self._session.ack(self._out.popleft())
        except SessionTaken:
            yield "event: taken\ndata: \n\n"
        except (SessionLost, BrokerError) as error:  # BrokerError: the server is away. The browser comes again
            log.info("events for a client end: %s", error)

    def _has_arrived(self, letter: Letter) -> bool:
        """Whether the browser has said that it has got this event, or a later one."""
        return letter.is_redelivered and all(map(le, event_id(letter), self._seen))

    def _event(self, letter: Letter) -> str:
        text = self._encode(letter)
        lines = LINE_END.split(text if isinstance(text, str) else text.decode())
        number, published_ms = event_id(letter)
        return "".join([f"id: {number}-{published_ms}\n", *[f"data: {line}\n" for line in lines], "\n"])


def event_id(letter: Letter) -> tuple[int, int]:
    """Which event a letter is: its seq, and when it was published. After a loss of the inbox seqs start anew."""
    return letter.seq, int(letter.timestamp.timestamp() * 1000)


def read_event_id(text: str) -> tuple[int, int]:
    """The inverse, from `Last-Event-ID`. (0, 0) for what is none."""
    seq, _, published_ms = text.partition("-")
    numbers = whole(seq), whole(published_ms)
    return (0, 0) if numbers[0] is None or numbers[1] is None else (numbers[0], numbers[1])


class NoAcknowledgement(ValueError):
    """The device has sent something else."""


class WebSocketRelay:
    """One open session and one accepted WebSocket. It ends with the first of its two directions."""

    def __init__(self, session: Session, websocket: WebSocket, encode: Callable[[Letter], str | bytes]) -> None:
        self._session = session
        self._websocket = websocket
        self._encode = encode
        self._out: dict[int, Letter] = {}
        self._error: Exception | None = None

    async def run(self) -> None:
        """Run until the device disconnects. Raises the first error of the session."""
        async with anyio.create_task_group() as tasks:
            for direction in (self._push, self._acknowledge):
                tasks.start_soon(self._until_its_end, direction, tasks.cancel_scope)
        if self._error is not None:
            raise self._error

    async def _until_its_end(self, direction: Callable[[], Awaitable[None]], scope: anyio.CancelScope) -> None:
        """Keep its error, so that `run` raises it by itself and not in a group."""
        try:
            await direction()
        except WebSocketDisconnect:
            pass
        except Exception as error:
            self._error = self._error or error
        scope.cancel()

    async def _push(self) -> None:
        async for letter in self._session:
            if letter.is_received:  # it came over MQTT, and the device has it: only the handshake was not finished
                await self._session.ack(letter)
                continue
            self._out[letter.seq] = letter
            text = self._encode(letter)
            await (self._websocket.send_text(text) if isinstance(text, str) else self._websocket.send_bytes(text))

    async def _acknowledge(self) -> None:
        while (frame := await self._websocket.receive())["type"] != "websocket.disconnect":
            letter = self._out.pop(acknowledged(frame.get("text") or frame.get("bytes") or ""), None)
            if letter is not None:  # else it was acknowledged twice, or came over an earlier connection
                await self._session.ack(letter)


def acknowledged(frame: str | bytes) -> int:
    """The seq in `{"ack": 7}`. Raises NoAcknowledgement."""
    try:
        seq = from_json(frame)["ack"]
    except (ValueError, TypeError, KeyError):
        seq = None
    if type(seq) is not int:
        raise NoAcknowledgement('only acknowledgements are expected: {"ack": 7} with the seq of a letter')
    return seq
