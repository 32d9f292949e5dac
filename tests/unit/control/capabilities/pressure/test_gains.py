"""Requests that gain least from more thinking come first."""

from __future__ import annotations

import math

import numpy as np
import pytest
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


@pytest.mark.parametrize(
    ("requests", "order"),
    [
        # Without signals the longest thinking comes first.
        ([(10, NO, 0), (30, NO, 0), (20, NO, 0)], [1, 2, 0]),
        # EAT counts before the rank, the rank before the tokens, and these where ranks are equal.
        ([(10, 0.1, 99), (90, 2.0, 1)], [0, 1]),
        ([(10, NO, 1), (90, NO, 99)], [0, 1]),
        ([(10, NO, 7), (90, NO, 7)], [1, 0]),
        # Requests with different signals are placed by their share.
        ([(10, 0.1, 0), (10, 0.9, 0), (50, NO, 0), (40, NO, 0), (30, NO, 7)], [2, 0, 4, 3, 1]),
        ([], []),
    ],
)
def test_who_gains_least(requests: list[tuple[int, float, int]], order: list[int]) -> None:
    made = table(*requests)
    assert least_gain_first(made, np.flatnonzero(made.live)).tolist() == order
