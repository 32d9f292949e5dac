"""Presents the result of a calibration: as a table and sentences, and as JSON.

The module owns wording and layout.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.table import Table

from meridian_control.common.inference import needed_to_prove
from meridian_control.common.look import percent
from meridian_control.offline.episodes import UNFINISHED
from meridian_control.policy import formats as forms
from meridian_control.policy.schema import ModelPolicy

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meridian_control.offline.calibration import Calibration, Figures, Goal, Point, SecondThreshold
    from meridian_control.offline.rule_replay import Replay, StoppingRule
    from meridian_control.offline.statistics import Interval

PROXY_NOTE = (
    "There are no labels, so an answer counts as right if the trial answer begins with the token that it keeps until "
    "its last probe. This is a proxy for accuracy, which sees no change after the first token, and means nothing if "
    "all answers begin with the same token: then set model.<name>.eat_answer_prefix and record again, or give --labels."
)
# The table shows each family's best rule within each of these losses, given in multiples of the allowed loss.
SHOWN_LOSSES = (0.0, 0.5, 2.0, 5.0)
# The report warns if a smaller share of the sentence ends than this has an EAT sample.
WELL_COVERED = 0.8
# The report warns if the trace has more unfinished requests than this share of its finished ones. With as many, the
# longest tenth of the requests is a twelfth of the finished ones.
MANY_UNFINISHED = 0.05


def table(result: Calibration, goal: Goal) -> Table:
    """Return a table of a few rules from each family's frontier, with figures from the half not used for choosing."""
    summary = Table(box=None)
    for index, name in enumerate(("family", "stops", "saved", "accuracy", "harmful", "at most", "probes", "stopped")):
        summary.add_column(name, no_wrap=index != 1, justify="left" if index < 2 else "right")
    useless = {s.signal for s in result.separations if s.why_not}
    for family, points in result.fronts.items():
        left_out = " (left out)" if points and points[0].rule.signals & useless else ""
        shown = _shown(points, goal)
        if (best := result.best) is not None and best.rule.family == family and best not in shown:
            shown = sorted([*shown, best], key=lambda p: p.fit.saved)
        for index, point in enumerate(shown):
            figures = point.held_out
            summary.add_row(
                "" if index else family + left_out,
                str(point.rule),
                percent(figures.saved),
                f"{points_of(figures.accuracy_change)} {_range(figures.accuracy_interval)}",
                f"{figures.harmful}/{figures.requests}",
                percent(figures.harm_bound),
                percent(figures.probe_share),
                percent(figures.stopped / figures.requests),
                style="bold" if point == result.best else None,
            )
    return summary


def _shown(points: list[Point], goal: Goal) -> list[Point]:
    """Return the points that save most within each of SHOWN_LOSSES, or else the point that loses least."""
    shown = []
    for loss in SHOWN_LOSSES:
        allowed = [p for p in points if p.fit.accuracy_change >= -loss * goal.max_loss]
        if allowed:
            shown.append(max(allowed, key=lambda p: p.fit.saved))
    return [point for index, point in enumerate(shown) if point not in shown[:index]] or points[:1]


def sentences(result: Calibration, replay: Replay, goal: Goal) -> Iterator[str]:
    """Yield the findings, one paragraph each, the recommendation first."""
    yield recommendation(result, goal)
    yield second_threshold(result, replay, goal)
    episodes, judge = replay.episodes, replay.judge
    judged = int((judge.natural == judge.natural).sum())
    yield (
        f"{judged} of {len(episodes.seen)} requests can be judged; a request thinks for "
        f"{episodes.natural_tokens.mean():.0f} tokens on average. Rules were chosen on one half of the requests; all "
        f"figures are from the other half, with {100 * goal.confidence:g} % confidence intervals."
    )
    if result.groups:
        yield (
            f"The requests belong to {result.groups} groups. Each group lies in one half, and halves, intervals and "
            "bounds are computed from groups, of which each counts alike, whatever its number of requests."
        )
    left_out = [f"{count} {reason}" for reason, count in episodes.left_out.items()]
    if unjudged := len(episodes.ids) - judged:
        left_out.append(f"{unjudged} without {'a trial answer' if judge.is_proxy else 'a natural and a cut label'}")
    if judge.strangers:
        left_out.append(f"labels of {judge.strangers} requests that are not in the traces")
    if judge.shared:
        left_out.append(f"labels of {judge.shared} ids that name several requests")
    if left_out:
        yield "Left out: " + ", ".join(left_out) + "."
    if judge.is_proxy:
        yield PROXY_NOTE
    for found in result.separations:
        if found.why_not:
            yield (
                f"{found.signal} does not separate right from wrong stops on this model and is left out: "
                f"{found.why_not}."
            )
        elif found.interval is not None:
            area = f"AUROC {found.auroc:.2f} {_range(found.interval, 1)}"
            yield f"{found.signal} separates right from wrong stops: {area}."
    yield from cautions(result, replay)


