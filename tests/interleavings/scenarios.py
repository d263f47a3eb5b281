"""What is searched: scenarios for the scripts as they are, and edits that weaken them, each of which must be found."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from rsmq.redis.scripts import SCRIPTS
from tests.interleavings.commands import wire
from tests.interleavings.flow_moves import FlowMoves
from tests.interleavings.moves import Moves
from tests.interleavings.rules import Rules
from tests.interleavings.shared import SharedMoves
from tests.interleavings.store import Store
from tests.interleavings.world import Left

KEYS: Final = Rules(("a", "a", "b"))
BATCH: Final = KEYS._replace(batch=3)
SHARED: Final = Rules(("", "", ""), is_shared=True)
SHARED_TWO: Final = Rules(("", ""), is_shared=True)
SHARED_BATCH: Final = SHARED._replace(batch=3)
ONE_KEY: Final = Rules(("a", "a"))
NO_KEYS: Final = Rules(("", ""))
CHARGES: Final = Rules(("a",), attempts=3)
THREE_ATTEMPTS: Final = Rules(("a", "a"), attempts=3)
OUTPUTS: Final = ONE_KEY._replace(has_outputs=True)
IDS: Final = Rules(("a", "a", "a"), room=0)
TWO_IDS: Final = ONE_KEY._replace(room=0)
SOME_IDS: Final = IDS._replace(room=1)
NAMES: Final = Rules(("a", "b", "a", "a"), room=1, names=("x", "x", "x", "y"))
TWO_NAMES: Final = Rules(("b", "a", "a"), room=1, concurrency=2, names=("x", "x", "y"))
ONE_NAME: Final = Rules(("a", "b"), room=0, concurrency=2, names=("x", "x"), attempts=4)
TWO_AT_A_TIME: Final = NO_KEYS._replace(concurrency=2)


@dataclass(frozen=True)
class Scenario:
    """Messages by their keys, and the faults that may happen. `is_short`: searched in `make test`, too."""

    name: str
    rules: Rules
    left: Left
    is_short: bool = False

    def moves(self, store: Store) -> Moves:
        """What can happen in it."""
        kind = SharedMoves if self.rules.is_shared else Moves if self.rules.room is None else FlowMoves
        return kind(store, self.rules, self.left)


SCENARIOS: Final = (
    Scenario("3 messages, 1 crash, 1 lost reply", KEYS, Left(crashes=1, lost=1), is_short=True),
    Scenario("3 messages, 1 crash, 1 pause", KEYS, Left(crashes=1, pauses=1)),
    Scenario("3 messages, 1 crash, 2 failures", KEYS, Left(crashes=1, failures=2)),
    Scenario("3 messages, 1 handover, 1 lost reply", KEYS, Left(handovers=1, lost=1)),
    Scenario("3 messages, 1 stop, 1 lost reply", KEYS, Left(stops=1, lost=1)),
    Scenario("2 of one key, 1 crash, 1 lost reply, 1 failure", ONE_KEY, Left(crashes=1, lost=1, failures=1)),
    Scenario("2 of one key, 1 pause, 1 renewal", ONE_KEY, Left(pauses=1, renewals=1), is_short=True),
    Scenario("2 of one key, 1 pause, 2 failures", ONE_KEY, Left(pauses=1, failures=2)),
    Scenario("2 of one key, 1 stop, 1 pause", ONE_KEY, Left(stops=1, pauses=1), is_short=True),
    Scenario("2 of one key, 1 handover, 1 crash", ONE_KEY, Left(handovers=1, crashes=1), is_short=True),
    Scenario("1 of a key, 2 pauses, 1 failure, 1 lost start", CHARGES, Left(pauses=2, failures=1, losses=1)),
    Scenario("1 of a key, 1 pause, 1 failure, 1 lost start", CHARGES, Left(pauses=1, failures=1, losses=1), True),
    Scenario("2 of one key, 1 failure, 1 lost start", ONE_KEY, Left(failures=1, losses=1)),
    Scenario("2 without keys, 1 failure, 1 lost start", NO_KEYS, Left(failures=1, losses=1)),
    Scenario("2 with outputs, 1 failure, 1 lost start", OUTPUTS, Left(failures=1, losses=1)),
    Scenario("2 in batches, 1 failure, 1 lost start", ONE_KEY._replace(batch=2), Left(failures=1, losses=1)),
    Scenario("2 of one key, 2 failures, 1 pause, 1 lost start", THREE_ATTEMPTS, Left(pauses=1, failures=2, losses=1)),
    Scenario("2 without keys, 2 at a time, 2 failures", TWO_AT_A_TIME, Left(failures=2), is_short=True),
    Scenario("2 without keys, 1 failure, 1 lost reply", NO_KEYS, Left(failures=1, lost=1), is_short=True),
    Scenario("2 without keys, 1 failure, 2 lost replies", NO_KEYS, Left(failures=1, lost=2)),
    Scenario("2 without keys, 1 failure, 1 crash, 1 lost reply", NO_KEYS, Left(failures=1, crashes=1, lost=1)),
    Scenario("2 with outputs, 1 crash, 1 lost reply", OUTPUTS, Left(crashes=1, lost=1), is_short=True),
    Scenario("2 with outputs, 2 lost replies", OUTPUTS, Left(lost=2), is_short=True),
    Scenario("2 with outputs, 1 pause, 1 failure", OUTPUTS, Left(pauses=1, failures=1)),
    Scenario("2 with outputs, 1 handover, 1 lost reply", OUTPUTS, Left(handovers=1, lost=1)),
    Scenario("2 with outputs, 1 stop, 1 pause, 1 lost reply", OUTPUTS, Left(stops=1, pauses=1, lost=1)),
    Scenario("3 in batches, 1 crash, 1 lost reply", BATCH, Left(crashes=1, lost=1)),
    Scenario("3 in batches, 1 failure, 1 pause", BATCH, Left(failures=1, pauses=1)),
    Scenario("2 in batches, 1 crash, 1 lost reply", ONE_KEY._replace(batch=2), Left(crashes=1, lost=1), is_short=True),
    Scenario("2 in batches, 1 failure, 1 lost reply", ONE_KEY._replace(batch=2), Left(failures=1, lost=1)),
    Scenario("2 of one key, 1 refusal, 2 failures", ONE_KEY, Left(refusals=1, failures=2), is_short=True),
    Scenario("2 without keys, 1 refusal, 2 failures", NO_KEYS, Left(refusals=1, failures=2)),
    Scenario("2 with outputs, 1 refusal, 1 failure", OUTPUTS, Left(refusals=1, failures=1), is_short=True),
    Scenario("2 with outputs, 2 refusals, 1 pause", OUTPUTS, Left(refusals=2, pauses=1)),
    Scenario("2 with outputs, 1 refusal, 1 crash, 1 lost reply", OUTPUTS, Left(refusals=1, crashes=1, lost=1)),
    Scenario("2 of one key, 1 refusal, 1 handover, 1 failure", ONE_KEY, Left(refusals=1, handovers=1, failures=1)),
    Scenario("2 in batches, 1 refusal, 1 failure, 1 pause", ONE_KEY._replace(batch=2), Left(0, 0, 1, 1, refusals=1)),
    Scenario("2 shared, 1 refusal, 1 failure", SHARED_TWO, Left(refusals=1, failures=1)),
    Scenario("3 shared, 1 crash, 1 lost reply", SHARED, Left(crashes=1, lost=1)),
    Scenario("3 shared in batches, 1 crash, 1 lost reply", SHARED_BATCH, Left(crashes=1, lost=1)),
    Scenario("2 shared, 1 crash, 1 lost reply", SHARED_TWO, Left(crashes=1, lost=1)),
    Scenario("2 shared, 1 pause", SHARED_TWO, Left(pauses=1)),
    Scenario("2 shared, 1 failure, 1 lost reply", SHARED_TWO, Left(failures=1, lost=1)),
    Scenario("2 shared, 1 stop, 1 lost reply", SHARED_TWO, Left(stops=1, lost=1), is_short=True),
    Scenario("3 as ids, 1 lost reply", IDS, Left(lost=1)),
    Scenario("3 as ids, 1 crash", IDS, Left(crashes=1)),
    Scenario("3 as ids, 1 handover", IDS, Left(handovers=1)),
    Scenario("3 as ids, 2 failures", IDS, Left(failures=2)),
    Scenario("3 as ids, 1 deletion, 1 failure", IDS, Left(deletions=1, failures=1)),
    Scenario("3 as ids, 1 deletion, 1 lost reply", IDS, Left(deletions=1, lost=1)),
    Scenario("3 as ids, 1 deleted consumer, 1 failure", IDS, Left(unconsumed=1, failures=1)),
    Scenario("3, 1 of them in memory, 1 handover", SOME_IDS, Left(handovers=1)),
    Scenario("2 as ids, 1 crash, 1 lost reply", TWO_IDS, Left(crashes=1, lost=1)),
    Scenario("2 as ids, 1 crash, 1 deletion, 1 lost reply", TWO_IDS, Left(crashes=1, deletions=1, lost=1)),
    Scenario("2 as ids, 1 handover, 1 lost reply", TWO_IDS, Left(handovers=1, lost=1)),
    Scenario("2 as ids, 1 handover", TWO_IDS, Left(handovers=1), is_short=True),
    Scenario("2 as ids, 1 deletion, 1 lost reply", TWO_IDS, Left(deletions=1, lost=1)),
    Scenario("2 as ids, 1 deletion, 1 handover", TWO_IDS, Left(deletions=1, handovers=1), is_short=True),
    Scenario("2 as ids, 1 pause, 1 failure", TWO_IDS, Left(pauses=1, failures=1)),
    Scenario("2 as ids, 1 stop, 1 pause", TWO_IDS, Left(stops=1, pauses=1)),
    Scenario("2 as ids, 1 refusal, 1 failure", TWO_IDS, Left(refusals=1, failures=1)),
    Scenario("2 as ids, 1 failover", TWO_IDS, Left(failovers=1)),
    Scenario("3 as ids, 1 failover", IDS, Left(failovers=1)),
    Scenario("4 of two names", NAMES, Left(), is_short=True),
    Scenario("4 of two names, 1 failure", NAMES, Left(failures=1)),
    Scenario("4 of two names, 1 lost reply", NAMES, Left(lost=1)),
    Scenario("3 of two names, 2 at a time, 1 crash", TWO_NAMES, Left(crashes=1)),
    Scenario("3 of two names, 2 at a time, 1 handover", TWO_NAMES, Left(handovers=1)),
    Scenario("2 of one name, 2 pauses", ONE_NAME, Left(pauses=2)),
    Scenario("3 with outputs, 1 crash, 1 lost reply", KEYS._replace(has_outputs=True), Left(crashes=1, lost=1)),
)

PAUSE: Final = Scenario("1 pause, 1 failure", ONE_KEY, Left(pauses=1, failures=1))
BURIAL: Final = Scenario("1 pause, 2 failures", ONE_KEY, Left(pauses=1, failures=2))
RENEWAL: Final = Scenario("1 pause, 1 renewal", ONE_KEY, Left(pauses=1, renewals=1))
LOST: Final = Scenario("1 failure, 1 lost reply", ONE_KEY, Left(failures=1, lost=1))
CHARGE: Final = Scenario("2 pauses, 1 failure, 1 lost charge", CHARGES, Left(pauses=2, failures=1, losses=1))
LOST_START: Final = Scenario("1 failure, 1 lost start", ONE_KEY, Left(failures=1, losses=1))
LOST_START_OUTPUTS: Final = Scenario("outputs, 1 failure, 1 lost start", OUTPUTS, Left(failures=1, losses=1))
LOST_STARTS: Final = Scenario("2 failures, 1 lost start", CHARGES, Left(failures=2, losses=1))
OUTPUTS_REFUSED: Final = Scenario("outputs, 1 refusal", OUTPUTS, Left(refusals=1))
BURY_REFUSED: Final = Scenario("2 failures, 1 refusal", NO_KEYS, Left(failures=2, refusals=1))
CRASH: Final = Scenario("1 crash, 1 lost reply", ONE_KEY, Left(crashes=1, lost=1))
TWO_LEASES: Final = Scenario("1 crash, 2 pauses", ONE_KEY, Left(crashes=1, pauses=2))
STOP: Final = Scenario("1 stop, 1 pause", ONE_KEY, Left(stops=1, pauses=1))
HANDOVER: Final = Scenario("1 handover, 1 pause", ONE_KEY, Left(handovers=1, pauses=1))
RETRY: Final = Scenario("no keys, 1 failure, 1 pause", NO_KEYS, Left(failures=1, pauses=1))
TWICE: Final = Scenario("no keys, 2 failures, 1 lost reply", NO_KEYS, Left(failures=2, lost=1))
OUTPUTS_PAUSE: Final = Scenario("outputs, 1 pause", OUTPUTS, Left(pauses=1))
OUTPUTS_LOST: Final = Scenario("outputs, 1 lost reply", OUTPUTS, Left(lost=1))
LATE: Final = Scenario("no keys, 1 failure, 1 lost reply", NO_KEYS._replace(ends_late=False), Left(failures=1, lost=1))
LATE_KEY: Final = Scenario(
    "late commands, 1 failure, 1 lost reply", ONE_KEY._replace(ends_late=False), Left(failures=1, lost=1)
)
SHARED_PAUSE: Final = Scenario("shared, 1 pause", SHARED_TWO, Left(pauses=1))
SHARED_PAUSES: Final = Scenario("shared, 2 pauses", SHARED_TWO, Left(pauses=2))
SHARED_RETRY: Final = Scenario("shared, 1 failure, 1 pause", SHARED_TWO, Left(failures=1, pauses=1))
SHARED_CRASH: Final = Scenario("shared, 1 crash, 1 lost reply", SHARED_TWO, Left(crashes=1, lost=1))
SHARED_BURIAL: Final = Scenario("shared, 2 failures, 1 pause", SHARED_TWO, Left(failures=2, pauses=1))
SHARED_OUTPUTS: Final = Scenario("shared with outputs, 1 pause", SHARED_TWO._replace(has_outputs=True), Left(pauses=1))
SHARED_STOP: Final = Scenario("shared, 1 stop, 1 lost reply", SHARED_TWO, Left(stops=1, lost=1))
BATCH_CRASH: Final = Scenario("batches, 1 crash, 1 lost reply", ONE_KEY._replace(batch=2), Left(crashes=1, lost=1))
BATCH_LOST: Final = Scenario("batches, 1 failure, 1 lost reply", ONE_KEY._replace(batch=2), Left(failures=1, lost=1))
BATCH_PAUSE: Final = Scenario("batches, 1 pause, 1 failure", ONE_KEY._replace(batch=2), Left(pauses=1, failures=1))
IDS_ONLY: Final = Scenario("ids", IDS, Left())
IDS_CRASH: Final = Scenario("ids, 1 crash", TWO_IDS, Left(crashes=1))
IDS_PAUSE: Final = Scenario("ids, 1 pause", TWO_IDS, Left(pauses=1))
IDS_LATE: Final = Scenario(
    "ids, late calls, 1 crash, 1 lost reply", TWO_IDS._replace(without=frozenset({"the end of late calls"})),
    Left(crashes=1, lost=1),
)  # fmt: skip
IDS_DELETION: Final = Scenario("ids, 1 deletion", TWO_IDS, Left(deletions=1))
IDS_DELETION_LOST: Final = Scenario("ids, 1 deletion, 1 lost reply", TWO_IDS, Left(deletions=1, lost=1))
IDS_UNCONSUMED: Final = Scenario("ids, 1 deleted consumer", IDS, Left(unconsumed=1))
IDS_FAILOVER: Final = Scenario("ids, 1 failover", TWO_IDS, Left(failovers=1))
ONE_NAME_PAUSES: Final = Scenario("ids of one name, 2 pauses", ONE_NAME, Left(pauses=2))


def left_out(rule: str, rules: Rules, left: Left) -> Weakening:
    """Members that leave a rule out."""
    return Weakening(
        "", f"members leave out {rule}", Scenario(rule, rules._replace(without=frozenset({rule})), left), "", ""
    )


@dataclass(frozen=True)
class Weakening:
    """A script with some of its text replaced, and a scenario that shows what the text was good for.

    Without a script, the scenario itself leaves something out.
    """

    script: str
    what: str
    scenario: Scenario
    old: str = "if lease[1] ~= ARGV[1] or lease[2] ~= ARGV[2] then"
    new: str = "if false then"

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.script} {self.what}".strip()

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The script is weakened as long as the block lasts."""
        script = next((each for each in SCRIPTS.values() if each.name == self.script), None)
        if script is None:
            yield
            return
        source, sha = script.source, script.sha
        if source.count(self.old) != 1:
            raise ValueError(f"{self.script} has this text {source.count(self.old)} times: {self.old}")
        script.source = source.replace(self.old, self.new)
        script.sha = hashlib.sha1(script.source.encode(), usedforsecurity=False).hexdigest()
        wire.cache_clear()
        try:
            yield
        finally:
            script.source, script.sha = source, sha
            wire.cache_clear()


