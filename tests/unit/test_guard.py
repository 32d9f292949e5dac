"""The guard: nothing of the agent's reaches vLLM."""

from __future__ import annotations

import logging
from typing import Never

import pytest

from meridian_agent.guard import Guard


def fail(text: str = "no such block") -> Never:
    raise KeyError(text)


def test_results_and_arguments_pass() -> None:
    guard = Guard()
    assert guard.run(divmod, 7, 2) == (3, 1)
    assert guard.run(int, "ff", base=16) == 255
    assert guard.fault == ""


def test_the_first_failure_switches_off_for_good(caplog: pytest.LogCaptureFixture) -> None:
    guard = Guard()
    calls: list[int] = []
    trips: list[str] = []
    guard.on_trip = lambda: trips.append(guard.fault)
    assert guard.run(fail) is None
    assert guard.fault == "fail: KeyError: 'no such block'"
    assert guard.run(calls.append, 1) is None
    assert guard.run(fail, "another") is None
    assert (calls, trips) == ([], [guard.fault])
    assert "another" not in guard.fault
    (record,) = caplog.records
    assert (record.levelno, record.name) == (logging.ERROR, "vllm.meridian")
    assert record.exc_info is not None


def test_a_failing_report_of_the_fault_does_no_harm(caplog: pytest.LogCaptureFixture) -> None:
    guard = Guard()
    guard.on_trip = fail
    assert guard.run(fail) is None
    assert guard.fault
    assert [r.message for r in caplog.records][1:] == ["meridian: could not report the fault"]


def test_a_callable_without_a_name() -> None:
    class Hook:
        def __call__(self) -> None:
            raise ValueError("x")

        def __str__(self) -> str:
            return "hook"

    guard = Guard()
    guard.run(Hook())
    assert guard.fault == "hook: ValueError: x"


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_what_ends_the_process_is_let_through(error: type[BaseException]) -> None:
    def hook() -> None:
        raise error

    guard = Guard()
    with pytest.raises(error):
        guard.run(hook)
    assert guard.fault == ""
