"""Probes beside the scheduler's side of vLLM's KV connectors, including connectors whose workers need a GPU.

Scheduler and connector are vLLM's own, with made-up results of steps. Engines with a real model are in the matrix.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meridian_agent.core.guard import Guard
from meridian_agent.core.phases import Phase
from meridian_agent.core.request_info import PROBE_PREFIX, is_probe
from meridian_agent.engine.queue_order import QueueOrder
from meridian_agent.vllm_adapter import kv_connectors, prefix_cache, request_api
from meridian_agent.vllm_adapter import kv_connectors as connectors
from tests.engine import ENGINE_ARGS
from tests.engine.matrix import connectors as recorder
from tests.processes import ENGINE_ENV

BLOCK = ENGINE_ARGS["block_size"]
# Extra configuration of each connector whose scheduler side can be made without a GPU and without another package.
EXTRA: dict[str, dict[str, Any]] = {
    "ExampleConnector": {},
    "OffloadingConnector": {"cpu_bytes_to_use": 100_000_000},
    "SimpleCPUOffloadConnector": {"cpu_bytes_to_use": 100_000_000},
}
MARKER = 5


def scheduler_with(name: str) -> Any:
    """Return vLLM's scheduler with a connector that records its calls."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec
    from vllm.v1.structured_output import StructuredOutputManager

    extra = {"kv_connector_extra_config": EXTRA[name], "kv_connector_module_path": recorder.PATH}
    transfer = {"kv_connector": f"{recorder.RECORDED}{name}", "kv_role": "kv_both", **extra}
    args = {**ENGINE_ARGS, "disable_hybrid_kv_cache_manager": True}
    del args["disable_log_stats"]
    config = EngineArgs(**args, kv_transfer_config=transfer).create_engine_config()
    config.cache_config.kv_cache_layout = "BLHNC"
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=16, dtype=torch.float32)
    (cache,) = get_kv_cache_configs(config, [{"layer": spec}], [2**24])
    config.cache_config.num_gpu_blocks = cache.num_blocks
    with set_current_vllm_config(config):
        return Scheduler(config, cache, StructuredOutputManager(config), block_size=BLOCK, log_stats=True)


def request(name: str, tokens: int) -> Any:
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    hash_fn = get_hash_fn_by_name("sha256")
    init_none_hash(hash_fn)
    params = SamplingParams(max_tokens=100, ignore_eos=True)
    prompt = [7 + i % 50 for i in range(tokens)]
    hasher = get_request_block_hasher(BLOCK, hash_fn)
    return Request(
        request_id=name, prompt_token_ids=prompt, sampling_params=params, pooling_params=None, block_hasher=hasher
    )


def step(scheduler: Any, counted: Counter[str] | None = None) -> Any:
    """Run a step in which each request generates the token 9; return vLLM's schedule.

    counted: receives vLLM's counts of the requests and tokens looked up at the connector.
    """
    from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

    output = scheduler.schedule()
    ids = list(output.num_scheduled_tokens)
    said = ModelRunnerOutput(
        req_ids=ids,
        req_id_to_index={r: i for i, r in enumerate(ids)},
        sampled_token_ids=[[9] for _ in ids],
        kv_connector_output=KVConnectorOutput(),
    )
    for group in scheduler.update_from_output(output, said).values():
        if counted is not None and group.scheduler_stats is not None:
            stats = group.scheduler_stats.connector_prefix_cache_stats
            counted.update(requests=stats.requests, tokens=stats.queries)
    return output


