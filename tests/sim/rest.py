"""Invariants of an engine and its control plane when no message is under way between them, and at the end of a run.

The module looks at the agent, the scheduler and the session's table, and keeps no state. An `AssertionError` names the
violation.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from meridian_agent.core.directives import ORDER
from meridian_agent.core.phases import Phase
from meridian_agent.core.step_record import StepRecord
from meridian_control.engine.session import Session
from tests.sim.engine import Engine
from tests.sim.network import SteppedLink


def sides_agree(engine: Engine, link: SteppedLink, session: Session) -> None:
    """Check that the control plane's table and open decisions equal the agent's; no message may be under way."""
    tracker, table = engine.agent.tracker, session.table
    if tracker.record != StepRecord():
        return
    theirs = {
        info.request_id: (
            slot,
            Phase(int(table.phase[slot])).name,
            int(table.think_tokens[slot]),
            int(table.output_tokens[slot]),
            bool(table.preempted[slot]),
            bool(table.queued[slot]),
        )
        for slot, info in table.requests()
    }
    ours = {r: (*_counts(tr), tr.preempted, tr.queued_s is not None) for r, tr in tracker.by_id.items()}
    assert theirs == ours, f"the table is {theirs}, the agent has {ours}"
    if not (engine.agent.frozen or link.lease.frozen() or session.frozen):
        waits = session.freezing.void and bool(table.live.any())
        assert not waits, "the control plane waits for a snapshot that nobody sends"
    if not link.inbox.messages:
        told, kept = set(session.open_decisions), _kept_decisions(engine.agent)
        assert told == kept, f"decisions {sorted(told ^ kept)} wait on one side only: {sorted(kept)} in the engine"
        if not (engine.agent.frozen or session.frozen or session.freezing.void or engine.agent._lapsed & ORDER):
            _ranks_agree(tracker.by_id.values(), session)


def _ranks_agree(live: Iterable[Any], session: Session) -> None:
    """Check that each request that is ranked has on the agent the rank that the control plane has decided last."""
    table, policy = session.table, session.policy
    if policy is None or not policy.scheduler.enabled or policy.scheduler.strategy == "stock":
        return
    for one in live:
        decided, phase = int(table.rank[one.slot]), one.own_state.phase
        is_ranked = decided >= 0 and (one.rank is not None or phase == table.ranked_phase[one.slot])
        has, name = one.effective_rank, one.info.request_id
        assert not is_ranked or has == decided, f"{name} has rank {has}, not {decided}"


def _counts(live: Any) -> tuple[int, str, int, int]:
    """Return a request's slot, its phase and its tokens."""
    return live.slot, live.state.phase.name, live.state.think_tokens, live.state.output_tokens


def _kept_decisions(agent: Any) -> set[int]:
    """Return the decisions that still owe their outcome."""
    plan, placed = agent.directives.plan, agent.probing.placed.values()
    kept = {p.decision_id for p in placed} | {decision_id for decision_id, *_ in agent.directives.probes}
    kept |= {claim.decision_id for claim in agent.directives.preempts.claims.values()}
    if plan is not None and not plan.reported:
        kept.add(plan.decision_id)
    for tr in agent.tracker.by_id.values():
        if tr.cap is not None and not tr.cap.reported:
            kept.add(tr.cap.decision_id)
        if tr.ending is not None:
            kept.add(tr.ending.decision_id)
        if tr.tier is not None:
            kept.add(tr.tier[0])
    # Decision id 0 stands for the agent's own actions and for decisions of a stream that has ended.
    return kept - {0}


def nothing_left(engine: Engine, opened: Iterable[str], limits: tuple[int, ...]) -> None:
    """Check, after all requests have ended, that neither the agent nor the scheduler keeps anything of them.

    opened: all requests of the run. limits: the scheduler's own limits at its beginning.
    """
    agent, scheduler = engine.agent, engine.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1, "KV blocks are lost"
    left = [*scheduler.requests, *scheduler.running, *scheduler.waiting]
    assert not left, f"left in the scheduler: {left}"
    assert engine.limits() == limits, "the scheduler's own limits are changed"
    missing = set(opened) - set(engine.finished)
    assert not missing, f"requests never end: {missing}"
    if agent is None:
        return
    tracker, directives, probing = agent.tracker, agent.directives, agent.probing
    kept = (tracker.by_id, tracker.by_slot, tracker.due, tracker.preempted, probing.placed, probing.held)
    assert not any(kept), f"left behind: {kept}"
    assert not directives.probes
    assert not directives.preempts.claims
    assert (tracker.thinking, tracker.answering) == (0, 0)
