"""A session against an agent that checks every message: order, ids, changes only, one outcome each, and replay."""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from meridian.v1 import agent_pb2, fleet_pb2

from meridian_agent.core.phases import FLAG_SENTENCE
from meridian_agent.link.messages import mergeable
from meridian_agent.link.messages import step_report as merge
from meridian_control.common.enum_names import outcome_name
from meridian_control.common.errors import InvalidRequest
from meridian_control.common.histogram import TIME_BOUNDS_S
from meridian_control.decision_log.journal import Journal
from meridian_control.decision_log.log import DecisionLog
from meridian_control.decisions.dispatch import WARM_STEPS
from meridian_control.decisions.request_table import MAX_SLOTS, MAX_TEXT, THINK
from meridian_control.decisions.token_rows import FLAG_END, FLAG_MARKER, MAX_ROWS_PER_SLOT
from meridian_control.fleet.status_messages import engine_view, request_views
from meridian_control.session import decision_ledger as ledger
from meridian_control.session.counters import Totals
from meridian_control.session.effective_policies import ROOM
from meridian_control.session.merged_steps import MAX_STEPS
from meridian_control.session.session import ACK_INTERVAL_S, Session
from meridian_control.session.think_ends import LONG_ANSWER, MIN_ANSWERS
from tests.fakes.agent import ALL, FakeAgent, Script, hello
from tests.fakes.engine import TEXT
from tests.fakes.tables import policy, tokens

if TYPE_CHECKING:
    from meridian_agent.core.step_record import StepRecord
    from meridian_control.policy.model import Policy

NOW = datetime(2026, 5, 4, 3, 2, 1, tzinfo=UTC)
EARLY = {"min_think_tokens": 0}
CALIBRATED = {
    "shadow": False,
    "ema_alpha": 1.0,
    "eat_warmup_samples": 4,
    "eat_probe_interval_tokens": 2,
    "rpdi_threshold": 0.0,
}


@dataclass
class Stream:
    """A session and a fake agent, connected; `now` moves on only when a test says so."""

    agent: FakeAgent = field(default_factory=FakeAgent)
    capabilities: agent_pb2.Capabilities = field(default_factory=lambda: ALL)
    hello_fields: dict[str, Any] = field(default_factory=dict)
    now: datetime = NOW
    revision: int = 0
    trace: list[tuple[datetime, agent_pb2.ConnectRequest | tuple[int, Policy]]] = field(default_factory=list)
    responses: list[agent_pb2.ConnectResponse] = field(default_factory=list)
    log: DecisionLog = field(default_factory=DecisionLog)

    def __post_init__(self) -> None:
        self.agent.checker.capabilities = self.capabilities
        self.hello = hello(capabilities=self.capabilities, **self.hello_fields)
        journal = Journal(self.log, self.hello.engine_id, self.hello.incarnation, "s", self.now)
        self.session = Session("s", self.hello, self.now, journal)
        self.agent.receive(agent_pb2.ConnectResponse(welcome=agent_pb2.Welcome(session_id="s")))

    def deliver(self, responses: list[agent_pb2.ConnectResponse]) -> None:
        self.responses += responses
        for response in responses:
            self.agent.receive(response)

    def pump(self) -> list[agent_pb2.ConnectResponse]:
        """Exchange messages until both sides have said all; returns what the session said."""
        before = len(self.responses)
        while said := self.agent.heard():
            for message in said:
                self.trace.append((self.now, message))
                self.deliver(self.session.on_message(message, self.now))
        return self.responses[before:]

    def apply(self, new: Policy) -> list[agent_pb2.ConnectResponse]:
        self.revision += 1
        self.trace.append((self.now, (self.revision, new)))
        before = len(self.responses)
        self.deliver(self.session.on_policy(self.revision, new))
        self.pump()
        return self.responses[before:]

    def step(self, count: int = 1, then_ms: float = 5.0) -> agent_pb2.Directives:
        """Engine steps; returns all directives that came, merged."""
        merged = agent_pb2.Directives()
        for _ in range(count):
            self.agent.step()
            self.now += timedelta(milliseconds=then_ms)
            for response in self.pump():
                merged.MergeFrom(response.directives)
        return merged

    def open(self, name: str, think: int = 1000, answer: int = 1000, **fields: Any) -> int:
        entropy = fields.pop("entropy_nats", 0.5)
        return self.agent.open(name, Script(think, answer, entropy), **fields).slot

    def say(self, steps: int = 1, **fields: Any) -> None:
        """A report that the agent did not make, of the steps that come next."""
        step = self.session._ledger.step + steps
        self.session.on_message(step_report(step=step, steps=steps, **fields), self.now)

    def merged(self, records: list[StepRecord]) -> None:
        """One report of steps that the agent has made, at the time of the last one."""
        report = merge(records)
        self.session.on_message(agent_pb2.ConnectRequest(step=report), NOW + timedelta(seconds=records[-1].ended_s))

    def balanced(self) -> bool:
        totals = self.session.totals
        return sum(totals.decisions.values()) == sum(totals.outcomes.values()) + len(self.session.open_decisions)


def stream(first: Policy | None = None, **fields: Any) -> Stream:
    made = Stream(**fields)
    made.apply(first or policy())
    return made


# ------------------------------------------------------------------------------------------------------------ markers


def test_an_engine_without_markers_takes_the_policy_and_is_told_nothing_of_thinking() -> None:
    """Were it told all the same, the agent would refuse it; where it knows them, the same requests get all three."""
    dense = {**CALIBRATED, "shadow": True, "eat_probe_placement": "anywhere"}
    chosen = policy(scheduler={"max_think_tokens": 40, **EARLY}, entropy=dense)
    for unknown in ("", "no parser"):
        made = stream(chosen, hello_fields={"unknown_markers": unknown})
        made.open("a")
        directives = made.step(20)
        kinds = {name for name, count in made.session.totals.decisions.items() if count}
        assert (made.session.acked_revision, made.session.nack_error) == (1, "")
        assert bool(directives.caps) == bool(directives.probes) == (not unknown)
        assert "plan" in kinds
        assert engine_view(made.session, connected=True).unknown_markers == unknown


# ----------------------------------------------------------------------------------------------------------- settings


def test_settings_carry_what_the_agent_must_know() -> None:
    made = Stream()
    marked = {"think_start_token_ids": [4], "think_end_token_ids": [5, 6], "reasoning_parser": "qwen3"}
    marked["supports_think_disable"] = False  # type: ignore[assignment]
    new = policy(
        telemetry={"report_interval_steps": 7},
        fallback={"lease_ms": 1234},
        model={"m": marked, "other": {"reasoning_parser": "wrong"}},
    )
    (response,) = made.session.on_policy(9, new)
    s = response.settings
    assert (s.revision, s.nonce, s.report_interval_steps, s.lease_ms, s.observe_entropy) == (9, 1, 7, 1234, True)
    assert (list(s.think_start_token_ids), list(s.think_end_token_ids)) == ([4], [5, 6])
    assert (s.reasoning_parser, s.supports_think_disable) == ("qwen3", False)


