"""Shows handovers in the decision log and on the status page. All functions are pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meridian_control.capabilities.handover.rule import KV_PRESSURE, PREEMPTED_ANSWERS, STEP_GAIN

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meridian.v1 import fleet_pb2

    from meridian_control.capabilities.handover.rule import Move
    from meridian_control.journal.records import Compared
    from meridian_control.policy.disagg_schema import DisaggPolicy


def fill(move: Move, message: fleet_pb2.LoggedHandover) -> None:
    """Fill in the message of a handover, as far as it was known when the handover was decided."""
    message.blocks = move.blocks
    if move.engine is not None:
        message.engine_id = move.engine.engine_id
        for name in ("transfer_ms", "recompute_ms", "gain_ms", "kv_used"):
            setattr(message, name, getattr(move, name))


def compared(move: Move, disagg: DisaggPolicy) -> Iterator[Compared]:
    """Yield the values that the rule behind a handover compared."""
    if move.engine is None:
        return
    threshold = disagg.offload_threshold_blocks
    yield "blocks", move.blocks, ">=", "disagg.offload_threshold_blocks", threshold
    if move.reason == KV_PRESSURE:
        yield "thinking_kv_used", move.thinking_kv_used, ">", "disagg.max_pool_kv_used", disagg.max_pool_kv_used
    elif move.reason == PREEMPTED_ANSWERS:
        yield "waiting_blocks", move.waiting_blocks, ">", "none", 0
    elif move.reason == STEP_GAIN:
        yield "gain_ms", move.gain_ms, ">", "transfer_ms + 2 steps", move.least_gain_ms
    yield "answering_kv_used", move.kv_used, "<=", "disagg.max_pool_kv_used", disagg.max_pool_kv_used


def handovers_text(engine: fleet_pb2.Engine) -> str:
    """Return the engine's pool, why the engine has no part in handovers, and what became of its requests; empty for an
    engine without a pool."""
    if not engine.pool:
        return ""
    counted = [f"{name.replace('_', ' ')} {count}" for name, count in sorted(engine.handovers.items())]
    if engine.HasField("shadow_handovers"):
        counted.append(f"in shadow {engine.shadow_handovers.requests}")
    refusals = list(filter(None, (engine.no_hand_over, engine.answering_engine.unfit)))
    where = "both pools" if engine.pool == "both" else f"{engine.pool} pool"
    return f"{where}: {', '.join([*refusals, *counted]) or 'none yet'}"
