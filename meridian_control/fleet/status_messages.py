"""Turns the state of a session into FleetService messages. All functions are pure."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from meridian.v1 import agent_pb2, fleet_pb2

from meridian_control.common.errors import NotFound
from meridian_control.engine.request_table import OUTPUT, THINK
from meridian_control.engine.signals import rpdi
from meridian_control.journal.request_ids import is_called
from meridian_control.policy.diff import Subject
from meridian_control.policy.model import Who

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from meridian_control.common.opened_request import OpenedRequest
    from meridian_control.engine.session import Session

# Fields of an engine that its agent's Hello has under the same name.
OF_HELLO = (
    *("engine_id", "incarnation", "model", "vllm_version", "agent_version", "fault", "faults", "last_fault"),
    *("unknown_markers", "entropy_backend", "entropy_note", "missing_facts", "request_sources", "kv_connector"),
    *("kv_role", "capabilities", "labels", "reclaim_note", "model_fingerprint"),
)


def engine_view(session: Session, connected: bool) -> fleet_pb2.Engine:
    """Return the session's engine as a message, without the fields of capabilities.

    connected: whether the engine's stream is open.
    """
    hello, report, table = session.hello, session.gauges, session.table
    running = table.live & ~table.preempted
    state = fleet_pb2.CONNECTION_STATE_CONNECTED if connected else fleet_pb2.CONNECTION_STATE_DISCONNECTED
    same: dict[str, Any] = {name: getattr(hello, name) for name in OF_HELLO}
    view = fleet_pb2.Engine(
        **same,
        state=state,
        revision=session.revision,
        acked_revision=session.acked_revision,
        nack_error=session.nack_error,
        thinking=int((running & (table.phase == THINK)).sum()),
        answering=int((running & (table.phase == OUTPUT)).sum()),
        token_events=session.totals.token_events,
        decisions=session.totals.decisions,
        outcomes=session.totals.outcomes,
        ends=session.totals.ends,
        answers=session.totals.answers,
        output_itl=session.totals.output_itl.message(),
        ttot=session.totals.ttot.message(),
        think_tokens=session.totals.think_tokens.message(),
        open_decisions=len(session.open_decisions),
        agent_state=agent_state(session),
        shadow=session.shadow.messages(),
        engine_limits=engine_limits(session),
        unread_prompts=session.totals.unread_prompts,
    )
    freezing = session.freezing
    if freezing.freezes or freezing.frozen:
        view.freeze.freeze_ids.extend(freeze.freeze_id for freeze in freezing.freezes)
        view.freeze.confirmed, view.freeze.paused = freezing.confirmed, freezing.confirmed and freezing.paused
        if not freezing.locally and freezing.freezes:
            view.freeze.end_time.FromDatetime(max(freeze.end_time for freeze in freezing.freezes))
    view.connect_time.FromDatetime(session.connected_at)
    if hello.HasField("recover_ms"):
        view.recover_time.FromDatetime(session.connected_at + timedelta(milliseconds=hello.recover_ms))
    if report is not None and session.reported_at is not None:
        view.report_time.FromDatetime(session.reported_at)
        view.step, view.step_time_ms, view.kv_used = report.step, report.step_time_ms, report.kv_used
        view.running, view.waiting = report.running, report.waiting
        view.counters.CopyFrom(report.counters)
    return view


def agent_state(session: Session) -> agent_pb2.AgentState.ValueType:
    return agent_pb2.AGENT_STATE_OFF if session.hello.fault else session.agent_state


def engine_limits(session: Session) -> list[fleet_pb2.EngineLimitState]:
    """Return the limits of vLLM's scheduler that the policy may change on the session's engine."""
    hello, wanted = session.hello, session.delivery.wanted_limits
    # A frozen engine, and one whose agent is off, run as stock vLLM.
    reported = None if session.frozen or hello.fault else session.delivery.engine_limits
    states = []
    for field, limit in hello.engine_limits.ListFields():
        in_force = limit.startup if reported is None else getattr(reported, field.name)
        state = fleet_pb2.EngineLimitState(name=field.name, limit=limit, in_force=in_force)
        state.wanted = wanted.get(field.name, 0)
        states.append(state)
    return states


def each_request_view(session: Session) -> Iterator[fleet_pb2.LiveRequest]:
    """Yield the session's live requests as messages. Requests that end meanwhile are left out."""
    table = session.table
    ratio = rpdi(table).tolist()
    for slot in table.slots().tolist():
        if table.holds(slot) and (info := table.info[slot]) is not None:
            yield _request(session, slot, info, ratio[slot])


def request_view(session: Session, slot: int) -> fleet_pb2.LiveRequest:
    """Return the live request in a slot as a message."""
    info = session.table.info[slot]
    assert info is not None
    return _request(session, slot, info, float(rpdi(session.table)[slot]))


def _request(session: Session, slot: int, info: OpenedRequest, ratio: float) -> fleet_pb2.LiveRequest:
    table = session.table
    view = fleet_pb2.LiveRequest(
        engine_id=session.hello.engine_id,
        slot=slot,
        request_id=info.request_id,
        model=info.model,
        tenant=info.tenant,
        slo_class=info.slo_class,
        phase=int(table.phase[slot]),  # type: ignore[arg-type]
        prompt_tokens=info.prompt_tokens,
        think_tokens=max(0, int(table.think_tokens[slot])),
        output_tokens=max(0, int(table.output_tokens[slot])),
        preempted=bool(table.preempted[slot]),
        entropy_nats=table.entropy_nats[slot],
        end_rank=int(table.end_rank[slot]),
        end_logprob_nats=table.end_logprob_nats[slot],
        rpdi=ratio,
        eat_nats=table.eat_nats[slot],
        eat_ema_nats=table.eat_ema_nats[slot],
        eat_ema_variance=table.eat_ema_variance[slot],
        rank=max(0, int(table.rank[slot])),
        tier=int(table.tier[slot]),  # type: ignore[arg-type]
        max_think_tokens=max(0, int(table.max_think_tokens[slot])),
    )
    if decision := session.last_decision.get(slot):
        view.last_decision.decision_id, view.last_decision.kind = decision.decision_id, decision.kind
        view.last_decision.reason, view.last_decision.outcome = decision.reason, decision.outcome
    return view


def subject_among(sessions: Sequence[Session], engine_id: str, request_id: str) -> Subject:
    """Return the first session's engine, or the live request with this id, for which a policy is explained.

    engine_id: as the caller asked, for the error. Raises NotFound if no session has the request.
    """
    if not request_id:
        hello = sessions[0].hello
        who = Who(hello.model, engine_labels=dict(hello.labels), fingerprint=hello.model_fingerprint)
        return Subject(who, hello.model, revision=sessions[0].acked_revision)
    for session in sessions:
        for _, opened in session.table.requests():
            if is_called(opened.request_id, request_id):
                own = opened.min_think_tokens or None, opened.max_think_tokens
                return Subject(session.who(opened), session.hello.model, *own, session.acked_revision)
    where = f'engine "{engine_id}"' if engine_id else "any engine"
    raise NotFound(f'no live request "{request_id}" on {where}')
