"""The level of a pressure entry follows load without moving back and forth."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from meridian_control.capabilities.pressure.rule import (
    FIRST_HOLD,
    FORGET,
    MAX_HOLD,
    MAX_LEVEL,
    MIN_SAMPLES,
    Controller,
    Reading,
    stage_at,
    worst,
)
from meridian_control.capabilities.pressure.window import Window
from meridian_control.engine.shortening import FLOOR, LOWER_CAP, SOFT_CLOSE, UNSHORTENED
from meridian_control.policy.shortening_schema import PressurePolicy

# Thinking at each level, as a share of thinking that is not shortened.
THINKING = (1.0, 0.85, 0.7, 0.55, 0.4, 0.3, 0.2)
WINDOWS = 600


def at(ratio: float, samples: int = 100) -> Reading:
    return Reading("ttot_p99_ms", 200 * ratio, 200, samples)


def levels(controller: Controller, ratios: Sequence[float]) -> list[int]:
    return [controller.judge([at(ratio)]) for ratio in ratios]


# --------------------------------------------------------------------------------------------------------------- rules


def test_each_level_shortens_more_and_those_that_gain_least_first() -> None:
    stages = [(stage_at(level, first=True), stage_at(level, first=False)) for level in range(MAX_LEVEL + 1)]
    assert stages == [
        (UNSHORTENED, UNSHORTENED),
        (SOFT_CLOSE, UNSHORTENED),
        (SOFT_CLOSE, SOFT_CLOSE),
        (LOWER_CAP, SOFT_CLOSE),
        (LOWER_CAP, LOWER_CAP),
        (FLOOR, LOWER_CAP),
        (FLOOR, FLOOR),
    ]


@pytest.mark.parametrize(
    ("share", "level", "room"), [(0.75, 0, 1), (0.76, 0, 0), (1.01, 1, 0), (2.0, 1, 0), (2.01, 2, 0), (5e4, 2, 0)]
)
def test_values_within_the_width_of_a_bucket_of_what_levels_depend_on(share: float, level: int, room: int) -> None:
    window, controller = Window(PressurePolicy(name="chat", ttot_p99_ms=200), 0.0), Controller()
    window.add_times("ttot_p99_ms", np.full(MIN_SAMPLES, 200.0 * share))
    (reading,) = readings = window.readings({})
    assert (controller.judge(readings), controller.room) == (level, room)
    assert 200 * share <= reading.measured <= 1.1 * 200 * share


def test_the_level_rises_every_second_window_and_faster_far_above_the_limit() -> None:
    assert levels(Controller(), [1.1] * 5) == [1, 1, 2, 2, 3]
    assert levels(Controller(), [2.1] * 7) == [2, 2, 4, 4, 6, 6, 6]
    assert levels(Controller(), [2.0, 2.0, 1.0, 0.8]) == [1, 1, 1, 1]


def test_the_level_falls_only_after_windows_with_room() -> None:
    controller = Controller(level=3)
    assert levels(controller, [0.75] * (FIRST_HOLD - 1) + [0.76]) == [3] * FIRST_HOLD
    assert levels(controller, [0.75] * FIRST_HOLD) == [3] * (FIRST_HOLD - 1) + [2]
    assert levels(controller, [0.5] * (FIRST_HOLD + 1)) == [2] * FIRST_HOLD + [1]


def test_too_few_samples_miss_no_target_but_leave_no_room() -> None:
    controller = Controller(level=1)
    assert {controller.judge([at(9.0, MIN_SAMPLES - 1)]) for _ in range(10)} == {1}
    assert [controller.judge([at(0.0, 0)]) for _ in range(FIRST_HOLD)][-1] == 0, "nothing was measured"
    assert Controller().judge([at(1.1, MIN_SAMPLES)]) == 1


def test_one_missed_target_outweighs_room_under_the_others() -> None:
    assert Controller().judge([at(0.1), at(1.1), at(0.2)]) == 1


def test_a_miss_after_a_fall_doubles_the_wait_up_to_a_bound() -> None:
    controller, holds = Controller(level=1), []
    for _ in range(7):
        while controller.level:
            controller.judge([at(0.5)])
        controller.judge([at(0.5)])
        controller.judge([at(1.5)])
        holds.append(controller.hold)
        controller.judge([at(0.9)])
    assert holds == [6, 12, 24, MAX_HOLD, MAX_HOLD, MAX_HOLD, MAX_HOLD]
    levels(controller, [0.5] * (MAX_HOLD + 1 + FORGET))
    assert (controller.level, controller.hold) == (0, FIRST_HOLD), "a long quiet time forgets earlier misses"


def test_the_worst_reading_is_furthest_above_its_limit() -> None:
    assert worst([]) is None
    assert worst([at(0.5, 0)]) is None
    assert worst([at(9.0, 3), at(0.5), at(0.9)]) == at(0.9)
    assert worst([at(9.0, 3), at(0.5, 0)]) == at(9.0, 3)


# ---------------------------------------------------------------------------------------------------------- simulated


def queued(load: Callable[[int], float], seed: int) -> tuple[list[int], float]:
    """Return the level after each window of a made-up engine with a queue, and the share of windows that missed the
    target: what arrives beyond capacity waits, so that a value follows the level with a delay."""
    rng, controller, found, missed, waiting_s = random.Random(seed), Controller(), [], 0, 0.0
    for number in range(WINDOWS):
        thinking = THINKING[controller.level]
        waiting_s = max(0.0, waiting_s + 10 * (load(number) * thinking * rng.uniform(0.9, 1.1) - 1))
        reading = at((8 * thinking + waiting_s) / 20)
        missed += reading.missed
        found.append(controller.judge([reading]))
    return found, missed / WINDOWS


def changes(found: Sequence[int]) -> int:
    return sum(a != b for a, b in zip([0, *found], found, strict=False))


SEEDS = range(3)


QUEUES: dict[str, Callable[[int], float]] = {
    "little": lambda _: 0.95,
    "step": lambda number: 1.2 if number >= 20 else 0.5,
    "high step": lambda number: 2.4 if number >= 20 else 0.5,
    "ramp": lambda number: 2.5 - abs(number - WINDOWS / 2) / (WINDOWS / 4),
    "fast square": lambda number: 2.0 if number % 2 else 0.4,
    "square": lambda number: 2.0 if number // 10 % 2 else 0.4,
    "slow square": lambda number: 2.0 if number // 60 % 2 else 0.4,
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("load", QUEUES)
def test_a_queue_that_follows_with_a_delay_settles_too(load: str, seed: int) -> None:
    found, missed = queued(QUEUES[load], seed)
    assert changes(found) <= (0 if load == "little" else 40)
    assert changes(found[WINDOWS // 2 :]) <= 13
    assert missed <= 0.08
