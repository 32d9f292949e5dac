"""The clock of durations follows neither a clock that is set back nor one that is set forward."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from meridian_control.app.assembly import SteadyClock

NOON = datetime(2026, 5, 4, 12, tzinfo=UTC)


def test_it_advances_by_the_seconds_that_pass_and_by_nothing_else() -> None:
    passed_s = 1000.0
    clock = SteadyClock(NOON, lambda: passed_s)
    assert clock() == NOON
    passed_s += 12.5
    assert clock() == NOON + timedelta(seconds=12.5)


def test_the_machines_own_seconds() -> None:
    clock = SteadyClock(NOON)
    times = [clock() for _ in range(100)]
    assert times == sorted(times)
    assert NOON <= times[0] < NOON + timedelta(minutes=5)
