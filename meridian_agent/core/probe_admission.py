"""EAT probes: which may be placed now, and what became of those that were. Engine-core thread.

A probe is an internal request over a thinking request's tokens plus the end marker. It shares the request's KV blocks,
the last one by copy-on-write, so it computes the newest token, whose KV is not there yet, and what it appends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from meridian_agent.core.phases import Phase

if TYPE_CHECKING:
    from meridian_agent.core.live_request import LiveRequest

PREFIX = "meridian-probe-"
# Probe tokens of one step, as a share of the step's token budget.
STEP_SHARE = 8
# Running places that admission leaves to probes while they are asked for, as a share of all; fewer than 2 are none.
PLACE_SHARE = 32
# vLLM copies and looks up all tokens of a probe, in the step in which it is placed.
LONGEST_TOKENS = 65_536
# Steps for which places are kept after a probe was asked for.
PLACE_STEPS = 256


@dataclass(slots=True)
class Placed:
    """A probe that is in the engine, and what it has cost so far."""

    decision_id: int
    parent: LiveRequest
    think_tokens: int
    # Tokens whose KV the parent has.
    shared_tokens: int
    cost_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Room:
    """The room that the coming step has to spare.

    sequences: running places left. blocks: free KV blocks, without those for the probes placed in it. tokens: the
    step's token budget. probe_tokens: what these probes take of it.
    """

    sequences: int
    blocks: int
    tokens: int
    prefix_caching: bool
    probe_tokens: int = 0


def reserve(places: int) -> int:
    """Running places to keep for probes, which never take the last one."""
    kept = places // PLACE_SHARE
    return kept if kept > 1 else 0


def free_blocks(cost_tokens: int, block_size: int) -> int:
    """Blocks that must be free for a probe: one is left for every block it takes."""
    return 2 * (cost_tokens // block_size + 2)


def refusal(live: LiveRequest, room: Room, block_size: int, cost_tokens: int) -> str:
    """Why a probe of this request cannot be placed now; empty when it can.

    It never takes the last running place, and leaves at least one free block for every block it takes.
    """
    request = live.ref
    obstacles = (
        (live.state.phase is not Phase.THINK or live.ending is not None, "not thinking"),
        (not room.prefix_caching, "prefix caching is off"),
        (request.num_tokens > LONGEST_TOKENS, f"over {LONGEST_TOKENS} tokens"),
        (getattr(request, "lora_request", None) is not None, "LoRA request"),
        (bool(getattr(request, "mm_features", None)), "multimodal prompt"),
        (getattr(request, "prompt_embeds", None) is not None, "prompt embeddings"),
        (live.preempted or request.is_prefill_chunk or request.num_computed_tokens == 0, "not decoding"),
        (room.sequences < 2, "no running place to spare"),
        (room.blocks < free_blocks(cost_tokens, block_size), "no KV blocks to spare"),
        (room.probe_tokens + cost_tokens > room.tokens // STEP_SHARE, "over the step's probe budget"),
    )
    return next((reason for holds, reason in obstacles if holds), "")
