"""Find every line of the agent that some seeds reach, and make a run for each line in which it fails."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from tests.sim.inject import Fault, Line
from tests.sim.world import Failure, Options, run

# Engine restarts are left out, because an engine that is started anew forgets its faults. A short run suffices, because
# most of it is the part after the faults.
OPTIONS = Options(ticks=40, without=frozenset({"fault_engine_restarts"}), longest=20)
# Number of hooks before the one that fails in any case, in the runs that are to reach the code after a fault.
EARLY = 25
ERRORS = (RuntimeError, MemoryError)


class Case(NamedTuple):
    """A seed and the fault in it."""

    seed: int
    fault: Fault

    def __str__(self) -> str:
        return f"{self.fault} in seed {self.seed}{' after a fault' if self.fault.early else ''}"


def cases(seeds: Iterable[int], nth: tuple[int, ...] = (1,)) -> list[Case]:
    """Return one case for each line that is reached and each count in `nth`, in the shortest run with it.

    The kinds of error alternate.
    """
    found: dict[tuple[Line, int], Case] = {}
    worlds = [run(seed, replace(OPTIONS, fault=Fault(early=early))) for seed in seeds for early in (None, EARLY)]
    for world in sorted(worlds, key=lambda one: sum(len(plant.engine.schedule) for plant in one.plants)):
        assert world.injected is not None
        for line, times in world.injected.reached.items():
            for n in nth:
                if n <= times:
                    found.setdefault((line, n), Case(world.seed, replace(world.injected.fault, line=line, nth=n)))
    chosen = [found[key] for key in sorted(found)]
    errors = itertools.cycle(ERRORS)
    return [Case(case.seed, replace(case.fault, error=error)) for case, error in zip(chosen, errors, strict=False)]


def broken(case: Case) -> str:
    """Return what this case violates, or an empty string."""
    try:
        world = run(case.seed, replace(OPTIONS, fault=case.fault))
    except Failure as failure:
        return f"{case}: {failure.reason}"
    assert world.injected is not None
    return "" if world.injected.raised else f"{case}: the line was not reached"
