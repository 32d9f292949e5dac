"""The rules that a session applies to each request: overrides, empty answers, holds, probes and shares."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from meridian.v1 import agent_pb2

from meridian_control.capabilities.gateway.stream import REFUSED_TOTAL
from meridian_control.engine import effective_policies
from meridian_control.engine.effective_policies import ROOM
from meridian_control.engine.request_table import OUTPUT, THINK
from meridian_control.engine.step_cost import WARM_STEPS
from meridian_control.engine.token_rows import FLAG_END, FLAG_MARKER
from tests.fakes.agent import Script
from tests.fakes.engine import TEXT
from tests.fakes.tables import policy, tokens
from tests.unit.sessions import (
    CALIBRATED,
    EARLY,
    Act,
    Stream,
    each_token_ends_a_sentence,
    freezes,
    opens,
    play,
    reconnected,
    stream,
    thaws,
)

# ----------------------------------------------------------------------------------------------------------- overrides

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


def test_unknown_efforts_get_the_defaults_and_are_counted_once() -> None:
    """A request is counted when it opens: not again under a new policy, after a snapshot, or without policy."""
    made = stream(policy(scheduler=EARLY, override=[LOW, {**LOW, "effort": "ultra*"}]))
    for effort in ("", "low", "high", "ultra-2", "turbo", "LOW"):
        made.open(f"r-{effort}", effort=effort)
    made.step()
    assert caps_of(made) == {"r-": 32768, "r-low": 7, "r-high": 32768, "r-ultra-2": 7, "r-turbo": 32768, "r-LOW": 32768}
    assert (made.session.totals.requests, made.session.totals.unknown_efforts) == (6, 2)
    made.apply(policy(scheduler=EARLY))
    made.agent.say(snapshot=made.agent.snapshot())
    made.pump()
    made.step()
    assert made.session.totals.unknown_efforts == 2
    ungoverned = Stream()
    ungoverned.open("early", effort="turbo")
    ungoverned.step()
    assert (ungoverned.session.totals.requests, ungoverned.session.totals.unknown_efforts) == (1, 0)


def test_refused_slo_classes_are_counted_once() -> None:
    """A request that waits is listed in each snapshot until it has its first token; one that was handed over was
    counted on its thinking engine."""
    made = stream(hello_fields={"request_sources": "slo class from x-slo"})
    made.agent.places = 1
    for name in ("runs", "waits"):
        made.open(name, refused_slo_class="gold")
    made.step()
    made.agent.say(snapshot=made.agent.snapshot())
    made.step()
    made.open("later", refused_slo_class="gold")
    made.open("handed-over", refused_slo_class="gold", handed_over_ref="s-1")
    made.open("decoded elsewhere", refused_slo_class="gold", remote_decode=True)
    made.step()
    assert made.session.totals.counted[REFUSED_TOTAL, ()] == made.session.totals.requests == 3


def capped(**caps: int) -> Callable[[Stream], None]:
    """Assert the caps of all requests."""

    def check(made: Stream) -> None:
        assert caps_of(made) == caps

    return check


def comes_in_a_snapshot(made: Stream) -> None:
    made.agent.open("low", Script(1000, 1000), effort="low")
    made.agent.say(snapshot=made.agent.snapshot())
    made.agent.engine.take()
    made.pump()


POOL = {"engine_labels": {"pool": "batch"}, "scheduler": {"max_think_tokens": 5}}
LOWER = policy(scheduler=EARLY, override=[{**LOW, "scheduler": {"max_think_tokens": 9}}])
OVERRIDDEN: dict[str, tuple[list[dict[str, Any]], dict[str, str], tuple[Act, ...]]] = {
    "gone over again with a new policy": (
        [LOW],
        {},
        (opens("low", effort="low"), 1, LOWER, capped(low=9), policy(scheduler=EARLY), capped(low=32768)),
    ),
    "of requests that a snapshot brings": ([LOW], {}, (comes_in_a_snapshot, 1, capped(low=7))),
    "of the engine's labels": ([POOL], {"pool": "batch"}, (opens("a"), 1, capped(a=5))),
    "of other labels": ([POOL], {"pool": "chat"}, (opens("a"), 1, capped(a=32768))),
    "without labels": ([POOL], {}, (opens("a"), 1, capped(a=32768))),
}


@pytest.mark.parametrize(("overrides", "labels", "acts"), OVERRIDDEN.values(), ids=OVERRIDDEN)
def test_overrides(overrides: list[dict[str, Any]], labels: dict[str, str], acts: tuple[Act, ...]) -> None:
    play(stream(policy(scheduler=EARLY, override=overrides), hello_fields={"labels": labels}), *acts)


def test_a_requests_own_floor_holds_the_rules_back_but_not_the_cap() -> None:
    made = stream(policy(scheduler={**EARLY, "max_think_tokens": 12}, entropy=RULES))
    made.open("floor", min_think_tokens=8)
    made.open("plain")
    made.open("over-cap", min_think_tokens=500)
    forces: dict[int, int] = {}
    for _ in range(20):
        before = {slot: int(made.session.table.think_tokens[slot]) for slot in range(3)}
        for force in made.step().forces:
            forces[force.slot] = before[force.slot]
    assert forces[1] < 7 <= forces[0]
    assert 2 not in forces
    assert made.session.totals.ends["hard_cap"] == 1


def test_combinations_of_overrides_are_forgotten_with_their_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients choose the fields that overrides match on, so eight overrides make 256 policies."""
    monkeypatch.setattr(effective_policies, "KINDS", 50)
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
        groups = made.session._policies
        assert groups.of(slot).scheduler.max_think_tokens == (50 if "b" in tenant else 99)
        assert groups.of(kept).scheduler.max_think_tokens == 50
        assert len(groups._held) <= ROOM
        assert len(groups._overridden) <= 50
        made.agent.abort(f"r{number}")
        made.step()
    assert made.session.policy is groups.policy


