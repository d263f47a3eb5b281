"""Old bugs and removed fences, put back one at a time: `python -m tests.simulation.museum` must find each.

An exhibit is a few replaced lines, applied in a scratch copy of the package.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count, islice
from pathlib import Path
from typing import Final, Literal

from tests.simulation.plan import Plan
from tests.simulation.world import Choices

ROOT: Final = Path(__file__).parents[2]
PAGE: Final = ROOT / "tests" / "simulation" / "README.md"
SEEDS: Final = Path(__file__).with_name("failed_seeds.txt")
HEADER: Final = (
    "| put back | what it does | seed | first broken promise | seeds | CPU seconds |\n|---|---|---|---|---|---|\n"
)
MINUTES: Final = 10
BATCH: Final = 50
FENCE: Final = "if lease[1] ~= ARGV[1] or lease[2] ~= ARGV[2] then return { 'STALE_EPOCH' } end"

STARTED_SINCE: Final = "if row and row[4] > tonumber(ARGV[5]) then return { 'NOT_PENDING' } end"


@dataclass(frozen=True)
class Edit:
    """Lines of one file, replaced by others."""

    path: str
    old: str
    new: str


RECLAIMER: Final = "rsmq/consumer/reading/reclaimer.py"
RECOVERY: Final = "rsmq/consumer/waiting/recovery.py"
UNSURE: Final = Edit(RECOVERY, "if self._is_unsure_of_retries:", "if False:")
"""Since a late call for retries is followed by another recovery, some other bugs do not show any more without this."""


@dataclass(frozen=True)
class Exhibit:
    """A bug."""

    name: str
    what: str
    edits: Sequence[Edit]
    needs: Callable[[Plan], bool] = lambda _: True
    """Only seeds with such a plan can show it; the others are not played."""
    option: Literal["", "--encoded", "--resized", "--unwatched", "--mqtt"] = ""
    """Where messages are encoded, the topic grows, all watchers go, or gateways read letters. `make simulation` plays
    such seeds."""

    @property
    def plan(self) -> Plan:
        """What its seeds vary."""
        shares = {"encodes": "--encoded", "resizes": "--resized", "unwatches": "--unwatched", "mqtt": "--mqtt"}
        return replace(Plan(), **{name: float(self.option == option) for name, option in shares.items()})


def unfenced(script: str, needs: Callable[[Plan], bool] = lambda _: True) -> Exhibit:
    """A script that does not check owner and epoch."""
    edit = Edit(f"rsmq/redis/lua/consumer/{script}.lua", FENCE, "")
    return Exhibit(f"{script} without its fence", "a former owner may run it", [edit], needs)


def bug(
    name: str, what: str, path: str, old: str, new: str = "", needs: Callable[[Plan], bool] = lambda _: True
) -> Exhibit:
    """A bug in one place."""
    return Exhibit(name, what, [Edit(f"rsmq/{path}", old, new)], needs)


def encoded(name: str, what: str, kind: str, *edits: Edit) -> Exhibit:
    """A bug that shows where messages are `sealed`, or their bodies `stored`."""
    return Exhibit(name, what, edits, lambda plan: plan.encoded == kind, "--encoded")


def resized(
    name: str, what: str, path: str, old: str, new: str = "", needs: Callable[[Plan], bool] = lambda _: True
) -> Exhibit:
    """A bug that shows where the topic grows."""
    return Exhibit(name, what, [Edit(f"rsmq/{path}", old, new)], needs, "--resized")


def unwatched(name: str, what: str, path: str, old: str, new: str, *kinds: str) -> Exhibit:
    """A bug that shows where all members that watch the others go in one of these ways."""
    edits = [Edit(f"rsmq/heartbeat/{path}", old, new)]
    return Exhibit(name, what, edits, lambda plan: plan.unwatched in kinds, "--unwatched")


def mqtt(name: str, what: str, path: str, old: str, new: str = "") -> Exhibit:
    """A bug that shows where gateways read the letters of MQTT clients."""
    return Exhibit(name, what, [Edit(f"rsmq/{path}", old, new)], lambda plan: plan.is_mqtt, "--mqtt")


def aims_at(*aims: str) -> Callable[[Plan], bool]:
    """Only seeds that aim at one of these races."""
    return lambda plan: plan.aim in aims


def may_set_clock(plan: Plan) -> bool:
    """Whether the server's clock is set (`Fates._set_clock`)."""
    return not (plan.delayed or plan.schedule or plan.expires or plan.rate[0] or plan.group_rate[0] or plan.uniques)


def left_out(what: str, script: str, line: str, needs: Callable[[Plan], bool] = lambda _: True) -> Exhibit:
    """A script that ends members of a batch and does not count them."""
    edit = Edit(f"rsmq/redis/lua/{script}.lua", line, "")
    return Exhibit(f"{script} without members", what, [edit], lambda plan: plan.in_batch and needs(plan))


def noted(name: str, what: str, path: str, old: str, new: str = "") -> Exhibit:
    """A bug about steps, progress or results."""
    return bug(name, what, path, old, new, needs=lambda plan: plan.has_notes)