RANKED: dict[str, Any] = {"rank_conditions": [{"max_ranks": [5]}]}
DENSE: dict[str, Any] = {"shadow": True, "eat_probe_interval_tokens": 1}


@pytest.mark.parametrize(
    ("sections", "steps"),
    [
        ({}, 8),
        ({"scheduler": {"strategy": "stock"}}, 8),
        ({"scheduler": {"strategy": "deadline"}}, 1),
        ({"scheduler": {"strategy": "deadline"}, "telemetry": {"report_interval_steps": 5}}, 5),
        ({"scheduler": {"soft_think_tokens": 9}}, 1),
        ({"scheduler": {"soft_think_tokens": 9, "enabled": False}}, 8),
        ({"entropy": {"eat_probe_max_rank": 3}}, 1),
        ({"entropy": RANKED}, 1),
        ({"entropy": RANKED | {"enabled": False}}, 8),
        ({"override": [{"tenant": "t", "entropy": RANKED}]}, 1),
        ({"entropy": DENSE}, 1),
        ({"entropy": DENSE | {"enabled": False}}, 8),
        ({"entropy": DENSE | {"eat_probe_interval_tokens": 8}}, 8),
        ({"entropy": DENSE | {"shadow": False}}, 8),
        ({"entropy": DENSE | {"shadow": False, "eat_hold_ms": 0}}, 1),
        ({"override": [{"tenant": "t", "entropy": DENSE}]}, 1),
    ],
)
def test_how_many_steps_a_report_merges(sections: dict[str, Any], steps: int) -> None:
    """Unless the policy says so, as many as no rule needs one by one."""
    (response,) = Stream().session.on_policy(1, policy(**sections))
    assert response.settings.report_interval_steps == steps


def test_an_engine_that_cannot_force_is_given_no_cap() -> None:
    made = Stream(capabilities=agent_pb2.Capabilities(dispatch=True))
    (response,) = made.session.on_policy(1, policy())
    assert not response.settings.HasField("max_think_tokens")


@pytest.mark.parametrize(
    ("entropy", "can", "observe"), [(True, True, True), (True, False, False), (False, True, False)]
)
def test_entropy_is_observed_where_it_is_wanted_and_can_be(entropy: bool, can: bool, observe: bool) -> None:
    made = Stream(capabilities=agent_pb2.Capabilities(token_entropy=can))
    (response,) = made.session.on_policy(1, policy(entropy={"enabled": entropy}))
    assert response.settings.observe_entropy == observe


def test_nothing_is_decided_before_the_first_policy_is_applied() -> None:
    made = Stream()
    made.open("a")
    assert not made.step(3).ListFields()
    made.agent.refuse_settings = "no such parser"
    made.apply(policy())
    assert not made.step(3).ListFields()
    assert (made.session.totals.nacks, made.session.nack_error) == (1, "no such parser")
    assert made.session.acked_revision == 0
    made.agent.refuse_settings = ""
    directives = made.apply(policy())[-1].directives
    assert [c.slot for c in directives.caps] == [0]
    assert (made.session.acked_revision, made.session.nack_error) == (2, "")


def test_a_refused_policy_leaves_the_last_good_one_in_force() -> None:
    made = stream(policy(scheduler={"max_think_tokens": 600}))
    made.agent.refuse_settings = "unknown marker"
    made.apply(policy(scheduler={"max_think_tokens": 700}))
    made.open("a")
    assert [c.max_think_tokens for c in made.step().caps] == [600]
    assert (made.session.revision, made.session.acked_revision) == (2, 1)
    made.agent.refuse_settings = ""
    caps = made.apply(policy(scheduler={"max_think_tokens": 800}))[-1].directives.caps
    assert [c.max_think_tokens for c in caps] == [800]


def test_only_the_answer_to_the_newest_settings_counts() -> None:
    made = Stream()
    old = made.session.on_policy(1, policy(scheduler={"max_think_tokens": 600}))[0].settings
    new = made.session.on_policy(2, policy(scheduler={"max_think_tokens": 700}))[0].settings
    for nonce, revision in ((old.nonce, 0), (99, 0), (new.nonce, 2)):
        status = agent_pb2.SettingsStatus(nonce=nonce, revision=revision)
        made.session.on_message(agent_pb2.ConnectRequest(settings_status=status), NOW)
        assert made.session.acked_revision == revision
    assert old.nonce != new.nonce
    repeated = agent_pb2.SettingsStatus(nonce=new.nonce, error="too late")
    made.session.on_message(agent_pb2.ConnectRequest(settings_status=repeated), NOW)
    assert (made.session.acked_revision, made.session.nack_error) == (2, "")


# ------------------------------------------------------------------------------------------------------ what is decided


def test_a_request_is_told_what_concerns_it_once() -> None:
    made = stream()
    made.open("a")
    first = made.step()
    assert [(c.slot, c.max_think_tokens, c.shadow) for c in first.caps] == [(0, 32768, False)]
    assert [(t.slot, t.tier, t.shadow) for t in first.tiers] == [(0, agent_pb2.EVICTION_TIER_UNREACHABLE, False)]
    assert (list(first.plan.slot), list(first.plan.rank)) == ([0], [544])
    assert first.step == made.agent.engine.records[-1].step
    asked = made.step(20)
    assert {name.name for name, _ in asked.ListFields()} == {"step"}, "only that the probe's result was heard"


def test_silence_is_broken_now_and_then() -> None:
    """The agent must know that it is heard, or its lease runs out."""
    made = stream()
    made.step()
    made.now += timedelta(seconds=ACK_INTERVAL_S)
    directives = made.step(then_ms=0)
    assert [f.name for f, _ in directives.ListFields()] == ["step"]
    assert not made.step(then_ms=0).ListFields()


def test_a_request_with_a_cap_of_its_own() -> None:
    made = stream(policy(scheduler={"max_think_tokens": 600}))
    made.open("a", own_cap=5)
    made.open("b", own_cap=5000)
    assert [c.max_think_tokens for c in made.step().caps] == [5, 600]


def test_the_hard_cap_ends_thinking_and_is_counted() -> None:
    made = stream(policy(scheduler={"max_think_tokens": 6, "min_think_tokens": 0}))
    made.open("a", answer=2)
    made.step(9)
    assert made.session.totals.ends == {"hard_cap": 1}
    assert made.session.totals.outcomes["applied"] >= 2
    assert not made.session.table.live.any()