# ------------------------------------------------------------------------------------------------------- empty answers

EXTENSIBLE = {"max_think_tokens": 100, "min_think_tokens": 0, "empty_answer_extension_tokens": 30}
EXTENDING = policy(scheduler=EXTENSIBLE, entropy={"enabled": False})


@pytest.mark.parametrize(
    ("extension", "empty", "probes", "caps"),
    [(30, True, 2, {"a": 130, "own": 90}), (30, False, 2, {"a": 100, "own": 90}), (0, True, 0, {"a": 100, "own": 90})],
)
def test_the_cap_of_a_request_whose_answer_would_be_empty_is_extended_once(
    extension: int, empty: bool, probes: int, caps: dict[str, int]
) -> None:
    limits = {"max_think_tokens": 100, "min_think_tokens": 0, "empty_answer_extension_tokens": extension}
    made = stream(policy(scheduler=limits, entropy={"enabled": False}))
    made.agent.empty_answer = empty
    made.open("a")
    made.open("own", own_cap=90)
    assert len(made.step(99).probes) == probes
    assert {**caps_of(made), "own": 90} == caps
    made.step(60)
    assert (made.session.totals.decisions["probe"], made.session.totals.ends["hard_cap"]) == (probes, 2)
    assert made.balanced()


@pytest.mark.parametrize(
    "again",
    [
        lambda made: reconnected(made, EXTENDING),
        lambda made: play(made, freezes, thaws),
        lambda made: made.agent.say(snapshot=made.agent.snapshot()),
    ],
)
@pytest.mark.parametrize(("empty", "cap", "reason"), [(True, 130, "empty_answer"), (False, 100, "hard_cap")])
def test_an_extended_cap_stays_so_over_a_snapshot(
    again: Callable[[Stream], Stream | None], *, empty: bool, cap: int, reason: str
) -> None:
    made = stream(EXTENDING)
    made.agent.empty_answer = empty
    play(made, opens("a"), 110 if empty else 90)
    made = again(made) or made
    made.step()
    told = [event.decision.reason for event in made.life("a").events if event.decision.kind == "cap"]
    assert (made.caps(), told[-1]) == ({"a": cap}, reason)
    made.step(50)
    assert made.life("a").think_tokens == cap


def test_a_cap_that_only_is_as_long_as_an_extended_one_gives_way_to_a_lower_one() -> None:
    made = play(stream(EXTENDING), opens("a"), 10)
    made = reconnected(made, policy(scheduler={**EXTENSIBLE, "max_think_tokens": 70}, entropy={"enabled": False}))
    made.step()
    assert made.caps() == {"a": 70}