@pytest.fixture(params=EXTRA)
def scheduler(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    for name, value in {**ENGINE_ENV, recorder.FOLDER: str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MERIDIAN_CONTROL", raising=False)
    recorder.recorded.cache_clear()
    return scheduler_with(request.param)


def run(scheduler: Any, shared: int, counted: Counter[str] | None = None, alone: bool = False) -> list[Any]:
    """Run a request, and a probe that shares `shared` of its tokens, and return the steps.

    alone: the request sits out the probe's step.
    """
    parent = request("parent", shared)
    scheduler.add_request(parent)
    steps = [step(scheduler, counted)]
    probe = request_api.probe_request(parent, f"{PROBE_PREFIX}1", [*parent.all_token_ids, MARKER], parent.num_tokens)
    scheduler.add_request(probe)
    if alone:
        parent.next_decode_eligible_step = scheduler.current_step + 2
    return [*steps, *(step(scheduler, counted) for _ in range(3))]


# The probe gets a block of its own, or the rest of one of the request's blocks.
@pytest.mark.parametrize(("shared", "alone"), [(3 * BLOCK, False), (3 * BLOCK + 7, False), (3 * BLOCK + 7, True)])
def test_a_probe_is_none_of_the_connectors_business(scheduler: Any, shared: int, alone: bool) -> None:
    guard, counted = Guard(), Counter[str]()
    assert kv_connectors.hide_from_connector(scheduler, guard) == ""
    assert prefix_cache.share_blocks(scheduler, lambda r: ("parent", shared) if is_probe(r) else None, guard)
    first, second, *_ = run(scheduler, shared, counted, alone)
    assert guard.fault == ""
    assert first.num_scheduled_tokens == {"parent": shared}
    assert second.num_scheduled_tokens == {f"{PROBE_PREFIX}1": 2} | ({} if alone else {"parent": 1})
    assert [r.req_id for r in second.scheduled_new_reqs] == [f"{PROBE_PREFIX}1"], "the workers do not hear of the probe"
    calls = recorder.calls(governed=False)
    assert {r for call in calls for r in call["requests"] if is_probe(r)} == set()
    assert "parent" in {r for call in calls for r in call["requests"]}
    assert counted == {"requests": 1, "tokens": shared}
    assert list(scheduler.requests) == ["parent"]


@pytest.mark.parametrize("shared", [3 * BLOCK])
def test_without_that_it_is(scheduler: Any, shared: int) -> None:
    """Without hide_from_connector, vLLM tells the connector of the probe, so the test before is not vacuous."""
    run(scheduler, shared)
    named = {call["call"] for call in recorder.calls(governed=False) if f"{PROBE_PREFIX}1" in call["requests"]}
    assert {"get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta"} <= named


def test_a_block_that_a_probe_is_given_is_told_as_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """OffloadingConnector stores freed blocks, and finishes storing a block when the block is allocated again."""
    monkeypatch.setenv(recorder.FOLDER, str(tmp_path))
    scheduler = scheduler_with("OffloadingConnector")
    assert kv_connectors.hide_from_connector(scheduler, Guard()) == ""
    side = scheduler.connector.connector_scheduler
    given, build = list[set[int]](), side._build_store_jobs

    def notes(output: Any) -> Any:
        given.append(set(side._current_batch_allocated_block_ids))
        return build(output)

    # The store jobs are built once all blocks of the step are known.
    monkeypatch.setattr(side, "_build_store_jobs", notes)
    _, second, *_ = run(scheduler, 3 * BLOCK)
    (new,) = second.scheduled_new_reqs
    own = set(new.block_ids[0][3:])
    assert own
    assert own <= given[1]
    assert not given[1] & set(new.block_ids[0][:3]), "blocks of the request are told as overwritten"


def test_every_connector_of_this_vllm_but_one_takes_probes() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

    found = {}
    for name in KVConnectorFactory._registry:
        try:
            made = object.__new__(KVConnectorFactory.get_connector_class_by_name(name))
        except ModuleNotFoundError:
            # LMCache's and MoRI-IO's connectors are in packages of their own.
            continue
        found[name] = connectors.obstacle(made, (KVConnectorBase_V1, SupportsHMA))
    assert len(found) > 10
    refused = "HiSparseConnector moves the KV of every request of a step"
    assert {name: said for name, said in found.items() if said} == {"HiSparseConnector": refused}


def test_a_connector_with_a_method_that_is_not_known_takes_none() -> None:
    """A later vLLM may tell its connectors of requests by another method."""

    class Later:
        def request_paused(self, request: Any) -> None: ...

    said = connectors.obstacle(Later(), (Later,))
    assert said == "the agent does not know Later.request_paused, which passes requests to a connector"


def test_refused_ones_are_found_within_others() -> None:
    hisparse = type("HiSparseConnector", (), {})()
    several = type("MultiConnector", (), {"_connectors": [object(), hisparse]})()
    assert connectors.obstacle(several, ()) == "HiSparseConnector moves the KV of every request of a step"


def test_admission_on_hold_leaves_room_for_requests_that_hold_their_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM admits a request whose KV has arrived before all others, so it must not take a preempted answer's place."""
    monkeypatch.setenv(recorder.FOLDER, str(tmp_path))
    from vllm.v1.request import RequestStatus

    scheduler = scheduler_with("ExampleConnector")
    answer = SimpleNamespace(phase=Phase.OUTPUT, ref=request("answer", 40))
    answer.ref.status = RequestStatus.PREEMPTED
    queues = QueueOrder(SimpleNamespace(answering=1, preempted=[answer]), scheduler)  # type: ignore[arg-type]
    arrived, new = request("arrived", 40), request("new", 40)
    scheduler.kv_holding_waiting.add_request(arrived)
    for one in (answer.ref, new):
        scheduler.waiting.add_request(one)
    scheduler.requests = {one.request_id: one for one in (arrived, answer.ref, new)}
    (limit,) = queues.limits(scheduler, None, True, 0, [])
    assert limit.value == 2
    setattr(limit.owner, limit.name, limit.value)
    assert set(scheduler.schedule().num_scheduled_tokens) == {"arrived", "answer"}
