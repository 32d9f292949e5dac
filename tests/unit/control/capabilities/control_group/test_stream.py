"""The control group: who belongs to it, what is counted, also by several replicas, and how soon harm is found."""

from __future__ import annotations

import random
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from meridian.v1 import agent_pb2, fleet_pb2

from meridian_control.capabilities.control_group import savings
from meridian_control.capabilities.control_group.experiments import MAX_EXPERIMENTS, Experiments, rules_of
from meridian_control.capabilities.control_group.harm_guard import HarmGuard, Watch
from meridian_control.capabilities.control_group.rule import held_out
from meridian_control.capabilities.control_group.stream import JOINED, LEFT, TURNS, ControlGroup
from meridian_control.common.decision_words import why
from meridian_control.common.inference import SequentialTest
from meridian_control.common.slices import at_once
from meridian_control.journal.messages import list_decisions
from meridian_control.policy.model import Policy
from meridian_control.policy.shortening_kinds import ENTROPY, without
from tests.fakes.tables import policy
from tests.unit.sessions import (
    CALIBRATED,
    EARLY,
    NOW,
    Stream,
    aborts,
    each_token_ends_a_sentence,
    opens,
    play,
    reconnected,
    stream,
)

# EAT below 0.1 nats twice in a row ends thinking.
RULES = {**CALIBRATED, "eat_warmup_samples": 2, "eat_probe_placement": "anywhere"}
HALF = policy(scheduler=EARLY, entropy={**RULES, "holdout_share": 0.5})
OTHER = policy(scheduler=EARLY, entropy={**RULES, "holdout_share": 0.5, "ema_alpha": 0.9})
CONTROL, TREATED = (
    next(name for name in map(str, range(100)) if held_out(name, 0.5) == is_control) for is_control in (True, False)
)


def counts(made: Stream) -> fleet_pb2.Savings:
    """Return the counts under the rules in force, with the estimates."""
    return told_of(made.session.part(ControlGroup).experiments)


def told_of(experiments: Experiments) -> fleet_pb2.Savings:
    told = savings.merged([fleet_pb2.GetSavingsResponse(savings=savings.messages(experiments, None))])
    return told.savings[0]


# ---------------------------------------------------------------------------------------------------------- membership


def test_the_group_has_its_share_and_contains_each_smaller_group() -> None:
    ids = [f"chatcmpl-{number}" for number in range(20_000)]
    small, large = ({i for i in ids if held_out(i, share)} for share in (0.02, 0.3))
    assert small < large
    assert 300 < len(small) < 500
    assert 5_700 < len(large) < 6_300
    assert not any(held_out(i, 0.0) for i in ids)
    # The hash does not change, because replicas of different versions must agree.
    assert [number for number in range(200) if held_out(f"request-{number}", 0.02)] == [185]


def test_rules_only_shadow_the_control_group() -> None:
    made = stream(HALF)
    for name in (CONTROL, TREATED):
        made.open(name, think=40, answer=2)
    sent = made.step(20)
    names = {slot: info.request_id for slot, info in made.session.table.requests()}
    forces = {names.get(force.slot, "gone"): force.shadow for force in sent.forces}
    assert forces[CONTROL] is True
    assert not forces.get(TREATED, False)
    assert made.session.totals.ends["eat"] == 1
    held = {probe.slot: probe.hold_ms for probe in sent.probes}
    assert held[0] == 0 < held[1], "a request that a rule only shadows waits for no decision"
    made.step(40)
    assert made.session.totals.ends["natural"] == 1, "the control group's thinking ends by itself"


@pytest.mark.parametrize(("own_cap", "ends"), [(None, "natural"), (12, "hard_cap")])
def test_only_the_clients_own_cap_holds_for_the_control_group(own_cap: int | None, ends: str) -> None:
    made = stream(policy(scheduler={**EARLY, "max_think_tokens": 9}, entropy={**RULES, "holdout_share": 0.5}))
    made.agent.eat_nats = 3.0
    made.open(CONTROL, think=40, answer=2, own_cap=own_cap)
    made.step(50)
    assert made.session.totals.ends == {ends: 1}
    made.open(TREATED, think=40, answer=2)
    made.step(20)
    assert made.session.totals.ends["hard_cap"] == 1 + (ends == "hard_cap")


