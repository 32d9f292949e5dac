"""How a dispatch plan becomes an order, a share and a choice of who is left out. Pure; engine-core thread."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meridian_agent.tracker import Tracked


def left_out(thinkers: list[Tracked], think_per_step: int | None, max_skip_steps: int) -> list[Tracked]:
    """The thinking requests to leave out of the coming step.

    At most `think_per_step` join, those first that have waited longest; one that has been left out `max_skip_steps`
    times in a row joins whatever the limit says, so none starves.
    """
    if think_per_step is None or len(thinkers) <= think_per_step:
        return []
    by_wait = sorted(thinkers, key=lambda tr: tr.joined_step)
    return [tr for tr in by_wait[think_per_step:] if tr.skipped_steps < max_skip_steps]