EXHIBITS: Final = (
    unfenced("keep_note", lambda plan: plan.has_notes),
    noted(
        "a settlement keeps steps",
        "steps and progress of settled messages stay",
        "redis/lua/consumer/settle_outputs.lua",
        "local steps = mark ~= '' and take_notes(KEYS[1], ARGV[3], ARGV[at])",
        "local steps = {}",
    ),
    noted(
        "a step without an answer",
        "a step whose write had no answer counts as kept",
        "consumer/settling/notes.py",
        "                await asyncio.sleep(PAUSE)\n                continue\n            if word == b",
        "                return\n            if word == b",
    ),
    noted(
        "a settlement without results",
        "handled messages have no result",
        "redis/lua/consumer/settle_outputs.lua",
        "      redis.call('SET', KEYS[target], ARGV[at + 3], 'PX', ARGV[last])\n",
    ),
    noted(
        "a dead letter without a result",
        "its publisher waits in vain",
        "consumer/settling/settler.py",
        "        self.notes.keep_failure(message, lane, str(decision.reason), decision.error)\n",
    ),
    noted(
        "a cancelled message without a result",
        "its publisher waits in vain",
        "redis/lua/shared/end_cancelled.lua",
        "if entry then keep_failure(stream, group, entry[2], 'cancelled', 'it was cancelled') end\n",
    ),
    noted(
        "a cancelled message keeps steps",
        "steps and progress of a message that is cancelled before its second attempt stay",
        "redis/lua/shared/end_cancelled.lua",
        "  take_notes(stream, group, id)\n",
    ),
    left_out(
        "handled members of a batch are missing", "consumer/settle_members", "leave_batch(KEYS[1], ARGV[2], leaving)\n"
    ),
    left_out(
        "members with outputs are missing in their batch",
        "consumer/settle_outputs",
        "if member ~= '' then leaving[#leaving + 1] = { member, outcome, added } end",
        lambda plan: plan.has_outputs,
    ),
    left_out(
        "dead letters are missing in their batch",
        "consumer/bury_message",
        "if member then leave_batch(KEYS[1], ARGV[3], { { member, reason == 'expired' and 'expired' or 'failed', '' } }"
        ") end",
        lambda plan: plan.poison > 0,
    ),
    left_out(
        "messages that are cancelled before they start are missing in their batch",
        "shared/end_cancelled",
        "if member then leave_batch(stream, group, { { member, 'cancelled', '' } }) end",
        lambda plan: plan.cancels > 0,
    ),
    left_out(
        "parked messages that are cancelled are missing in their batch",
        "control/cancel_message",
        "  if member then leave_batch(stream, group, { { member, 'cancelled', '' } }) end\n",
        lambda plan: plan.cancels > 0 and plan.ordering == "none",
    ),
    left_out(
        "delayed messages that are cancelled are missing in their batch",
        "control/cancel_delayed",
        "if member then leave_batch(stream, nil, { { member, 'cancelled', '' } }) end",
        lambda plan: plan.cancels > 0 and plan.delayed > 0,
    ),
    bug(
        "the lowest band first",
        "a message starts while one of a higher band is ready",
        "consumer/waiting/ready_bands.py",
        "        return bands[0]\n\n    def _weight",
        "        return bands[-1]\n\n    def _weight",
        lambda plan: bool(plan.bands) and not plan.batch,
    ),
    bug(
        "a member that has seen a band never follows",
        "no member reads the new partitions",
        "consumer/consumer.py",
        "        context.follow(changed)\n",
        "",
        lambda plan: plan.bands_after > 0,
    ),
    unfenced("start_message"),
    unfenced("park_message"),
    unfenced("unpark_messages"),
    unfenced("claim_pending"),
    unfenced("bury_message"),
    unfenced("hand_back", lambda plan: plan.halts and plan.distribution == "hash"),
    bug(
        "restore_pending without its fence",
        "the audit of a former owner makes settled messages pending again",
        "redis/lua/worker/restore_pending.lua",
        FENCE,
    ),
    bug(
        "renew_lease without its fence",
        "a former owner prolongs the lease of the new one, and believes in it",
        "redis/lua/heartbeat/renew_lease.lua",
        FENCE.replace("{ 'STALE_EPOCH' }", "'STALE_EPOCH'"),
    ),
    bug(
        "release_lease without its fence",
        "a release that comes late gives the new owner's lease away",
        "redis/lua/heartbeat/release_lease.lua",
        FENCE.replace("{ 'STALE_EPOCH' }", "'STALE_EPOCH'"),
    ),
    bug(
        "settle_messages without its fence",
        "a former owner acknowledges the new owner's messages",
        "redis/lua/consumer/settle_messages.lua",
        "if holder[1] ~= ARGV[1] or holder[2] ~= epoch then return { 'STALE_EPOCH' } end",
    ),
    bug(
        "outputs of a message that was settled before",
        "a settlement whose reply is lost stores the outputs again",
        "redis/lua/consumer/settle_outputs.lua",
        "ARGV[4] == '0', retry) then",
        "ARGV[4] == '0', retry) or true then",
        needs=lambda plan: plan.has_outputs,
    ),
    unfenced("settle_outputs"),
    bug(
        "outputs of a failed attempt",
        "what an attempt has published is stored although it failed, if a later one succeeds",
        "consumer/running/runner.py",
        "        if outcome is not None:\n            lane.outgoing.forget(message.entry_id)\n",
        "",
        needs=lambda plan: plan.has_outputs,
    ),
    bug(
        "a cancelled worker repeats the settlement of outputs",
        "the call before it comes late and stores the outputs again, although the message is not pending any more",
        "consumer/settling/outputs.py",
        "            if any(entry.is_sent for entry in lane.outgoing.waiting.values()):\n                continue\n",
        "",
        needs=lambda plan: plan.has_outputs and plan.aim == "late call",
    ),
    bug(
        "no look at the clock before a start",
        "a worker that wakes from a pause starts handlers of partitions that it has lost",
        "consumer/running/runner.py",
        "                            now >= lane.lease.deadline\n                            or (message",
        "                            (message",
    ),
    bug(
        "the last reader is not cut off",
        "a read of the last owner that comes late takes messages for it",
        "heartbeat/lease.py",
        'await self._cut_off(key, reply[3].decode(errors="replace").splitlines())',
        "pass",
        needs=aims_at("late read", "usurpation"),
    ),
    Exhibit(
        "a release forgets the reader",
        "a worker that stops while its read is late leaves a read behind that takes messages",
        [
            Edit("rsmq/redis/lua/heartbeat/release_lease.lua", "'reader', ARGV[4]", "'reader', ''"),
            Edit("rsmq/consumer/owning/lane_lifecycle.py", "await self._fetchers.end_late_reads()", "pass"),
        ],
        aims_at("late read"),
    ),
    bug(
        "an absent member goes on",
        "a member whose presence is interrupted keeps working while others take its partitions",
        "heartbeat/heartbeat.py",
        "        for lease, on_lost in leases.items():\n            self._lost(lease, on_lost)\n        for each",
        "        for each",
    ),
    bug(
        "an absent member takes partitions",
        "a member whose presence is interrupted takes partitions on its other connections",
        "consumer/owning/rebalancer.py",
        "        if self._heartbeat.is_absent:\n            return False\n",
    ),
    bug(
        "the grace waits for a connection",
        "a member whose next presence connection hangs stops only when that attempt has failed",
        "heartbeat/presence.py",
        "                self._absence_timer.start()\n",
        "                pass\n",
        needs=lambda plan: plan.hangs,
    ),
    bug(
        "a pause is not counted",
        "a paused member whose connections broke meanwhile goes on for the grace, although others have replaced it",
        "heartbeat/presence.py",
        "left = self._interrupted_at + self._grace - monotonic()",
        "left = self._grace",
        needs=aims_at("cut in a pause"),
    ),
    bug(
        "a pause between two looks at the subscription",
        "a member that was paused just before a look, and finds a break in it, goes on for the whole grace",
        "heartbeat/presence.py",
        "            before = now = monotonic()\n",
        "            before = now = self._ran_at = monotonic()\n",
    ),
    resized(
        "what has come before a break counts as a look",
        "a paused member that reads announcements of before the break goes on for the grace: others have replaced it",
        "heartbeat/presence.py",
        "            is_behind = is_there and bool(pubsub.connection.can_read(timeout=0))\n",
        "            is_behind = False\n",
    ),
    bug(
        "a return that no member has seen",
        "a presence that comes back between two looks of another member, and breaks again, gets a new grace",
        "heartbeat/presence.py",
        "if self._interrupted_at is None or self._ran_at - self._restored_at >= self._seen_after:",
        "if True:",
        aims_at("short return"),
    ),
    Exhibit(
        "a first presence that no member has seen",
        "a worker is seen before its presence has begun, so the others count from then when it breaks soon",
        [
            Edit(
                "rsmq/heartbeat/heartbeat.py",
                "await asyncio.wrap_future(self._presence.listen(channel))",
                "listening = self._presence.listen(channel)",
            ),
            Edit(
                "rsmq/heartbeat/heartbeat.py",
                "wrap_future(membership.confirmed)\n",
                "wrap_future(membership.confirmed)\n        await asyncio.wrap_future(listening)\n",
            ),
        ],
        aims_at("short return"),
    ),
    bug(
        "a hint counts as a look",
        "a member that is said to be silent has no grace",
        "heartbeat/membership.py",
        "            self._watch.suspect(frozenset(members).intersection(self._members))\n",
        "            self._watch.suspect(frozenset(members).intersection(self._members))\n"
        "            for each in members:\n                self._liveness.ended(each)\n",
        lambda plan: plan.watchers < plan.members,
    ),
    bug(
        "a present member is replaced",
        "the script that takes the lease of an absent member does not ask again whether it is back",
        "redis/lua/heartbeat/take_lease.lua",
        "if ARGV[5] ~= '' and redis.call('PUBSUB', 'NUMSUB', ARGV[5])[2] > 0 then return { 'HELD', owner, left } end",
        needs=aims_at("return"),
    ),
    bug(
        "a renewal revives a lease",
        "a lease that has run out by the clock is believed again when a late answer comes",
        "heartbeat/lease.py",
        "if not self.is_lost and self.is_held():",
        "if True:",
    ),
    bug(
        "settlements are lost with their connection",
        "what was done is not settled again after the connection has broken",
        "consumer/reading/fetcher.py",
        "            self._settler.put_back(batches)\n            raise",
        "            raise",
    ),
    bug(
        "a new lane gets the old lane's read",
        "messages of a read that began under an earlier lease overtake what is pending",
        "consumer/reading/fetcher.py",
        "lane for lane in lanes if self._lanes.get(lane.partition) is lane}",
        "self._lanes[lane.partition] for lane in lanes if lane.partition in self._lanes}",
        needs=aims_at("lapse"),
    ),
    bug(
        "settled during a claim",
        "a message that is settled while a claim is on its way starts again",
        "consumer/reading/reclaimer.py",
        "and row[0] not in in_flight and row[0] not in far]",
        "and row[0] not in far]",
        needs=aims_at("late claim"),
    ),
    Exhibit(
        "the reply to a retry is lost",
        "messages that were brought back in a lost reply stay pending",
        [UNSURE, Edit(RECOVERY, "self.retry_at = 0.0\n        self.restart()", "self.retry_at = 0.0")],
        aims_at("lost retry"),
    ),
    bug(
        "a retry before the reply to its parking",
        "a parked message that is due before the reply to its parking stays pending",
        "consumer/reading/reclaimer.py",
        "while lane.lease.is_held() and any(",
        "while False and any(",
    ),
    bug(
        "a publish whose reply is lost",
        "the messages are stored again without a search",
        "producer/in_doubt.py",
        "    positions = {message_id",
        "    return 0, write.since\n    positions = {message_id",
    ),
    bug(
        "a publish that overtakes",
        "a message is published while others wait for their topic, which another task has read: it is stored first",
        "redis/topics.py",
        "return None if name in topics._lookups else topics._fresh(name)",
        "return topics._fresh(name)",
    ),
    bug(
        "a handover does not wait",
        "a partition is given away while its handlers run",
        "consumer/owning/lane_lifecycle.py",
        "        while (is_busy := self._runner.running_of(lane) or lane.recovery.claims) and monotonic() < deadline:\n"
        "            await asyncio.sleep(0.01)\n"
        "        if is_busy:\n            return False\n",
    ),
    bug(
        "an outage looks like the death of all",
        "members that could not renew for a while are taken for dead at once",
        "heartbeat/liveness.py",
        "if self._steady_since is None or now - self._steady_since < self._ttl:",
        "if False:",
    ),
    bug(
        "the reader before a lost grant is forgotten",
        "after a grant whose reply was lost, the last owner's reader is not cut off",
        "redis/lua/heartbeat/take_lease.lua",
        "((lease[3] or '') .. '\\n' .. (lease[4] or ''))",
        "(lease[3] or '')",
        needs=aims_at("usurpation"),
    ),
    bug(
        "a lost lease lasts as long as a clock was set back",
        "a live member that has lost its lease keeps the others away for as long as the server's clock was set back",
        "redis/lua/heartbeat/take_lease.lua",
        "if owner ~= '' and epoch == lease[5] and left > tonumber(ttl) then",
        "if false then",
        needs=may_set_clock,
    ),
    bug(
        "the owner of a deleted lease is forgotten",
        "after a DEL of a lease another member takes it while its owner still believes in it",
        "redis/lua/heartbeat/take_lease.lua",
        "if is_set_back or not lease[1] and has_readers() then",
        "if is_set_back then",
    ),
    Exhibit(
        "a repetition overtakes",
        "a command on a connection that broke is executed after its repetition on the next one",
        [
            Edit("rsmq/redis/client/raw_connection.py", "if self._last else []", "if False else []"),
            Edit("rsmq/redis/lua/consumer/park_message.lua", STARTED_SINCE, ""),
        ],
        aims_at("late call"),
    ),
    bug(
        "a retry beside its timer",
        "after a take-over the retry poller brings a parked message back that its owner's timer brings back, too",
        "consumer/reading/reclaimer.py",
        "if entry_id in lane.in_flight or (is_retry and is_ours and self._has_timer(lane, entry_id, fields)):",
        "if entry_id in lane.in_flight and not is_retry:",
    ),
    bug(
        "the audit restores what is being settled",
        "messages whose settlement is on its way are made pending again",
        "consumer/waiting/lane.py",
        "self.in_flight.difference(self.done, self.asking, *self.settling)",
        "self.in_flight.difference(self.done)",
        needs=aims_at("late audit"),
    ),
    bug(
        "a slow member's messages are taken",
        "shared distribution: a member waits for its own lease, not for the longer one of the member that has them",
        "redis/lua/consumer/adopt_pending.lua",
        "row[3] >= (patience[row[2]] or min_idle)",
        "row[3] >= min_idle",
        needs=lambda plan: plan.distribution == "shared" and len(plan.leases) > 1,
    ),
    bug(
        "a read without a look at the marks",
        "a message that is cancelled before it is delivered is handled",
        "consumer/reading/fetcher.py",
        "        if marks:\n",
        "        if False:\n",
        needs=lambda plan: bool(plan.cancels),
    ),
    bug(
        "a message that is rescheduled keeps its old timer",
        "a parked message that was moved to a later time starts at the old one",
        "consumer/waiting/flows.py",
        "self.parked[key] = stopped[-1]",
        "self.parked[key] = message",
        needs=lambda plan: bool(plan.moves),
    ),
    bug(
        "a retry behind an earlier message does not wait",
        "a parked message that is taken over behind an earlier one of its key starts as soon as that is done",
        "consumer/waiting/queue.py",
        "            lane.recovery.wait_untimed(message.entry_id)\n",
        "",
        needs=lambda plan: bool(plan.moves),
    ),
    bug(
        "a time that is over is not asked about again",
        "a message starts at its old time if it was rescheduled after its new owner had read all times",
        "consumer/waiting/queue.py",
        "        is_known = due is not None\n",
        "        due = None if due and due <= times.now_ms() else due\n        is_known = due is not None\n",
        needs=lambda plan: bool(plan.moves),
    ),
    bug(
        "the body of a retry that was rescheduled meanwhile counts as read",
        "a message starts without its body, and becomes a dead letter",
        "consumer/waiting/queue.py",
        "        if entry_id not in lane.flows.bodies_wanted:  # it was rescheduled meanwhile, and has no body yet\n",
        "        if False:\n",
        needs=lambda plan: bool(plan.moves),
    ),
    bug(
        "a call that waits again during a recovery is claimed again",
        "a call has a message twice, and the worker ends when it settles it",
        "consumer/waiting/flows.py",
        "            self._known[1].update(ids)\n",
        "            pass\n",
        needs=lambda plan: plan.linger > 0,
    ),
    bug(
        "a cancelled message is not noted",
        "a message that its owner has taken out of its queue is neither cancelled nor handled",
        "redis/lua/shared/end_cancelled.lua",
        "redis.call('ZADD', cancelled, id:match('^%d+'), id)",
        "",
        needs=lambda plan: bool(plan.cancels),
    ),
    bug(
        "a retry waits for the clock",
        "a parked message waits longer by as much as the server's clock was set back",
        "redis/lua/shared/follow_clock.lua",
        "if now < seen - 1000 then",
        "if false then",
        needs=aims_at("clock back"),
    ),
    bug(
        "a settlement without its script",
        "a settlement is lost when the server has forgotten the script and is away when it is sent again",
        "consumer/settling/settler.py",
        "            reply = await self._send_again(batch)\n        if isinstance(reply, BrokerUnavailable):",
        "            reply = await self._send_again(batch)\n        elif isinstance(reply, BrokerUnavailable):",
        needs=aims_at("no script"),
    ),
    bug(
        "a stop during a grant",
        "a worker that ends while it takes a lease leaves it until it expires",
        "consumer/owning/rebalancer.py",
        "            with anyio.move_on_after(self._settings.command_timeout.total_seconds(), shield=True):\n"
        "                try:\n",
        "            with anyio.move_on_after(self._settings.command_timeout.total_seconds()):\n                try:\n",
        needs=aims_at("stop in a grant"),
    ),
    bug(
        "no mark of a source",
        "letters of a call that is repeated are stored again",
        "redis/lua/persistence/add_letters.lua",
        "if letters[i] > newest then",
        "if true then",
        needs=lambda plan: plan.is_inbox,
    ),
    bug(
        "ack_letters without its fence",
        "a session that was taken over acknowledges letters",
        "redis/lua/shared/remove_acked.lua",
        "if state[1] ~= epoch then return { state[1] and 'STALE_EPOCH' or 'NO_SESSION' } end",
        needs=lambda plan: plan.is_inbox,
    ),
    Exhibit(
        "a claim under an old recovery",
        "the reply to a page that was asked for before the connection broke moves the cursor past what was lost",
        [UNSURE, Edit(RECOVERY, "if number == self._restarts:", "if True:")],
        aims_at("lost retry"),
    ),
    bug(
        "a reset during the start",
        "a worker that starts while its group is reset ends with an error",
        "redis/streams.py",
        "    while not found:",
        "    for _ in range(1):",
    ),
    bug(
        "no look at the expiry",
        "messages are handled when they have expired",
        "consumer/running/runner.py",
        "if left is None or left > 0:",
        "if True:",
        needs=lambda plan: bool(plan.expires),
    ),
    bug(
        "an expired message is handled all the same",
        "a message that is dropped because it has expired is handled, too",
        "consumer/running/runner.py",
        "            await self._settle(message, lane)\n        return True\n",
        "            return False\n        return True\n",
        needs=lambda plan: bool(plan.expires),
    ),
    bug(
        "an expiry is early",
        "messages expire a second before their time",
        "model/message.py",
        "else message.expires_ms - now_ms\n",
        "else message.expires_ms - now_ms - 1000\n",
        needs=lambda plan: bool(plan.expires),
    ),
    bug(
        "outputs of an on_dead that failed",
        "what a failed on_dead has published is stored",
        "consumer/running/runner.py",
        "if is_done and message.entry_id",
        "if message.entry_id",
        needs=lambda plan: plan.has_hook,
    ),
    bug(
        "outputs of a dead letter that was stored before",
        "a burial whose reply is lost stores the dead letter and its outputs again",
        "redis/lua/consumer/settle_outputs.lua",
        "ARGV[4] == '0', retry) then",
        "ARGV[4] == '0', retry) or ARGV[at + 1] == '2' then",
        needs=lambda plan: plan.has_hook,
    ),
    bug(
        "a message for the fallback topic is lost",
        "what has failed for good is settled, and nothing is stored in its fallback topic",
        "consumer/waiting/outgoing.py",
        "MessageOutputs(message, [output], record=record)",
        "MessageOutputs(message, [], record=record)",
        needs=lambda plan: plan.has_fallback,
    ),
    bug(
        "a message for the fallback topic that was stored before",
        "a settlement whose reply is lost stores the message of the fallback topic again",
        "redis/lua/consumer/settle_outputs.lua",
        "ARGV[4] == '0', retry) then",
        "ARGV[4] == '0', retry) or ARGV[at + 1] == '2' then",
        needs=lambda plan: plan.has_fallback,
    ),
    bug(
        "a dead letter beside the fallback",
        "what goes to its fallback topic becomes a dead letter, too",
        "consumer/running/runner.py",
        "        if dead is None:\n            return\n        decision = dead\n",
        "        decision = dead or decision\n",
        needs=lambda plan: plan.has_fallback,
    ),
    bug(
        "a key goes on before the fallback is stored",
        "the next message of a key starts before the server knows that the one before goes to its fallback topic",
        "consumer/running/runner.py",
        "is_handing_on = lane.outgoing.is_handing_on(entry_id)",
        "is_handing_on = False",
        needs=lambda plan: plan.has_fallback and plan.ordering != "none" and not plan.batch,
    ),
    bug(
        "a message that is handed on keeps its permit",
        "what goes to its fallback topic, and keeps its key, never gives the permit of its name back",
        "consumer/waiting/name_permits.py",
        "        super().leave(message)\n        for on_left in self._on_left:",
        "        super().leave(message)\n        for on_left in ():",
        needs=lambda plan: plan.has_fallback and plan.ordering != "none" and plan.calls[1],
    ),
    bug(
        "a batch starts after a burial",
        "a batch starts although its lease ended while one of its messages became a dead letter",
        "consumer/running/batch_runner.py",
        "            batch = self._still_ours(kept)\n",
        "            batch = kept\n",
        needs=lambda plan: bool(plan.batch and plan.poison),
    ),
    bug(
        "a handover forgets the rate",
        "the next owner of a key does not know when its messages have started",
        "consumer/owning/lane_lifecycle.py",
        "(self._member, lane.epoch, limit.pack(lane))",
        "(self._member, lane.epoch, '')",
        needs=lambda plan: bool(plan.rate[0]),
    ),
    bug(
        "a dropped message keeps its start",
        "a redelivered message whose lease is over before its charge holds a part of its rate for good",
        "consumer/running/runner.py",
        "            self.queue.message_rate.forget(message)\n        self.queue.finish",
        "            pass\n        self.queue.finish",
        needs=lambda plan: bool(plan.rate[0]),
    ),
    bug(
        "a handover is early by the time of a reply",
        "a member whose look at the clock was slow hands over starts that seem older than they are",
        "consumer/waiting/limits.py",
        "self._clock.now_ms() + round(1000 * self._clock.behind)",
        "self._clock.now_ms()",
        needs=lambda plan: bool(plan.rate[0]),
    ),
    bug(
        "a late start does not count for the rate",
        "a message of a key that waits for its charge counts from before, so the next one starts too soon",
        "consumer/running/runner.py",
        "            await rate.starts_late(message, lane)\n",
        "            pass\n",
        needs=lambda plan: bool(plan.rate[0]),
    ),
    bug(
        "a failed message that the server has lost lets its key go on",
        "after a failover with a loss a message fails that comes again, and the next one of its key starts before that",
        "consumer/settling/settler.py",
        "                if script in (START_MESSAGE, PARK_MESSAGE, BURY_MESSAGE):",
        "                if False:",
    ),
    bug(
        "messages in flight are read again",
        "a group that is reset under shared distribution gives a running message to a second handler: both settle it",
        "consumer/waiting/lane.py",
        "if is_again or len(self.in_flight) - known < len(entry_ids):",
        "if is_again:",
        needs=lambda plan: plan.distribution == "shared",
    ),
    bug(
        "an answer that comes late",
        "shared distribution: a member handles what it read longer ago than a lease, which another has handled since",
        "consumer/reading/fetcher.py",
        'if context.handler.distribution == "shared":',
        "if False:",
        needs=lambda plan: plan.distribution == "shared",
    ),
    bug(
        "the newest entry of another connection",
        "after a failover to a clock that is behind, a lost reply is searched for behind ids that are not reached",
        "producer/sender.py",
        "            self._newest.clear()",
        "            pass",
    ),
    bug(
        "what a member holds does not count",
        "a name starts more than its rate allows, because a block that is not reported yet is given twice",
        "redis/lua/consumer/take_starts.lua",
        "    busy = busy + (member ~= ARGV[1] and starts or 0)\n",
        "",
        needs=lambda plan: bool(plan.group_rate[0]),
    ),
    bug(
        "uses that are not reported",
        "a start counts only until the next call of its member",
        "consumer/waiting/group_rate.py",
        "            *ages(question.used, now, step),\n",
        "",
        needs=lambda plan: bool(plan.group_rate[0]),
    ),
    bug(
        "a late start counts from before its charge",
        "a message that waits for its charge counts from before, so another one starts too soon",
        "consumer/waiting/group_rate.py",
        "        if message.is_redelivered or message.is_outside:\n",
        "        if message.is_outside:\n",
        needs=lambda plan: bool(plan.group_rate[0]),
    ),
    bug(
        "a message that waits as an id is put aside without its fence",
        "a former owner hides that a message has started",
        "redis/lua/consumer/put_aside.lua",
        FENCE,
        needs=lambda plan: plan.is_hot,
    ),
    bug(
        "a later message does not wait behind ids",
        "a message whose key waits as ids is kept in memory, and starts before them",
        "consumer/waiting/queue.py",
        "if behind.ids or key in flows.resting or (is_ahead and",
        "if (is_ahead and",
        needs=lambda plan: plan.is_hot,
    ),
    bug(
        "a recovery does not know what waits as ids",
        "after a lost connection the ids are taken over again, and their messages handled twice",
        "consumer/reading/reclaimer.py",
        "row[0] not in in_flight and row[0] not in far]",
        "row[0] not in in_flight]",
        needs=lambda plan: plan.is_hot,
    ),
    bug(
        "a flow that ran dry is not read again",
        "the messages behind a key wait for good when those in memory are handled",
        "consumer/waiting/flows.py",
        "            self.dry.add(key)\n            self.thin[key] = None\n",
        "            self.dry.add(key)\n            self.thin.pop(key, None)\n",
        needs=lambda plan: plan.is_hot,
    ),
    bug(
        "a lost lease keeps the ids",
        "what waited as ids is forgotten only in memory",
        "consumer/waiting/flows.py",
        "                flow.ids = None\n        for key in free",
        "                pass\n        for key in free",
        needs=lambda plan: plan.is_hot,
    ),
    unfenced("start_call", needs=lambda plan: plan.linger > 0),
    bug(
        "a call leaves no record",
        "the next owner does not know which messages have started together",
        "redis/lua/consumer/start_call.lua",
        "if newest then redis.call('HSET', KEYS[7], ARGV[21], newest) end",
        "",
        needs=lambda plan: plan.linger > 0,
    ),
    bug(
        "a call does not look for what is unread",
        "messages of its window are missing",
        "redis/lua/consumer/start_call.lua",
        "if #unread + #on_way > 0 then return { 'BEHIND' } end",
        "",
        needs=lambda plan: plan.linger > 0,
    ),
    unfenced("keep_waits", needs=lambda plan: plan.has_quiet),
    bug(
        "a later message stays in memory while its key waits for a time",
        "it starts before the one that is read again",
        "consumer/waiting/queue.py",
        "if behind.ids or key in flows.resting or (is_ahead and",
        "if behind.ids or (is_ahead and",
        needs=lambda plan: plan.has_quiet and plan.ordering == "key",
    ),
    bug(
        "a named flow does not know its keys",
        "a later message of a key starts before one that waits as an id for the turn of its tenant",
        "consumer/waiting/named_flows.py",
        "if flow is not None and last & POSITION >= flow.gone:",
        "if False:",
        needs=lambda plan: plan.has_tenants and plan.ordering == "key",
    ),
    bug(
        "a message that leaves a named flow does not wait for its key",
        "two messages of a key run at once when both have waited for the turns of their tenants",
        "consumer/waiting/queue.py",
        "            behind = None if key is None else flows.waiting.get(key)\n            if key is not None",
        "            behind = None\n            if key is not None",
        needs=lambda plan: plan.has_tenants and plan.ordering == "key",
    ),
    encoded(
        "a body is put after its entry",
        "a handler starts before the body of its message is there, which becomes a dead letter",
        "stored",
        Edit(
            "rsmq/producer/producer.py",
            "            await self._bodies.put_in_turn(topic, key, folder.bodies)\n        if name is not None:",
            "            pass\n        if name is not None:",
        ),
        Edit(
            "rsmq/producer/producer.py",
            "            await self._bodies.keep(folder.bodies)\n        if name is not None:",
            "            await self._bodies.put_in_turn(topic, key, folder.bodies)\n        if name is not None:",
        ),
    ),
    encoded(
        "bodies are put without a turn",
        "a message whose body was put sooner overtakes an earlier one of its key",
        "stored",
        Edit(
            "rsmq/producer/producer.py",
            "            await self._bodies.put_in_turn(topic, key, folder.bodies)\n        if name is not None:",
            "            await self._bodies.put(folder.bodies)\n        if name is not None:",
        ),
    ),
    encoded(
        "bodies of a batch are put without a turn",
        "a member whose body was put sooner overtakes an earlier one of its key",
        "stored",
        Edit(
            "rsmq/producer/producer.py",
            "            await self._bodies.put_in_turn(topic, key, folder.bodies)\n            body = ",
            "            await self._bodies.put(folder.bodies)\n            body = ",
        ),
    ),
    encoded(
        "a message starts that has expired while its body came",
        "its expiry is looked at only before its body is asked for",
        "stored",
        Edit(
            "rsmq/consumer/running/runner.py",
            "if message.expires_ms is not None and await self._expires(message, lane):\n            return False",
            "if False:\n            return False",
        ),
    ),
    encoded(
        "on_dead is called once though its store is away",
        "a message becomes a dead letter without its outputs",
        "stored",
        Edit("rsmq/handler/dead_hook.py", "CancelledError | StoreUnavailable)", "CancelledError)"),
    ),
    bug(
        "a stop during the start",
        "a worker that gets its stop before it has started spins for ever",
        "worker/worker.py",
        "                self._stop_consumers(grace)\n            for member",
        "                self.stop(grace)\n            for member",
    ),
    resized(
        "what is pending before a resize counts as finished",
        "a new partition is read while messages of the one before it run",
        "redis/lua/consumer/are_finished.lua",
        "(group.pending == 0 or ARGV[3] == 'read') and not (",
        "not (",
        lambda plan: plan.ordering != "none",
    ),
    resized(
        "what is unread before a resize counts as finished",
        "a new partition is read before messages of the one before it",
        "redis/lua/consumer/are_finished.lua",
        " and not (last and order(last) > order(group['last-delivered-id']))",
        "",
        lambda plan: plan.ordering != "none",
    ),
    resized(
        "only the partition before is asked",
        "after two resizes the first one counts as finished",
        "model/layout.py",
        "            found.append(number)\n            block = parent\n",
        "            found.append(number)\n            block = None\n",
        lambda plan: plan.ordering != "none" and len(plan.growth) > 1,
    ),
    resized(
        "a layout that the server has lost is not written again",
        "members and publishers know other partitions",
        "model/layout.py",
        "return known if known.version > self.version else self",
        "return self",
    ),
    resized(
        "a worker does not make the topics of its outputs again",
        "after FLUSHALL outputs are stored in partitions that their topic does not have any more",
        "consumer/reading/fetcher.py",
        "                await context.producer.make_topics_again()\n",
        "                pass\n",
        needs=lambda plan: plan.has_outputs and "wipe" in plan.faults,
    ),
    resized(
        "keys are looked for before a partition is sealed",
        "a message that comes to it after the search is overtaken by a later one of its key",
        "consumer/owning/key_search.py",
        "if not given or not await self._is_sealed(lane):",
        "if not given:",
    ),
    resized(
        "a worker takes the topic as another process has made it again",
        "after FLUSHALL a worker ends: its topic has fewer partitions until another member has written its layout",
        "redis/topics.py",
        "        await topics._restore(known)\n    await",
        "        pass\n    await",
        needs=lambda plan: "wipe" in plan.faults,
    ),
    Exhibit(
        "the window of a key waits for the clock",
        "a message whose window was noted before the server's clock was set back waits for the time that it showed",
        [
            Edit(
                "rsmq/redis/lua/shared/follow_clock.lua",
                "if now < seen - 1000 then",
                "if not field and now < seen - 1000 then",
            ),
            Edit(
                "rsmq/redis/lua/consumer/keep_waits.lua",
                "    if known and known % 1 == 0 and tonumber(known) > tonumber(due) then known = nil end\n",
                "",
            ),
        ],
        lambda plan: bool(plan.linger),
        "--resized",
    ),
    resized(
        "a seal that the server has lost is not set again",
        "a publisher stores behind what was published to the partitions that follow",
        "redis/lua/consumer/are_finished.lua",
        "for _, key in ipairs(unsealed) do redis.call('XSETID', key, largest) end\n",
        "",
    ),
    resized(
        "a publisher that is refused moves only what was refused",
        "what waits behind it is lost",
        "producer/send_queue.py",
        "for each in (batch, *self._queues.pop(batch.stream, ())):",
        "for each in (batch,):",
    ),
    resized(
        "what is moved is put behind later messages",
        "messages of a key change their order",
        "producer/send_queue.py",
        "queue.insert(sum(1 for _ in takewhile(lambda other: other.is_moved, queue)), moved)",
        "queue.append(moved)",
        lambda plan: plan.ordering != "none",
    ),
    resized(
        "the partitions before are not asked for a unique name",
        "two messages of a name are alive",
        "producer/batch.py",
        "self.ancestry = (*reversed(topic.layout.ancestors_of(partition)), partition)",
        "self.ancestry = (partition,)",
        lambda plan: plan.uniques > 0,
    ),
    resized(
        "outputs do not follow a resize of their topic",
        "a message with an output is never settled",
        "producer/output.py",
        "if self.own is not None or not target.layout.is_sealed(self.partition):",
        "if True:",
        lambda plan: plan.has_outputs,
    ),
    resized(
        "delayed messages do not follow a resize",
        "they are never due",
        "worker/delayed_poller.py",
        "if isinstance(reply, PartitionSealed) and await self._follow(*partition):",
        "if False:",
        lambda plan: plan.delayed > 0,
    ),
    resized(
        "a member does not say again what a failover has lost",
        "a resize waits for it for ever",
        "heartbeat/registration.py",
        "is_there[2:] not in ([], [each.written.encode()])",
        "False",
    ),
    resized(
        "a member that joins while its topic changes says what it knew before",
        "a resize waits for it for ever",
        "consumer/owning/participation.py",
        "if any(info.get(name) != value for name, value in known.items()):",
        "if False:",
    ),
    Exhibit(
        "a rate by key begins anew after a resize",
        "a key starts more messages than its rate allows",
        [
            Edit(
                "rsmq/consumer/owning/lane_lifecycle.py",
                "        for number in reversed(lane.parents):\n",
                "        for number in ():\n",
            ),
        ],
        lambda plan: plan.rate[0] > 0,
        "--resized",
    ),
    unwatched(
        "no member stands in for the watchers",
        "when all watchers have died, their partitions wait for the ends of their leases",
        "group_watch.py",
        "if self._unwatched >= 2:",
        "if False:",
        "die",
    ),
    unwatched(
        "dead watchers count as looking",
        "the proof of a look outlives the one that has looked",
        "membership.py",
        "round(interval * LOOKS_PROVED * 1000)",
        "round(interval * LOOKS_PROVED * 20_000)",
        "die",
        "sleep",
    ),
    unwatched(
        "a member that stands in tells nothing",
        "the others go on counting on the watchers that have died",
        "membership.py",
        "if unheard := silent - self._announced:",
        "if unheard := frozenset[str]():",
        "die",
        "sleep",
    ),
    unwatched(
        "a member that stands in looks at no presence",
        "it reads the heartbeat keys, which outlive the watchers that have died",
        "membership.py",
        "if self._watch.is_large and not self._is_presence_due and not self._watch.watches(monotonic()):",
        "if self._watch.is_large:",
        "die",
        "sleep",
    ),
    unwatched(
        "a member that was said to be silent has no grace",
        "members whose presence was away for a moment lose their leases: two watchers have told of half of them each",
        "membership.py",
        "            self._hinted.update(members)\n",
        "            self._hinted.update(members)\n"
        "            for each in members:\n                self._liveness.ended(each)\n",
        "split",
    ),
    mqtt(
        "ack_clients without its fence",
        "a gateway whose clients were taken over removes their letters",
        "redis/lua/shared/remove_acked.lua",
        "if state[1] ~= epoch then return { state[1] and 'STALE_EPOCH' or 'NO_SESSION' } end",
    ),
    mqtt(
        "a letter that went along with its ring counts as sent",
        "after a lost master the acknowledgement of a lost letter removes another one, which its client has never got",
        "redis/lua/shared/note_letters.lua",
        "'until_ms', till, 'pushed', pushed)",
        "'until_ms', till, 'pushed', pushed, 'sent', last)",
    ),
    mqtt(
        "a doorbell that connects again does not ring",
        "letters wait until the next one comes: their rings were lost with the connection",
        "persistence/doorbell.py",
        'self._rung(reply[1], b"")\n                elif reply[0] == b"sunsubscribe"',
        'pass\n                elif reply[0] == b"sunsubscribe"',
    ),
)


