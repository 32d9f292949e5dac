"""A session against an agent that checks every message: settings, decisions, policy changes and views."""

from __future__ import annotations

import math
from datetime import UTC, timedelta
from typing import Any

import pytest
from meridian.v1 import agent_pb2, fleet_pb2

from meridian_agent.core.phases import Markers, begin
from meridian_control.common.decision_words import last_text
from meridian_control.common.histogram import TIME_BOUNDS_S
from meridian_control.common.slices import at_once
from meridian_control.engine.request_table import THINK
from meridian_control.engine.session import ACK_INTERVAL_S
from meridian_control.engine.think_ends import LONG_ANSWER, MIN_ANSWERS
from meridian_control.engine.token_rows import FLAG_END, FLAG_MARKER
from meridian_control.engine.totals import Totals
from meridian_control.fleet.views import each_request_view
from tests.fakes.agent import Script
from tests.fakes.engine import START, TEXT
from tests.fakes.parts import engine_view
from tests.fakes.tables import policy, tokens
from tests.unit.sessions import (
    CALIBRATED,
    EARLY,
    NOW,
    Act,
    Stream,
    aborts,
    freezes,
    opens,
    play,
    reconnected,
    stream,
    thaws,
    totals,
)

OFF = policy(scheduler={"enabled": False})

# ------------------------------------------------------------------------------------------------------------ markers


def test_an_engine_without_markers_takes_the_policy_and_is_told_nothing_of_thinking() -> None:
    """An agent without markers would refuse caps and probes, so the session sends none; with markers the same request
    gets both."""
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
        assert engine_view(made.session).unknown_markers == unknown


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
        ({}, 24),
        ({"scheduler": {"strategy": "stock"}}, 24),
        ({"scheduler": {"strategy": "deadline"}}, 1),
        ({"entropy": {"shadow": False}, "telemetry": {"report_interval_steps": 8}}, 8),
        ({"scheduler": {"soft_think_tokens": 9}}, 1),
        ({"scheduler": {"soft_think_tokens": 9, "enabled": False}}, 24),
        ({"entropy": {"eat_probe_max_rank": 3}}, 1),
        ({"entropy": RANKED}, 1),
        ({"override": [{"tenant": "t", "entropy": RANKED}]}, 1),
        ({"entropy": DENSE}, 1),
        ({"entropy": DENSE | {"shadow": False}}, 8),
        ({"entropy": DENSE | {"shadow": False, "eat_hold_ms": 0}}, 1),
        ({"entropy": {"shadow": False}}, 8),
        ({"override": [{"tenant": "t", "entropy": {"shadow": False}}]}, 8),
        ({"loop": {"shadow": False}}, 8),
        ({"override": [{"tenant": "t", "loop": {"shadow": False}}]}, 8),
        ({"scheduler": {"empty_answer_extension_tokens": 9}}, 8),
        ({"budget": [{"name": "b", "tokens_per_day": 10, "shadow": False}]}, 8),
        ({"pressure": [{"name": "p", "ttot_p99_ms": 10, "shadow": False}]}, 8),
        ({"extension": {"primes": {}}}, 1),
        ({"extension": {"primes": {"shadow": True}}}, 1),
        ({"extension": {"primes": {"enabled": False}}}, 24),
    ],
)
def test_how_many_steps_a_report_merges(sections: dict[str, Any], steps: int) -> None:
    """Unless the policy says otherwise, a report merges as many steps as the policy's rules allow."""
    (response,) = Stream().session.on_policy(1, policy(**sections))
    assert response.settings.report_interval_steps == steps
    chosen = "report_interval_steps" in sections.get("telemetry", {})
    assert response.settings.report_interval_ms == (40 if steps == 8 and not chosen else 0)


