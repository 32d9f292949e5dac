"""Converts handovers in the decision log to messages of FleetService. All functions are pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meridian.v1 import fleet_pb2

from meridian_control.handover.rule import KV_PRESSURE, PREEMPTED_ANSWERS, STEP_GAIN
from meridian_control.journal.records import Decision

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meridian_control.handover.results import Handover
    from meridian_control.journal.records import Life
    from meridian_control.policy.model import Policy


def handover_message(made: Handover) -> fleet_pb2.LoggedHandover:
    move = made.move
    told = fleet_pb2.LoggedHandover(ref=made.ref, blocks=move.blocks, result=made.result, result_detail=made.detail)
    if move.engine is not None:
        told.engine_id = move.engine.engine_id
        for name in ("transfer_ms", "recompute_ms", "gain_ms", "kv_used"):
            setattr(told, name, getattr(move, name))
    return told


def compared_handover(made: Decision, policy: Policy) -> Iterator[tuple[str, float, str, str, float]]:
    """Yield the values that the rule behind a handover compared."""
    if made.hand_over is None or made.hand_over.move.engine is None:
        return
    move, disagg = made.hand_over.move, policy.disagg
    threshold = disagg.offload_threshold_blocks
    yield "blocks", move.blocks, ">=", "disagg.offload_threshold_blocks", threshold
    if made.reason == KV_PRESSURE:
        yield "thinking_kv_used", move.thinking_kv_used, ">", "disagg.max_pool_kv_used", disagg.max_pool_kv_used
    elif made.reason == PREEMPTED_ANSWERS:
        yield "waiting_blocks", move.waiting_blocks, ">", "none", 0
    elif made.reason == STEP_GAIN:
        yield "gain_ms", move.gain_ms, ">", "transfer_ms + 2 steps", move.least_gain_ms
    yield "answering_kv_used", move.kv_used, "<=", "disagg.max_pool_kv_used", disagg.max_pool_kv_used


def refs_of(life: Life) -> set[str]:
    """Return the references of the handovers that a life concerns: those decided for it, and the one it continues."""
    made = {event.hand_over.ref for event in life.events if isinstance(event, Decision) and event.hand_over}
    return (made | {life.opened.handed_over_ref}) - {""}
