"""The rules that calibration tries: families of rules with thresholds from the trace's own values.

The module decides which thresholds are tried, and does not know which answers are right.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations, product
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from meridian_control.offline.rule_replay import (
    CAP,
    EAT_GATED,
    EAT_PARAGRAPH,
    EAT_SENTENCE,
    EAT_SETTLED,
    GIVE_UP,
    PROBED,
    RANK,
    RPDI,
    SOFT,
    Replay,
    StoppingRule,
    either,
)
from meridian_control.policy.schema import RankCondition

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numpy.typing import NDArray


T = TypeVar("T")

# Quantiles of a signal's values that are tried as thresholds. The quantiles are dense at the low end, for cautious
# rules, and at the high end, for signals of which nearly all values are low.
GRID = (
    *(0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.13, 0.16, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.6, 0.7, 0.8),
    *(0.85, 0.9, 0.92, 0.94, 0.95, 0.96, 0.97, 0.98, 0.99),
)
COARSE = GRID[1::3]
ALPHAS = (0.2, 0.4)
VARIANCES = (1e-4, 1e-3, 1e-2, 1e-1)
RANKS = (1, 2, 3, 5, 10, 20, 50, 100)
DEPTHS = (1, 2, 3)
# Values of confirm_sentence_ends that are tried with each rule.
CONFIRMATIONS = (1, 2)
# Bounds of the rank conditions that arXiv 2508.17627 published.
PUBLISHED = ((5,), (10, 50, 100, 1000), (20, 20, 20), (50, 50, 50, 50, 50, 50))
RATIOS = (1.05, 1.1, 1.2, 1.3, 1.5, 1.75, 2.0, 2.5, 3.0)
# Families in one group are variants of one rule, so pairs are made only across groups.
GROUPS = {
    EAT_SENTENCE: "EAT",
    EAT_PARAGRAPH: "EAT",
    EAT_SETTLED: "EAT",
    EAT_GATED: "EAT",
    RANK: RANK,
    RPDI: RPDI,
    GIVE_UP: GIVE_UP,
    SOFT: SOFT,
}
# Give-up: quantiles of the EAT samples that are tried as levels, and of the thinking tokens that are tried as starts.
HIGH, STARTS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98), (0.1, 0.2, 0.3, 0.45, 0.6, 0.7, 0.8, 0.9)
# Fields of a policy whose only rule on probes is the give-up rule.
ONLY_GIVE_UP = {
    "eat_level_threshold_nats": 0.0,
    "eat_probe_interval_tokens": 1,
    "eat_probe_placement": "sentence",
    "eat_probe_max_rank": 0,
}


def single_rules(replay: Replay, requests: NDArray[np.intp]) -> dict[str, list[StoppingRule]]:
    """Return rules by family, with thresholds from these requests' values; an unmeasured signal gives no rules."""
    episodes = replay.episodes
    here = np.isin(episodes.owner, requests)
    eat, ranks, ratios = replay.eat_nats[here], episodes.ranks[here, 0], replay.rpdi[here]
    ranks = ranks[ranks > 0]
    bounds = sorted({*RANKS, *map(int, quantiles(ranks, GRID))}) if len(ranks) else []
    levels, coarse = quantiles(eat, GRID), quantiles(eat, COARSE)
    settled = list(product(ALPHAS, coarse, VARIANCES))
    gates = [b for b in bounds if b <= np.quantile(ranks, 0.6)] if len(ranks) else []
    natural = episodes.natural_tokens[requests]
    budgets = [int(tokens) for tokens in np.quantile(natural, (0.1, 0.2, 0.3, 0.45, 0.6, 0.8))]
    conditions = [*((bound,) * depth for depth in DEPTHS for bound in bounds), *(PUBLISHED if bounds else ())]
    rules = {
        EAT_SENTENCE: [eat_rule(EAT_SENTENCE, level) for level in levels],
        EAT_PARAGRAPH: [eat_rule(EAT_PARAGRAPH, level) for level in levels] if episodes.paragraph.any() else [],
        EAT_SETTLED: [eat_rule(EAT_SETTLED, level, alpha, variance) for alpha, level, variance in settled],
        EAT_GATED: [eat_rule(EAT_GATED, level, max_rank=gate) for gate, level in product(_thinned(gates), coarse)],
        RANK: [
            StoppingRule(RANK, {"rank_conditions": (RankCondition(max_ranks=c),)}) for c in dict.fromkeys(conditions)
        ],
        RPDI: [StoppingRule(RPDI, {"rpdi_threshold": ratio}) for ratio in RATIOS] if np.isfinite(ratios).any() else [],
        SOFT: [
            StoppingRule(SOFT, {}, {"soft_think_tokens": max(1, budget), "soft_close_rank": bound})
            for budget, bound in product(dict.fromkeys(budgets), _thinned(bounds))
        ],
        CAP: [
            StoppingRule(CAP, {}, {"max_think_tokens": max(1, cap)})
            for cap in dict.fromkeys(int(tokens) for tokens in np.quantile(natural, np.linspace(0, 1, 41)))
        ],
    }
    return {family: _confirmed(family_rules) for family, family_rules in rules.items() if family_rules}