@pytest.mark.parametrize(
    ("what", "sections", "merged"),
    [
        ("openings", {}, True),
        ("openings", {"scheduler": {"max_think_tokens": 127}}, False),
        ("openings", {"override": [{"tenant": "t", "entropy": {"enabled": False}}]}, True),
        ("openings", {"override": [{"tenant": "t", "scheduler": {"max_think_tokens": 127}}]}, False),
        ("openings", {"budget": [{"name": "b", "tokens_per_day": 10}]}, False),
        ("openings", {"pressure": [{"name": "p", "ttot_p99_ms": 10}]}, False),
        ("answers", {}, True),
        ("answers", {"scheduler": {"strategy": "stock", "output_tpot_budget_ms": 9}}, True),
        ("answers", {"scheduler": {"enabled": False, "strategy": "reasoning_first"}}, True),
        ("answers", {"scheduler": {"output_tpot_budget_ms": 9}}, False),
        ("answers", {"scheduler": {"strategy": "reasoning_first"}}, False),
        ("loops", {}, True),
        ("loops", {"loop": {"enabled": False, "shadow": False}}, True),
        ("loops", {"loop": {"shadow": False}}, False),
        ("unmeasured", {}, True),
        ("unmeasured", {"entropy": {"enabled": False}}, True),
        ("unmeasured", {"telemetry": {"report_interval_steps": 24}}, False),
        ("unmeasured", {"entropy": {"shadow": False}}, False),
        ("unmeasured", {"scheduler": {"soft_think_tokens": 9}}, False),
        ("unmeasured", {"scheduler": {"output_tpot_budget_ms": 9}}, False),
    ],
)
def test_what_waits_for_further_steps(what: str, sections: dict[str, Any], merged: bool) -> None:
    """Openings, the beginning of an answer, a loop that was found, and steps of which nothing is measured."""
    (response,) = Stream().session.on_policy(1, policy(**sections))
    assert getattr(response.settings, f"merge_{what}") is merged


@pytest.mark.parametrize(
    ("entropy", "can", "observe"), [(True, True, True), (True, False, False), (False, True, False)]
)
def test_an_engine_is_told_what_it_can_do(entropy: bool, can: bool, observe: bool) -> None:
    made = Stream(capabilities=agent_pb2.Capabilities(token_entropy=can, force_end=can))
    (response,) = made.session.on_policy(1, policy(entropy={"enabled": entropy}))
    assert response.settings.observe_entropy == observe
    assert not response.settings.only_sentence_ends
    assert response.settings.HasField("max_think_tokens") == can


RANKS: dict[str, Any] = {"shadow": False, "rpdi_threshold": 0.0, "rank_conditions": [{"max_ranks": [2]}]}
SOFT: dict[str, Any] = {"scheduler": {"soft_think_tokens": 600}, "entropy": {"enabled": False}}


@pytest.mark.parametrize(
    ("sections", "only"),
    [
        ({"entropy": RANKS}, True),
        (SOFT, True),
        ({}, False),
        ({"entropy": RANKS | {"rpdi_threshold": 2.0}}, False),
        # RPDI may be calibrated from a recording of rules in shadow.
        ({"entropy": RANKS | {"shadow": True}}, False),
        ({"entropy": RANKS, "override": [{"tenant": "a", "entropy": {"rpdi_threshold": 2.0}}]}, False),
        ({"entropy": RANKS, "override": [{"tenant": "a", "entropy": {"shadow": True}}]}, False),
    ],
)
def test_all_tokens_are_measured_unless_sentence_ends_are_all_that_is_read(
    sections: dict[str, Any], only: bool
) -> None:
    (response,) = Stream().session.on_policy(1, policy(**sections))
    assert (response.settings.observe_entropy, response.settings.only_sentence_ends) == (True, only)


IN_FORCE: dict[str, Any] = {"shadow": False}


