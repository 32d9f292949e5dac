"""Replay of a recorded stream in which the cap of a request changes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from meridian_control.budgets.stages import LOWER_CAP
from meridian_control.offline.policy_replay import ThinkEnd
from tests.contract.control.offline.test_replay_policy import Recorded, difference
from tests.fakes.tables import policy
from tests.unit.sessions import EARLY

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("think", "stages", "end"),
    [
        (50, {60: LOWER_CAP}, ThinkEnd("natural", 50)),
        (50, {49: LOWER_CAP}, ThinkEnd("hard_cap", 50)),
        (200, {50: LOWER_CAP}, ThinkEnd("hard_cap", 51)),
        (200, {0: LOWER_CAP, 30: 0}, ThinkEnd("hard_cap", 20)),
        (200, {0: LOWER_CAP, 10: 0}, ThinkEnd("natural", 200)),
    ],
)
def test_a_cap_counts_from_when_it_came_until_the_next_one(
    tmp_path: Path, think: int, stages: dict[int, int], end: ThinkEnd
) -> None:
    """A budget lowers the cap, or raises it again, after these steps."""
    budget = {"name": "b", "tokens_per_day": 1000, "soft_think_tokens": 10_000, "max_think_tokens": 20, "shadow": False}
    recording = policy(
        scheduler=EARLY | {"max_think_tokens": 1000},
        entropy={"enabled": False},
        loop={"enabled": False},
        budget=[budget],
    )
    made = Recorded()
    made.apply(recording)
    made.thinks_under(stages, think=think, answer=60)
    (outcome,) = difference(tmp_path, made.records, recording).outcomes
    assert (outcome.recorded, outcome.before, outcome.after) == (end, end, end)
    # Another policy has the same cap from the beginning, so it needs no budget.
    early = policy(scheduler=EARLY | {"max_think_tokens": 15}, entropy={"enabled": False}, loop={"enabled": False})
    (other,) = difference(tmp_path, made.records, early).outcomes
    assert other.after == ThinkEnd("hard_cap", 15)