def test_what_comes_after_an_end_is_counted() -> None:
    """Forced and natural ends side by side: an answer, none to speak of, thinking taken up again, and no end at all."""
    made = stream(policy(scheduler={"max_think_tokens": 6, "min_think_tokens": 0}))
    made.open("forced", answer=5)
    made.open("forced-empty", answer=1)
    made.open("natural", think=3, answer=5)
    made.open("natural-empty", think=3, answer=1)
    made.step(20)
    assert made.session.totals.answers == {
        "answered_after_forced": 1,
        "empty_after_forced": 1,
        "answered_after_natural": 1,
        "empty_after_natural": 1,
    }
    made.open("again", think=2, answer=9)
    made.step(4)
    slot = made.agent.engine.tracker.by_id["again"].slot
    again = tokens([(slot, THINK, FLAG_MARKER, 1.0), (slot, THINK, 0, 1.0), (slot, THINK, FLAG_MARKER | FLAG_END, 1.0)])
    report = agent_pb2.StepReport(step=1000, steps=1, tokens=again)
    made.session.on_message(agent_pb2.ConnectRequest(step=report), made.now)
    assert made.session.totals.answers["reentry_after_natural"] == 1


def test_long_answers_are_counted_once_it_is_known_what_is_usual() -> None:
    made = stream(policy(scheduler={"max_think_tokens": 6, "min_think_tokens": 0}))
    made.open("too-early", answer=50)
    made.step(60)
    for i in range(MIN_ANSWERS):
        made.open(f"usual-{i}", think=3, answer=5)
    made.step(10)
    made.open("long", answer=LONG_ANSWER * 5 + 1)
    made.open("not-yet", answer=LONG_ANSWER * 5)
    made.step(60)
    answers = made.session.totals.answers
    assert answers == {"answered_after_forced": 2, "answered_after_natural": MIN_ANSWERS, "long_after_forced": 1}


def test_what_measures_entropy_is_shown() -> None:
    said = {"entropy_backend": agent_pb2.ENTROPY_BACKEND_TORCH, "entropy_note": "CuPy is not installed"}
    engine = engine_view(Stream(hello_fields=said).session, connected=True)
    assert (engine.entropy_backend, engine.entropy_note) == tuple(said.values())


def test_latencies_and_thinking_are_counted_per_engine() -> None:
    """What the engine shows and what its totals come to: one interval less than tokens, one start of an answer."""
    made = stream(policy(scheduler=EARLY))
    made.open("a", think=40, answer=11)
    made.step(60, then_ms=20.0)
    engine = engine_view(made.session, connected=True)
    bucket = TIME_BOUNDS_S.index(0.02)
    assert (sum(engine.output_itl.counts), engine.output_itl.counts[bucket]) == (10, 10)
    assert (sum(engine.ttot.counts), engine.ttot.counts[bucket]) == (1, 1)
    assert engine.output_itl.sum == pytest.approx(0.2)
    assert engine.ttot.sum == pytest.approx(0.02)
    assert list(engine.output_itl.bounds) == list(TIME_BOUNDS_S)
    assert (sum(engine.think_tokens.counts), engine.think_tokens.sum) == (1, 40)
    total = Totals()
    for _ in range(2):
        total.add(made.session.totals)
    assert (total.output_itl.counts.sum(), total.ttot.counts.sum(), total.think_tokens.sum) == (20, 2, 80)


def test_thinking_that_was_aborted_or_never_began_is_not_counted() -> None:
    made = stream(policy(scheduler=EARLY))
    made.open("aborted")
    made.step(5)
    made.agent.abort("aborted")
    made.open("none", prompt=(TEXT,), answer=3)
    made.step(5)
    assert made.session.totals.requests == 2
    assert made.session.totals.think_tokens.counts.sum() == 0


# ------------------------------------------------------------------------------------------------------- who gets what

RULES = CALIBRATED | {"eat_warmup_samples": 1, "eat_probe_interval_tokens": 1}
LOW = {"effort": "low", "scheduler": {"max_think_tokens": 7}}
NO_RULES = {"tenant": "careful", "entropy": {"enabled": False}}


def caps_of(made: Stream) -> dict[str, int]:
    table = made.session.table
    return {info.request_id: int(table.max_think_tokens[slot]) for slot, info in table.requests()}


def test_overrides_decide_caps_and_rules_of_the_requests_they_match() -> None:
    made = stream(policy(scheduler=EARLY, entropy=RULES, override=[LOW, NO_RULES]))
    made.open("plain")
    made.open("low", effort="low")
    made.open("careful", tenant="careful")
    forced = {f.slot for f in made.step(3).forces}
    assert caps_of(made) == {"plain": 32768, "low": 7, "careful": 32768}
    names = {slot: info.request_id for slot, info in made.session.table.requests()}
    assert {names[slot] for slot in forced} == {"plain", "low"}
    made.step(20)
    assert set(made.agent.engine.live) == {"plain", "low", "careful"}
    assert "careful" not in {d.request_id for d in made.session.last_decision.values() if d.kind == "force"}


def test_overrides_are_gone_over_again_with_a_new_policy() -> None:
    made = stream(policy(scheduler=EARLY, override=[LOW]))
    made.open("low", effort="low")
    made.step()
    made.apply(policy(scheduler=EARLY, override=[{**LOW, "scheduler": {"max_think_tokens": 9}}]))
    assert caps_of(made) == {"low": 9}
    made.apply(policy(scheduler=EARLY))
    assert caps_of(made) == {"low": 32768}


def test_overrides_of_requests_that_a_snapshot_brings() -> None:
    made = stream(policy(scheduler=EARLY, override=[LOW]))
    made.agent.open("low", Script(1000, 1000), effort="low")
    made.agent.say(snapshot=made.agent.snapshot())
    made.agent.engine.take()
    made.pump()
    made.step()
    assert caps_of(made) == {"low": 7}


def test_engine_labels_choose_overrides() -> None:
    limited = {"engine_labels": {"pool": "batch"}, "scheduler": {"max_think_tokens": 5}}
    for labels, cap in (({"pool": "batch"}, 5), ({"pool": "chat"}, 32768), ({}, 32768)):
        made = stream(policy(scheduler=EARLY, override=[limited]), hello_fields={"labels": labels})
        made.open("a")
        made.step()
        assert caps_of(made) == {"a": cap}


def test_a_requests_own_floor_holds_the_rules_back_but_not_the_cap() -> None:
    made = stream(policy(scheduler={**EARLY, "max_think_tokens": 12}, entropy=RULES))
    made.open("floor", min_think_tokens=8)
    made.open("plain")
    made.open("above-cap", min_think_tokens=500)
    forces: dict[int, int] = {}
    for _ in range(20):
        before = {slot: int(made.session.table.think_tokens[slot]) for slot in range(3)}
        for force in made.step().forces:
            forces[force.slot] = before[force.slot]
    assert forces[1] < 7 <= forces[0]
    assert 2 not in forces
    assert made.session.totals.ends["hard_cap"] == 1


# ------------------------------------------------------------------------------------------------------- empty answers