def _confirmed(rules: list[StoppingRule]) -> list[StoppingRule]:
    """Return the entropy rules with each number of sentence ends in a row, and all other rules as they are."""
    return [
        replace(rule, entropy={**rule.entropy, "confirm_sentence_ends": number}) if rule.entropy else rule
        for number in CONFIRMATIONS
        for rule in rules
        if rule.entropy or number == 1
    ]


def eat_rule(
    family: str, level: float, alpha: float = 1.0, variance: float = 1e-4, *, max_rank: int = 0
) -> StoppingRule:
    """Make an EAT rule that probes at every allowed place.

    With alpha 1 the moving mean is the newest sample, and the variance is 0.
    """
    return StoppingRule(
        family,
        {
            "ema_alpha": alpha,
            "eat_warmup_samples": 1 if alpha == 1 else math.ceil(4 / alpha),
            "eat_ema_variance_threshold": variance,
            "eat_level_threshold_nats": level,
            "eat_probe_interval_tokens": 1,
            "eat_probe_placement": "paragraph" if family == EAT_PARAGRAPH else "sentence",
            "eat_probe_max_rank": max_rank,
        },
    )


def give_ups(
    replay: Replay, requests: NDArray[np.intp], first: StoppingRule | None, floor_tokens: int
) -> list[StoppingRule]:
    """Return give-up rules for a policy with the rule `first`, with thresholds from these requests' values.

    A policy has one set of probes, so a give-up rule reads those of `first` if it reads any. floor_tokens: floor of the
    policy, before which no rule ends thinking.
    """
    episodes = replay.episodes
    levels = quantiles(replay.eat_nats[np.isin(episodes.owner, requests)], HIGH)
    starts = np.quantile(episodes.natural_tokens[requests], STARTS)
    shared = {k: v for part in (first.parts if first else ()) if part.family in PROBED for k, v in part.entropy.items()}
    alphas = (shared["ema_alpha"],) if "ema_alpha" in shared else ALPHAS
    stopping_rules = []
    for alpha, start, level in product(alphas, dict.fromkeys(max(1, floor_tokens, int(s)) for s in starts), levels):
        moving = {"ema_alpha": alpha, "eat_warmup_samples": math.ceil(4 / alpha)}
        thresholds = {"give_up_tokens": start, "give_up_eat_nats": level}
        stopping_rules.append(StoppingRule(GIVE_UP, ONLY_GIVE_UP | moving | shared | thresholds))
    return stopping_rules


def paired(rules: Mapping[str, Iterable[StoppingRule]], most: int) -> dict[str, list[StoppingRule]]:
    """Return pairs of rules from different groups, by the pair's family, with up to `most` rules of each family.

    A pair stops thinking if either of its rules does. Both rules of a pair ask for as many sentence ends in a row,
    because a policy has one number for all its rules. Two rules on probes are not paired, because each has its own
    places for probes.
    """
    pairs: dict[str, list[StoppingRule]] = {}
    for (first, ones), (second, others) in combinations(rules.items(), 2):
        if GROUPS[first] != GROUPS[second] and not {first, second} <= PROBED:
            both = product(_thinned(list(ones), most), _thinned(list(others), most))
            combined = [either(a, b) for a, b in both if _agree(a, b)]
            if combined:
                pairs[combined[0].family] = combined
    return pairs


def _agree(first: StoppingRule, second: StoppingRule) -> bool:
    """Whether one policy can hold both rules."""
    wanted = {rule.entropy["confirm_sentence_ends"] for rule in (first, second) if rule.entropy}
    return len(wanted) <= 1


def quantiles(values: NDArray[np.float64], grid: tuple[float, ...]) -> list[float]:
    """Return the distinct positive values at these quantiles, rounded to three digits."""
    finite = values[np.isfinite(values)]
    if not len(finite):
        return []
    found = np.quantile(finite, grid, method="inverted_cdf").tolist()
    return sorted({float(f"{value:.3g}") for value in found if value > 0})


def _thinned(values: list[T], most: int = 8) -> list[T]:
    """Return at most `most` of the values, evenly spread."""
    if len(values) <= most:
        return values
    return [values[round(i * (len(values) - 1) / (most - 1))] for i in range(most)]
