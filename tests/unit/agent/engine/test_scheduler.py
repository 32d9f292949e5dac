"""The agent's scheduler mixin over a scheduler that does nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from meridian_agent.core.guard import Guard
from meridian_agent.engine.scheduler_mixin import governed


class Stock:
    """A scheduler that remembers whether it was shut down."""

    was_shut_down = False

    def shutdown(self) -> None:
        self.was_shut_down = True


@pytest.mark.parametrize("is_off", [False, True])
def test_no_stream_outlives_the_engine(is_off: bool) -> None:
    """The link is stopped with the engine, also while the agent is off, because the process may go on."""
    stopped: list[bool] = []
    made: Any = object.__new__(governed(Stock))
    made._guard = Guard()
    made._lifecycle = SimpleNamespace(stop=lambda: stopped.append(True))
    if is_off:
        made._guard.trip(Stock.shutdown, KeyError("no such block"))
    made.shutdown()
    assert (made.was_shut_down, stopped) == (True, [True])