def test_the_cap_of_a_request_whose_answer_would_be_empty_is_extended_once() -> None:
    limits = {"max_think_tokens": 100, "min_think_tokens": 0, "empty_answer_extension_tokens": 30}
    made = stream(policy(scheduler=limits, entropy={"enabled": False}))
    made.agent.empty_answer = True
    made.open("empty")
    made.open("own", own_cap=90)
    asked = made.step(99)
    assert len(asked.probes) == 2
    assert caps_of(made) == {"empty": 130, "own": 90}
    made.step(60)
    assert made.session.totals.decisions["probe"] == 2
    assert made.session.totals.ends["hard_cap"] == 2
    assert made.balanced()


def test_caps_are_left_alone_when_the_answer_is_not_empty() -> None:
    limits = {"max_think_tokens": 100, "min_think_tokens": 0, "empty_answer_extension_tokens": 30}
    made = stream(policy(scheduler=limits, entropy={"enabled": False}))
    made.open("a")
    made.step(99)
    assert caps_of(made) == {"a": 100}
    made = stream(policy(scheduler={**limits, "empty_answer_extension_tokens": 0}, entropy={"enabled": False}))
    made.agent.empty_answer = True
    made.open("a")
    assert not made.step(99).probes
    assert caps_of(made) == {"a": 100}


def test_no_rule_ends_thinking_into_an_empty_answer() -> None:
    made = stream(policy(scheduler={**EARLY, "empty_answer_extension_tokens": 30}, entropy=RULES))
    made.agent.empty_answer = True
    made.open("a")
    assert not made.step(20).forces
    made.agent.empty_answer = False
    assert made.step(4).forces


# -------------------------------------------------------------------------------------------------------------- hold


@pytest.mark.parametrize(("entropy", "hold_ms"), [({}, 50), ({"eat_hold_ms": 7}, 7), ({"shadow": True}, 0)])
def test_a_probed_request_waits_unless_nothing_is_applied(entropy: dict[str, Any], hold_ms: int) -> None:
    made = stream(policy(scheduler=EARLY, entropy=CALIBRATED | entropy))
    made.open("a")
    (probe,) = made.step().probes
    assert probe.hold_ms == hold_ms


def test_results_of_probes_are_always_answered() -> None:
    made = stream(policy(scheduler=EARLY, entropy=CALIBRATED | {"eat_level_threshold_nats": 0.0}))
    made.open("a")
    made.step(12)
    heard = [m.step.step for _, m in made.trace if isinstance(m, agent_pb2.ConnectRequest) and m.step.probes.slot]
    answered = {r.directives.step for r in made.responses if r.HasField("directives")}
    assert len(heard) > 3
    assert set(heard) <= answered


# -------------------------------------------------------------------------------------------------------------- gate


def test_gated_probes_are_asked_for_where_the_end_marker_is_likely_and_placed_at_once() -> None:
    gate = RULES | {"shadow": True, "eat_probe_max_rank": 5}
    made = stream(policy(scheduler=EARLY, entropy=gate))
    made.open("a")
    assert not made.step(6).probes, "no sentence has ended"
    made.agent.engine.tracker.boundaries = bytes(TEXT) + bytes([FLAG_SENTENCE])
    asked = made.step(3)
    assert {p.placement for p in asked.probes} == {agent_pb2.PLACEMENT_ANYWHERE}
    made.agent.end_rank = 6
    made.step()
    assert not made.step(6).probes, "the end marker is not likely enough"


@pytest.mark.parametrize("shadow", [False, True])
def test_eat_probes_and_ends(shadow: bool) -> None:
    made = stream(policy(scheduler=EARLY, entropy=CALIBRATED | {"shadow": shadow}))
    made.open("a", think=30, answer=1)
    asked = made.step(25)
    assert len(asked.probes) == 4 if not shadow else len(asked.probes) >= 4
    assert [(f.slot, f.reason, f.shadow) for f in asked.forces] == [(0, agent_pb2.FORCE_REASON_EAT, shadow)]
    assert made.session.totals.ends == {"eat_shadowed" if shadow else "eat": 1}
    assert ("a" in made.agent.engine.live) == shadow


def test_rpdi_ends_and_its_window_follows_the_policy() -> None:
    rules = {"shadow": False, "rpdi_threshold": 1.5, "rpdi_window_tokens": 3, "eat_probe_interval_tokens": 10_000}
    made = stream(policy(scheduler=EARLY, entropy=rules))
    made.open("a")
    made.step(9)
    made.agent.scripts["a"].entropy_nats = 2.0
    assert not made.step(3).forces, "no sentence has ended"
    made.agent.engine.tracker.boundaries = bytes(TEXT) + bytes([FLAG_SENTENCE])
    assert [f.reason for f in made.step(2).forces] == [agent_pb2.FORCE_REASON_RPDI]
    assert made.session.table is not None
    made.apply(policy(scheduler=EARLY, entropy=rules | {"rpdi_window_tokens": 30}))
    assert made.session.table.window.shape[1] == 30


def test_thinking_is_limited_and_released() -> None:
    made = stream(policy(scheduler={"output_tpot_budget_ms": 20.0, "think_tpot_budget_ms": 80.0}))
    made.open("answer", prompt=[1, 2])
    for name in "abcd":
        made.open(name)
    made.agent.step_cost_ms = 4.0, 2.0
    assert not made.step(WARM_STEPS).plan.HasField("think_per_step")
    made.agent.step_cost_ms = 10.0, 4.0
    for name in "efg":
        made.open(name)
        made.step(10)
    plan = made.agent.checker.plan
    assert plan is not None
    assert 1 <= plan[0] <= 4, "7 thinking and 1 answering take 42 ms, twice the answers' budget"
    assert plan[1] >= 1
    made.agent.step_cost_ms = 1.0, 0.1
    made.step(400)
    plan = made.agent.checker.plan
    assert plan is not None
    assert plan[:2] == (None, 0)


@pytest.mark.parametrize("strategy", ["output_first", "deadline", "reasoning_first", "stock"])
def test_strategies_change_live(strategy: str) -> None:
    made = stream()
    made.open("a")
    made.open("b", prompt=[1, 2])
    made.step(3)
    made.apply(policy(scheduler={"strategy": strategy}))
    made.step()
    plan = made.agent.checker.plan
    assert plan is not None
    assert plan[4] is (strategy == "stock")
    assert made.session.totals.decisions["plan"] > 1
    a, b = (made.session.table.rank[slot] for slot in range(2))
    assert {"output_first": a > b, "deadline": a > b, "reasoning_first": a < b, "stock": True}[strategy]


