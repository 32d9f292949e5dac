"""The harness of all benchmarks: arms that take turns, ratios with intervals, results, pages and the last line.

A benchmark is a module that says what its arms are, how many rounds they have, what one run of an arm yields, which is
a dict of figures, and which figures its tables and its last line have. The harness runs the arms in turns, repeats runs
that other programs disturbed, compares the arms within each round, and stores the tables as `results/NAME.json`, from
which it makes the page `results/NAME.md`. `python -m tests.bench.harness` makes all pages of `results` again.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
import math
import operator
import os
import re
import signal
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from tests.bench.machine import Calm, Others, machine
from tests.processes import ROOT

RESULTS = Path(__file__).parent / "results"
# Share of the possible samples whose interval contains the median.
CONFIDENCE = 0.95

# The figures of one run by name; a name ends in its unit.
Figures = dict[str, float]


class BenchError(Exception):
    """The benchmark cannot go on; the text says why."""


# ---------------------------------------------------------------------------------------------------------- arithmetic


@dataclass(frozen=True)
class Interval:
    """A median and the bounds of its interval."""

    value: float
    low: float
    high: float

    def over(self, other: Interval) -> Interval:
        """Return this value divided by one that was measured independently. The bounds are the widest that both
        intervals allow."""
        return Interval(self.value / other.value, self.low / other.high, self.high / other.low)

    def rounded(self, digits: int = 4) -> float:
        """Return the median as a last line shows it; an integer without digits."""
        return round(self.value, digits) if digits else round(self.value)


def interval(values: Sequence[float]) -> Interval:
    """Return the median of values with the narrowest pair of order statistics that contains the true median in at least
    CONFIDENCE of all samples, whatever the distribution. Fewer than six values have no such pair; their interval is the
    lowest and the highest. All bounds of no values are NaN."""
    ordered = sorted(value for value in values if not math.isnan(value))
    if not ordered:
        return Interval(math.nan, math.nan, math.nan)
    count, below, left_out = len(ordered), 0.0, 0
    for k in range(count // 2):
        below += math.comb(count, k) / 2**count
        if below > (1 - CONFIDENCE) / 2:
            break
        left_out = k
    return Interval(statistics.median(ordered), ordered[left_out], ordered[-1 - left_out])


def in_turn(arms: Sequence[str], number: int) -> list[str]:
    """Return the order of the arms in a round: each arm comes first in one of as many rounds as there are arms."""
    first = number % len(arms)
    return [*arms[first:], *arms[:first]]


@dataclass(frozen=True)
class Run:
    """The figures of one run of an arm. start: number of the start of the processes that ran it."""

    arm: str
    case: str
    start: int
    round: int
    figures: Figures


class Runs:
    """All runs of a benchmark. Arms are compared within a round, and values of one start count as one value if there
    are several starts, because processes with the same code differ in speed for as long as they live."""

    def __init__(self) -> None:
        self.all: list[Run] = []

    def add(self, arm: str, figures: Figures, number: int = 0, *, case: str = "", start: int = 0) -> None:
        self.all.append(Run(arm, case, start, number, figures))

    def cases(self) -> list[str]:
        return list(dict.fromkeys(run.case for run in self.all))

    def arms(self, case: str = "") -> list[str]:
        return list(dict.fromkeys(run.arm for run in self.all if run.case == case))

    def values(self, arm: str, figure: str, case: str = "") -> dict[tuple[int, int], float]:
        """Return a figure of an arm by start and round."""
        return {
            (run.start, run.round): run.figures[figure]
            for run in self.all
            if (run.arm, run.case) == (arm, case) and figure in run.figures
        }

    def median(self, arm: str, figure: str, case: str = "") -> Interval:
        return interval(_by_start(self.values(arm, figure, case)))

    def ratio(self, arm: str, base: str, figure: str, case: str = "") -> Interval:
        """Return the figure of an arm divided by that of the base arm in the same round."""
        return self._compared(operator.truediv, arm, base, figure, case)

    def difference(self, arm: str, base: str, figure: str, case: str = "") -> Interval:
        return self._compared(operator.sub, arm, base, figure, case)

    def _compared(self, how: Callable[[float, float], float], arm: str, base: str, figure: str, case: str) -> Interval:
        ours, theirs = self.values(arm, figure, case), self.values(base, figure, case)
        pairs = {at: (ours[at], theirs[at]) for at in ours if at in theirs}
        return interval(_by_start({at: how(*pair) for at, pair in pairs.items() if how is operator.sub or pair[1]}))


def _by_start(values: Mapping[tuple[int, int], float]) -> list[float]:
    """Return the values, or the median of each start if there are several starts."""
    starts: dict[int, list[float]] = defaultdict(list)
    for (start, _), value in values.items():
        starts[start].append(value)
    return list(values.values()) if len(starts) < 2 else [statistics.median(found) for found in starts.values()]


# ------------------------------------------------------------------------------------------------------------- results

# Terms that a page spells out if it has them.
TERMS = {"EAT": "entropy after `</think>`", "RPDI": "reasoning path deviation index"}


@dataclass(frozen=True)
class Column:
    """One column of a table. compared: "ratio" or "difference" to the base arm has a row of its own, and the column
    shows intervals; "" for neither. factor: what the figure is multiplied by."""

    figure: str
    head: str
    digits: int = 1
    compared: str = ""
    factor: float = 1.0


class Store:
    """The tables and goals of one benchmark in a folder. What is put replaces what has the same title; the rest stays,
    with the date and the machine of its own measurement."""

    def __init__(self, name: str, title: str, folder: Path) -> None:
        self._data, self._page = folder / f"{name}.json", folder / f"{name}.md"
        self.found: dict[str, Any] = {"title": title, "goals": {}, "tables": {}}
        self.read()

    def read(self) -> None:
        """Read what is stored, if anything is."""
        if self._data.exists():
            self.found = json.loads(self._data.read_text())

    def put(self, kind: str, title: str, value: dict[str, Any]) -> None:
        self.found[kind][title] = value
        self._data.parent.mkdir(parents=True, exist_ok=True)
        self._data.write_text(dumped(self.found))
        self._page.write_text(page(self.found, self._data.stem))


def dumped(found: dict[str, Any]) -> str:
    """Return stored results as JSON, with a line for each goal, and for each column and row of a table."""
    rows = {id(table): [json.dumps(row) for row in table["rows"]] for table in found["tables"].values()}
    plain = {title: {**table, "rows": f"<{id(table)}>"} for title, table in found["tables"].items()}
    text = json.dumps({**found, "tables": plain}, indent=1)
    text = re.sub(r"\{\n([^{}[\]]*)\n *\}", lambda flat: f"{{{' '.join(map(str.strip, flat[1].splitlines()))}}}", text)
    for key, lines in rows.items():
        inside = "".join(f"\n   {line}," for line in lines)[:-1]
        text = text.replace(f'"<{key}>"', f"[{inside}\n   ]")
    return text + "\n"


def page(found: dict[str, Any], name: str) -> str:
    """Return the page of stored results."""
    stored = json.dumps(found)
    terms = "".join(
        f" {term} is the {meaning}." for term, meaning in TERMS.items() if re.search(rf"\b{term}\b", stored)
    )
    made = (
        f"`python -m tests.bench.harness` makes this page from `{name}.json`; a [protocol](../README.md) explains it."
    )
    lines = [f"# {found['title']}", "", made + terms, ""]
    if found["goals"]:
        lines += ["| goal | wanted | measured | met |", "|---|---|---|---|"]
        lines += [
            f"| {what} | {goal['wanted']} | {goal['measured']} | {'yes' if goal['met'] else '**no**'} |"
            for what, goal in found["goals"].items()
        ]
        lines += [""]
    shared = ""
    for title, table in found["tables"].items():
        lines += [f"## {title}", ""]
        text = f"This was measured on {table['measured']}. {table['text']}".strip()
        # What several tables of one run have in common stands above the first of them.
        lines += [] if text == shared else [text, ""]
        lines += _tables(title, table)
        shared = text
    return "\n".join(lines)


def _tables(title: str, table: dict[str, Any]) -> list[str]:
    """Return the arms' own figures as a table, and what is compared with the base arm as a second one, whose
    intervals are those that count, or as further columns if no comparison has an interval."""
    # The title names the case of a table that has only this one.
    rows = [["" if case == title else case, *row] for case, *row in table["rows"]]
    arms, compared = ([row for row in rows if bool(row[2]) == second] for second in (False, True))
    if compared and all(low == high for *_, values in compared for _, low, high in values.values()):
        return [*_table(*_joined(table, arms, compared), bounds=False), ""]
    own = _table(table, arms, bounds=not compared)
    return [*own, "", *([*_table(table, compared, bounds=True), ""] if compared else [])]


def _joined(
    table: dict[str, Any], arms: list[list[Any]], compared: list[list[Any]]
) -> tuple[dict[str, Any], list[list[Any]]]:
    """Return the table and the rows of its arms with a further column for each figure that is compared."""
    values_of = {(case, arm): dict(values) for case, arm, _, values in arms}
    further: dict[str, dict[str, Any]] = {}
    for case, name, how, values in compared:
        arm, against, base = re.split(r"( [/-] )", name, maxsplit=1)
        for column in table["columns"]:
            if column["figure"] in values:
                key = f"{column['figure']}{against}{base}"
                values_of[case, arm][key] = values[column["figure"]]
                exact = {"digits": 3, "factor": 1.0} if how == "ratio" else {}
                further[key] = {**column, **exact, "figure": key, "head": f"{column['head']}{against}{base}"}
    rows = [[case, arm, "", values] for (case, arm), values in values_of.items()]
    return {**table, "columns": [*table["columns"], *further.values()]}, rows


def _table(table: dict[str, Any], rows: list[list[Any]], *, bounds: bool) -> list[str]:
    """Return a table of these rows, without the columns that are empty in them. A case is named in its first row, and
    arms of a case with the same figures share a row.

    bounds: whether to show intervals.
    """
    columns = [Column(**column) for column in table["columns"]]
    arms: dict[tuple[str, ...], list[str]] = {}
    # What the arms are compared with is named in the heading, if it is the same in all rows.
    bases = {"".join(re.findall(r" [/-] .+", arm)) for _, arm, how, _ in rows if how}
    base = bases.pop() if len(bases) == 1 else ""
    for case, arm, how, values in rows:
        cells = [_cell(column, how, values.get(column.figure), bounds=bounds) for column in columns]
        arms.setdefault((case, how, *cells), []).append(arm.removesuffix(base))
    body, before = [], ""
    for (case, _, *cells), names in arms.items():
        body.append(["" if case == before else case, "; ".join(names), *cells])
        before = case
    head = ["case", f"arm{base}", *(column.head for column in columns)]
    kept = [i for i in range(len(head)) if i == 1 or any(row[i] for row in body)]
    lines = [[line[i] for i in kept] for line in (head, *body)]
    written = [f"| {' | '.join(line)} |" for line in lines]
    return [written[0], "|---" * len(kept) + "|", *written[1:]]


def _cell(column: Column, how: str, value: Any, *, bounds: bool) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    digits, factor = (3, 1.0) if how == "ratio" else (column.digits, column.factor)
    return shown(Interval(*value), digits, factor, bounds=bounds and bool(column.compared))


def shown(found: Interval, digits: int, factor: float = 1.0, *, bounds: bool = True) -> str:
    if math.isnan(found.value):
        return ""
    value, low, high = (f"{factor * x + 0.0:,.{digits}f}" for x in (found.value, found.low, found.high))
    return f"{value} ({low} to {high})" if bounds and low != high else value


def rows_of(runs: Runs, columns: Sequence[Column], base: str, cases: Sequence[str]) -> list[list[Any]]:
    """Return the rows of a table: each arm's medians in each case, and each other arm compared with the base arm."""
    rows: list[list[Any]] = []

    def add(case: str, name: str, how: str, figures: dict[str, Interval]) -> None:
        values = {
            figure: [float(f"{x:.6g}") for x in (v.value, v.low, v.high)]
            for figure, v in figures.items()
            if not math.isnan(v.value)
        }
        if values:
            rows.append([case, name, how, values])

    for case in cases:
        arms = runs.arms(case)
        for arm in arms:
            add(case, arm, "", {c.figure: runs.median(arm, c.figure, case) for c in columns})
        for arm in (arm for arm in arms if arm != base and base in arms):
            for how, sign, compare in (("ratio", "/", runs.ratio), ("difference", "-", runs.difference)):
                figures = {c.figure: compare(arm, base, c.figure, case) for c in columns if c.compared == how}
                add(case, f"{arm} {sign} {base}", how, figures)
    return rows


