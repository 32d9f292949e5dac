"""Says in plain words what decisions do and what happens to a request, in tables and on the status page.

The functions are pure.

The words are the glossary's. A name that the module does not know, such as the reason of a further capability, stands
as it is, without its underscores.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from meridian_control.common.enum_names import ENTROPY_REASONS, REASONS, outcome_name, stage_name
from meridian_control.common.look import phase_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meridian.v1 import fleet_pb2

ABBREVIATIONS = {"eat": "EAT", "rpdi": "RPDI", "kv": "KV", "ema": "mean"}
# Why thinking ended, or would have ended.
ENDS = {
    "answer_reserve": "the rest is the answer's reserve",
    "premature_stop": "the model stopped without an answer",
    "budget": "cap of a budget",
    "eat": "EAT is low and has settled",
    "empty_answer": "cap, after more room for the answer",
    "give_up": "EAT stays high",
    "hard_cap": "cap reached",
    "loop": "the thinking repeats itself",
    "natural": "the model ended it",
    "operator": "an operator asked for the answer",
    "pressure": "cap under pressure",
    "rank": "the end marker ranks high",
    "rpdi": "the entropy of the newest thinking is high (RPDI)",
    "soft_close": "soft close, past the soft limit",
}
DECISIONS = {
    ("cap", "budget"): "cap lowered by a budget",
    ("cap", "empty_answer"): "cap extended, as the answer would be empty",
    ("cap", "hard_cap"): "cap set",
    ("cap", "lifted"): "cap lifted, as scheduler.enabled is false",
    ("cap", "pressure"): "cap lowered under pressure",
    ("preempt", "no_kv_blocks"): "may preempt thinking if it lacks KV blocks",
    ("preempt", "no_place"): "may preempt thinking, as no place is free",
    ("preempt", "taken_back"): "preemption taken back, as the policy has changed",
    ("hand_over", "kv_pressure"): "handover, as the KV cache is nearly full",
    ("hand_over", "other_engine"): "handover to another engine",
    ("hand_over", "preempted_answers"): "handover, as answers are preempted",
    ("hand_over", "step_gain"): "handover, as steps are shorter there",
    ("hand_over", "taken_back"): "handover taken back",
    ("probe", "eat"): "EAT probe",
    ("probe", "empty_answer"): "probe before the cap",
    ("probe", "harm"): "probe of harm",
    ("tier", "reusable"): "KV blocks reused as in stock vLLM, as kv_memory.enabled is false",
    ("tier", "unreachable"): "KV blocks reused first",
}
# The kinds and the reasons of logged decisions that this version knows.
KINDS = ("cap", "force", "hand_over", "preempt", "probe", "tier")
DECISION_REASONS = {*(reason for _, reason in DECISIONS), *REASONS.values()}
DECISION_REASONS -= {"unspecified", "extension"}
OUTCOMES = {
    "agent_off": "agent off or frozen, or stream lost",
    "ended_naturally": "thinking ended first",
    "refused": "refused by the engine",
    "request_gone": "request finished first",
    "shadowed": "in shadow",
    "superseded": "another decision took its place",
    "unspecified": "open",
}
# Where an outcome means something else for decisions of one kind.
OUTCOMES_OF_KIND = {
    ("hand_over", "ended_naturally"): "stayed on its engine",
    ("preempt", "ended_naturally"): "joined without it",
}
EVENTS = {
    "control_group": "in the control group",
    "control_group_left": "no longer in the control group",
    "frozen": "engine frozen, so that it runs as stock vLLM",
    "opened": "opened",
    "preempted": "preempted",
    "resumed": "resumed",
    "stream_back": "stream to the control plane back",
    "stream_lost": "stream to the control plane lost",
    "thawed": "engine thawed",
}
SIGNALS = {
    "answer_reserve_tokens": "answer reserve",
    "answering_kv_used": "KV in use on the answering engine",
    "boundary_ranks": "end marker's rank",
    "boundary_rpdi": "RPDI",
    "earlier_eat_ema_nats": "EAT mean in nats",
    "earlier_eat_ema_variance": "EAT variance",
    "eat_ema_nats": "EAT mean in nats",
    "eat_ema_variance": "EAT variance",
    "eat_think_tokens": "thinking tokens at the newest EAT sample",
    "gain_ms": "gain in ms",
    "loop_rounds": "rounds",
    "loop_tokens": "repeated tokens",
    "max_think_tokens": "cap",
    "think_tokens": "thinking tokens",
    "thinking_kv_used": "KV in use on this engine",
    "waiting_blocks": "blocks that preempted answers wait for",
}
OPERATORS = {">=": "≥", "<=": "≤"}
# With so many digits every number looks different from all others.
MAX_DIGITS = 17
INDEXED = re.compile(r"(\w+)\[(\d+)\]")


def spelled(name: str) -> str:
    """Return a name of the protocol as words: hard cap, EAT in shadow."""
    shadowed = name.removesuffix("_shadowed")
    words = " ".join(ABBREVIATIONS.get(word, word) for word in shadowed.lower().split("_"))
    return words + " in shadow" * (shadowed != name)


def end_text(reason: str) -> str:
    """Return why thinking ended."""
    return ENDS.get(reason) or spelled(reason)


def decision_text(kind: str, reason: str, shadow: bool = False) -> str:
    """Return what a decision does to its request."""
    if kind == "force":
        text = f"end of thinking: {end_text(reason)}"
    else:
        text = DECISIONS.get((kind, reason)) or f"{spelled(kind)}: {spelled(reason)}"
    return text + ", in shadow" * shadow


def outcome_text(kind: str, outcome: int, shadow: bool = False) -> str:
    """Return what became of a decision; one in shadow says so whatever the outcome."""
    name = outcome_name(outcome)
    text = OUTCOMES_OF_KIND.get((kind, name)) or OUTCOMES.get(name) or spelled(name)
    return text + ", in shadow" * (shadow and name != "shadowed")


def comparison_texts(decision: fleet_pb2.LoggedDecision, in_full: bool = False) -> Iterator[str]:
    """Yield each value that a rule compared, with its limit unless both are the same. in_full: add the limit's name in
    the policy."""
    for row in decision.comparisons:
        value, limit = apart(row.value, row.limit)
        text = f"{_signal(row.signal)} {value}"
        if row.operator != "=" or row.value != row.limit:
            text += f" {OPERATORS.get(row.operator, row.operator)} {limit}"
        yield f"{text} ({row.limit_name})" if in_full else text


def _signal(name: str) -> str:
    if (match := INDEXED.fullmatch(name)) is None:
        return SIGNALS.get(name) or spelled(name)
    signal, index = SIGNALS.get(match[1]) or spelled(match[1]), int(match[2])
    return f"{signal}, {index} sentence end{'s'[: index > 1]} earlier" if index else signal


def short(value: float, digits: int = 3) -> str:
    """Return a number with three digits, or with so many, and a whole number in full."""
    if not math.isfinite(value):
        return "not measured"
    if value == int(value):
        return f"{value:,.0f}"
    text = f"{value:,.{max(0, digits - 4)}f}" if abs(value) >= 1000 else f"{value:.{digits}g}"
    return f"{value:,.0f}" if "e+" in text else text


def apart(value: float, limit: float, digits: int = 3) -> tuple[str, str]:
    """Return a number and its limit with three digits, or with so many, but with more if they would look equal although
    they differ."""
    texts = short(value, digits), short(limit, digits)
    differ = math.isfinite(value) and math.isfinite(limit) and value != limit
    if differ and digits < MAX_DIGITS and len({float(text.replace(",", "")) for text in texts}) == 1:
        return apart(value, limit, digits + 1)
    return texts


def with_limit(value: float, limit: float) -> str:
    """Return a measured value with its limit, such as `0.25, limit 0.2`."""
    return ", limit ".join(apart(value, limit, 4))


def why(decision: fleet_pb2.LoggedDecision, in_full: bool = False) -> list[str]:
    """Return the values behind a decision, a handover's engine, the operator's reason, and the outcome's detail."""
    move, eat = decision.hand_over, decision.measured_eat_nats
    by_pressure = decision.reason in ENTROPY_REASONS and bool(decision.pressure.name)
    parts = [
        *comparison_texts(decision, in_full),
        move.why,
        f"to {move.engine_id}: transfer {move.transfer_ms:.0f} ms, gain {move.gain_ms:.0f} ms" * bool(move.engine_id),
        f"{spelled(move.result)}: {move.result_detail}" * bool(move.result),
        f"in force by pressure {decision.pressure.name} in stage {stage_name(decision.budget_stage)}" * by_pressure,
        "in the control group" * decision.control_group,
        decision.operator_reason,
        f"EAT {short(eat)} nats" * decision.HasField("measured_eat_nats"),
        decision.detail,
    ]
    return [part for part in parts if part]


