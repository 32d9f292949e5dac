"""Invariants of all messages between the control plane and the agents: design.md's rules as checks.

The module knows decisions and requests from the messages. `books` checks the state inside an engine, and `given` knows
the policies that the engine was given. An `AssertionError` names the violation.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from meridian.v1 import agent_pb2

from meridian_agent.core.phases import FLAG_END, FLAG_FORCED
from meridian_agent.core.step_record import Outcome
from meridian_control.capabilities.budgets.stream import EngineBudgets
from meridian_control.capabilities.control_group.rule import unshortened
from meridian_control.capabilities.pressure.stream import EnginePressure
from meridian_control.engine.session import Session
from meridian_control.engine.shortening import Staged, matching, shortened
from meridian_control.engine.token_rows import columns_of
from meridian_control.policy.model import Policy, Who
from tests.fakes.tables import in_stages
from tests.sim import reasons
from tests.sim.given import Given

ENTROPY_RULES = (
    agent_pb2.FORCE_REASON_EAT,
    agent_pb2.FORCE_REASON_RANK,
    agent_pb2.FORCE_REASON_RPDI,
    agent_pb2.FORCE_REASON_GIVE_UP,
)
GAUGES = ("round_trip_ms",)


@dataclass
class Made:
    """A decision as the control plane made it."""

    kind: str
    request_id: str = ""
    shadow: bool = False
    # For a plan: the request of each slot, and its phase, when the plan was made.
    slots: dict[int, str] = field(default_factory=dict)
    phases: dict[int, int] = field(default_factory=dict)
    settled: bool = False


# The cap of a policy that sets none.
UNSHORTENED_CAP = 32768


class Invariants:
    """All checks of one run. Decisions are known by session and id.

    hidden_drafts: by engine, the tokens of the steps under way if only its workers know the drafts. Thinking that
    begins in them may exceed its cap by as many tokens.
    """

    def __init__(self, hidden_drafts: dict[str, int] | None = None) -> None:
        self.hidden_drafts = hidden_drafts or {}
        self.made: dict[tuple[str, int], Made] = {}
        # Policies by engine, over all its streams.
        self.given: defaultdict[str, Given] = defaultdict(Given)
        # Thinking tokens at which a request was first seen, by session and request.
        self.first_seen: dict[tuple[str, str], int] = {}
        self.trace: list[str] | None = None

    def note(self, text: str) -> None:
        if self.trace is not None:
            self.trace.append(text)

    def note_message(self, who: str, message: Any) -> None:
        if self.trace is not None:
            self.trace.append(f"{who} says {' '.join(str(message).split())}")

    # -------------------------------------------------------------------------------------------------- control plane

    def said(self, session: Session, response: agent_pb2.ConnectResponse) -> None:
        """Check a message of the control plane, while its table is still as it was when it decided."""
        if response.HasField("settings"):
            self.given[session.hello.engine_id].give(session, response.settings)
        if not response.HasField("directives"):
            return
        in_force = self.given[session.hello.engine_id].acknowledged.get(session.session_id)
        assert session.policy is in_force, "decided by a policy that is not in force"
        table, directives = session.table, response.directives
        names = {slot: info.request_id for slot, info in table.requests()}
        for kind in ("forces", "caps", "tiers", "probes", "preempts"):
            for decision in getattr(directives, kind):
                shadow = getattr(decision, "shadow", False)
                self._new(session, decision.decision_id, Made(kind, names[decision.slot], shadow))
                reasons.check(session, session.open_decisions[decision.decision_id])
        if directives.HasField("plan"):
            plan = directives.plan
            slots = {slot: names[slot] for slot in plan.slot}
            phases = {slot: int(table.phase[slot]) for slot in plan.slot}
            self._new(session, plan.decision_id, Made("plan", "", plan.shadow, slots, phases))
        for force in directives.forces:
            if force.reason == agent_pb2.FORCE_REASON_OPERATOR:
                assert not force.shadow, "an operator's end is in shadow"
            else:
                self._above_floor(session, force)
        for cap in directives.caps:
            self._within_policy(session, cap)
        self.note_message("control", directives)

    def _new(self, session: Session, decision_id: int, made: Made) -> None:
        key = session.session_id, decision_id
        assert not session.frozen, f"{made.kind} {decision_id} is decided while the engine is frozen"
        assert key not in self.made, f"decision {decision_id} is made twice"
        self.made[key] = made

    def _policy_of(self, session: Session, slot: int, budgeted: bool = True) -> Policy:
        """Return the policy in force for a request, computed independently of the session.

        budgeted: whether budgets and pressure have shortened it.
        """
        info, policy = session.table.info[slot], session.policy
        assert info is not None
        assert policy is not None
        who = Who(info.model, info.tenant, info.slo_class, info.effort, dict(session.hello.labels))
        if not budgeted:
            return policy.of(who)
        stages = session.part(EnginePressure).stages_of(slot)
        pressed = [Staged("pressure", policy.pressure[index], stage) for index, stage in stages]
        entries = [*in_stages(matching(policy.budget, who), session.part(EngineBudgets).stages), *pressed]
        held = shortened(policy.of(who), entries)[0]
        return unshortened(held) if session.table.control[slot] else held

    def _above_floor(self, session: Session, force: agent_pb2.ForceEnd) -> None:
        info, own = session.table.info[force.slot], self._policy_of(session, force.slot)
        assert info is not None
        floors = {agent_pb2.FORCE_REASON_LOOP: 0}
        floors[agent_pb2.FORCE_REASON_SOFT_CLOSE] = own.scheduler.soft_think_tokens
        floor = own.scheduler.min_think_tokens if force.reason in ENTROPY_RULES else floors[force.reason]
        floor = max(floor, info.min_think_tokens)
        told = int(session.table.think_tokens[force.slot])
        if force.reason == agent_pb2.FORCE_REASON_LOOP:
            period, repeated = int(session.table.loop_period[force.slot]), int(session.table.loop_tokens[force.slot])
            assert own.loop.enabled, f"{info.request_id} loops, and nothing is to be decided from it"
            assert force.shadow == own.loop.shadow
            assert repeated >= max(own.loop.min_tokens, own.loop.min_rounds * period), f"{repeated} tokens are no loop"
            assert repeated <= told, f"{info.request_id} repeats {repeated} of {told} thinking tokens"
        gives_up = force.reason == agent_pb2.FORCE_REASON_GIVE_UP
        if force.reason in ENTROPY_RULES:
            shadowed = own.entropy.shadow or bool(session.table.control[force.slot])
            assert force.shadow == (shadowed or (gives_up and own.entropy.give_up_shadow)), force.reason
        if gives_up:
            probed = int(session.table.eat_think_tokens[force.slot])
            assert 0 < own.entropy.give_up_tokens <= probed, f"{info.request_id} is given up at {probed} tokens"
        assert told >= floor, f"thinking of {info.request_id} is ended at {told} tokens, before its floor of {floor}"

    def _within_policy(self, session: Session, cap: agent_pb2.ThinkCap) -> None:
        info, own = session.table.info[cap.slot], self._policy_of(session, cap.slot).scheduler
        whole = self._policy_of(session, cap.slot, budgeted=False).scheduler.max_think_tokens
        assert info is not None
        if session.table.control[cap.slot]:
            # Nothing but the client's own cap shortens the control group.
            whole = max(whole, UNSHORTENED_CAP)
            own = own.model_copy(update={"max_think_tokens": whole})
        if cap.HasField("max_think_tokens"):
            extensions = (0, own.empty_answer_extension_tokens)
            # Neither a budget nor pressure lowers the cap below the request's own floor.
            allowed = {min(whole + e, max(own.max_think_tokens + e, info.min_think_tokens)) for e in extensions}
            if info.max_think_tokens is not None:
                allowed = {min(info.max_think_tokens, tokens) for tokens in allowed}
            told, reserve = cap.max_think_tokens, cap.answer_reserve_tokens
            assert told in allowed, f"{info.request_id} is capped at {told} tokens; the policy says {sorted(allowed)}"
            reserved = own.answer_reserve_tokens if own.answer_reserve_for == "all" or info.chat else 0
            assert reserve == reserved, f"{info.request_id} has a reserve of {reserve} tokens"

    def heard(self, session: Session | None, counters: dict[str, float], message: agent_pb2.ConnectRequest) -> None:
        """Check a message that the control plane is about to receive.

        session: None for a Hello. counters: the stream's counters so far.
        """
        self.note_message("agent", message)
        if session is None:
            return
        given = self.given[session.hello.engine_id]
        given.look(session, message)
        live = {info.request_id for _, info in session.table.requests()}
        if given.free.isdisjoint(live | {request.request_id for request in message.step.opened}):
            for flags in columns_of(message.step.tokens)[0][2].tolist():
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
        if message.HasField("settings_status"):
            given.answer(session, message.settings_status)
        if message.step.HasField("counters"):
            for counter, value in message.step.counters.ListFields():
                before = counters.get(counter.name, 0)
                assert counter.name in GAUGES or value >= before, f"{counter.name} goes from {before} to {value}"
                counters[counter.name] = value

    def knows(self, session: Session) -> None:
        """Check, after a message was received, that no request thinks past the cap that it came with.

        Only the first thinking of a request is checked, and only if a marker alone ends it.
        """
        table, given = session.table, self.given[session.hello.engine_id]
        given.look(session)
        for slot, info in table.requests():
            if info.request_id in given.free:
                continue
            if info.max_think_tokens is not None and not table.ended[slot]:
                thought, key = int(table.think_tokens[slot]), (session.session_id, info.request_id)
                # The allowance covers thinking during a freeze, of which the control plane was not told.
                late = 1 + self.hidden_drafts.get(session.hello.engine_id, 0)
                limit = max(info.max_think_tokens, self.first_seen.setdefault(key, thought) + late)
                assert thought <= limit, f"{info.request_id} thinks on at {thought} tokens, past its own cap"

    def left(self, session: Session) -> None:
        totals = session.totals
        assert not session.open_decisions
        assert sum(totals.decisions.values()) == sum(totals.outcomes.values()), "decisions and outcomes differ"
        assert not totals.unknown_outcomes
        assert totals.unknown_efforts <= totals.requests
