"""Random valid policies, with every field of the schema drawn from within its own limits.

Values are usually near those that matter at the scale of a test, and sometimes at the limits.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

from pydantic import Field, ValidationError
from pydantic.fields import FieldInfo

from meridian_control.policy.disagg_schema import DisaggPolicy
from meridian_control.policy.engine_schema import EnginePolicy
from meridian_control.policy.loop_schema import LoopPolicy
from meridian_control.policy.model import PER_REQUEST, Policy
from meridian_control.policy.schema import EntropyPolicy, FallbackPolicy, SchedulerPolicy
from meridian_control.policy.section import INT32_MAX

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meridian_control.policy.section import Section

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
    "eat_probe_max_margin_nats": (0.0, 0.0, 0.5, 1.5),
    "eat_hold_ms": (0, 5, 50, 200),
    "margin_threshold_nats": (0.0, 0.0, 0.25, 1.0),
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
    "min_rounds": (2, 3, 4),
    "min_tokens": (32, 32, 48, 192),
    "offload_threshold_blocks": (1, 2, 4),
    "max_pool_kv_used": (0.1, 0.5, 0.8),
    "max_num_active_seqs": (0, 1, 2, 3, 64),
    "max_num_scheduled_tokens": (0, 1, 20, 100),
    "long_prefill_token_threshold": (0, 1, 9, 40),
    # Of removed fields.
    "same_answer_samples": (0, 0, 0, 1, 2, 4),
    "near_repeated_tokens": (0, 10, 20, 720),
    "entropy_collapse_ratio": (0.0, 0.5, 2.0),
}
# The removed fields of a section, and the field before which they stood, "" for the end of the section. They are drawn
# and left out, so that existing seeds keep their other fields.
REMOVED: dict[type[Section], tuple[str, dict[str, Any]]] = {
    EntropyPolicy: ("give_up_tokens", {"same_answer_samples": Annotated[int, Field(ge=0, le=1000)]}),
    LoopPolicy: (
        "",
        {
            "near_repeated_tokens": Annotated[int, Field(ge=0, le=1024)],
            "entropy_collapse_ratio": Annotated[float, Field(ge=0, le=10)],
            "near_shadow": bool,
        },
    ),
}
# The section of engines that keep their start-up values.
NO_LIMITS = dict.fromkeys(EnginePolicy.model_fields, 0)
# Fields that are drawn from a copy of the generator, so that existing seeds keep their policies.
ASIDE = (*(name for name in EntropyPolicy.model_fields if name.startswith("give_up")), "calibrated_cap_tokens")
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


def _section(rng: random.Random, section: type[Section], extreme: float, only: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return some of a section's fields; each is left at its default in half of the draws."""
    drawn = {}
    for name, info in _fields(section):
        if name == "lease_ms" and section is not FallbackPolicy:
            # The books expect caps without a lease of their own.
            continue
        if name in ASIDE and name not in only:
            continue
        if (name in NEAR or info.annotation is bool or get_origin(info.annotation) is Literal) and (
            not only or name in only
        ):
            if rng.random() < 0.5:
                drawn[name] = _value(rng, name, info, extreme)
        elif name == "rank_conditions" and (not only or name in only) and rng.random() < 0.3:
            ranks = [[rng.choice((1, 5, 20)) for _ in range(rng.randint(1, 3))] for _ in range(rng.randint(1, 2))]
            drawn[name] = [{"max_ranks": r} for r in ranks]
        elif name == "eat_reference" and not only:
            # Drawn from a copy of the generator, so that existing seeds keep their other fields.
            edges = sorted({0.05, 0.5, 5.0, random.Random(rng.getstate()[1][0]).choice((0.1, 1.0))})
            drawn[name] = [{"max_nats": edge, "requests": 30} for edge in edges]
        elif name.endswith("_reference") and not only:
            drawn[name] = [{"max_value": edge, "requests": 30} for edge in (0.5, 1.0, 5.0)]
    return {name: value for name, value in drawn.items() if name in section.model_fields}


def _fields(section: type[Section]) -> Iterator[tuple[str, FieldInfo]]:
    """Yield the fields of a section, with the removed ones in their old places."""
    before, removed = REMOVED.get(section, ("", {}))
    for name, info in section.model_fields.items():
        if name == before:
            yield from ((gone, FieldInfo.from_annotation(kind)) for gone, kind in removed.items())
        yield name, info
    if not before:
        yield from ((gone, FieldInfo.from_annotation(kind)) for gone, kind in removed.items())


