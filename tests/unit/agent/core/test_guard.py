"""The guard: no exception of the agent reaches vLLM, and a part that failed comes back a few times."""

from __future__ import annotations

import json
import logging
import math
import time
from itertools import count
from typing import Never

import pytest
from meridian.v1 import agent_pb2

from meridian_agent.core import guard as guard_module
from meridian_agent.core.guard import MAX_FAULT, RESTS_S, WINDOW_S, Guard, hook
from meridian_agent.engine.agent import Agent
from meridian_agent.engine.kv_blocks import unreachable_blocks
from meridian_agent.engine.scheduler_mixin import GovernedScheduler


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def fail(text: str = "no such block") -> Never:
    raise KeyError(text)


LINE = fail.__code__.co_firstlineno + 1


def test_the_first_failure_switches_off(caplog: pytest.LogCaptureFixture) -> None:
    guard = Guard()
    calls: list[int] = []
    trips: list[str] = []
    guard.on_trip = lambda: trips.append(guard.fault)
    assert guard.run(fail) is None
    assert guard.fault == f"fail: KeyError at {__name__}:{LINE} (fail)"
    assert guard.text == "fail: KeyError: 'no such block'"
    assert guard.run(calls.append, 1) is None
    assert guard.run(fail, "another") is None
    assert not guard.come_back()
    assert (calls, trips) == ([], [guard.fault])
    assert "another" not in guard.text
    (record,) = caplog.records
    assert (record.levelno, record.name) == (logging.ERROR, "vllm.meridian")
    assert record.exc_info is not None
    assert record.message.endswith("no such block'; for 10 s")


def test_a_fault_within_a_fault_does_not_count() -> None:
    guard = Guard()

    def outer() -> None:
        guard.run(fail, "inner")
        fail("outer")

    guard.run(outer)
    assert guard.text == "fail: KeyError: 'inner'"
    assert dict(guard.faults) == {"other": 1}


def test_the_time_of_a_hook_within_a_hook_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    guard, now = Guard(), count()
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    assert guard.run(lambda: guard.run(lambda: 7)) == 7
    assert guard.seconds == 2, "the clock is read at the beginning of both and at the end of the outer one"


def test_it_comes_back_after_its_rest_and_in_the_end_no_more(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    guard = Guard(clock=clock)
    for rest_s in RESTS_S:
        guard.run(fail)
        assert guard.rest_s() == rest_s
        clock.now_s += rest_s - 1
        assert not guard.come_back()
        clock.now_s += 1
        assert guard.come_back()
        assert guard.run(int, "7") == 7
    guard.run(fail)
    clock.now_s += 10 * WINDOW_S
    assert (guard.come_back(), guard.rest_s()) == (False, math.inf)
    assert (guard.faults["other"], guard.last_fault) == (4, f"fail: KeyError at {__name__}:{LINE} (fail)")
    assert caplog.records[-1].message.endswith("until the engine is started again: 4 faults within 60 minutes")


def test_a_fault_counts_under_the_cause_that_its_hook_is_marked_with() -> None:
    """A fault's cause is independent of the hook's name, because the cause is a label of a metric."""

    @hook(agent_pb2.FAULT_CAUSE_BITMASK)
    def renamed() -> None:
        fail("bits")

    class Hooks:
        @hook(agent_pb2.FAULT_CAUSE_AFTER_UPDATE)
        def also_renamed(self) -> None:
            fail("update")

    for call, cause in ((renamed, "bitmask"), (Hooks().also_renamed, "after_update")):
        guard = Guard()
        guard.run(call)
        assert dict(guard.faults) == {cause: 1}


def test_every_hook_of_the_scheduler_is_marked() -> None:
    methods = [*vars(Agent).values(), *vars(GovernedScheduler).values()]
    marked = {method.cause for method in methods if hasattr(method, "cause")}
    others = {"UNSPECIFIED", "OTHER", "SHARED_BLOCKS", "AGAIN", "OBSERVER"}
    assert marked == set(agent_pb2.FaultCause.values()) - {
        agent_pb2.FaultCause.Value(f"FAULT_CAUSE_{n}") for n in others
    }


def test_faults_of_long_ago_do_not_count() -> None:
    clock = Clock()
    guard = Guard(clock=clock)
    for _ in range(10):
        guard.run(fail)
        assert guard.rest_s() == RESTS_S[0]
        clock.now_s += WINDOW_S + 1
        assert guard.come_back()


def test_switched_off_for_good() -> None:
    guard = Guard()
    guard.switch_off("no device")
    assert (guard.run(int, "7"), guard.come_back(), guard.fault, guard.faults) == (None, False, "no device", {})


def test_a_failing_report_of_the_fault_does_no_harm(caplog: pytest.LogCaptureFixture) -> None:
    guard = Guard()
    guard.on_trip = fail
    assert guard.run(fail) is None
    assert guard.fault
    assert [r.message for r in caplog.records][1:] == ["meridian: could not report the fault"]


def test_without_memory_for_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    class BrokenError(MemoryError):
        def __str__(self) -> str:
            raise MemoryError

    def hook() -> None:
        raise BrokenError

    monkeypatch.setattr(guard_module.logger, "exception", hook)
    guard = Guard()
    assert guard.run(hook) is None
    assert guard.fault.startswith("hook: BrokenError at ")
    assert guard.rest_s() == math.inf


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_what_ends_the_process_is_let_through(error: type[BaseException]) -> None:
    """The guard lets such exceptions through and still trips, because the process may live on at a user's prompt with a
    hook half done."""

    def hook() -> None:
        raise error

    guard = Guard()
    with pytest.raises(error):
        guard.run(hook)
    assert guard.text == f"hook: {error.__name__}: "


def test_a_fault_tells_no_text_of_an_exception() -> None:
    """No text of an exception is reported, neither from a hook nor from within vLLM, because the text may quote a
    prompt or its tokens."""
    guard = Guard()

    def hook() -> None:
        json.loads("a prompt of somebody's")

    guard.run(hook)
    assert "prompt" not in guard.fault + guard.last_fault
    assert guard.fault.startswith("hook: JSONDecodeError at json.decoder:")


def test_a_fault_names_the_agents_line_beside_the_innermost() -> None:
    guard = Guard()
    guard.run(unreachable_blocks, [1], 0, 16, lambda _: fail())
    place = f"KeyError at {__name__}:{LINE} (fail), from meridian_agent.engine.kv_blocks:"
    assert guard.fault.startswith(f"unreachable_blocks: {place}")


def test_what_fails_as_the_engine_starts_is_told_in_full() -> None:
    """While the engine starts, there are no requests yet, and operators need the full text: what is missing, and
    where."""
    guard = Guard()
    guard.starting = True
    guard.run(fail)
    assert guard.fault == guard.last_fault == "fail: KeyError: 'no such block'"
    assert guard.outlook() == "until the engine is started again"


@pytest.mark.parametrize(("text", "shown"), [(100_000 * "x", MAX_FAULT * "x"), ("r-\ud800", "r-\\ud800")])
def test_texts_of_faults_fit_into_a_hello_wherever_they_come_from(text: str, shown: str) -> None:
    """The texts travel in every Hello, and from a worker with every step. A lone surrogate is not valid UTF-8."""
    guard = Guard()
    guard.note("observer", text)
    guard.switch_off(text)
    hello = agent_pb2.Hello(fault=guard.fault, last_fault=guard.last_fault)
    assert (hello.fault, hello.last_fault) == (shown, shown)
