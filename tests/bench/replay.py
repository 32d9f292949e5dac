"""Calibrate on recorded thinking, and check what calibration recommends on the requests that did not choose it: `make
bench-replay`.

The protocol is in tests/bench/termination.md. It needs neither an engine nor a GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from meridian_control.offline.calibration import Calibration, Figures, Goal, Point, calibrate
from meridian_control.offline.correctness import from_labels
from meridian_control.offline.episodes import collect
from meridian_control.offline.halves import TooFewRequests
from meridian_control.offline.rule_replay import CAP, GIVE_UP, Replay
from meridian_control.offline.trace_file import FileError
from meridian_control.policy import formats as forms
from meridian_control.policy.model import Policy
from tests.bench import harness
from tests.bench.harness import BenchError, Column, Session

RECOMMENDED, FIXED_CAP = "recommended", "fixed cap"
COLUMNS = (
    Column("saved", "thinking saved, %", 1, factor=100),
    Column("accuracy_change", "accuracy, points", 1, factor=100),
    Column("in_force", "splits on which it is recommended, %", 0, factor=100),
)
HOW = "no recording: `meridianctl record` writes traces; pass each with --trace FILE --labels FILE"


def read(trace: Path, labels: Path) -> Replay:
    """Read a trace and its labels, as `meridianctl calibrate` reads them. Raises BenchError."""
    try:
        episodes = collect([trace])
        policy = forms.from_proto(episodes.policy) if episodes.policy is not None else Policy()
        return Replay(episodes, from_labels(labels, episodes), policy, delay_tokens=2)
    except FileError as error:
        raise BenchError(str(error)) from error


def rows(found: Calibration, max_loss: float) -> Iterator[tuple[str, Figures, bool]]:
    """Yield what each family's best rule does on the half that did not choose it, and whether it is recommended."""
    recommended = found.recommended
    if recommended is not None:
        yield RECOMMENDED, recommended.held_out, True
    if found.fixed_cap is not None:
        yield FIXED_CAP, found.fixed_cap.held_out, False
    for family, points in found.fronts.items():
        if family != CAP and not points[0].rule.either:
            best = best_of(points, max_loss)
            yield family, best.held_out, recommended is not None and str(best.rule) == str(recommended.rule)
    if found.second is not None:
        yield GIVE_UP, found.second.together.held_out, found.second.in_force


def best_of(points: Sequence[Point], max_loss: float) -> Point:
    """Return the point that saves most within half the allowed loss, or else the point that loses least."""
    if within := [p for p in points if p.fit.accuracy_change >= -max_loss / 2]:
        return max(within, key=lambda p: p.fit.saved)
    return max(points, key=lambda p: p.fit.accuracy_change)


def measure(session: Session) -> dict[str, Any]:
    given, runs = session.options, session.runs
    if not given.trace:
        session.say(HOW)
        return {}
    for trace, labels in zip(given.trace, given.labels, strict=True):
        replay = read(trace, labels)
        for split in range(given.splits):
            try:
                found = calibrate(replay, Goal(given.max_loss), split)
            except TooFewRequests as error:
                raise BenchError(f"{trace.stem}: {error}") from error
            for name, of, in_force in rows(found, given.max_loss):
                figures = {"saved": of.saved, "accuracy_change": of.accuracy_change, "in_force": float(in_force)}
                session.add(name, figures, split, trace.stem)
    text = f"Medians over {given.splits} splits into halves, with a largest loss of {100 * given.max_loss:g} points."
    session.table("Recordings", text, COLUMNS, "")

    def row(name: str, case: str) -> dict[str, Any]:
        saved, change = (runs.median(name, figure, case).rounded() for figure in ("saved", "accuracy_change"))
        in_force = any(runs.values(name, "in_force", case).values())
        return {"saved": saved, "accuracy_change": change, "recommended": in_force}

    return {case: {name: row(name, case) for name in runs.arms(case)} for case in runs.cases()}


def options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--trace", type=Path, action="append", default=[], help="a trace; give --labels once for each trace")
    add("--labels", type=Path, action="append", default=[], help="the labels of a trace, in the order of the traces")
    add("--max-loss", type=float, default=0.01, help="largest allowed loss of accuracy, as a fraction")
    add("--splits", type=int, default=10, help="number of splits into halves")


def check(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    if len(given.trace) != len(given.labels):
        parser.error(f"--trace and --labels go together; got {len(given.trace)} traces and {len(given.labels)} labels")
    if given.splits < 1:
        parser.error(f"--splits must be at least 1; got {given.splits}")


if __name__ == "__main__":
    harness.main("replay", "Recorded thinking", __doc__, options, measure, check=check)
