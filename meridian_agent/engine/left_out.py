"""Which running requests a step leaves out, and how vLLM is told. Knows no vLLM type; engine-core thread."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meridian_agent.core.live_request import Tracked


def left_out(sequences: list[Tracked], per_step: int | None, max_skip_steps: int) -> list[Tracked]:
    """The sequences of one phase to leave out of the coming step.

    At most `per_step` join, those first that have waited longest; one that has been left out `max_skip_steps` times in
    a row joins whatever the limit says, so none starves.
    """
    if per_step is None or len(sequences) <= per_step:
        return []
    by_wait = sorted(sequences, key=lambda tr: tr.joined_step)
    return [tr for tr in by_wait[per_step:] if tr.skipped_steps < max_skip_steps]


def skip_step(scheduler: Any, tr: Tracked) -> None:
    """Leave a running request out of the coming step; what vLLM itself put off longer stays so."""
    tr.ref.next_decode_eligible_step = max(tr.ref.next_decode_eligible_step, scheduler.current_step + 2)
