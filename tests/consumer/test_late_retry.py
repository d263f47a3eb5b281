"""A call for due retries that reaches the server late: its sender has given it up and taken over what was pending."""

from __future__ import annotations

from typing import Any

from tenacity import wait_fixed

from rsmq import Broker, Message, Retry, RetryPolicy, Settings
from rsmq.redis.scripts import UNPARK_MESSAGES
from rsmq.testing.proxy import Proxy
from tests.contract.witness import lanes, settled
from tests.patience import until
from tests.servers import Server


async def test_retries_that_a_late_call_has_made_pending_are_handled() -> None:
    """It makes them pending for a member that has finished its recovery and would never look at them."""
    patient: Any = {"preflight": "warn", "partitions": 1, "lease_ttl": "PT60S", "presence_grace": "PT0S"}
    # the next call for retries comes so much later that the late one is there first
    quick: Any = {"command_timeout": "PT1S", "delay_resolution": "PT2S"}
    attempts = list[int]()
    with Server(tcp=True) as server:
        async with Proxy(server.port) as proxy:
            worker = Broker(Settings(url=proxy.url, **patient, **quick))
            observer = Broker(Settings(url=server.url, **patient))

            @worker.handler("t", group="g", ordering="none", retry=RetryPolicy(max_attempts=3, wait=wait_fixed(1)))
            async def handle(message: Message) -> None:
                attempts.append(message.attempt)
                if message.attempt == 1:
                    raise Retry("later")

            async with observer, worker.running():
                await until(lambda: lanes(worker), "it has its partition")
                assert worker.worker is not None
                (lane,) = worker.worker.consumers[0].lanes.values()
                await until(lambda: lane.is_readable and lane.recovery.retry_at > 0, "it has asked for retries once")
                proxy.hold(lambda data: UNPARK_MESSAGES.sha.encode() in data)
                await observer.publish("t", {})
                await until(lambda: proxy.is_holding, "the call for due retries is on its way")
                recoveries = lane.recovery.number
                await until(
                    lambda: lane.recovery.number > recoveries and lane.is_readable, "it has recovered without it"
                )
                proxy.release()
                await settled(observer, "t")
    assert attempts == [1, 2]