def last_text(last: fleet_pb2.LastDecision) -> str:
    """Return what the newest decision about a live request does, and what became of it."""
    if not last.kind:
        return ""
    return f"{decision_text(last.kind, last.reason)} ({outcome_text(last.kind, last.outcome, last.shadow)})"


def life_state(answer: fleet_pb2.ExplainRequestResponse) -> str:
    """Return whether the explained request is finished, live, or lost with the stream of its engine."""
    if answer.life.HasField("close_time"):
        return "finished"
    kinds = [event.kind for event in answer.life.events if event.kind != "decision"]
    if answer.HasField("live") or kinds[-1:] != ["stream_lost"]:
        return "live"
    # Each replica that has seen the request has its own opening, and may notice late that its stream was lost. If a
    # new stream takes the place of one whose loss was not noticed, the request has no event of the loss.
    openings = streams = 0
    for kind in kinds:
        openings += kind == "opened"
        if kind in ("opened", "stream_back"):
            streams = min(streams + 1, max(openings, 1))
        elif kind == "stream_lost":
            streams = max(streams - 1, 0)
    return "live" if streams else "lost"


def event_text(event: fleet_pb2.RequestEvent) -> str:
    """Return what happened to a request."""
    if event.HasField("decision"):
        return decision_text(event.decision.kind, event.decision.reason, event.decision.shadow)
    if event.kind == "phase":
        return phase_text(event.phase)
    if event.kind == "think_end":
        return f"thinking ended: {end_text(event.detail)}"
    # The end of a request has a name of the protocol as its detail; others have a text, which may quote an id.
    detail = spelled(event.detail) if event.kind == "closed" else event.detail
    text = EVENTS.get(event.kind) or spelled(event.kind)
    return f"{text}: {detail}" if detail else text
