"""Answers questions about the engines and the live requests of one replica with messages of FleetService.

All code runs on the server's event loop. Questions about many engines or requests let the loop do other work meanwhile.
"""

from __future__ import annotations

from datetime import timedelta
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING

from meridian.v1 import agent_pb2, fleet_pb2

from meridian_control.common.errors import NotFound
from meridian_control.common.plain_data import same
from meridian_control.engine.request_table import OUTPUT, THINK
from meridian_control.engine.signals import rpdi
from meridian_control.fleet.turns import in_parts, in_turns
from meridian_control.journal.request_ids import is_called
from meridian_control.policy.diff import Subject
from meridian_control.policy.model import Who

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from datetime import datetime

    from meridian_control.common.opened_request import OpenedRequest
    from meridian_control.engine.session import Session
    from meridian_control.engine.totals import Totals
    from meridian_control.fleet.connection import Connections
    from meridian_control.fleet.departed import Departed

# Fields of an engine that its agent's Hello has under the same name.
OF_HELLO = (
    *("engine_id", "incarnation", "model", "vllm_version", "agent_version", "fault", "faults", "last_fault"),
    *("unknown_markers", "entropy_backend", "entropy_note", "missing_facts", "request_sources", "kv_connector"),
    *("kv_role", "capabilities", "labels", "reclaim_note", "model_fingerprint"),
)

# The order in which engines and live requests are listed; a page continues after the key of its last entry.
engine_key: Callable[[fleet_pb2.Engine], tuple[str, str]] = attrgetter("engine_id", "incarnation")
request_key: Callable[[fleet_pb2.LiveRequest], tuple[str, str]] = attrgetter("engine_id", "request_id")


class Views:
    """The engines and live requests of one replica, as messages.

    connections and departed: the fleet's own. engine_view: returns a session's engine as a message; its second argument
    says whether the engine's stream is open.
    """

    def __init__(
        self,
        connections: Connections,
        departed: Departed,
        clock: Callable[[], datetime],
        engine_view: Callable[[Session, bool], fleet_pb2.Engine],
    ) -> None:
        self._connections, self._departed, self._clock = connections, departed, clock
        self._engine_view = engine_view

    async def engines_in_turns(self) -> list[fleet_pb2.Engine]:
        """Return all engines, those that left included; let the event loop do other work in between."""
        views = {c: self._engine_view(c.session, True) async for c in in_turns(list(self._connections))}
        # Engines may have come and gone meanwhile.
        live = [views[c] if c in views else self._engine_view(c.session, True) for c in self._connections]
        ids = {e.engine_id for e in live}
        gone = [engine for engine in self._departed.views(self._clock()) if engine.engine_id not in ids]
        return sorted([*live, *gone], key=engine_key)

    def agent_states(self) -> dict[str, agent_pb2.AgentState.ValueType]:
        """Return the agent's state by the engine's id, but make no messages. Of several streams under one id the newest
        counts."""
        away = {engine.engine_id: engine.agent_state for engine in self._departed.views(self._clock())}
        return away | {session.hello.engine_id: agent_state(session) for session in self._connections.sessions}

    async def requests_in_turns(self, engine_id: str) -> list[fleet_pb2.LiveRequest]:
        """Return the live requests of one engine, or of all for an empty id, sorted; let the event loop do other work
        in between."""
        keyed: list[tuple[tuple[str, str], fleet_pb2.LiveRequest]] = []
        for session in self._sessions(engine_id):
            async for views in in_parts(each_request_view(session)):
                keyed += [(request_key(request), request) for request in views]
        keyed.sort(key=itemgetter(0))
        return [request for _, request in keyed]

    def requests_called(self, engine_id: str, request_id: str) -> list[fleet_pb2.LiveRequest]:
        """Return the live requests that have an id or have it as the client's part of theirs, of one engine or of all
        for an empty `engine_id`."""
        live = []
        for session in self._sessions(engine_id):
            slots = [slot for slot, info in session.table.requests() if is_called(info.request_id, request_id)]
            live += [request_view(session, slot) for slot in slots]
        return live

    def subject(self, engine_id: str, request_id: str) -> Subject:
        """Return the engine or live request for which a policy is explained.

        An empty `engine_id` stands for any engine. Raises NotFound if this replica does not know the engine or request.
        """
        sessions = self._sessions(engine_id)
        if engine_id and not sessions:
            raise NotFound(f'no engine "{engine_id}" is connected')
        if not request_id:
            hello = sessions[0].hello
            who = Who(hello.model, engine_labels=dict(hello.labels), fingerprint=hello.model_fingerprint)
            return Subject(who, hello.model, revision=sessions[0].acked_revision)
        for session in sessions:
            for slot, opened in session.table.requests():
                if is_called(opened.request_id, request_id):
                    own = opened.min_think_tokens or None, opened.max_think_tokens
                    facts = session.who(opened), session.hello.model, *own, session.acked_revision
                    return Subject(*facts, session.changed_values(slot))
        where = f'engine "{engine_id}"' if engine_id else "any engine"
        raise NotFound(f'no live request "{request_id}" on {where}')

    def _sessions(self, engine_id: str) -> list[Session]:
        """Return the sessions of one engine, or all for an empty id, newest first."""
        connections = self._connections.of_engine(engine_id) if engine_id else self._connections
        return [connection.session for connection in connections][::-1]