def test_a_request_stays_in_its_arm_on_another_replica() -> None:
    first = stream(HALF)
    first.open(CONTROL)
    first.step(3)
    other = stream(HALF)
    other.session.on_message(agent_pb2.ConnectRequest(snapshot=first.agent.snapshot()), NOW)
    assert bool(other.session.table.control[0])
    assert not other.session.table.counted[0], "the other replica does not know how the request began"


def test_explain_says_so_once() -> None:
    made = play(stream(HALF), opens(CONTROL), 3, OTHER, opens(TREATED), 3)
    for name, told in ((CONTROL, ["control_group"]), (TREATED, [])):
        assert [event.kind for event in made.life(name).events if event.kind == "control_group"] == told


def test_a_decision_says_that_the_control_group_is_why_it_is_in_shadow() -> None:
    """A section in shadow is so for all requests."""
    shadowed = {"soft_think_tokens": 2, "shadow": True}
    made = stream(HALF.model_copy(update={"scheduler": HALF.scheduler.model_copy(update=shadowed)}))
    each_token_ends_a_sentence(made)
    play(made, opens(CONTROL, 40, 2), opens(TREATED, 40, 2), 20)
    listed = at_once(list_decisions(made.log, fleet_pb2.ListDecisionsRequest(kind="force"))).decisions
    said = {(d.request_id, d.reason): (d.shadow, d.control_group) for d in listed}
    assert said == {
        (CONTROL, "eat"): (True, True),
        (CONTROL, "soft_close"): (True, False),
        (TREATED, "eat"): (False, False),
        (TREATED, "soft_close"): (True, False),
    }
    assert all(("in the control group" in why(d)) == d.control_group for d in listed)
    probes = at_once(list_decisions(made.log, fleet_pb2.ListDecisionsRequest(kind="probe"))).decisions
    assert len(probes) > 0
    assert not any(d.control_group for d in probes)


def test_explain_says_that_a_request_leaves_the_group_and_comes_back() -> None:
    """What shortens the request afterwards would contradict that it is in the group. The agent connects again while
    the request is in the group, and again while it is not."""
    nobody = HALF.model_copy(update={"entropy": HALF.entropy.model_copy(update={"holdout_share": 0.0})})
    made = play(stream(HALF), opens(CONTROL, 200), 2)
    made = play(reconnected(made, HALF), 1, nobody, 1)
    made = play(reconnected(made, nobody), 1, HALF, 1)
    said = [(event.kind, event.detail) for event in made.life(CONTROL).events if event.kind in TURNS]
    assert said == [("control_group", JOINED), ("control_group_left", LEFT), ("control_group", JOINED)]


@pytest.mark.parametrize("entropy", [{"holdout_share": 0.0}, {"shadow": True}, {"enabled": False}])
def test_there_is_no_group_without_rules_in_force_or_without_a_share(entropy: dict[str, Any]) -> None:
    made = stream(policy(scheduler=EARLY, entropy={**RULES, "holdout_share": 0.5, **entropy}))
    made.open(CONTROL, think=3, answer=1)
    made.step(10)
    table = made.session.table
    assert not table.control.any()
    assert not table.counted.any()
    assert savings.messages(made.session.part(ControlGroup).experiments, None) == []


def test_overrides_decide_for_whom_rules_are_in_force() -> None:
    rules = policy(
        scheduler=EARLY,
        entropy={**RULES, "shadow": True, "holdout_share": 0.5},
        override=[{"tenant": "a", "entropy": {"shadow": False}}],
    )
    made = stream(rules)
    slots = [made.open(CONTROL, tenant="a"), made.open(f"{TREATED}", tenant="a"), made.open("other", tenant="b")]
    made.step(2)
    assert made.session.table.control[slots].tolist() == [True, False, False]
    assert made.session.table.counted[slots].tolist() == [True, True, False]


# -------------------------------------------------------------------------------------------------------------- counts


