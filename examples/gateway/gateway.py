"""A WebSocket gateway: each phone gets its letters in order, and again what it has not acknowledged.

cd examples/gateway
uvicorn gateway:app
"""

from starlette.applications import Starlette
from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket

from rsmq import Broker
from rsmq.asgi import lifespan, relay

broker = Broker()


async def serve(websocket: WebSocket) -> None:
    """Until the phone disconnects. A real gateway takes the client id from a token that it has verified."""
    await relay(websocket, broker, websocket.path_params["phone"])


app = Starlette(routes=[WebSocketRoute("/phones/{phone}", serve)], lifespan=lifespan(broker))
