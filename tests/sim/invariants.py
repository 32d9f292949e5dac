"""What must hold whatever happens, from what the simulator saw: design.md's rules as checks.

Keeps its own books of requests, limits and decisions; an `AssertionError` names what was broken.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from meridian.v1 import agent_pb2

from meridian_agent.directives import ALL_BUT_CAPS, CAPS, MEMORY, ORDER, RULES, SOFT_CLOSE, Outcome
from meridian_agent.phases import FLAG_END, FLAG_FORCED, Markers, Phase, PhaseState, begin
from meridian_agent.tracker import StepRecord
from meridian_control.delivery import model_of
from meridian_control.policy import Who
from tests.sim.steps import Steps

if TYPE_CHECKING:
    from collections.abc import Callable

    from meridian_agent.link import Arrived
    from meridian_control.policy import Policy
    from meridian_control.session import Session
    from tests.sim.engine import Engine
    from tests.sim.network import SteppedLink

NO_LIMIT = 1 << 40
ENTROPY_RULES = (agent_pb2.FORCE_REASON_EAT, agent_pb2.FORCE_REASON_RANK, agent_pb2.FORCE_REASON_RPDI)
GAUGES = ("round_trip_ms",)


@dataclass
class Made:
    """A decision as the control plane made it."""

    kind: str
    request_id: str = ""
    shadow: bool = False
    # Of a plan: whom each slot was taken for, and in which phase.
    slots: dict[int, str] = field(default_factory=dict)
    phases: dict[int, int] = field(default_factory=dict)
    settled: bool = False


@dataclass
class Watched:
    """One request, by books of our own."""

    own_cap: int | None
    default_cap: int | None
    state: PhaseState
    markers: Markers
    cap: tuple[int | None, bool] | None = None
    # The part of a force that was accepted and has not begun.
    force: int = 0
    ending_left: int = 0
    # Limits when the last masks were made, newest last.
    limits: tuple[int, int] = (NO_LIMIT, NO_LIMIT)
    # Markers changed while it lived: its counts are not ours to know.
    unsure: bool = False
    # The step of its newest token; whether a phase of thinking began in it, and in the one before.
    step: int = 0
    began: bool = False
    began_before: bool = False
    skipped: int = 0
    may_skip: int = 0
    # The agent has it: not one that was off when it came, nor one that has not come so far since.
    known: bool = True

    def forget(self) -> None:
        """The agent is off: whatever it was told of this is void."""
        self.known, self.cap, self.default_cap, self.force, self.ending_left = False, None, None, 0, 0
        self.skipped = self.may_skip = 0

    def limit(self) -> int:
        policy = self.default_cap if self.cap is None else None if self.cap[1] else self.cap[0]
        return min(cap if cap is not None else NO_LIMIT for cap in (policy, self.own_cap))


class Invariants:
    """All checks of one run. Decisions are known by session and id.

    hidden_drafts: by engine, tokens of the steps under way where only its workers know drafts. Thinking that begins in
    them may go on for as many.
    """

    def __init__(self, hidden_drafts: dict[str, int] | None = None) -> None:
        self.hidden_drafts = hidden_drafts or {}
        self.made: dict[tuple[str, int], Made] = {}
        # By session: revisions sent; policies by the nonce they went with; the one in force.
        self.sent: set[tuple[str, int]] = set()
        self.pending: dict[tuple[str, int], Policy] = {}
        self.acknowledged: dict[str, Policy | None] = {}
        # Sessions whose engines were frozen, or may write something else than vLLM's end marker; thinking tokens by
        # session and request.
        self.uncapped: set[str] = set()
        self.first_seen: dict[tuple[str, str], int] = {}
        self.trace: list[str] | None = None

    def note(self, text: str) -> None:
        if self.trace is not None:
            self.trace.append(text)

    def note_message(self, who: str, message: Any) -> None:
        if self.trace is not None:
            self.trace.append(f"{who} says {' '.join(str(message).split())}")

    # ------------------------------------------------------------------------------------------------- control's side

    def said(self, session: Session, response: agent_pb2.ConnectResponse) -> None:
        """The control plane says something, while its table is still as it was when it decided."""
        if response.HasField("settings"):
            revision = response.settings.revision
            if response.settings.closing_text or response.settings.think_end_token_ids:
                self.uncapped.add(session.session_id)
            assert revision not in session.delivery.refused, (
                f"revision {revision}, which the agent refuses, is sent again"
            )
            assert (session.session_id, revision) not in self.sent, f"revision {revision} is sent twice"
            self.sent.add((session.session_id, revision))
            assert session.delivery.pending is not None
            self.pending[session.session_id, response.settings.nonce] = session.delivery.pending[1]
        if not response.HasField("directives"):
            return
        assert session.policy is self.acknowledged.get(session.session_id), "decided by a policy that is not in force"
        table, directives = session.table, response.directives
        names = {slot: info.request_id for slot, info in table.requests()}
        for kind in ("forces", "caps", "tiers", "probes"):
            for decision in getattr(directives, kind):
                shadow = getattr(decision, "shadow", False)
                self._new(session, decision.decision_id, Made(kind, names[decision.slot], shadow))
        if directives.HasField("plan"):
            plan = directives.plan
            slots = {slot: names[slot] for slot in plan.slot}
            phases = {slot: int(table.phase[slot]) for slot in plan.slot}
            self._new(session, plan.decision_id, Made("plan", "", plan.shadow, slots, phases))
        for force in directives.forces:
            self._above_floor(session, force)
        for cap in directives.caps:
            self._within_policy(session, cap)
        self.note_message("control", directives)

    def _new(self, session: Session, decision_id: int, made: Made) -> None:
        key = session.session_id, decision_id
        assert not session.frozen, f"{made.kind} {decision_id} is decided while the engine is frozen"
        assert key not in self.made, f"decision {decision_id} is made twice"
        self.made[key] = made

    def _policy_of(self, session: Session, slot: int) -> Policy:
        """What the policy in force comes to for a request, found anew."""
        info, policy = session.table.info[slot], session.policy
        assert info is not None
        assert policy is not None
        return policy.of(Who(info.model, info.tenant, info.slo_class, info.effort, dict(session.hello.labels)))

    def _above_floor(self, session: Session, force: agent_pb2.ForceEnd) -> None:
        info, own = session.table.info[force.slot], self._policy_of(session, force.slot)
        assert info is not None
        floor = own.scheduler.min_think_tokens if force.reason in ENTROPY_RULES else own.scheduler.soft_think_tokens
        floor = max(floor, info.min_think_tokens)
        told = int(session.table.think_tokens[force.slot])
        assert told >= floor, f"thinking of {info.request_id} is ended at {told} tokens, before its floor of {floor}"

    def _within_policy(self, session: Session, cap: agent_pb2.ThinkCap) -> None:
        info, own = session.table.info[cap.slot], self._policy_of(session, cap.slot).scheduler
        assert info is not None
        if cap.HasField("max_think_tokens"):
            allowed = {own.max_think_tokens, own.max_think_tokens + own.empty_answer_extension_tokens}
            if info.HasField("max_think_tokens"):
                allowed = {min(info.max_think_tokens, tokens) for tokens in allowed}
            told = cap.max_think_tokens
            assert told in allowed, f"{info.request_id} is capped at {told} tokens; the policy says {sorted(allowed)}"

    def heard(self, session: Session | None, counters: dict[str, float], message: agent_pb2.ConnectRequest) -> None:
        """The control plane is about to hear this. session: None for a Hello. counters: the stream's, so far."""
        self.note_message("agent", message)
        if session is None:
            return
        self._judge(session)
        for flags in message.step.tokens.flags if session.session_id not in self.uncapped else ():
            assert not flags & FLAG_FORCED or flags & FLAG_END, "an end is forced where nobody thinks"
        for outcome in message.step.outcomes:
            made = self.made.get((session.session_id, outcome.decision_id))
            name = Outcome(outcome.outcome).name
            assert made is not None, f"outcome {name} of decision {outcome.decision_id}, which nobody made"
            assert not made.settled, f"a second outcome {name} of decision {outcome.decision_id}"
            made.settled = True
            assert made.shadow or name != "SHADOWED", f"{made.kind} {outcome.decision_id} is shadowed but was in force"
            if made.shadow:
                assert name != "APPLIED", f"{made.kind} {outcome.decision_id} is applied but was shadowed"
        status = message.settings_status
        if "injected" in status.error:
            # What a fault has refused may hold already: with a closing text that this session was not told of.
            self.uncapped.add(session.session_id)
        if message.HasField("settings_status") and not status.error:
            given = self.pending.get((session.session_id, status.nonce))
            # Of several that were given only the newest counts.
            if session.delivery.pending is not None and session.delivery.nonce == status.nonce:
                self.acknowledged[session.session_id] = given
        if message.step.HasField("counters"):
            for counter, value in message.step.counters.ListFields():
                before = counters.get(counter.name, 0)
                assert counter.name in GAUGES or value >= before, f"{counter.name} goes from {before} to {value}"
                counters[counter.name] = value

    def knows(self, session: Session) -> None:
        """The control plane has heard something: nobody thinks on past the cap that a request came with.

        Its first thinking is looked at, and only where what ends it is a marker alone.
        """
        table = session.table
        self._judge(session)
        for slot, info in table.requests() if session.session_id not in self.uncapped else ():
            if info.HasField("max_think_tokens") and not table.ended[slot]:
                thought, key = int(table.think_tokens[slot]), (session.session_id, info.request_id)
                # What an engine thought while it was frozen, and nobody was told.
                late = 1 + self.hidden_drafts.get(session.hello.engine_id, 0)
                limit = max(info.max_think_tokens, self.first_seen.setdefault(key, thought) + late)
                assert thought <= limit, f"{info.request_id} thinks on at {thought} tokens, past its own cap"

    def _judge(self, session: Session) -> None:
        """Find out whether something else than a marker alone may end thinking in this session's engine."""
        models = [model_of(policy, session.hello) for _, policy in session.given]
        # Until it takes up, or where it refuses, what it is given now, it goes by what it was given on an older stream.
        held = session.hello.revision
        unknown = held and held not in {revision for revision, _ in session.given}
        if unknown or session.frozen or any(m.closing_text or m.think_end_token_ids for m in models):
            self.uncapped.add(session.session_id)

    def left(self, session: Session) -> None:
        totals = session.totals
        assert not session.open_decisions
        assert sum(totals.decisions.values()) == sum(totals.outcomes.values()), "decisions and outcomes differ"
        assert not totals.unknown_outcomes


