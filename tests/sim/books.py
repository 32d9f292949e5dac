"""Records of one engine, kept independently of the agent's own: settings in force, and decisions for each request.

The records watch everything that the agent takes in, and check each step against it; an `AssertionError` names the
violation. `watched` checks a request's tokens, `steps` checks each step, and `rest` checks the state when no message is
under way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from meridian.v1 import agent_pb2

from meridian_agent.core.directives import ALL_BUT_CAPS, CAPS, MEMORY, ORDER, OTHER_ENDS, RULES
from meridian_agent.core.phases import Markers, Phase, begin
from meridian_agent.link.mailbox import Arrived
from meridian_control.engine.session import Session
from tests.sim import rest
from tests.sim.engine import BLOCK, CONTEXT, Engine
from tests.sim.invariants import Invariants
from tests.sim.network import SteppedLink
from tests.sim.queueing import Queueing
from tests.sim.steps import Steps
from tests.sim.watched import Limits, Watched

# The part of the directives that a forced end belongs to, by reason; other reasons belong to a section without a lease.
PARTS = {
    agent_pb2.FORCE_REASON_SOFT_CLOSE: ORDER,
    **dict.fromkeys(
        (
            agent_pb2.FORCE_REASON_EAT,
            agent_pb2.FORCE_REASON_RANK,
            agent_pb2.FORCE_REASON_RPDI,
            agent_pb2.FORCE_REASON_GIVE_UP,
        ),
        RULES,
    ),
}


class EngineBooks:
    """The records of one engine, for one start of its process."""

    def __init__(self, invariants: Invariants, clock: Callable[[], float]) -> None:
        self.invariants, self._clock = invariants, clock
        self._steps: Steps | None = None
        self._queueing: Queueing | None = None
        # Settings that were put in force, oldest first.
        self._obeyed: list[agent_pb2.Settings] = []
        self.link: SteppedLink | None = None
        self.requests: dict[str, Watched] = {}
        self.revision = 0
        self.engine: Engine
        self.forced_tokens = 0
        # Whether faults are injected, so that the guard may report one.
        self.may_fail = False
        self._session = ""
        # Number of running requests after the newest step.
        self._running = 0

    def attach(self, engine: Engine, link: SteppedLink | None) -> None:
        self.engine, self.link, self._limits = engine, link, engine.limits()
        if link is None:
            return
        handle = engine.scheduler._handle_stopped_request
        engine.scheduler._handle_stopped_request = lambda request: self._stopped(request, handle)
        confirm = link.mailbox.confirm

        def watched_confirm(arrived: Arrived) -> None:
            self._in_force(arrived)
            confirm(arrived)

        link.mailbox.confirm = watched_confirm  # type: ignore[method-assign]
        self._watch(engine.agent)
        lifecycle = engine.scheduler._lifecycle
        again = lifecycle.again

        def watched_again(steps_under_way: int) -> Any:
            agent = again(steps_under_way)
            # The new agent begins with the settings that the link holds.
            self._obeyed = [lifecycle.link.lease.held[0]] if lifecycle.link.lease.held is not None else []
            self._watch(agent)
            return agent

        lifecycle.again = watched_again

    def _watch(self, agent: Any) -> None:
        self._steps, self._queueing = Steps(self.engine, agent, self._clock), Queueing(agent, self._clock)
        obey, directives = agent.put_in_force, agent.directives

        def watched_obey(settings: agent_pb2.Settings, markers: Markers) -> None:
            self._obeyed.append(settings)
            obey(settings, markers)

        agent.put_in_force = watched_obey
        accept, new_stream, freeze = directives.accept, directives.new_stream, directives.freeze

        def watched_freeze() -> None:
            freeze()
            # The freeze may be over before a request that sits out gets its next token, and before any step.
            for watched in self.requests.values():
                watched.force, watched.ending_left, watched.stopped_after = 0, 0, -1

        def watched_accept(message: agent_pb2.Directives) -> None:
            ranks = {tr: tr.rank for tr in agent.tracker.by_id.values()}
            accept(message)
            self._accepted(message, ranks)

        def watched_new_stream() -> None:
            assert self.link is not None
            self._session = self.link.session_id
            new_stream()
            self._forget_forces(ALL_BUT_CAPS)

        directives.accept, directives.new_stream, directives.freeze = watched_accept, watched_new_stream, watched_freeze

    def open(self, request_id: str, prompt: list[int], max_tokens: int, own_cap: int | None) -> None:
        if self.link is None:
            return
        tracker = self.engine.scheduler._lifecycle.agent.tracker
        state = begin(tracker.markers, prompt, tracker.supports_think_disable)
        known = self.engine.agent is not None
        if known and self._queueing is not None:
            self._queueing.opened(request_id)
        most, default = min(max_tokens, CONTEXT - len(prompt)), self._default_limits()
        self.requests[request_id] = Watched(request_id, most, own_cap, default, state, tracker.markers, known)

    def _default_limits(self) -> Limits:
        """Return the limits of a request without a decision, under the settings that were put in force last."""
        agent = self.engine.agent
        if agent is None or agent._lapsed & CAPS or not self._obeyed:
            return Limits()
        settings = self._obeyed[-1]
        cap = settings.max_think_tokens if settings.HasField("max_think_tokens") else None
        # The simulator's requests are chats.
        return Limits(cap, settings.chat_answer_reserve_tokens or settings.answer_reserve_tokens)

    # ----------------------------------------------------------------------------------------------------- decisions

    def _in_force(self, arrived: Arrived) -> None:
        """Check, before settings are acknowledged, that they are in force or that no request is live."""
        settings = arrived.settings
        agent = self.engine.agent
        if settings is not None and agent is not None and agent.tracker.by_id:
            assert settings in self._obeyed, f"revision {settings.revision} is acknowledged before it holds"

    def _accepted(self, message: agent_pb2.Directives, ranks: dict[Any, int | None]) -> None:
        tracker, made = self.engine.agent.tracker, self.invariants.made
        for cap in message.caps:
            if watched := self._meant(cap.decision_id):
                has_cap = cap.HasField("max_think_tokens")
                limits = Limits(cap.max_think_tokens, cap.answer_reserve_tokens) if has_cap else Limits()
                watched.cap = limits, cap.shadow
        for force in message.forces:
            watched = self._meant(force.decision_id)
            if watched and not force.shadow and watched.state.phase is Phase.THINK:
                watched.force = PARTS.get(force.reason, OTHER_ENDS)
        for tr in tracker.by_id.values():
            ids = [tr.cap.decision_id if tr.cap else 0, tr.ending.decision_id if tr.ending else 0]
            self._own(tr, [*ids, tr.tier[0] if tr.tier else 0])
        for decision_id, tr, *_ in self.engine.agent.directives.probes:
            self._own(tr, [decision_id])
        if message.HasField("plan") and message.plan.decision_id:
            slots = made[self._session, message.plan.decision_id].slots
            for slot, request_id in slots.items():
                tr = tracker.by_slot.get(slot)
                if tr is None or tr.rank == ranks[tr]:
                    continue
                here, known = tr.info.request_id, made[self._session, message.plan.decision_id].phases[slot]
                assert here == request_id, f"the rank of {request_id} is given to {here}"
                assert known == tr.state.phase, f"the rank of {here} is for its phase {known}, not {tr.state.phase}"

    def _meant(self, decision_id: int) -> Watched | None:
        made = self.invariants.made.get((self._session, decision_id))
        assert made is not None, f"the agent is told of decision {decision_id}, which nobody made on this stream"
        alive = made.request_id in self.engine.agent.tracker.by_id
        return self.requests[made.request_id] if alive else None

    def _own(self, tr: Any, ids: list[int]) -> None:
        for decision_id in filter(None, ids):
            meant = self.invariants.made[self._session, decision_id].request_id
            here = tr.info.request_id
            assert meant == here, f"decision {decision_id} was made for {meant} and is applied to {here}"

    def _forget_lapsed(self, parts: int) -> None:
        """Note that the decisions of these parts of the directives have ended with their lease."""
        self._forget_forces(parts)
        if parts & CAPS:
            for watched in self.requests.values():
                watched.cap, watched.default = None, Limits()

    def _forget_forces(self, parts: int) -> None:
        for watched in self.requests.values():
            watched.force &= ~parts

    # ------------------------------------------------------------------------------------------------- sampled tokens

    def before_masks(self) -> None:
        """Note what the agent knows now, because the step's masks are about to be made."""
        agent = self.engine.agent
        if agent is None:
            return
        self._forget_lapsed(agent._lapsed)
        for tr in agent.tracker.by_id.values():
            watched = self.requests[tr.info.request_id]
            if not watched.known:
                self._adopted(watched, tr)
            watched.masked(agent.tracker.markers)

    def _adopted(self, watched: Watched, tr: Any) -> None:
        """Check a request that a returned agent has read again against these records."""
        watched.adopted(self._default_limits())
        ours, read = watched.state, tr.state
        if not watched.unsure and watched.markers == self.engine.agent.tracker.markers:
            told = [(s.phase, s.think_tokens, s.output_tokens) for s in (ours, read)]
            assert told[0] == told[1] or self.engine.shape.is_async, f"{tr.info.request_id} was read as {told[1]}"

    def on_token(self, request_id: str, token: int, forced: bool) -> None:
        watched = self.requests.get(request_id)
        if watched is None:
            assert not forced
            return
        watched.before = watched.state.copy()
        self._sampled(watched, token, forced)
        watched.generated += 1

    def _sampled(self, watched: Watched, token: int, forced: bool) -> None:
        if self.engine.agent is None:
            watched.forget()
        if not watched.known:
            assert not forced, f"{watched.request_id} is forced by an agent that does not know it"
            watched.state.feed(token, watched.markers)
            return
        self.forced_tokens += forced
        if watched.unsure or self.engine.agent.tracker.markers != watched.markers:
            watched.unsure = True
            return
        watched.sampled(token, forced, len(self.engine.schedule), self.engine.shape, self.engine.agent.frozen)

    def _stopped(self, request: Any, handle: Callable[[Any], bool]) -> bool:
        """Let the scheduler handle a request that has stopped, and check whether the request goes on."""
        watched, agent, goes_on = self.requests.get(request.request_id), self.engine.agent, False
        if watched is not None and watched.known and agent is not None and not agent.frozen:
            watched.unsure = watched.unsure or agent.tracker.markers != watched.markers
            stops = request.output_token_ids[-1] == self.engine.model.stop and not request.sampling_params.ignore_eos
            goes_on = stops and watched.goes_on()
        ended = handle(request)
        # An agent that has just failed leaves the stop to vLLM.
        goes_on = goes_on and self.engine.agent is not None
        if watched is None or not watched.unsure:
            assert ended is not goes_on, f"where its model stops, {request.request_id} ends: {ended}"
        if watched is not None and not ended:
            watched.take_back()
        return ended

    # --------------------------------------------------------------------------------------------------- every step

    def after_step(self) -> None:
        engine, link = self.engine, self.link
        agent = engine.agent
        if link is None:
            return
        guard = engine.scheduler._guard
        assert not guard.fault or self.may_fail, f"the guard has tripped: {guard.text}"
        self._check_running()
        if agent is None:
            for watched in self.requests.values():
                watched.forget()
            return
        assert link.lease.revision >= self.revision, f"revision goes from {self.revision} to {link.lease.revision}"
        self.revision = link.lease.revision
        self._after_lease(agent)
        for tr in agent.tracker.by_id.values():
            waits = tr.ref.status.name == "PREEMPTED"
            assert tr.preempted or not waits, f"{tr.info.request_id} is preempted, and the agent does not know"
        if not engine.shape.is_async:
            self._nobody_starves(agent)
        if self._steps is not None and self._queueing is not None:
            self._steps.after_step()
            self._queueing.after_step()

    def _after_lease(self, agent: Any) -> None:
        """Check that everything is gone that an expired lease ends; caps end only if the policy gave them a lease."""
        lapsed, plan = agent._lapsed, agent.directives.plan
        self._forget_lapsed(lapsed)
        if lapsed & RULES:
            assert not agent.directives.probes, "probes wait past the lease"
        if lapsed & ORDER:
            assert plan is None or plan.stock, "a plan holds past the lease"
            assert all(tr.rank is None for tr in agent.tracker.by_id.values()), "a rank holds past the lease"
        if lapsed & MEMORY:
            assert plan is None or not plan.hold_admission, "admission is held past the lease"

    def _nobody_starves(self, agent: Any) -> None:
        scheduled = self.engine.schedule[-1]
        plan = agent.directives.plan
        is_stock = plan is None or plan.shadow or plan.stock
        bound = 0 if is_stock else plan.max_skip_steps
        # In vLLM's own order a prompt in pieces may take all tokens of a step before the requests behind it.
        is_full = is_stock and self.engine.scheduled_tokens >= self.engine.scheduler.max_num_scheduled_tokens
        for request in self.engine.scheduler.running:
            watched, tr = self.requests.get(request.request_id), agent.tracker.by_id.get(request.request_id)
            if watched is None or tr is None:
                continue
            excused = is_full or request.is_prefill_chunk or tr in agent.probing.held
            if excused or request.request_id in scheduled:
                watched.joins()
            else:
                watched.left_out(bound)

    # -------------------------------------------------------------------------------------------------- at quiet times

    def sides_agree(self, session: Session) -> None:
        assert self.link is not None
        rest.sides_agree(self.engine, self.link, session)

    def nothing_left(self) -> None:
        rest.nothing_left(self.engine, self.requests, self._limits_in_force())

    def _limits_in_force(self) -> tuple[int, ...]:
        """Return the scheduler's limits: those of the settings that were put in force last, or its own while the agent
        is off or frozen."""
        agent, shape = self.engine.agent, self.engine.shape
        if agent is None or agent.frozen or not self._obeyed:
            return self._limits
        limits, row = self._obeyed[-1].engine_limits, 1 + shape.drafts
        running, tokens, piece = self._limits
        if wanted := limits.max_num_active_seqs:
            running = min(wanted, shape.places)
        if wanted := limits.max_num_scheduled_tokens:
            tokens = min(tokens, max(wanted, row * shape.places))
        if wanted := limits.long_prefill_token_threshold:
            piece = min(max(wanted, BLOCK, row), CONTEXT)
        return running, tokens, piece

    def _check_running(self) -> None:
        """Check the scheduler's limits between steps, and that no request joined the running ones beyond them."""
        limits, running = self._limits_in_force(), len(self.engine.scheduler.running)
        assert self.engine.limits() == limits, f"limits are {self.engine.limits()}, not {limits}"
        assert running <= max(limits[0], self._running), f"{running} requests run, {limits[0]} may"
        self._running = running
