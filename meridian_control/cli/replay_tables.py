"""Formats the result of `meridianctl replay` for a terminal, as tables and sentences."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from meridian_control.cli.console import (
    add,
    new_table,
)
from meridian_control.offline.comparison_report import AFTER, BEFORE, figures
from meridian_control.offline.policy_comparison import BY_ITSELF

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.table import Table

    from meridian_control.offline.policy_comparison import Difference
    from meridian_control.policy.model import Policy

# Largest number of changed requests shown in a terminal.
SHOWN = 20


def tables(found: Difference, policy: Policy) -> list[Table | str]:
    """Return the tables and sentences in the order in which a terminal shows them."""
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
            shown.append(f"and {len(requests) - SHOWN} more requests; -o json prints all")
    else:
        shown.append("The new policy changes no end of thinking.")
    return [*shown, "Not known:", *(f"- {sentence}" for sentence in told["not_known"])]


def _heading(told: dict[str, Any]) -> str:
    left_out = ", ".join(f"{count} {why}" for why, count in told["left_out"].items())
    revisions = ", ".join(map(str, told["recorded_revisions"])) or "none"
    same = told["decisions_reproduced"]
    return (
        f"{told['requests']} requests in {told['reports']} reports of {told['sessions']} sessions"
        f"{f', left out: {left_out}' if left_out else ''}\n"
        f"recorded under revision {revisions}; {same['count']} of {same['of']} recorded decisions are reproduced"
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
