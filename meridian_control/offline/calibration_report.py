"""Shows what calibration found, to people and to programs: a table, sentences, a picture, JSON.

Owns wording and looks. The picture needs matplotlib, of the extra `calibrate`.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.table import Table

from meridian_control.offline.rule_replay import CAP
from meridian_control.policy import formats as forms
from meridian_control.policy.schema import ModelPolicy

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from matplotlib.axes import Axes

    from meridian_control.offline.calibration import Calibration, Figures, Goal, Point, Separation
    from meridian_control.offline.rule_replay import Replay, StoppingRule
    from meridian_control.offline.statistics import Interval

PROXY_NOTE = (
    "There are no labels. Right means here: the trial answer begins with the token it kept until the end. This is a "
    "proxy for accuracy, and means nothing where all answers begin alike: then set model.<name>.eat_answer_prefix and "
    "record again, or give --labels."
)
# Losses, in multiples of the one allowed, up to which the table shows each family's best rule.
SHOWN_LOSSES = (0.0, 0.5, 2.0, 5.0)
# Share of the sentence ends with an EAT sample below which the report says so.
WELL_COVERED = 0.8
COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#9d755d", "#e45756", "#72b7b2", "#eeca3b")


def table(found: Calibration, goal: Goal) -> Table:
    """The frontier of each family, thinned; figures of the half that nothing was chosen on."""
    made = Table(box=None)
    for index, name in enumerate(("family", "stops", "saved", "accuracy", "harmful", "at most", "probes", "stopped")):
        made.add_column(name, no_wrap=index != 1, justify="left" if index < 2 else "right")
    useless = {s.signal for s in found.separations if not s.separates}
    for family, points in found.fronts.items():
        left_out = " (left out)" if points and points[0].rule.signals & useless else ""
        shown = _shown(points, goal)
        if (best := found.recommended) is not None and best.rule.family == family and best not in shown:
            shown = sorted([*shown, best], key=lambda p: p.fit.saved)
        for index, point in enumerate(shown):
            figures = point.held_out
            made.add_row(
                "" if index else family + left_out,
                str(point.rule),
                percent(figures.saved),
                f"{points_of(figures.accuracy_change)} {_range(figures.accuracy_interval)}",
                f"{figures.harmful}/{figures.requests}",
                percent(figures.harmful_bound),
                percent(figures.probe_share),
                percent(figures.stopped / figures.requests),
                style="bold" if point == found.recommended else None,
            )
    return made


def _shown(points: list[Point], goal: Goal) -> list[Point]:
    """The point of a front that saves most at each of a few losses; if all lose more, the one that loses least."""
    shown = []
    for loss in SHOWN_LOSSES:
        allowed = [p for p in points if p.fit.accuracy_change >= -loss * goal.max_loss]
        if allowed:
            shown.append(max(allowed, key=lambda p: p.fit.saved))
    return [point for index, point in enumerate(shown) if point not in shown[:index]] or points[:1]


def sentences(found: Calibration, replay: Replay, goal: Goal) -> Iterator[str]:
    """The findings, a paragraph each."""
    episodes, judge = replay.episodes, replay.judge
    judged = int((judge.natural == judge.natural).sum())
    yield (
        f"{judged} requests of {len(episodes.seen)} can be judged; their thinking takes "
        f"{episodes.natural_tokens.mean():.0f} tokens on average. Rules were chosen on one half of them; all figures "
        f"are of the other half, with {goal.confidence:.0%} intervals."
    )
    left_out = [f"{count} {reason}" for reason, count in episodes.left_out.items()]
    if unjudged := len(episodes.ids) - judged:
        left_out.append(f"{unjudged} without {'an answer of its probes' if judge.is_proxy else 'labels of both kinds'}")
    if left_out:
        yield "Left out: " + ", ".join(left_out) + "."
    if judge.is_proxy:
        yield PROXY_NOTE
    for separation in found.separations:
        area = f"AUROC {separation.auroc:.2f} {_range(separation.interval, 1)}"
        if separation.signal == "entropy":
            continue
        if separation.signal == "position":
            yield f"The number of thinking tokens alone, for comparison: {area}."
        elif separation.separates:
            yield f"{separation.signal} separates right from wrong stops: {area}."
        else:
            yield (
                f"{separation.signal} does not separate right from wrong stops on this model and is left out: "
                f"{separation.why_not}."
            )
    yield from cautions(found, replay)
    yield recommendation(found, goal)


def cautions(found: Calibration, replay: Replay) -> Iterator[str]:
    """The reasons why the figures are worth less than they look."""
    episodes = replay.episodes
    if len(episodes.owner) and 0 < (covered := float((episodes.sample >= 0).mean())) < WELL_COVERED:
        yield (
            f"EAT was measured at {percent(covered)} of the sentence ends only: record with "
            "entropy.eat_probe_interval_tokens = 1, scheduler.min_think_tokens = 0 and every rule off."
        )
    recorded = forms.from_proto(episodes.policy) if episodes.policy is not None else replay.base
    for model in {*recorded.model, *replay.base.model}:
        was, now = (p.model.get(model, ModelPolicy()).eat_answer_prefix for p in (recorded, replay.base))
        if was != now:
            yield f"The trace was recorded with the answer prefix {was!r} for {model}; the base policy has {now!r}."
    if found.policy.override:
        yield "The base policy has overrides: where they set entropy or scheduler fields, those count, not these."


def recommendation(found: Calibration, goal: Goal) -> str:
    best = found.recommended
    if best is None:
        return (
            "Nothing is recommended: on the half that rules are chosen on, no rule whose signal separates saves "
            f"anything at a loss of at most {percent(goal.max_loss / 2)}, half of what is allowed. The policy stays in "
            "shadow."
        )
    figures = best.held_out
    text = (
        f"Best: {best.rule}. It saves {percent(figures.saved)} {_range(figures.saved_interval)} of the thinking, "
        f"probes taken off, and changes accuracy by {points_of(figures.accuracy_change)} points "
        f"{_range(figures.accuracy_interval)}. "
        f"{figures.harmful} of {figures.requests} requests became wrong by the stop: at most "
        f"{percent(figures.harmful_bound)} with {goal.confidence:.0%} confidence."
    )
    if found.fixed_cap is not None:
        cap = found.fixed_cap
        text += f" A fixed cap chosen in the same way, {cap.rule}, saves {percent(cap.held_out.saved)}."
    if not found.confirmed:
        text += (
            f" The half it was not chosen on does not confirm it (loss allowed: {percent(goal.max_loss)}): the policy "
            "stays in shadow. More requests may settle it."
        )
    return text


def percent(share: float) -> str:
    return f"{100 * share:.1f}%"


def points_of(change: float) -> str:
    """A change of a share, in percentage points, with its sign."""
    return f"{100 * change + 0.0:+.1f}"


def _range(interval: Interval, scale: int = 100) -> str:
    digits = 1 if scale == 100 else 2
    return f"[{scale * interval.low + 0.0:.{digits}f}, {scale * interval.high + 0.0:.{digits}f}]"


# ----------------------------------------------------------------------------------------------------------------- JSON


def report(found: Calibration, replay: Replay, goal: Goal) -> dict[str, Any]:
    """Everything that was found, as plain values."""
    return {
        "goal": asdict(goal),
        "proxy": replay.judge.is_proxy,
        "requests": len(replay.episodes.seen),
        "left_out": replay.episodes.left_out,
        "probe_cost_tokens": replay.cost_tokens,
        "natural": _plain(found.natural),
        "signals": [_signal(s) for s in found.separations],
        "families": {family: [_point(p) for p in points] for family, points in found.fronts.items()},
        "recommended": _point(found.recommended) if found.recommended else None,
        "fixed_cap": _point(found.fixed_cap) if found.fixed_cap else None,
        "confirmed": found.confirmed,
        "policy": found.policy.model_dump(mode="json", exclude_none=True),
    }


def _signal(separation: Separation) -> dict[str, Any]:
    """JSON has no NaN."""
    plain = asdict(separation) | {"separates": separation.separates}
    return plain if separation.auroc == separation.auroc else plain | {"auroc": None, "interval": None}


def _point(point: Point) -> dict[str, Any]:
    return (
        {"rule": str(point.rule)} | _fields(point.rule) | {"fit": _plain(point.fit), "held_out": _plain(point.held_out)}
    )


def _fields(rule: StoppingRule) -> dict[str, Any]:
    entropy = {
        name: [c.model_dump(mode="json") for c in value] if name == "rank_conditions" else value
        for name, value in rule.entropy.items()
    }
    return {"family": rule.family, "entropy": entropy, "scheduler": dict(rule.scheduler)}


def _plain(figures: Figures) -> dict[str, Any]:
    return asdict(figures)


# ---------------------------------------------------------------------------------------------------------- the picture


def plot(found: Calibration, replay: Replay, path: Path) -> None:
    """Draw the frontier to `path`; its format is that of the suffix. Raises OSError or ValueError."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 6.5), layout="constrained")
    axes = figure.subplots()
    _curves(axes, found)
    natural = found.natural
    axes.plot(natural.tokens, natural.accuracy, "o", color="black", ms=9, label="natural", zorder=4)
    if found.recommended is not None:
        figures = found.recommended.held_out
        label = f"{'recommended' if found.confirmed else 'best, not confirmed'}: {found.recommended.rule}"
        interval = figures.accuracy_interval
        bars = [[figures.accuracy_change - interval.low], [interval.high - figures.accuracy_change]]
        axes.errorbar(
            figures.tokens, figures.accuracy, bars, fmt="*", color="#b0163a", ms=16, capsize=3, label=label, zorder=5
        )
    axes.set(
        title=f"Accuracy against thinking, {natural.requests} requests that nothing was chosen on",
        xlabel="thinking tokens per request, probes included",
        ylabel="answers that stay as they were (proxy)" if replay.judge.is_proxy else "accuracy",
    )
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize="small")
    figure.savefig(path, dpi=120)


def _curves(axes: Axes, found: Calibration) -> None:
    colours = dict(zip((f for f in found.fronts if f != CAP), COLOURS * len(found.fronts), strict=False))
    for family, points in found.fronts.items():
        drawn = sorted((p.held_out.tokens, p.held_out.accuracy) for p in points)
        xs, ys = [x for x, _ in drawn], [y for _, y in drawn]
        if family == CAP:
            xs, ys = [*xs, found.natural.tokens], [*ys, found.natural.accuracy]
            axes.plot(xs, ys, "--", color="grey", lw=1.5, label=family, zorder=2)
        else:
            pair = bool(points) and bool(points[0].rule.either)
            style = {"ls": ":", "marker": "x", "ms": 4, "lw": 1} if pair else {"ls": "-", "marker": ".", "lw": 1.3}
            axes.plot(xs, ys, color=colours[family], label=family, alpha=0.8, zorder=3, **style)  # type: ignore[arg-type]