@dataclass
class Course:
    """A request whose trial answer is wrong until `right_from` tokens, and whose EAT is low from `low_from` on."""

    think: int
    low_from: int
    right_from: int

    def open(self, made: Stream, name: str, answer: int = 2) -> None:
        made.open(
            name,
            self.think,
            answer,
            eat_nats=lambda tokens: 0.01 if tokens >= self.low_from else 2.0,
            trial_answer=lambda tokens: int(tokens >= self.right_from),
        )


@pytest.mark.parametrize(
    ("course", "judged"),
    [
        (Course(30, low_from=8, right_from=8), (1, 1, 0, 0)),
        (Course(30, low_from=8, right_from=20), (1, 1, 1, 0)),
        # The rule does not fire, so it does no harm.
        (Course(30, low_from=99, right_from=20), (1, 0, 0, 0)),
    ],
)
def test_harm_by_the_trial_answer_that_stays(course: Course, judged: tuple[int, ...]) -> None:
    made = stream(HALF)
    course.open(made, CONTROL)
    made.step(40)
    told = counts(made)
    assert (told.judged, told.judged_stops, told.harmful, told.unjudged) == judged
    assert told.control.stopped == judged[1]
    assert (told.control.requests, told.control.think_tokens, told.control.answer_tokens) == (1, 30, 2)
    assert (told.shadow_saved_tokens > 10) == bool(judged[1])


def test_of_the_choices_of_one_prompt_only_the_first_is_judged() -> None:
    """Choices of one prompt are harmed together, so that they would be counted as proof of more harm than there is."""
    made = stream(HALF)
    prompts = (f"chatcmpl-{number}" for number in range(1000))
    prompt = next(each for each in prompts if all(held_out(f"{choice}_{each}", 0.5) for choice in range(4)))
    for choice in range(4):
        Course(30, low_from=8, right_from=20).open(made, f"{choice}_{prompt}")
    made.step(40)
    told = counts(made)
    assert (told.judged, told.judged_stops, told.harmful, told.unjudged) == (1, 1, 1, 0)
    assert (told.control.requests, told.control.stopped, told.control.think_tokens) == (4, 4, 120)
    assert Watch().look({"alone": told}) < 1


def test_an_empty_answer_at_the_stop_is_harm() -> None:
    made = stream(HALF)
    made.agent.empty_answer = True
    Course(30, low_from=8, right_from=8).open(made, CONTROL)
    made.step(12)
    made.agent.empty_answer = False
    made.step(30)
    assert (counts(made).judged_stops, counts(made).harmful) == (1, 1)


