"""The sentinels of one master, asked all together: for the loop, and for a thread."""

from __future__ import annotations

import logging
from typing import Any, Final

import anyio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.asyncio.sentinel import Sentinel as AsyncSentinel
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.sentinel import Sentinel

from rsmq.sentinel.knowledge import Address, Knowledge, absence, is_moving, redirected
from rsmq.writer import write_whole

log = logging.getLogger("rsmq.sentinel")

LATECOMERS: Final = 0.25
"""Seconds that the other sentinels have when one has answered: one that cannot be reached must not hold up all."""
ADDRESS: Final = "SENTINEL GET-MASTER-ADDR-BY-NAME"


class Watchers(AsyncSentinel):
    """All sentinels of one master, for the loop."""

    def __init__(self, knowledge: Knowledge, hosts: list[Address], seconds: float, access: dict[str, Any]) -> None:
        # no `socket_timeout`: on Python 3.11 it swallows cancellations
        patience = {"socket_timeout": None, "socket_connect_timeout": seconds, "retry": AsyncRetry(NoBackoff(), 0)}
        super().__init__(hosts, sentinel_kwargs=patience | access)  # type: ignore[no-untyped-call]
        for sentinel in self.sentinels:
            write_whole(sentinel.connection_pool)
        self.knowledge, self._seconds = knowledge, seconds

    async def discover_master(self, service_name: str) -> Address:
        """The address. Raises what `absence` says while no sentinel knows a master that is up."""
        states, since, errors = list[Any](), self.knowledge.epoch, list[Exception]()
        with anyio.move_on_after(self._seconds) as limit:

            async def ask(sentinel: Any) -> None:
                try:
                    state = (await sentinel.sentinel_masters()).get(service_name)
                    if is_moving(state):
                        state = redirected(state, await sentinel.execute_command(ADDRESS, service_name))
                except (RedisError, OSError) as error:
                    log.debug("a sentinel does not answer: %s", error)
                    errors.append(error)
                    return
                if state and self.check_master_state(state, service_name):
                    states.append(state)
                    limit.deadline = min(limit.deadline, anyio.current_time() + LATECOMERS)

            async with anyio.create_task_group() as tasks:
                for sentinel in self.sentinels:
                    tasks.start_soon(ask, sentinel)
        if not states:
            raise absence(service_name, errors)
        return self.knowledge.learn(states, len(self.sentinels), since)


class BlockingWatchers(Sentinel):
    """The same for a thread: one after the other, until most have answered; who does not answer is asked last."""

    knowledge: Knowledge

    def discover_master(self, service_name: str) -> Address:
        """The address. Raises what `absence` says while no sentinel knows a master that is up."""
        states, since, errors = list[Any](), self.knowledge.epoch, list[Exception]()
        silent: list[Any] = []
        for sentinel in list(self.sentinels):
            try:
                masters: Any = sentinel.sentinel_masters()
                state = masters.get(service_name)
                if is_moving(state):
                    state = redirected(state, sentinel.execute_command(ADDRESS, service_name))
            except (RedisError, OSError) as error:
                silent.append(sentinel)
                errors.append(error)
                continue
            if state and self.check_master_state(state, service_name):  # type: ignore[no-untyped-call]
                states.append(state)
            if len(states) > len(self.sentinels) // 2:
                break
        self.sentinels = [each for each in self.sentinels if each not in silent] + silent
        if not states:
            raise absence(service_name, errors)
        return self.knowledge.learn(states, len(self.sentinels), since)
