"""Requests that gain least from more thinking come first."""

from __future__ import annotations

import math

import numpy as np
from meridian.v1 import agent_pb2

from meridian_control.capabilities.pressure.rule import least_gain_first
from meridian_control.engine.request_table import RequestTable
from tests.fakes.tables import add_sample


def table(*requests: tuple[int, float, int]) -> RequestTable:
    """Return a table of requests: thinking tokens, mean of EAT and rank; NaN or 0 if not measured."""
    made = RequestTable(1)
    for slot, (tokens, eat, rank) in enumerate(requests):
        made.open(agent_pb2.RequestOpened(slot=slot, phase=agent_pb2.PHASE_THINK, think_tokens=tokens))
        if not math.isnan(eat):
            add_sample(made, slot, eat, 1.0, tokens)
        made.boundary_ranks[slot, 0] = rank
        made.boundary_count[slot] = int(rank > 0)
    return made


NO = math.nan


def order(made: RequestTable) -> list[int]:
    return [int(slot) for slot in least_gain_first(made, np.flatnonzero(made.live))]


def test_without_signals_the_longest_thinking_comes_first() -> None:
    assert order(table((10, NO, 0), (30, NO, 0), (20, NO, 0))) == [1, 2, 0]


def test_eat_counts_before_rank_and_rank_before_tokens() -> None:
    assert order(table((10, 0.1, 99), (90, 2.0, 1))) == [0, 1]
    assert order(table((10, NO, 1), (90, NO, 99))) == [0, 1]
    assert order(table((10, NO, 7), (90, NO, 7))) == [1, 0], "longer thinking of the same rank comes first"


def test_requests_with_different_signals_are_placed_by_their_share() -> None:
    made = table((10, 0.1, 0), (10, 0.9, 0), (50, NO, 0), (40, NO, 0), (30, NO, 7))
    assert order(made) == [2, 0, 4, 3, 1]


def test_no_request_has_no_order() -> None:
    assert order(table()) == []
