"""A session decides which waiting requests may preempt others, and tells what became of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from meridian.v1 import agent_pb2, fleet_pb2

from meridian_control.capabilities.preemption.stream import PREEMPTED_FOR_TOTAL
from meridian_control.journal.messages import explain_request
from meridian_control.policy.model import Policy
from tests.unit.control.capabilities.handover.engines import HandMade

APPLIED, SHADOWED = agent_pb2.OUTCOME_APPLIED, agent_pb2.OUTCOME_SHADOWED
PROMPT, THINK = agent_pb2.PHASE_PROMPT, agent_pb2.PHASE_THINK
CAN = agent_pb2.Capabilities(preempt=True)


def policy(**fields: Any) -> Policy:
    """Return a policy under which the tenant `chat` may preempt others, and which decides little else."""
    off = {"enabled": False}
    chat = {"tenant": "chat", "preemption": {"may_preempt": True}}
    sections = {"scheduler": off, "entropy": off, "loop": off, "kv_memory": off}
    return Policy.model_validate({"preemption": {"shadow": False, **fields}, "override": [chat], **sections})


class Made(HandMade):
    """An engine of two places, both of which thinking has taken."""

    def __init__(self, own: Policy | None = None, capabilities: agent_pb2.Capabilities = CAN) -> None:
        hello = agent_pb2.Hello(engine_id="a", incarnation="1", max_num_seqs=2, model="m", capabilities=capabilities)
        super().__init__(own or policy(), hello)
        self.said_preempts(opened=[self.thinker(0, 300), self.thinker(1, 400)])

    def thinker(self, slot: int, think_tokens: int, **fields: Any) -> agent_pb2.RequestOpened:
        return self.opened(slot, think_tokens=think_tokens, hand_over_candidate=False, **fields)

    def waiter(self, slot: int = 2, tenant: str = "chat", **fields: Any) -> agent_pb2.RequestOpened:
        return self.thinker(slot, 0, phase=PROMPT, queued=True, tenant=tenant, **fields)

    def said_preempts(self, **fields: Any) -> list[agent_pb2.Preempt]:
        """Report one step and return what may be preempted after it."""
        self.step += 1
        report = agent_pb2.StepReport(step=self.step, steps=1, **{"running": 2, **fields})
        return list(self.send(step=report).preempts)

    def life(self, request_id: str) -> fleet_pb2.RequestLife:
        return explain_request(self.log, [], fleet_pb2.ExplainRequestRequest(request_id=request_id)).life


def outcome(decision_id: int, said: agent_pb2.Outcome.ValueType, detail: str = "") -> Sequence[Any]:
    return [agent_pb2.DecisionOutcome(decision_id=decision_id, outcome=said, detail=detail)]


def test_a_waiting_request_of_the_class_may_preempt() -> None:
    limits: dict[str, Any] = {
        "max_preemptions": 2,
        "recomputed_tokens_per_s": 70,
        "max_wait_ms": 800,
        "max_prompt_tokens": 9,
    }
    made = Made(policy(**limits))
    (preempt,) = made.said_preempts(opened=[made.waiter()])
    assert preempt == agent_pb2.Preempt(decision_id=preempt.decision_id, slot=2, victims=[0, 1], **limits)
    # It is told once, as long as one of the requests may still be preempted.
    assert made.said_preempts() == []
    assert made.said_preempts(preempted=[0]) == []
    (again,) = made.said_preempts(preempted=[1], resumed=[], opened=[made.thinker(3, 500)])
    assert again.victims == [3]


def test_a_later_request_in_a_slot_of_those_that_were_named_is_named_too() -> None:
    made = Made()
    assert made.said_preempts(opened=[made.waiter()])
    assert made.said_preempts(closed=[agent_pb2.RequestClosed(slot=slot) for slot in (0, 1)]) == []
    (again,) = made.said_preempts(opened=[made.thinker(0, 300, request_id="later")])
    assert again.victims == [0]


NOTHING: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("another tenant", {"tenant": "batch"}, {}),
    ("a request that runs at once", {}, {"joined": agent_pb2.JoinedColumns(slot=[2], queueing_ms=[1.0])}),
    ("a request that ends at once", {}, {"closed": [agent_pb2.RequestClosed(slot=2)]}),
    ("nobody to preempt", {}, {"preempted": [0, 1]}),
]


@pytest.mark.parametrize(("opened", "report"), [row[1:] for row in NOTHING], ids=[row[0] for row in NOTHING])
def test_others_may_not(opened: dict[str, Any], report: dict[str, Any]) -> None:
    made = Made()
    assert made.said_preempts(opened=[made.waiter(**opened)], **report) == []
    assert not made.session.open_decisions


def claims(made: Made) -> list[tuple[str, str, int | None]]:
    """Return the kind, the reason and the slot of each decision without an outcome."""
    return [(one.kind, one.reason, one.slot) for one in made.session.open_decisions.values()]


def test_why_a_request_may_preempt_and_when_it_is_found() -> None:
    """A request waits when the policy comes, or a snapshot says that it waits, for its first step or after vLLM has
    preempted it while it read its prompt."""
    early = Made(Policy())
    assert early.said_preempts(opened=[early.waiter()]) == []
    early.apply(policy())
    assert claims(early) == [("preempt", "no_place", 2)]
    for state in ({"queued": True}, {"preempted": True}):
        made = Made()
        waits = made.thinker(4, 0, phase=PROMPT, tenant="chat", **state)
        made.send(snapshot=agent_pb2.Snapshot(step=5, requests=[made.thinker(0, 300), waits]))
        assert [(kind, slot) for kind, _, slot in claims(made)] == [("preempt", 4)]
    full = Made()
    full.said_preempts(opened=[full.waiter()], running=1, kv_used=0.98)
    assert claims(full) == [("preempt", "no_kv_blocks", 2)]
    cannot = Made(policy(shadow=True), agent_pb2.Capabilities())
    assert cannot.said_preempts(opened=[cannot.waiter()]) == []


def test_a_request_that_has_joined_before_the_policy_comes_does_not_wait() -> None:
    """Its first token may be seconds away, and no later report would tell that it has joined."""
    made = Made(Policy())
    made.said_preempts(opened=[made.waiter()])
    made.said_preempts(joined=agent_pb2.JoinedColumns(slot=[2], queueing_ms=[1.0]))
    made.apply(policy())
    assert claims(made) == []
    assert made.said_preempts() == []


def test_a_request_whose_end_is_under_way_may_not_be_preempted_until_the_engine_drops_the_end() -> None:
    made = Made(capabilities=agent_pb2.Capabilities(preempt=True, force_end=True))
    assert made.session.on_end_thinking("a0", "", made.now)
    (preempt,) = made.said_preempts(opened=[made.waiter()])
    assert preempt.victims == [1]
    (force,) = (one for one in made.session.open_decisions.values() if one.kind == "force")
    # The end cannot be written, and the request thinks on.
    made.said_preempts(outcomes=outcome(force.decision_id, agent_pb2.OUTCOME_REFUSED))
    (again,) = made.said_preempts(preempted=[1])
    assert again.victims == [0]


def test_a_request_whose_end_a_snapshot_lists_under_way_may_not_be_preempted() -> None:
    made = Made()
    ends = made.thinker(0, 300, ending=agent_pb2.FORCE_REASON_EAT)
    made.send(snapshot=agent_pb2.Snapshot(step=5, requests=[ends, made.thinker(1, 400)]))
    (preempt,) = made.said_preempts(opened=[made.waiter()])
    assert preempt.victims == [1]


def test_another_policy_takes_back_what_is_in_force() -> None:
    made = Made()
    (first,) = made.said_preempts(opened=[made.waiter()])
    made.apply(Policy())
    taken_back = [one for one in made.session.open_decisions.values() if one.reason == "taken_back"]
    assert [one.slot for one in taken_back] == [2]
    outcomes = [*outcome(first.decision_id, agent_pb2.OUTCOME_SUPERSEDED), *outcome(taken_back[0].decision_id, APPLIED)]
    assert made.said_preempts(outcomes=outcomes) == []
    assert not made.session.open_decisions


@pytest.mark.parametrize(("said", "again"), [(APPLIED, True), (SHADOWED, False), (agent_pb2.OUTCOME_REFUSED, False)])
def test_after_an_outcome(said: agent_pb2.Outcome.ValueType, again: bool) -> None:
    """A request that goes on waiting after a preemption may preempt another one; one in shadow is counted once."""
    made = Made(policy(shadow=said == SHADOWED))
    (preempt,) = made.said_preempts(opened=[made.waiter()])
    assert preempt.shadow == (said == SHADOWED)
    assert bool(made.said_preempts(outcomes=outcome(preempt.decision_id, said))) is again
    assert sum(made.session.totals.settled.values()) == 1


def test_a_request_that_vllm_preempts_again_waits_again() -> None:
    """A request that has joined is preempted while it thinks, by vLLM, and then for another request."""
    made = Made()
    (preempt,) = made.said_preempts(opened=[made.waiter()])
    joined = agent_pb2.JoinedColumns(slot=[2], queueing_ms=[1.0])
    made.said_preempts(joined=joined, outcomes=outcome(preempt.decision_id, agent_pb2.OUTCOME_ENDED_NATURALLY))
    assert [(p.slot, list(p.victims)) for p in made.said_preempts(preempted=[2])] == [(2, [0, 1])]
    made.said_preempts(resumed=[2])
    columns = agent_pb2.PreemptionColumns(decision_id=[0], slot=[2], recompute_tokens=[1])
    assert made.said_preempts(preempted=[2], preemptions=columns) == []


def test_a_preemption_counts_although_its_decision_has_just_been_superseded() -> None:
    made = Made()
    (first,) = made.said_preempts(opened=[made.waiter()])
    (second,) = made.said_preempts(preempted=[0, 1], opened=[made.thinker(3, 500)])
    columns = agent_pb2.PreemptionColumns(decision_id=[first.decision_id], slot=[3], recompute_tokens=[1])
    superseded = outcome(first.decision_id, agent_pb2.OUTCOME_SUPERSEDED)
    for _ in range(2):
        made.said_preempts(preemptions=columns, outcomes=superseded)
        superseded = []
    assert second.slot == first.slot
    assert made.session.totals.counted[PREEMPTED_FOR_TOTAL, ()] == 1, "no later report can tell of it"


def test_both_lives_tell_of_a_preemption() -> None:
    made = Made()
    (preempt,) = made.said_preempts(opened=[made.waiter(slo_class="gold")], kv_used=0.5)
    columns = agent_pb2.PreemptionColumns(decision_id=[preempt.decision_id], slot=[1], recompute_tokens=[412])
    detail = "preempted a1: 412 tokens to compute again"
    made.said_preempts(
        preempted=[1],
        preemptions=columns,
        outcomes=outcome(preempt.decision_id, APPLIED, detail),
        joined=agent_pb2.JoinedColumns(slot=[2], queueing_ms=[9.0]),
    )
    (decision,) = [event.decision for event in made.life("a2").events if event.kind == "decision"]
    assert (decision.kind, decision.reason, decision.detail) == ("preempt", "no_place", detail)
    compared = [(one.signal, one.value, one.operator, one.limit) for one in decision.comparisons]
    assert compared == [("running", 2, ">=", 2), ("preemptible requests", 2, ">", 0)]
    told = [(event.kind, event.detail) for event in made.life("a1").events if event.kind.startswith("preempted")]
    of = "request a2 of tenant chat and SLO class gold"
    assert told == [("preempted_for", f"{of}: 412 tokens to compute again"), ("preempted", "")]
    assert made.session.totals.counted[PREEMPTED_FOR_TOTAL, ()] == 1
