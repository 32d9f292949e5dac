"""Rollouts as pure functions: the revision of each engine, the guardrails' judgement, and the states of a rollout."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from meridian_control.common.errors import PolicyError, RolloutEnded
from meridian_control.common.histogram import TIME_BOUNDS_S
from meridian_control.common.inference import evidence
from meridian_control.policy.formats import from_proto_as, parse_toml_as
from meridian_control.rollout import guardrails
from meridian_control.rollout import transitions as rules
from meridian_control.rollout.guardrails import MIN_JUDGED, STRONG_EVIDENCE, p99
from meridian_control.rollout.plan import MAX_MS, Plan, position
from meridian_control.rollout.state import NOTHING, TAKEN_BACK, By, GuardrailReading, Measured, Rollout, Sample, State
from meridian_control.rollout.transitions import begin, revision_of, tick
from tests.fakes.tables import policy

NOW = datetime(2026, 5, 4, 3, 2, 1, tzinfo=UTC)
BY = By(NOW, "ann", "why")
STABLE, CANDIDATE, BACK = 7, 8, 9
LIMITS = {"output_itl_p99_ratio": 1.5, "min_observations": 10}


def plan(*steps: dict[str, Any], **fields: Any) -> Plan:
    return Plan.model_validate({"step": steps or ({"percent": 50.0, "bake_s": 60.0},), **fields})


def started(*steps: dict[str, Any], rollout_id: int = 3, **fields: Any) -> Rollout:
    return begin(rollout_id, plan(*steps, **fields), (STABLE, CANDIDATE), BY)


def buckets(seconds: float, count: int) -> tuple[int, ...]:
    """Return a histogram's counts with `count` observations at one of the bounds."""
    counts = [0] * (len(TIME_BOUNDS_S) + 1)
    counts[TIME_BOUNDS_S.index(seconds)] = count
    return tuple(counts)


def seen(candidate: Measured = NOTHING, stable: Measured = NOTHING, **fields: Any) -> Sample:
    return Sample(candidate, stable, **{"candidate_engines": 1, "other_engines": 1, "stable_engines": 1, **fields})


def itl(candidate: tuple[float, int], stable: tuple[float, int] = (0.02, 100), **fields: Any) -> Sample:
    return seen(Measured(output_itl=buckets(*candidate)), Measured(output_itl=buckets(*stable)), **fields)


# --------------------------------------------------------------------------------------------------------------- plans


def test_a_plan_as_a_file() -> None:
    text = """
        on_violation = "halt"
        [[step]]
        engine_labels = {pool = "canary-*"}
        [[step]]
        percent = 10
        bake_s = 1800
        [guardrails]
        ttot_p99_ms = 500
    """
    read = parse_toml_as(Plan, text)
    assert [(step.percent, step.bake_s) for step in read.step] == [(100.0, 600.0), (10.0, 1800.0)]
    assert (read.guardrails.nacks, read.guardrails.ttot_p99_ms, read.on_violation) == (0, 500.0, "halt")
    again = started(rollout_id=1).model_copy(update={"plan": read}).message().plan
    assert from_proto_as(Plan, again) == read


BAD = [
    ("", "step must have 1 to 32 entries; got []"),
    ("step = []", "step must have 1 to 32 entries; got []"),
    ("[[step]]\nbake_s = 1.0", 'step[0] must have engine_labels or percent; got {"bake_s": 1.0}'),
    ("[[step]]\npercent = 100.5", "step[0].percent must be in [0, 100]; got 100.5"),
    ("[[step]]\npercent = 1.0\nbake_s = 0.0", "step[0].bake_s must be in (0, 2592000]; got 0.0"),
    ("[[step]]\nengine_labels = {pool = 1}", "step[0].engine_labels.pool must be a string; got 1"),
    ("[[step]]\npercent = 1.0\nlabels = {}", "step[0].labels is not a known key; did you mean engine_labels?"),
    ('on_violation = "no"\n[[step]]\npercent = 1.0', "on_violation must be 'rollback' or 'halt'; got \"no\""),
    ("[[step]]\npercent = 1.0\n[guardrails]\nttot_p99_ratio = 0.0", "guardrails.ttot_p99_ratio must be > 0; got 0.0"),
    ("[[step]]\npercent = 1.0\n[guardrails]\nnacks = -1", "guardrails.nacks must be in [0, 2147483647]; got -1"),
]


