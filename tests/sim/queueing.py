"""Invariants of queueing times: each request that the agent saw being added has one, from then until the schedule of
its first step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


class Queueing:
    """The queueing times of one agent. clock: returns the agent's monotonic time in seconds."""

    def __init__(self, agent: Any, clock: Callable[[], float]) -> None:
        self._agent, self._clock = agent, clock
        # Times at which requests were added that have joined no step yet.
        self._added_s: dict[str, float] = {}
        self._scheduled = agent.accounts.scheduled
        agent.accounts.scheduled = self._watched_scheduled

    def opened(self, request_id: str) -> None:
        """Note that a request has just been added to the engine."""
        if request_id in self._agent.tracker.by_id:
            self._added_s[request_id] = self._clock()

    def _watched_scheduled(self, output: Any) -> None:
        begun, by_id = self._agent.tracker.begun, self._agent.tracker.by_id
        before, now_s = 0 if begun is None else len(begun.joined), self._clock()
        new = [one.req_id for one in output.scheduled_new_reqs]
        self._scheduled(output)
        begun = self._agent.tracker.begun
        told = [] if begun is None else begun.joined[before:]
        added = [(by_id[name].slot, self._added_s.pop(name)) for name in new if name in self._added_s]
        wanted = [(slot, pytest.approx((now_s - added_s) * 1e3)) for slot, added_s in added]
        assert told == wanted, f"queueing times are {told}, not {wanted}"

    def after_step(self) -> None:
        """Check that the agent knows which requests wait for their first step."""
        for name, live in self._agent.tracker.by_id.items():
            waits = name in self._added_s
            assert (live.queued_s is not None) == waits, f"{name} waits for its first step: {waits}"
            assert not waits or live.ref.status.name == "WAITING", f"{name} has joined a step unseen"
