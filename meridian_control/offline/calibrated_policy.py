"""Writes the policy that a calibration recommends: the rule's fields, the floor, and the distribution of EAT.

The functions are pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from meridian_control.decisions.probe_timing import probe_lead_tokens
from meridian_control.offline.candidates import GROUPS
from meridian_control.offline.rule_replay import EAT_SENTENCE, GIVE_UP, MARGIN, PROBED, RANK, RPDI, SAME, SOFT
from meridian_control.policy.model import Policy
from meridian_control.policy.section import INT32_MAX

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from meridian_control.offline.rule_replay import Replay, StoppingRule

# Bins of the description of EAT, and fewest requests (or groups of requests) from which it is made.
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
    force; it is in shadow if not.
    """
    values = replay.base.model_dump(mode="json", exclude_none=True)
    entropy, scheduler = values["entropy"], values["scheduler"]
    acts = second is not None and second[1]
    entropy["enabled"], entropy["shadow"], entropy["eat_reference"] = True, rule is None and not acts, []
    on = {GROUPS[part.family] for part in rule.parts} if rule else set()
    if entropy["shadow"]:
        on = good | ({SOFT} if RANK in good else set())
    on |= {GIVE_UP} if second is not None else set()
    entropy["give_up_shadow"] = not acts
    if GIVE_UP not in on:
        entropy["give_up_tokens"] = 0
    if EAT_SENTENCE not in on:
        entropy["eat_level_threshold_nats"] = 0.0
    if SAME not in on:
        entropy["same_answer_samples"] = 0
    if not {EAT_SENTENCE, SAME, GIVE_UP} & on:
        entropy |= {"eat_probe_interval_tokens": INT32_MAX, "eat_probe_max_rank": 0}
        entropy["eat_probe_max_margin_nats"] = 0.0
    if RANK not in on:
        entropy["rank_conditions"] = []
    if MARGIN not in on:
        entropy["margin_threshold_nats"] = 0.0
    if RPDI not in on:
        entropy["rpdi_threshold"] = 0.0
    if SOFT not in on:
        scheduler["soft_think_tokens"] = 0
    if second is not None:
        # In shadow the other rules on probes stay on.
        others = {"eat_level_threshold_nats", "same_answer_samples"} if entropy["shadow"] else set()
        entropy |= {name: value for name, value in second[0].entropy.items() if name not in others}
    if rule is None and acts:
        scheduler["min_think_tokens"] = 0
    if rule is not None:
        with_rule = replay.policy(rule).model_dump(mode="json", exclude_none=True)
        window = ["rpdi_window_tokens"] if RPDI in on else []
        entropy |= {name: with_rule["entropy"][name] for name in (*rule.entropy, *window)}
        scheduler |= {name: with_rule["scheduler"][name] for name in rule.scheduler}
        floor = scheduler["min_think_tokens"] = min(floor_of(replay, rule, requests), scheduler["max_think_tokens"])
        entropy["eat_reference"] = _reference(replay, rule, floor, requests, unit)
    return Policy.model_validate(values)


def floor_of(replay: Replay, rule: StoppingRule, requests: NDArray[np.intp]) -> int:
    """Return the fewest thinking tokens at which the rule stopped a request, because no earlier stop was judged.

    A rule with a moving mean or a count of samples gets 0, because it needs the samples from the beginning.
    """
    if rule.entropy.get("ema_alpha", 1.0) < 1 or "same_answer_samples" in rule.entropy:
        return 0
    seen = replay.stops(rule).first_tokens[requests]
    return int(seen.min()) if np.isfinite(seen.min()) else 0


def _reference(
    replay: Replay, rule: StoppingRule, floor: int, requests: NDArray[np.intp], unit: NDArray[np.int64]
) -> list[dict[str, float]]:
    """Return the distribution of the first EAT sample that the rule could read, one request per unit, as EatBins.

    The list is empty if too few units have a sample, or if the rule does not read probes alone: a part without probes
    ends some thinking before its first sample, so live samples would differ from those of the calibration.
    """
    if rule.family not in PROBED:
        return []
    samples = replay.first_samples(rule, floor - probe_lead_tokens(replay.policy(rule).entropy))[requests]
    known = np.flatnonzero(np.isfinite(samples))
    values = samples[known[np.unique(unit[known], return_index=True)[1]]]
    if len(values) < MIN_UNITS:
        return []
    values = np.sort(np.array([float(f"{value:.4g}") for value in values]))
    # Places of the bins' last samples, so that each bin has nearly as many requests as the others.
    edges = np.unique(values[-(-len(values) * np.arange(1, BINS + 1) // BINS) - 1])
    counts = np.diff(np.searchsorted(values, edges, side="right"), prepend=0)
    return [{"max_nats": edge, "requests": count} for edge, count in zip(edges.tolist(), counts.tolist(), strict=True)]