@pytest.mark.parametrize(("text", "complaint"), BAD)
def test_plans_that_are_refused(text: str, complaint: str) -> None:
    with pytest.raises(PolicyError) as caught:
        parse_toml_as(Plan, text)
    assert str(caught.value) == complaint


# -------------------------------------------------------------------------------------------------- choice of engines

ids = st.text(max_size=20)
labels = st.dictionaries(st.sampled_from(["pool", "zone"]), st.sampled_from(["canary-1", "canary-2", "main"]))
percents = st.floats(0, 100)
steps = st.one_of(
    st.builds(lambda p: {"percent": p}, percents),
    st.builds(lambda g: {"engine_labels": {"pool": g}}, st.sampled_from(["canary-*", "canary-1", "*", "none"])),
    st.builds(lambda p: {"percent": p, "engine_labels": {"zone": "main"}}, percents),
)
plans = st.lists(steps, min_size=1, max_size=5)


def at(rollout: Rollout, step: int) -> Rollout:
    return rollout.model_copy(update={"step": step})


@given(plans, st.integers(1, 99), ids, labels)
def test_a_later_step_only_adds_engines(
    plan: list[dict[str, Any]], number: int, engine: str, has: dict[str, str]
) -> None:
    rollout = started(*plan, rollout_id=number)
    given = [revision_of(at(rollout, step), engine, has, 0) for step in range(1, len(plan) + 1)]
    assert set(given) <= {STABLE, CANDIDATE}
    assert given == sorted(given)
    assert given == [revision_of(at(rollout, step), engine, has, 0) for step in range(1, len(plan) + 1)], (
        "the choice is the same each time"
    )


@pytest.mark.parametrize("has", [0, 1, 40])
def test_an_engine_that_reports_the_revision_of_a_lost_store_is_no_canary(has: int) -> None:
    rollout = started({"engine_labels": {"pool": "canary"}})
    assert revision_of(rollout, "a", {"pool": "prod"}, has) == rollout.stable_revision
    for labels, told in (({"pool": "canary"}, has), ({"pool": "prod"}, rollout.candidate_revision)):
        assert revision_of(rollout, "a", labels, told) == rollout.candidate_revision


@given(percents, percents, st.integers(1, 99), ids)
def test_a_higher_percentage_only_adds_engines(one: float, other: float, number: int, engine: str) -> None:
    low, high = (started({"percent": percent}, rollout_id=number) for percent in sorted((one, other)))
    assert revision_of(low, engine, {}, 0) <= revision_of(high, engine, {}, 0)


@given(st.integers(1, 99), ids, labels)
def test_nobody_and_everybody(number: int, engine: str, has: dict[str, str]) -> None:
    assert 0 <= position(number, engine) < 100
    assert revision_of(started({"percent": 0.0}, rollout_id=number), engine, has, 0) == STABLE
    assert revision_of(started({"percent": 100.0}, rollout_id=number), engine, has, 0) == CANDIDATE


def test_a_percentage_is_that_share_of_many_and_another_one_each_time() -> None:
    rollouts = [started({"percent": 25.0}, rollout_id=n) for n in (1, 2)]
    chosen = [{e for e in range(4000) if revision_of(each, f"e{e}", {}, 0) == CANDIDATE} for each in rollouts]
    assert all(900 < len(some) < 1100 for some in chosen)
    assert 150 < len(chosen[0] & chosen[1]) < 350


