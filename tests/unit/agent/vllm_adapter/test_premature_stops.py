"""If the agent fails, a request that was to go on past its stop is queued anew or ends, as its client knows it."""

from __future__ import annotations

from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest

from meridian_agent.vllm_adapter import premature_stops


class Status(Enum):
    RUNNING = 1
    FINISHED_STOPPED = 2
    PREEMPTED = 3


def test_tokens_of_a_step_under_way_do_not_take_the_place_of_a_stop_that_is_taken_back() -> None:
    """They follow the stop, which their step has got as its input."""
    request = SimpleNamespace(
        request_id="r",
        status=Status.FINISHED_STOPPED,
        is_finished=lambda: True,
        _output_token_ids=[7, 8],
        _all_token_ids=[5, 6, 7, 8],
        block_hashes=[],
        num_tokens=3,
        num_computed_tokens=2,
        num_in_flight_tokens=1,
    )
    preempted: list[Any] = []

    def preempt(request: Any, _: float, *, drop_stale_output: bool = False) -> None:
        preempted.append((request.request_id, request.status, drop_stale_output))

    scheduler = SimpleNamespace(
        requests={"r": request}, block_size=16, prev_step_scheduled_req_ids={"r"}, _preempt_request=preempt
    )
    premature_stops.let_go(scheduler, {"r": True})
    assert preempted == [("r", Status.RUNNING, True)]
    assert (request._output_token_ids, request._all_token_ids) == ([7], [5, 6, 7])


@pytest.mark.parametrize("computed", [2, 0])
def test_what_a_fault_has_interrupted_is_completed(computed: int) -> None:
    """Without computed tokens, vLLM has preempted the request before."""
    request: Any = SimpleNamespace(
        request_id="r",
        status=Status.FINISHED_STOPPED,
        is_finished=lambda: request.status is Status.FINISHED_STOPPED,
        _output_token_ids=[7, 8],
        _all_token_ids=[5, 6, 7, 8],
        block_hashes=[],
        num_tokens=3,
        num_computed_tokens=computed,
    )
    queued: list[Status] = []

    def queue(request: Any, *_: float, **__: bool) -> None:
        queued.append(request.status)
        if len(queued) == 1:
            raise MemoryError

    def preempt(request: Any, *_: float, **__: bool) -> None:
        queue(request)
        request.status = Status.PREEMPTED

    scheduler = SimpleNamespace(
        requests={"r": request},
        block_size=16,
        prev_step_scheduled_req_ids={"r"},
        _preempt_request=preempt,
        waiting=SimpleNamespace(prepend_request=queue),
    )
    with pytest.raises(MemoryError):
        premature_stops.resume(scheduler, request)
    # The next calls queue it once.
    for _ in range(2):
        premature_stops.let_go(scheduler, {"r": True})
    assert (queued, request.status) == ([Status.RUNNING] * 2, Status.PREEMPTED)
    assert (request._output_token_ids, request._all_token_ids) == ([7], [5, 6, 7])


@pytest.mark.parametrize(("output", "stopped"), [([], False), ([7], False), ([7, 8], True), ([8, 7], False)])
def test_only_a_newest_token_stops_a_request(output: list[int], stopped: bool) -> None:
    """vLLM stops a request without any token on an engine that only encodes images."""
    request: Any = SimpleNamespace(status=Status.FINISHED_STOPPED, sampling_params=None, output_token_ids=output)
    assert premature_stops.stopped_at(request, {8}) is stopped
