"""Compute the results of the arms: means, paired differences with bootstrap intervals, aims. Pure functions."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy import special  # type: ignore[import-untyped]

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike, NDArray

    from tests.bench.arms import Arm
    from tests.bench.cuts import Cuts, Ideal
    from tests.bench.driver import Batch, Completion, Sample

RESAMPLES, RESAMPLING_SEED = 5_000, 1
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """A value and the bounds of its interval, by default those that contain the share CONFIDENCE of its bootstrap
    values."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Result:
    """The results of one arm. Tokens are means per request.

    think_tokens: without probes; compute_tokens: with probes. accuracy_change: paired difference to natural stopping.
    expected: mean probability of the right answer where thinking ended, which is the accuracy without the luck of
    sampling answers. ends: how thinking ended, as FleetService counts it. late_tokens: mean distance from the newest
    end of a paragraph to the end of thinking, for thinking that a rule ended. by_seed: compute tokens and accuracy of
    each seed.
    """

    name: str
    note: str
    requests: int
    think_tokens: float
    probe_tokens: float
    answer_tokens: float
    accuracy: float
    expected: float
    accuracy_change: Interval
    saved: Interval
    unended: int
    probes: int
    probes_refused: int
    ends: dict[str, int]
    wall_s: float
    decode_s: float
    late_tokens: float | None
    by_seed: list[tuple[float, float]]

    @property
    def compute_tokens(self) -> float:
        return self.think_tokens + self.probe_tokens

    @property
    def probe_share(self) -> float:
        """Return probe tokens as a share of all tokens decoded for these requests."""
        return self.probe_tokens / (self.compute_tokens + self.answer_tokens)

    def short(self) -> dict[str, float]:
        """Return the arm's figures for the benchmark's last line; thinking tokens include probes."""
        return {"think_tokens": round(self.compute_tokens, 2), "accuracy": round(self.accuracy, 4)}

    def plain(self) -> dict[str, Any]:
        return asdict(self) | {"compute_tokens": self.compute_tokens, "probe_share": self.probe_share}


def resampled(count: int, seed: int = RESAMPLING_SEED) -> NDArray[np.intp]:
    """Return the indices of the requests in each bootstrap sample, [resamples, count]."""
    return np.random.default_rng(seed).integers(0, count, (RESAMPLES, count))


def _interval(value: float, values: NDArray[np.float64]) -> Interval:
    low, high = np.quantile(values, ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2)).tolist()
    return Interval(value, low, high)


def geometric(ratios: ArrayLike, over: ArrayLike = (1.0,)) -> Interval:
    """Return the geometric mean of `ratios` divided by that of `over`, which was measured independently."""
    logs, others = np.log(ratios), np.log(over)
    drawn = logs[resampled(len(logs))].mean(axis=1) - others[resampled(len(others), RESAMPLING_SEED + 1)].mean(axis=1)
    return _interval(float(np.exp(logs.mean() - others.mean())), np.exp(drawn))


def between(starts: Sequence[Sequence[float]]) -> Interval:
    """Return the geometric mean of the ratios of all starts, with Student's interval over the starts, which contains
    their differences. The ratios of a single start count as starts of their own."""
    found = mean_between([np.log(ratios) for ratios in starts])
    return Interval(*np.exp([found.value, found.low, found.high]).tolist())


def mean_between(starts: Sequence[Sequence[float] | NDArray[np.float64]]) -> Interval:
    """Return the mean over all starts, with the same interval as `between`."""
    means = np.array([np.mean(values) for values in starts] if len(starts) > 1 else starts[0])
    mean, within = float(means.mean()), 0.0
    if len(means) > 1:
        quantile = special.stdtrit(len(means) - 1, (1 + CONFIDENCE) / 2)
        within = float(quantile * means.std(ddof=1) / np.sqrt(len(means)))
    return Interval(mean, mean - within, mean + within)


def paired(changed: Sequence[bool], base: Sequence[bool]) -> Interval:
    """Return the difference of two accuracies over the same requests."""
    difference = np.array(changed, float) - np.array(base, float)
    return _interval(float(difference.mean()), difference[resampled(len(difference))].mean(axis=1))