def test_labels_are_globs_and_must_all_match() -> None:
    rollout = started({"engine_labels": {"pool": "canary-*", "zone": "a"}})
    for has, revision in (
        ({"pool": "canary-2", "zone": "a"}, CANDIDATE),
        ({"pool": "canary-2", "zone": "b"}, STABLE),
        ({"pool": "canary-2"}, STABLE),
        ({"pool": "main", "zone": "a"}, STABLE),
    ):
        assert revision_of(rollout, "e", has, 0) == revision


@given(plans, ids, labels, labels, st.lists(st.sampled_from(["tick", "pause", "resume", "halt", "abort"]), max_size=12))
def test_an_engine_never_goes_back(
    plan: list[dict[str, Any]], engine: str, before: dict[str, str], after: dict[str, str], what: list[str]
) -> None:
    """Whatever happens, and even if its labels change, an engine keeps its revision or gets a newer one."""
    rollout, has = started(*plan), STABLE
    for number, action in enumerate(what):
        rollout = act(rollout, action)
        wanted = revision_of(rollout, engine, before if number % 2 else after, has)
        assert wanted >= has
        has = wanted


def act(rollout: Rollout, action: str) -> Rollout:
    if not rollout.active:
        return rollout
    if action == "tick":
        rollout = tick(rollout, seen(), 1e9, NOW)
    elif action == "halt":
        rollout = tick(rollout, seen(nacks=1), 1.0, NOW)
    else:
        rollout = getattr(rules, action)(rollout, BY)
    if rollout.state in TAKEN_BACK:
        rollout = rollout.model_copy(update={"rollback_revision": BACK})
    return rollout


def test_ends_are_for_everybody() -> None:
    rollout = started({"percent": 0.0})
    done = tick(rollout, seen(), 1e9, NOW)
    assert (done.state, revision_of(done, "e", {}, STABLE)) == (State.COMPLETED, CANDIDATE)
    aborted = act(rollout, "abort")
    assert [revision_of(aborted, "e", {}, has) for has in (STABLE, CANDIDATE)] == [BACK, BACK]


# ---------------------------------------------------------------------------------------------------- steps and states


def test_steps_follow_each_other_when_they_have_baked() -> None:
    rollout = started({"percent": 1.0, "bake_s": 60.0}, {"percent": 50.0, "bake_s": 10.0})
    rollout = tick(rollout, seen(), 59.0, NOW)
    assert (rollout.step, rollout.baked_s, rollout.candidate_engines, rollout.other_engines) == (1, 59.0, 1, 1)
    rollout = tick(rollout, seen(), 1.0, NOW + timedelta(seconds=60))
    assert (rollout.step, rollout.baked_s, rollout.state) == (2, 0.0, State.RUNNING)
    rollout = tick(rollout, seen(), 10.0, NOW)
    assert rollout.state is State.COMPLETED
    assert tick(rollout, seen(nacks=5), 10.0, NOW) == rollout
    baked = "has baked for {} s, and no guardrail is violated"
    assert [(event.event, event.step, event.author, event.reason) for event in rollout.events] == [
        ("started", 1, "ann", rollout.reason),
        ("advanced", 2, "meridian-control", f"step 1 {baked.format(60)}"),
        ("completed", 2, "meridian-control", f"step 2 {baked.format(10)}"),
    ]


