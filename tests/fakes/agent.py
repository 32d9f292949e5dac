"""The agent's side of a stream, without gRPC: an engine of made-up requests that checks every message it receives.

The fake checks the contract of `agent.proto`: order, ids, targets, and that the control plane sends only changes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from meridian.v1 import agent_pb2

from meridian_agent.core.live_request import LiveRequest
from meridian_agent.core.step_record import Outcome, StepRecord
from meridian_agent.core.step_signals import StepSignals
from meridian_agent.link.messages import opened_message, step_report
from tests.fakes.engine import END, START, TEXT, FakeEngine

ALL = agent_pb2.Capabilities(
    token_entropy=True,
    force_end=True,
    eat_probe=True,
    dispatch=True,
    reclaim=True,
    template_strips_think=True,
    queueing_time=True,
    preempt=True,
)


def hello(engine_id: str = "engine", **fields: Any) -> agent_pb2.Hello:
    fields = {"capabilities": ALL, "block_size_tokens": 16, "num_blocks": 64, "max_num_seqs": 8, **fields}
    return agent_pb2.Hello(engine_id=engine_id, **{"incarnation": "1", "model": "m", **fields})


@dataclass
class Told:
    """The values that the control plane last sent for one slot."""

    request_id: str
    # Phase after the newest reported token; a rank that was sent before holds for the phase before.
    phase: int = agent_pb2.PHASE_UNSPECIFIED
    cap: tuple[int | None, bool, int] | None = None
    # Whether the agent may have a cap that this stream has not told: from before a snapshot, or from older settings.
    may_have_cap: bool = False
    rank: int | None = None
    tier: tuple[int, bool] | None = None
    # Decision of the forced end that is not in shadow, 0 for none.
    forced: int = 0
    shadowed: set[int] = field(default_factory=set)
    probe: int = 0
    # URL of the engine that the request is to be handed over to; empty if it is to stay.
    hand_over: str = ""


class StreamChecker:
    """Checks each response against the contract and against the agent's earlier reports."""

    def __init__(self, capabilities: agent_pb2.Capabilities = ALL) -> None:
        self.capabilities = capabilities
        self.welcomed = self.acked = False
        self.settings: agent_pb2.Settings | None = None
        self.last_id = 0
        self.kinds: dict[int, str] = {}
        self.told: dict[int, Told] = {}
        self.plan: tuple[Any, ...] | None = None
        # After an acknowledged policy or a snapshot, the control plane may once send values again that it sent before.
        self.anew = True
        # Whether no report has come since the newest settings, so that the next one may open requests of older ones.
        self.acked_unreported = False

    def sent(self, message: agent_pb2.ConnectRequest) -> None:
        """Note a message that the agent sends."""
        if message.HasField("snapshot"):
            self.told = {o.slot: Told(o.request_id, may_have_cap=True) for o in message.snapshot.requests}
            self.anew = True
        if message.HasField("settings_status") and not message.settings_status.error:
            self.acked = self.anew = True
            for told in self.told.values():
                told.forced = 0
                told.shadowed.clear()
        opened_before = self.acked_unreported
        self.acked_unreported = message.HasField("settings_status") or (opened_before and not message.step.steps)
        self.told |= {o.slot: Told(o.request_id, may_have_cap=opened_before) for o in message.step.opened}
        columns = message.step.tokens
        for slot, phase, flags in zip(columns.slot, columns.phase, columns.flags, strict=True):
            told, ended = self.told[slot], flags & agent_pb2.TOKEN_FLAG_END
            if (now := agent_pb2.PHASE_OUTPUT if ended else phase) != told.phase:
                told.phase, told.rank = now, None
        for outcome in message.step.outcomes:
            for told in self.told.values():
                told.probe = 0 if told.probe == outcome.decision_id else told.probe
                if outcome.outcome == agent_pb2.OUTCOME_AGENT_OFF and told.forced == outcome.decision_id:
                    told.forced = 0
        for closed in message.step.closed:
            self.told.pop(closed.slot, None)

    def received(self, response: agent_pb2.ConnectResponse) -> None:
        kind = response.WhichOneof("message")
        assert (kind == "welcome") == (not self.welcomed), f"{kind} as message of a stream that is {self.welcomed}"
        self.welcomed = True
        if kind == "settings":
            previous = self.settings.nonce if self.settings else 0
            assert response.settings.nonce > previous
            self.settings = response.settings
        if kind == "directives":
            assert self.settings is not None, "directives before settings"
            self._directives(response.directives)

    def _directives(self, directives: agent_pb2.Directives) -> None:
        self._ids(directives)
        for cap in directives.caps:
            tokens = cap.max_think_tokens if cap.HasField("max_think_tokens") else None
            now = (tokens, cap.shadow, cap.answer_reserve_tokens)
            told = self.told[cap.slot]
            assert self.capabilities.force_end
            assert told.cap != now, f"cap of slot {cap.slot} told twice"
            may_lift = told.cap is not None or told.may_have_cap
            assert now[0] is not None or may_lift, "a cap lifted that was never set"
            told.cap = now
        for force in directives.forces:
            assert self.capabilities.force_end
            assert force.reason
            told = self.told[force.slot]
            # An operator may end thinking that began anew after a forced end.
            assert not told.forced or force.reason == agent_pb2.FORCE_REASON_OPERATOR, f"slot {force.slot} forced twice"
            # A rule that has fired in shadow may come into force later.
            assert force.reason not in told.shadowed or not force.shadow, f"slot {force.slot} shadowed twice"
            if force.shadow:
                told.shadowed.add(force.reason)
            else:
                told.forced = force.decision_id
        for tier in directives.tiers:
            now_tier = (tier.tier, tier.shadow)
            assert self.anew or self.told[tier.slot].tier != now_tier, f"tier of slot {tier.slot} told twice"
            self.told[tier.slot].tier = now_tier
        for probe in directives.probes:
            assert self.capabilities.eat_probe
            assert not self.told[probe.slot].probe, f"slot {probe.slot} has a probe already"
            self.told[probe.slot].probe = probe.decision_id
        for hand_over in directives.hand_overs:
            told = self.told[hand_over.slot]
            assert self.capabilities.hand_over
            assert told.hand_over != hand_over.url, f"handover of slot {hand_over.slot} told twice"
            assert bool(hand_over.url) == bool(hand_over.ref)
            told.hand_over = hand_over.url
        if directives.HasField("plan"):
            self._plan(directives.plan)
        self.anew = False

    def _ids(self, directives: agent_pb2.Directives) -> None:
        """Check the ids; in one message the kinds are numbered in the order in which they were decided."""
        groups = {
            "cap": [c.decision_id for c in directives.caps],
            "force": [f.decision_id for f in directives.forces],
            "probe": [p.decision_id for p in directives.probes],
            "plan": [directives.plan.decision_id] if directives.HasField("plan") else [],
            "tier": [t.decision_id for t in directives.tiers],
            "hand_over": [h.decision_id for h in directives.hand_overs],
            "preempt": [p.decision_id for p in directives.preempts],
        }
        ids = [i for group in groups.values() for i in group]
        assert self.acked or not ids, "decisions before a policy is applied"
        assert sorted(ids) == list(range(self.last_id + 1, self.last_id + 1 + len(ids))), "ids go up, with no gap"
        for name, group in groups.items():
            assert group == sorted(group)
            self.kinds |= dict.fromkeys(group, name)
        self.last_id = max(ids, default=self.last_id)
        lists: tuple[Iterable[Any], ...] = (
            directives.caps,
            directives.forces,
            directives.tiers,
            directives.probes,
            directives.hand_overs,
            directives.preempts,
        )
        slots = {decision.slot for decisions in lists for decision in decisions}
        assert slots | set(directives.plan.slot) <= set(self.told), "only slots that are live"

    def _plan(self, plan: agent_pb2.DispatchPlan) -> None:
        assert self.capabilities.dispatch
        assert len(plan.slot) == len(plan.rank) == len(set(plan.slot))
        for slot, rank in zip(plan.slot, plan.rank, strict=True):
            assert self.anew or self.told[slot].rank != rank, f"rank of slot {slot} told twice"
            self.told[slot].rank = rank
        share = plan.think_per_step if plan.HasField("think_per_step") else None
        now = (share, plan.max_skip_steps, plan.hold_admission, plan.shadow, plan.stock)
        assert self.anew or plan.slot or now != self.plan, "a plan that changes nothing"
        self.plan = now


