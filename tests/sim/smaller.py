"""Make a failing run smaller: cut it off after the tick that fails, and leave out the faults that it does not need."""

from __future__ import annotations

from dataclasses import replace

from tests.sim.faults import FAULTS
from tests.sim.world import Failure, Options, run


def _fails(seed: int, options: Options) -> Failure | None:
    try:
        run(seed, options)
    except Failure as failure:
        return failure
    return None


def smaller(seed: int) -> tuple[Options, Failure]:
    """Return the options of the smallest failing run found, and its failure with its trace. The seed must fail."""
    options = Options(trace=True)
    failure = _fails(seed, options)
    assert failure is not None, f"seed {seed} does not fail"
    for name in sorted(FAULTS):
        fewer = replace(options, without=options.without | {name})
        if found := _fails(seed, fewer):
            options, failure = fewer, found
    ticks = failure.tick
    while ticks > 1:
        shorter = replace(options, ticks=ticks // 2)
        if not (found := _fails(seed, shorter)):
            break
        options, failure, ticks = shorter, found, ticks // 2
    return options, failure
