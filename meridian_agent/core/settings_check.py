"""Refuses settings that no control plane of this project would send. Pure; what needs a tokenizer is in `vllm_adapter`.

A control plane of another version, or another program at its address, may say anything. What would keep an agent busy
with itself or let something grow is refused, as are all settings that cannot be honoured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meridian.v1 import agent_pb2

# A stream would be given up before its first answer can be there.
MIN_LEASE_MS = 100
# Records of so many steps wait to be merged.
MAX_INTERVAL_STEPS = 1000
MAX_TEXT, MAX_MARKER_TOKENS = 2000, 64
SIZES = (
    (("closing_text", "eat_answer_prefix", "reasoning_parser"), MAX_TEXT, "characters"),
    (("think_start_token_ids", "think_end_token_ids"), MAX_MARKER_TOKENS, "tokens"),
)


def check(settings: agent_pb2.Settings) -> None:
    """Raises ValueError with the field and its value."""
    if settings.lease_ms < MIN_LEASE_MS:
        raise ValueError(f"lease_ms must be at least {MIN_LEASE_MS}; got {settings.lease_ms}")
    for name in ("scheduler_lease_ms", "entropy_lease_ms", "kv_memory_lease_ms"):
        if 0 < (lease_ms := getattr(settings, name)) < MIN_LEASE_MS:
            raise ValueError(f"{name} must be 0 or at least {MIN_LEASE_MS}; got {lease_ms}")
    if settings.report_interval_steps > MAX_INTERVAL_STEPS:
        raise ValueError(
            f"report_interval_steps must be at most {MAX_INTERVAL_STEPS}; got {settings.report_interval_steps}"
        )
    for names, limit, unit in SIZES:
        for name in names:
            if (size := len(getattr(settings, name))) > limit:
                raise ValueError(f"{name} must have at most {limit} {unit}; got {size}")
