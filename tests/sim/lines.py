"""Every line of the agent's that some seeds reach, and a run for each in which it fails."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from tests.sim.inject import Fault, Line
from tests.sim.world import Failure, Options, run

if TYPE_CHECKING:
    from collections.abc import Iterable

# An engine that is started anew forgets its faults.
OPTIONS = Options(ticks=40, without=frozenset({"fault_engine_restarts"}))
# Hooks before the one that fails in any case, in the runs that are to reach what comes after a fault.
EARLY = 25
ERRORS = (RuntimeError, MemoryError)


class Case(NamedTuple):
    """A seed, and what fails in it."""

    seed: int
    fault: Fault

    def __str__(self) -> str:
        assert self.fault.line is not None
        file, line = self.fault.line
        nth = f", time {self.fault.nth}" if self.fault.nth > 1 else ""
        after = " after a fault" if self.fault.early else ""
        return f"{self.fault.error.__name__} at {file}:{line}{nth} in seed {self.seed}{after}"


def cases(seeds: Iterable[int], nth: tuple[int, ...] = (1,), both: bool = False) -> list[Case]:
    """One case for each line that is reached, in the first seed that does, and each number of times it has to be.

    both: with each kind of error, not with one of them in turn.
    """
    found: dict[tuple[Line, int], Case] = {}
    for seed in seeds:
        for early in (None, EARLY):
            world = run(seed, replace(OPTIONS, fault=Fault(early=early)))
            assert world.injected is not None
            for line, times in world.injected.reached.items():
                for n in nth:
                    if n <= times:
                        found.setdefault((line, n), Case(seed, Fault(line, n, early=early)))
    chosen = [found[key] for key in sorted(found)]
    return [
        Case(case.seed, replace(case.fault, error=error))
        for number, case in enumerate(chosen)
        for error in (ERRORS if both else (ERRORS[number % len(ERRORS)],))
    ]


def broken(case: Case) -> str:
    """What this case breaks; empty where nothing."""
    try:
        world = run(case.seed, replace(OPTIONS, fault=case.fault))
    except Failure as failure:
        return f"{case}: {failure.reason}"
    assert world.injected is not None
    return "" if world.injected.raised else f"{case}: the line was not reached"
