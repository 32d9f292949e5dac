"""The bounds agree with scipy, and the sequential test keeps its false-alarm rate and finds a change."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from scipy import stats  # type: ignore[import-untyped]

from meridian_control.common.inference import (
    SequentialTest,
    Sums,
    binomial_lower,
    binomial_upper,
    difference,
    evidence,
    regularized_beta,
    saved_ratio,
    student_quantile,
)


@given(st.floats(0, 1), st.floats(0.5, 5000), st.floats(0.5, 5000))
@example(0.01, 1.0, 30_000.0)
@example(0.9999999999999999, 0.5, 0.5)
def test_the_beta_distribution(x: float, a: float, b: float) -> None:
    # Next to 1 scipy errs by 3e-9 if b is 0.5, and next to 0 it does not; 1 - x is exact there.
    expected = stats.beta.cdf(x, a, b) if x < 0.5 else 1 - stats.beta.cdf(1 - x, b, a)
    assert regularized_beta(x, a, b) == pytest.approx(expected, abs=1e-9)


@given(st.integers(0, 20_000), st.integers(1, 20_000), st.sampled_from([0.9, 0.95, 0.999]))
@example(0, 300, 0.95)
@example(7, 7, 0.95)
def test_binomial_bounds(successes: int, trials: int, confidence: float) -> None:
    successes = min(successes, trials)
    for alternative, bound in (("less", binomial_upper), ("greater", binomial_lower)):
        exact = stats.binomtest(successes, trials, alternative=alternative).proportion_ci(confidence, method="exact")
        expected = exact.high if alternative == "less" else exact.low
        assert bound(successes, trials, confidence) == pytest.approx(expected, abs=1e-9)


def test_no_trials_say_nothing() -> None:
    assert (binomial_lower(0, 0, 0.95), binomial_upper(0, 0, 0.95)) == (0.0, 1.0)


@given(st.sampled_from([0.9, 0.95, 0.99]), st.floats(1, 10_000))
def test_student_quantiles(confidence: float, freedom: float) -> None:
    assert student_quantile(confidence, freedom) == pytest.approx(stats.t.ppf((1 + confidence) / 2, freedom), rel=1e-6)


def sums(values: np.ndarray) -> Sums:
    return Sums(len(values), float(values.sum()), float((values**2).sum()))


def test_welchs_interval() -> None:
    rng = np.random.default_rng(1)
    first, second = rng.lognormal(7, 0.5, 40), rng.lognormal(6.5, 1.0, 900)
    found = difference(sums(first), sums(second), 0.95)
    assert found is not None
    expected = stats.ttest_ind(first, second, equal_var=False).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), rel=1e-6)
    assert found.value == pytest.approx(first.mean() - second.mean())


def test_means_without_spread_or_observations() -> None:
    same = Sums(3, 30.0, 300.0)
    assert difference(same, same, 0.95) is not None
    assert difference(same, Sums(1, 10.0, 100.0), 0.95) is None
    assert saved_ratio(same, Sums(1, 10.0, 100.0), 0.95) is None
    assert saved_ratio(Sums(3, 0.0, 0.0), same, 0.95) is None


def test_the_interval_of_the_saving_covers_the_truth() -> None:
    """95 % intervals of 150 experiments contain the true ratio of the means in at least 90 %."""
    rng, covered = np.random.default_rng(2), 0
    for _ in range(150):
        found = saved_ratio(sums(rng.lognormal(6.0, 0.6, 2000)), sums(rng.lognormal(6.5, 0.6, 60)), 0.95)
        assert found is not None
        covered += found.low <= 1 - np.exp(-0.5) <= found.high
    assert covered >= 135


@pytest.mark.parametrize("limit", [0.01, 0.1])
def test_false_alarms_are_as_rare_as_stated(limit: float) -> None:
    """Of 100 runs of 300 trials whose probability is the limit itself, at most 1 % plus chance reach 100."""
    rng, runs = random.Random(7), 100
    alarms = sum(alarm(SequentialTest(limit), rng, limit, 300) is not None for _ in range(runs))
    assert alarms <= stats.binom.ppf(0.999, runs, 0.01)


def alarm(test: SequentialTest, rng: random.Random, probability: float, trials: int) -> int | None:
    """Return the number of single trials after which the evidence reaches 100, None if it does not."""
    for number in range(1, trials + 1):
        if test.add_trials(int(rng.random() < probability), 1) >= 100:
            return number
    return None


def test_a_change_is_found_after_many_trials_without_events() -> None:
    for seed in range(20):
        rng, test = random.Random(seed), SequentialTest(0.01)
        assert alarm(test, rng, 0.002, 500) is None
        assert (alarm(test, rng, 0.5, 100) or 100) <= 30


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 30)), max_size=10), st.floats(1e-3, 0.9))
def test_evidence_is_a_fair_bet(batches: list[tuple[int, int]], limit: float) -> None:
    """The expected evidence after one more trial is the present evidence if the probability is the limit."""
    test, again = SequentialTest(limit), SequentialTest(limit)
    for events, others in batches:
        for each in (test, again):
            each.add_trials(events, events + others)
    before = test.evidence
    expected = limit * test.add_trials(1, 1) + (1 - limit) * again.add_trials(0, 1)
    assert expected == pytest.approx(before, rel=1e-6)


def test_nothing_exceeds_a_limit_of_1_and_no_trials_change_nothing() -> None:
    assert SequentialTest(1.0).add_trials(50, 50) == 1.0
    assert SequentialTest(0.01).add_trials(0, 0) == 1.0


@pytest.mark.parametrize("limit", [1e-9, 5e-324])
def test_evidence_stays_a_number(limit: float) -> None:
    test = SequentialTest(limit)
    assert 0 < test.add_trials(0, 500) <= 1
    for _ in range(3):
        assert test.add_trials(500, 500) >= 100
    assert 0 < test.add_trials(0, 10**9) < float("inf")


@pytest.mark.parametrize("limit", [0.01, 0.2])
def test_evidence_from_all_trials_rarely_deceives(limit: float) -> None:
    """Of 100 courses of 300 trials at the limit, looked at after each trial, about 1 in 100 reaches a hundredfold."""
    rng, alarms = random.Random(5), 0
    for _ in range(100):
        events = 0
        for trial in range(1, 301):
            events += rng.random() < limit
            if evidence(events, trial, limit) >= 100:
                alarms += 1
                break
    assert alarms <= 3
    assert evidence(3, 12, 0.01) > 100 > evidence(2, 12, 0.01)
    assert evidence(50, 50, 1.0) < 1