# ------------------------------------------------------------------------------------------------------------ sessions


class Session:
    """One run of a benchmark: its options, its runs, and what it stores. folder: for logs and raw figures."""

    def __init__(self, name: str, title: str, options: argparse.Namespace) -> None:
        self.options, self.runs, self.folder = options, Runs(), options.output.absolute()
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "runs.jsonl").write_text("")
        self._began_s = time.monotonic()
        # Cores that other programs used during each measurement.
        self.others_cores: list[float] = []
        self._calm = Calm(options.quiet_cores, options.patience_s) if "quiet_cores" in options else None
        self.store = Store(name, title, RESULTS if options.save else self.folder)

    def fresh(self) -> Path:
        """Return a new folder with a short path, for sockets and for programs that want an empty one."""
        return Path(tempfile.mkdtemp(prefix="bench-"))

    def say(self, text: str) -> None:
        """Print a line with the time since the beginning."""
        took_s = int(time.monotonic() - self._began_s)
        print(f"[{took_s // 60}:{took_s % 60:02}] {text}", flush=True)

    async def measured(self, measure: Callable[[], Any]) -> Any:
        """Return what `measure` returns, awaited; a measurement that other programs disturbed is repeated."""

        async def once() -> Any:
            found = measure()
            return await found if inspect.isawaitable(found) else found

        if self._calm is not None:
            found, others_cores = await self._calm.measure(once)
        else:
            others, began_s = Others(), time.monotonic()
            found = await once()
            others_cores = others.cores(max(1e-3, time.monotonic() - began_s))
        self.others_cores.append(others_cores)
        return found

    async def rounds(
        self,
        arms: Sequence[str],
        run: Callable[[str, int], Figures | Awaitable[Figures]],
        rounds: int | Sequence[int],
        *,
        case: str = "",
        start: int = 0,
        together: bool = False,
        mirrored: bool = False,
    ) -> None:
        """Run the arms in turns.

        run: returns the figures of one run of an arm in the round of this number. together: a disturbed run is
        repeated with its whole round. mirrored: a round runs the arms once in their order and once in the reverse, so
        that neither the order nor a slowdown within the round favours an arm; the figures are the means of both.
        """
        for number in range(rounds) if isinstance(rounds, int) else rounds:
            order = in_turn(arms, number + start)
            if together or mirrored:
                passes = (order, order[::-1]) if mirrored else (order,)
                batches = [[arm for one in passes for arm in one]]
            else:
                batches = [[arm] for arm in order]
            for batch in batches:
                found = await self.measured(partial(_each, run, batch, number))
                for arm in dict.fromkeys(batch):
                    of = [figures for name, figures in found if name == arm]
                    self.add(arm, {name: statistics.fmean(f[name] for f in of) for name in of[0]}, number, case, start)

    def add(self, arm: str, figures: Figures, number: int = 0, case: str = "", start: int = 0) -> None:
        """Note a run, print it, and write it to `runs.jsonl`."""
        self.runs.add(arm, figures, number, case=case, start=start)
        with (self.folder / "runs.jsonl").open("a") as file:
            file.write(json.dumps(asdict(self.runs.all[-1])) + "\n")
        told = ", ".join(f"{name} {value:.5g}" for name, value in figures.items())
        where = ", ".join([*filter(None, (case, f"start {start + 1}" if start else "")), f"round {number + 1}"])
        self.say(f"{arm}, {where}: {told}")

    def table(
        self,
        title: str,
        text: str,
        columns: Sequence[Column],
        base: str,
        cases: Sequence[str] | None = None,
        *,
        rows: list[list[Any]] | None = None,
    ) -> None:
        """Store a table of the runs so far. text: what a reader of the figures has to know. base: arm to which the
        others are compared. cases: all by default. rows: as `rows_of` returns them, if not those of the runs."""
        minutes, runs = (time.monotonic() - self._began_s) / 60, self.runs
        measured = f"{datetime.now(UTC):%Y-%m-%d} on {machine()}, in {minutes:.1f} minutes"
        if self.others_cores:
            measured += f"; other programs used at most {max(self.others_cores):.2f} cores"
        if rows is None:
            rows = rows_of(runs, columns, base, runs.cases() if cases is None else cases)
        plain = [asdict(column) for column in columns]
        self.store.put("tables", title, {"measured": measured, "text": text, "columns": plain, "rows": rows})

    def goal(self, what: str, wanted: str, found: Interval, digits: int = 3, factor: float = 1.0) -> None:
        """Store a goal. wanted: a comparison, such as "<= 0.5", with the factor in it."""
        sign, limit, *_ = wanted.split()
        compare = {"<=": operator.le, "<": operator.lt, ">=": operator.ge}[sign]
        met = compare(factor * found.value, float(limit))
        self.store.put("goals", what, {"wanted": wanted, "measured": shown(found, digits, factor), "met": bool(met)})


