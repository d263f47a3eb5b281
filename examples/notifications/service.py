"""A web service that answers at once and notifies in the background: PUSH; if it is not read, SMS; then AlimTalk.

    cd examples/notifications
    uvicorn service:app                                  # web and worker in one process, or:
    uvicorn service:web & rsmq worker service:broker     # each for itself: scale and restart them apart

    curl localhost:8000/notify --json '{"user": "ada", "text": "your gate has changed"}'     # {"id": "0190..."}
    curl localhost:8000/read --json '{"user": "ada", "id": "0190..."}'                       # no SMS, no AlimTalk

`POST /notify` answers 202 when the notification is stored: from then on it survives a kill of any process. Each step
that was sent stores the next one, delayed, when it is settled: both at once, or not at all. The receipt of the reader
goes through the steps and cancels the one that is next. All have the id of the notification, each in its own topic.
"""

import os
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import timedelta

from channels import ALIMTALK, PER, PUSH, SMS, Channel, ChannelUnavailable, Notification
from fastapi import FastAPI
from pydantic import BaseModel
from tenacity import wait_fixed

from rsmq import Broker, Burial, Cancelled, Message, Rate, Retry, RetryPolicy, Running, Settled, Unknown

READ_WITHIN = timedelta(seconds=float(os.environ.get("READ_WITHIN", "2")))
"""How long a user may take to read it, before the next step."""
WORTHLESS_AFTER = timedelta(hours=1)
"""No step is sent later: the gate is closed."""
QUICK = RetryPolicy(max_attempts=3, wait=wait_fixed(0.2))
PATIENT = RetryPolicy(max_attempts=10, wait=wait_fixed(0.5))

broker = Broker()


class Receipt(BaseModel):
    """A user has read the notification with this id."""

    user: str
    id: str


def provider(message: Message) -> str:
    """Who delivers it. A provider counts the calls of all workers together."""
    return message.topic


def at_most(channel: Channel) -> list[Rate]:
    """Its limits: so many calls of its provider, and so many to one user. Both hold."""
    return [Rate(channel.calls, per=PER, by=provider), Rate(channel.to_a_user, per=PER, by="key")]


@broker.handler("notifications", group="sender", retry=QUICK, rate=at_most(PUSH))
async def send_push(notification: Notification, message: Message) -> None:
    await send(PUSH, notification, message, then="sms")


@broker.handler("sms", group="sender", retry=QUICK, rate=at_most(SMS))
async def send_sms(notification: Notification, message: Message) -> None:
    await send(SMS, notification, message, then="alimtalk")


@broker.handler("alimtalk", group="sender", retry=PATIENT, rate=at_most(ALIMTALK))
async def send_alimtalk(notification: Notification, message: Message) -> None:
    await ALIMTALK.send(notification, message.id, message.attempt)


async def send(channel: Channel, notification: Notification, message: Message, then: str) -> None:
    """Send, and store the next step: for later, or for now if the provider does not take it."""
    try:
        await channel.send(notification, message.id, message.attempt)
        delay = READ_WITHIN
    except ChannelUnavailable:
        if not message.is_last_attempt:
            raise
        delay = timedelta(0)
    await message.publish(
        then, notification, key=message.key, message_id=message.id, delay=delay, expires=WORTHLESS_AFTER
    )


@broker.on_dead("alimtalk", group="sender")
async def give_up(message: Message, burial: Burial) -> None:
    """The last step has failed: a person has to call. Stored in the same step as the dead letter."""
    await message.publish("unreached", message.data, key=message.key, headers={"why": burial.reason})


@broker.handler("receipts", group="canceller", retry=PATIENT)
async def stop_escalation(receipt: Receipt) -> None:
    """Cancel the step that is next. When this has ended, nothing more is sent."""
    for step in ("notifications", "sms", "alimtalk"):
        match await broker.cancel(receipt.id, topic=step, key=receipt.user):
            case Settled():
                continue  # it was sent before the receipt came, and the next step is stored
            case Running():
                raise Retry(f"{step}: it is being sent", after="200ms", counts=False)
            case Unknown(groups=silent) if silent:
                raise Retry(f"{step}: its worker does not answer")
            case Cancelled():
                print(f"{receipt.id} READ {receipt.user}: {step} cancelled", flush=True)
                return
            case _:
                break  # there is no such step: it has expired
    print(f"{receipt.id} READ {receipt.user}: nothing to cancel", flush=True)


def create_app(life: Callable[[], AbstractAsyncContextManager[Broker]]) -> FastAPI:
    """The service. `life` is what surrounds it: a broker that also works, or one that only publishes."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with life():
            yield

    service = FastAPI(lifespan=lifespan)

    @service.post("/notify", status_code=202)
    async def notify(notification: Notification) -> dict[str, str]:
        ref = await broker.publish("notifications", notification, key=notification.user, expires=WORTHLESS_AFTER)
        return {"id": ref}

    @service.post("/read", status_code=202)
    async def read(receipt: Receipt) -> None:
        # one message for all receipts of a notification: a user may have two phones
        await broker.publish("receipts", receipt, key=receipt.user, message_id=receipt.id, expires=WORTHLESS_AFTER)

    return service


app = create_app(broker.running)
web = create_app(lambda: broker)
