"""Commands for one message that is published, and for groups."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime, timedelta

from rsmq import control, dlq
from rsmq.errors import ConfigError
from rsmq.handler.handler import Handler
from rsmq.model.duration import Duration, checked_duration
from rsmq.model.encoding import Encoding
from rsmq.model.keys import Keys, check_name
from rsmq.model.message_ref import MessageRef
from rsmq.model.publish_options import due_time
from rsmq.model.settings import Settings
from rsmq.redis.client.connector import Client
from rsmq.redis.streams import require_group, reset_group, set_paused
from rsmq.redis.topics import Topic, Topics


class Commands(ABC):
    """The part of a broker that asks the server. It needs a connected broker, and no worker."""

    keys: Keys
    settings: Settings
    encoding: Encoding
    handlers: list[Handler]
    cancelled: Counter[tuple[str, str]]
    """By topic and group, messages that `cancel` itself has settled: delayed (no group), or waiting for a retry."""

    @property
    @abstractmethod
    def client(self) -> Client: ...

    @property
    @abstractmethod
    def topics(self) -> Topics: ...

    @property
    def schedules(self) -> control.Schedules:
        """The schedules: publish one now, pause it, give it another rule; add some that no code has."""
        return control.Schedules(self.client, self.keys, self.topics, self.encoding, self.settings.payload_limit)

    async def look(
        self, message: MessageRef | str, *, topic: str | None = None, key: str | None = None
    ) -> control.MessageStatus:
        """Where a message is: delayed, or for each group unread, waiting, running, settled, or dead.

        `message` is what `publish` has returned, or its text with `topic` and, if it has one, `key`: without the key
        all partitions are searched. It reads only. An id that you made yourself (`message_id`) is found within
        RSMQ_DEDUP_WINDOW, unless it is a UUIDv7.
        """
        return await control.Look(self.client, self.keys).at(message, await self._topic_of(message, topic), key)

    async def find(
        self,
        topic: str,
        *,
        key: str | None = None,
        where: Sequence[str] = (),
        headers: Mapping[str, str] | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        state: control.FindState = "stored",
        group: str | None = None,
        most: int = 100,
        scan: int = 100_000,
        bodies: bool = False,
        progress: Callable[[int], None] | None = None,
    ) -> control.Findings:
        """Find messages by what they hold, oldest first in each partition. It reads only, and consumes nothing.

        - `key`: the ordering key; then one partition is read.
        - `where`: conditions for a JSON payload, such as `customer.tier=gold` or `amount!=0`.
        - `headers`: values that headers have.
        - `since`, `until`: when a message was stored (delayed or waiting: is due; dead: died). The end is excluded.
        - `state`: "stored", or "delayed", or for `group` "unread", "running", "waiting_for_retry" or "dead".
        - `most`: so many hits; `scan`: look at so many messages at most. `progress` is called with the number so far.

        - `bodies`: also get payloads that lie in the [store of large ones](application.md#large-payloads), one after
          another, for `where` and for the hits: at most `most` of these are in memory. Otherwise `sealed` says so.

        There is no index: it costs about two seconds for 100 000 messages. Narrow it by `key`, `since` and `until`.
        """
        wanted = control.Criteria(key, dlq.read_fields(where), dict(headers or {}), since, until)
        about = (self.client, self.keys, await self.topics.existing(topic), state, group)
        search = control.Search(*about, self.encoding, bodies)
        return await search.run(wanted, most=most, scan=scan, progress=progress)

    async def cancel(
        self,
        message: MessageRef | str,
        *,
        topic: str | None = None,
        key: str | None = None,
        group: str | None = None,
        running: bool = False,
    ) -> control.Answer:
        """Cancel a message, and say what came of it: `Cancelled`, `Running`, `Settled` or `Unknown`.

        It is never both cancelled and handled, and never neither, also if a worker is killed meanwhile. `message`,
        `topic` and `key` are as for `look`. `group`: only for this one. A message that a handler is working on goes on,
        unless `running=True`: then the handler is cancelled. If a member has it in its hands, this waits for that
        member, at most for a lease. If the answer is lost, call it again. Of a topic without a group it
        is removed. A group that is added later, from the earliest message, reads what was cancelled for those that
        existed. A message that waits in an outbox is not seen: the answer is `Unknown`, and `outbox.cancel` cancels it.
        """
        command = control.Cancel(self.client, self.keys, self.settings, self.cancelled)
        return await command(message, await self._topic_of(message, topic), key, group=group, running=running)

    async def erase(
        self, key: str, *, devices: Collection[str] = (), timeout: Duration = timedelta(seconds=30)
    ) -> control.Erased:
        """Erase what the server holds of an ordering key, in all topics, and the inboxes of these devices.

        For a person who wants to be forgotten, whose id is the key. Messages are cancelled for all groups and deleted,
        also delayed ones and dead letters, with the notes on their failures. What was stored before the call is gone
        when `running` is 0: what a handler works on goes on, and is waited for, at most for `timeout`. A broker with
        `offload` also deletes their bodies; without it these go with the sweeps. Stop what
        publishes for the key before, and delete its rows of outboxes: what is stored meanwhile may stay.

        Not found: the person in the payloads of other keys, messages without a key, retained MQTT messages, archives,
        outboxes, your databases, logs, traces, the server's AOF until it is rewritten, its replicas' and backups. The
        audit notes the SHA-256 of the key.
        """
        seconds = checked_duration("timeout", timeout).total_seconds()
        about = (self.client, self.keys, self.settings, self.topics, self.encoding.bodies)
        return await control.Erase(*about)(key, devices, seconds)

    async def reschedule(
        self,
        message: MessageRef | str,
        *,
        at: datetime | None = None,
        delay: Duration | None = None,
        topic: str | None = None,
        key: str | None = None,
        group: str | None = None,
    ) -> datetime:
        """Give a message that waits for a time another due time, `at` or after `delay`, and return it.

        That is a delayed message, or one that waits for a retry or for the time of its handler's `when`: for all groups
        where it does, or only for `group`. It costs no attempt. With key order this waits for the member that has the
        timer, at most for a lease. `message`, `topic` and `key` are as for `look`. Raises ConfigError for what waits
        for no time (it is unread, running, settled, ...), with what to do instead, and for a time at which it has
        expired: the due time is as it was.
        """
        if at is None and delay is None:
            raise ConfigError("give at or delay: when the message is to be delivered")
        due, found = due_time(delay, at), await self._topic_of(message, topic)
        return await control.Reschedule(self.client, self.keys, self.settings)(message, found, key, due, group=group)

    async def _topic_of(self, message: str, topic: str | None) -> Topic:
        if not isinstance(message, str):
            raise ConfigError(f"{message!r} is no message id: pass what publish has returned, or its text")
        if isinstance(message, MessageRef):
            return await self.topics.existing(topic or message.topic)
        if topic is None:
            raise ConfigError(f"{message!r} is plain text and knows no topic: pass topic='orders', too")
        return await self.topics.existing(topic)

    # -- batches -----------------------------------------------------------------------------------------------------

    async def find_batch(self, name: str) -> control.BatchStatus | None:
        """A batch by its name: how many members it has, what became of them, and its state. None: there is none."""
        return await control.Batches(self.client, self.keys, self.topics).find(name)

    async def batches(self) -> list[control.BatchStatus]:
        """All batches that are open, or kept after their callback, the newest last."""
        return await control.Batches(self.client, self.keys, self.topics).every()

    async def cancel_batch(self, name: str) -> control.BatchStatus | None:
        """Cancel all members that have not started, and return what the batch is then. None: there is no such batch.

        Delayed members end when they are due. A member that runs goes on; if it fails, it is not tried again. The batch
        takes no more members, and its callback comes when all have ended.
        """
        return await control.Batches(self.client, self.keys, self.topics).cancel(name)

    # -- groups ------------------------------------------------------------------------------------------------------

    async def reset_group(self, topic: str, group: str, to: str | datetime = "earliest") -> None:
        """Let a group handle a topic again from `to`: `earliest`, `latest`, a stream id, or an aware datetime.

        Works while its workers run: they may handle twice what they read before they learned of it. Messages that were
        pending or waited for a retry are dropped from the group. Raises ConfigError for a group that is not there.
        """
        await reset_group(self.client, self.keys, *await self._with_group(topic, group), to)

    async def pause_group(self, topic: str, group: str) -> None:
        """Stop delivery to a group, in all its workers, until `resume_group`. Raises ConfigError for one that is not
        there."""
        found, name = await self._with_group(topic, group)
        await set_paused(self.client, self.keys, found.name, name, paused=True)

    async def resume_group(self, topic: str, group: str) -> None:
        """Deliver to a paused group again."""
        found, name = await self._with_group(topic, group)
        await set_paused(self.client, self.keys, found.name, name, paused=False)

    async def _with_group(self, topic: str, group: str) -> tuple[Topic, str]:
        """The topic of a group, and the name of that. Raises ConfigError."""
        found, name = await self.topics.existing(topic), check_name("group", group)
        await require_group(self.client, self.keys, found.name, name)
        return found, name

    async def hold(self, topic: str, name: str | None, duration: Duration, *, group: str | None = None) -> datetime:
        """Let nothing of a name start for a time, and return its end: for a provider that says "not now".

        `name` is what the handler's rate, limit or breaker counts by; None: all messages. It holds in all groups of the
        topic that exist, or only in `group`, in every member whose handler has such an option, within moments. What
        waits has not started, and has no attempt, however long. Another hold of the name is replaced. Raises
        ConfigError where this program has the handlers of these groups, and none of them has such an option.
        """
        can_hold = {each.group: each.has_limits for each in self.handlers if each.topic == topic}
        return await control.Holding(self.client, self.keys).begin(
            await self.topics.existing(topic), name, duration, group, lambda name: not can_hold.get(name, True)
        )

    async def end_hold(self, topic: str, name: str | None, *, group: str | None = None) -> int:
        """End a hold now, also one of a handler or a breaker. Returns in how many groups it was held."""
        return await control.Holding(self.client, self.keys).end(await self.topics.existing(topic), name, group)

    async def holds(self, topic: str, *, group: str | None = None) -> tuple[control.GroupHold, ...]:
        """What the groups of a topic hold, by whom, and until when."""
        return await control.Holding(self.client, self.keys).list(await self.topics.existing(topic), group)
