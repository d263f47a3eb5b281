"""A web service that answers at once and notifies in the background, through a failover chain, until it has worked.

    cd examples/notifications
    uvicorn service:app                                  # web and worker in one process, or:
    uvicorn service:web & rsmq worker service:broker     # each for itself: scale and restart them apart

    curl -i localhost:8000/notify --json '{"user": "ada", "text": "your order is on its way"}'

`POST /notify` answers 202 when the notification is stored: from then on it survives a kill of any process. When no
channel takes it, it is tried again later; notifications of one user keep their order meanwhile.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import timedelta

from channels import CHAIN, NoChannelAvailable, Notification
from fastapi import FastAPI

from rsmq import Broker, Message, Retry, RetryPolicy

broker = Broker()


@broker.handler("notifications", group="sender", retry=RetryPolicy(max_attempts=10))
async def send(notification: Notification, message: Message) -> None:
    try:
        channel = await CHAIN.send(notification, message.attempt)
    except NoChannelAvailable as error:
        raise Retry(str(error), after=timedelta(milliseconds=200)) from error
    print(f"{notification.user}: {notification.text} [{channel.name}, attempt {message.attempt}]", flush=True)


def create_app(life: Callable[[], AbstractAsyncContextManager[Broker]]) -> FastAPI:
    """The service. `life` is what surrounds it: a broker that also works, or one that only publishes."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with life():
            yield

    service = FastAPI(lifespan=lifespan)

    @service.post("/notify", status_code=202)
    async def notify(notification: Notification) -> dict[str, str]:
        return {"id": await broker.publish("notifications", notification, key=notification.user)}

    return service


app = create_app(broker.running)
web = create_app(lambda: broker)
