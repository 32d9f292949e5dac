"""Every line of the agent's that some seeds reach, and a run for each in which it fails."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from tests.sim.inject import Fault, Line
from tests.sim.world import Failure, Options, run

if TYPE_CHECKING:
    from collections.abc import Iterable

# An engine that is started anew forgets its faults. Most of a run goes into what is left when its faults are over.
OPTIONS = Options(ticks=40, without=frozenset({"fault_engine_restarts"}), longest=20)
# Hooks before the one that fails in any case, in the runs that are to reach what comes after a fault.
EARLY = 25
ERRORS = (RuntimeError, MemoryError)


class Case(NamedTuple):
    """A seed, and what fails in it."""

    seed: int
    fault: Fault

    def __str__(self) -> str:
        return f"{self.fault} in seed {self.seed}{' after a fault' if self.fault.early else ''}"


def cases(seeds: Iterable[int], nth: tuple[int, ...] = (1,)) -> list[Case]:
    """One case for each line that is reached, in the shortest run that does, and each number of times it has to be; one
    kind of error and the other in turn."""
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
    """What this case breaks; empty where nothing."""
    try:
        world = run(case.seed, replace(OPTIONS, fault=case.fault))
    except Failure as failure:
        return f"{case}: {failure.reason}"
    assert world.injected is not None
    return "" if world.injected.raised else f"{case}: the line was not reached"
