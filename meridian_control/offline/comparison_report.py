"""Turns the comparison of a trace under two policies into figures for JSON. The functions use no file and no clock."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from meridian_control.offline.policy_comparison import NATURAL, RESERVE, UNKNOWN, changed
from meridian_control.policy.diff import diff

if TYPE_CHECKING:
    from collections.abc import Iterable

    from meridian_control.offline.policy_comparison import ComparedRequest, Difference
    from meridian_control.offline.policy_replay import ThinkEnd
    from meridian_control.policy.model import Policy

BEFORE, AFTER = "recorded", "new"


def figures(found: Difference, policy: Policy) -> dict[str, Any]:
    """Return all figures, in an order that depends on the trace and the policy alone."""
    outcomes = found.outcomes
    return {
        "sessions": found.sessions,
        "reports": found.steps.reports,
        "requests": len(outcomes),
        "left_out": {why: count for why, count in sorted(found.left_out.items()) if count},
        "recorded_revisions": list(found.recorded),
        "policy_changes": [change._asdict() for change in _changes(found, policy)],
        "decisions_reproduced": {"count": found.reproduced, "of": found.of_decisions},
        "ends": {BEFORE: _ends(outcomes, 0), AFTER: _ends(outcomes, 1)},
        "forces": _forces(outcomes),
        "think_tokens": _think_tokens(outcomes),
        "shadowed": {BEFORE: _shadowed(outcomes, 0), AFTER: _shadowed(outcomes, 1)},
        "caps_changed": sum(_cap(o, 0) != _cap(o, 1) for o in outcomes),
        "order": {
            "reports_changed": found.steps.other_order,
            "pairs": found.steps.pairs,
            "pairs_changed": found.steps.other_pairs,
        },
        "share": {
            "reports_changed": found.steps.other_share,
            "reports_limited": {
                name: dict(zip((BEFORE, AFTER), sides, strict=True))
                for name, sides in sorted(found.steps.limited.items())
            },
        },
        "eat_probes": {
            side: {"asked": asked, "answered": answered}
            for side, asked, answered in zip((BEFORE, AFTER), found.probes, found.samples, strict=True)
        },
        "changed_requests": [_request(outcome) for outcome in changed(outcomes)],
        "not_known": unknowns(found),
    }


def _changes(found: Difference, policy: Policy) -> Any:
    """Return the changes from the newest recorded policy; empty if the trace has no policy."""
    return diff(found.recorded[max(found.recorded)], policy) if found.recorded else []


def _ends(outcomes: Iterable[ComparedRequest], side: int) -> dict[str, int]:
    return dict(sorted(Counter((o.before, o.after)[side].reason for o in outcomes).items()))


def _forces(outcomes: Iterable[ComparedRequest]) -> dict[str, dict[str, int]]:
    """Count ends by cap or rule that only one policy makes, or that both make at other places or for other reasons."""
    found: dict[str, Counter[str]] = {"added": Counter(), "gone": Counter(), "moved": Counter()}
    for outcome in changed(outcomes):
        before, after = outcome.before.reason, outcome.after.reason
        moved = before if before == after else f"{before} to {after}"
        found[outcome.change][{"added": after, "gone": before}.get(outcome.change, moved)] += 1
    return {change: dict(sorted(reasons.items())) for change, reasons in found.items()}


def _think_tokens(outcomes: list[ComparedRequest]) -> dict[str, Any]:
    """Sum the thinking tokens of requests whose ends are known under both policies.

    Savings count only the requests that ended thinking naturally in the recording.
    """
    known = [o for o in outcomes if UNKNOWN not in (o.before.reason, o.after.reason)]
    natural = [o for o in outcomes if o.recorded.reason == NATURAL]
    spent = [sum(place.think_tokens for place in places) for places in _sides(known)]
    whole = sum(o.recorded.think_tokens for o in natural)
    saved = [whole - sum(place.think_tokens for place in places) for places in _sides(natural)]
    return {
        "requests_known": len(known),
        BEFORE: spent[0],
        AFTER: spent[1],
        "natural_ends": {"requests": len(natural), "think_tokens": whole},
        "saved_against_natural_ends": dict(zip((BEFORE, AFTER), saved, strict=True)),
    }


def _sides(outcomes: list[ComparedRequest]) -> tuple[list[ThinkEnd], list[ThinkEnd]]:
    return [o.before for o in outcomes], [o.after for o in outcomes]


def _shadowed(outcomes: Iterable[ComparedRequest], side: int) -> dict[str, dict[str, int]]:
    """Count the decisions of rules in shadow, by reason, with the tokens that each rule would save on natural ends."""
    found: dict[str, dict[str, int]] = {}
    for outcome in outcomes:
        for reason, tokens in outcome.fates[side].shadowed.items():
            row = found.setdefault(reason, {"requests": 0, "would_save_tokens": 0})
            row["requests"] += 1
            if outcome.recorded.reason == NATURAL:
                row["would_save_tokens"] += max(0, outcome.recorded.think_tokens - tokens)
    return dict(sorted(found.items()))


def _cap(outcome: ComparedRequest, side: int) -> tuple[int | None, bool]:
    caps = outcome.fates[side].caps
    newest = caps[max(caps)]
    return newest.max_think_tokens, newest.shadow


def _request(outcome: ComparedRequest) -> dict[str, Any]:
    places = {"ended": outcome.recorded, BEFORE: outcome.before, AFTER: outcome.after}
    told = {name: place._asdict() for name, place in places.items()}
    return {"request_id": outcome.request_id, "engine_id": outcome.engine_id, "change": outcome.change, **told}


def unknowns(found: Difference) -> list[str]:
    """Return sentences that say what the replay cannot know."""
    gone_on = sum(o.after.reason == UNKNOWN for o in found.outcomes)
    asked, answered = found.probes[1], found.samples[1]
    sentences = [
        "Answers: no answer was generated for an end of thinking that the new policy adds, moves or removes.",
        "Timing: the engine's steps are the recorded ones. Order and share show what the policy would have asked for, "
        "not the effect on latencies; tokens are counted where an end is decided, a token or two before it applies.",
    ]
    sentences += [f"Recorded policy: {field}." for field in found.removed]
    sentences += [
        f"Refused: {engine_id} would not accept the new policy: {why}" for engine_id, why in found.refused.items()
    ]
    if asked > answered:
        sentences.append(
            f"EAT: samples exist only at recorded places. {asked - answered} of the {asked} probes that the new "
            f"policy asks for have no sample, so its EAT rule may fire less often in this replay than it would live."
        )
    if any(o.after.reason == RESERVE and o.recorded.reason != RESERVE for o in found.outcomes):
        sentences.append(
            "Answer reserve: a recording has neither the model's context nor the length of a forced end, so the replay "
            "takes max_tokens as the limit and one token as the end."
        )
    if gone_on:
        sentences.append(
            f"Longer thinking: {gone_on} requests that the new policy no longer ends would have thought on for an "
            f"unknown number of tokens. No sum of tokens includes these requests."
        )
    if found.reproduced < found.of_decisions:
        sentences.append(
            f"The past: {found.of_decisions - found.reproduced} of {found.of_decisions} decisions differ from the "
            f"recording even under the recorded policy, because the recording began in the middle of a stream, or was "
            f"made by another version. Both sides of this comparison are recomputed."
        )
    return sentences
