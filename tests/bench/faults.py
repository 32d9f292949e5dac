"""Measure what faults of the control plane and of the network cost an engine: `make bench-faults`.

The protocol is in tests/bench/README.md. The module owns the order of events and the report. The last line printed is
JSON.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.bench import fault_windows as windows
from tests.bench import program
from tests.bench.fault_windows import Course, ratios
from tests.bench.machine import machine
from tests.bench.results import Interval, geometric
from tests.chaos.network import NoNamespacesError
from tests.chaos.scene import FAULTS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.bench.fault_windows import Pair, Sides, Window
    from tests.chaos.scene import Fault

RESULTS = Path(__file__).parent / "results"
MEASURED = (
    "killed",
    "hung",
    "mute",
    "slow-10ms",
    "slow-1s",
    "slow-10s",
    "partition",
    "half-open-up",
    "half-open-down",
)
# Number of rounds, each of four windows, before, during and after a fault, and the number of steps in a window.
BEFORE, DURING, AFTER, STEPS = 70, 10, 16, 16
FIGURES = {"tokens per second": "tokens_per_s", "tokens per processor second": "tokens_per_cpu_s"}
HEAD = (
    "fault",
    "agent's states during the fault",
    "longest gap, ms: governed, stock",
    *(f"during: {name}" for name in FIGURES),
    "decisions in force again after, s",
    *(f"after: {name}" for name in FIGURES),
    *(f"after over before: {name}" for name in FIGURES),
    "other programs, cores",
)


def course_of(fault: Fault, sides: Sides, options: argparse.Namespace) -> Course:
    """Begin the fault, measure windows, end it, wait until decisions are in force again, and measure windows again."""
    course = Course(fault.name)
    fault.begin(sides.scene)
    try:
        course.during = sides.pairs(options.during, options.steps, course)
    finally:
        fault.end(sides.scene)
    course.back_s = sides.back_s()
    course.after = sides.pairs(options.after, options.steps, course)
    return course


def over_stock(pairs: Sequence[Pair], of: str) -> Interval:
    return geometric(ratios(pairs, of))


def over_before(pairs: Sequence[Pair], before: Sequence[Pair], of: str) -> Interval:
    """Return the lasting change by a fault: the governed engine's share of stock after it, divided by its share
    before."""
    return geometric(ratios(pairs, of), ratios(before, of))


def shown(found: Interval) -> str:
    return f"{found.value:.3f} ({found.low:.3f} to {found.high:.3f})"


def row(course: Course, none: Course) -> list[str]:
    gaps = ", ".join(f"{course.longest_s(arm) * 1e3:.0f}" for arm in ("governed", "stock"))
    after = [shown(over_stock(course.after, of)) for of in FIGURES.values()]
    if not course.during:
        return [course.name, "", "", "", "", "", *after, "", "", f"{course.others_cores:.2f}"]
    during = [shown(over_stock(course.during, of)) for of in FIGURES.values()]
    changed = [shown(over_before(course.after, none.after, of)) for of in FIGURES.values()]
    seen = [course.name, ", ".join(course.states()), gaps, *during, f"{course.back_s:.1f}"]
    return [*seen, *after, *changed, f"{course.others_cores:.2f}"]


def pooled(courses: Sequence[Course]) -> Course:
    """Return all faults together as one course."""
    made = Course("all faults")
    for course in courses:
        made.during += course.during
        made.after += course.after
        made.back_s = max(made.back_s, course.back_s)
        made.others_cores = max(made.others_cores, course.others_cores)
    return made


def report(none: Course, courses: Sequence[Course]) -> str:
    every = [none, *courses, pooled(courses)]
    rows = [row(one, none) for one in every]
    lines = [f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|", *(f"| {' | '.join(cells)} |" for cells in rows)]
    stock = [pair["stock"] for course in every[:-1] for pair in (*course.during, *course.after)]
    rate = sum(w.tokens for w in stock) / sum(w.busy_s for w in stock)
    unlike = sum(course.unlike() for course in every[:-1])
    return "\n".join(
        [
            "# What faults cost an engine",
            "",
            f"Measured on {datetime.now(UTC):%Y-%m-%d} on {machine()} ([protocol](../faults.md)). Figures are the "
            "governed "
            f"engine's over stock's in the same run, with 95 % intervals; stock generated {rate:.0f} tokens per "
            "second. "
            f"In {unlike} of {len(stock)} pairs of windows the two arms generated different numbers of tokens.",
            "",
            *lines,
            "",
        ]
    )


def plain(course: Course) -> dict[str, Any]:
    def of(pairs: Sequence[Pair]) -> dict[str, Any]:
        found: dict[str, Any] = {name: asdict(over_stock(pairs, name)) for name in FIGURES.values() if pairs}
        return {**found, "pairs": [[figures(pair[arm]) for arm in ("governed", "stock")] for pair in pairs]}

    def figures(window: Window) -> list[float]:
        return [window.tokens, round(window.busy_s, 4), round(window.cpu_s, 4), round(window.longest_s, 4)]

    longest = {arm: course.longest_s(arm) for arm in ("governed", "stock")} if course.during else {}
    rest = {"back_s": course.back_s, "longest_gap_s": longest, "others_cores": course.others_cores}
    return {"fault": course.name, **rest, "during": of(course.during), "after": of(course.after)}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests.bench.faults", description=__doc__)
    parser.add_argument("--faults", nargs="+", default=list(MEASURED), choices=[fault.name for fault in FAULTS])
    parser.add_argument("--before", type=int, default=BEFORE, help="rounds of four windows before any fault")
    parser.add_argument("--during", type=int, default=DURING, help="rounds while a fault lasts")
    parser.add_argument("--after", type=int, default=AFTER, help="rounds once it is past")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of a window")
    parser.add_argument("--save", action="store_true", help=f"keep the report in {RESULTS}")
    return parser.parse_args()


def run() -> None:
    """Run the whole benchmark. Raises BenchError."""
    options, folder = arguments(), Path(tempfile.mkdtemp(prefix="meridian-faults-"))
    chosen = [fault for name in options.faults for fault in FAULTS if fault.name == name]
    none = Course("none")
    try:
        with windows.sides(folder) as sides:
            none.after = sides.pairs(options.before, options.steps, none)
            courses = [course_of(fault, sides, options) for fault in chosen]
    except NoNamespacesError as error:
        raise program.BenchError(f"network namespaces and TUN devices cannot be made here: {error}") from error
    text = report(none, courses)
    past = pooled(courses)
    every = [plain(course) for course in (none, *courses, past)]
    changed = {name: asdict(over_before(past.after, none.after, name)) for name in FIGURES.values()}
    found = {"faults": every, "over_before": changed, "machine": machine()}
    if options.save:
        (RESULTS / "faults.md").write_text(text)
        (RESULTS / "faults.json").write_text(json.dumps(found) + "\n")
    print(text)
    print(json.dumps(found))


if __name__ == "__main__":
    program.main(run)