def test_admission_is_held_while_an_answer_waits_for_memory() -> None:
    made = stream(hello_fields={"num_blocks": 1})
    made.open("answer", prompt=[1, 2])
    made.open("thought", prompt=[*range(40, 50), 1])
    assert not made.step(2).plan.hold_admission
    made.agent.preempt("answer")
    assert made.step().plan.hold_admission
    made.agent.preempt("answer", waits=False)
    made.step()
    assert made.agent.checker.plan is not None
    assert made.agent.checker.plan[2] is False


def test_a_shadowed_memory_policy_does_not_hold_admission() -> None:
    made = stream(policy(kv_memory={"shadow": True}), hello_fields={"num_blocks": 1})
    made.open("answer", prompt=[1, 2])
    made.open("thought", prompt=[*range(40, 50), 1])
    assert [t.shadow for t in made.step().tiers] == [True]
    made.agent.preempt("answer")
    assert not made.step(3).plan.hold_admission


CAPABILITIES = ("force_end", "eat_probe", "dispatch", "reclaim", "template_strips_think")


@pytest.mark.parametrize("missing", CAPABILITIES)
def test_what_an_engine_cannot_do_is_never_asked(missing: str) -> None:
    can = agent_pb2.Capabilities(**{name: name != missing for name in CAPABILITIES})
    # In force, what it cannot do would have the policy refused.
    entropy = CALIBRATED | {"shadow": missing in {"force_end", "eat_probe"}}
    made = stream(policy(scheduler=EARLY, entropy=entropy), capabilities=can)
    made.open("a")
    asked = made.step(20)
    kinds = {f.name for f, _ in asked.ListFields()} - {"step"}
    never = {"force_end": {"caps", "forces"}, "eat_probe": {"probes", "forces"}, "dispatch": {"plan"}}
    assert kinds == {"caps", "forces", "plan", "tiers", "probes"} - never.get(missing, {"tiers"})


def test_a_faulted_agent_is_left_alone() -> None:
    made = stream(hello_fields={"fault": "before_schedule: KeyError: 3"})
    made.open("a")
    assert not made.step(5).ListFields()
    assert engine_view(made.session, connected=True).fault == "before_schedule: KeyError: 3"


# ---------------------------------------------------------------------------------------------------- policy changes


def test_from_shadow_to_enforced() -> None:
    shadow = {"max_think_tokens": 6, "min_think_tokens": 0, "shadow": True}
    entropy = CALIBRATED | {"shadow": True}
    made = stream(policy(scheduler=shadow, entropy=entropy, kv_memory={"shadow": True}))
    made.open("a", answer=1)
    directives = made.step()
    assert [(c.shadow, t.shadow) for c, t in zip(directives.caps, directives.tiers, strict=True)] == [(True, True)]
    assert directives.plan.shadow
    made.step(20)
    assert made.session.totals.ends == {"hard_cap_shadowed": 1, "eat_shadowed": 1}
    enforced = made.apply(policy(scheduler=shadow | {"shadow": False}, entropy=CALIBRATED))[-1].directives
    assert [(c.max_think_tokens, c.shadow) for c in enforced.caps] == [(6, False)]
    assert [f.shadow for f in enforced.forces] == [False], "what was only shadowed is due now"
    assert [t.shadow for t in enforced.tiers] == [False]
    assert (enforced.plan.shadow, list(enforced.plan.slot)) == (False, [0])
    made.step(3)
    assert "a" not in made.agent.engine.live
    made.step()
    assert not made.session.open_decisions
    assert made.balanced()


def test_a_scheduler_that_is_switched_off_lifts_caps_and_goes_back_to_stock() -> None:
    made = stream()
    made.open("a")
    made.open("b", own_cap=4000)
    made.step(2)
    off = policy(scheduler={"enabled": False})
    directives = made.apply(off)[-1].directives
    assert [(c.slot, c.HasField("max_think_tokens")) for c in directives.caps] == [(0, False), (1, False)]
    assert directives.plan.stock
    made.open("c")
    assert not made.step(3).caps
    assert made.agent.engine.directives.active_plan() is None
    again = made.apply(policy())[-1].directives
    assert [c.slot for c in again.caps] == [0, 1, 2]
    assert (again.plan.stock, list(again.plan.slot)) == (False, [0, 1, 2])
    made.step()
    assert made.agent.engine.directives.active_plan() is not None


def test_a_scheduler_that_was_never_on() -> None:
    made = stream(policy(scheduler={"enabled": False}))
    made.open("a")
    assert not made.step(3).caps
    assert made.agent.checker.plan == (None, 0, False, False, True)


def test_memory_that_is_switched_off_takes_tiers_back() -> None:
    made = stream()
    made.open("a", think=3)
    made.step(8)
    made.open("b")
    made.step()
    off = policy(kv_memory={"enabled": False})
    tiers = made.apply(off)[-1].directives.tiers
    assert [(t.slot, t.tier) for t in tiers] == [
        (0, agent_pb2.EVICTION_TIER_REUSABLE),
        (1, agent_pb2.EVICTION_TIER_REUSABLE),
    ]
    made.open("c")
    assert not made.step(2).tiers
    assert not made.apply(off)[-1].directives.tiers
    assert [t.slot for t in made.apply(policy())[-1].directives.tiers] == [1, 2]


def test_the_same_policy_again_repeats_only_what_depends_on_the_policy() -> None:
    made = stream()
    made.open("a")
    made.step()
    directives = made.apply(policy())[-1].directives
    assert not directives.caps
    assert not directives.forces
    assert list(directives.plan.slot) == [0]


# ----------------------------------------------------------------------------------------------- snapshots and targets


def test_a_snapshot_replaces_the_table() -> None:
    made = stream(policy(scheduler={"max_think_tokens": 900}))
    made.open("a")
    made.open("b", answer=1, prompt=[1, 2])
    made.step(3)
    assert set(made.agent.engine.live) == {"a"}
    made.agent.say(snapshot=made.agent.snapshot())
    (response,) = made.pump()
    assert [(c.slot, c.max_think_tokens) for c in response.directives.caps] == [(0, 900)]
    assert [r.request_id for r in request_views(made.session)] == ["a"]
    assert request_views(made.session)[0].think_tokens == 3
    assert response.directives.step == made.agent.engine.step
    made.step()
    assert made.balanced()


def test_an_end_under_way_while_the_table_is_told_anew_is_still_the_rules() -> None:
    made = stream(policy(scheduler=EARLY, entropy=CALIBRATED))
    made.open("a")
    while not made.step().forces:
        pass
    made.agent.say(snapshot=made.agent.snapshot())
    made.pump()
    made.step(20)
    assert made.session.totals.ends == {"eat": 1}
    assert made.session.totals.decisions["force/eat"] == 1


def test_a_snapshot_before_the_first_policy() -> None:
    """Decisions are aimed at the step of what they were taken from, or the agent takes them for old ones."""
    made = Stream()
    made.agent.heard()
    made.agent.engine.step = 70
    made.open("a")
    snapshot = made.agent.snapshot()
    assert snapshot.step == 70
    made.agent.say(snapshot=snapshot)
    made.agent.engine.tracker.take_record()
    directives = made.apply(policy())[-1].directives
    assert (directives.step, [c.slot for c in directives.caps]) == (70, [0])