def cautions(result: Calibration, replay: Replay) -> Iterator[str]:
    """Yield warnings about conditions that make the figures less reliable than they look."""
    episodes = replay.episodes
    if len(episodes.owner) and 0 < (covered := float((episodes.sample >= 0).mean())) < WELL_COVERED:
        yield (
            f"EAT was measured at only {percent(covered)} of the sentence ends: record with "
            "entropy.eat_probe_interval_tokens = 1, scheduler.min_think_tokens = 0 and every rule off."
        )
    if (unfinished := episodes.left_out.get(UNFINISHED, 0)) > MANY_UNFINISHED * len(episodes.ids):
        yield (
            f"{unfinished} requests had not finished when the trace ended, mostly long ones. So too few long requests "
            "were judged, and a bound says little about harm to them: record several times as long."
        )
    recorded = replay.base
    if episodes.policy is not None:
        recorded, removed = forms.from_older_proto(episodes.policy)
        yield from (f"The policy of the trace: {field}." for field in removed)
    for model in {*recorded.model, *replay.base.model}:
        was, now = (p.model.get(model, ModelPolicy()).eat_answer_prefix for p in (recorded, replay.base))
        if was != now:
            yield f"The trace was recorded with the answer prefix {was!r} for {model}; the base policy has {now!r}."
    if episodes.probings > 1:
        yield (
            f"The policy probed the requests in {episodes.probings} ways: entropy.eat_probe_*, the floor or the "
            "answer prefix differ. EAT at other places is another EAT, so record again under one of them."
        )
    if result.policy.override:
        yield "The base policy has overrides, whose entropy and scheduler fields replace the calibrated ones."


def recommendation(result: Calibration, goal: Goal) -> str:
    best = result.best
    if best is None:
        return (
            "Nothing is recommended: on the half on which rules are chosen, no rule whose signal separates saves "
            f"thinking and, with twice its harm, has an upper bound of at most {_points(goal.max_loss)} %. "
            f"{_needed_at_best(result, goal)} The policy stays in shadow."
        )
    figures = best.held_out
    text = (
        f"Best: {best.rule}. The rule saves {percent(figures.saved)} {_range(figures.saved_interval)} of the thinking, "
        f"less the probes' tokens, and changes accuracy by {points_of(figures.accuracy_change)} points "
        f"{_range(figures.accuracy_interval)}. "
        f"The stop made {figures.harmful} of {figures.requests} requests wrong. "
    )
    if result.confirmed:
        text += _proved("The rule costs", goal)
    else:
        text += f"The rule costs at most {_bound(figures)} points of accuracy with {_confidence(goal)}, which exceeds "
        text += f"the allowed {_points(goal.max_loss)}, so the policy stays in shadow: {_unproved(result, goal)}"
    if result.fixed_cap is not None:
        cap = result.fixed_cap
        text += f" A fixed cap chosen in the same way, {cap.rule}, saves {percent(cap.held_out.saved)}."
    return text


def second_threshold(result: Calibration, replay: Replay, goal: Goal) -> str:
    """Say which give-up rule was found, what it may cost, and whether it is in force."""
    if (second := result.second) is None:
        text = "No second threshold, for thinking that will not converge, is recommended: "
        if replay.judge.is_proxy:
            return text + "without labels every answer that would still have changed counts as harm."
        return text + (
            f"on the half on which rules are chosen, none that saves more keeps the upper bound of the harm within "
            f"{_points(goal.max_loss)} % together with the best rule. {_needed_at_best(result, goal)}"
        )
    figures, first = second.together.held_out, result.best
    text = f"Second threshold, for thinking that will not converge: {second.rule}. "
    if first is not None:
        text += f"Together with the best rule it saves {percent(figures.saved)} instead of "
        text += f"{percent(first.held_out.saved)} of the thinking"
    else:
        text += f"It saves {percent(figures.saved)} of the thinking"
    text += f" and gives up {second.given_up} of {figures.requests} requests. "
    cost, allowed = "Both cost" if first else "It costs", f"the allowed {_points(goal.max_loss)}"
    if second.in_force:
        return text + _proved(cost, goal)
    text += f"{cost} at most {_bound(figures)} points of accuracy with {_confidence(goal)}, "
    if second.proved:
        return text + (
            f"which is within {allowed}, but not all rules that are tested before are proved, so the second stays in "
            "shadow."
        )
    stays = (
        "stays in shadow" if result.policy.entropy.give_up_tokens else "is left out, as its probes would cost tokens"
    )
    return text + f"which exceeds {allowed}, so the second threshold {stays}: {_unproved(result, goal)}"