def _override(rng: random.Random, extreme: float) -> dict[str, Any]:
    drawn: dict[str, Any] = {name: rng.choice(GLOBS) for name in ("model", "tenant", "slo_class", "effort")}
    if rng.random() < 0.2:
        drawn["engine_labels"] = {"zone": rng.choice("ab")}
    drawn["scheduler"] = _section(rng, SchedulerPolicy, extreme, PER_REQUEST["scheduler"])
    others = tuple(name for name in PER_REQUEST["entropy"] if name not in ASIDE)
    drawn["entropy"] = _section(rng, EntropyPolicy, extreme, (*others, *REMOVED[EntropyPolicy][1]))
    aside = random.Random(rng.getstate()[1][0])
    drawn["loop"] = _section(aside, LoopPolicy, extreme)
    drawn["entropy"] |= _section(aside, EntropyPolicy, extreme, ASIDE)
    return drawn


def _budget(rng: random.Random, name: str) -> dict[str, Any]:
    drawn: dict[str, Any] = {glob: rng.choice(GLOBS) for glob in ("model", "tenant", "slo_class", "effort")}
    limits = {"tokens_per_minute": rng.choice((0, 60)), "tokens_per_day": 1, "shadow": rng.random() < 0.3}
    soft = rng.choice((2, 10))
    # Not drawn, so that existing seeds keep their other values; a floor of 1 leaves the last stage to the rules' floor.
    drawn["min_think_tokens"] = 1 if soft == 2 else 0
    return drawn | limits | {"name": name, "soft_think_tokens": soft, "max_think_tokens": 8}


def _pressure(rng: random.Random, name: str) -> dict[str, Any]:
    """Return an entry, whose level the world draws."""
    drawn: dict[str, Any] = {glob: rng.choice(GLOBS) for glob in ("model", "tenant", "slo_class", "effort")}
    targets = {"output_itl_p99_ms": rng.choice((0.0, 1.0, 20.0, 80.0)), "ttfvt_p99_ms": rng.choice((10.0, 400.0))}
    limits: dict[str, Any] = {"window_s": 1, "shadow": rng.random() < 0.3, "soft_think_tokens": rng.choice((2, 10))}
    # Not drawn, so that existing seeds keep their other values.
    limits["entropy_in_force"] = limits["soft_think_tokens"] == 2
    limits["min_think_tokens"] = 1 if limits["soft_think_tokens"] == 2 else 0
    limits["queueing_p99_ms"] = 5.0 if limits["soft_think_tokens"] == 2 else 0.0
    return drawn | targets | limits | {"name": name, "max_think_tokens": 8}


def draw(rng: random.Random, extreme: float = 0.0, **sections: Any) -> Policy:
    """Return a valid policy. extreme: how often a number is at the schema's limits. sections: fixed values."""
    while True:
        values: dict[str, Any] = {
            name: _section(rng, info.annotation, extreme)  # type: ignore[arg-type]
            for name, info in Policy.model_fields.items()
            if name not in ("model", "override", "loop", "disagg", "engine", "budget", "pressure", "extension")
        }
        # Drawn from a copy of the generator, so that existing seeds keep their other sections.
        aside = random.Random(rng.getstate()[1][0])
        values["loop"] = _section(aside, LoopPolicy, extreme)
        values["disagg"] = _section(aside, DisaggPolicy, extreme)
        values["entropy"] |= _section(aside, EntropyPolicy, extreme, ASIDE)
        values["scheduler"] |= _section(random.Random(rng.getstate()[1][0]), SchedulerPolicy, extreme, ASIDE)
        if aside.random() < 0.4:
            values["budget"] = [_budget(aside, name) for name in BUDGETS[: aside.randint(1, 2)]]
        if aside.random() < 0.4:
            values["pressure"] = [_pressure(aside, name) for name in BUDGETS[: aside.randint(1, 2)]]
        if aside.random() < 0.4:
            values["engine"] = _section(aside, EnginePolicy, extreme)
        if rng.random() < 0.4:
            values["override"] = [_override(rng, extreme) for _ in range(rng.randint(1, 3))]
        for name, fixed in sections.items():
            values[name] = {**values.get(name, {}), **fixed} if isinstance(fixed, dict) else fixed
        try:
            return Policy.model_validate(values)
        except ValidationError:
            continue
