"""Writes the policy that a calibration recommends: the rule's fields, the floor, and the distributions of its signals.

The functions are pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from meridian_control.capabilities.control_group.rule import sampled_from
from meridian_control.offline.candidates import GROUPS
from meridian_control.offline.rule_replay import EAT_SENTENCE, GIVE_UP, PROBED, RANK, RPDI, SIGNALS, SOFT
from meridian_control.policy.drift_schema import SIGNALS as DESCRIBED
from meridian_control.policy.model import Policy
from meridian_control.policy.section import INT32_MAX

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from meridian_control.offline.rule_replay import Replay, StoppingRule

# Bins of the description of a signal, and fewest requests (or groups of requests) from which it is made.
BINS, MIN_UNITS = 5, 40


def policy_of(
    replay: Replay,
    rule: StoppingRule | None,
    good: set[str],
    requests: NDArray[np.intp],
    unit: NDArray[np.int64],
    *,
    second: tuple[StoppingRule, bool] | None = None,
) -> Policy:
    """Return the base policy with the rule and a proved give-up rule in force, and every other rule off.

    Without a rule in force, the entropy section is in shadow, and only the rules whose signals do not separate are off.
    good: the signals that separate right from wrong stops. requests: numbers of the judged requests. unit: number of
    each judged request's group, or of the request itself, [requests]. second: the give-up rule, and whether it is in
    force; it is in shadow if not, or left out beside a rule without probes, because its probes would cost tokens.
    """
    values = replay.base.model_dump(mode="json", exclude_none=True)
    entropy, scheduler = values["entropy"], values["scheduler"]
    acts = second is not None and second[1]
    if rule is not None and not acts and not PROBED & {part.family for part in rule.parts}:
        second = None
    entropy["enabled"], entropy["shadow"] = True, rule is None and not acts
    entropy |= {f"{signal}_reference": [] for signal in DESCRIBED}
    on = {GROUPS[part.family] for part in rule.parts} if rule else set()
    if entropy["shadow"]:
        on = good | ({SOFT} if RANK in good else set())
    on |= {GIVE_UP} if second is not None else set()
    entropy["give_up_shadow"] = not acts
    _switch_off(entropy, scheduler, on)
    if second is not None:
        # In shadow the other rule on probes stays on.
        others = {"eat_level_threshold_nats"} if entropy["shadow"] else set()
        entropy |= {name: value for name, value in second[0].entropy.items() if name not in others}
    if rule is None and acts:
        scheduler["min_think_tokens"] = 0
    if rule is not None:
        with_rule = replay.policy(rule).model_dump(mode="json", exclude_none=True)
        window = ["rpdi_window_tokens"] if RPDI in on else []
        entropy |= {name: with_rule["entropy"][name] for name in (*rule.entropy, *window)}
        scheduler |= {name: with_rule["scheduler"][name] for name in rule.scheduler}
        scheduler["min_think_tokens"] = min(floor_of(replay, rule, requests), scheduler["max_think_tokens"])
    if not entropy["shadow"]:
        parts = (*(rule.parts if rule else ()), *((second[0],) if second and acts else ()))
        entropy |= _references(replay, parts, Policy.model_validate(values), requests, unit)
    return Policy.model_validate(values)


def _switch_off(entropy: dict[str, Any], scheduler: dict[str, Any], on: set[str]) -> None:
    """Switch off the rules of all groups that are not on."""
    if GIVE_UP not in on:
        entropy["give_up_tokens"] = 0
    if EAT_SENTENCE not in on:
        entropy["eat_level_threshold_nats"] = 0.0
    if not {EAT_SENTENCE, GIVE_UP} & on:
        entropy |= {"eat_probe_interval_tokens": INT32_MAX, "eat_probe_max_rank": 0}
    if RANK not in on:
        entropy["rank_conditions"] = []
    if RPDI not in on:
        entropy["rpdi_threshold"] = 0.0
    if SOFT not in on:
        scheduler["soft_think_tokens"] = 0


def floor_of(replay: Replay, rule: StoppingRule, requests: NDArray[np.intp]) -> int:
    """Return the fewest thinking tokens at which the rule stopped a request, because no earlier stop was judged.

    A rule with a moving mean gets 0, because it needs the samples from the beginning.
    """
    if rule.entropy.get("ema_alpha", 1.0) < 1:
        return 0
    seen = replay.stops(rule).first_tokens[requests]
    return int(seen.min()) if np.isfinite(seen.min()) else 0


def _references(
    replay: Replay, parts: tuple[StoppingRule, ...], policy: Policy, requests: NDArray[np.intp], unit: NDArray[np.int64]
) -> dict[str, list[dict[str, float]]]:
    """Return the distributions of the signals that the rules of the entropy section read, as fields of the section.

    Each distribution has, of one request per unit, the first value that a rule could read. A signal is left out if too
    few units have a value. parts: the rules in force. policy: the policy with these rules.
    """
    by_signal: dict[str, NDArray[np.float64]] = {}
    if probed := [part for part in parts if part.family in PROBED]:
        by_signal["eat"] = replay.first_samples(probed[0], sampled_from(policy))
    # Soft close has a section of its own, which a withdrawal leaves in force.
    read = {signal for part in parts if part.entropy for signal in SIGNALS[part.family]}
    episodes = replay.episodes
    at_ends = {RANK: episodes.ranks[:, 0], RPDI: replay.rpdi}
    for signal in sorted(read & at_ends.keys()):
        by_signal[signal.lower()] = _first_values(replay, at_ends[signal], policy.scheduler.min_think_tokens)
    bins = {f"{signal}_reference": _bins(signal, values[requests], unit) for signal, values in by_signal.items()}
    return {name: described for name, described in bins.items() if described}


def _first_values(replay: Replay, values: NDArray[Any], floor: int) -> NDArray[np.float64]:
    """Return each request's first known value at a sentence end from the floor on, [requests]; NaN for none.

    values: by boundary.
    """
    episodes = replay.episodes
    first = np.full(len(episodes.ids), np.nan)
    # The boundaries are in reverse order, so each request's earliest boundary is written last.
    places = np.flatnonzero(np.isfinite(values) & (episodes.decided_tokens >= floor))[::-1]
    first[episodes.owner[places]] = values[places]
    return first


def _bins(signal: str, samples: NDArray[np.float64], unit: NDArray[np.int64]) -> list[dict[str, float]]:
    """Return the distribution of one sample per unit, as EatBins or SignalBins; empty if too few units have one."""
    known = np.flatnonzero(np.isfinite(samples))
    values = samples[known[np.unique(unit[known], return_index=True)[1]]]
    if len(values) < MIN_UNITS:
        return []
    values = np.sort(np.array([max(0.0, float(f"{value:.4g}")) for value in values]))
    # Places of the bins' last samples, so that each bin has nearly as many requests as the others.
    edges = np.unique(values[-(-len(values) * np.arange(1, BINS + 1) // BINS) - 1])
    counts = np.diff(np.searchsorted(values, edges, side="right"), prepend=0)
    name = "max_nats" if signal == "eat" else "max_value"
    return [{name: edge, "requests": count} for edge, count in zip(edges.tolist(), counts.tolist(), strict=True)]
