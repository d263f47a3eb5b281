"""The actions of visitors. Each is asked about first, with the number of what it changes, and is audited."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Final

from starlette.datastructures import FormData

from rsmq.codecs.reading import has_keys
from rsmq.control import Cancel, Holding, Reschedule, Schedules
from rsmq.control.audit import State
from rsmq.control.ending import end_process
from rsmq.dashboard import batch
from rsmq.dashboard.page import Visit, time_given
from rsmq.dashboard.publishing import codings_for, headers_given, payload_given
from rsmq.dashboard.queries import MOST_LETTERS, MOST_NAMED, PageNotFound, PageRefused
from rsmq.dashboard.roles import Role
from rsmq.dlq import Selection, read_fields
from rsmq.errors import ConfigError
from rsmq.handler.schedule import build_schedule, trigger_of
from rsmq.inspector.inspector import Inspector
from rsmq.inspector.schedules import look_up
from rsmq.inspector.text import rules, timestamp
from rsmq.model.clock import epoch_ms
from rsmq.model.duration import checked_duration
from rsmq.model.encoding import NO_CODECS, Encoding
from rsmq.model.member import QUIET, STOP
from rsmq.model.words import count, duration
from rsmq.redis.streams import reset_group, set_paused

MOST_CHOSEN: Final = max(MOST_LETTERS, 500)
KICK_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True)
class Action:
    """One change that a visitor wants. `is_long`: it may outlast the page, so it runs on without it. `then`: the page
    that is shown after it, if that from which it was asked is gone."""

    question: str
    word: str
    act: Callable[[], Awaitable[str]]
    is_danger: bool = False
    is_long: bool = False
    then: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ActionForm:
    """The form of an action."""

    visit: Visit
    inspector: Inspector
    form: FormData
    topic: str
    group: str

    def value(self, name: str) -> str:
        """One value; empty without it."""
        found = self.form.get(name, "")
        return found.strip() if isinstance(found, str) else ""

    def chosen(self, name: str = "id") -> list[str]:
        """The rows that were chosen, or that the page shows. Raises ConfigError without any."""
        found = [each for each in self.form.getlist(name) if isinstance(each, str)]
        if not found:
            raise ConfigError("nothing is chosen: tick some rows first")
        return found[:MOST_CHOSEN]

    @property
    def key(self) -> str | None:
        """The key of a message; None if it is not known."""
        found = self.form.get("key")
        return found if isinstance(found, str) else None

    @property
    def group_of_topic(self) -> str:
        """Group and topic as text."""
        return f"{self.group} of {self.topic}"

    async def state(self) -> State:
        """The notes of the audit before and after: the state of the group, topic or device."""
        if name := self.value("client"):
            client = await self.visit.queries.mqtt.find(name)
            return {"client": name, "gateway": None if client is None else client.gateway}
        if process := self.value("process"):
            served = [each for each in (await self.visit.queries.poller.fresh()).members if each.id == process]
            return {"process": process, "serves": [f"{each.topic}/{each.group}" for each in served]}
        if name := self.value("batch"):
            state = await self.visit.queries.batches.find(name)
            return {"batch": name} if state is None else {"batch": name, "state": state.state, "missing": state.missing}
        if device := self.value("device"):
            found = await self.visit.queries.device(device)
            return {"device": device, "letters": 0 if found is None else found.backlog}
        if self.value("message"):
            return await message_state(self)
        if self.group:
            group = await self.inspector.group(self.topic, self.group)
            if group is None:
                return {}
            return {
                "paused": group.is_paused, "held": [each.words for each in group.holds],
                "unread": group.unread, "pending": group.pending,
                "waiting_for_retry": group.waiting_for_retry,
                "dead_letters": group.dead_letters,
            }  # fmt: skip
        if self.value("schedule"):
            return await schedule_state(self)
        topic = await self.inspector.topic(self.topic)
        return {} if topic is None else {"messages": topic.length, "delayed": topic.delayed}


Prepare = Callable[[ActionForm], Awaitable[Action]]


async def replay(wanted: ActionForm) -> Action:
    """Replay the rows that were chosen, or all that are shown."""
    ids, queries = wanted.chosen(), wanted.visit.queries
    topic, every = await queries.topic(wanted.topic), every_of(wanted.value("rate"))

    async def act() -> str:
        done = await queries.dlq.replay(topic, wanted.group, ids, every=every)
        return f"replayed {of(done, ids, 'dead letter')}"

    question = f"Replay {count(len(ids), 'dead letter')} of {wanted.group_of_topic}, to this group only{pace(every)}?"
    return Action(question, "replay", act, is_long=bool(every))


async def replay_matching(wanted: ActionForm) -> Action:
    """Replay all that match the filters, also those that are not shown."""
    queries, selection = wanted.visit.queries, selection_of(wanted.value)
    topic, every = await queries.topic(wanted.topic), every_of(wanted.value("rate"))
    number = await queries.count_dead_letters(wanted.topic, wanted.group, selection)

    async def act() -> str:
        done = await queries.dlq.replay_selected(topic, wanted.group, selection, every=every)
        return f"replayed {count(done, 'dead letter')}"

    which = "all" if selection.is_all else "all that match the fields:"
    question = (
        f"Replay {which} {count(number, 'dead letter')} of {wanted.group_of_topic}, to this group only{pace(every)}?"
    )
    return Action(question, "replay", act, is_long=bool(every))


async def purge(wanted: ActionForm) -> Action:
    """Delete all dead letters of a group."""
    queries, topic = wanted.visit.queries, await wanted.visit.queries.topic(wanted.topic)
    number = await queries.count_dead_letters(wanted.topic, wanted.group, Selection())

    async def act() -> str:
        return f"deleted {count(await queries.dlq.purge(topic, wanted.group), 'dead letter')}"

    question = (
        f"Delete all {count(number, 'dead letter')} of {wanted.group_of_topic} for good, also those that are not shown?"
    )
    return Action(question, "delete", act, is_danger=True)


async def pause(wanted: ActionForm) -> Action:
    """Deliver nothing new to a group."""
    return switch(wanted, "Pause", "Its members finish what they have, and get nothing new.", is_paused=True)


async def resume(wanted: ActionForm) -> Action:
    """Deliver to a group again."""
    return switch(wanted, "Resume", "Its members get messages again.", is_paused=False)


def switch(wanted: ActionForm, word: str, text: str, *, is_paused: bool) -> Action:
    """Pause or resume."""
    queries = wanted.visit.queries

    async def act() -> str:
        await set_paused(queries.client, queries.keys, wanted.topic, wanted.group, paused=is_paused)
        return f"{wanted.topic}/{wanted.group} is {'paused' if is_paused else 'running'}"

    return Action(f"{word} {wanted.group_of_topic}? {text}", word.lower(), act)


async def end_hold(wanted: ActionForm) -> Action:
    """Let what is held start again."""
    queries, name = wanted.visit.queries, wanted.value("name") or None
    topic = await queries.topic(wanted.topic)

    async def act() -> str:
        ended = await Holding(queries.client, queries.keys).end(topic, name, wanted.group)
        return f"{name or 'everything'} is held no longer" if ended else f"{name or 'everything'} was not held"

    return Action(
        f"End the hold of {name or 'everything'} in {wanted.group_of_topic}? All that waits starts.", "end", act
    )


async def reset(wanted: ActionForm) -> Action:
    """Let a group handle its topic again from a start."""
    queries, text = wanted.visit.queries, wanted.value("to")
    start: str | datetime = text or "earliest"
    if wanted.value("at"):
        start = time_given(wanted.value("at")) or start
    state, topic = await wanted.inspector.group(wanted.topic, wanted.group), await queries.topic(wanted.topic)
    if state is None:
        raise PageNotFound(f"topic {wanted.topic!r} has no group {wanted.group!r}")

    async def act() -> str:
        await reset_group(queries.client, queries.keys, topic, wanted.group, start)
        return f"{wanted.topic}/{wanted.group} starts at {start}"

    dropped = f"{state.pending} pending messages and {state.waiting_for_retry} that wait for a retry"
    return Action(f"Reset {wanted.group_of_topic} to {start}? This drops {dropped}.", "reset", act, is_danger=True)


async def move_waiting(wanted: ActionForm) -> Action:
    """Make delayed messages, or parked ones of a group, due now or at another time."""
    refs, waiting = wanted.chosen(), wanted.visit.room.waiting
    topic, (due, when) = await wanted.visit.queries.topic(wanted.topic), due_of(wanted)
    what, where = waiting_at(wanted)

    async def act() -> str:
        if wanted.group:
            done = await waiting.move_parked(topic, wanted.group, refs, due)
        else:
            done = await waiting.move_delayed(topic, refs, due)
        return f"{of(done, refs, what)} due {when}"

    question = f"Make {count(len(refs), what)} of {where} due {when}?"
    return Action(question, "run now" if due is None else "move", act)


async def cancel_waiting(wanted: ActionForm) -> Action:
    """Cancel the delayed messages that were chosen, or the parked ones of a group."""
    refs, waiting = wanted.chosen(), wanted.visit.room.waiting
    topic, (what, where) = await wanted.visit.queries.topic(wanted.topic), waiting_at(wanted)

    async def act() -> str:
        if wanted.group:
            done = await waiting.cancel_parked(topic, wanted.group, refs)
        else:
            done = await waiting.cancel_delayed(topic, refs)
        return f"cancelled {of(done, refs, what)}"

    whose = "this group only" if wanted.group else "all groups"
    return Action(f"Cancel {count(len(refs), what)} of {where} for good, for {whose}?", "cancel", act, is_danger=True)


def waiting_at(wanted: ActionForm) -> tuple[str, str]:
    """A message that waits, and where."""
    return ("parked message", wanted.group_of_topic) if wanted.group else ("delayed message", wanted.topic)


async def cancel(wanted: ActionForm) -> Action:
    """Cancel one message for all groups that have not settled it."""
    queries, message_id, key = wanted.visit.queries, wanted.value("message"), wanted.key
    topic, status = await queries.topic(wanted.topic), await queries.status(wanted.topic, message_id, key)
    is_running = wanted.value("running") == "yes"

    async def act() -> str:
        command = Cancel(queries.client, queries.keys, queries.settings)
        answer = await command(message_id, topic, key, running=is_running)
        groups = ", ".join(f"{name}: {each}" for name, each in sorted(answer.groups.items()))
        return f"{message_id} is {type(answer).__name__.lower()}{f' ({groups})' if groups else ''}"

    also = " A handler that runs is interrupted." if is_running else ""
    question = f"Cancel message {message_id} of {wanted.topic} for good, for all groups? It is {status.text}.{also}"
    return Action(question, "cancel", act, is_danger=True)


async def reschedule_message(wanted: ActionForm) -> Action:
    """Give one delayed or parked message another due time."""
    queries, message_id, key = wanted.visit.queries, wanted.value("message"), wanted.key
    topic, status = await queries.topic(wanted.topic), await queries.status(wanted.topic, message_id, key)
    due_ms, when = due_of(wanted)
    retries = [f" It {each.text} for {each.group}." for each in status.groups if each.state == "waiting_for_retry"]

    async def act() -> str:
        command, due = Reschedule(queries.client, queries.keys, queries.settings), "+0"
        await command(message_id, topic, key, due if due_ms is None else str(due_ms))
        return f"{message_id} is due {when}"

    question = f"Make message {message_id} of {wanted.topic} due {when}? It is {status.text}.{''.join(retries)}"
    return Action(question, "run now" if due_ms is None else "reschedule", act)


async def publish(wanted: ActionForm) -> Action:
    """Publish a new message, with the fields that were written."""
    visit, form, text = wanted.visit, wanted.form, wanted.form.get("payload")
    topic, key = await visit.queries.topic(wanted.topic), wanted.value("key") or None
    payload = payload_given(text if isinstance(text, str) else "", wanted.value("kind"))
    given = form.get("headers")
    headers = headers_given(given if isinstance(given, str) else "")
    delay, codings = delay_given(wanted.value("delay")), wanted.value("encoding")
    encoding = visit.queries.encoding.like(codings) if codings else None
    if not (codings or has_keys()):
        await codings_for(visit, topic)  # which refuses a readable message beside encrypted ones

    async def act() -> str:
        async with visit.room.publishing(encoding) as producer:
            ref = await producer.publish(topic.name, payload, key=key, headers=headers or None, delay=delay)
        return f"published {ref}"

    when = "" if delay is None else f" It is delivered in {duration(delay)}."
    named = "without a key" if key is None else f"with key {key!r}"
    sealed = f" It is stored encrypted ({codings})." if codings else ""
    question = f"Publish a new message {named} to {topic.name}? Every group of the topic gets it.{when}{sealed}"
    return Action(question, "publish", act)


def delay_given(text: str) -> timedelta | None:
    """The delay of a form; None for none. Raises ConfigError."""
    return checked_duration("delay", text) if text else None


async def run_now(wanted: ActionForm) -> Action:
    """Publish a schedule once, beside its ticks."""
    queries, name = wanted.visit.queries, wanted.value("schedule")
    topic = await queries.topic(wanted.topic)
    states = {each.name: each for each in await look_up(queries.client, queries.keys, queries.topics, topic.name)}
    if name not in states:
        raise PageNotFound(f"topic {topic.name!r} has no schedule {name!r}")

    async def act() -> str:
        await Schedules(queries.client, queries.keys, queries.topics).run(topic.name, name)
        leader = states[name].leader
        return f"{name} is asked for: {'its leader publishes it' if leader else 'it waits for a worker'}"

    return Action(f"Publish schedule {name} of {topic.name} once now, beside its ticks?", "run now", act)


async def pause_schedule(wanted: ActionForm) -> Action:
    """Publish no tick of a schedule until it is resumed."""
    return change_schedule(wanted, "pause", Schedules.pause, "Publish no tick of {} until it is resumed?", "is paused")


async def resume_schedule(wanted: ActionForm) -> Action:
    """Let a schedule go on with its next tick."""
    said = "goes on with its next tick"
    return change_schedule(wanted, "resume", Schedules.resume, "Let {} go on with its next tick?", said)


async def set_schedule(wanted: ActionForm) -> Action:
    """Another rule in place of that of the code."""
    rule, timezone = rule_given(wanted)

    async def change(schedules: Schedules, topic: str, name: str) -> None:
        await schedules.set(topic, name, rule, timezone=timezone)

    question = f"Give {{}} the rule {rule!r} ({timezone}) from now on, also over restarts and deployments?"
    return change_schedule(wanted, "set", change, question, f"has the rule {rule}")


async def reset_schedule(wanted: ActionForm) -> Action:
    """Back to the rule of the code."""
    question, said = "Give {} the rule of its code again?", "has the rule of its code again"
    return change_schedule(wanted, "back to the code's rule", Schedules.reset, question, said)


async def remove_schedule(wanted: ActionForm) -> Action:
    """Delete a schedule that no worker has in its code."""
    question = "Delete {} with its history for good?"
    return replace(
        change_schedule(wanted, "remove", Schedules.remove, question, "is removed"), is_danger=True, then=("schedules",)
    )


async def add_schedule(wanted: ActionForm) -> Action:
    """Add a schedule that no code has, or change it."""
    (rule, timezone), given = rule_given(wanted), wanted.form.get("payload")
    name, payload = wanted.value("schedule"), payload_given(given if isinstance(given, str) else "", "json")
    found, key = await wanted.visit.queries.topic(wanted.topic), wanted.value("key") or None
    topic, codings = found.name, await codings_for(wanted.visit, found)
    encoding = wanted.visit.queries.encoding.like(codings) if codings else NO_CODECS

    async def change(schedules: Schedules, topic: str, name: str) -> None:
        await schedules.upsert(name, rule, topic, payload, key=key, timezone=timezone)

    build_schedule(lambda: payload, rule, topic, name=name, key=key, timezone=timezone)  # its errors come before asking
    question = (
        f"Publish the payload to {topic} by {{}}: {rule!r} ({timezone})? One of this name that was added changes."
    )
    return change_schedule(wanted, "add", change, question, "is added", encoding)


def rule_given(wanted: ActionForm) -> tuple[str, str]:
    """The rule and the time zone of a form. Raises ConfigError."""
    rule, timezone = wanted.value("rule"), wanted.value("timezone") or "UTC"
    trigger_of(wanted.value("schedule") or "schedule", rule, timezone)
    return rule, timezone


def change_schedule(
    wanted: ActionForm,
    verb: str,
    change: Callable[[Schedules, str, str], Awaitable[None]],
    question: str,
    said: str,
    encoding: Encoding = NO_CODECS,
) -> Action:
    """A change of one schedule. `{}` in the question is the schedule."""
    queries, name, topic = wanted.visit.queries, wanted.value("schedule"), wanted.topic

    async def act() -> str:
        await change(Schedules(queries.client, queries.keys, queries.topics, encoding), topic, name)
        return f"{name} {said}"

    return Action(question.format(f"schedule {name} of {topic}"), verb, act)


async def message_state(wanted: ActionForm) -> State:
    """A message as the audit notes it: like its page."""
    try:
        found = await wanted.visit.queries.status(wanted.topic, wanted.value("message"), wanted.key)
    except PageNotFound as error:
        return {"message": wanted.value("message"), "state": str(error)}
    return {"message": found.id, "state": found.text, "groups": {each.group: each.text for each in found.groups}}


async def schedule_state(wanted: ActionForm) -> State:
    """A schedule as the audit notes it."""
    queries = wanted.visit.queries
    found = {each.name: each for each in await look_up(queries.client, queries.keys, queries.topics, wanted.topic)}
    state = found.get(wanted.value("schedule"))
    if state is None:
        return {}
    return {
        "schedule": state.name, "rule": rules(state), "last": timestamp(state.last), "paused": timestamp(state.paused),
        "asked": timestamp(state.run_asked),
    }  # fmt: skip


async def purge_device(wanted: ActionForm) -> Action:
    """Delete the letters of a device."""
    name, queries = wanted.value("device"), wanted.visit.queries
    device = await queries.device(name)
    if device is None:
        raise PageNotFound(f"there is no device {name!r}")

    async def act() -> str:
        return f"deleted {count(await queries.all_devices.purge(name), 'letter')}"

    question = f"Delete all {count(device.backlog, 'letter')} that wait for device {name!r} for good?"
    return Action(question, "delete", act, is_danger=True)


async def kick_client(wanted: ActionForm) -> Action:
    """End the connection of an MQTT client."""
    name, queries = wanted.value("client"), wanted.visit.queries
    client = await queries.mqtt.find(name)
    if client is None or not client.gateway:
        raise PageNotFound(f"MQTT client {name!r} is not connected")

    async def act() -> str:
        try:
            is_kicked = await queries.mqtt.kick(name, KICK_SECONDS)
        except TimeoutError:
            return f"no gateway has ended the connection of {name} in {KICK_SECONDS:g} s"
        return f"ended the connection of {name}" if is_kicked else f"{name} is not connected any more"

    question = f"End the connection of MQTT client {name!r}? It may connect again. Its session and its letters stay."
    return Action(question, "end the connection", act, is_danger=True)


async def cancel_batch(wanted: ActionForm) -> Action:
    """Cancel all members of a batch that have not started."""
    visit = wanted.visit
    found = await batch.one(visit, wanted.value("batch"))
    if not batch.may_cancel(visit, found):
        raise PageRefused("your role may not do this: it takes the role admin in all topics of the batch")

    async def act() -> str:
        after = await visit.queries.batches.cancel(found.name)
        return f"batch {found.name} is {'gone' if after is None else after.state}"

    question = (
        f"Cancel {count(found.missing, 'member')} of batch {found.name!r} for good? What runs goes on; its callback "
        f"comes when all have ended."
    )
    return Action(question, "cancel", act, is_danger=True)


async def quiet_process(wanted: ActionForm) -> Action:
    """Let a worker process finish what runs, and end."""
    return await end_of(wanted, QUIET, "It takes nothing new, finishes what runs, however long that takes,")


async def stop_process(wanted: ActionForm) -> Action:
    """Let a worker process end, as SIGTERM does."""
    return await end_of(wanted, STOP, "It takes nothing new, cancels what still runs after its grace,")


async def end_of(wanted: ActionForm, word: str, how: str) -> Action:
    """Ask a process to end. It is asked in one of its groups; the role must hold for all that it serves."""
    visit, name = wanted.visit, wanted.value("process")
    queries = visit.queries
    served = [each for each in (await queries.poller.fresh()).members if each.id == name]
    hidden = [each.topic for each in served if not visit.sees(each.topic)]
    if not served or len(hidden) == len(served):
        raise PageNotFound(f"there is no process {name!r}: it may have ended")
    if not all(visit.visitor.may(Role.ACT, each.topic) for each in served):
        raise PageRefused("it also serves topics for which your role is not act")

    async def act() -> str:
        one = served[0]
        return await end_process(queries.client, queries.keys, name, (one.topic, one.group), word)

    groups = ", ".join(f"{each.topic}/{each.group}" for each in served[:MOST_NAMED])
    question = (
        f"{word.capitalize()} process {name}, which serves {groups}? {how} and ends. Other members take over. Its "
        f"service manager may start another one; `rsmq worker --processes` does not."
    )
    return Action(question, word, act, is_danger=True)


ACTIONS: Final[Mapping[str, tuple[Role, Prepare]]] = {
    "replay": (Role.ACT, replay),
    "replay-matching": (Role.ACT, replay_matching),
    "purge": (Role.ADMIN, purge),
    "pause": (Role.ACT, pause),
    "resume": (Role.ACT, resume),
    "reset": (Role.ADMIN, reset),
    "end-hold": (Role.ACT, end_hold),
    "move-delayed": (Role.ACT, move_waiting),
    "move-parked": (Role.ACT, move_waiting),
    "reschedule": (Role.ACT, reschedule_message),
    "publish": (Role.ACT, publish),
    "cancel": (Role.ADMIN, cancel),
    "cancel-delayed": (Role.ADMIN, cancel_waiting),
    "cancel-parked": (Role.ADMIN, cancel_waiting),
    "run-schedule": (Role.ACT, run_now),
    "pause-schedule": (Role.ACT, pause_schedule),
    "resume-schedule": (Role.ACT, resume_schedule),
    "set-schedule": (Role.ACT, set_schedule),
    "reset-schedule": (Role.ACT, reset_schedule),
    "remove-schedule": (Role.ADMIN, remove_schedule),
    "add-schedule": (Role.ACT, add_schedule),
    "purge-device": (Role.ADMIN, purge_device),
    "kick-client": (Role.ACT, kick_client),
    "cancel-batch": (Role.ADMIN, cancel_batch),
    "quiet-process": (Role.ACT, quiet_process),
    "stop-process": (Role.ACT, stop_process),
}


WITHOUT_TOPIC: Final = ("purge-device", "cancel-batch", "kick-client", "quiet-process", "stop-process")


async def prepare(name: str, visit: Visit, inspector: Inspector, form: FormData) -> tuple[Action, ActionForm]:
    """The action that a form asks for. Raises PageNotFound, PageRefused or ConfigError."""
    if name not in ACTIONS:
        raise PageNotFound(f"there is no action {name!r}")
    role, made = ACTIONS[name]
    wanted = ActionForm(visit, inspector, form, str(form.get("topic") or ""), str(form.get("group") or ""))
    topic = None if name in WITHOUT_TOPIC else wanted.topic
    if topic is not None:
        visit.check(topic)
    if name != "cancel-batch" and not visit.visitor.may(role, topic):  # that one asks for each topic of the batch
        raise PageRefused(f"your role may not do this: it takes the role {role.name.lower()}")
    if wanted.group:
        await visit.queries.group(wanted.topic, wanted.group)
    return await made(wanted), wanted


def selection_of(value: Callable[[str], str]) -> Selection:
    """The filters of a page of dead letters. Raises ConfigError."""
    return Selection(
        reasons=tuple(value("reason").split()),
        error=value("error") or None,
        since=time_given(value("since")),
        until=time_given(value("until")),
        key=value("key") or None,
        where=read_fields([value("where")] if value("where") else []),
    )


def due_of(wanted: ActionForm) -> tuple[int | None, str]:
    """The new due time in ms, None for now, and as text."""
    if wanted.value("when") != "at":
        return None, "now"
    at = time_given(wanted.value("at"))
    if at is None:
        raise ConfigError("give the time that the messages are due at")
    return epoch_ms(at), f"at {at:%Y-%m-%d %H:%M:%S} UTC"


def every_of(rate: str) -> timedelta:
    """The time between two replays. Raises ConfigError."""
    try:
        number = float(rate or 0)
    except ValueError:
        number = -1.0
    if not 0 <= number < 1e6:
        raise ConfigError(f"{rate[:40]!r} is not a rate: give a number of messages a second")
    return timedelta(seconds=1 / number if number else 0)


def pace(every: timedelta) -> str:
    """A rate in a question."""
    return f", at most {1 / every.total_seconds():g} a second: it goes on after this page is closed" if every else ""


def of(done: int, wanted: Sequence[str], what: str) -> str:
    """How many of them: some may be gone."""
    gone = f" of {len(wanted)}: the others are gone" if done < len(wanted) else ""
    return f"{count(done, what)}{gone}"