@pytest.mark.parametrize(
    ("sample", "why"),
    [
        (Sample(), "an engine to connect"),
        (seen(pending=2), "2 engines to apply the candidate"),
        (seen(missing=1), "1 engine to connect again"),
        (
            seen(candidate_engines=0),
            "an engine with the candidate: step 1 selects none of the 1 connected engines (50 % of the engines, by a "
            "hash of their ids); connect one, or abort and start again with another plan",
        ),
        (
            seen(candidate_engines=0, degraded=2),
            "an engine with the candidate: 2 engines lost the stream or went off",
        ),
        (itl((0.02, 9)), "observations for output_itl_p99_ratio"),
        (itl((0.02, 100), (0.02, 9)), "observations for output_itl_p99_ratio"),
    ],
)
def test_what_a_step_waits_for(sample: Sample, why: str) -> None:
    rollout = tick(started(guardrails=LIMITS), sample, 1e6, NOW)
    assert (rollout.state, rollout.waiting_for) == (State.RUNNING, why)
    rollout = tick(rollout, itl((0.02, 100)), 1.0, NOW)
    assert (rollout.state, rollout.waiting_for) == (State.COMPLETED, "")


@pytest.mark.parametrize("step", [{"percent": 50.0}, {"percent": 0.0}, {"engine_labels": {"pool": "a"}}])
@pytest.mark.parametrize("others", [0, 1])
def test_no_step_passes_without_an_engine(step: dict[str, Any], others: int) -> None:
    """Without an engine that has the candidate no guardrail can be violated, so the candidate has not been tried."""
    rollout = started({**step, "bake_s": 1.0}, guardrails=LIMITS)
    after = tick(rollout, seen(candidate_engines=0, other_engines=others), 1e6, NOW)
    assert (after.state, after.step) == (State.RUNNING, 1)
    assert after.waiting_for


def test_a_step_that_is_meant_for_no_engine_watches_the_others() -> None:
    rollout = started({"percent": 0.0, "bake_s": 1.0}, {"percent": 100.0, "bake_s": 1.0}, guardrails=LIMITS)
    after = tick(rollout, seen(candidate_engines=0), 1.0, NOW)
    assert (after.step, after.waiting_for) == (2, "")


def test_the_author_is_warned_of_steps_without_engines() -> None:
    canary = {"engine_labels": {"pool": "canary-*"}}
    rollout = started({"percent": 0.0}, canary, {"percent": 100.0})
    assert rules.warnings(rollout, []) == ["no engine is connected: the rollout waits until one connects"]
    assert rules.warnings(rollout, [("a", {"pool": "canary-1"})]) == []
    assert rules.warnings(rollout, [("a", {"pool": "main"}), ("b", {})]) == [
        "step 2 selects none of the 2 connected engines (all engines, with pool=canary-*): it waits until an "
        "engine that it selects connects"
    ]
    # A step has the engines of the steps before it, too.
    assert rules.warnings(started({"percent": 100.0}, canary), [("a", {})]) == []


def test_nothing_to_compare_with_is_not_waited_for() -> None:
    """Other engines whose agents are off, or which run an older revision, never bring an observation to compare."""
    limits = {"ttot_p99_ratio": 1.5, "empty_answer_rate_increase": 0.1, "reentry_rate_increase": 0.1} | LIMITS
    mine = Measured(output_itl=buckets(0.02, 100), ttot=buckets(0.02, 100), answers=100)
    rollout = tick(started(guardrails=limits), seen(mine, stable_engines=0), 1e6, NOW)
    assert rollout.state is State.COMPLETED


def test_the_last_engines_are_compared_with_those_of_earlier_steps() -> None:
    rollout = started({"percent": 50.0, "bake_s": 1.0}, {"percent": 100.0, "bake_s": 1.0}, guardrails=LIMITS)
    rollout = tick(rollout, itl((0.02, 100)), 1.0, NOW)
    assert rollout.step == 2
    slow = itl((0.05, 100), (0.02, 0), stable_engines=0)
    (reading, _) = tick(rollout, slow, 1.0, NOW).guardrails
    assert (reading.violated, reading.stable_observations) == (True, 100)


def test_a_pause_stops_the_clock_and_not_the_guardrails() -> None:
    rollout = rules.pause(tick(started(), seen(), 50.0, NOW), BY)
    assert tick(rollout, seen(), 1e6, NOW).baked_s == 50.0
    assert tick(rollout, seen(nacks=1), 1.0, NOW).state is State.ROLLED_BACK
    rollout = rules.resume(rollout, BY)
    assert tick(rollout, seen(), 10.0, NOW).state is State.COMPLETED
    assert [event.event for event in rollout.events] == ["started", "paused", "resumed"]


