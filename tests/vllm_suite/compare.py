"""Compare the results of vLLM's tests in two runs. Pure: the module knows neither pytest nor vLLM."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# Patterns of texts that differ from run to run, with their replacements.
_MADE_UP = (
    (re.compile(r"0x[0-9a-fA-F]+"), "0x…"),
    (re.compile(r"\b[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}\b|\b[0-9a-f]{16,}\b"), "<id>"),
    (re.compile(r"(?:/[\w.@+-]+){2,}"), "<path>"),
    (re.compile(r"(?<=:)\d{4,5}\b"), "<port>"),
    (
        re.compile(
            r"\bGoverned(?=\w*Scheduler)|\bmeridian_agent\.engine\.scheduler_mixin\.|\bvllm\.v1\.core\.sched\.\w+\."
        ),
        "",
    ),
)


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one test. reason: kind and last line of its exception, or why it was not run; empty if it
    passed."""

    outcome: str
    reason: str = ""


@dataclass(slots=True)
class Run:
    """One run of the tests: the result of each by its id, and the agent's work."""

    results: dict[str, Result] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    # Whether pytest finished the run.
    finished: bool = False

    def outcomes(self, outcome: str) -> int:
        return sum(result.outcome == outcome for result in self.results.values())


def read(lines: Iterable[str]) -> Run:
    """Return the run that the plugin has written."""
    run = Run()
    for line in lines:
        said: dict[str, Any] = json.loads(line)
        if "id" in said:
            run.results[said["id"]] = Result(said["outcome"], said["reason"])
        elif "counts" in said:
            run.counts, run.problems = said["counts"], said["problems"]
        run.finished = said.get("finished", run.finished)
    return run


def same(one: Result | None, other: Result | None) -> bool:
    """Return whether both results are the same, with the same reason apart from texts that differ from run to run."""
    if one is None or other is None:
        return one is other
    return one.outcome == other.outcome and plain(one.reason) == plain(other.reason)


def plain(reason: str) -> str:
    """Return a reason without addresses, ids, paths, ports and the names of classes that have the agent in front."""
    for pattern, stands in _MADE_UP:
        reason = pattern.sub(stands, reason)
    return reason


def unsteady(stock: Run, again: Run) -> list[str]:
    """Return the tests whose results differ between two runs of stock vLLM, which show nothing about the agent."""
    ids = sorted({*stock.results, *again.results})
    return [i for i in ids if not same(stock.results.get(i), again.results.get(i))]


def different(stock: Run, governed: Run, excluded: Sequence[str]) -> dict[str, tuple[Result | None, Result | None]]:
    """Return the tests whose result differs with the agent in front, with both results; None if a run lacks the
    test."""
    ids = sorted({*stock.results, *governed.results}.difference(excluded))
    pairs = {i: (stock.results.get(i), governed.results.get(i)) for i in ids}
    return {i: pair for i, pair in pairs.items() if not same(*pair)}


def not_in_front(run: Run) -> list[str]:
    """Return why a run shows nothing about the agent; empty if the agent was in front of every scheduler in every
    step."""
    counts, found = run.counts, list(run.problems)
    if not counts.get("schedulers"):
        found.append("no scheduler had the agent in front")
    if not counts.get("steps") or counts["steps"] != counts.get("worked"):
        found.append(f"the agent did its work in {counts.get('worked', 0)} of {counts.get('steps', 0)} steps")
    if counts.get("connected", counts.get("schedulers")) != counts.get("schedulers"):
        found.append(f"{counts['connected']} of {counts.get('schedulers', 0)} schedulers had a control plane")
    return found


def last_line(stock: Mapping[str, Run], differences: int) -> str:
    """Return the overall result as JSON: tests by their result in stock vLLM, summed over the versions."""
    passed = sum(run.outcomes("passed") for run in stock.values())
    bad = sum(r.outcome.startswith(("failed", "error")) for run in stock.values() for r in run.results.values())
    return json.dumps({"vllm": list(stock), "passed": passed, "failed": bad, "different": differences})
