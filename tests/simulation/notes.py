"""Steps, progress and kept results: a step that is kept is not done again, and each settled message has its result."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from rsmq import Message, MessageRef
from rsmq.model.kept_result import KeptResult
from tests.chaos.checker import Name
from tests.simulation.plan import GROUP, TOPIC

if TYPE_CHECKING:
    from tests.simulation.run import Member, Run

STEP: Final = "charge"
KEPT_FOR: Final = "300d"


class Notes:
    """Does a step in each attempt, and says how far it has come; asks for a result of each message.

    What the server has lost, a reset has forgotten, or a deleted consumer has settled before its time may come again.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._kept: dict[Name, str] = {}
        """Steps that are kept, as the server has confirmed, and the member that has done each."""
        self._refs: dict[Name, MessageRef] = {}

    @property
    def options(self) -> dict[str, Any]:
        """Of a publish. A batch handler returns outcomes: there is no result to look for."""
        return {"keep_result": KEPT_FOR} if self._run.plan.has_notes and not self._run.plan.batch else {}

    def published(self, name: Name, ref: MessageRef) -> None:
        """A message is stored."""
        if self._run.plan.has_notes:
            self._refs[name] = ref

    @property
    def _is_sure(self) -> bool:
        return not (self._run.was_reset or self._run.has_lost_writes or "unconsume" in self._run.plan.faults)

    async def work(self, member: Member, name: Name, message: Message) -> None:
        """What the handler does, under the lease or not."""
        if not self._run.plan.has_notes:
            return
        await message.progress(0.5, "half")
        async with message.step(STEP) as step:
            before = self._kept.get(name)
            if step.is_done:
                is_sure = self._is_sure and before is not None  # its writer may have died before it had the answer
                if step.result["name"] != list(name) or (is_sure and step.result["by"] != before):
                    self._run.violate(f"the step of {name} by {before} has the result {step.result}")
                return
            if before is not None and self._is_sure and self._owns(member, message):
                self._run.violate(f"m{member.number} does the step of {name} again, which {before} has kept")
            step.result = {"name": name, "by": member.process.name}
        self._kept[name] = member.process.name

    def _owns(self, member: Member, message: Message) -> bool:
        """Whether the message is this member's: one that wakes from a pause does not know yet that it is not."""
        ask, owner = self._run.network.ask, member.process.name.encode()
        if self._run.plan.distribution == "shared":
            stream = member.broker.keys.stream(TOPIC, message.partition)
            rows = ask("XPENDING", stream, GROUP, message.stream_id, message.stream_id, 1)
            return bool(rows) and rows[0][1] == owner
        held = ask("HMGET", self._run.lease_key(message.partition), "owner", "epoch")
        return list(held) == [owner, str(message.fence).encode()]

    def wrong(self, dead: set[Name]) -> list[str]:
        """What is wrong at the end, when all messages are settled. `dead`: those that are dead letters."""
        run, found = self._run, list[str]()
        if not run.plan.has_notes or not self._is_sure:
            return found
        keys, settled = run.members[0].broker.keys, {(each.key, each.n) for each in run.events if each.what == "commit"}
        if not any(member.is_disturbed for member in run.members):
            for partition in run.numbers:
                for key in (keys.steps(TOPIC, partition, GROUP), keys.progress(TOPIC, partition, GROUP)):
                    left = run.network.ask("HKEYS", key)
                    found += [f"{key} keeps {len(left)} notes of settled messages"] if left else []
        ended = run.cancels.open | run.cancels.done.keys() | run.expiries.ended
        for name, ref in sorted(self._refs.items() if self.options else ()):
            home = ref.home.partition  # the publish may have met a seal: then it is in one that follows
            names = [keys.result(TOPIC, each, GROUP, ref) for each in (home, *run.layout.descendants_of(home))]
            raw = next(filter(None, (run.network.ask("GET", each) for each in names)), None)
            kept = KeptResult.read(raw) if raw is not None else None
            if kept is None:
                found.append(f"{name} is settled and has no result")
            elif name in settled - dead - ended and run.encoded.result(kept, str(ref)) != list(name):
                found.append(f"the result of {name} is {raw!r}")
            elif name in dead - ended and not kept.reason:
                found.append(f"the dead letter {name} has the result {raw!r}")
        return found

    def __repr__(self) -> str:
        return f"<Notes of {self._run!r}>"
