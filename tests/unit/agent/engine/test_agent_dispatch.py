"""Requests that are left out of a step: never too many, and none for too long."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meridian_agent.core.live_request import LiveRequest
from meridian_agent.core.phases import Phase, PhaseState
from meridian_agent.core.request_info import RequestInfo
from meridian_agent.engine.queue_order import left_out


def thinker(slot: int, joined_step: int = 0, skipped_steps: int = 0) -> LiveRequest:
    info = RequestInfo(str(slot), "", "", "", 0, 0, None)
    live = LiveRequest(slot, info, PhaseState(Phase.THINK), 0, SimpleNamespace())
    live.joined_step, live.skipped_steps = joined_step, skipped_steps
    return live


def one_step(thinkers: list[LiveRequest], step: int, share: int | None, max_skip: int) -> list[LiveRequest]:
    """Choose the requests of one step as the agent does, and return the requests that are left out."""
    skipped = left_out(thinkers, share, max_skip)
    for live in thinkers:
        if any(live is other for other in skipped):
            live.skipped_steps += 1
        else:
            live.joined_step, live.skipped_steps = step, 0
    return skipped


@given(st.integers(1, 12), st.integers(0, 12), st.integers(0, 12), st.integers(0, 10**6))
def test_nobody_waits_longer_than_the_share_or_the_maximum_says(
    count: int, share: int, max_skip: int, seed: int
) -> None:
    rng = random.Random(seed)
    thinkers = [thinker(i) for i in range(count)]
    bound = min(max_skip, math.ceil(count / share) - 1) if share else max_skip
    for step in range(1, 60):
        rng.shuffle(thinkers)
        before = {live.slot: live.skipped_steps for live in thinkers}
        skipped = one_step(thinkers, step, share, max_skip)
        urgent = sum(waited >= max_skip for waited in before.values())
        assert max(0, count - share - urgent) <= len(skipped) <= max(0, count - share)
        assert max(live.skipped_steps for live in thinkers) <= bound


@pytest.mark.parametrize("seed", range(5))
def test_nobody_starves_while_others_come_and_go_and_the_share_changes(seed: int) -> None:
    rng = random.Random(seed)
    thinkers = [thinker(i) for i in range(6)]
    waited: dict[int, int] = {}
    next_slot, max_skip = 6, 5
    for step in range(1, 300):
        if rng.random() < 0.3:
            thinkers.append(thinker(next_slot))
            next_slot += 1
        if len(thinkers) > 1 and rng.random() < 0.3:
            waited.pop(thinkers.pop(rng.randrange(len(thinkers))).slot, None)
        skipped = {live.slot for live in one_step(thinkers, step, rng.choice([0, 1, 2, 3]), max_skip)}
        for live in thinkers:
            waited[live.slot] = waited.get(live.slot, 0) + 1 if live.slot in skipped else 0
        assert max(waited.values()) <= max_skip
