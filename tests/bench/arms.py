"""The policies that the termination benchmark compares, and the function that turns a calibration into arms.

The module owns policies as plain values. Each rule family takes its thresholds from the calibration's report: the point
that saves most thinking within the allowed loss of accuracy, or the point that loses least if none is within it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

INT32_MAX = 2**31 - 1
# The published conditions of the rank rule (arXiv 2508.17627).
PUBLISHED_RANKS = ((5,), (10, 50, 100, 1000), (20, 20, 20), (50, 50, 50, 50, 50, 50))

NATURAL: dict[str, Any] = {"entropy": {"enabled": False}}
# Neither the EAT nor the RPDI rule ends any thinking, and no probe is requested, because the rank gate and the probe
# interval are never reached.
_QUIET: dict[str, Any] = {
    "shadow": False,
    "holdout_share": 0.0,
    "eat_level_threshold_nats": 0.0,
    "eat_probe_interval_tokens": INT32_MAX,
    "eat_probe_max_rank": 1,
    "rpdi_threshold": 0.0,
}
# Rule families of the calibration report, each of which becomes one arm.
FAMILIES = (
    *("EAT", "EAT at paragraphs", "EAT settled", "EAT gated by rank"),
    *("rank", "RPDI", "soft close"),
)


@dataclass(frozen=True)
class Arm:
    """One policy under test. name: as in the report. budget: vLLM's own thinking_token_budget. note: the rule in
    words. max_tokens: of each request, if not the task's."""

    name: str
    policy: dict[str, Any] = field(default_factory=lambda: NATURAL)
    budget: int | None = None
    note: str = ""
    max_tokens: int | None = None


def budget(tokens: int, name: str = "") -> Arm:
    return Arm(name or f"fixed budget {tokens}", NATURAL, tokens, f"vLLM's thinking_token_budget = {tokens}")


def hard_cap(tokens: int) -> Arm:
    scheduler = {"min_think_tokens": 0, "max_think_tokens": tokens}
    policy = {"scheduler": scheduler, "entropy": {"enabled": False, "holdout_share": 0.0}}
    return Arm("hard cap", policy, None, f"scheduler.max_think_tokens = {tokens}")


def published_ranks() -> Arm:
    conditions = [{"max_ranks": list(ranks)} for ranks in PUBLISHED_RANKS]
    policy = {"scheduler": {"min_think_tokens": 0}, "entropy": {**_QUIET, "rank_conditions": conditions}}
    return Arm("rank, published", policy, None, "RCPD's four published conditions")


def dense_probes(where: str, model: str, answer_prefix: str) -> dict[str, Any]:
    """Return the policy under which a calibration trace is recorded.

    Every sentence end (or paragraph end) is probed, and no rule ever ends thinking.
    """
    policy: dict[str, Any] = {
        "scheduler": {"min_think_tokens": 0},
        "entropy": {
            "shadow": True,
            "eat_level_threshold_nats": 0.0,
            "eat_probe_interval_tokens": 1,
            "eat_probe_placement": where,
            "rpdi_threshold": 0.0,
        },
        "telemetry": {"shadow_sample_ratio": 1.0},
    }
    return with_answer_prefix(policy, model, answer_prefix)


def with_answer_prefix(policy: Mapping[str, Any], model: str, answer_prefix: str) -> dict[str, Any]:
    """Return the policy with the text that the model's answers begin with, which a probe has to skip."""
    changed = dict(policy)
    if answer_prefix:
        models = changed.get("model", {})
        changed["model"] = {**models, model: {**models.get(model, {}), "eat_answer_prefix": answer_prefix}}
    return changed


def load(path: Path) -> dict[str, Any]:
    """Return a policy file without a control group, because an arm's policy must hold for all of its requests."""
    policy = tomllib.loads(path.read_text(encoding="utf-8"))
    return {**policy, "entropy": {**policy.get("entropy", {}), "holdout_share": 0.0}}


def shadowed(policy: Mapping[str, Any], *, probes: bool) -> dict[str, Any]:
    """Return the policy in shadow with the same observation, of all requests, and either with an EAT level that no
    sample is below, so that it probes until thinking ends, or with a floor so high that no probe is requested."""
    entropy = {**policy["entropy"], "shadow": True, "eat_level_threshold_nats": 0.0}
    scheduler = {**policy.get("scheduler", {}), "min_think_tokens": 0 if probes else 30_000}
    telemetry = {**policy.get("telemetry", {}), "shadow_sample_ratio": 1.0}
    return {**policy, "scheduler": scheduler, "telemetry": telemetry, "entropy": entropy}


def single_rules(report: Mapping[str, Any], natural_tokens: float) -> list[Arm]:
    """Return one arm for the best rule of each family in the calibration report."""
    allowed = report["goal"]["max_loss"] / 2
    arms = []
    for family in FAMILIES:
        points = report["families"].get(family)
        if not points:
            continue
        good = [p for p in points if p["fit"]["accuracy_change"] >= -allowed and p["fit"]["saved"] > 0]
        if good:
            best = max(good, key=lambda p: p["fit"]["saved"])
        else:
            best = max(points, key=lambda p: p["fit"]["accuracy_change"])
        entropy = {**_QUIET, "rpdi_window_tokens": max(4, int(natural_tokens) // 4)}
        if "eat_probe_interval_tokens" in best["entropy"]:
            entropy["eat_probe_max_rank"] = 0
        policy = {
            "scheduler": {"min_think_tokens": 0, **best["scheduler"]},
            "entropy": {**entropy, **best["entropy"]},
        }
        arms.append(Arm(family, policy, None, best["rule"]))
    return arms