@contextmanager
def put_back(exhibit: Exhibit) -> Iterator[Path]:
    """A scratch copy of the package with the bug."""
    with tempfile.TemporaryDirectory(prefix="rsmq-museum-") as name:
        scratch = Path(name)
        for folder in ("rsmq", "tests"):
            shutil.copytree(ROOT / folder, scratch / folder, ignore=shutil.ignore_patterns("__pycache__"))
        for edit in exhibit.edits:
            path = scratch / edit.path
            text = path.read_text()
            if text.count(edit.old) != 1:
                raise ValueError(f"{exhibit.name}: {edit.path} has the lines {text.count(edit.old)} times:\n{edit.old}")
            path.write_text(text.replace(edit.old, edit.new))
        yield scratch


@dataclass(frozen=True)
class Found:
    """A seed that finds a bug and the first promise that broke; without a seed it was not found."""

    exhibit: Exhibit
    cpu: float
    seeds: int
    seed: int | None = None
    promise: str = ""

    def __str__(self) -> str:
        result = "not found" if self.seed is None else f"seed {self.seed}: {self.promise}"
        return f"{self.exhibit.name}: {result} ({self.seeds} seeds, {self.cpu:.0f} s of CPU)"

    @property
    def shown_seed(self) -> str:
        """With the option that its plan needs."""
        return f"{self.seed} `{self.exhibit.option}`" if self.exhibit.option else str(self.seed)

    @property
    def row(self) -> str:
        """Its row in the table of the page."""
        seed, promise = ("", "not found") if self.seed is None else (self.shown_seed, self.promise)
        return f"| {self.exhibit.name} | {self.exhibit.what} | {seed} | {promise} | {self.seeds} | {self.cpu:.0f} |"