@pytest.mark.parametrize(
    ("sections", "share", "cluster"),
    [
        ({}, 0.05, 64),
        ({"telemetry": {"shadow_sample_ratio": 0.0}}, 0.0, 64),
        ({"telemetry": {"shadow_sample_ratio": 1.0}}, None, 0),
        ({"entropy": {"give_up_shadow": False}}, 0.05, 64),
        ({"entropy": {"self_calibration": True}}, 0.05, 0),
        ({"override": [{"tenant": "a", "entropy": {"self_calibration": True}}]}, 0.05, 0),
        ({"entropy": IN_FORCE}, None, 0),
        ({"override": [{"tenant": "a", "entropy": IN_FORCE}]}, None, 0),
        (SOFT, None, 0),
        ({"scheduler": {"soft_think_tokens": 600, "shadow": True}}, None, 0),
        ({"scheduler": {"max_think_tokens": 600}}, 0.05, 0),
        ({"override": [{"tenant": "a", "scheduler": {"max_think_tokens": 600}}]}, 0.05, 0),
        ({"loop": {"enabled": True, "shadow": False}}, 0.05, 0),
        ({"override": [{"tenant": "a", "loop": IN_FORCE}]}, 0.05, 0),
        ({"budget": [{"name": "b", "tokens_per_day": 1000, "shadow": True}]}, 0.05, 64),
    ],
)
def test_a_sample_is_measured_while_no_rule_in_force_reads_signals(
    sections: dict[str, Any], share: float | None, cluster: int
) -> None:
    """The sample has clusters only while nothing shortens thinking, because the figures of the control group, and
    self-calibration, need independent requests."""
    settings = Stream().session.on_policy(1, policy(**sections))[0].settings
    assert (settings.measured_share if settings.HasField("measured_share") else None) == share
    assert settings.measured_cluster_requests == cluster


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_only_measured_requests_are_probed_in_shadow_and_all_are_in_force(share: float) -> None:
    made = stream(policy(scheduler=EARLY, entropy=CALIBRATED | {"shadow": True}))
    made.agent.engine.tracker.measure(share)
    made.open("a")
    made.step(12)
    assert bool(made.session.totals.decisions["probe"]) == (share > 0)
    made.apply(policy(scheduler=EARLY, entropy=CALIBRATED))
    made.step(12)
    assert made.session.totals.decisions["probe"]


@pytest.mark.parametrize(
    ("match", "share", "steps"),
    [
        ({"traffic": "m#00ff#chat"}, None, 8),
        ({"traffic": "adapter#00ff#chat"}, None, 8),
        ({"traffic": "m#ff00#chat"}, 0.05, 24),
        ({"engine_labels": {"zone": "a"}}, None, 8),
        ({"engine_labels": {"zone": "b"}}, 0.05, 24),
    ],
)
def test_a_rule_costs_only_engines_with_requests_that_it_may_concern(
    match: dict[str, Any], share: float | None, steps: int
) -> None:
    rule = CALIBRATED | {"eat_probe_interval_tokens": 8}
    found = policy(scheduler=EARLY, entropy={**rule, "shadow": True}, override=[{**match, "entropy": rule}])
    made = stream(found, hello_fields={"model_fingerprint": "00ff", "labels": {"zone": "a"}})
    settings = made.responses[0].settings
    assert (settings.measured_share if settings.HasField("measured_share") else None) == share
    assert settings.report_interval_steps == steps
    # An engine that measures a sample has nobody in it at this share.
    made.agent.engine.tracker.measure(0.0)
    made.open("a")
    made.step(30)
    assert bool(made.session.totals.decisions["probe"]) == (share is None), "nobody outside the sample is probed"


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


# ------------------------------------------------------------------------------------------------------------ decisions


def test_a_request_is_told_what_concerns_it_once() -> None:
    made = stream()
    made.open("a")
    first = made.step()
    assert [(c.slot, c.max_think_tokens, c.shadow) for c in first.caps] == [(0, 32768, False)]
    assert [(t.slot, t.tier, t.shadow) for t in first.tiers] == [(0, agent_pb2.EVICTION_TIER_UNREACHABLE, False)]
    assert not first.HasField("plan"), "the agent ranks the request by its phase"
    assert first.step == made.agent.engine.records[-1].step
    asked = made.step(20)
    assert {name.name for name, _ in asked.ListFields()} == {"step"}, "the directives only answer the probe's result"
    again = made.apply(policy())[-1].directives
    assert (len(again.caps), len(again.forces), list(again.plan.slot)) == (0, 0, [0]), "only what depends on the policy"


