"""What a replay under another policy says: figures as JSON, tables and sentences for a terminal. No file, no clock."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from meridian_control.cli.console import add, new_table
from meridian_control.offline.policy_comparison import BY_ITSELF, NATURAL, UNKNOWN, changed
from meridian_control.policy.diff import diff

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.table import Table

    from meridian_control.offline.policy_comparison import Difference, Outcome
    from meridian_control.offline.policy_replay import Place
    from meridian_control.policy.model import Policy

BEFORE, AFTER = "recorded", "new"
# Changed requests shown in a terminal.
SHOWN = 20


def figures(found: Difference, policy: Policy) -> dict[str, Any]:
    """All of it, in an order that depends on trace and policy alone."""
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
    """Against the newest recorded policy; nothing where the trace holds none."""
    return diff(found.recorded[max(found.recorded)], policy) if found.recorded else []


def _ends(outcomes: Iterable[Outcome], side: int) -> dict[str, int]:
    return dict(sorted(Counter((o.before, o.after)[side].reason for o in outcomes).items()))


def _forces(outcomes: Iterable[Outcome]) -> dict[str, dict[str, int]]:
    """Ends by cap or rule that only one of the policies makes, or that both make elsewhere or for another reason."""
    found: dict[str, Counter[str]] = {"added": Counter(), "gone": Counter(), "moved": Counter()}
    for outcome in changed(outcomes):
        before, after = outcome.before.reason, outcome.after.reason
        moved = before if before == after else f"{before} to {after}"
        found[outcome.change][{"added": after, "gone": before}.get(outcome.change, moved)] += 1
    return {change: dict(sorted(reasons.items())) for change, reasons in found.items()}


def _think_tokens(outcomes: list[Outcome]) -> dict[str, Any]:
    """Sums over requests whose ends are known under both policies; savings are against natural ends alone."""
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


def _sides(outcomes: list[Outcome]) -> tuple[list[Place], list[Place]]:
    return [o.before for o in outcomes], [o.after for o in outcomes]


def _shadowed(outcomes: Iterable[Outcome], side: int) -> dict[str, dict[str, int]]:
    """What rules in shadow decided, by reason, and what that alone would save against natural ends."""
    found: dict[str, dict[str, int]] = {}
    for outcome in outcomes:
        for reason, tokens in outcome.fates[side].shadowed.items():
            row = found.setdefault(reason, {"requests": 0, "would_save_tokens": 0})
            row["requests"] += 1
            if outcome.recorded.reason == NATURAL:
                row["would_save_tokens"] += max(0, outcome.recorded.think_tokens - tokens)
    return dict(sorted(found.items()))


def _cap(outcome: Outcome, side: int) -> tuple[int | None, bool]:
    fate = outcome.fates[side]
    return fate.cap_tokens, fate.cap_shadow


def _request(outcome: Outcome) -> dict[str, Any]:
    places = {"ended": outcome.recorded, BEFORE: outcome.before, AFTER: outcome.after}
    told = {name: place._asdict() for name, place in places.items()}
    return {"request_id": outcome.request_id, "engine_id": outcome.engine_id, "change": outcome.change, **told}


def unknowns(found: Difference) -> list[str]:
    """What this replay cannot know."""
    gone_on = sum(o.after.reason == UNKNOWN for o in found.outcomes)
    asked, answered = found.probes[1], found.samples[1]
    sentences = [
        "Answers: what follows an end that was not there, or is not there any more, was never generated.",
        "Timing: the engine's course is the recorded one. Order and share show what would have been asked for, not "
        "what that does to latencies; tokens are counted where an end is decided, a token or two before it applies.",
    ]
    sentences += [
        f"Refused: {engine_id} would not take the new policy: {why}" for engine_id, why in found.refused.items()
    ]
    if asked > answered:
        sentences.append(
            f"EAT: samples exist only where they were recorded; {asked - answered} of the {asked} probes that the new "
            f"policy asks for have none, and its EAT rule may have fired where it does not here."
        )
    if gone_on:
        sentences.append(
            f"Longer thinking: {gone_on} requests whose end is gone would have thought on; the trace does not say how "
            f"far. They are in no sum of tokens."
        )
    if found.reproduced < found.of_decisions:
        sentences.append(
            f"The past: {found.of_decisions - found.reproduced} of {found.of_decisions} decisions do not come out as "
            f"recorded under the recorded policy itself, because the recording began in the middle of a stream, or was "
            f"made by another version. Both sides of this comparison are recomputed."
        )
    return sentences


# ------------------------------------------------------------------------------------------------------------ output


def tables(found: Difference, policy: Policy) -> list[Table | str]:
    """What a terminal shows, in order."""
    told = figures(found, policy)
    shown: list[Table | str] = [_heading(told)]
    if told["policy_changes"]:
        shown.append(_table(("field", "recorded", "new"), [tuple(c.values()) for c in told["policy_changes"]]))
    shown.append(_ends_table(told))
    shown.append(_table(("", "recorded", "new"), list(_rows(told))))
    if requests := told["changed_requests"]:
        rows = [
            (r["request_id"], r["change"], *(_place(r[side]) for side in ("ended", BEFORE, AFTER)))
            for r in requests[:SHOWN]
        ]
        shown.append(_table(("request", "change", "really ended", "recorded policy", "new policy"), rows))
        if len(requests) > SHOWN:
            shown.append(f"and {len(requests) - SHOWN} more: -o json has all")
    else:
        shown.append("No request ends elsewhere.")
    return [*shown, "Not known:", *(f"- {sentence}" for sentence in told["not_known"])]


def _heading(told: dict[str, Any]) -> str:
    left_out = ", ".join(f"{count} {why}" for why, count in told["left_out"].items())
    revisions = ", ".join(map(str, told["recorded_revisions"])) or "none"
    same = told["decisions_reproduced"]
    return (
        f"{told['requests']} requests in {told['reports']} reports of {told['sessions']} sessions"
        f"{f', left out: {left_out}' if left_out else ''}\n"
        f"recorded under revision {revisions}; {same['count']} of {same['of']} recorded decisions come out again"
    )


def _ends_table(told: dict[str, Any]) -> Table:
    sides, forces = told["ends"], told["forces"]
    reasons = sorted({*sides[BEFORE], *sides[AFTER]}, key=lambda reason: (reason in BY_ITSELF, reason))
    rows = []
    for reason in reasons:
        moved = sum(count for key, count in forces["moved"].items() if key.split(" to ")[0] == reason)
        counts = (forces["added"].get(reason, 0), forces["gone"].get(reason, 0), moved)
        rows.append((reason, sides[BEFORE].get(reason, 0), sides[AFTER].get(reason, 0), *counts))
    return _table(("thinking ends", "recorded", "new", "added", "gone", "moved"), rows)


def _rows(told: dict[str, Any]) -> Iterable[tuple[object, ...]]:
    tokens, share = told["think_tokens"], told["share"]["reports_limited"]
    saved = tokens["saved_against_natural_ends"]
    whole = tokens["natural_ends"]["think_tokens"]
    yield "thinking tokens, ends known", tokens[BEFORE], tokens[AFTER]
    yield "saved against natural ends", *(_share(saved[side], whole) for side in (BEFORE, AFTER))
    for reason in sorted({*told["shadowed"][BEFORE], *told["shadowed"][AFTER]}):
        sides = [told["shadowed"][side].get(reason) for side in (BEFORE, AFTER)]
        yield f"in shadow: {reason}", *(_shadow(side) if side else "" for side in sides)
    yield "requests with another cap", "", told["caps_changed"]
    order = told["order"]
    yield "pairs in another order", "", _share(order["pairs_changed"], order["pairs"])
    yield "reports with another share", "", _share(told["share"]["reports_changed"], told["reports"])
    for name, sides in share.items():
        yield f"reports with {name}", sides[BEFORE], sides[AFTER]
    probes = told["eat_probes"]
    yield "EAT probes answered", *(f"{probes[s]['answered']} of {probes[s]['asked']}" for s in (BEFORE, AFTER))


def _shadow(row: dict[str, int]) -> str:
    return f"{row['requests']} requests, {row['would_save_tokens']} tokens"


def _share(part: int, whole: int) -> str:
    return f"{part} of {whole}" + (f" ({part / whole:.1%})" if whole else "")


def _place(place: dict[str, Any]) -> str:
    return f"{place['reason']} at {place['think_tokens']}"


def _table(columns: tuple[str, ...], rows: Sequence[tuple[object, ...]]) -> Table:
    filled = new_table(*columns)
    for row in rows:
        add(filled, *row)
    return filled