def find(exhibit: Exhibit, seconds: float) -> Found:
    """Play seeds from 1 on, for so many seconds of CPU. The seed that fails must be clean without the bug."""
    cpu, played = 0.0, 0
    seeds = (seed for seed in count(1) if exhibit.needs(exhibit.plan.varied(Choices(seed))))
    with put_back(exhibit) as scratch:
        while cpu < seconds:
            batch = list(islice(seeds, BATCH))
            while batch:
                printed = play(scratch, batch, exhibit)
                total = re.search(r"of (\d+) seeds are clean, .* in ([\d.]+) seconds of CPU", printed)
                if not total:
                    raise RuntimeError(f"{exhibit.name}: the simulation ended with an error\n{printed}")
                played, cpu = played + int(total[1]), cpu + float(total[2])
                failed = re.search(r"^seed (\d+): .*\n  (.*)", printed, re.MULTILINE)
                if failed and "1 of 1 seeds are clean" in play(ROOT, [int(failed[1])], exhibit):
                    return Found(exhibit, cpu, played, int(failed[1]), failed[2])
                batch = batch[batch.index(int(failed[1])) + 1 :] if failed else []
    return Found(exhibit, cpu, played)


def play(folder: Path, seeds: Sequence[int], exhibit: Exhibit) -> str:
    """What the command prints about some seeds, up to the first that fails."""
    command = [sys.executable, "-m", "tests.simulation", "--until-failure", "--seed", *map(str, seeds)]
    command += [exhibit.option] if exhibit.option else []
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def kept_seeds() -> dict[str, str]:
    """The seeds that the tests play, by the name of what each has found."""
    return dict(line.split(" ", 1)[::-1] for line in SEEDS.read_text().splitlines())


