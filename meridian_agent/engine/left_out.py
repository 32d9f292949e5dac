"""Chooses the running requests that a step leaves out, and tells vLLM. Knows no vLLM type; runs on the engine-core
thread."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meridian_agent.core.live_request import LiveRequest


def left_out(sequences: list[LiveRequest], per_step: int | None, max_skip_steps: int) -> list[LiveRequest]:
    """Return the sequences of one phase to leave out of the coming step.

    At most `per_step` sequences join, the longest-waiting first. A sequence that was left out `max_skip_steps` times in
    a row joins in spite of the limit, so no sequence starves.
    """
    if per_step is None or len(sequences) <= per_step:
        return []
    by_wait = sorted(sequences, key=lambda live: live.joined_step)
    return [live for live in by_wait[per_step:] if live.skipped_steps < max_skip_steps]


def skip_step(scheduler: Any, live: LiveRequest) -> None:
    """Leave a running request out of the coming step; a longer delay that vLLM itself has set stays."""
    live.ref.next_decode_eligible_step = max(live.ref.next_decode_eligible_step, scheduler.current_step + 2)