def saving(spent: NDArray[np.float64], natural: NDArray[np.float64]) -> Interval:
    """Return the share of natural thinking tokens that is saved."""
    drawn = resampled(len(natural))
    values = 1 - spent[drawn].sum(axis=1) / natural[drawn].sum(axis=1)
    return _interval(float(1 - spent.sum() / natural.sum()), values)


def result(arm: Arm, batch: Batch, natural: Batch, samples: Sequence[Sample], expected: float) -> Result:
    done = batch.completions
    probes = batch.probe_tokens / len(done)
    spent = np.array([c.think_tokens for c in done], float) + probes
    right = [c.right for c in done]
    late = [c.late_tokens for c, n in zip(done, natural.completions, strict=True) if c.think_tokens < n.think_tokens]
    return Result(
        name=arm.name,
        note=arm.note,
        requests=len(done),
        think_tokens=batch.mean_think_tokens(),
        probe_tokens=probes,
        answer_tokens=float(np.mean([c.answer_tokens for c in done])),
        accuracy=float(np.mean(right)),
        expected=expected,
        accuracy_change=paired(right, [c.right for c in natural.completions]),
        saved=saving(spent, _natural_tokens(natural.completions)),
        unended=sum(not c.ended for c in done),
        probes=batch.probes,
        probes_refused=batch.probes_refused,
        ends=batch.ends,
        wall_s=batch.wall_s,
        decode_s=batch.decode_s,
        late_tokens=float(np.mean(late)) if late else None,
        by_seed=_by_seed(spent, right, samples),
    )


def oracle(name: str, note: str, ideals: Sequence[Ideal], natural: Batch, samples: Sequence[Sample]) -> Result:
    """Return the oracle as an arm, computed from natural stopping without a run of its own."""
    spent, right = np.array([i.think_tokens for i in ideals], float), [i.right for i in ideals]
    return Result(
        name=name,
        note=note,
        requests=len(ideals),
        think_tokens=float(spent.mean()),
        probe_tokens=0.0,
        answer_tokens=float(np.mean([c.answer_tokens for c in natural.completions])),
        accuracy=float(np.mean(right)),
        expected=float(np.mean([i.chance for i in ideals])),
        accuracy_change=paired(right, [c.right for c in natural.completions]),
        saved=saving(spent, _natural_tokens(natural.completions)),
        unended=0,
        probes=0,
        probes_refused=0,
        ends={},
        wall_s=0.0,
        decode_s=0.0,
        late_tokens=None,
        by_seed=_by_seed(spent, right, samples),
    )


def _natural_tokens(natural: Sequence[Completion]) -> NDArray[np.float64]:
    return np.array([c.think_tokens for c in natural], float)


def _by_seed(spent: NDArray[np.float64], right: Sequence[bool], samples: Sequence[Sample]) -> list[tuple[float, float]]:
    rounds, judged = np.array([s.round for s in samples]), np.array(right, float)
    return [(float(spent[rounds == n].mean()), float(judged[rounds == n].mean())) for n in sorted(set(rounds.tolist()))]


def equal_budget(natural: Sequence[Completion], compute_tokens: float) -> int:
    """Return the smallest fixed budget whose mean thinking is at least `compute_tokens`, so that rounding favours the
    budget."""
    lengths = _natural_tokens(natural)
    longest = int(lengths.max())
    return next((b for b in range(1, longest) if np.minimum(lengths, b).mean() >= compute_tokens), longest)


def cut_curve(natural: Sequence[Completion], cuts: Sequence[Cuts], most: int) -> list[tuple[float, float]]:
    """Return compute tokens and expected accuracy of every fixed budget up to `most`, computed offline, for the
    picture."""
    lengths = _natural_tokens(natural)
    points = []
    for tokens in range(0, most + 1, 2):
        chance = [cut.chance[min(tokens, len(cut.chance) - 1)] for cut in cuts]
        points.append((float(np.minimum(lengths, tokens).mean()), float(np.mean(chance))))
    return points