def keep(seeds: Mapping[str, str]) -> None:
    """Write the list of the seeds that the tests play."""
    SEEDS.write_text("".join(f"{seeds[each.name]} {each.name}\n" for each in EXHIBITS if each.name in seeds))


def is_stale(exhibit: Exhibit, seeds: Mapping[str, str]) -> bool:
    """Whether its seed does not find it any more: what a worker sends has changed since."""
    with put_back(exhibit) as scratch:
        return "1 of 1 seeds are clean" in play(scratch, [int(seeds[exhibit.name])], exhibit)


def stale(exhibits: Sequence[Exhibit], jobs: int) -> list[Exhibit]:
    """Those whose seeds do not find them any more."""
    seeds = kept_seeds()
    with ThreadPoolExecutor(jobs) as pool:
        answers = list(pool.map(lambda each: is_stale(each, seeds), exhibits))
    return [each for each, answer in zip(exhibits, answers, strict=True) if answer]


def write(found: Found) -> None:
    """Put it into the table of README.md, and its seed into the list that the tests play; the rest stays."""
    if found.seed is not None and not found.exhibit.option:
        keep(kept_seeds() | {found.exhibit.name: str(found.seed)})
    before, _, rest = PAGE.read_text().partition(HEADER)
    table, _, after = rest.partition("\n\n")
    rows = {row.split(" | ")[0].removeprefix("| "): row for row in table.splitlines()}
    rows[found.exhibit.name] = found.row
    shown = [rows[each.name] for each in EXHIBITS if each.name in rows]
    PAGE.write_text(before + HEADER + "\n".join(shown) + "\n\n" + after)


