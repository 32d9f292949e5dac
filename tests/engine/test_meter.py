"""The agent's meter counts all that the agent spends: on the engine's thread, in the worker, and on its own threads."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import pytest

from meridian_agent.core.step_signals import SPENT_STEPS
from tests.engine import paced
from tests.engine.pacing import Settled
from tests.engine.test_decisions import endless, opened
from tests.processes import Control

# Processor time that each call of a slowed function takes more.
SLOWER_S = 0.003
STEPS = 6 * SPENT_STEPS


def _slower(function: Callable[..., Any]) -> Any:
    """Return the same function, which uses more processor time and counts its calls."""

    @functools.wraps(function)
    def slow(*args: Any, **kwargs: Any) -> Any:
        slow.calls += 1  # type: ignore[attr-defined]
        until_s = time.thread_time() + SLOWER_S
        while time.thread_time() < until_s:
            pass
        return function(*args, **kwargs)

    slow.calls = 0  # type: ignore[attr-defined]
    return slow


def _slow_observer(_worker: Any) -> None:
    from meridian_agent.worker.observer import Observer

    Observer.begin = _slower(Observer.begin)  # type: ignore[method-assign]


def _mend_observer(_worker: Any) -> int:
    """Return the number of calls."""
    from meridian_agent.worker.observer import Observer

    slow: Any = Observer.begin
    Observer.begin = slow.__wrapped__  # type: ignore[method-assign]
    return int(slow.calls)


def _spent(control: Control) -> dict[str, float]:
    """Return the seconds of each part."""
    control.settled()
    counters = control.engine().counters
    parts = {"worker": counters.worker_seconds, "threads": counters.thread_seconds}
    return {**parts, "hooks": counters.agent_seconds - sum(parts.values())}


def test_every_part_is_counted(
    llm: Any, agent: Any, control: Control, settled: Settled, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Only thinking is measured, so it lasts to the end.
    before = _spent(control)
    hook, delivery = _slower(agent.before_schedule), _slower(agent.mailbox.deliver)
    monkeypatch.setattr(agent, "before_schedule", hook)
    monkeypatch.setattr(agent.mailbox, "deliver", delivery)
    llm.collective_rpc(_slow_observer)
    try:
        paced(llm, [opened()], endless(agent, max_tokens=STEPS), settled)
    finally:
        (worker_calls,) = llm.collective_rpc(_mend_observer)
    monkeypatch.undo()
    # The newest seconds of the worker and of the threads come with one of the next reports.
    paced(llm, [opened()], endless(agent, max_tokens=STEPS), settled)
    after = _spent(control)
    assert min(hook.calls, worker_calls) >= STEPS
    assert delivery.calls > 0
    assert after["hooks"] - before["hooks"] >= SLOWER_S * hook.calls
    assert after["worker"] - before["worker"] >= SLOWER_S * worker_calls
    assert after["threads"] - before["threads"] >= SLOWER_S * delivery.calls
