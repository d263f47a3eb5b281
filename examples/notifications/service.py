"""A notification service: it answers at once, and notifies by PUSH, then SMS, then AlimTalk.

    cd examples/notifications
    uvicorn service:app                                  # web and worker in one process, or:
    uvicorn service:web & rsmq worker service:broker     # each for itself: scale and restart them apart

    curl localhost:8000/notify --json '{"user": "ada", "text": "your gate has changed"}'     # {"id": "0190..."}
    curl localhost:8000/read --json '{"user": "ada", "id": "0190..."}'                       # no SMS, no AlimTalk

`POST /notify` answers 202 when the notification is stored: from then on it survives a kill of any process. A channel
that fails is followed by the next one at once (`fallback`). One that was sent and is not read is followed by the next
one later: an output of the handler, which the receipt of the reader cancels.
"""

import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from typing import Any

import orders
from channels import ALIMTALK, PER, PUSH, SMS, Channel, NoAddress, Notification, TooManyRequests
from fastapi import FastAPI
from pydantic import BaseModel
from tenacity import wait_fixed

from rsmq import (
    Breaker,
    Broker,
    Burial,
    Cancelled,
    Hold,
    Message,
    QuietHours,
    Rate,
    Reject,
    Retry,
    RetryPolicy,
    Running,
    Settled,
    Unknown,
)
from rsmq.asgi import lifespan

READ_WITHIN = timedelta(seconds=float(os.environ.get("READ_WITHIN", "2")))
"""How long a user may take to read it, before the next step."""
DIGEST_WITHIN = timedelta(seconds=float(os.environ.get("DIGEST_WITHIN", "600")))
"""How long comments of a user are collected."""
WORTHLESS_AFTER = timedelta(hours=12)
"""No step is sent later."""
STEPS = ("push", "sms", "alimtalk")
GROUP = "sender"
ROUTING = ("tenant", "tz")
BANDS = ("urgent", "normal", "bulk")
QUICK = RetryPolicy(max_attempts=3, wait=wait_fixed(0.2))
PATIENT = RetryPolicy(max_attempts=10, wait=wait_fixed(0.5))

broker = Broker(partitions=4)  # of each band of each topic
broker.include(orders.outbox)
push, sms, alimtalk = (broker.topic(step, Notification, bands=BANDS) for step in STEPS)
quiet = QuietHours("22:00", "08:00", default="Asia/Seoul")


class Order(Notification):
    """A notification with where it goes. A one-time password is `urgent`, what is sold is `bulk`."""

    band: str = "normal"
    tenant: str = "shop"
    zone: str = "Asia/Seoul"

    @property
    def routing(self) -> dict[str, str]:
        """Headers: what decides before a message starts sees no payload."""
        return {"tenant": self.tenant, "tz": self.zone}


class Receipt(BaseModel):
    """A user has read the notification with this id."""

    user: str
    id: str


class Comment(BaseModel):
    """A comment below a picture of the user."""

    user: str
    text: str
    zone: str = "Asia/Seoul"


class Offer(BaseModel):
    """The same text for many users: their names, with their time zones. `name` is that of the campaign."""

    name: str
    text: str
    tenant: str
    users: dict[str, str]


# -- what decides before a message starts ------------------------------------------------------------------------------


def provider(message: Message) -> str:
    """Who delivers it. A provider counts the calls of all workers together."""
    return message.topic


def tenant(message: Message) -> str | None:
    """For whom it is sent: tenants take turns."""
    return message.headers.get("tenant")


def by_day(message: Message) -> datetime | None:
    """Not in the night of the user, unless it is urgent."""
    return None if message.band == "urgent" else quiet.next(message.headers.get("tz"))


def at_most(channel: Channel) -> list[Rate]:
    """Its limits: so many calls of its provider, and so many to one user. Both hold."""
    return [Rate(channel.calls, per=PER, by=provider), Rate(channel.to_a_user, per=PER, by="key")]


breaker = Breaker(failures=8, hold="5s", by=provider)
reserve = {"urgent": 4}

# -- the three channels ------------------------------------------------------------------------------------------------


@push.handler(
    group=GROUP, fallback=sms, retry=QUICK, rate=at_most(PUSH), breaker=breaker, when=by_day, tenant=tenant,
    reserve=reserve,
)  # fmt: skip
async def send_push(notification: Notification, message: Message) -> None:
    await send(PUSH, notification, message)
    await unless_read("sms", notification, message)


@sms.handler(
    group=GROUP, fallback=alimtalk, retry=QUICK, rate=at_most(SMS), breaker=breaker, when=by_day, tenant=tenant,
    reserve=reserve,
)  # fmt: skip
async def send_sms(notification: Notification, message: Message) -> None:
    await send(SMS, notification, message)
    await unless_read("alimtalk", notification, message)


@alimtalk.handler(
    group=GROUP, retry=PATIENT, rate=at_most(ALIMTALK), breaker=breaker, when=by_day, tenant=tenant, reserve=reserve
)
async def send_alimtalk(notification: Notification, message: Message) -> None:
    await send(ALIMTALK, notification, message)


async def send(channel: Channel, notification: Notification, message: Message) -> None:
    """Send. "Not now" holds the provider, and is no attempt; without an address no other attempt is made."""
    try:
        await channel.send(notification, id_of(message), message.attempt)
    except TooManyRequests as busy:
        raise Hold(busy.after) from None
    except NoAddress as error:
        raise Reject(str(error)) from None