def test_silence_is_broken_now_and_then() -> None:
    """The session answers now and then, because the agent's lease runs out without answers."""
    made = stream()
    made.step()
    made.now += timedelta(seconds=ACK_INTERVAL_S)
    directives = made.step(then_ms=0)
    assert [f.name for f, _ in directives.ListFields()] == ["step"]
    assert not made.step(then_ms=0).ListFields()


def test_close_settles_what_is_open() -> None:
    made = play(stream(), opens("a"), 1)
    opened = len(made.session.open_decisions)
    at_once(made.session.closing(made.now))
    counted = made.session.totals
    assert (made.session.open_decisions, counted.outcomes["agent_off"]) == ({}, opened)
    assert sum(counted.outcomes.values()) == sum(counted.decisions.values()) > 0


def test_what_comes_after_an_end_is_counted() -> None:
    """Forced and natural ends are counted apart: with an answer, with nearly no answer, and with thinking that begins
    again."""
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


def test_an_answer_that_a_new_stream_finds_under_way_counts_after_its_end() -> None:
    limited = policy(scheduler={"max_think_tokens": 6, "min_think_tokens": 0}, entropy={"enabled": False})
    made = play(
        stream(limited), opens("forced", 50, 20), opens("natural", 3, 20), opens("none", 0, 20, prompt=[TEXT]), 10
    )
    made = play(reconnected(made, limited), 30)
    assert made.session.totals.answers == {"answered_after_forced": 1, "answered_after_natural": 1}


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


def test_what_an_engine_says_of_itself_is_shown() -> None:
    """A prompt counts as unread if its phase is not known although the engine knows its markers."""
    said = {"entropy_backend": agent_pb2.ENTROPY_BACKEND_TORCH, "entropy_note": "CuPy is not installed"}
    for unknown, expected in (("", 1), ("no parser", 0)):
        made = Stream(hello_fields={"reclaim_note": "later prompts do", "unknown_markers": unknown, **said})
        for slot, phase in enumerate((agent_pb2.PHASE_UNSPECIFIED, agent_pb2.PHASE_THINK, agent_pb2.PHASE_PROMPT)):
            made.say(opened=[agent_pb2.RequestOpened(slot=slot, request_id=f"r{slot}", phase=phase)])
        engine = engine_view(made.session)
        assert (engine.reclaim_note, engine.unread_prompts) == ("later prompts do", expected)
        assert (engine.entropy_backend, engine.entropy_note) == tuple(said.values())


def test_latencies_and_thinking_are_counted_per_engine() -> None:
    """The engine's view and the totals agree: ten intervals for eleven answer tokens, and one start of an answer."""
    made = stream(policy(scheduler=EARLY))
    made.open("a", think=40, answer=11)
    made.step(60, then_ms=20.0)
    engine = engine_view(made.session)
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
    play(made, opens("aborted"), 5, aborts("aborted"), opens("none", prompt=(TEXT,), answer=3), 5, totals(requests=3))
    assert made.session.totals.think_tokens.counts.sum() == 1, "no thinking that was aborted or never began"


# A request with this prompt has another rank than the agent gives each request that thinks.
LONG_PROMPT = (*[TEXT] * 127, START)
CAPABILITIES = ("force_end", "eat_probe", "dispatch", "reclaim", "template_strips_think")


@pytest.mark.parametrize("missing", CAPABILITIES)
def test_what_an_engine_cannot_do_is_never_asked(missing: str) -> None:
    can = agent_pb2.Capabilities(**{name: name != missing for name in CAPABILITIES})
    # If the section were in force, the engine would refuse the policy, because it cannot do what the section needs.
    entropy = CALIBRATED | {"shadow": missing in {"force_end", "eat_probe"}}
    made = stream(policy(scheduler=EARLY, entropy=entropy), capabilities=can)
    made.open("a", prompt=LONG_PROMPT)
    asked = made.step(20)
    kinds = {f.name for f, _ in asked.ListFields()} - {"step"}
    never = {"force_end": {"caps", "forces"}, "eat_probe": {"probes", "forces"}, "dispatch": {"plan"}}
    assert kinds == {"caps", "forces", "plan", "tiers", "probes"} - never.get(missing, {"tiers"})