def _proved(cost: str, goal: Goal) -> str:
    """Say what is proved. Of a rule that is one of several tested, only the loss at which it was tested is proved."""
    return f"{cost} at most the allowed {_points(goal.max_loss)} points of accuracy with {_confidence(goal)}."


def _bound(figures: Figures) -> str:
    """Spell the upper bound of the harm in percentage points, with two digits, because it may be close to the allowed
    loss."""
    return f"{100 * figures.harm_bound:.2f}"


def _points(loss: float) -> str:
    """Spell a loss that the user has given, in percentage points, with all its digits."""
    return str(round(100 * loss, 6))


def _confidence(goal: Goal) -> str:
    text = f"{100 * goal.confidence:g} % confidence"
    if goal.attempt:
        text += f" over all attempts (this is attempt {goal.attempt})"
    return text


def _needed_at_best(result: Calibration, goal: Goal) -> str:
    return f"Without any harm, the bound needs {_needed(result, goal)} in each half."


def _unproved(result: Calibration, goal: Goal) -> str:
    """Say how many requests or groups a proof needs at least."""
    if needed_to_prove(goal.max_loss, goal.bound_confidence) == math.inf:
        return "no number of requests can prove that a rule never harms."
    return f"the loss is not proved to be small, for which the other half needs {_needed(result, goal)}."


def _needed(result: Calibration, goal: Goal) -> str:
    needed = needed_to_prove(goal.max_loss, goal.bound_confidence)
    what = "groups" if result.groups else "requests"
    return f"at least {needed:.0f} {what}" if needed < math.inf else f"more {what} than there can be"


def points_of(change: float) -> str:
    """Spell a change of a share in percentage points, with its sign."""
    return f"{100 * change + 0.0:+.1f}"


def _range(interval: Interval, scale: int = 100) -> str:
    digits = 1 if scale == 100 else 2
    return f"[{scale * interval.low + 0.0:.{digits}f}, {scale * interval.high + 0.0:.{digits}f}]"


# ----------------------------------------------------------------------------------------------------------------- JSON


def report(result: Calibration, replay: Replay, goal: Goal) -> dict[str, Any]:
    """Return the whole result of a calibration as plain values."""
    return {
        "goal": asdict(goal) | {"bound_confidence": goal.bound_confidence},
        "proxy": replay.judge.is_proxy,
        "requests": len(replay.episodes.seen),
        "groups": result.groups,
        "left_out": replay.episodes.left_out,
        "probe_cost_tokens": replay.cost_tokens,
        "natural": asdict(result.natural),
        "signals": [asdict(s) | {"separates": not s.why_not} for s in result.separations],
        "families": {family: [_point(p) for p in points] for family, points in result.fronts.items()},
        "best": _point(result.best) if result.best else None,
        "recommended": _point(result.recommended) if result.recommended else None,
        "fixed_cap": _point(result.fixed_cap) if result.fixed_cap else None,
        "second_threshold": _second(result.second) if result.second else None,
        "policy": result.policy.model_dump(mode="json", exclude_none=True),
    }


def _second(second: SecondThreshold) -> dict[str, Any]:
    facts = {name: getattr(second, name) for name in ("given_up", "proved", "in_force")}
    return {"rule": str(second.rule)} | _fields(second.rule) | facts | {"together": _point(second.together)}


def _point(point: Point) -> dict[str, Any]:
    return (
        {"rule": str(point.rule)} | _fields(point.rule) | {"fit": asdict(point.fit), "held_out": asdict(point.held_out)}
    )


def _fields(rule: StoppingRule) -> dict[str, Any]:
    entropy = {
        name: [c.model_dump(mode="json") for c in value] if name == "rank_conditions" else value
        for name, value in rule.entropy.items()
    }
    return {"family": rule.family, "entropy": entropy, "scheduler": dict(rule.scheduler)}
