"""Random valid policies, with every field of the schema drawn from within its own limits.

Values are usually near those that matter at the scale of a test, and sometimes at the limits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

from pydantic import ValidationError

from meridian_control.policy.model import PER_REQUEST, Policy
from meridian_control.policy.schema import EnginePolicy
from meridian_control.policy.section import INT32_MAX, Section

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from pydantic.fields import FieldInfo

LARGEST = 1e308
# Values that have an effect within a few hundred tokens.
NEAR: dict[str, tuple[Any, ...]] = {
    "max_think_tokens": (1, 2, 5, 12, 30, 60, 32768),
    "min_think_tokens": (0, 0, 1, 4, 10, 25),
    "soft_think_tokens": (0, 0, 3, 10, 25),
    "soft_close_rank": (1, 5, 20),
    "empty_answer_extension_tokens": (0, 0, 1, 7, 20),
    "answer_reserve_tokens": (0, 0, 1, 5, 30, 200),
    "calibrated_cap_tokens": (0, 40),
    "long_think_tokens": (5, 20, 60),
    "think_tpot_budget_ms": (10.0, 40.0, 80.0, 400.0),
    "output_tpot_budget_ms": (1.0, 5.0, 20.0),
    "think_batch_multiplier": (0.1, 0.5, 2.5),
    "min_prefill_tokens": (1, 8, 128),
    "ema_alpha": (0.2, 0.9, 1.0),
    "eat_warmup_samples": (1, 2, 3),
    "eat_ema_variance_threshold": (1e-4, 0.5, 10.0),
    "eat_level_threshold_nats": (0.1, 1.0, 3.0),
    "eat_probe_interval_tokens": (1, 3, 8, 64),
    "eat_probe_max_rank": (0, 0, 5, 20),
    "eat_hold_ms": (0, 5, 50, 200),
    "confirm_sentence_ends": (1, 1, 2, 3),
    "rpdi_threshold": (0.0, 0.5, 2.0),
    "rpdi_window_tokens": (1, 2, 8, 512),
    "holdout_share": (0.0, 0.02, 0.5),
    "max_loss": (0.01, 0.2, 1.0),
    "give_up_tokens": (0, 1, 10, 30),
    "give_up_eat_nats": (0.1, 1.0, 3.0),
    "report_interval_steps": (0, 0, 1, 2, 5),
    "lease_ms": (100, 500, 3000, 30000),
    "think_phase_memory_fraction": (0.01, 0.2, 0.4),
    "keep_thinking_s": (0, 1, 60),
    "min_rounds": (2, 3, 4),
    "min_tokens": (32, 32, 48, 192),
    "offload_threshold_blocks": (1, 2, 4),
    "max_pool_kv_used": (0.1, 0.5, 0.8),
    "max_num_active_seqs": (0, 1, 2, 3, 64),
    "max_num_scheduled_tokens": (0, 1, 20, 100),
    "long_prefill_token_threshold": (0, 1, 9, 40),
    "max_prompt_tokens": (0, 0, 5, 30),
    "preemptible_from_tokens": (0, 1, 10, 40),
    "max_preemptions": (1, 2, 3),
    "recomputed_tokens_per_s": (1, 50, 1000),
    "max_wait_ms": (1, 100, 10_000),
}
# The sections that are always drawn, by name.
SECTIONS: dict[str, type[Section]] = {
    name: info.annotation
    for name, info in Policy.model_fields.items()
    if isinstance(info.annotation, type)
    and issubclass(info.annotation, Section)
    and info.annotation is not EnginePolicy
}
# The section of engines that keep their start-up values.
NO_LIMITS = dict.fromkeys(EnginePolicy.model_fields, 0)
# Names of the budgets that a policy may have.
BUDGETS = ("one", "two")
GLOBS = ("", "", "*", "m*", "a", "[ab]", "b?", "?")


def _value(rng: random.Random, name: str, info: FieldInfo, extreme: float) -> Any:
    kind = info.annotation
    if kind is bool:
        return rng.random() < 0.5
    if get_origin(kind) is Literal:
        return rng.choice(get_args(kind))
    if rng.random() >= extreme:
        return rng.choice(NEAR[name])
    limits = {limit: getattr(m, limit) for m in info.metadata for limit in ("gt", "ge", "le") if hasattr(m, limit)}
    if kind is int:
        low, high = limits.get("ge", 0), limits.get("le", INT32_MAX)
        return rng.choice((low, low + 1, high - 1, high))
    low, high = limits.get("ge", 5e-324), limits.get("le", LARGEST)
    return rng.choice((low, max(low, 1e-300), min(1e-3, high), high))


def _is_drawn(name: str, info: FieldInfo) -> bool:
    return name in NEAR or info.annotation is bool or get_origin(info.annotation) is Literal


def _section(rng: random.Random, section: type[Section], extreme: float, only: Sequence[str] = ()) -> dict[str, Any]:
    """Return some of a section's fields; each is left at its default in half of the draws. only: fields of an override,
    in place of all."""
    drawn: dict[str, Any] = {}
    for name, info in section.model_fields.items():
        if only and name not in only:
            continue
        if name == "rank_conditions":
            if rng.random() < 0.3:
                ranks = [[rng.choice((1, 5, 20)) for _ in range(rng.randint(1, 3))] for _ in range(rng.randint(1, 2))]
                drawn[name] = [{"max_ranks": r} for r in ranks]
        elif name.endswith("_reference"):
            edge_name = "max_nats" if name == "eat_reference" else "max_value"
            drawn[name] = [{edge_name: edge, "requests": 30} for edge in (0.1, 0.5, 5.0)]
        elif _is_drawn(name, info) and rng.random() < 0.5:
            drawn[name] = _value(rng, name, info, extreme)
    return drawn


def _globs(rng: random.Random) -> dict[str, Any]:
    return {name: rng.choice(GLOBS) for name in ("model", "tenant", "slo_class", "effort")}


def _override(rng: random.Random, extreme: float) -> dict[str, Any]:
    drawn = _globs(rng)
    if rng.random() < 0.2:
        drawn["engine_labels"] = {"zone": rng.choice("ab")}
    return drawn | {name: _section(rng, SECTIONS[name], extreme, fields) for name, fields in PER_REQUEST.items()}


def _budget(rng: random.Random, name: str) -> dict[str, Any]:
    limits = {"tokens_per_minute": rng.choice((0, 60)), "tokens_per_day": 1, "shadow": rng.random() < 0.3}
    # A floor of 1 leaves the last stage to the rules' floor.
    stages = {"soft_think_tokens": rng.choice((2, 10)), "max_think_tokens": 8, "min_think_tokens": rng.choice((0, 1))}
    return {"name": name, **_globs(rng), **limits, **stages}


def _pressure(rng: random.Random, name: str) -> dict[str, Any]:
    """Return an entry, whose level the world draws."""
    targets = {"output_itl_p99_ms": rng.choice((0.0, 1.0, 20.0, 80.0)), "ttfvt_p99_ms": rng.choice((10.0, 400.0))}
    targets["queueing_p99_ms"] = rng.choice((0.0, 5.0))
    limits = {"window_s": 1, "shadow": rng.random() < 0.3, "entropy_in_force": rng.random() < 0.5}
    stages = {"soft_think_tokens": rng.choice((2, 10)), "max_think_tokens": 8, "min_think_tokens": rng.choice((0, 1))}
    return {"name": name, **_globs(rng), **targets, **limits, **stages}


def draw(rng: random.Random, extreme: float = 0.0, **sections: Any) -> Policy:
    """Return a valid policy. extreme: how often a number is at the schema's limits. sections: fixed values."""
    while True:
        values: dict[str, Any] = {name: _section(rng, section, extreme) for name, section in SECTIONS.items()}
        if rng.random() < 0.4:
            values["engine"] = _section(rng, EnginePolicy, extreme)
        for name, entry in (("budget", _budget), ("pressure", _pressure)):
            if rng.random() < 0.4:
                values[name] = [entry(rng, own) for own in BUDGETS[: rng.randint(1, 2)]]
        if rng.random() < 0.4:
            values["override"] = [_override(rng, extreme) for _ in range(rng.randint(1, 3))]
        for name, fixed in sections.items():
            values[name] = {**values.get(name, {}), **fixed} if isinstance(fixed, dict) else fixed
        try:
            return Policy.model_validate(values)
        except ValidationError:
            continue