def test_a_halted_rollout_waits_and_is_measured_anew_once_resumed() -> None:
    rollout = tick(started(on_violation="halt", guardrails=LIMITS), itl((0.05, 100)), 59.0, NOW)
    assert rollout.state is State.HALTED
    assert tick(rollout, itl((0.05, 100)), 1e6, NOW) == rollout
    assert rules.pause(rollout, BY) == rollout
    resumed = rules.resume(rollout, BY)
    assert (resumed.state, resumed.baked_s, resumed.candidate) == (State.RUNNING, 0.0, NOTHING)
    assert (rollout.violation is None, resumed.violation) == (False, None)
    assert tick(resumed, itl((0.02, 100)), 60.0, NOW).state is State.COMPLETED


def test_steering_what_has_ended() -> None:
    ended = tick(started(), seen(), 1e6, NOW)
    for what in (rules.pause, rules.resume, rules.abort):
        with pytest.raises(RolloutEnded, match=r"^rollout 3 is completed: there is nothing to (pause|resume|abort)$"):
            what(ended, BY)
    aborted = rules.abort(started(), BY)
    assert rules.abort(aborted, BY) == aborted


def test_a_request_id_steers_once() -> None:
    by = By(NOW, "ann", "", "a")
    paused = rules.pause(started(), by)
    resumed = rules.resume(paused, BY)
    assert rules.pause(resumed, by) == resumed
    completed = tick(resumed, seen(), 1e6, NOW)
    assert rules.pause(completed, by) == completed


def test_old_events_are_let_go() -> None:
    rollout = started()
    for _ in range(rules.MAX_EVENTS):
        rollout = rules.resume(rules.pause(rollout, BY), BY)
    assert (len(rollout.events), rollout.etag) == (rules.MAX_EVENTS, f"3-{2 * rules.MAX_EVENTS + 1}")


class AnyOrder(RuleBasedStateMachine):
    """A rollout under any calls and measurements: its step never falls, ends are final, and guardrails always win."""

    def __init__(self) -> None:
        super().__init__()
        self.rollout = started({"percent": 1.0}, {"percent": 50.0}, {"percent": 99.0}, on_violation="halt")
        self.before = self.rollout

    def become(self, rollout: Rollout) -> None:
        self.before, self.rollout = self.rollout, rollout

    @rule(elapsed_s=st.floats(0, 700), nacks=st.integers(0, 1), pending=st.integers(0, 1))
    def time_passes(self, elapsed_s: float, nacks: int, pending: int) -> None:
        self.become(tick(self.rollout, seen(nacks=nacks, pending=pending), elapsed_s, NOW))
        if nacks:
            assert self.rollout.step == self.before.step
            assert self.rollout.state not in (State.RUNNING, State.PAUSED)

    @rule(what=st.sampled_from([rules.pause, rules.resume, rules.abort]))
    def steer(self, what: Any) -> None:
        if self.rollout.active:
            self.become(what(self.rollout, BY))

    @invariant()
    def holds(self) -> None:
        now, before = self.rollout, self.before
        assert before.step <= now.step <= before.step + 1
        assert before.changes <= now.changes <= before.changes + 1
        assert now.state == before.state or now.changes > before.changes
        assert now == before or before.active
        if now.step > before.step:
            assert (before.state, now.baked_s) == (State.RUNNING, 0.0)


TestAnyOrder = AnyOrder.TestCase


# --------------------------------------------------------------------------------------------------------- guardrails


