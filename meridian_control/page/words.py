"""Makes the status page's rows of decisions and of the events of a request. The functions are pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from meridian.v1 import agent_pb2, fleet_pb2

from meridian_control.common.decision_words import end_text, event_text, life_state, outcome_text, spelled, why
from meridian_control.common.plain_data import plain

if TYPE_CHECKING:
    from collections.abc import Iterable

    from google.protobuf.timestamp_pb2 import Timestamp


def event_row(event: fleet_pb2.RequestEvent) -> dict[str, Any]:
    """Return an event of a request as the page shows it."""
    decision = event.decision if event.HasField("decision") else None
    forced = event.kind == "think_end" and event.detail != "natural"
    probe = decision is not None and decision.kind == "probe"
    return {
        "time": event.time.ToJsonString(),
        "kind": event.kind,
        "phase": agent_pb2.Phase.Name(event.phase) if event.phase in agent_pb2.Phase.values() else "",
        "text": event_text(event),
        "think_tokens": event.think_tokens,
        "output_tokens": event.output_tokens,
        "outcome": outcome_text(decision.kind, decision.outcome) if decision is not None else "",
        "why": why(decision, True) if decision is not None else [],
        # What the event leaves on the bar of the phases.
        "mark": "force" if forced else "probe" if probe else "",
    }


def life_rows(answer: fleet_pb2.ExplainRequestResponse) -> dict[str, Any]:
    """Return a request's life as the page shows it."""
    life = plain(answer.life)
    life["events"] = [event_row(event) for event in answer.life.events]
    life["state"] = life_state(answer)
    if answer.HasField("live"):
        life["think_tokens"], life["output_tokens"] = answer.live.think_tokens, answer.live.output_tokens
    return {"life": life}


def end_time(decision: fleet_pb2.LoggedDecision) -> Timestamp:
    """Return when a decision ended thinking, as far as that is known: the decision on a cap is made long before."""
    return decision.outcome_time if decision.HasField("outcome_time") else decision.time


def end_row(decision: fleet_pb2.LoggedDecision) -> dict[str, Any]:
    """Return the row of a decision that ended thinking."""
    # The agent has a note on the end if not the cap itself, but its answer reserve acted.
    is_reserve = decision.kind == "cap" and bool(decision.detail)
    return {
        "key": f"{decision.session_id} {decision.decision_id}",
        "time": end_time(decision).ToJsonString(),
        "engine": decision.engine_id,
        "request": decision.request_id,
        "reason": "answer reserve" if is_reserve else end_text(decision.reason),
        "think_tokens": decision.outcome_think_tokens or decision.signals.think_tokens,
        "outcome": outcome_text(decision.kind, decision.outcome, decision.shadow),
        "level": "bad" if decision.outcome == agent_pb2.OUTCOME_REFUSED else "",
        "why": why(decision),
    }


def counts_text(counts: Iterable[tuple[str, int]]) -> str:
    """Return counts by name, the largest first."""
    ordered = sorted(counts, key=lambda entry: (-entry[1], entry[0]))
    return ", ".join(f"{spelled(name)} {count:,}" for name, count in ordered)