def engine_view(session: Session, connected: bool) -> fleet_pb2.Engine:
    """Return the session's engine as a message, without the fields of capabilities.

    connected: whether the engine's stream is open.
    """
    hello, report, table = session.hello, session.gauges, session.table
    running = table.live & ~table.preempted
    state = fleet_pb2.CONNECTION_STATE_CONNECTED if connected else fleet_pb2.CONNECTION_STATE_DISCONNECTED
    view = fleet_pb2.Engine(
        **same(hello, *OF_HELLO),
        **same(session, "revision", "acked_revision", "nack_error"),
        **same(session.totals, "token_events", "thinking_tokens", "answer_tokens"),
        **same(session.totals, "decisions", "outcomes", "ends", "answers", "unread_prompts"),
        state=state,
        thinking=int((running & (table.phase == THINK)).sum()),
        answering=int((running & (table.phase == OUTPUT)).sum()),
        output_itl=session.totals.output_itl.message(),
        ttot=session.totals.ttot.message(),
        think_tokens=session.totals.think_tokens.message(),
        open_decisions=len(session.open_decisions),
        agent_state=agent_state(session),
        shadow=session.shadow.messages(),
        engine_limits=engine_limits(session),
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


def sums_view(totals: Totals, replica_id: str, began_at: datetime) -> fleet_pb2.Engine:
    """Return what all streams of a replica have counted since it began, in the form of an engine."""
    view = fleet_pb2.Engine(
        incarnation=replica_id,
        replica=replica_id,
        **same(totals, "thinking_tokens", "answer_tokens", "ends"),
        output_itl=totals.output_itl.message(),
        ttot=totals.ttot.message(),
    )
    view.connect_time.FromDatetime(began_at)
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
    """Yield the session's live requests as messages. Requests that end or begin meanwhile are left out."""
    table = session.table
    ratio, began = rpdi(table).tolist(), [(slot, table.info[slot]) for slot in table.slots().tolist()]
    for slot, info in began:
        if info is not None and table.info[slot] is info and table.holds(slot):
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
        **same(info, "request_id", "model", "tenant", "slo_class", "prompt_tokens"),
        phase=int(table.phase[slot]),  # type: ignore[arg-type]
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
        rank=session.rank_in_force(slot),
        tier=session.tier_in_force(slot),  # type: ignore[arg-type]
        max_think_tokens=session.cap_in_force(slot),
    )
    if decision := session.last_decision.get(slot):
        view.last_decision.decision_id, view.last_decision.kind = decision.decision_id, decision.kind
        view.last_decision.reason, view.last_decision.outcome = decision.reason, decision.outcome
        view.last_decision.shadow = decision.shadow
    return view