def test_p99() -> None:
    assert p99(()) is None
    assert p99(buckets(0.02, 0)) is None
    assert p99(buckets(0.02, 5)) == pytest.approx(0.016 + 0.99 * 0.004)
    mixed = tuple(a + b for a, b in zip(buckets(0.02, 985), buckets(1.0, 15), strict=True))
    assert p99(mixed) == pytest.approx(0.8 + 0.2 * 5 / 15)
    above = p99((0,) * len(TIME_BOUNDS_S) + (1,))
    assert above is not None
    assert TIME_BOUNDS_S[-1] < above < 1.001 * TIME_BOUNDS_S[-1]


def answers(count: int, empty: int = 0, reentries: int = 0) -> Measured:
    return Measured(answers=count, empty=empty, reentries=reentries)


def ttot(seconds: float, count: int) -> Measured:
    return Measured(ttot=buckets(seconds, count))


# Observations above the last bound of the histograms.
BEYOND = (0,) * len(TIME_BOUNDS_S) + (100,)

VIOLATIONS = [
    ("output_itl_p99_ms", MAX_MS, seen(Measured(output_itl=BEYOND)), itl((TIME_BOUNDS_S[-1], 100))),
    ("output_itl_p99_ms", 30.0, itl((0.05, 100)), itl((0.02, 100))),
    ("output_itl_p99_ratio", 1.5, itl((0.05, 100), (0.02, 100)), itl((0.05, 100), (0.04, 100))),
    ("ttot_p99_ms", 30.0, seen(ttot(0.05, 100)), seen(ttot(0.02, 100))),
    ("ttot_p99_ratio", 1.5, seen(ttot(0.05, 100), ttot(0.02, 100)), seen(ttot(0.05, 100), ttot(0.04, 100))),
    ("reentry_rate", 0.1, seen(answers(100, reentries=11)), seen(answers(100, reentries=10))),
    (
        "reentry_rate_increase",
        0.1,
        seen(answers(100, reentries=31), answers(100, reentries=20)),
        seen(answers(100, reentries=29), answers(100, reentries=20)),
    ),
    ("empty_answer_rate", 0.1, seen(answers(100, empty=11)), seen(answers(100, empty=10))),
    (
        "empty_answer_rate_increase",
        0.1,
        seen(answers(100, empty=31), answers(100, empty=20)),
        seen(answers(100, empty=29), answers(100, empty=20)),
    ),
    ("nacks", 1, seen(nacks=2), seen(nacks=1)),
    ("degraded_engines", 1, seen(degraded=2), seen(degraded=1)),
]


@pytest.mark.parametrize(("name", "limit", "bad", "good"), VIOLATIONS)
@pytest.mark.parametrize("on_violation", ["rollback", "halt"])
def test_every_guardrail(name: str, limit: float, bad: Sample, good: Sample, on_violation: str) -> None:
    rollout = started(guardrails={name: limit}, on_violation=on_violation)
    fine = tick(rollout, good, 1.0, NOW)
    assert (fine.state, fine.violation) == (State.RUNNING, None)
    tripped = tick(rollout, bad, 1.0, NOW)
    assert tripped.state is (State.HALTED if on_violation == "halt" else State.ROLLED_BACK)
    assert tripped.violation is not None
    assert (tripped.violation.guardrail, tripped.violation.limit) == (name, limit)
    assert tripped.violation.value is not None
    assert tripped.violation.value > limit
    event = tripped.events[-1]
    assert event.event == ("halted" if on_violation == "halt" else "rolled_back")
    said = re.fullmatch(rf"{name} is ([\d.,]+), limit ([\d.,]+)", event.reason)
    assert said is not None
    value, allowed = (float(number.replace(",", "")) for number in said.groups())
    assert value == pytest.approx(tripped.violation.value, rel=1e-3)
    assert value > allowed == limit, "they look different, too"


