"""The pauses between full collections of garbage, on a clock of the test's own."""

from __future__ import annotations

import asyncio
import gc

import pytest

from meridian_control.app import garbage


async def run(takes_s: list[float]) -> tuple[list[float], list[int]]:
    """Run one full collection for each of these durations. Return the pauses before each collection and after the
    last one, and Python's own thresholds for full collections meanwhile."""
    waited: list[float] = []
    thresholds: list[int] = []
    now, left = 0.0, iter(takes_s)

    async def sleep(seconds: float) -> None:
        waited.append(seconds)
        thresholds.append(gc.get_threshold()[2])
        if len(waited) > len(takes_s):
            raise asyncio.CancelledError

    def full() -> None:
        nonlocal now
        now += next(left)

    task = asyncio.create_task(garbage.collect(clock=lambda: now, sleep=sleep, full=full))
    await asyncio.wait([task])
    assert task.cancelled()
    return waited, thresholds


async def test_the_longer_a_full_collection_takes_the_later_comes_the_next() -> None:
    waited, _ = await run([0.05, 2.0, 0.7])
    pauses = [garbage.LEAST_PAUSE_S, garbage.LEAST_PAUSE_S, 2.0 / garbage.SHARE, 0.7 / garbage.SHARE]
    assert waited == pytest.approx(pauses)


async def test_python_itself_makes_no_full_collection_meanwhile() -> None:
    before = gc.get_threshold()
    _, thresholds = await run([0.1])
    assert set(thresholds) == {garbage.NEVER}
    assert gc.get_threshold() == before
