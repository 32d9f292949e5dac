"""The last hour of the status page: rates, percentiles of a period, and what is not known."""

from __future__ import annotations

from bisect import bisect_left
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from meridian.v1 import fleet_pb2

from meridian_control.common.histogram import TIME_BOUNDS_S, TIME_BUCKETS
from meridian_control.page.history import PERIOD_S, POINTS, RATES, History

BEGIN = datetime(2026, 5, 4, 3, 2, 1, tzinfo=UTC)
CONNECTED = fleet_pb2.CONNECTION_STATE_CONNECTED


def engine(
    name: str = "a",
    ttot: dict[float, int] | None = None,
    agent_s: float = 0.0,
    since_s: float = -100.0,
    **fields: Any,
) -> fleet_pb2.Engine:
    """Return an engine that has been connected since so many seconds after BEGIN. ttot: number of observations of each
    time in seconds."""
    found = fleet_pb2.Engine(engine_id=name, **{"state": CONNECTED, **fields})
    found.connect_time.FromDatetime(BEGIN + timedelta(seconds=since_s))
    found.counters.agent_seconds = agent_s
    counts = [0] * TIME_BUCKETS
    for value, count in (ttot or {}).items():
        counts[bisect_left(TIME_BOUNDS_S, value)] += count
    found.ttot.CopyFrom(fleet_pb2.Histogram(bounds=TIME_BOUNDS_S, counts=counts))
    return found


def noted(*periods: list[fleet_pb2.Engine]) -> list[dict[str, Any]]:
    history = History()
    for number, engines in enumerate(periods):
        now = BEGIN + number * timedelta(seconds=10)
        history.note(engines, engines, 1 + number // 2, now, {"saved_ratio": 0.25})
    return list(history.points)


def test_a_point_is_about_the_time_since_the_one_before() -> None:
    ends = {"eat": 5, "hard_cap": 1, "natural": 3, "eat_shadowed": 9}
    first, second = noted(
        [engine(thinking_tokens=90, answer_tokens=10, agent_s=1.0, ttot={0.005: 5}, ends={"eat": 2})],
        [
            engine(
                thinking_tokens=230,
                answer_tokens=70,
                agent_s=1.5,
                ttot={0.005: 5, 0.05: 98, 0.9: 2},
                ends=ends,
                thinking=3,
            ),
            # Its requests did not think, and the delay of their first tokens is not known.
            engine("b", answer_tokens=40, thinking=1, answering=2, since_s=5),
        ],
    )
    assert (first["time"], first["saved_ratio"]) == (BEGIN.timestamp(), 0.25)
    assert {first[name] for name in RATES} == {None}
    assert first["ends"] == {}
    assert (second["engines"], second["thinking"], second["answering"]) == (2, 4, 2)
    assert (second["think_tokens_per_s"], second["answer_tokens_per_s"]) == (14, 10)
    assert second["agent_share"] == pytest.approx(0.5 / 10), "what the agent of b has spent before is not known"
    assert second["ttot_p99_ms"] == 1000
    assert second["itl_p99_ms"] is None, "no answer had a gap"
    assert second["ends"] == {"EAT": 3, "hard cap": 1, "natural": 3}
    assert (second["natural_per_min"], second["forced_per_min"]) == (18, 24)


BEFORE = engine(thinking_tokens=100, ttot={0.005: 5}, agent_s=3.0)


@pytest.mark.parametrize(
    ("later", "tokens", "ttot_ms"),
    [
        ([], 0, None),
        ([BEFORE], 0, None),
        ([engine(thinking_tokens=30, ttot={0.1: 10}, agent_s=4.0, since_s=2)], 30, 100),
        ([BEFORE, engine("found", thinking_tokens=10**6, ttot={0.1: 10})], 0, None),
        ([engine(thinking_tokens=98, ttot={0.005: 5})], 0, None),
        ([engine("b", thinking_tokens=30, ttot={0.1: 10}, since_s=2)], 30, 100),
    ],
    ids=["gone", "the same", "connected again", "connected long ago", "taken back by a marker", "another"],
)
def test_counters_begin_with_each_connection(later: list[fleet_pb2.Engine], tokens: int, ttot_ms: float | None) -> None:
    _, point = noted([BEFORE], later)
    assert point["think_tokens_per_s"] + point["answer_tokens_per_s"] == tokens / 10
    assert point["ttot_p99_ms"] == ttot_ms


def test_a_large_fleet_in_which_one_engine_connects_again_in_each_period() -> None:
    """Where a proxy ends streams, a large fleet has hardly a period in which no counter begins again."""
    engines, periods, per_s = 200, 12, 40

    def look(number: int) -> list[fleet_pb2.Engine]:
        listed = []
        for index in range(engines):
            # The engine's newest connection began in the middle of a period.
            since_s = 10 * index - 5 if index <= number else -1000
            seconds = 10 * number - since_s
            counts: dict[str, Any] = {
                "thinking_tokens": per_s * seconds,
                "answer_tokens": per_s * seconds,
                "ends": {"natural": seconds, "eat": 2 * seconds},
            }
            times = {0.01: per_s * seconds - seconds, 0.2: seconds}
            listed.append(engine(f"e{index}", times, since_s=since_s, **counts))
        return listed

    _, *points = noted(*map(look, range(periods)))
    for point in points:
        assert point["think_tokens_per_s"] == pytest.approx(engines * per_s, rel=0.02)
        assert point["answer_tokens_per_s"] == pytest.approx(engines * per_s, rel=0.02)
        assert point["natural_per_min"] == pytest.approx(engines * 60, rel=0.02)
        assert point["forced_per_min"] == pytest.approx(engines * 120, rel=0.02)
        assert point["ttot_p99_ms"] == 200


def test_nothing_is_known_while_a_replica_without_sums_has_engines() -> None:
    """Such a replica has an older version, as in a rolling upgrade."""
    history, known = History(), engine(replica="new", thinking_tokens=50)
    older = engine("b", replica="old", token_events=900, thinking=3)
    for number, engines in enumerate(([known], [known, older], [known])):
        history.note(engines, [known], 1, BEGIN + number * timedelta(seconds=10), {})
    _, mixed, upgraded = history.points
    assert (mixed["think_tokens_per_s"], mixed["natural_per_min"], mixed["thinking"]) == (None, None, 3)
    assert (upgraded["think_tokens_per_s"], upgraded["natural_per_min"]) == (0, 0)


def test_freezes_and_revisions_are_noted() -> None:
    frozen = fleet_pb2.EngineFreeze(freeze_ids=[1], confirmed=True)
    points = noted([engine()], [engine(freeze=frozen), engine("b")], [engine(), engine("gone", state=0)])
    assert [(p["frozen"], p["revision"], p["engines"]) for p in points] == [(0, 1, 1), (1, 1, 2), (0, 2, 1)]


def test_one_hour_is_kept() -> None:
    points = noted(*[[engine(thinking_tokens=n)] for n in range(POINTS + 5)])
    assert len(points) == POINTS
    assert (POINTS - 1) * PERIOD_S == 3600
    assert points[-1]["time"] - points[0]["time"] == (POINTS - 1) * 10