def test_a_faulted_agent_is_left_alone() -> None:
    made = stream(hello_fields={"fault": "before_schedule: KeyError: 3"})
    made.open("a")
    assert not made.step(5).ListFields()
    assert engine_view(made.session).fault == "before_schedule: KeyError: 3"


# ---------------------------------------------------------------------------------------------------- policy changes


def test_from_shadow_to_enforced() -> None:
    shadow = {"max_think_tokens": 6, "min_think_tokens": 0, "shadow": True}
    entropy = CALIBRATED | {"shadow": True}
    made = stream(policy(scheduler=shadow, entropy=entropy, kv_memory={"shadow": True}))
    made.open("a", answer=1, prompt=LONG_PROMPT)
    directives = made.step()
    assert [(c.shadow, t.shadow) for c, t in zip(directives.caps, directives.tiers, strict=True)] == [(True, True)]
    assert directives.plan.shadow
    made.step(20)
    assert made.session.totals.ends == {"hard_cap_shadowed": 1, "eat_shadowed": 1}
    enforced = made.apply(policy(scheduler=shadow | {"shadow": False}, entropy=CALIBRATED))[-1].directives
    assert [(c.max_think_tokens, c.shadow) for c in enforced.caps] == [(6, False)]
    assert [f.shadow for f in enforced.forces] == [False], "the end that was only shadowed is now decided"
    assert [t.shadow for t in enforced.tiers] == [False]
    assert (enforced.plan.shadow, list(enforced.plan.slot)) == (False, [0])
    made.step(3)
    assert "a" not in made.agent.engine.live
    made.step()
    assert not made.session.open_decisions
    assert made.balanced()


def test_a_rule_in_shadow_fires_again_only_if_the_rules_change() -> None:
    shadowed, loops = policy(scheduler=EARLY, entropy=CALIBRATED | {"shadow": True}), {"loop": {"min_rounds": 9}}
    made = play(stream(shadowed), opens("a"), 20)
    for other, fired in (({"telemetry": {"report_interval_steps": 2}}, 1), (loops, 2), (loops, 2)):
        play(made, policy(scheduler=EARLY, entropy=CALIBRATED | {"shadow": True}, **other), 5)
        assert len([event for event in made.life("a").events if event.decision.kind == "force"]) == fired


def test_a_scheduler_that_is_switched_off_lifts_caps_and_goes_back_to_stock() -> None:
    never = play(stream(OFF), opens("a"), 3)
    assert (never.caps(), never.agent.checker.plan) == ({}, (None, 0, False, False, True))
    made = stream()
    made.open("a")
    made.open("b", own_cap=4000)
    made.step(2)
    directives = made.apply(OFF)[-1].directives
    assert [(c.slot, c.HasField("max_think_tokens")) for c in directives.caps] == [(0, False), (1, False)]
    assert directives.plan.stock
    made.step()
    made.open("c")
    assert not made.step(3).caps
    assert made.agent.engine.directives.active_plan() is None
    again = made.apply(policy())[-1].directives
    assert [c.slot for c in again.caps] == [0, 1, 2]
    assert (again.plan.stock, list(again.plan.slot)) == (False, [0, 1, 2])
    made.step()
    assert made.agent.engine.directives.active_plan() is not None


def limited_by_older_settings(made: Stream) -> None:
    """Open a request just before its agent puts settings without a cap in force, after the newest report."""
    made.agent.engine.tracker.limit_new(1000, (0, 0), over=False)
    made.open("b", think=1500)
    made.agent.engine.tracker.limit_new(None, (0, 0), over=False)


@pytest.mark.parametrize(
    "acts",
    [
        (freezes, OFF, thaws),
        (lambda made: reconnected(made, OFF).step(),),
        (limited_by_older_settings, OFF, 2),
        (limited_by_older_settings, freezes, OFF, 1, thaws),
    ],
)
def test_no_limit_stays_in_force_that_the_stream_has_not_told(acts: tuple[Act, ...]) -> None:
    made = stream(policy(scheduler={"max_think_tokens": 1000, "answer_reserve_for": "all"}))
    play(made, opens("a"), 3, *acts)
    live = made.agent.engine.live.values()
    assert {(one.limit, one.reserve_tokens) for one in live} == {(None, 0)}