def test_what_was_decided_for_another_request_is_not_shown() -> None:
    made = stream()
    made.open("a")
    made.step()
    snapshot = agent_pb2.Snapshot(step=9, requests=[agent_pb2.RequestOpened(slot=0, request_id="b")])
    (response,) = made.session.on_message(agent_pb2.ConnectRequest(snapshot=snapshot), NOW)
    (view,) = request_views(made.session)
    assert (view.request_id, view.last_decision.decision_id) == ("b", response.directives.caps[0].decision_id)
    faulted = Session("s", hello(fault="x"), NOW)
    faulted.on_message(agent_pb2.ConnectRequest(snapshot=snapshot), NOW)
    assert not request_views(faulted)[0].HasField("last_decision")


def test_a_slot_that_is_used_again_shows_no_old_decision() -> None:
    nothing = {"enabled": False}
    made = stream()
    made.open("a")
    made.step()
    made.apply(policy(scheduler=nothing, entropy=nothing, kv_memory=nothing))
    made.agent.abort("a")
    made.step()
    made.open("b")
    made.step()
    (view,) = request_views(made.session)
    assert (view.request_id, view.slot, view.HasField("last_decision")) == ("b", 0, False)


def step_report(**fields: Any) -> agent_pb2.ConnectRequest:
    return agent_pb2.ConnectRequest(step=agent_pb2.StepReport(**{"step": 1, "steps": 1, **fields}))


def test_probe_results_of_a_request_that_is_gone_are_not_the_next_ones() -> None:
    made = stream(policy(scheduler=EARLY, entropy=CALIBRATED))
    made.open("a")
    (probe,) = made.step().probes
    assert made.session.table is not None
    opened = [agent_pb2.RequestOpened(slot=probe.slot, request_id="b", phase=agent_pb2.PHASE_THINK)]
    made.session.on_message(step_report(closed=[{"slot": probe.slot}]), NOW)
    made.session.on_message(step_report(opened=opened), NOW)
    made.session.table.probe_open[probe.slot] = True
    probes = agent_pb2.ProbeColumns(
        decision_id=[probe.decision_id], slot=[probe.slot], think_tokens=[1], eat_nats=[0.5], cost_tokens=[1]
    )
    outcomes = [agent_pb2.DecisionOutcome(decision_id=probe.decision_id, outcome=agent_pb2.OUTCOME_APPLIED)]
    made.session.on_message(step_report(probes=probes, outcomes=outcomes), NOW)
    assert made.session.table.eat_count[probe.slot] == 0
    assert made.session.table.probe_open[probe.slot]


def test_a_refused_probe_is_asked_for_again_an_interval_later() -> None:
    made = stream(policy(scheduler=EARLY, entropy=CALIBRATED | {"eat_probe_interval_tokens": 4, "shadow": True}))
    made.open("a")
    made.agent.eat_nats = math.nan
    asked = [bool(made.step().probes) for _ in range(13)]
    assert asked == [at % 4 == 0 for at in range(13)]


def test_outcomes_of_decisions_that_were_never_made() -> None:
    made = stream()
    made.session.on_message(step_report(outcomes=[{"decision_id": 999, "outcome": 1}]), NOW)
    assert made.session.totals.unknown_outcomes == 1
    assert not made.session.totals.outcomes


def test_a_report_of_no_steps_carries_outcomes_only() -> None:
    made = Stream()
    made.apply(policy())
    made.session.on_message(step_report(outcomes=[{"decision_id": 1, "outcome": 1}], steps=0, step=0), NOW)
    assert not made.session.open_decisions
    assert made.session.last_report is None


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        (
            agent_pb2.ConnectRequest(hello=hello()),
            "message must be a report, a snapshot or a settings status; got hello",
        ),
        (agent_pb2.ConnectRequest(), "message must be a report, a snapshot or a settings status; got None"),
        (step_report(opened=[{"slot": MAX_SLOTS}]), f"step slot must be below {MAX_SLOTS}; got {MAX_SLOTS}"),
        (
            agent_pb2.ConnectRequest(snapshot=agent_pb2.Snapshot(requests=[agent_pb2.RequestOpened(slot=2**32 - 1)])),
            f"snapshot slot must be below {MAX_SLOTS}",
        ),
        (step_report(opened=[{}] * (MAX_SLOTS + 1)), f"step opened must have at most {MAX_SLOTS} entries; got 65537"),
        (step_report(closed=[{}] * (MAX_SLOTS + 1)), f"step closed must have at most {MAX_SLOTS} entries; got 65537"),
        (step_report(resumed=[0] * (MAX_SLOTS + 1)), f"step resumed must have at most {MAX_SLOTS} entries; got 65537"),
        (
            agent_pb2.ConnectRequest(
                snapshot=agent_pb2.Snapshot(requests=[agent_pb2.RequestOpened()] * (MAX_SLOTS + 1))
            ),
            f"snapshot requests must have at most {MAX_SLOTS} entries; got 65537",
        ),
        (step_report(tokens=agent_pb2.TokenColumns(slot=[0])), "step token columns must have one length"),
        (step_report(probes=agent_pb2.ProbeColumns(slot=[0])), "step probe columns must have one length"),
        (
            step_report(opened=[{"slot": 0, "think_tokens": 2**32 - 1}]),
            "step think_tokens must be at most 2147483647; got 4294967295",
        ),
        (
            step_report(opened=[{"slot": 0, "request_id": "x" * 2000}]),
            "step request_id must have at most 1024 characters; got 2000",
        ),
        (
            step_report(opened=[{"slot": 0, "traceparent": "x" * 2000}]),
            "step traceparent must have at most 1024 characters; got 2000",
        ),
        (
            step_report(opened=[{"slot": 0}], tokens=tokens([(0, THINK, 0, 0.0)] * (MAX_ROWS_PER_SLOT + 1))),
            "step a slot must have at most 16384 rows in a report; got 16385",
        ),
    ],
)
def test_broken_messages(message: agent_pb2.ConnectRequest, complaint: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{complaint}"):
        stream().session.on_message(message, NOW)


def test_slots_nobody_lives_in_are_no_error() -> None:
    made = stream()
    far = 2**32 - 1
    made.session.on_message(step_report(preempted=[far, 7], resumed=[far], closed=[{"slot": far}, {"slot": 3}]), NOW)
    assert request_views(made.session) == []


def test_a_step_time_that_makes_no_sense_teaches_nothing() -> None:
    made = stream(policy(scheduler={"output_tpot_budget_ms": 1.0}))
    made.open("a", think=0)
    made.open("b")
    for took_ms in (math.nan, math.inf, -5.0, 3e38):
        made.agent.step_cost_ms = took_ms, 0.0
        made.step(WARM_STEPS)
    assert made.session._decider.cost.steps == 0


def test_the_cost_of_a_step_is_learnt_from_merged_reports_too() -> None:
    alone, merged = stream(policy()), stream(policy())
    took_ms, prefill_tokens = [10.0, 40.0, 11.0], [0, 300, 2]
    rows = [[(0, THINK, 0, 1.0)], [(0, THINK, 0, 1.0)], [(0, THINK, 0, 1.0), (1, THINK, 0, 1.0)]]
    for made in (alone, merged):
        made.open("a", think=0)
        made.open("b", think=0)
        made.step()
    for kept, step_ms, prompt in zip(rows, took_ms, prefill_tokens, strict=True):
        alone.say(tokens=tokens(kept), step_time_ms=step_ms, prefill_tokens=prompt)
    columns = agent_pb2.StepColumns(
        rows=[1, 1, 2], step_time_ms=took_ms, prefill_tokens=prefill_tokens, age_ms=[51.0, 11.0, 0.0]
    )
    merged.say(
        3, tokens=tokens([row for kept in rows for row in kept]), step_time_ms=11.0, prefill_tokens=2, merged=columns
    )
    assert (costs := merged.session._decider.cost).steps == 4
    assert costs.coefficients == alone.session._decider.cost.coefficients
    # Of an agent that does not tell them apart nothing is known but their number.
    merged.say(2, tokens=tokens(rows[2]), step_time_ms=11.0)
    assert costs.steps == 4


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"rows": [1, 1]}, "columns of merged steps must have one entry for each of 3; got [2, 3, 3, 3]"),
        ({"rows": [1, 1, 1]}, "merged steps must have all of the report's 4 rows; got 3"),
        ({"age_ms": [1.0, -1.0, 0.0]}, "age_ms must be in [0, 86400000]; got -1.0"),
        ({"age_ms": [math.nan, 1.0, 0.0]}, "age_ms must be in [0, 86400000]; got nan"),
        ({"age_ms": [1e9, 1.0, 0.0]}, "age_ms must be in [0, 86400000]; got 1000000000.0"),
    ],
)
def test_merged_steps_that_do_not_fit_are_refused(wrong: dict[str, Any], error: str) -> None:
    made = stream(policy())
    made.open("a", think=0)
    columns: dict[str, Any] = {
        "rows": [1, 1, 2],
        "step_time_ms": [1.0] * 3,
        "prefill_tokens": [0] * 3,
        "age_ms": [2.0, 1.0, 0.0],
    }
    merged = agent_pb2.StepColumns(**(columns | wrong))
    with pytest.raises(InvalidRequest, match=re.escape(error)):
        made.say(3, tokens=tokens([(0, THINK, 0, 1.0)] * 4), merged=merged)


