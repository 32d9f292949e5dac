"""Holds the order and the shares of a step that the control plane decided for an engine. Pure values."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class DispatchPlan:
    """A meridian.v1.DispatchPlan without its ranks, which are kept with the live requests. None means no limit."""

    decision_id: int
    think_per_step: int | None
    output_per_step: int | None
    max_skip_steps: int
    prefill_tokens_per_step: int | None
    hold_admission: bool
    shadow: bool
    stock: bool
    reported: bool = False