def test_the_reason_names_each_guardrail_that_is_violated() -> None:
    rollout = started(guardrails={"nacks": 0, "degraded_engines": 1, "output_itl_p99_ms": 10_000})
    tripped = tick(rollout, seen(nacks=1, degraded=2), 1.0, NOW)
    assert tripped.events[-1].reason == "nacks is 1, limit 0; degraded_engines is 2, limit 1"


@pytest.mark.parametrize(("name", "limit", "bad", "good"), VIOLATIONS[:-2])
def test_nothing_is_judged_by_too_little(name: str, limit: float, bad: Sample, good: Sample) -> None:
    rollout = tick(started(guardrails={name: limit, "min_observations": 101}), bad, 1e6, NOW)
    found = {reading.guardrail: reading for reading in rollout.guardrails}[name]
    assert (rollout.state, found.violated, found.waiting) == (State.RUNNING, False, True)
    assert found.observations == 100
    more = tick(rollout, bad, 1.0, NOW)
    assert more.violation is not None, "later observations add to earlier ones"
    at_once = tick(started(guardrails={name: limit, "min_observations": 0}), bad, 1.0, NOW)
    assert at_once.violation is not None
    unseen = tick(started(guardrails={name: limit, "min_observations": 0}), seen(), 1.0, NOW)
    assert [reading for reading in unseen.guardrails if reading.guardrail == name] == [
        GuardrailReading(guardrail=name, limit=limit, observations=0)
    ]


def test_each_step_is_measured_by_itself() -> None:
    rollout = started({"percent": 50.0, "bake_s": 1.0}, {"percent": 60.0}, guardrails=LIMITS)
    rollout = tick(rollout, itl((0.02, 10_000)), 1.0, NOW)
    assert (rollout.step, rollout.candidate) == (2, NOTHING)
    assert tick(rollout, itl((0.05, 10)), 1.0, NOW).violation is not None


def test_the_limits_of_the_example_hold_among_engines_that_are_alike() -> None:
    """In each step of ten minutes 3 answers a second have the candidate, and 27 the policy before."""
    text = (Path(guardrails.__file__).parent / "staged_rollout.md").read_text(encoding="utf-8")
    example = parse_toml_as(Plan, text.split("```toml\n")[1].split("```")[0])
    rng = np.random.default_rng(1)

    def hist(sums: int, median_s: float) -> tuple[int, ...]:
        times = rng.lognormal(np.log(median_s), 0.5, sums)
        return tuple(np.bincount(np.searchsorted(TIME_BOUNDS_S, times), minlength=len(TIME_BOUNDS_S) + 1).tolist())

    def measured(answers: int) -> Measured:
        empty = int(rng.binomial(answers, 0.005))
        return Measured(output_itl=hist(30 * answers, 0.02), ttot=hist(answers, 0.04), answers=answers, empty=empty)

    taken_back = 0
    for _ in range(30):
        rollout = begin(3, example, (STABLE, CANDIDATE), BY)
        for _ in range(120):
            mine, theirs = (measured(int(rng.poisson(5 * a_second))) for a_second in (3, 27))
            sample = Sample(candidate=mine, stable=theirs, candidate_engines=1, stable_engines=9)
            rollout = tick(rollout, sample, 5.0, NOW)
        taken_back += rollout.state is State.ROLLED_BACK
    assert taken_back <= 1


# ---------------------------------------------------------------------------------------------------------------- harm


def harmed(judged: int, harmful: int, shortened: int = 500, unjudged: int = 0) -> Sample:
    counts = {"judged": judged, "judged_stops": judged, "harmful": harmful, "unjudged": unjudged}
    return seen(Measured(**counts, shortened=shortened))


def watching(limit: float | None = 0.01) -> Rollout:
    return begin(3, plan(), (STABLE, CANDIDATE), BY, limit)


