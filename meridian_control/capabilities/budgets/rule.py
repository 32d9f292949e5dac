"""Decides how far a thinking budget shortens thinking, from what is left of it. All functions are pure.

As a budget is used up, its stage rises from unshortened to soft_close, lower_cap and floor, and it falls again as the
budget is refilled.
"""

from __future__ import annotations

from meridian_control.engine.shortening import FLOOR, LOWER_CAP, SOFT_CLOSE, UNSHORTENED

# Share of the budget that is left at which each stage begins.
BEGINS = {SOFT_CLOSE: 0.50, LOWER_CAP: 0.25, FLOOR: 0.10}
# A stage ends only once this share more is left than at its beginning, so that stages do not change back and forth.
HYSTERESIS = 0.05


def stage_of(left_ratio: float, before: int = UNSHORTENED) -> int:
    """Return the stage of a budget of which the share `left_ratio` is left; before: its stage so far."""
    in_force = (
        stage for stage, share in BEGINS.items() if left_ratio <= share + (HYSTERESIS if before >= stage else 0.0)
    )
    return max(in_force, default=UNSHORTENED)