@dataclass
class Script:
    """The course of one made-up request.

    eat_nats, trial_answer: the EAT and the likeliest answer token that a probe finds after a number of thinking tokens;
    end_rank: the end marker's rank there; without them all requests of the agent have the same. If thinking is ended
    before `think_tokens`, the request thinks again after `rethink_at` answer tokens, unless that is 0.
    """

    think_tokens: int
    answer_tokens: int
    entropy_nats: float = 0.5
    eat_nats: Callable[[int], float] | None = None
    trial_answer: Callable[[int], int] | None = None
    end_rank: Callable[[int], int] | None = None
    rethink_at: int = 0

    def cut(self, tr: LiveRequest) -> bool:
        return tr.state.think_tokens < self.think_tokens

    def answered(self, tr: LiveRequest) -> bool:
        return tr.state.output_tokens >= self.answer_tokens


class FakeAgent:
    """A FakeEngine on a stream. `outbox` has the messages to send; every response goes through `receive`."""

    def __init__(self, seed: int = 0, capabilities: agent_pb2.Capabilities = ALL) -> None:
        self.rng = random.Random(seed)
        self.engine = FakeEngine()
        self.checker = StreamChecker(capabilities)
        self.scripts: dict[str, Script] = {}
        self.outbox: list[agent_pb2.ConnectRequest] = []
        self.refuse_settings = ""
        self.revision = 0
        self.eat_nats = 0.01
        self.empty_answer = False
        # None for an agent of 0.3, which does not say it.
        self.other_answer: bool | None = True
        # Likeliest token of each probe.
        self.trial_answer = 7
        self.end_rank = 1
        # Milliseconds of a step, and of each sequence in it.
        self.step_cost_ms = 5.0, 0.0
        # Number of requests that may run, while all others wait in the queue; None if each request runs at once, and
        # no queueing time is reported. `now_s` is the engine's clock.
        self.places: int | None = None
        self.now_s = 0.0
        self.say(snapshot=self.snapshot())

    def say(self, **message: Any) -> None:
        request = agent_pb2.ConnectRequest(**message)
        self.checker.sent(request)
        self.outbox.append(request)

    def heard(self) -> list[agent_pb2.ConnectRequest]:
        """Return the waiting messages and empty the outbox."""
        said, self.outbox = self.outbox, []
        return said

    def snapshot(self) -> agent_pb2.Snapshot:
        rows = [opened_message(row) for row in self.engine.tracker.snapshot()]
        return agent_pb2.Snapshot(step=max(1, self.engine.step), requests=rows)

    def receive(self, response: agent_pb2.ConnectResponse) -> None:
        self.checker.received(response)
        kind = response.WhichOneof("message")
        if kind == "settings":
            settings = response.settings
            self.revision = self.revision if self.refuse_settings else settings.revision
            status = agent_pb2.SettingsStatus(nonce=settings.nonce, revision=self.revision, error=self.refuse_settings)
            if settings.HasField("engine_limits"):
                status.engine_limits.CopyFrom(settings.engine_limits)
            self.say(settings_status=status)
        elif kind == "directives":
            self.engine.accept(response.directives)
        elif kind == "freeze":
            self._freeze(response.freeze)

    def _freeze(self, told: agent_pb2.Freeze) -> None:
        """Freeze and confirm it, or thaw, confirm it and send a snapshot."""
        if frozen := told.remaining_ms > 0:
            self.engine.directives.freeze()
        self.say(freeze_status=agent_pb2.FreezeStatus(nonce=told.nonce, frozen=frozen))
        if not frozen:
            self.say(snapshot=self.snapshot())

    def open(self, name: str, script: Script, **fields: Any) -> LiveRequest:
        self.scripts[name] = script
        queued_s = None if self.places is None else self.now_s
        return self.engine.open(name, queued_s=queued_s, **fields)

    def step(self) -> StepRecord:
        """Run one engine step in which every request that is not preempted gets a token."""
        engine = self.engine
        probed = list(engine.directives.probes)
        for _, tr, *_ in probed:
            engine.directives.probes.take(tr)
        engine.schedule()
        for decision_id, tr, *_ in probed:
            if tr.state.phase.name == "THINK":
                script, tokens = self.scripts[tr.info.request_id], tr.state.think_tokens
                eat_nats = script.eat_nats(tokens) if script.eat_nats else self.eat_nats
                same = tr.count_same_answer(script.trial_answer(tokens) if script.trial_answer else self.trial_answer)
                measured = (decision_id, tr.slot, tokens, eat_nats, 3, same, self.empty_answer)
                probes: list[Any] = engine.tracker.record.probes
                probes.append(measured if self.other_answer is None else (*measured, self.other_answer))
                engine.directives.report(decision_id, Outcome.APPLIED)
            else:
                engine.directives.report(decision_id, Outcome.REFUSED, detail="not thinking")
        engine.mask()
        entropies, ranks = [], []
        for name, tr in list(engine.live.items()):
            if tr.preempted or not self._joins(tr):
                continue
            script = self.scripts[name]
            engine.feed(name, engine.sample(name, [self._wanted(tr, script)]))
            entropies.append(script.entropy_nats)
            ranks.append(script.end_rank(tr.state.think_tokens) if script.end_rank else self.end_rank)
            if script.answered(tr):
                engine.finish(name)
        self._measured(entropies, ranks)
        return self._report()

    def _joins(self, tr: LiveRequest) -> bool:
        """Let a request join the step if it has joined one before, or if there is a place."""
        if tr.queued_s is not None:
            running = sum(other.queued_s is None for other in self.engine.live.values())
            if running == self.places:
                return False
            self.engine.join(tr, self.now_s)
        return True

    def _wanted(self, tr: LiveRequest, script: Script) -> int:
        if tr.state.phase.name == "THINK":
            return TEXT if script.cut(tr) else END
        thinks_again = script.rethink_at and script.cut(tr) and tr.state.output_tokens == script.rethink_at
        return START if thinks_again else TEXT

    def _measured(self, entropies: list[float], ranks: list[int]) -> None:
        record = self.engine.tracker.record
        record.rows = list(range(len(record.slots)))
        columns = np.array(entropies, np.float32)
        record.told = StepSignals(None, columns, np.array(ranks, np.int32), -columns, -columns).encode()

    def _report(self) -> StepRecord:
        record = self.engine.tracker.record
        record.step_time_ms = self.step_cost_ms[0] + self.step_cost_ms[1] * len(record.slots)
        record = self.engine.take()
        self.say(step=step_report([record]))
        return record

    def preempt(self, name: str, waits: bool = True) -> None:
        """Preempt a request that then waits, or resume it if `waits` is false."""
        tr = self.engine.live[name]
        tr.preempted = waits
        record = self.engine.tracker.record
        (record.preempted if waits else record.resumed).append(tr.slot)

    def abort(self, name: str) -> None:
        self.engine.abort(name)