def test_memory_that_is_switched_off_takes_tiers_back() -> None:
    made = stream()
    made.open("a", think=3)
    made.step(8)
    made.open("b")
    made.step()
    # Also the request that answers by now has its tier under each revision.
    shadow = made.apply(policy(kv_memory={"shadow": True}))[-1].directives.tiers
    assert [(t.slot, t.tier, t.shadow) for t in shadow] == [
        (0, agent_pb2.EVICTION_TIER_UNREACHABLE, True),
        (1, agent_pb2.EVICTION_TIER_UNREACHABLE, True),
    ]
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


# ------------------------------------------------------------------------------------------------------------- views


def test_what_is_shown() -> None:
    made = stream(policy(scheduler={"max_think_tokens": 900}))
    made.open("a", think=2, entropy_nats=0.25)
    made.open("b")
    made.agent.preempt("b")
    made.step(5)
    engine = engine_view(made.session)
    assert (engine.engine_id, engine.model, engine.state) == ("engine", "m", fleet_pb2.CONNECTION_STATE_CONNECTED)
    assert (engine.revision, engine.acked_revision, engine.thinking, engine.answering) == (1, 1, 0, 1)
    assert (engine.step, engine.running, engine.token_events) == (5, 2, 5)
    assert (engine.thinking_tokens, engine.answer_tokens) == (2, 2)
    assert engine.decisions == made.session.totals.decisions
    assert engine.open_decisions == len(made.session.open_decisions)
    assert engine.connect_time.ToDatetime(UTC) == NOW
    a, b = each_request_view(made.session)
    assert (a.request_id, a.phase, a.think_tokens, a.output_tokens) == ("a", agent_pb2.PHASE_OUTPUT, 2, 2)
    assert (a.entropy_nats, a.end_rank, a.rank, a.max_think_tokens) == (0.25, 1, 0, 900)
    assert (a.tenant, a.slo_class, a.preempted, b.preempted) == ("tenant", "slo", False, True)
    assert math.isnan(b.rpdi)
    assert a.last_decision.kind in {"cap", "tier"}


@pytest.mark.parametrize(
    ("scheduler", "own_cap", "shown"),
    [
        ({}, None, 900),
        ({}, 50, 50),
        ({"shadow": True}, None, 0),
        ({"shadow": True}, 5000, 5000),
        ({"enabled": False}, None, 0),
        ({"enabled": False}, 50, 50),
    ],
)
def test_the_cap_that_is_shown_is_the_one_in_force(scheduler: dict[str, Any], own_cap: int | None, shown: int) -> None:
    made = stream(policy(scheduler={"max_think_tokens": 900, **scheduler}))
    made.open("a", own_cap=own_cap)
    made.step()

    def cap() -> int:
        (live,) = each_request_view(made.session)
        return live.max_think_tokens

    assert cap() == shown
    freezes(made)
    assert cap() == 0, "a freeze suspends all caps"
    thaws(made)
    made.step()
    assert cap() == shown


@pytest.mark.parametrize(
    ("shadow", "steps", "text"),
    [
        (False, 2, "cap set (open)"),
        (True, 2, "cap set (open, in shadow)"),
        (True, 8, "cap set (in shadow)"),
    ],
)
def test_the_newest_decision_about_a_request_says_whether_it_is_in_shadow(shadow: bool, steps: int, text: str) -> None:
    off = {"enabled": False}
    made = stream(policy(scheduler={"shadow": shadow, "max_think_tokens": 5}, kv_memory=off, entropy=off))
    made.open("a")
    made.step(steps)
    (live,) = each_request_view(made.session)
    assert last_text(live.last_decision) == text