def test_a_probe_near_the_cap_that_the_engine_refuses_is_asked_for_again() -> None:
    made = stream(EXTENDING)
    made.agent.empty_answer = True
    # The session takes a probe without a number as refused.
    made.agent.eat_nats = math.nan
    made.open("a")
    assert [at for at in range(80) if made.step().probes] == [35, 51, 67]
    made.agent.eat_nats = 0.01
    assert len(made.step(60).probes) == 1
    assert made.session.totals.ends["hard_cap"] == 1
    assert made.life("a").think_tokens == 130


@pytest.mark.parametrize("told", [True, False])
def test_another_probe_than_the_one_near_the_cap_does_not_extend_it(told: bool) -> None:
    """Neither an EAT probe after it, nor a probe near an earlier cap, told before or after the new cap, extends it."""
    rules = {**CALIBRATED, "shadow": True, "eat_probe_interval_tokens": 80}
    made = stream(policy(scheduler=EXTENSIBLE, entropy=rules))
    made.open("a")
    while "empty_answer" not in {decision.reason for decision in made.session.open_decisions.values()}:
        made.step()
    made.agent.empty_answer = not told
    made.step(3 * told)
    made.agent.empty_answer = True
    if told:
        made.step(50)
        assert (made.session.table.empty_answer[0], made.caps()) == (True, {"a": 100})
    made.apply(policy(scheduler={**EXTENSIBLE, "max_think_tokens": 300}, entropy=rules))
    made.step(100)
    assert (made.session.table.empty_answer[0], made.caps()) == (True, {"a": 300})
    made.step(120)
    assert made.caps() == {"a": 330}


@pytest.mark.parametrize("is_on", [True, False])
def test_no_rule_ends_thinking_into_an_empty_answer_while_that_extends_the_cap(is_on: bool) -> None:
    scheduler = {**EARLY, "empty_answer_extension_tokens": 30, "enabled": is_on}
    made = stream(policy(scheduler=scheduler, entropy=RULES))
    made.agent.empty_answer = True
    made.open("a")
    assert bool(made.step(20).forces) != is_on
    made.agent.empty_answer = False
    assert bool(made.step(4).forces) == is_on


def test_a_loop_ends_thinking_although_the_answer_would_be_empty() -> None:
    """Thinking that repeats itself comes to no answer, however long it goes on."""
    made = stream(policy(scheduler={**EARLY, "empty_answer_extension_tokens": 30}, loop={"shadow": False}))
    made.agent.empty_answer = True
    made.open("a")
    made.step(40)
    made.agent.engine.tracker.record.loops.append((0, 4, 400))
    assert [force.reason for force in made.step().forces] == [agent_pb2.FORCE_REASON_LOOP]


@pytest.mark.parametrize("policy_first", [True, False])
@pytest.mark.parametrize("eat_nats", [0.01, 2.0])
def test_a_forced_end_that_a_new_stream_finds_under_way_counts_for_its_rule(
    eat_nats: float, *, policy_first: bool
) -> None:
    rules = policy(scheduler=EARLY, entropy=RULES)
    made = stream(rules)
    tracker = made.agent.engine.tracker
    tracker.markers = replace(tracker.markers, closing=(TEXT,) * 4)
    made.open("a", answer=3)
    while not made.step().forces:
        pass
    made.step(2)
    made.agent.eat_nats = eat_nats
    made = reconnected(made, rules)
    if policy_first:
        made.agent.say(snapshot=made.agent.snapshot())
    made.step(10)
    assert made.session.totals.ends == {"eat": 1}
    assert made.session.totals.decisions["force/eat"] == 0, "the rule is not asked again"


# -------------------------------------------------------------------------------------------------------------- hold


@pytest.mark.parametrize(("entropy", "hold_ms"), [({}, 50), ({"eat_hold_ms": 7}, 7), ({"shadow": True}, 0)])
def test_a_probed_request_waits_unless_nothing_is_applied(entropy: dict[str, Any], hold_ms: int) -> None:
    made = stream(policy(scheduler=EARLY, entropy=CALIBRATED | entropy))
    made.open("a")
    (probe,) = made.step().probes
    assert probe.hold_ms == hold_ms


# ------------------------------------------------------------------------------------------- probes, ends and shares


