"""When an attempt is due, what follows from it, what a found rule is in a policy, and when it is withdrawn."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from meridian_control.capabilities.self_calibration import rule as rules
from meridian_control.capabilities.self_calibration.learner import (
    MAX_EPISODES,
    MAX_TRIED,
    PAUSE,
    Learner,
    Rule,
    State,
    fewest,
)
from meridian_control.capabilities.self_calibration.watch import Watch
from meridian_control.policy.model import Override, Policy, Who
from tests.fakes.tables import policy

NOW = datetime(2026, 5, 4, 3, 2, 1, tzinfo=UTC)
LOSS = 0.02
WHO = Who("org/model#1", slo_class="chat", fingerprint="0123456789abcdef")
REFERENCE = [{"max_nats": edge, "requests": 100} for edge in (0.2, 0.6, 1.0, 1.4, 3.0)]
RULE = Rule.model_validate(
    {
        "text": "EAT < 0.05 nats",
        "entropy": {"ema_alpha": 1.0, "eat_level_threshold_nats": 0.05, "confirm_sentence_ends": 2},
        "floor_tokens": 700,
        "bound": 0.011,
        "saved": 0.25,
        "reference": REFERENCE,
    }
)


def learner() -> Learner:
    return Learner.new(WHO.traffic, NOW)


def test_an_attempt_is_due_once_each_half_can_prove_a_rule() -> None:
    assert [fewest(attempt, 0.01) for attempt in (1, 2, 10)] == [736, 954, 1532]
    assert fewest(1, 1.0) == 2
    new = learner()
    assert not new.is_due(fewest(1, LOSS) - 1, LOSS, NOW)
    assert new.is_due(fewest(1, LOSS), LOSS, NOW)
    assert not new.is_due(fewest(1, LOSS), 0.01, NOW), "the policy now allows less"
    assert [new.needs(allowed) for allowed in (0.01, 0.05)] == [fewest(1, 0.01), fewest(1, 0.05)]


def test_no_attempt_is_due_that_needs_more_requests_than_are_kept() -> None:
    new = learner()
    assert (fewest(1, 0.0015), new.hopeless(0.0015)) == (4916, "")
    assert new.is_due(MAX_EPISODES, 0.0015, NOW + PAUSE)
    assert new.hopeless(0.001) == "entropy.max_loss 0.001 needs 7,376 requests in the next attempt; 5,000 are kept"
    assert not new.is_due(MAX_EPISODES, 0.001, NOW + PAUSE)
    assert new.hopeless(1e-310), "a loss by which a float holds no quotient stops no other traffic"
    refused = new.refused(4916, "no", 1, NOW)
    assert refused.hopeless(0.0015).startswith("entropy.max_loss 0.0015 needs 6,380 requests"), "a later attempt"
    assert not new.proved(RULE, 900, 7, NOW).hopeless(0.001), "a rule that is proved stays in force"


def test_after_a_change_of_the_probes_only_later_requests_count() -> None:
    new = learner().probed("every 64 tokens", 7)
    assert (new.probing, new.after) == ("every 64 tokens", 0), "nothing is known of how the first ones were probed"
    assert new.probed("every 64 tokens", 9) is new
    assert new.probed("at paragraphs", 9).after == 9


def test_a_refused_attempt_is_followed_by_a_larger_one() -> None:
    refused = learner().refused(400, "EAT < 0.1 nats may lose 3 %", 17, NOW)
    assert (refused.state, refused.attempts, refused.why) == (State.REFUSED, 1, "EAT < 0.1 nats may lose 3 %")
    assert (refused.needed, refused.after) == (800, 0), "the same requests count again"
    again = refused.refused(3000, "no", 4000, NOW)
    assert (again.needed, again.after, again.attempts) == (MAX_EPISODES, 4000, 2), "as many new ones"
    assert not again.is_due(MAX_EPISODES, LOSS, NOW + PAUSE - timedelta(seconds=1)), "attempts share the confidence"
    assert again.is_due(MAX_EPISODES, LOSS, NOW + PAUSE)
    for number in range(20):
        again = again.refused(5000, str(number), 5000, NOW)
    assert [tried.outcome for tried in again.tried] == [str(number) for number in range(20 - MAX_TRIED, 20)]


def test_an_attempt_that_saw_nothing_is_followed_by_one_on_later_requests() -> None:
    refused = learner().probed("no prefix", 0).refused(400, "answers begin alike", 17, NOW, anew=True)
    assert (refused.after, refused.needs(LOSS), refused.attempts) == (17, MAX_EPISODES, 0), "no rule was tried"
    mended = refused.probed("a prefix", 30)
    assert (mended.after, mended.needs(LOSS)) == (30, fewest(1, LOSS))
    assert mended.is_due(fewest(1, LOSS), LOSS, NOW)


def test_requests_that_cannot_be_judged_are_no_attempt() -> None:
    short = learner().short(364, 366, 2, 17, NOW)
    assert (short.state, short.attempts, short.needs(LOSS), short.tried) == (State.RECORDING, 0, 368, ())
    assert short.reads(LOSS) == 368, "of the newest 366 it would again be short"
    later = short.refused(366, "no", 17, NOW)
    assert (later.needs(LOSS), later.reads(LOSS)) == (736, fewest(2, LOSS)), "no more is read than a proof needs"
    most = learner().short(36, 366, 328, 17, NOW).refused(72, "no", 17, NOW)
    assert most.needs(LOSS) == 2 * 694, "the next attempt would be on nearly the same requests"
    full = short.short(300, MAX_EPISODES, 66, 17, NOW + PAUSE)
    assert (full.state, full.attempts, full.after) == (State.REFUSED, 0, 17)
    assert full.why == "300 of 5,000 requests can be judged, and 66 more are needed"
    assert not full.is_due(MAX_EPISODES, LOSS, NOW + PAUSE), "the worker would run at each tick"


def test_the_failure_of_a_calibration_is_known_until_the_next_has_a_result() -> None:
    failed = learner().refused(400, "no", 1, NOW).failed("MemoryError")
    assert (failed.failure, failed.why, failed.attempts) == ("MemoryError", "no", 1)
    outcomes = failed.short(364, 366, 2, 17, NOW), failed.refused(800, "no", 2, NOW), failed.proved(RULE, 900, 7, NOW)
    assert [outcome.failure for outcome in outcomes] == [""] * 3


def test_attempts_are_counted_over_the_whole_life() -> None:
    rolled = learner().refused(400, "no", 1, NOW).proved(RULE, 900, 7, NOW).rolled_out(50, NOW)
    assert (rolled.state, rolled.attempts, rolled.requests, rolled.after) == (State.IN_FORCE, 2, 900, 50)
    assert not rolled.is_due(10**6, LOSS, NOW), "the rule is in force"
    withdrawn = rolled.withdrawn("it loses too much", 99, NOW)
    assert (withdrawn.state, withdrawn.rule, withdrawn.after) == (State.WITHDRAWN, None, 99)
    assert (withdrawn.attempts, withdrawn.needs(LOSS)) == (2, fewest(3, LOSS))
    assert Learner.model_validate_json(rolled.model_dump_json()) == rolled


# ------------------------------------------------------------------------------------------------------- in the policy


def test_a_rule_holds_for_its_traffic_alone() -> None:
    base = policy(entropy={"rpdi_threshold": 3.0, "give_up_tokens": 900, "give_up_shadow": False})
    mine = rules.with_override(base, WHO.traffic, rules.override_of(WHO.traffic, RULE))
    own = mine.of(WHO)
    assert (own.entropy.shadow, own.entropy.eat_level_threshold_nats, own.entropy.confirm_sentence_ends) == (
        False,
        0.05,
        2,
    )
    assert (own.entropy.rpdi_threshold, own.entropy.give_up_tokens) == (0, 0), "no other rule comes with it"
    assert own.scheduler.min_think_tokens == 700
    others: list[dict[str, Any]] = [{"model": "org/model"}, {"slo_class": ""}, {"fingerprint": ""}, {"slo_class": "c"}]
    assert all(mine.of(WHO._replace(**other)) is mine for other in others)


def test_overrides_of_people_come_later() -> None:
    theirs = Override.model_validate({"slo_class": "chat", "entropy": {"shadow": True}})
    base = Policy(override=(theirs,))
    override = rules.override_of(WHO.traffic, RULE)
    mine = rules.with_override(base, WHO.traffic, override)
    assert mine.override == (override, theirs)
    assert mine.of(WHO).entropy.shadow
    assert rules.has(mine, override)
    assert not rules.has(base, override)
    other = rules.override_of(WHO.traffic, RULE.model_copy(update={"floor_tokens": 800}))
    again = rules.with_override(mine, WHO.traffic, other)
    assert again.override == (other, theirs)
    assert not rules.has(again, override)
    assert rules.with_override(again, WHO.traffic, None) == base


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ({"entropy": {"rank_conditions": [{"max_ranks": [5]}]}, "effort": "high"}, "effort high sets entropy.rank_con"),
        ({"entropy": {"rpdi_threshold": 1.5, "give_up_tokens": 9}, "tenant": "*"}, "entropy.rpdi_threshold, entropy"),
        ({"entropy": {"eat_probe_interval_tokens": 16}, "engine_labels": {"a": "b"}}, "entropy.eat_probe_interval_tok"),
        ({"entropy": {"self_calibration": False}, "effort": "low"}, "effort low sets entropy.self_calibration"),
        ({"scheduler": {"min_think_tokens": 32}, "model": "org/*"}, "model org/* sets scheduler.min_think_tokens"),
        ({"entropy": {"eat_level_threshold_nats": 0.5}, "slo_class": "ch*"}, "slo_class ch* sets entropy.eat_level_th"),
        ({"entropy": {"shadow": True}}, "all requests sets entropy.shadow"),
        ({"entropy": {"eat_probe_interval_tokens": 16, "self_calibration": True}, "slo_class": "chat"}, ""),
        ({"entropy": {"enabled": False}, "tenant": "evals"}, ""),
        ({"entropy": {"shadow": False}, "slo_class": "batch", "effort": "high"}, ""),
        ({"entropy": {"shadow": False}, "model": "org"}, ""),
        ({"entropy": {"shadow": False}, "traffic": "org/other##chat"}, ""),
        ({"scheduler": {"max_think_tokens": 900}, "effort": "low"}, ""),
    ],
)
def test_overrides_that_would_change_a_rule_keep_it_from_being_found(override: dict[str, Any], said: str) -> None:
    """Some requests would have a rule that nobody has proved, or probes at other places than the rest of the sample."""
    base = policy(override=[override])
    assert said in rules.obstacle(base, rules.conflicts(base, WHO))
    assert bool(said) == bool(rules.obstacle(base, rules.conflicts(base, WHO)))
    probing = rules.probing(base, base, WHO, rules.conflicts(base, WHO))
    assert bool(said) == (probing != rules.probing(policy(), policy(), WHO))


def test_a_small_fleet_gets_a_rule_at_once() -> None:
    percents = [[step.percent for step in rules.plan_for(engines).step] for engines in (1, 7, 8, 500)]
    assert percents == [[100], [100], [50, 100], [50, 100]]


# ---------------------------------------------------------------------------------------------------------- withdrawal


@pytest.mark.parametrize(
    ("judged", "harmful", "batches", "why"),
    [
        (20, 0, 200, ""),
        (100, 2, 50, ""),
        (20, 4, 5, "it would have changed "),
        (1, 1, 8, "it would have changed "),
    ],
    ids=["no harm", "as much as is allowed", "more", "each"],
)
def test_harm_withdraws_a_rule(judged: int, harmful: int, batches: int, why: str) -> None:
    watch = Watch(RULE, LOSS, 0)
    for _ in range(batches):
        watch.add(judged, harmful, [])
    assert watch.why.startswith(why)
    assert bool(watch.why) == bool(why)


def test_drift_withdraws_a_rule_and_names_the_bin() -> None:
    watch = Watch(RULE, LOSS, 0)
    assert not shifted(watch, [0.1, 0.3, 0.9, 1.2, 2.0])
    found = shifted(watch, [5.0] * 5)
    assert found.startswith("the traffic has changed: ")
    assert "requests have a first EAT above 1.4 nats, where the calibration had 100 of 500" in found
    assert "up to 0.2 nats" in shifted(Watch(RULE, LOSS, 0), [0.1] * 5)
    assert not shifted(Watch(RULE.model_copy(update={"reference": ()}), LOSS, 0), [5.0] * 5)


def shifted(watch: Watch, first_eat: list[float]) -> str:
    """Return why a rule is withdrawn after many such requests without harm."""
    for _ in range(40):
        watch.add(len(first_eat), 0, first_eat)
    return watch.why
