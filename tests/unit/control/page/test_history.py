"""The last hour of the status page: rates, percentiles of a period, and what is not known."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from meridian.v1 import fleet_pb2

from meridian_control.page.history import PERIOD_S, POINTS, RATES, History

BEGIN = datetime(2026, 5, 4, 3, 2, 1, tzinfo=UTC)
CONNECTED = fleet_pb2.CONNECTION_STATE_CONNECTED


def engine(name: str = "a", ttot: tuple[int, ...] = (), agent_s: float = 0.0, **fields: Any) -> fleet_pb2.Engine:
    found = fleet_pb2.Engine(engine_id=name, **{"state": CONNECTED, **fields})
    found.counters.agent_seconds = agent_s
    if ttot:
        found.ttot.CopyFrom(fleet_pb2.Histogram(bounds=[0.01, 0.1, 1.0], counts=ttot, sum=1.0))
    return found


def noted(*periods: list[fleet_pb2.Engine]) -> list[dict[str, Any]]:
    history = History()
    for number, engines in enumerate(periods):
        history.note(engines, 1 + number // 2, BEGIN + number * timedelta(seconds=10), {"saved_ratio": 0.25})
    return list(history.points)


def test_a_point_is_about_the_time_since_the_one_before() -> None:
    ends = {"eat": 5, "hard_cap": 1, "natural": 3, "eat_shadowed": 9}
    first, second = noted(
        [engine(token_events=100, agent_s=1.0, ttot=(5, 0, 0, 0), ends={"eat": 2})],
        [
            engine(token_events=300, agent_s=1.5, ttot=(5, 98, 2, 0), ends=ends, thinking=3),
            engine("b", token_events=100, thinking=1, answering=2),
        ],
    )
    assert (first["time"], first["saved_ratio"]) == (BEGIN.timestamp(), 0.25)
    assert {first[name] for name in RATES} == {None}
    assert first["ends"] == {}
    assert (second["engines"], second["thinking"], second["answering"]) == (2, 4, 2)
    # 300 tokens came, and for 100 of them the delay of an answer was measured.
    assert (second["think_tokens_per_s"], second["answer_tokens_per_s"]) == (20, 10)
    assert second["agent_share"] == pytest.approx(0.5 / 10 / 2)
    assert second["ttot_p99_ms"] == 1000
    assert second["itl_p99_ms"] is None, "no answer had a gap"
    assert second["ends"] == {"EAT": 3, "hard cap": 1, "natural": 3}
    assert (second["natural_per_min"], second["forced_per_min"]) == (18, 24)


@pytest.mark.parametrize(
    "later", [[], [engine(token_events=3, ttot=(1, 0, 0, 0))], [engine(token_events=100, ttot=(1, 0, 0, 0))]]
)
def test_counters_that_begin_again_make_no_value(later: list[fleet_pb2.Engine]) -> None:
    *_, last = noted([engine(token_events=100, ttot=(5, 0, 0, 0))], later)
    assert last["ttot_p99_ms"] is None
    assert last["think_tokens_per_s"] in (None, 0)


def test_freezes_and_revisions_are_noted() -> None:
    frozen = fleet_pb2.EngineFreeze(freeze_ids=[1], confirmed=True)
    points = noted([engine()], [engine(freeze=frozen), engine("b")], [engine(), engine("gone", state=0)])
    assert [(p["frozen"], p["revision"], p["engines"]) for p in points] == [(0, 1, 1), (1, 1, 2), (0, 2, 1)]


def test_one_hour_is_kept() -> None:
    points = noted(*[[engine(token_events=n)] for n in range(POINTS + 5)])
    assert len(points) == POINTS
    assert (POINTS - 1) * PERIOD_S == 3600
    assert points[-1]["time"] - points[0]["time"] == (POINTS - 1) * 10