def test_gated_probes_are_asked_for_where_the_end_marker_is_likely_and_placed_at_once() -> None:
    gate = RULES | {"shadow": True, "eat_probe_max_rank": 5}
    made = stream(policy(scheduler=EARLY, entropy=gate))
    made.open("a")
    assert not made.step(6).probes, "no sentence has ended"
    each_token_ends_a_sentence(made)
    asked = made.step(3)
    assert {p.placement for p in asked.probes} == {agent_pb2.PLACEMENT_ANYWHERE}
    made.agent.end_rank = 6
    made.step()
    assert not made.step(6).probes, "the end marker is not likely enough"


@pytest.mark.parametrize("shadow", [False, True])
def test_the_rank_rule_ends_thinking_once_it_is_confirmed(shadow: bool) -> None:
    """The tokens of each request are all sentence ends; the request of tenant `careful` needs three of them."""
    rule = {"rank_conditions": [{"max_ranks": [5]}], "eat_probe_interval_tokens": 10_000, "shadow": shadow}
    careful = {"tenant": "careful", "entropy": {"confirm_sentence_ends": 3}}
    made = stream(policy(scheduler=EARLY, entropy=rule, override=[careful]))
    made.agent.end_rank = 6
    made.open("plain", think=60)
    made.open("careful", think=60, tenant="careful")
    made.step(2)
    each_token_ends_a_sentence(made)
    assert not made.step(10).forces, "the end marker is not likely enough"
    made.agent.end_rank = 5
    fired = [sorted((f.slot, f.reason, f.shadow) for f in made.step().forces) for _ in range(4)]
    rank = agent_pb2.FORCE_REASON_RANK
    assert fired == [[(0, rank, shadow)], [], [(1, rank, shadow)], []]
    made.step(60)
    assert made.session.totals.ends["rank_shadowed" if shadow else "rank"] == 2


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
    each_token_ends_a_sentence(made)
    assert [f.reason for f in made.step(2).forces] == [agent_pb2.FORCE_REASON_RPDI]
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
    in_force = made.agent.checker
    assert in_force.plan is not None
    assert 1 <= in_force.plan[0] <= 4, "7 thinking and 1 answering take 42 ms, twice the answers' budget"
    assert in_force.plan[1] >= 1
    made.agent.step_cost_ms = 1.0, 0.1
    made.step(400)
    assert in_force.plan[:2] == (None, 0)


@pytest.mark.parametrize("shadow", [False, True])
def test_admission_is_held_while_an_answer_waits_for_memory(shadow: bool) -> None:
    made = stream(policy(kv_memory={"shadow": shadow}), hello_fields={"num_blocks": 1})
    made.open("answer", prompt=[1, 2])
    made.open("thought", prompt=[*range(40, 50), 1])
    told = made.step(2)
    assert ([tier.shadow for tier in told.tiers], told.plan.hold_admission) == ([shadow], False)
    made.agent.preempt("answer")
    assert made.step(3).plan.hold_admission is not shadow
    made.agent.preempt("answer", waits=False)
    made.step()
    assert shadow or (made.agent.checker.plan is not None and made.agent.checker.plan[2] is False)


# --------------------------------------------------------------------------------------------------------------- order


def test_a_request_that_answers_and_thinks_again_within_a_report_is_ranked_anew() -> None:
    """The agent has dropped the rank with each phase; without a new one the request would come after all others."""
    made = stream(policy(scheduler=EARLY | {"strategy": "reasoning_first"}))
    opened = [agent_pb2.RequestOpened(slot=0, request_id="a", phase=THINK)]

    def said(steps: int, *rows: tuple[int, int], **fields: Any) -> list[tuple[int, int]]:
        columns = tokens((0, phase, flags, math.nan) for phase, flags in rows)
        report = agent_pb2.StepReport(step=made.session._ledger.step + steps, steps=steps, tokens=columns, **fields)
        responses = made.session.on_message(agent_pb2.ConnectRequest(step=report), made.now)
        plans = [response.directives.plan for response in responses]
        return [row for plan in plans for row in zip(plan.slot, plan.rank, strict=True)]

    assert said(1, (THINK, 0), opened=opened) == [(0, 0)]
    assert said(4, (THINK, FLAG_MARKER | FLAG_END), (OUTPUT, 0), (THINK, FLAG_MARKER), (THINK, 0)) == [(0, 0)]
    assert said(1, (THINK, 0)) == []
