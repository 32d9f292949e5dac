"""Render the findings of `make bench-replay` as Markdown and as the last line. Owns the wording."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from tests.bench.replay_data import PUBLIC

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.bench.replay import Chosen, Findings, Row


def markdown(found: Sequence[Findings], max_loss: float, splits: int) -> str:
    return "\n".join(_lines(found, max_loss, splits)) + "\n"


def _lines(found: Sequence[Findings], max_loss: float, splits: int) -> Iterator[str]:
    yield "# Recorded thinking, judged by the rules that decide live"
    yield ""
    yield (
        f"`make bench-replay` writes this page; the [protocol](../replay.md) explains it. The data sets aime24, aime25 "
        f"and hmmt25 are from {PUBLIC}. `saved` is the share of the thinking that an end saves, less the tokens of the "
        f"trial answers; accuracy is in points, with 95 % bootstrap intervals. `in force` says on how many of {splits} "
        f"splits calibration with a largest loss of {100 * max_loss:g} points puts exactly this rule into force."
    )
    for one in found:
        yield ""
        yield from _recording(one, max_loss)


def _recording(found: Findings, max_loss: float) -> Iterator[str]:
    yield f"## {found.name}"
    yield ""
    groups = f" to {found.groups} problems" if found.groups else ""
    yield (
        f"{found.requests} answers{groups}, {100 * found.accuracy:.1f} % right, {found.think_tokens:.0f} thinking "
        "tokens on average."
    )
    yield ""
    yield "| thinking ends | saved, % | accuracy, points | in force | |"
    yield "|---|---|---|---|---|"
    for row in (*found.headroom, *found.rows):
        in_force = "" if row.recommended is None else str(row.recommended)
        yield f"| {row.name} | {100 * row.saved:.1f} | {_accuracy(row)} | {in_force} | {row.note} |"
    yield ""
    yield _chosen(found.chosen, max_loss)


def _accuracy(row: Row) -> str:
    text = f"{100 * row.accuracy_change + 0.0:+.1f}"
    if (interval := row.accuracy_interval) is not None:
        text += f" [{100 * interval.low + 0.0:+.1f}, {100 * interval.high + 0.0:+.1f}]"
    return text


def _chosen(chosen: Sequence[Chosen], max_loss: float) -> str:
    """Say what calibration recommends."""
    refused = sum(not c.rule for c in chosen)
    told = [f"finds no rule on {refused} of {len(chosen)} splits"] if refused else []
    for rule, count in Counter(c.rule for c in chosen if c.rule).most_common():
        those = [c for c in chosen if c.rule == rule]
        worst = min(c.held_out.accuracy_change for c in those if c.held_out is not None)
        told.append(
            f'chooses "{rule}" on {count} and recommends it on {sum(c.recommended for c in those)}, where the other '
            f"half proves that its loss is small (worst change on the other half: {100 * worst:+.1f} points)"
        )
    return f"`calibrate --max-loss {max_loss:g}` {'; it '.join(told)}."


def summary(found: Sequence[Findings]) -> dict[str, Any]:
    """Return the last line: the figures by data set and rule."""
    return {one.name: {row.name: _plain(row) for row in (*one.headroom, *one.rows)} for one in found}


def _plain(row: Row) -> dict[str, Any]:
    return {
        "saved": round(row.saved, 4),
        "accuracy_change": round(row.accuracy_change, 4),
        "recommended": bool(row.recommended),
    }
