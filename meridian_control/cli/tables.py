"""Formats engines and live requests as tables for a terminal."""

from collections.abc import Iterable

from meridian.v1 import agent_pb2, fleet_pb2
from rich.table import Table

from meridian_control.cli.console import add, new_table
from meridian_control.common.enum_names import entropy_backend_name, outcome_name, phase_name, state_name


def engine_table(rows: Iterable[fleet_pb2.Engine]) -> Table:
    load_columns = ("step ms", "KV", "running", "waiting", "think", "answer")
    shown = new_table("engine", "state", "model", "revision", "entropy", *load_columns)
    for e in rows:
        revision = f"{e.acked_revision}/{e.revision}{' refused' if e.nack_error else ''}"
        load = (f"{e.step_time_ms:.1f}", f"{e.kv_used:.0%}", e.running, e.waiting, e.thinking, e.answering)
        add(shown, e.engine_id, _engine_state(e), e.model, revision, _entropy(e), *load)
    return shown


def _engine_state(engine: fleet_pb2.Engine) -> str:
    if engine.fault:
        return f"fault: {engine.fault}; {_outlook(engine)}"
    state = fleet_pb2.ConnectionState.Name(engine.state).removeprefix("CONNECTION_STATE_").lower()
    if engine.state != fleet_pb2.CONNECTION_STATE_CONNECTED:
        return f"{state}, {state_name(engine.agent_state)}"
    if not engine.HasField("freeze"):
        times = sum(engine.faults.values())
        return f"{state}, after {times} fault{'s'[: times > 1]}: {engine.last_fault}" if times else state
    if not engine.freeze.confirmed:
        return "to be frozen" if engine.freeze.freeze_ids else "to be thawed"
    if not engine.freeze.HasField("end_time"):
        return "frozen by MERIDIAN_FREEZE"
    return f"frozen until {engine.freeze.end_time.ToDatetime():%H:%M:%S} UTC"


def _entropy(engine: fleet_pb2.Engine) -> str:
    """Return the backend that measures entropy on an engine, empty if an older agent does not report the backend."""
    if engine.entropy_backend == agent_pb2.ENTROPY_BACKEND_TORCH:
        return "torch, slower"
    return entropy_backend_name(engine.entropy_backend) if engine.entropy_backend else ""


def _outlook(engine: fleet_pb2.Engine) -> str:
    if not engine.HasField("recover_time"):
        return "off until the engine is started again"
    return f"off until {engine.recover_time.ToDatetime():%H:%M:%S} UTC"


def request_table(rows: Iterable[fleet_pb2.LiveRequest]) -> Table:
    shown = new_table(
        "engine", "request", "phase", "think", "output", "entropy", "EAT", "RPDI", "rank", "last decision"
    )
    for r in rows:
        phase = phase_name(r.phase) + (" preempted" if r.preempted else "")
        signals = (f"{value:.3g}" for value in (r.entropy_nats, r.eat_ema_nats, r.rpdi))
        outcome = outcome_name(r.last_decision.outcome)
        last = f"{r.last_decision.kind} {r.last_decision.reason} {outcome}" if r.last_decision.kind else ""
        add(shown, r.engine_id, r.request_id, phase, r.think_tokens, r.output_tokens, *signals, r.rank, last)
    return shown
