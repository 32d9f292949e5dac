"""Policies that several engine tests use."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

from meridian_agent.vllm_adapter import reasoning_markers

# All features are on but no token changes: caps are out of reach, answers have no reserve, stops end thinking, too, and
# entropy rules are in shadow.
NEUTRAL: dict[str, Any] = {
    "scheduler": {"max_think_tokens": 100_000, "answer_reserve_tokens": 0, "answer_only_stops": "none"},
    "entropy": {"shadow": True},
}

# No token changes either, but the rules read signals at sentence ends only: the soft budget is out of reach.
SENTENCE_ENDS: dict[str, Any] = {
    "scheduler": {"max_think_tokens": 100_000, "soft_think_tokens": 90_000, "answer_reserve_tokens": 0},
    "entropy": {"enabled": False},
}

# Probes are placed wherever one is possible, and no decision is applied.
DENSE: dict[str, Any] = {
    "scheduler": {"max_think_tokens": 100_000, "min_think_tokens": 0, "answer_reserve_tokens": 0},
    "entropy": {"shadow": True, "eat_probe_interval_tokens": 1, "eat_probe_placement": "anywhere"},
}

# An entropy rule that fits the maze model: thinking ends soon after the first walk is complete.
CONVERGED: dict[str, Any] = {
    "scheduler": {"min_think_tokens": 4},
    "entropy": {
        "shadow": False,
        "holdout_share": 0.0,
        "ema_alpha": 0.8,
        "eat_warmup_samples": 5,
        "eat_probe_interval_tokens": 6,
        "eat_ema_variance_threshold": 0.05,
        "eat_level_threshold_nats": 0.2,
    },
}


@contextlib.contextmanager
def ending_turns(tokens: Collection[int], calls: Collection[int] = ()) -> Iterator[None]:
    """Let the agent know a model that ends its turns with these tokens, too, from the next policy on. calls: those of
    them with which it calls a tool."""
    resolve = reasoning_markers.resolve

    def resolved(*args: Any) -> Any:
        markers = resolve(*args)
        turn_ends, call_ends = markers.turn_ends.union(tokens), markers.call_ends.union(calls)
        return replace(markers, turn_ends=turn_ends, call_ends=call_ends)

    reasoning_markers.resolve = resolved  # type: ignore[assignment]
    try:
        yield
    finally:
        reasoning_markers.resolve = resolve