def test_too_many_merged_steps_are_refused_in_few_words() -> None:
    for steps, error in ((MAX_STEPS, "age_ms must be in"), (MAX_STEPS + 1, f"at most {MAX_STEPS} steps; got 4097")):
        columns: dict[str, Any] = {
            "rows": [0],
            "step_time_ms": [1.0],
            "prefill_tokens": [1],
            "age_ms": [math.nan],
        }
        merged = agent_pb2.StepColumns(**{name: value * steps for name, value in columns.items()})
        with pytest.raises(InvalidRequest, match=error) as raised:
            stream().say(steps, merged=merged)
        assert len(str(raised.value)) < 100


def test_of_what_an_agent_says_at_length_only_the_beginning_is_kept() -> None:
    made = stream()
    made.open("a")
    made.step()
    outcomes = [{"decision_id": made_id, "outcome": 6, "detail": "x" * 9999} for made_id in made.session.open_decisions]
    made.say(outcomes=outcomes)
    life = made.log.find("a", "")
    assert life is not None
    assert {len(event.detail) for event in life.in_order()} == {0, MAX_TEXT}
    made.agent.refuse_settings = "y" * 9999
    made.apply(policy())
    assert made.session.nack_error == "y" * MAX_TEXT


@pytest.mark.parametrize("kind", ["step", "snapshot", "freeze_status"])
def test_an_agent_that_settles_nothing_is_ended(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(ledger, "MAX_OPEN_DECISIONS", 4)
    made = stream()
    opened = [agent_pb2.RequestOpened(slot=slot, request_id=str(slot)) for slot in range(9)]
    again = {
        "step": step_report(),
        "snapshot": agent_pb2.ConnectRequest(snapshot=agent_pb2.Snapshot(requests=opened)),
        "freeze_status": agent_pb2.ConnectRequest(freeze_status=agent_pb2.FreezeStatus()),
    }
    made.session.on_message(step_report(opened=opened), NOW)
    with pytest.raises(InvalidRequest, match=rf"{kind} leaves .* decisions without an outcome; at most 4 may be"):
        made.session.on_message(again[kind], NOW)


def test_a_wall_clock_that_was_set_back_silences_nobody() -> None:
    made = stream()
    made.step()
    made.now -= timedelta(hours=1)
    made.agent.step()
    assert [r.WhichOneof("message") for r in made.pump()] == ["directives"]


def test_an_engine_that_says_too_much_of_itself() -> None:
    with pytest.raises(InvalidRequest, match="hello must be at most 65536 bytes; got 70"):
        Session("s", hello(fault="x" * 70_000), NOW)


def test_an_engine_without_a_name() -> None:
    with pytest.raises(InvalidRequest, match="engine_id must not be empty"):
        Session("s", hello(""), NOW)


# ------------------------------------------------------------------------------------------------------------- views


def test_what_is_shown() -> None:
    made = stream(policy(scheduler={"max_think_tokens": 900}))
    made.open("a", think=2, entropy_nats=0.25)
    made.open("b")
    made.agent.preempt("b")
    made.step(5)
    engine = engine_view(made.session, connected=True)
    assert (engine.engine_id, engine.model, engine.state) == ("engine", "m", fleet_pb2.CONNECTION_STATE_CONNECTED)
    assert (engine.revision, engine.acked_revision, engine.thinking, engine.answering) == (1, 1, 0, 1)
    assert (engine.step, engine.running, engine.token_events) == (5, 2, 5)
    assert engine.decisions == made.session.totals.decisions
    assert engine.open_decisions == len(made.session.open_decisions)
    assert engine.connect_time.ToDatetime(UTC) == NOW
    a, b = request_views(made.session)
    assert (a.request_id, a.phase, a.think_tokens, a.output_tokens) == ("a", agent_pb2.PHASE_OUTPUT, 2, 2)
    assert (a.entropy_nats, a.end_rank, a.rank, a.max_think_tokens) == (0.25, 1, 0, 900)
    assert (a.tenant, a.slo_class, a.preempted, b.preempted) == ("tenant", "slo", False, True)
    assert math.isnan(b.rpdi)
    assert a.last_decision.kind in {"cap", "tier"}


# ------------------------------------------------------------------------------------------------------ all together


def test_close_settles_what_is_open() -> None:
    made = stream()
    made.open("a")
    made.step()
    assert made.session.open_decisions
    opened = [d.decision_id for d in made.session.open_decisions.values()]
    made.session.close(made.now)
    totals = made.session.totals
    assert not made.session.open_decisions
    assert totals.outcomes["agent_off"] == len(opened)
    assert sum(totals.outcomes.values()) == sum(totals.decisions.values())


def busy(seed: int) -> Stream:
    """Some hundred steps in which everything happens: arrivals, aborts, preemptions, policies, lost reports."""
    rng = random.Random(seed)
    made = stream(policy(scheduler={"max_think_tokens": 40, "min_think_tokens": 0}, entropy=CALIBRATED))
    policies = [
        policy(),
        policy(scheduler={"max_think_tokens": 12, "min_think_tokens": 0}, entropy=CALIBRATED),
        policy(scheduler={"max_think_tokens": 12, "min_think_tokens": 3, "shadow": True}, kv_memory={"shadow": True}),
        policy(scheduler={"enabled": False}, entropy={"enabled": False}, kv_memory={"enabled": False}),
    ]
    for number in range(150):
        live = list(made.agent.engine.live)
        if rng.random() < 0.5 and len(live) < 8:
            prompt = rng.choice([[1], [1, 2], [40]])
            think, answer = rng.randrange(25), 1 + rng.randrange(10)
            made.open(f"r{number}", think, answer, prompt=prompt, own_cap=rng.choice([None, None, 0, 7]))
        if live and rng.random() < 0.05:
            made.agent.abort(rng.choice(live))
        elif live and rng.random() < 0.3:
            name = rng.choice(live)
            if made.agent.engine.live[name].preempted or rng.random() < 0.3:
                made.agent.preempt(name, waits=not made.agent.engine.live[name].preempted)
        if number > 50 and rng.random() < 0.08:
            made.agent.refuse_settings = rng.choice(["", "", "bad"])
            made.apply(rng.choice(policies))
        made.agent.step_cost_ms = rng.choice([(5.0, 0.0), (10.0, 8.0)])
        made.agent.eat_nats = rng.choice([0.01, 1.0])
        made.step(then_ms=rng.choice([5, 400]))
        assert made.balanced()
    return made


@pytest.mark.parametrize("seed", range(8))
def test_every_decision_has_one_outcome(seed: int) -> None:
    made = busy(seed)
    for name in list(made.agent.engine.live):
        made.agent.abort(name)
    made.step(2)
    assert made.session.open_decisions == {}
    assert made.session.totals.unknown_outcomes == 0
    counted = Counter(outcome_name(outcomes[0]) for outcomes in made.agent.engine.outcomes.values())
    assert made.session.totals.outcomes == counted
    assert all(len(outcomes) == 1 for outcomes in made.agent.engine.outcomes.values())
    assert request_views(made.session) == []
    kinds = Counter(made.agent.checker.kinds.values())
    decided = Counter(kind.split("/")[0] for kind in made.session.totals.decisions.elements())
    assert kinds == decided
    assert set(kinds) == {"cap", "force", "plan", "tier", "probe"}


@pytest.mark.parametrize("seed", range(3))
def test_both_sides_count_alike(seed: int) -> None:
    made = busy(seed)
    seen = {r.request_id: (r.slot, int(r.phase), r.think_tokens, r.output_tokens) for r in request_views(made.session)}
    assert seen == {
        name: (tr.slot, int(tr.state.phase), tr.state.think_tokens, tr.state.output_tokens)
        for name, tr in made.agent.engine.live.items()
    }


@pytest.mark.parametrize("seed", range(3))
def test_a_recorded_stream_replays_exactly(seed: int) -> None:
    recorded = busy(seed)
    session = Session("s", agent_pb2.Hello.FromString(recorded.hello.SerializeToString()), NOW)
    replayed = []
    for now, message in recorded.trace:
        if isinstance(message, tuple):
            replayed += session.on_policy(*message)
        else:
            copy = agent_pb2.ConnectRequest.FromString(message.SerializeToString())
            replayed += session.on_message(copy, now)
    assert [r.SerializeToString() for r in replayed] == [r.SerializeToString() for r in recorded.responses]
    assert len(replayed) > 50


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.integers(2, 8))
def test_merged_reports_lead_to_the_same_table(thinks: list[int], interval: int) -> None:
    """A slow link merges steps; what the control plane knows is the same in the end."""
    seen = []
    for most in (1, interval):
        made = Stream()
        made.pump()
        batch: list[StepRecord] = []
        for number, think in enumerate(thinks):
            made.open(f"r{number}", think, 2)
            record = made.agent.step()
            record.ended_s = 0.0077 * number
            if batch and (len(batch) == most or not mergeable(batch, record)):
                made.merged(batch)
                batch = []
            batch.append(record)
        made.merged(batch)
        totals = made.session.totals
        counted = totals.output_itl.counts.tolist(), totals.ttot.counts.tolist(), totals.ends, totals.answers
        seen.append(([r.SerializeToString() for r in request_views(made.session)], counted))
    assert seen[0] == seen[1]