async def _each(
    run: Callable[[str, int], Figures | Awaitable[Figures]], arms: Sequence[str], number: int
) -> list[tuple[str, Figures]]:
    found: list[tuple[str, Figures]] = []
    for arm in arms:
        figures = run(arm, number)
        found.append((arm, await figures if inspect.isawaitable(figures) else figures))
    return found


def main(
    name: str,
    title: str,
    description: str | None,
    options: Callable[[argparse.ArgumentParser], None],
    measure: Callable[[Session], dict[str, Any] | Coroutine[Any, Any, dict[str, Any]]],
    *,
    calm: bool = False,
    check: Callable[[argparse.ArgumentParser, argparse.Namespace], None] = lambda *_: None,
) -> NoReturn:
    """Run a benchmark and exit: 0, 1 after a BenchError, 130 after an interrupt or SIGTERM.

    options: adds the benchmark's own options. measure: returns the last line. calm: repeat what other programs disturb.
    check: changes the options, or refuses them.
    """
    parser = argparse.ArgumentParser(
        prog=f"tests.bench.{name}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options(parser)
    add = parser.add_argument
    add("--output", type=Path, default=ROOT / "build" / f"bench-{name}", help="folder of logs and results")
    add("--save", action="store_true", help="store the tables in tests/bench/results")
    if calm:
        add("--quiet-cores", type=float, default=0.3, help="cores that other programs may use before a run is repeated")
        add("--patience-s", type=float, default=600.0, help="most seconds in all to wait for quiet and to repeat runs")
    given = parser.parse_args()
    check(parser, given)

    def run() -> None:
        session = Session(name, title, given)
        line = asyncio.run(measure(session)) if inspect.iscoroutinefunction(measure) else measure(session)
        print(f"\n{page(session.store.found, name)}")
        print(json.dumps(line))

    status = _status(run)
    sys.stdout.flush()
    sys.stderr.flush()
    # vLLM's libraries print while a process that used them shuts down, but the JSON must stay the last line.
    os._exit(status)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _status(run: Callable[[], None]) -> int:
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        run()
    except BenchError as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    for path in sorted(RESULTS.glob("*.json")):
        path.with_suffix(".md").write_text(page(json.loads(path.read_text()), path.stem))
