"""How times, shares and phases look, and that the status page's colours are the same."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

from meridian_control.common.look import percent, time_text


def test_a_time_is_in_utc_with_milliseconds() -> None:
    east = timezone(timedelta(hours=2))
    assert time_text(datetime(2026, 1, 31, 14, 0, 0, 250_999, east)) == "2026-01-31T12:00:00.250Z"
    assert time_text(datetime(2026, 1, 31, tzinfo=UTC)) == "2026-01-31T00:00:00.000Z"


def test_a_share_is_a_percentage() -> None:
    assert [percent(0.6666), percent(1, 0), percent(-0.00123, 2)] == ["66.7 %", "100 %", "-0.12 %"]
