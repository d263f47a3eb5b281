"""Questions of `broker.look` to the members of a group: the one that has the message says what it waits for."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from contextlib import suppress
from dataclasses import replace
from typing import Final

from rsmq.consumer.running.runner import Runner
from rsmq.consumer.waiting.context import ConsumerContext
from rsmq.consumer.waiting.handler_permits import HandlerPermits
from rsmq.consumer.waiting.holds import Holds
from rsmq.consumer.waiting.lane import Lane
from rsmq.errors import BrokerError, Malformed
from rsmq.model.delivery_state import DeliveryQuestion, DeliveryState, read_question
from rsmq.model.message import Message

log = logging.getLogger("rsmq.look")

MOST_ASKED: Final = 100
"""Questions that wait for their answer; further ones get none."""
ANSWER_MS: Final = 5000
"""So long an answer waits to be read."""


class Questions:
    """Answers what is asked about the messages of this member. It costs nothing while nothing is asked.

    An answer that is lost is not repeated: then the caller says what the server knows.
    """

    def __init__(
        self, context: ConsumerContext, runner: Runner, holds: Holds | None, permits: HandlerPermits | None
    ) -> None:
        self._context = context
        self._runner = runner
        self._holds = holds
        self._permits = permits
        self._asked = deque[DeliveryQuestion]()
        self._is_asked = asyncio.Event()

    def ask(self, packed: bytes) -> None:
        """A question has come."""
        question = read_question(packed)
        if question is not None and len(self._asked) < MOST_ASKED:
            self._asked.append(question)
            self._is_asked.set()

    async def run(self) -> None:
        """Answer, until cancelled."""
        while True:
            await self._is_asked.wait()
            self._is_asked.clear()
            while self._asked:
                try:
                    await self._answer(self._asked.popleft())
                except BrokerError as error:
                    log.debug("a question has no answer: %s", error)

    async def _answer(self, question: DeliveryQuestion) -> None:
        context = self._context
        lane = context.lanes.get(question.partition)
        state = None if lane is None or not lane.lease.is_held() else await self._state(lane, question.entry_id)
        if state is not None:
            key = context.keys.reply(question.request)
            await context.client.execute_command("SET", key, state.pack(), "PX", ANSWER_MS)

    async def _state(self, lane: Lane, entry_id: bytes) -> DeliveryState | None:
        found = self._runner.queue.state_of(lane, entry_id)
        if found is None:
            running = [message for task_slot in self._runner.task_slots for message in task_slot.messages]
            its = next((each for each in running if each.origin is lane and each.entry_id == entry_id), None)
            permit = None if its is None or self._permits is None else self._permits.waited_for(its)
            return None if its is None else DeliveryState("running", name=permit)
        state, message = found
        if self._holds is None or not self._holds.names or state.state == "held":
            return state
        held = (
            None if (message := message or await self._read(lane, entry_id)) is None else self._holds.hold_of(message)
        )
        return state if held is None else replace(state, state="held", name=held.name, until_ms=held.until_ms)

    async def _read(self, lane: Lane, entry_id: bytes) -> Message | None:
        """A message of which only the id is kept."""
        for _, fields in await self._context.client.execute_command("XRANGE", lane.stream, entry_id, entry_id):
            with suppress(Malformed):
                return Message(lane, entry_id, fields)
        return None

    def __repr__(self) -> str:
        return f"<Questions {self._context.name} asked={len(self._asked)}>"
