"""A broker whose handlers write with Django's ORM: `rsmq worker billing.worker:broker`."""

import os
import signal
from pathlib import Path
from typing import Annotated, Any

import django
from django.apps import apps

if not apps.ready:
    django.setup()

from django.db import connection, transaction
from fast_depends import Depends
from settings import SERVER
from tenacity import wait_fixed

from billing.models import Invoice
from rsmq import Broker, Message, Retry, RetryPolicy, Settings
from rsmq.django.database import DjangoEffects, DjangoOutbox

FACTS = Path(os.environ["PROJECT_DIR"])
broker = Broker(Settings(**SERVER))
effects, outbox = DjangoEffects(), DjangoOutbox()
broker.include(outbox)
OFTEN = RetryPolicy(max_attempts=50, wait=wait_fixed(0))


def die_once(what):
    """SIGKILL, the first time."""
    try:
        (FACTS / what).touch(exist_ok=False)
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


@broker.handler("orders", group="billing", retry=OFTEN, concurrency=1)
def bill(order: dict[str, Any], message: Message, db: Annotated[None, Depends(effects.atomic)]) -> None:
    Invoice.objects.create(order=order["number"])
    outbox.publish("invoices", order["number"], key=str(order["number"]))
    match order.get("do"):
        case "die":
            transaction.on_commit(lambda: die_once("billed"))
        case "fail once" if message.attempt == 1:
            raise ValueError("the first attempt fails")
        case "fail apart":
            with transaction.atomic():
                Invoice.objects.create(order=-1)
                transaction.set_rollback(True)
        case "drop" if message.attempt == 1:
            transaction.set_rollback(True)
        case "output" if message.attempt == 1:
            message.publish_sync("invoices", 0)
        case "lose the answer" if message.attempt == 1:
            lose_the_answer()


@broker.handler("plain", group="billing", retry=OFTEN, concurrency=1)
def bill_plainly(order: dict[str, Any]) -> None:
    with transaction.atomic():
        Invoice.objects.create(order=order["number"])
    die_once("plain")


@broker.handler("many", group="billing", retry=OFTEN, batch=10)
def bill_all(
    orders: list[int], messages: list[Message], db: Annotated[None, Depends(effects.atomic)]
) -> list[Retry | None]:
    Invoice.objects.bulk_create([Invoice(order=number) for number in orders])
    outbox.publish_many("invoices", orders, key=str)
    return [
        Retry("not yet") if number % 10 == 0 and message.attempt == 1 else None
        for number, message in zip(orders, messages, strict=True)
    ]


@broker.handler("hooked", group="billing", retry=RetryPolicy(max_attempts=1), concurrency=1)
def bill_with_hook(number: int, db: Annotated[None, Depends(effects.atomic)]) -> None:
    Invoice.objects.create(order=number)
    transaction.on_commit(lambda: number / 0)


def lose_the_answer():
    """The connection breaks when the commit has happened."""
    commit = connection._commit

    def commit_and_break():
        del connection._commit
        commit()
        if connection.vendor == "postgresql":
            connection.connection.close()
        else:
            connection.close()
        with connection.wrap_database_errors:
            raise connection.Database.OperationalError("the connection is lost")

    connection._commit = commit_and_break
