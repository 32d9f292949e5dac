"""Compares the queueing times that an agent reports with vLLM's own, and with the calls of the engine's scheduler."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from meridian_agent.core.request_info import is_probe
from tests.engine.recording import records


class _Clocks:
    """Times in seconds on the monotonic clock, by request id: the end of the call that added a request, and the
    beginning of the call that scheduled its first step; and by the client's id the queueing time in vLLM's metrics."""

    def __init__(self) -> None:
        self.added_s: dict[str, float] = {}
        self.scheduled_s: dict[str, float] = {}
        self.vllm_s: dict[str, float] = {}

    @contextlib.contextmanager
    def around(self, llm: Any, scheduler: Any) -> Iterator[None]:
        add, schedule, step = scheduler.add_request, scheduler.schedule, llm.llm_engine.step

        def watched_add(request: Any) -> None:
            add(request)
            if not is_probe(request.request_id):
                self.added_s[request.request_id] = time.monotonic()

        def watched_schedule(*args: Any) -> Any:
            began_s = time.monotonic()
            output = schedule(*args)
            for request_id in output.num_scheduled_tokens:
                self.scheduled_s.setdefault(request_id, began_s)
            return output

        def watched_step() -> Any:
            outputs = step()
            for one in outputs:
                self.vllm_s[one.request_id] = one.metrics.scheduled_ts - one.metrics.queued_ts
            return outputs

        scheduler.add_request, scheduler.schedule, llm.llm_engine.step = watched_add, watched_schedule, watched_step
        try:
            yield
        finally:
            del scheduler.add_request, scheduler.schedule, llm.llm_engine.step


@contextlib.contextmanager
def compared(llm: Any, scheduler: Any, agent: Any) -> Iterator[list[float]]:
    """Yield a list that gets the queueing times of the requests inside the block, in milliseconds, at its end.

    The agent begins after vLLM does and ends before it, so its time is not the longer one; nor is it shorter than the
    time between the calls. Each request has one time.
    """
    clocks, found = _Clocks(), list[float]()
    with clocks.around(llm, scheduler), records(agent) as seen:
        yield found
    name_of: dict[int, str] = {}
    times_ms: dict[str, float] = {}
    for record, opened, *_ in seen:
        name_of |= {row[0]: row[1].request_id for row in opened}
        for slot, queueing_ms in record.joined:
            assert name_of[slot] not in times_ms, f"{name_of[slot]} has two queueing times"
            times_ms[name_of[slot]] = queueing_ms
    assert times_ms.keys() == clocks.added_s.keys(), clocks.added_s.keys() ^ times_ms.keys()
    for name, queueing_ms in times_ms.items():
        shortest_s = clocks.scheduled_s[name] - clocks.added_s[name]
        longest_s = clocks.vllm_s[name.rpartition("-")[0]]
        assert max(0.0, shortest_s) <= queueing_ms / 1e3 <= longest_s, f"{name}: {queueing_ms} ms"
    found += times_ms.values()