@pytest.mark.parametrize(
    ("sample", "state", "waits"),
    [
        (harmed(12, 3), State.ROLLED_BACK, False),
        (harmed(6, 3), State.ROLLED_BACK, False),
        (harmed(12, 1), State.RUNNING, True),
        (harmed(19, 0), State.RUNNING, True),
        (harmed(20, 0), State.RUNNING, False),
        (harmed(1000, 10), State.RUNNING, False),
        (harmed(1000, 60), State.ROLLED_BACK, False),
        (harmed(3, 0, shortened=29), State.RUNNING, False),
        # Most requests that would be harmed cannot be judged, so harm is not measured.
        (harmed(5, 5, unjudged=40), State.RUNNING, False),
        (harmed(0, 0, shortened=0), State.RUNNING, False),
    ],
)
def test_harm_rolls_back_once_the_evidence_is_strong(sample: Sample, state: State, waits: bool) -> None:
    """A step waits for judged requests once enough are shortened, and not otherwise."""
    after = tick(watching(), sample, 1.0, NOW)
    assert after.state is state
    assert ("harm_rate" in after.waiting_for) is waits
    if state is State.ROLLED_BACK:
        assert after.events[-1].reason.startswith("harm_rate is 0.")


def test_what_is_counted_of_harm() -> None:
    """Counts add up over samples, harm that is not measured has no value, and no harm exceeds a limit of 1."""
    after = watching()
    for _ in range(3):
        after = tick(after, harmed(4, 1), 1.0, NOW)
    assert after.state is State.ROLLED_BACK
    assert (after.candidate.judged, after.candidate.harmful, after.candidate.shortened) == (12, 3, 1500)
    (reading,) = [r for r in tick(watching(), harmed(5, 5, unjudged=40), 1.0, NOW).guardrails if "harm" in r.guardrail]
    assert (reading.value, reading.observations) == (None, 5)
    # Requests that nothing would have ended show nothing of the ends that could not be judged.
    hidden = seen(Measured(judged=100, judged_stops=10, unjudged=30, shortened=500))
    (reading,) = [r for r in tick(watching(), hidden, 1.0, NOW).guardrails if "harm" in r.guardrail]
    assert (reading.value, reading.waiting) == (None, False)
    for limit in (None, 1.0):
        assert tick(watching(limit), harmed(100, 100), 1.0, NOW).state is State.RUNNING


@pytest.mark.parametrize(("limit", "share", "found"), [(0.01, 0.3, 0.95), (0.02, 0.3, 0.9)])
def test_the_requests_that_a_step_waits_for_show_great_harm(limit: float, share: float, found: float) -> None:
    """The probability is exact: that of all courses in which the evidence is strong after some request."""
    assert violated(limit, share, MIN_JUDGED) > found
    assert violated(limit, limit, 1000) < 0.01, "a candidate within the limit hardly ever violates it"


def violated(limit: float, share: float, judged: int) -> float:
    """Return the probability that so many requests, each looked at, violate a limit, if this share is harmed."""
    courses: Any = np.ones(1)
    for number in range(1, judged + 1):
        # By the number of harmful requests, with which the evidence grows.
        courses = np.convolve(courses, (1 - share, share))
        while len(courses) and evidence(len(courses) - 1, number, limit) >= STRONG_EVIDENCE:
            courses = courses[:-1]
    return 1 - float(courses.sum())


def test_the_limit_for_harm_is_the_plans_or_the_candidates_own() -> None:
    shortening, neutral = policy(scheduler={"max_think_tokens": 9}, entropy={"max_loss": 0.2}), policy()
    assert plan().harm_limit(shortening) == 0.2
    assert plan().harm_limit(neutral) is None
    assert plan().harm_limit(policy(extension={"own": {"shadow": False}})) == policy().entropy.max_loss
    assert plan().harm_limit(policy(extension={"own": {"shadow": True}})) is None
    unmeasured = policy(scheduler={"max_think_tokens": 9}, entropy={"enabled": False})
    assert plan().harm_limit(unmeasured) is None
    assert plan(guardrails={"harm_rate": 0.5}).harm_limit(shortening) == 0.5
