"""Refuses settings that no control plane of this project would send. Pure; checks that need a tokenizer are in
`vllm_adapter`.

A control plane of another version, or another program at its address, may send anything. The agent refuses settings
that would keep it busy, settings that would let its memory grow, and settings that it cannot obey.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meridian_agent.core.bad_settings import BadSettings

if TYPE_CHECKING:
    from meridian.v1 import agent_pb2

# Shortest lease; with a shorter one the agent would end each stream before the first answer can arrive.
MIN_LEASE_MS = 100
# Largest report interval, because the records of that many steps wait to be merged.
MAX_INTERVAL_STEPS = 1000
MAX_TEXT, MAX_MARKER_TOKENS = 2000, 64
# Most globs, each of which every new request may be compared with, and most characters of each.
MAX_GLOBS, MAX_GLOB = 64, 256
SIZES = (
    (("closing_text", "eat_answer_prefix", "reasoning_parser", "answer_only_stops"), MAX_TEXT, "characters"),
    (("think_start_token_ids", "think_end_token_ids"), MAX_MARKER_TOKENS, "tokens"),
)


def check(settings: agent_pb2.Settings) -> None:
    """Check all fields. Raises BadSettings with the name of a field and its value."""
    if settings.lease_ms < MIN_LEASE_MS:
        raise BadSettings(f"lease_ms must be at least {MIN_LEASE_MS}; got {settings.lease_ms}")
    for name in ("scheduler_lease_ms", "entropy_lease_ms", "kv_memory_lease_ms"):
        if 0 < (lease_ms := getattr(settings, name)) < MIN_LEASE_MS:
            raise BadSettings(f"{name} must be 0 or at least {MIN_LEASE_MS}; got {lease_ms}")
    if settings.report_interval_steps > MAX_INTERVAL_STEPS:
        raise BadSettings(
            f"report_interval_steps must be at most {MAX_INTERVAL_STEPS}; got {settings.report_interval_steps}"
        )
    if not 0 <= settings.measured_share <= 1:
        raise BadSettings(f"measured_share must be in [0, 1]; got {settings.measured_share:g}")
    globs = settings.client_slo_classes
    if len(globs) > MAX_GLOBS:
        raise BadSettings(f"client_slo_classes must have at most {MAX_GLOBS} globs; got {len(globs)}")
    if (size := max(map(len, globs), default=0)) > MAX_GLOB:
        raise BadSettings(f"client_slo_classes must have at most {MAX_GLOB} characters each; got {size}")
    for names, limit, unit in SIZES:
        for name in names:
            if (size := len(getattr(settings, name))) > limit:
                raise BadSettings(f"{name} must have at most {limit} {unit}; got {size}")