@pytest.mark.parametrize(("other", "is_measured"), [(False, False), (None, True)])
def test_harm_is_not_measured_where_answers_begin_alike(
    other: bool | None, is_measured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meridian_control.capabilities.control_group.requests.MIN_COMPARED", 6)
    made = stream(HALF)
    made.agent.other_answer = other
    names = [name for name in map(str, range(100)) if held_out(name, 0.5)][:6]
    for number, name in enumerate(names):
        assert not (number and counts(made).not_measured), "too few requests to say so"
        Course(14, low_from=8, right_from=8).open(made, name)
        made.step(20)
    told = counts(made)
    assert told.judged_stops == len(names)
    assert told.HasField("harm_ratio") == is_measured
    assert ("eat_answer_prefix" in told.not_measured) != is_measured


def test_harm_of_a_rule_without_probes_is_not_measured() -> None:
    capabilities = agent_pb2.Capabilities(token_entropy=True, force_end=True, dispatch=True)
    rules = {"shadow": False, "rpdi_threshold": 0.5, "eat_level_threshold_nats": 0.0, "holdout_share": 0.5}
    made = stream(policy(scheduler=EARLY, entropy={**rules, "rpdi_window_tokens": 2}), capabilities=capabilities)
    each_token_ends_a_sentence(made)
    made.open(CONTROL, think=30, answer=2)
    made.step(40)
    told = counts(made)
    assert (told.control.stopped, told.judged, told.unjudged) == (1, 0, 1)
    assert not told.HasField("harm_ratio")


def test_aborts_and_lengths() -> None:
    made = stream(HALF)
    made.agent.eat_nats = 3.0
    play(made, opens(CONTROL), opens(TREATED), 5, aborts(CONTROL))
    made.agent.engine.finish(TREATED, agent_pb2.FINISH_REASON_LENGTH)
    made.step(2)
    told = counts(made)
    assert (told.control.aborts, told.control.lengths, told.treated.aborts, told.treated.lengths) == (1, 0, 0, 1)
    assert (told.control.answers, told.treated.answers, told.judged) == (0, 0, 0)
    assert told.treated.think_tokens == 5
    # Agents of 0.3.0 report stop strings and disconnects alike.
    play(made, opens(f"0{CONTROL}"), 5)
    made.agent.engine.finish(f"0{CONTROL}", agent_pb2.FINISH_REASON_ABORT)
    made.step(2)
    both = counts(made)
    assert both.control.requests + both.treated.requests == 3
    assert (both.control.aborts, both.treated.aborts) == (1, 0), "it may be a stop string"


def test_requests_count_for_the_rules_under_which_they_thought() -> None:
    made = play(stream(HALF), opens(CONTROL, 10), 5, OTHER)
    assert not made.session.table.counted.any()
    made.apply(HALF)
    assert not made.session.table.counted.any(), "the request has thought under other rules meanwhile"
    same = HALF.model_copy(update={"telemetry": HALF.telemetry.model_copy(update={"report_interval_steps": 2})})
    made = play(stream(HALF), opens(CONTROL, 10, 1), 5, same, 20)
    assert (counts(made).since_revision, counts(made).control.requests) == (1, 1), "the rules are the same"


def test_experiments_are_few_and_their_sums_never_fall() -> None:
    experiments = Experiments()
    for revision in range(1, 50):
        rules = policy(entropy={"rpdi_threshold": float(revision)})
        experiment = experiments.experiment_of(revision, rules)
        assert experiments.experiment_of(revision, rules) is experiment
        experiment.counts.judged += 1
        experiment.counts.control.requests += 2
        assert (experiments.total().judged, experiments.total().control.requests) == (revision, 2 * revision)
    assert len(experiments.newest()) == MAX_EXPERIMENTS
    assert experiments.newest()[0].counts.rules == rules_of(rules)


def test_the_same_rules_after_others_begin_anew() -> None:
    experiments, rules, shadowed = Experiments(), HALF, without(HALF, ENTROPY)
    first = experiments.experiment_of(3, rules)
    assert experiments.experiment_of(5, rules) is first
    experiments.experiment_of(6, shadowed)
    again = experiments.experiment_of(7, rules)
    assert again is not first
    assert experiments.experiment_of(5, rules) is first, "a late engine still counts under the older revision"
    assert [kept.counts.since_revision for kept in experiments.newest()] == [7, 6]


# ------------------------------------------------------------------------------------------------- signals go bad


def run(
    rng: random.Random, rules: Policy, requests: int, bad_from: int, watch: Watch | None = None
) -> tuple[Stream, int | None]:
    """Run requests, 50 at a time; from request `bad_from` on, EAT is low before the answer is right in every other one.

    Before that the answer is wrong where EAT is low in 0.3 % of the requests. Return the stream, and the number of the
    last request that had closed when the watch found harm, None if it did not.
    """
    made, batch = stream(rules), 50
    for begin in range(0, requests, batch):
        for number in range(begin, begin + batch):
            right_from = rng.randrange(6, 14)
            is_wrong = rng.random() < (0.5 if number >= bad_from else 0.003)
            course = Course(20 + rng.randrange(8), low_from=4 if is_wrong else right_from, right_from=right_from)
            course.open(made, f"r{rng.getrandbits(64):x}", answer=1)
        while made.agent.engine.live:
            made.step()
        if watch is not None and watch.look({"alone": counts(made)}) >= 1:
            return made, begin + batch
    return made, None


def test_signals_that_go_bad_in_mid_run_are_found() -> None:
    """After 300 good requests the harm is found within 1,000 more at the default share, and within 300 at 0.1."""
    for seed, share, within in ((0, 0.02, 1000), (0, 0.1, 300)):
        rules = policy(scheduler=EARLY, entropy={**RULES, "holdout_share": share})
        made, found = run(random.Random(seed), rules, requests=300 + within, bad_from=300, watch=Watch())
        assert found is not None
        assert 300 < found <= 300 + within
        told = counts(made)
        assert told.harm_ratio.low > told.max_loss, "the exact bound agrees in the end"


def test_clean_runs_raise_no_alarm() -> None:
    for seed in range(2):
        made, found = run(random.Random(100 + seed), HALF, requests=200, bad_from=10**9, watch=Watch())
        assert found is None
    told = counts(made)
    assert told.saved_ratio.low > 0.2
    own_estimate = told.shadow_saved_tokens / told.control.think_tokens
    assert abs(own_estimate - told.saved_ratio.value) < 0.05, "the shadow's own estimate agrees"


# ------------------------------------------------------------------------------------------------- several replicas


def answer(**fields: Any) -> fleet_pb2.Savings:
    """Return a replica's counts, all of the entropy rules."""
    names = ("judged", "judged_stops", "harmful", "unjudged")
    harm = fleet_pb2.ShorteningHarm(kind="entropy", **{name: fields.get(name, 0) for name in names})
    return fleet_pb2.Savings(**{"rules": "r", "since_revision": 3, "max_loss": 0.01, "kinds": [harm], **fields})


def test_counts_of_replicas_add() -> None:
    arm = fleet_pb2.ArmCounts(requests=40, think_tokens=4000, think_tokens_squares=440_000.0, answers=30)
    other = fleet_pb2.ArmCounts(requests=60, think_tokens=3000, think_tokens_squares=180_000.0, answers=5)
    one = answer(treated=other, control=arm, judged=40, judged_stops=30, harmful=1, shadow_saved_tokens=7)
    two = answer(treated=arm, control=arm, judged=2, harmful=0, unjudged=9, since_revision=5, in_force=True)
    told = savings.merged(fleet_pb2.GetSavingsResponse(savings=[each]) for each in (one, two))
    (whole,) = told.savings
    assert (whole.since_revision, whole.in_force, whole.treated.requests, whole.control.answers) == (3, True, 100, 60)
    assert (whole.judged, whole.harmful, whole.unjudged, whole.shadow_saved_tokens) == (42, 1, 9, 7)
    assert whole.saved_tokens.value == pytest.approx(100 - 70)
    assert whole.saved_ratio.value == pytest.approx(0.3)
    assert whole.harm_ratio.low < 1 / 42 < whole.harm_ratio.high


def test_the_watch_takes_each_request_in_once_and_begins_anew_with_new_rules() -> None:
    watch = Watch()
    a, b = answer(judged=50, harmful=3), answer(judged=10)
    first = watch.look({"a": a, "b": b})
    assert watch.look({"a": a, "b": b}) == first, "no new request, no new evidence"
    grown = watch.look({"a": answer(judged=60, harmful=9), "b": b})
    alone = SequentialTest(0.01)
    evidence = alone.add_trials(3, 60), alone.add_trials(6, 10)
    assert grown / first == pytest.approx(evidence[1] / evidence[0])
    again = watch.look({"a": answer(since_revision=9, judged=1), "b": b})
    assert again < first
    assert watch.look({"a": answer(since_revision=9, judged=1)}) == again, "a replica that is silent takes nothing back"


async def test_evidence_outlives_a_look_at_which_its_only_replica_is_silent() -> None:
    counted, silent = [answer(judged=60)], list[str]()

    async def heard() -> tuple[dict[str, fleet_pb2.GetSavingsResponse], list[str]]:
        return {} if silent else {"peer": fleet_pb2.GetSavingsResponse(savings=counted)}, silent

    unused: Any = SimpleNamespace(newest=None)
    guard = HarmGuard(heard, lambda: True, unused, unused, lambda: NOW)
    await guard.look()
    counted[:] = [answer(judged=64, harmful=2)]
    await guard.look()
    before = guard.evidence["r"].evidence_ratio
    silent.append("peer")
    await guard.look()
    assert guard.evidence == {}
    silent.clear()
    await guard.look()
    assert guard.evidence["r"].evidence_ratio == before, "no new request, no new evidence"