OTHERS_OR_NONE: Final = "if row and row[2] ~= ARGV[1] or not row and ARGV[2] == '' then"
NONE: Final = "if not row and ARGV[2] == '' then"
OTHERS: Final = "if row and row[2] ~= ARGV[1] then"
REMOVES: Final = "if #redis.call('XPENDING', KEYS[1], ARGV[1], '-', '+', 1, ARGV[2]) > 0 then"
IN_ORDER: Final = "if not count_call(KEYS[2], ARGV[2], ARGV[4]) then return { 'LATE' } end"
CALLED: Final = "count_call(KEYS[2], ARGV[2], ARGV[4])"
UNFENCED: Final = "checks neither owner nor epoch"
WEAKENINGS: Final = (
    Weakening("start_message", UNFENCED, CRASH),
    Weakening("start_message", "does not check the epoch", TWO_LEASES, new="if lease[1] ~= ARGV[1] then"),
    Weakening("park_message", UNFENCED, PAUSE),
    Weakening("bury_message", UNFENCED, BURIAL),
    Weakening("claim_pending", UNFENCED, PAUSE),
    Weakening("renew_lease", UNFENCED, RENEWAL),
    Weakening("release_lease", UNFENCED, HANDOVER),
    Weakening("hand_back", UNFENCED, HANDOVER),
    Weakening("unpark_messages", UNFENCED, RETRY),
    Weakening("settle_messages", UNFENCED, PAUSE, "if holder[1] ~= ARGV[1] or holder[2] ~= epoch then"),
    Weakening(
        "take_lease", "grants a lease that another member has", PAUSE, "if owner == '' or owner ~= ARGV[4] then",
    ),
    Weakening(
        "take_lease", "does not ask whether an absent owner has come back", PAUSE,
        "if ARGV[5] ~= '' and redis.call('PUBSUB', 'NUMSUB', ARGV[5])[2] > 0 then",
    ),
    Weakening(
        "take_lease", "keeps the epoch", PAUSE, "(whole(lease[5]) or 0) + 1, now, (ARGV[8] or 0) + 1)",
        "(whole(lease[5]) or 0) + (owner == '' and 1 or 0))",
    ),
    Weakening("take_lease", "forgets the last reader", PAUSE, "(lease[3] or '')", "''"),
    Weakening("take_lease", "forgets readers that were not cut off", CRASH, "(lease[4] or '')", "''"),
    Weakening("claim_pending", "does not say who reads", CRASH, "'reader', ARGV[7], 'before'", "'before'"),
    Weakening("claim_pending", "does not take the messages over", CRASH, "if at > 0 then"),
    Weakening("release_lease", "forgets a read that is late", STOP, "'reader', ARGV[4]", "'reader', ''"),
    Weakening("release_lease", "deletes a consumer with pending messages", HANDOVER, "and #pending == 0", ""),
    Weakening("start_message", "does not charge the attempt", CRASH, "ARGV[5] + 1, 'FORCE'", "ARGV[5], 'FORCE'"),
    Weakening("start_message", "leaves the message parked", LOST, "redis.call('ZREM', ", "local _ = tostring("),
    Weakening("park_message", "stores no due time", RETRY, "redis.call('ZADD', KEYS[3], due,", "local _ = tostring("),
    Weakening("park_message", "gives up the place of a key", LOST, "if ARGV[7] == '0' then", "if true then"),
    Weakening("park_message", "leaves a count that differs", CHARGE, "if not row or row[4] ~= charged", "if not row"),
    Weakening("park_message", "parks what has started since", LATE_KEY, "if row and row[4] > tonumber(ARGV[5]) then"),
    Weakening("bury_message", "does not acknowledge", TWICE, "redis.call('XACK', ", "local _ = tostring("),
    Weakening("bury_message", "writes a second dead letter", TWICE, "or ARGV[7] == '1'", ""),
    Weakening(
        "settle_messages", "leaves parked what a failover has parked again", LOST_START,
        "for i = last + 1, last + parked do", "for i = 1, 0 do",
    ),
    Weakening(
        "settle_outputs", "leaves parked what a failover has parked again", LOST_START_OUTPUTS,
        "local retry = redis.call('EXISTS', KEYS[3]) == 1 and KEYS[3]", "local retry",
    ),
    Weakening(
        "park_message", "leaves parked what a failover has parked again", LOST_STARTS,
        "if row then redis.call('ZREM', KEYS[3],", "if false then redis.call('ZREM', KEYS[3],",
    ),
    Weakening("settle_messages", "acknowledges nothing", CRASH, "for i = first, last, 1000 do", "for i = 1, 0 do"),
    Weakening("settle_outputs", UNFENCED, OUTPUTS_PAUSE),
    Weakening("start_message", "of a batch checks neither owner nor epoch", BATCH_PAUSE),
    Weakening(
        "start_message", "of a batch does not charge the attempt", BATCH_CRASH, "ARGV[5] + 1, 'FORCE'",
        "ARGV[5], 'FORCE'",
    ),
    Weakening(
        "park_message", "of a batch gives up the place of a key", BATCH_LOST, "if ARGV[7] == '0' then", "if true then",
    ),
    Weakening(
        "settle_messages", "of a batch checks neither owner nor epoch", BATCH_PAUSE,
        "if holder[1] ~= ARGV[1] or holder[2] ~= epoch then",
    ),
    Weakening("start_message", "starts what another member has", SHARED_PAUSES, OTHERS_OR_NONE, NONE),
    Weakening("start_message", "starts what is settled", SHARED_PAUSE, OTHERS_OR_NONE, OTHERS),
    Weakening("park_message", "parks what another member has", SHARED_RETRY, OTHERS_OR_NONE, NONE),
    Weakening(
        "bury_message", "buries what another member has", SHARED_BURIAL,
        "if row and row[2] ~= ARGV[1] or not row and", "if not row and",
    ),
    Weakening(
        "settle_messages", "acknowledges what another member has", SHARED_PAUSE, "if row and row[2] == ARGV[1] then",
        "if row then",
    ),
    Weakening(
        "settle_outputs", "acknowledges what another member has", SHARED_OUTPUTS,
        "return row and row[2] == consumer and", "return row and",
    ),
    Weakening(
        "touch_messages", "takes back what another member has", SHARED_PAUSE, "if row and row[2] ~= ARGV[1] then",
        "if false then",
    ),
    Weakening(
        "adopt_pending", "adopts what is touched", SHARED_PAUSE, "row[3] >= (patience[row[2]] or min_idle)", "true",
    ),
    Weakening(
        "adopt_pending", "takes over what is not its own", SHARED_CRASH, "if ARGV[6] ~= '' then range[4]",
        "if false then range[4]",
    ),
    Weakening("remove_consumer", "deletes a consumer with pending messages", SHARED_STOP, REMOVES, "if false then"),
    Weakening(
        "settle_outputs", "stores outputs whatever was acknowledged", OUTPUTS_LOST, "is_first and ", "",
    ),
    Weakening(
        "settle_outputs", "acknowledges nothing", OUTPUTS_LOST,
        "if redis.call('XACK', stream, group, id) == 1 then return true end", "if true then return true end",
    ),
    Weakening(
        "settle_outputs", "acknowledges before a sealed stream refuses", OUTPUTS_REFUSED,
        "if write ~= 'SET' then can_append((KEYS[index]:gsub(':delayed$', ''))) end", "",
    ),
    Weakening(
        "settle_outputs", "acknowledges before a right is refused", OUTPUTS_REFUSED,
        "may_write(write, KEYS[index])", "",
    ),
    Weakening(
        "bury_message", "acknowledges before a right is refused", BURY_REFUSED,
        "can_write('XADD', KEYS[4], 'ZREM', KEYS[3])", "redis.call('XACK', KEYS[1], ARGV[3], ARGV[4])",
    ),
    Weakening("", "a member that connects again leaves its last connection open", LATE, "", ""),
    Weakening("put_aside", UNFENCED, IDS_PAUSE),
    Weakening("read_again", UNFENCED, IDS_PAUSE),
    Weakening("claim_ids", UNFENCED, IDS_PAUSE),
    Weakening("put_aside", "is executed after a later call", IDS_LATE, IN_ORDER, CALLED),
    Weakening("read_again", "is executed after a later call", IDS_LATE, IN_ORDER, CALLED),
    Weakening("put_aside", "leaves what has not started counted", IDS_ONLY, "'RETRYCOUNT', 0", "'RETRYCOUNT', 1"),
    Weakening("put_aside", "drops what was deleted", IDS_DELETION, "if pending < before then", "if false then"),
    Weakening("put_aside", "buries what it has buried", IDS_DELETION_LOST, "if pending < before then", "if true then"),
    Weakening(
        "read_again", "buries what it has buried", IDS_DELETION_LOST, "'LOST' and row then", "'LOST' then"
    ),
    Weakening(
        "read_again", "drops what is not pending", IDS_UNCONSUMED, "if not row and order(id) > newest then",
        "if not row then",
    ),
    Weakening(
        "read_again", "makes pending what was not delivered", IDS_FAILOVER,
        "if not row and order(id) > newest then", "if false then",
    ),
    Weakening("read_again", "does not count the start", IDS_CRASH, "== '1' and 1 or", "== '1' and 0 or"),
    Weakening("read_again", "counts 1 whatever was there", ONE_NAME_PAUSES, "or row and row[4] or 1", "or 1"),
    left_out("keys that only wait", IDS, Left()),
    left_out("the last place of a key", NAMES, Left()),
    left_out("the key of what leaves a name", TWO_NAMES, Left()),
    left_out("counts of what was charged", ONE_NAME, Left(pauses=2)),
    left_out("what a call has asked for", TWO_IDS, Left(handovers=1, lost=1)),
    left_out("the end of calls without an answer", TWO_IDS, Left(handovers=1, lost=1)),
)  # fmt: skip
