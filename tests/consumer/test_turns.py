"""Tenants take turns by weight: checked over random histories, without anything around it."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rsmq.consumer.waiting.named_flows import FlowName, NamedFlows
from rsmq.consumer.waiting.turns import Turns
from rsmq.model.message import Message
from tests.consumer.test_queue import make_lane, make_message

LANE = make_lane()
WEIGHTS = {"gold": 3.0, "silver": 1.5}


class Bench:
    """Turns of messages whose flows the test chooses."""

    def __init__(self) -> None:
        self.flows: dict[Message, FlowName] = {}
        self.turns = Turns(lambda message: self.flows[message], lambda tenant: WEIGHTS.get(tenant or "", 1.0))
        self.number = 0

    def add(self, tenant: str | None, name: str | None = None, count: int = 1) -> list[Message]:
        """Messages of a tenant, under the rate of a name."""
        made = list[Message]()
        for _ in range(count):
            self.number += 1
            made.append(make_message(LANE, self.number, None))
            self.flows[made[-1]] = tenant, name
        self.turns.extend(made)
        return made

    def serve(self, count: int) -> Counter[str | None]:
        """How many of each tenant are among the next ones."""
        return Counter(self.flows[self.turns.popleft()][0] for _ in range(count))


def jain(shares: list[float]) -> float:
    """Jain's index: 1 if all are alike."""
    return sum(shares) ** 2 / (len(shares) * sum(share * share for share in shares))


@pytest.mark.parametrize("quiet", [1, 100])
def test_quiet_tenant_is_served_within_one_turn_of_each(quiet: int) -> None:
    """However much the others have waiting."""
    bench = Bench()
    bench.add("noisy", count=10_000)
    bench.serve(50)
    for n in range(quiet):
        bench.add(f"quiet{n}")
    assert bench.serve(quiet + 1) == Counter({"noisy": 1} | {f"quiet{n}": 1 for n in range(quiet)})


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(["gold", "silver", "a", "b", None]), min_size=2, max_size=5, unique=True))
def test_tenants_with_a_backlog_are_served_by_weight(tenants: list[str | None]) -> None:
    """Jain's index of what each has got for its weight is at least 0.99, and no turn is passed over."""
    bench = Bench()
    for tenant in tenants:
        bench.add(tenant, count=1200)
    served = bench.serve(300 * len(tenants))
    assert jain([served[tenant] / WEIGHTS.get(tenant or "", 1.0) for tenant in tenants]) >= 0.99


STEPS = st.lists(
    st.tuples(st.sampled_from(["add", "add", "pop", "hold", "let_go", "remove", "clear"]), st.integers(0, 5)),
    max_size=150,
)


@settings(max_examples=300, deadline=None)
@given(STEPS)
def test_nothing_is_lost_or_served_twice_and_each_flow_is_in_order(steps: list[tuple[str, int]]) -> None:
    """In any order of events, with rates that are used up; and a closed name opens again."""
    bench, held = Bench(), list[Message]()
    waiting = defaultdict[FlowName, list[Message]](list)
    for step, choice in steps:
        flow = ("gold", "a", None)[choice % 3], ("x", None)[choice % 2]
        ready = [message for each in waiting.values() for message in each]
        if step == "add":
            waiting[flow] += bench.add(*flow)
        elif step in ("pop", "hold") and len(bench.turns):
            message = bench.turns.popleft()
            assert waiting[bench.flows[message]].pop(0) is message
            if step == "hold":
                bench.turns.hold(message)
                held.append(message)
        elif step == "let_go" and held:
            message = held.pop(choice % len(held))
            bench.turns.let_go(message)
            bench.turns.appendleft(message)
            assert bench.turns.popleft() is message, "nothing else may use up the room"
        elif step == "remove" and ready:
            message = ready[choice % len(ready)]
            bench.turns.remove(message)
            waiting[bench.flows[message]].remove(message)
        elif step == "clear":
            kept = list(bench.turns)
            bench.turns.clear()
            bench.turns.extend(kept)
        counts = Counter(bench.flows[message] for message in held)
        closed = {flow for flow, count in counts.items() if count >= WEIGHTS.get(flow[0] or "", 1.0)}
        assert len(bench.turns) == sum(len(each) for flow, each in waiting.items() if flow not in closed)
        assert len(list(bench.turns)) == sum(map(len, waiting.values()))
    for message in held:
        bench.turns.let_go(message)
    assert len(bench.turns) == sum(map(len, waiting.values()))
    bench.serve(len(bench.turns))
    assert [*bench.turns._tenants, *bench.turns._ring, *bench.turns._of] == []


def test_starts_of_a_rate_that_is_used_up_are_shared_by_weight() -> None:
    """Of each tenant so many messages wait for it as its turn is, so its first ones come in turn."""
    bench, held = Bench(), list[Message]()
    bench.add("a", "x", 100)
    bench.add("gold", "x", 100)
    bench.add("a", None, 1)
    while len(bench.turns):
        message = bench.turns.popleft()
        if bench.flows[message][1] == "x":
            bench.turns.hold(message)
            held.append(message)
    assert Counter(bench.flows[message][0] for message in held) == Counter({"gold": 3, "a": 1})
    assert bench.turns.waiting() == {("a", "x"): 99, ("gold", "x"): 97}


def test_keys_are_forgotten_when_their_flow_has_passed_their_last_message() -> None:
    """What is known of keys grows with what waits, not with what has waited."""
    named, a, b = NamedFlows(), ("a", None), ("b", None)
    for n in range(5000):
        named.append(a, make_message(LANE, n + 1, None), b"k%d" % n)
    named.append(b, make_message(LANE, 6000, None), b"k0")
    assert (named.flow_of(b"k0"), named.flow_of(b"k4999"), named.flow_of(b"new")) == (b, a, None)
    named.drop(a, 4999)
    assert (named.flow_of(b"k1"), named.flow_of(b"k4999")) == (None, a)
    assert len(named._last_of) <= 1024 + 4
    named.drop(a, 1)
    named.drop(b, 1)
    assert [*named._last_of, *named] == []
