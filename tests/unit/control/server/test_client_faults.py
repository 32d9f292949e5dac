"""Limits on the log lines that callers can cause, whoever they are and however many there are."""

from __future__ import annotations

import logging

import pytest

from meridian_control.server.client_faults import ALL, FAULTS, REMEMBERED, ClientFaults


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def faults(clock: Clock, caplog: pytest.LogCaptureFixture) -> ClientFaults:
    caplog.set_level(logging.INFO, "meridian_control")
    return ClientFaults(clock)


async def test_a_host_has_so_many_lines_for_a_cause(
    faults: ClientFaults, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    per_s, burst = FAULTS
    for _ in range(1000):
        faults.note(logging.INFO, "a", "invalid_request", "nonsense")
    assert len(caplog.records) == burst
    faults.note(logging.WARNING, "a", "too_many", "another cause")
    faults.note(logging.WARNING, "b", "invalid_request", "another host")
    assert [record.message for record in caplog.records[burst:]] == ["another cause", "another host"]
    clock.now += 1 / per_s
    for _ in range(5):
        faults.note(logging.INFO, "a", "invalid_request", "later")
    assert [record.message for record in caplog.records[burst + 2 :]] == ["later"]
    assert faults.counts == {"invalid_request": 1006, "too_many": 1}, "every fault is counted"


async def test_what_was_left_out_is_told_once(faults: ClientFaults, caplog: pytest.LogCaptureFixture) -> None:
    for host in range(8):
        for _ in range(FAULTS[1] + 10 - host):
            faults.note(logging.INFO, f"h{host}", "invalid_request", "nonsense")
    caplog.clear()
    faults.summarise()
    assert [record.message for record in caplog.records] == [
        "52 lines about callers were left out: 10 of invalid_request by h0, 9 of invalid_request by h1, "
        "8 of invalid_request by h2, 7 of invalid_request by h3, 6 of invalid_request by h4, "
        "and 3 more hosts and causes"
    ]
    caplog.clear()
    faults.summarise()
    assert not caplog.records


async def test_many_hosts_fill_neither_log_nor_memory(faults: ClientFaults, caplog: pytest.LogCaptureFixture) -> None:
    for host in range(5 * REMEMBERED):
        for _ in range(3):
            faults.note(logging.INFO, f"h{host}", "invalid_request", "nonsense")
    assert len(caplog.records) == ALL[1]
    assert len(faults._rates) <= REMEMBERED
    assert len(faults._left_out) <= REMEMBERED + 1
    assert faults._left_out.total() == 15 * REMEMBERED - ALL[1]
    faults.summarise()