def main() -> int:
    """Look for each bug; the exit code is 1 if one was not found."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.museum", description=__doc__)
    parser.add_argument("only", nargs="*", help="parts of names; default: all")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="of CPU: the longest search for one of them")
    parser.add_argument("--jobs", type=int, default=1, help="how many at the same time")
    parser.add_argument(
        "--write", action="store_true", help="put what is found into the table of tests/simulation/README.md"
    )
    parser.add_argument(
        "--stale", action="store_true",
        help="only those whose kept seed does not find them any more; with --write the list keeps no stale seed",
    )  # fmt: skip
    chosen, missed = parser.parse_args(), 0
    exhibits = [each for each in EXHIBITS if not chosen.only or any(part in each.name for part in chosen.only)]
    if chosen.stale:
        kept = [each for each in exhibits if each.name in kept_seeds()]
        exhibits = stale(kept, chosen.jobs)
        print(f"{len(exhibits)} of {len(kept)} kept seeds are stale", flush=True)
        if chosen.write:
            gone = {each.name for each in exhibits}
            keep({name: seed for name, seed in kept_seeds().items() if name not in gone})
    with ThreadPoolExecutor(chosen.jobs) as pool:
        searches = [pool.submit(find, exhibit, chosen.minutes * 60) for exhibit in exhibits]
        for search in as_completed(searches):
            found = search.result()
            missed += found.seed is None
            print(found, flush=True)
            if chosen.write and not (chosen.stale and found.seed is None):
                write(found)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
