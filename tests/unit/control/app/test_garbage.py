"""The pauses between looks for garbage, on a clock of the test's own."""

from __future__ import annotations

import asyncio
import gc
from itertools import pairwise

import pytest

from meridian_control.app import garbage


async def run(takes_s: list[float]) -> tuple[list[tuple[float, int]], set[tuple[int, ...]]]:
    """Run until one full look for each of these durations is over, and one more is due. Return the time and the
    generation of each look, and Python's own thresholds meanwhile."""
    looks: list[tuple[float, int]] = []
    thresholds: set[tuple[int, ...]] = set()
    now, left = 0.0, iter(takes_s)

    async def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        thresholds.add(gc.get_threshold())

    def look(generation: int) -> None:
        nonlocal now
        looks.append((now, generation))
        if generation == garbage.ALL:
            if (took_s := next(left, None)) is None:
                raise asyncio.CancelledError
            now += took_s

    task = asyncio.create_task(garbage.collect(clock=lambda: now, sleep=sleep, look=look))
    await asyncio.wait([task])
    assert task.cancelled()
    return looks, thresholds


async def test_the_longer_a_full_look_takes_the_later_comes_the_next() -> None:
    takes_s = [0.05, 2.0, 0.7]
    looks, _ = await run(takes_s)
    full = [at for at, generation in looks if generation == garbage.ALL]
    pauses = [later - earlier - took_s for (earlier, later), took_s in zip(pairwise(full), takes_s, strict=True)]
    wanted = [garbage.LEAST_PAUSE_S, 2.0 / garbage.SHARE, 0.7 / garbage.SHARE]
    assert full[0] == garbage.LEAST_PAUSE_S
    assert pauses == pytest.approx(wanted, abs=garbage.PAUSE_S)
    assert all(pause >= least - 1e-6 for pause, least in zip(pauses, wanted, strict=True))


async def test_the_newest_objects_are_looked_at_every_second() -> None:
    looks, _ = await run([0.0])
    assert {later - earlier for (earlier, _), (later, _) in pairwise(looks)} == {garbage.PAUSE_S}
    assert [generation for _, generation in looks].count(garbage.NEWEST) == 2 * (garbage.LEAST_PAUSE_S - 1)


async def test_python_itself_makes_no_full_look_meanwhile() -> None:
    before = gc.get_threshold()
    _, thresholds = await run([0.1])
    assert thresholds == {(garbage.FLOOD, before[1], garbage.NEVER)}
    assert gc.get_threshold() == before