# ---------------------------------------------------------------------------------------------------------- overrides


def test_combinations_of_overrides_are_forgotten_with_their_requests() -> None:
    """Clients choose what overrides match: eight of them make 256 policies."""
    values: dict[str, dict[str, float]] = {
        "scheduler": {
            "min_think_tokens": 1,
            "max_think_tokens": 50,
            "soft_think_tokens": 9,
            "soft_close_rank": 2,
            "empty_answer_extension_tokens": 3,
        },
        "entropy": {"ema_alpha": 0.9, "eat_probe_interval_tokens": 7, "rpdi_threshold": 3.0},
    }
    fields = [(section, name, value) for section, given in values.items() for name, value in given.items()]
    overrides = [
        {"tenant": f"*{letter}*", section: {name: value}}
        for letter, (section, name, value) in zip("abcdefgh", fields, strict=True)
    ]
    made = stream(policy(scheduler=EARLY | {"max_think_tokens": 99}, override=overrides))
    kept = made.open("kept", tenant="b")
    for number in range(256):
        tenant = "".join(letter for bit, letter in enumerate("abcdefgh") if number >> bit & 1)
        slot = made.open(f"r{number}", tenant=tenant)
        made.step()
        groups = made.session._groups
        assert groups.of(slot).scheduler.max_think_tokens == (50 if "b" in tenant else 99)
        assert groups.of(kept).scheduler.max_think_tokens == 50
        assert len(groups._policies) <= ROOM
        made.agent.abort(f"r{number}")
        made.step()
    assert made.session.policy is groups.policy
