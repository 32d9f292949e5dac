"""An engine hands requests over only if another engine can read the blocks that it keeps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from meridian_agent.core.guard import Guard
from meridian_agent.core.hand_overs import NO_CONNECTOR
from meridian_agent.vllm_adapter.hand_over import SIGN, HandOverPort, no_hand_over


class NixlPullConnector:
    """The part of vLLM's connector that the agent asks."""

    def __init__(self, use_host_buffer: bool = False) -> None:
        self.connector_scheduler = SimpleNamespace(use_host_buffer=use_host_buffer)


def engine(connector: Any, groups: int = 1, ranks: int = 1, lease_s: int = 30, producer: bool = True) -> Any:
    transfer = SimpleNamespace(kv_connector="Some", kv_role="kv_consumer", is_kv_producer=producer)
    transfer.get_from_extra_config = lambda name, default: lease_s if name == "kv_lease_duration" else default
    parallel = SimpleNamespace(decode_context_parallel_size=ranks, pipeline_parallel_size=1)
    return SimpleNamespace(
        connector=connector,
        vllm_config=SimpleNamespace(kv_transfer_config=transfer, parallel_config=parallel),
        kv_cache_config=SimpleNamespace(kv_cache_groups=[None] * groups),
    )


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (engine(NixlPullConnector()), ""),
        (engine(None), NO_CONNECTOR),
        (engine(object()), "Some keeps no blocks at the end of thinking that others can read"),
        (engine(NixlPullConnector(), producer=False), "kv_role is kv_consumer, not kv_producer or kv_both"),
        (engine(NixlPullConnector(), groups=2), "the model has several KV cache groups"),
        (engine(NixlPullConnector(), ranks=2), "the engine splits the context or the layers among ranks"),
        (engine(NixlPullConnector(), lease_s=5), "kv_lease_duration is 5 s; a reader declines in the last 5 s"),
        (
            engine(NixlPullConnector(use_host_buffer=True)),
            "kv_buffer_device is 'cpu', so another engine would read blocks that are not copied there",
        ),
    ],
)
def test_what_is_in_the_way(made: Any, why: str) -> None:
    assert no_hand_over(made) == why


def test_after_a_fault_nothing_is_left_of_a_request_that_was_handed_over_in_its_step() -> None:
    """No agent takes it, and a later request may have its id."""
    made = engine(NixlPullConnector())
    made.block_size, made.connector.update_state_after_alloc = 32, lambda *_: None
    made.connector.request_finished = lambda *_: (True, {"remote_block_ids": [[4]]})
    made.kv_cache_manager = SimpleNamespace(get_blocks=lambda _: None)
    port = HandOverPort(made, Guard())
    request: Any = SimpleNamespace(
        request_id="r",
        sampling_params=SimpleNamespace(stop_token_ids=None),
        kv_transfer_params=None,
        status=SimpleNamespace(name="FINISHED_STOPPED"),
        output_token_ids=[2],
        num_tokens=9,
        max_tokens=50,
    )
    port.arm(request, "http://b", "ref", [2])
    made.connector.request_finished(request, [4])
    assert request.stop_reason.startswith(SIGN)
    port.disarm_all()
    assert port.take("r") is None
