"""Exact binomial bounds, intervals for differences of means, and sequential tests, without scipy.

The functions are pure. The module knows nothing of what the counts mean. Tests compare the functions with scipy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# Halvings of the interval from 0 to 1 in a search; 60 halvings reach the precision of a float.
HALVINGS = 60
# Terms of the continued fraction, and the relative change below which the fraction has converged.
MAX_TERMS, CONVERGED = 10_000, 1e-15
# Largest exponent whose power of e is computed; a larger likelihood ratio is far beyond every threshold.
MAX_EXPONENT = 700.0
# Largest wealth of one bet, so that no wealth becomes infinite.
MAX_WEALTH = 1e300
# Places of the alternatives between the limit and 1 against which the sequential test bets.
ALTERNATIVES = (0.02, 0.05, 0.1, 0.2, 0.4, 0.8)
# Test of a shift: largest probability that a bound of a bin's calibrated share is wrong, over all bins; and the share
# by which a bin may exceed its bound, because the mix of live requests always varies a little.
WRONG_BOUND_RATE, TOLERATED_SHARE = 0.001, 0.1
# Largest number of requests that a proof is said to need; a float holds no quotient by the smallest losses.
MOST_NEEDED = 10**15


@dataclass(frozen=True)
class Estimate:
    """An estimate with the two ends of its confidence interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Sums:
    """Number, sum and sum of squares of some observations. Sums over several sources add."""

    count: int
    total: float
    squares: float

    @property
    def mean(self) -> float:
        return self.total / self.count

    @property
    def variance_of_mean(self) -> float:
        """The squared standard error of the mean; needs two observations."""
        spread = max(0.0, self.squares - self.total * self.mean)
        return spread / (self.count - 1) / self.count


def regularized_beta(x: float, a: float, b: float) -> float:
    """Return I_x(a, b), the distribution function of the beta distribution, for a, b > 0 and x in [0, 1].

    The continued fraction is DLMF 8.17.22, evaluated by Lentz's method (Press et al., Numerical Recipes, section 6.4).
    """
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):
        return 1 - regularized_beta(1 - x, b, a)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    return math.exp(log_front) * _fraction(x, a, b) / a


def _fraction(x: float, a: float, b: float) -> float:
    tiny = 1e-300
    c, d = 1.0, 1 / _away_from_0(1 - (a + b) * x / (a + 1), tiny)
    fraction = d
    for m in range(1, MAX_TERMS):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d = 1 / _away_from_0(1 + term * d, tiny)
            c = _away_from_0(1 + term / c, tiny)
            fraction *= c * d
        if abs(c * d - 1) < CONVERGED:
            break
    return fraction


def _away_from_0(value: float, tiny: float) -> float:
    return value if abs(value) > tiny else tiny


def _root(rises: Callable[[float], bool]) -> float:
    """Return the number in [0, 1] at which `rises` becomes true."""
    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if rises(middle) else (middle, high)
    return (low + high) / 2


# A calibration asks for the same bound some twenty times.
@lru_cache(maxsize=4096)
def binomial_upper(successes: int, trials: int, confidence: float) -> float:
    """Return the one-sided upper Clopper-Pearson bound of a probability; 1 without trials.

    The bound is the p at which at most this many successes have the probability 1 - confidence (Clopper and Pearson,
    Biometrika 26, 1934). P(X <= k) = I_{1-p}(n - k, k + 1), so 1 - P rises with p.
    """
    if successes >= trials:
        return 1.0
    return _root(lambda p: regularized_beta(p, successes + 1, trials - successes) >= confidence)


def binomial_lower(successes: int, trials: int, confidence: float) -> float:
    """Return the one-sided lower Clopper-Pearson bound of a probability; 0 without successes."""
    if successes <= 0:
        return 0.0
    return _root(lambda p: regularized_beta(p, successes, trials - successes + 1) >= 1 - confidence)


def student_quantile(confidence: float, freedom: float) -> float:
    """Return the t for which a Student t variable lies between -t and t with this probability.

    With x = freedom / (freedom + t^2) that probability is 1 - I_x(freedom / 2, 1 / 2) (DLMF 8.17).
    """
    x = _root(lambda at: regularized_beta(at, freedom / 2, 0.5) >= 1 - confidence)
    return math.sqrt(freedom * (1 - x) / x)


def difference(first: Sums, second: Sums, confidence: float) -> Estimate | None:
    """Return mean of the first minus mean of the second, with Welch's interval (Biometrika 34, 1947).

    The result is None if one of them has fewer than two observations.
    """
    if min(first.count, second.count) < 2:
        return None
    parts = [(side.variance_of_mean, side.count - 1) for side in (first, second)]
    variance = sum(part for part, _ in parts)
    value = first.mean - second.mean
    if variance <= 0:
        return Estimate(value, value, value)
    freedom = variance**2 / sum(part**2 / count for part, count in parts)
    reach = student_quantile(confidence, freedom) * math.sqrt(variance)
    return Estimate(value, value - reach, value + reach)


def saved_ratio(with_rules: Sums, without: Sums, confidence: float) -> Estimate | None:
    """Return 1 minus the ratio of the means, with an interval by the delta method on the logarithm of the ratio.

    The result is None if a side has fewer than two observations or a mean of 0.
    """
    sides = with_rules, without
    if min(side.count for side in sides) < 2 or min(side.total for side in sides) <= 0:
        return None
    variance = sum(side.variance_of_mean / side.mean**2 for side in sides)
    freedom = min(side.count for side in sides) - 1
    reach = student_quantile(confidence, freedom) * math.sqrt(variance)
    ratio = with_rules.mean / without.mean
    return Estimate(1 - ratio, 1 - ratio * math.exp(reach), 1 - ratio * math.exp(-reach))


