"""MQTT over WebSocket: frames around the bytes of one connection. It knows no rule of MQTT."""

from __future__ import annotations

import asyncio
import logging
from http import HTTPStatus
from typing import Any, Final

from websockets.frames import CloseCode, Frame, Opcode
from websockets.http11 import Request
from websockets.protocol import State
from websockets.server import ServerProtocol
from websockets.typing import Origin, Subprotocol

from rsmq.gateway.connections.client import ClientConnection
from rsmq.gateway.connections.client_link import LINGER
from rsmq.gateway.connections.client_protocol import ClientProtocol
from rsmq.gateway.connections.context import Context
from rsmq.gateway.connections.peer import Peer

PROTOCOLS: Final = (Subprotocol("mqtt"), Subprotocol("mqttv3.1"))
"""The standard's name, and what clients of version 3.1 ask for."""


EXTRA: Final = 64 << 10
"""Bytes of a frame besides the largest packet: others that were sent with it."""
FRAMES_LOG: Final = logging.getLogger("rsmq.gateway.frames")
FRAMES_LOG.setLevel(logging.WARNING)  # else the package logs a line for each client, and for each health check


class FramedTransport:
    """The socket of a client, as its connection sees it: what it writes becomes binary messages."""

    def __init__(self, socket: asyncio.Transport, frames: ServerProtocol) -> None:
        self._socket, self._frames = socket, frames
        self.pause_reading = socket.pause_reading
        self.resume_reading = socket.resume_reading
        self.get_write_buffer_size = socket.get_write_buffer_size
        self.write_eof = socket.write_eof
        self.abort = socket.abort

    def write(self, data: bytes, /) -> None:
        """Send one binary message."""
        if self._frames.state is State.OPEN:
            self._frames.send_binary(data)
            self.flush()

    def flush(self) -> None:
        """Send what is ready: messages, answers to pings, the end."""
        for data in self._frames.data_to_send():
            if data:
                self._socket.write(data)
            else:
                self._socket.close()

    def can_write_eof(self) -> bool:
        """A close frame says that nothing follows."""
        return False

    def close(self) -> None:
        """End the connection with a close frame. The socket is closed when that of the client has come, or soon."""
        if self._frames.state is not State.OPEN:
            self.flush()  # the answer to a close frame that came with the client's DISCONNECT
            self._socket.close()
            return
        self._frames.send_close(CloseCode.NORMAL_CLOSURE)
        self.flush()
        asyncio.get_running_loop().call_later(LINGER, self._socket.abort)


class WebSocketProtocol(ClientProtocol):
    """A connection that begins with an HTTP request. The MQTT connection begins when it is accepted."""

    __slots__ = ("_frames", "_transport")

    def __init__(self, context: Context, address: str = "") -> None:
        super().__init__(context, address)
        origins = context.rules.options.origins
        self._frames = ServerProtocol(
            origins=[Origin(each) for each in origins] if origins else None, subprotocols=PROTOCOLS,
            max_size=(None, context.rules.limits.packet_size + EXTRA), logger=FRAMES_LOG,
        )  # fmt: skip

    def started(self, transport: asyncio.Transport, peer: Peer) -> None:
        """Its request may come."""
        self._transport = FramedTransport(transport, self._frames)
        context = self._context
        context.clients.wheel.add_after(context.rules.options.connect_timeout.total_seconds(), self._look)

    def _look(self, _now: float) -> None:
        """A client whose request has not come in time is closed."""
        if self._client is None:
            self._socket.close()

    def bytes_came(self, data: bytes) -> None:
        """Bytes of a request, or of frames."""
        self._frames.receive_data(data)
        for event in self._frames.events_received():
            if isinstance(event, Request):
                self._accept(event)
            elif isinstance(event, Frame):
                self._read(event)
        self._transport.flush()
        if self._frames.close_expected():
            self._socket.close()

    def _accept(self, request: Request) -> None:
        response = self._frames.accept(request)
        self._frames.send_response(response)
        self._transport.flush()
        if self._frames.state is State.OPEN:
            self._client = ClientConnection(self._context, self._transport, self._peer)
        else:
            counts, status = self._context.counts, response.status_code
            if status == HTTPStatus.UPGRADE_REQUIRED:  # a plain request, as of a health check
                counts["refused: websocket"] += 1
            else:
                counts.refused("websocket", f"{self._peer.address}: {status} {response.reason_phrase}")

    def _read(self, frame: Frame) -> None:
        """A packet may span frames, and a frame may hold several: their bytes are passed on as they come."""
        if self._client is None:
            return
        if frame.opcode is Opcode.TEXT:
            self._context.counts["refused: websocket text"] += 1
            self._frames.fail(CloseCode.UNSUPPORTED_DATA, "MQTT is binary")
            self._client.lost()
        elif frame.opcode in (Opcode.BINARY, Opcode.CONT):
            self._client.received(bytes(frame.data))
        elif frame.opcode is Opcode.CLOSE:
            self._client.ended()

    def eof_received(self) -> Any:
        """The client has closed its side."""
        return False
