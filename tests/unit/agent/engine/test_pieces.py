"""The part of a step that each prompt in pieces may take: the rest is for probes, and no part is lost."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from meridian_agent.engine.prefill_limits import leave_room, limit_for, piece_limit
from meridian_agent.vllm_adapter.scheduler_api import piece_limits, wanted_tokens
from tests.reached import reached, reaches


@reaches("pieces that fit", "pieces that are cut")
@given(st.lists(st.integers(1, 500), min_size=1, max_size=6), st.integers(0, 2000))
def test_pieces_share_what_is_left(pieces: list[int], spare: int) -> None:
    """Pieces take all of the room but what cannot be divided, and no piece is cut if all fit."""
    limit = piece_limit(pieces, spare)
    if limit is None:
        assert sum(pieces) <= spare
        reached("pieces that fit")
        return
    reached("pieces that are cut")
    taken = sum(min(piece, limit) for piece in pieces)
    assert spare - len(pieces) < taken <= spare < sum(pieces)


def request(left: int, is_prefill_chunk: bool = False, eligible: int = 0, seed: int | None = None) -> Any:
    return SimpleNamespace(
        num_tokens_with_spec=100 + left,
        num_output_placeholders=0,
        num_computed_tokens=100,
        num_tokens=100 + left,
        is_prefill_chunk=is_prefill_chunk,
        next_decode_eligible_step=eligible,
        sampling_params=SimpleNamespace(seed=seed),
    )


def scheduler(
    *running: Any, threshold: int = 0, drafts: int = 0, device: str = "cuda", images_whole: bool = False, **more: Any
) -> Any:
    config = SimpleNamespace(
        long_prefill_token_threshold=threshold,
        max_num_batched_tokens=64,
        enable_chunked_prefill=True,
        disable_chunked_mm_input=images_whole,
    )
    drafting = SimpleNamespace(max_num_new_slots_for_drafting=1) if drafts else None
    device_config = SimpleNamespace(device_type=device)
    return SimpleNamespace(
        running=list(running),
        requests={str(i): r for i, r in enumerate(running)},
        scheduler_config=config,
        vllm_config=SimpleNamespace(speculative_config=drafting, device_config=device_config),
        current_step=7,
        num_spec_tokens=drafts,
        max_num_scheduled_tokens=64,
        **more,
    )


def room(scheduler: Any, probes: list[int], may_cut: bool = True) -> bool:
    return leave_room(scheduler, wanted_tokens(scheduler), probes, may_cut)


def test_what_running_requests_take() -> None:
    """A request that is left out of the step takes no tokens, and vLLM's own threshold limits each piece."""
    prompt = request(500, is_prefill_chunk=True)
    assert wanted_tokens(scheduler(request(1), request(3), drafts=4)) == (10, []), "the number is an upper bound"
    assert wanted_tokens(scheduler(request(1), request(3), drafts=40)) == (4, [])
    assert wanted_tokens(scheduler(request(1), request(3), request(1, eligible=9), prompt)) == (4, [500])
    assert wanted_tokens(scheduler(request(1), prompt, threshold=40)) == (1, [40])


def test_a_prompt_leaves_what_the_probes_take() -> None:
    crowded = scheduler(request(1), request(1), request(500, is_prefill_chunk=True))
    assert limit_for(crowded, wanted_tokens(crowded), 64, [2, 2]) == 64 - 2 - 4
    assert limit_for(crowded, wanted_tokens(crowded), 32, [2, 2]) == 32 - 2 - 4
    assert room(crowded, [2, 2])
    assert not room(crowded, [2, 2], may_cut=False)
    # vLLM would also cut the probe.
    assert not room(crowded, [2] * 29 + [5])
    drafted = scheduler(request(3), request(3), request(500, is_prefill_chunk=True), drafts=2)
    assert limit_for(drafted, wanted_tokens(drafted), 64, [2]) == 64 - 4 - 6 - 2


def test_a_prompt_that_needs_no_more_is_not_limited() -> None:
    crowded = scheduler(request(1), request(20, is_prefill_chunk=True))
    assert limit_for(crowded, wanted_tokens(crowded), 64, [2]) is None
    assert room(crowded, [2], may_cut=False)
    assert room(scheduler(request(1)), [2], may_cut=False)


def test_no_probe_where_requests_take_the_whole_step() -> None:
    full = scheduler(*[request(1) for _ in range(61)])
    assert room(full, [2], may_cut=False)
    assert not room(full, [2, 2], may_cut=False)


def test_no_prompt_is_cut_where_workers_cannot_draw_a_token_twice() -> None:
    prompt = request(500, is_prefill_chunk=True)
    assert room(scheduler(request(1), prompt, device="cpu"), [2])
    seeded = scheduler(request(1), prompt, request(30, seed=1), device="cpu")
    assert not room(seeded, [2])


def test_no_prompt_is_cut_where_images_must_stay_whole() -> None:
    prompt = request(500, is_prefill_chunk=True)
    assert not room(scheduler(request(1), prompt, images_whole=True), [2])


def test_a_limit_is_not_raised_to_a_fair_share() -> None:
    plain, fair = scheduler(), scheduler(adaptive_long_prefill_threshold=True)
    assert piece_limits(plain, 9) == [(plain.scheduler_config, "long_prefill_token_threshold", 9)]
    assert piece_limits(fair, 9)[1:] == [(fair, "adaptive_long_prefill_threshold", False)]