def evidence(events: int, trials: int, limit: float) -> float:
    """Return the evidence that the probability of an event exceeds `limit`, in (0, 1], from all trials so far.

    It is the mean likelihood ratio of ALTERNATIVES to the limit, an e-value at each number of trials: if each trial's
    probability given the earlier ones is at most the limit, the evidence ever reaches 1 / alpha with probability at
    most alpha (Ville's inequality). Unlike a SequentialTest it keeps nothing, but many good trials hide a later change.
    """
    if limit >= 1:
        return 1.0 / len(ALTERNATIVES)
    alternatives = (limit + (1 - limit) * place for place in ALTERNATIVES)
    return sum(_ratio(events, trials, alternative, limit) for alternative in alternatives) / len(ALTERNATIVES)


def _ratio(events: int, trials: int, alternative: float, limit: float) -> float:
    """Return the likelihood ratio of an alternative probability to the limit."""
    # The quotient of the two would be infinite for a limit below the normal numbers.
    log_ratio = events * (math.log(alternative) - math.log(limit))
    log_ratio += (trials - events) * math.log((1 - alternative) / (1 - limit))
    return math.exp(min(log_ratio, MAX_EXPONENT))


def confidence_of(attempt: int, confidence: float) -> float:
    """Return the confidence that the bounds of the attempt must have, so that the bounds of all attempts together hold
    with `confidence`.

    attempt: 1 for the first. Attempt k may err with probability (1 - confidence) / (k (k + 1)); these sum to 1 -
    confidence, whatever the number of attempts, and whether or not they share requests (alpha-spending, arXiv
    1910.04900).
    """
    return 1 - (1 - confidence) / (attempt * (attempt + 1))


def needed_to_prove(max_loss: float, confidence: float) -> float:
    """Return the number of independent requests or groups without any harm whose bound is `max_loss`, at most
    MOST_NEEDED; infinity if no number is enough."""
    if not 0 < max_loss < 1:
        return 1.0 if max_loss else math.inf
    return math.ceil(min(MOST_NEEDED, math.log(1 - confidence) / math.log1p(-max_loss)))


class SequentialTest:
    """Tests whether the probability of an event exceeds `limit`, and may be asked after each new batch of trials.

    `evidence` is an e-value: if each trial's probability given the earlier trials is at most `limit`, the evidence ever
    reaches 1 / alpha with probability at most alpha (Ville's inequality). The evidence is the wealth of a bettor who
    bets against the limit (Waudby-Smith and Ramdas, arXiv 2010.09686): each bet multiplies the wealth by the
    likelihood ratio of an alternative probability to the limit. The bettor starts the share 1 / (t (t + 1)) of the
    wealth with batch t and keeps the rest as cash, so earlier trials without events cannot hide a later change. Such a
    mixture over starting times is the e-process of Shin, Ramdas and Rinaldo (arXiv 2203.03532) with weights that add up
    to 1.
    """

    def __init__(self, limit: float) -> None:
        self._limit, self._batches = limit, 0
        self._alternatives = [limit + (1 - limit) * place for place in ALTERNATIVES]
        self._wealth = [0.0] * len(ALTERNATIVES)

    @property
    def evidence(self) -> float:
        return sum(self._wealth) + 1 / (self._batches + 1)

    def add_trials(self, events: int, trials: int) -> float:
        """Take in a batch of trials and return the evidence. Nothing exceeds a limit of 1."""
        if trials <= 0 or self._limit >= 1:
            return self.evidence
        self._batches += 1
        started = 1 / (self._batches * (self._batches + 1)) / len(ALTERNATIVES)
        for number, alternative in enumerate(self._alternatives):
            grown = (self._wealth[number] + started) * _ratio(events, trials, alternative, self._limit)
            self._wealth[number] = min(grown, MAX_WEALTH)
        return self.evidence


class ShiftTest:
    """Tests whether live observations have left a calibrated distribution, and may be asked after each new batch.

    The distribution is given by counts of independent observations in bins. If live observations have left it, at least
    one bin gets more of them than its calibrated share. For each bin a SequentialTest bets against the claim that the
    share of live observations in the bin is at most a limit: the exact upper bound of the calibrated share plus
    TOLERATED_SHARE. The evidence is the mean of the bins' evidence, which is an e-value too, because the mean of
    e-values is one (Vovk and Wang, arXiv 1912.06116).

    calibrated: number of calibrated observations in each bin.
    """

    def __init__(self, calibrated: Sequence[int]) -> None:
        total, confidence = sum(calibrated), 1 - WRONG_BOUND_RATE / len(calibrated)
        limits = [binomial_upper(count, total, confidence) + TOLERATED_SHARE for count in calibrated]
        self._tests = [SequentialTest(min(1.0, limit)) for limit in limits]

    def add_counts(self, seen: Sequence[int]) -> float:
        """Take in the number of new observations in each bin and return the evidence."""
        trials = sum(seen)
        tests = zip(self._tests, seen, strict=True)
        return sum(test.add_trials(count, trials) for test, count in tests) / len(self._tests)