class EngineBooks:
    """The books of one engine; everything the agent does is held against them."""

    def __init__(self, invariants: Invariants, clock: Callable[[], float]) -> None:
        self.invariants, self._clock = invariants, clock
        self._steps: Steps | None = None
        # Settings that were put in force, oldest first.
        self._obeyed: list[agent_pb2.Settings] = []
        self.link: SteppedLink | None = None
        self.requests: dict[str, Watched] = {}
        self.revision = 0
        self.engine: Engine
        self.forced_tokens = 0
        # Faults are injected.
        self.may_fail = False
        self._session = ""

    def attach(self, engine: Engine, link: SteppedLink | None) -> None:
        self.engine, self.link, self._limits = engine, link, engine.limits()
        if link is None:
            return
        taken_in = link.taken_in

        def watched_taken_in(arrived: Arrived) -> None:
            self._in_force(arrived)
            taken_in(arrived)

        link.taken_in = watched_taken_in  # type: ignore[method-assign]
        self._watch(engine.agent)
        keeper = engine.scheduler._keeper
        again = keeper.again

        def watched_again(steps_under_way: int) -> Any:
            agent = again(steps_under_way)
            self._watch(agent)
            return agent

        keeper.again = watched_again

    def _watch(self, agent: Any) -> None:
        self._steps = Steps(self.engine, agent, self._clock)
        obey, directives = agent.put_in_force, agent.directives

        def watched_obey(settings: agent_pb2.Settings, markers: Markers) -> None:
            self._obeyed.append(settings)
            obey(settings, markers)

        agent.put_in_force = watched_obey
        accept, new_stream = directives.accept, directives.new_stream

        def watched_accept(message: agent_pb2.Directives) -> None:
            ranks = {tr: tr.rank for tr in agent.tracker.by_id.values()}
            accept(message)
            self._accepted(message, ranks)

        def watched_new_stream() -> None:
            assert self.link is not None
            self._session = self.link.session_id
            new_stream()
            self._forget_forces(ALL_BUT_CAPS)

        directives.accept, directives.new_stream = watched_accept, watched_new_stream

    def open(self, request_id: str, prompt: list[int], own_cap: int | None) -> None:
        if self.link is None:
            return
        tracker = self.engine.scheduler._keeper.agent.tracker
        state = begin(tracker.markers, prompt, tracker.supports_think_disable)
        known = self.engine.agent is not None
        self.requests[request_id] = Watched(own_cap, tracker.default_cap, state, tracker.markers, known=known)

    # ----------------------------------------------------------------------------------------------- what is decided

    def _in_force(self, arrived: Arrived) -> None:
        """Settings are about to be acknowledged: they hold, or no request is live."""
        settings = arrived.settings
        agent = self.engine.agent
        if settings is not None and agent is not None and agent.tracker.by_id:
            assert settings in self._obeyed, f"revision {settings.revision} is acknowledged before it holds"

    def _accepted(self, message: agent_pb2.Directives, ranks: dict[Any, int | None]) -> None:
        tracker, made = self.engine.agent.tracker, self.invariants.made
        for cap in message.caps:
            if watched := self._meant(cap.decision_id):
                watched.cap = (cap.max_think_tokens if cap.HasField("max_think_tokens") else None), cap.shadow
        for force in message.forces:
            watched = self._meant(force.decision_id)
            if watched and not force.shadow and watched.state.phase is Phase.THINK:
                watched.force = ORDER if force.reason == SOFT_CLOSE else RULES
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

    def _forget_forces(self, parts: int) -> None:
        for watched in self.requests.values():
            watched.force &= ~parts

    # ------------------------------------------------------------------------------------------------ what is sampled

    def before_masks(self) -> None:
        """The step's masks are about to be made, with what the agent knows now."""
        agent = self.engine.agent
        if agent is None:
            return
        for tr in agent.tracker.by_id.values():
            watched = self.requests[tr.info.request_id]
            if not watched.known:
                self._adopted(watched, tr)
            watched.unsure = watched.unsure or watched.markers != agent.tracker.markers
            watched.limits = watched.limits[1], watched.limit()

    def _adopted(self, watched: Watched, tr: Any) -> None:
        """An agent that has come back has read the request again, and knows of it what is known here."""
        watched.known, watched.default_cap, watched.limits = True, tr.default_cap, (NO_LIMIT, NO_LIMIT)
        ours, read = watched.state, tr.state
        if not watched.unsure and watched.markers == self.engine.agent.tracker.markers:
            told = [(s.phase, s.think_tokens, s.output_tokens) for s in (ours, read)]
            assert told[0] == told[1] or self.engine.shape.is_async, f"{tr.info.request_id} was read as {told[1]}"

    def on_token(self, request_id: str, token: int, forced: bool) -> None:
        watched = self.requests.get(request_id)
        if watched is None:
            assert not forced
            return
        if self.engine.agent is None:
            watched.forget()
        if not watched.known:
            assert not forced, f"{request_id} is forced by an agent that does not know it"
            watched.state.feed(token, watched.markers)
            return
        state, now = watched.state, watched.limit()
        self.forced_tokens += forced
        if watched.unsure or self.engine.agent.tracker.markers != watched.markers:
            watched.unsure = True
            return
        if watched.step != (step := len(self.engine.schedule)):
            watched.step, watched.began_before, watched.began = step, watched.began, False
        # With asynchronous scheduling a mask is made a step ahead, and drafts that only workers know are.
        late = watched.limits if self.engine.shape.is_async or self.engine.shape.hidden else (now,)
        at = state.think_tokens if state.phase is Phase.THINK else -1
        if self.engine.agent.frozen:
            # An ending that is half written is left as it is; caps hold again afterwards.
            assert not forced, f"{request_id} is forced while frozen"
            watched.ending_left = watched.force = 0
        elif watched.ending_left:
            assert forced, f"the ending of {request_id} is broken off"
            watched.ending_left -= 1
        elif forced:
            by_cap = at >= min(now, *late)
            assert at >= 0, f"{request_id} is forced outside thinking"
            assert by_cap or watched.force, f"thinking of {request_id} is ended at {at} tokens for no reason"
            watched.ending_left = len(state.ending(watched.markers)) - 1
            watched.force = 0
        else:
            limit = max(now, *late)
            # There a mask can also not know yet that thinking began in the step before, nor where only the worker knows
            # the drafts that it begins among them.
            shape = self.engine.shape
            began = (shape.is_async and watched.began_before) or (shape.hidden and watched.began)
            assert at < limit or began, f"{request_id} thinks on at {at} tokens, past its cap of {limit}"
        before = state.phase
        state.feed(token, watched.markers)
        watched.began = watched.began or (before is not Phase.THINK and state.phase is Phase.THINK)
        if state.phase is not Phase.THINK:
            watched.force = 0

    # --------------------------------------------------------------------------------------------------- every step

    def after_step(self) -> None:
        engine, link = self.engine, self.link
        agent = engine.agent
        if link is None:
            return
        fault = engine.scheduler._guard.fault
        assert not fault or self.may_fail, f"the guard has tripped: {fault}"
        if agent is None:
            for watched in self.requests.values():
                watched.forget()
            return
        assert link.revision >= self.revision, f"revision goes from {self.revision} to {link.revision}"
        self.revision = link.revision
        self._after_lease(agent)
        for tr in agent.tracker.by_id.values():
            waits = tr.ref.status.name == "PREEMPTED"
            assert tr.preempted or not waits, f"{tr.info.request_id} is preempted, and the agent does not know"
        if not engine.shape.is_async:
            self._nobody_starves(agent)
        if self._steps is not None:
            self._steps.after_step()

    def _after_lease(self, agent: Any) -> None:
        """What a lease that is over ended is gone; caps only where the policy gave them a lease of their own."""
        lapsed, plan = agent._lapsed, agent.directives.plan
        self._forget_forces(lapsed)
        if lapsed & CAPS:
            for watched in self.requests.values():
                watched.cap = watched.default_cap = None
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
        bound = plan.max_skip_steps if plan is not None and not plan.shadow and not plan.stock else 0
        for request in self.engine.scheduler.running:
            watched, tr = self.requests.get(request.request_id), agent.tracker.by_id.get(request.request_id)
            if watched is None or tr is None:
                continue
            if request.request_id in scheduled or request.is_prefill_chunk or tr in agent.probing.held:
                watched.skipped = watched.may_skip = 0
                continue
            watched.skipped, watched.may_skip = watched.skipped + 1, max(bound, watched.may_skip)
            assert watched.skipped <= watched.may_skip + 1, (
                f"{request.request_id} is left out {watched.skipped} times in a row, {watched.may_skip} are allowed"
            )

    # -------------------------------------------------------------------------------------------------- at quiet times

    def table_equals(self, session: Session) -> None:
        """Nothing is under way: the control plane's table is the agent's."""
        tracker = self.engine.agent.tracker
        if tracker.record != StepRecord():
            return
        table = session.table
        theirs = {
            info.request_id: (
                slot,
                Phase(int(table.phase[slot])).name,
                int(table.think_tokens[slot]),
                int(table.output_tokens[slot]),
                bool(table.preempted[slot]),
            )
            for slot, info in table.requests()
        }
        ours = {
            r: (tr.slot, tr.state.phase.name, tr.state.think_tokens, tr.state.output_tokens, tr.preempted)
            for r, tr in tracker.by_id.items()
        }
        assert theirs == ours, f"the table is {theirs}, the agent has {ours}"

    def nothing_left(self) -> None:
        """All requests are done: neither the agent nor the scheduler keeps anything of them."""
        agent, scheduler = self.engine.agent, self.engine.scheduler
        pool = scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1, "KV blocks are lost"
        left = [*scheduler.requests, *scheduler.running, *scheduler.waiting]
        assert not left, f"left in the scheduler: {left}"
        assert self.engine.limits() == self._limits, "the scheduler's own limits are changed"
        missing = set(self.requests) - set(self.engine.finished)
        assert not missing, f"requests never end: {missing}"
        if agent is None:
            return
        tracker, directives = agent.tracker, agent.directives
        probing = agent.probing
        kept = (tracker.by_id, tracker.by_slot, tracker.due, tracker.preempted, probing.placed, probing.held)
        assert not any(kept), f"left behind: {kept}"
        assert not directives.probes
        assert (tracker.thinking, tracker.answering) == (0, 0)