async def unless_read(step: str, notification: Notification, message: Message) -> None:
    """Store the next step for later, when this one is settled: both, or neither."""
    await message.publish(
        step, notification, key=message.key, band=message.band, message_id=id_of(message), delay=READ_WITHIN,
        expires=message.expires, headers={name: text for name, text in message.headers.items() if name in ROUTING},
    )  # fmt: skip


def id_of(message: Message) -> str:
    """The id of the notification. What came by a fallback has an id of its own, and this one in a header."""
    return message.headers.get("fallback.id", message.id)


@broker.on_dead("alimtalk", group=GROUP)
async def give_up(message: Message, burial: Burial) -> None:
    """The last step fails: a person has to call. Stored in the same step as the dead letter."""
    await message.publish("unreached", message.data, key=message.key, headers={"why": burial.reason})


# -- digests and campaigns ---------------------------------------------------------------------------------------------


@broker.handler("comments", group="digests", batch=100, by="key", linger=DIGEST_WITHIN)
async def digest(comments: list[Comment], messages: list[Message]) -> None:
    """One notification for all comments of a user within ten minutes. It leaves with their settlement, and waits for
    the morning in `push`."""
    user, first = comments[0].user, messages[0]
    text = f"{comments[-1].text} ({len(comments)} new comments)" if len(comments) > 1 else comments[0].text
    await first.publish("push", Notification(user=user, text=text), key=first.key, headers=first.headers)


@broker.handler("campaigns", group="office")
async def campaign_ended(result: dict[str, Any]) -> None:
    """The last user of a campaign was reached, or was not."""
    print(f"- CAMPAIGN {result['batch']}: {result['done']} of {result['total']} reached", flush=True)


# -- receipts ----------------------------------------------------------------------------------------------------------


@broker.handler("receipts", group="canceller", retry=PATIENT)
async def stop_escalation(receipt: Receipt, message: Message) -> None:
    """Cancel the step that is next. When this has ended, nothing more is sent."""
    number = receipt.id
    for step in STEPS:
        match await broker.cancel(number, topic=step, key=receipt.user):
            case Settled():  # it was sent before the receipt came, and the next step is stored
                number = await handed_on(number, step, receipt.user) or receipt.id
            case Running():
                raise Retry(f"{step}: it is being sent", after="200ms", counts=False)
            case Unknown() if not message.is_last_attempt:
                raise Retry(f"{step}: on its way, or its worker does not answer")
            case Cancelled():
                print(f"{receipt.id} READ {receipt.user}: {step} cancelled", flush=True)
                return
            case _:
                break  # there is no such step: it has expired
    print(f"{receipt.id} READ {receipt.user}: nothing to cancel", flush=True)


async def handed_on(number: str, step: str, user: str) -> str | None:
    """The id under which the next channel has it; None: it did not fail here."""
    status = (await broker.look(number, topic=step, key=user)).group(GROUP)
    return None if status is None else status.to_id


# -- the web service ---------------------------------------------------------------------------------------------------


def create_app(*, worker: bool) -> FastAPI:
    """The service, with the handlers in its own process or without them."""

    @asynccontextmanager
    async def with_tables(app: FastAPI) -> AsyncIterator[Mapping[str, Any]]:
        await orders.make_tables()  # before the workers ask for them
        async with lifespan(broker, worker=worker)(app) as state:
            yield state
        await orders.engine.dispose()

    service = FastAPI(lifespan=with_tables)
    service.include_router(orders.router)

    @service.post("/notify", status_code=202)
    async def notify(order: Order) -> dict[str, str]:
        notification = Notification(user=order.user, text=order.text)
        return {
            "id": await push.publish(
                notification, key=order.user, band=order.band, headers=order.routing, expires=WORTHLESS_AFTER
            )
        }

    @service.post("/read", status_code=202)
    async def read(receipt: Receipt) -> None:
        # one message for all receipts of a notification: a user may have two phones
        await broker.publish("receipts", receipt, key=receipt.user, message_id=receipt.id, expires=WORTHLESS_AFTER)

    @service.post("/offers", status_code=202)
    async def offer(offer: Offer, again: bool = False) -> dict[str, int]:
        """A campaign: each user gets it by day. What waits for the morning costs no worker anything. After a crash of
        this process `?again=true` goes on with it: each user gets it once."""
        options: dict[str, Any] = {"on_complete": "campaigns", "expires": "2d", "resume": again}
        async with broker.batch(offer.name, group=GROUP, **options) as batch:
            for user, zone in offer.users.items():
                await batch.publish(
                    "push", Notification(user=user, text=offer.text), key=user, message_id=f"{offer.name}-{user}",
                    headers={"tenant": offer.tenant, "tz": zone}, at=quiet.next(zone), band="bulk",
                    expires=timedelta(days=1),
                )  # fmt: skip
        return {"stored": len(offer.users)}

    @service.post("/comments", status_code=202)
    async def comment(comment: Comment) -> None:
        headers = {"tenant": "shop", "tz": comment.zone}
        await broker.publish("comments", comment, key=comment.user, headers=headers)

    @service.delete("/users/{user}")
    async def forget(user: str) -> dict[str, int]:
        """Delete what is stored of a user: protect this in a service of your own."""
        erased = await broker.erase(user)
        return {"deleted": erased.stored + erased.delayed + erased.dead, "running": erased.running}

    return service


app = create_app(worker=True)
web = create_app(worker=False)