@pytest.mark.parametrize(
    ("fields", "ordered", "marked"),
    [
        ({}, True, True),
        ({"scheduler": {"shadow": True}, "kv_memory": {"shadow": True}}, False, False),
        ({"scheduler": {"strategy": "stock"}}, False, True),
        ({"scheduler": {"enabled": False}, "kv_memory": {"enabled": False}}, False, False),
    ],
    ids=["in force", "in shadow", "stock order", "off"],
)
def test_the_rank_and_the_tier_that_are_shown_are_in_force(
    fields: dict[str, dict[str, Any]], ordered: bool, marked: bool
) -> None:
    made = stream(policy())
    made.open("a")
    made.step(2)
    made.apply(policy(**fields))
    made.step()

    def shown() -> tuple[bool, bool]:
        (live,) = each_request_view(made.session)
        return live.rank > 0, live.tier == agent_pb2.EVICTION_TIER_UNREACHABLE

    assert shown() == (ordered, marked)
    freezes(made)
    assert shown() == (False, False)


def test_an_engine_that_knows_no_thinking_has_no_cap() -> None:
    made = stream(policy(scheduler={"max_think_tokens": 900}), hello_fields={"unknown_markers": "no parser"})
    made.open("a", own_cap=50)
    made.step()
    assert [live.max_think_tokens for live in each_request_view(made.session)] == [0]


def test_tokens_that_a_marker_takes_back_count_as_neither_thinking_nor_answer() -> None:
    made, markers = stream(policy()), Markers(((1, 11),), ((2, 12, 22),))

    def reports(slot: int, sampled: list[int], before: tuple[int, ...] = ()) -> tuple[int, int]:
        """Report the tokens of a request, one each time, that had others before the stream; return its counts."""
        state = begin(markers, [1, 11], supports_think_disable=False)
        for token in before:
            state.feed(token, markers)
        opened = agent_pb2.RequestOpened(slot=slot, request_id=f"r{slot}", phase=THINK, think_tokens=state.think_tokens)
        made.say(opened=[opened])
        for token in sampled:
            made.say(tokens=tokens([(slot, *state.feed(token, markers), math.nan)]))
        return state.think_tokens, state.output_tokens

    assert reports(0, [22], before=(TEXT, 2, 12)) == (1, 0)
    assert engine_view(made.session).thinking_tokens == 0, "what is taken back did not come on this stream"
    counted = reports(1, [TEXT, 2, TEXT, 2, 12, 22, TEXT, 1, TEXT, 1, 11, TEXT])
    engine = engine_view(made.session)
    assert (engine.thinking_tokens, engine.answer_tokens) == counted == (4, 3)


def test_a_request_in_the_place_of_another_is_not_shown_with_its_signals() -> None:
    made = stream()
    made.open("a")
    place = made.open("b")
    made.step()
    views = each_request_view(made.session)
    assert next(views).request_id == "a"
    made.say(closed=[{"slot": place}])
    made.say(opened=[{"slot": place, "request_id": "c"}])
    assert list(views) == []
    assert [view.request_id for view in each_request_view(made.session)] == ["a", "c"]


# ------------------------------------------------------------------------------------------------ several engines


@pytest.mark.parametrize("remote", [False, True])
def test_a_request_that_another_engine_continues_has_no_answer_here(remote: bool) -> None:
    """A prefill engine generates one token, and an engine that hands over at the end marker generates no answer."""
    made = stream(policy(entropy={"shadow": False, "holdout_share": 0.5}))
    for number in range(3):
        made.agent.open(f"prefill{number}", Script(100, 100), remote_decode=remote)
        made.agent.open(f"handover{number}", Script(0, 100), remote_decode=remote)
    made.step(1)
    table = made.session.table
    assert table.counted[table.live].any() != remote
    for name in list(made.agent.engine.live):
        made.agent.engine.finish(name, agent_pb2.FINISH_REASON_LENGTH)
    made.step(1)
    assert not table.live.any()
    totals = made.session.totals
    assert totals.ends["natural"] == 3
    assert {name: count for name, count in totals.answers.items() if count} == (
        {} if remote else {"unended": 3, "empty_after_natural": 3}
    )
